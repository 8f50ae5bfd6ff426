"""Which block each device holds, against plain cutting of index ranges."""

import jax
import numpy as np
import pytest

from spmd.errors import SizeError
from spmd.inspect._blocks import known_sizes, of_indices, of_layout
from spmd.language import Layout
from tests.inspect.drawings import expected_index

MESH = {"dp": 2, "tp": 4}


def holdings(layout, mesh, **sizes):
    return of_layout(Layout(layout), sizes, mesh, call="f")


@pytest.mark.parametrize("layout", ["b/dp d", "b/dp/tp d", "b/tp/dp d", "b/tp d/dp", "b d", "b/dp d {U:tp}"])
def test_each_device_holds_its_cut(mesh, layout):
    found = holdings(layout, mesh, b=8, d=16)
    wanted = expected_index(Layout(layout), (8, 16), MESH)
    for block, ranges in zip(found.held.tolist(), wanted, strict=True):
        pieces = [side.blocks[number][0] for side, number in zip(found.sides, block, strict=True)]
        assert [(one.start, one.stop) for one in pieces] == [(run.start, run.stop) for run in ranges]
    assert found.local_shape == tuple(map(len, wanted[0]))


def test_copies_and_summands_are_told_apart(mesh):
    assert holdings("b/dp", mesh, b=8).cells == {(0,): ((0,), (1,), (2,), (3,)), (1,): ((4,), (5,), (6,), (7,))}
    assert holdings("b/dp {U:tp}", mesh, b=8).cells == {(0,): ((0, 1, 2, 3),), (1,): ((4, 5, 6, 7),)}


def test_without_sizes_blocks_have_numbers(mesh):
    found = holdings("b/dp d", mesh)
    assert [side.text(0) for side in found.sides] == ["block 0", "all"] and found.local_shape is None


def test_divided_factors_are_scattered_pieces(mesh):
    found = holdings("(b/dp s/tp)", mesh, b=2, s=8)
    assert found.sides[0].text(5) == "b 1:2, s 2:4" and found.local_shape == (2,)
    assert found.notes == ("(b/dp s/tp): a device holds scattered pieces of the dimension, 1 run of 2",)


def test_jax_own_indices_are_read(mesh):
    sharding = jax.NamedSharding(mesh, Layout("b/tp d/dp").spec)
    indices = {device.id: index for device, index in sharding.devices_indices_map((8, 6)).items()}
    found, wanted = of_indices((8, 6), indices, kind=""), holdings("b/tp d/dp", mesh, b=8, d=6)
    assert found.block_of == wanted.block_of and found.local_shape == wanted.local_shape == (2, 3)


def test_sizes_come_by_name_or_by_position():
    layout = Layout("b/dp d")
    assert known_sizes(layout, {"d": np.int32(4)}, "f") == ({"d": 4}, None)
    assert known_sizes(layout, (8, 4), "f") == ({}, [8, 4])
    for wrong in ({"b": 2.5}, (8, -1), {"q": 4}, (True, 4)):
        with pytest.raises(SizeError):
            known_sizes(layout, wrong, "f")
