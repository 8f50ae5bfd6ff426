"""How parameters lie: what is divided passes, what is not is told leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.testing import (
    Mismatch,
    assert_sharded,
)
from tests.testing.harness import message


def params(mesh, w="d/dp f/tp", norm="d"):
    at = lambda layout, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spmd.Layout(layout).sharding(mesh))
    return {"layer": {"w": at(w, 512, 256), "norm": at(norm, 512)}, "head": at("d/dp v/tp", 512, 1024)}


INTENDED = {"layer": {"w": "d/dp f/tp", "norm": "d"}, "head": "d/dp v/tp"}


def test_parameters_are_divided(mesh):
    assert_sharded(params(mesh))
    assert_sharded(params(mesh), layouts=INTENDED)
    assert_sharded(params(mesh, w="f/tp d/dp"), layouts=INTENDED)  # over the same axes
    assert_sharded(params(mesh, w="d f/tp"), axes=("tp",))
    assert_sharded(params(mesh, w="d f/tp"), layouts=INTENDED, tolerance=0.6)
    assert_sharded(params(mesh, w="d f/tp"), layouts={"layer": {"w": "d f/tp", "norm": "d"}, "head": "d/dp v/tp"})
    assert_sharded({})
    mapping = {"d": "dp", "f": "tp", "v": "tp"}
    assert_sharded(params(mesh), layouts={"layer": {"w": "d f", "norm": "d/1"}, "head": "d v"}, mapping=mapping)
    x = spmd.shard(np.ones((8, 4), np.float32), "a/dp b/tp", mesh=mesh)
    assert_sharded({"x": x}, layouts="a/dp b/tp")
    state = optax.adamw(1e-3).init({"x": x})  # its count is a number on one device
    assert_sharded(state)
    assert_sharded({"x": x, "state": state}, 0.01, layouts="a/dp b/tp")


def test_parameters_that_are_not(mesh):
    assert message(assert_sharded, params(mesh, w="d f/tp"), layouts=INTENDED) == GOLDEN["intended"]
    assert message(assert_sharded, params(mesh, w="d f/tp")) == GOLDEN["share"]
    mapping = {"d": "dp", "f": "tp", "v": "tp"}
    with pytest.raises(Mismatch, match="norm"):
        assert_sharded(
            params(mesh), layouts={"layer": {"w": "d f", "norm": "d"}, "head": "d v"}, mapping=mapping, tolerance=0
        )
    with pytest.raises(Mismatch):
        assert_sharded(params(mesh), tolerance=0.0)  # the norm is whole
    many = {f"w{i}": params(mesh, w="d f")["layer"]["w"] for i in range(30)}
    assert "and 10 more" in message(assert_sharded, many)


GOLDEN = {
    "intended": """\
1 of 3 leaves are not divided over an axis of their layout, and one device holds 64 KiB more than the intended 322 KiB.
leaf                shape    expected   lies as  not over  expected     held
tree['layer']['w']  512x256  d/dp f/tp  _ _/tp   dp          64 KiB  128 KiB""",
    "share": """\
One device holds 386 KiB of parameters, 20.5% more than its share of 320.2 KiB over dp, tp; 2.0% are allowed.
leaf                   shape    lies as  not over  its share     held
tree['layer']['w']     512x256  _ _/tp   dp           64 KiB  128 KiB
tree['layer']['norm']  512      _        dp, tp        256 B    2 KiB""",
}
