"""`spmd.haliax`: what a mapping says of a name: its axes, their sizes, shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd import haliax as hax

RULES = {"batch": "data", "embed": None, "mlp": "tp", "vocab": ("tp", "data")}
X = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(data=2, tp=4)


def test_queries(mesh):
    with hax.axis_mapping(RULES), jax.set_mesh(mesh):
        assert [hax.physical_axis_name(n) for n in RULES] == ["data", None, "tp", ("tp", "data")]
        assert [hax.physical_axis_size(n) for n in RULES] == [2, None, 4, 8]
        assert [hax.round_axis_for_partitioning(n, 13) for n in RULES] == [14, 13, 16, 16]
        assert hax.round_axis_for_partitioning("vocab", 16) == 16
        assert hax.sharding_for_axis("vocab embed") == NamedSharding(mesh, P(("tp", "data"), None))
        assert hax.pspec_for({"w": "embed mlp", "b": ["mlp", "batch"]}) == {
            "w": P(None, "tp"),
            "b": [P("tp"), P("data")],
        }
        assert jax.device_put(X, hax.sharding_for_axis("batch mlp")).sharding.spec == P("data", "tp")
    given = (RULES, spmd.make_mesh(data=1, tp=8))
    assert hax.physical_axis_size("vocab", *given) == 8 and hax.physical_axis_size("batch", *given) == 1
    assert hax.round_axis_for_partitioning("mlp", 9, *given) == 16
    abstract = spmd.make_mesh(data=128, tp=16, abstract=True)
    assert hax.round_axis_for_partitioning("vocab", 50257, RULES, abstract) == 51200
    assert hax.physical_axis_size("embed", {"embed": "data"}, {"data": 2}) == 2  # sizes alone


def test_what_was_rounded_divides(mesh):
    for size in (1, 7, 8, 23):
        rows = hax.round_axis_for_partitioning("vocab", size, RULES, mesh)
        assert rows >= size and rows - size < 8
        hax.shard(jnp.zeros((rows, 2)), "vocab embed", RULES, mesh)


def test_a_missing_mesh_is_an_error():
    for ask in (
        lambda: hax.shard(X, "batch embed", RULES),
        lambda: jax.jit(lambda x: hax.shard(x, "batch embed", RULES))(X),
        lambda: hax.named_jit(lambda x: x, RULES, in_names=("batch embed",))(X),
        lambda: hax.sharding_for_axis("batch", RULES),
    ):
        with pytest.raises(spmd.errors.MeshError, match="no mesh"):
            ask()
