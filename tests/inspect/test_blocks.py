"""Which block each device holds, against plain cutting of index ranges."""

import jax
import numpy as np
import pytest

import spmd
from spmd.errors import SizeError
from spmd.inspect._blocks import (
    block_grids,
    device_runs,
    facts,
    is_summary,
    known_sizes,
    mesh_grid,
    of_indices,
    of_layout,
    tints,
)
from spmd.language import Layout
from tests.inspect.drawings import expected_index
from tests.sampler import Sampler, seeds

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


# -------------------- pictures as grids of cells: every device and every block once, however a grid is cut


def held_by(layout: str, mesh: dict[str, int], **sizes: int):
    return of_layout(Layout(layout), sizes, spmd.make_mesh(**mesh, abstract=True), call="f")


@pytest.mark.parametrize("devices", [[0, 1, 2, 3, 8], [0, 1], [3], [7, 6, 5], [0, 2, 4], [1, 2, 3, 5, 6, 9, 10, 11]])
def test_runs_of_devices_are_read_back(devices):
    read = []
    for text in device_runs(devices):
        first, _, last = text.partition("-")
        assert not last or int(last) - int(first) >= 2, "two neighbours stay two numbers"
        read += range(int(first), int(last or first) + 1)
    assert read == devices


@pytest.mark.parametrize("seed", seeds(times=2))
def test_each_device_stands_in_its_block(seed):
    sampler = Sampler(seed)
    mesh = sampler.mesh()
    text = sampler.layout("a b c", mesh)
    shape = tuple(sampler.sizes("a b c", mesh, [text]).values())
    holdings = held_by(text, mesh, **dict(zip("abc", shape, strict=True)))
    colours = tints(holdings)
    cells = [cell for line in block_grids(holdings, colours) for grid in line for row in grid.cells for cell in row]
    held = {device: cell for cell in cells for device in cell.devices}
    count = int(np.prod(list(mesh.values())))
    assert sorted(device for cell in cells for device in cell.devices) == list(range(count))
    for device, index in enumerate(expected_index(Layout(text), shape, mesh)):
        for run in index:
            assert f"{run.start}:{run.stop}" in held[device].index
    shown = [cell for row in mesh_grid(holdings, colours).cells for cell in row]
    assert [cell.devices for cell in shown] == [(device,) for device in range(count)]
    assert all(cell.colour == held[cell.devices[0]].colour for cell in shown), "one colour for a block in both grids"
    assert len({cell.colour for cell in cells}) == len(cells), "and another one for another block"


def test_many_devices_are_summed_up():
    """The first two blocks, dots, and the last one, along each dimension."""
    holdings = held_by("a/x b/y", {"x": 16, "y": 16}, a=32, b=32)
    assert is_summary(holdings) and not is_summary(held_by("a/x", {"x": 64}, a=64))
    [[grid]] = block_grids(holdings, tints(holdings))
    assert grid.rows == ("0:2", "2:4", "...", "30:32") and grid.columns == grid.rows
    assert [cell.lines for cell in grid.cells[2]] == [("...",)] * 4
    assert any("256 devices hold 256 different blocks" in one for one in facts(holdings))


def test_sentences():
    holdings = held_by("a/x b", {"x": 2, "y": 2}, a=4, b=3)
    found = facts(holdings)
    assert "each device holds a shard of 2 x 3" in found[0] + found[1]
    assert any("equal copies (along y)" in one for one in found)
