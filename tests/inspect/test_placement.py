"""Where arrays outside kernels lie, and what a change of place sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.inspect._program import (
    ANYWHERE,
    ONE_DEVICE,
    local_count,
    moved_bytes,
    names_of,
    of_sharding,
    of_spec,
    text_of,
    with_others,
)
from spmd.language import Layout

SIZES = {"dp": 2, "tp": 4, "one": 1}
F32 = np.dtype("float32")


def test_a_spec_is_a_placement_of_every_dimension():
    assert of_spec(P("dp", None, ("tp", "one")), 4, SIZES) == (("dp",), (), ("tp",), ())
    assert of_spec(P(P.UNCONSTRAINED), 1, SIZES) is None


def test_a_sharding_of_another_mesh_says_nothing(mesh):
    assert of_sharding(jax.NamedSharding(mesh, P("tp")), 2, SIZES) == (("tp",), ())
    assert of_sharding(jax.NamedSharding(mesh, P("tp")), 2, {"dp": 2, "tp": 8}) is None
    assert of_sharding(jnp.ones(2).sharding, 1, SIZES) == ONE_DEVICE


def test_axes_that_a_shard_map_does_not_name_stay():
    assert with_others((("tp",), ()), (("dp",), ()), ["tp"], SIZES) == (("tp", "dp"), ())
    assert with_others((("tp",), ()), None, ["tp"], SIZES) is None
    assert with_others((("tp",), ()), None, ["tp", "dp"], SIZES) == (("tp",), ())


def test_placements_are_written_as_layouts():
    assert text_of((("dp",), ())) == "_/dp _" and text_of(()) == "scalar" and text_of(ANYWHERE) == ANYWHERE
    assert names_of(Layout("b/dp (h/tp k)"), 2) == ("b", "(h k)")


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        ((("dp",), ()), (("dp",), ()), 0),
        ((("dp",), ()), ((), ()), 8 * 4 * 4 // 2),  # the other half arrives; each device sends its own
        ((("tp",), ()), ((), ("tp",)), 8 * 4 * 4 // 4 * 3 // 4),  # an all_to_all
        (ONE_DEVICE, (("dp",), ()), 8 * 4 * 4 // 2),
        (None, (("dp",), ()), None),
        (((), ("tp",)), (("dp", "tp"), ()), 8 * 4 * 4 // 8 - 4),
    ],
)
def test_bytes_of_a_move(source, target, sent):
    assert moved_bytes((8, 4), F32, source, target, SIZES) == sent


def test_a_device_holds_its_share():
    assert local_count((8, 4), (("dp", "tp"), ()), SIZES) == 4 and local_count((8, 4), None, SIZES) == 32
    assert local_count((7,), (("dp",),), SIZES) == 4
