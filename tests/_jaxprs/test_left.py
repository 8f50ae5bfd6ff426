"""Which mesh axes bodies leave to the compiler, read off a program."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import spmd
from spmd._jaxprs.facts import left_axes, left_text

MESH = spmd.make_mesh(dp=2, tp=4, pp=1, abstract=True)


def mapped(fn, over, spec=P()):
    return jax.shard_map(fn, mesh=MESH, in_specs=spec, out_specs=spec, axis_names=set(over))


def jaxpr(fn):
    return jax.make_jaxpr(fn)(jnp.ones((8, 8)))


def test_axes_that_no_shard_map_makes_manual():
    def shards(x):
        return 2 * x

    def program(x):
        return jax.lax.scan(lambda x, _: (mapped(shards, ("tp", "pp"))(x), None), x, length=2)[0]

    assert left_axes(jaxpr(program)) == {"dp": ("shards",)}
    assert left_text({"dp": ("f", "g")}) == ["dp is the compiler's in f, g"]


def test_nested_ones_count_together():
    def program(x):
        rest = jax.shard_map(lambda x: x + 1, in_specs=P(), out_specs=P(), axis_names={"tp", "pp"})
        return mapped(rest, ("dp",))(x)

    assert left_axes(jaxpr(program)) == {}
    assert left_axes(jaxpr(mapped(lambda x: x + 1, ("dp", "tp", "pp")))) == {}
    assert left_axes(jaxpr(jnp.sin)) == {}
