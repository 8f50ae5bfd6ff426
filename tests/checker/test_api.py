"""A body inlined in the user's own shard_map: inputs are what JAX's types say, or what the kernel says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd.checker import check_body
from spmd.errors import ReplicationError
from tests.checker.harness import AXES, mark, mesh

SIZES = {"dp": 2, "tp": 4}


def body(x, w):
    y = mark(x @ w, "a/dp b {U:tp}", "result")
    return mark(lax.psum(y, "tp"), "a/dp b", "output")


def wrong(x, w):
    return mark(x @ w, "a/dp b", "output")


def checked(fn, x=P("dp", "tp"), w=P("tp")):
    """Check `fn` where a kernel would: while the user's shard_map is traced."""

    def outer(x, w):
        jaxpr = jax.make_jaxpr(fn)(x, w)
        check_body(jaxpr, [x, w], mesh_axes=AXES, kernel="inner", axis_sizes=SIZES)
        return fn(x, w)

    run = jax.shard_map(outer, mesh=mesh(), in_specs=(x, w), out_specs=P("dp"))
    jax.jit(run).trace(jnp.ones((8, 8)), jnp.ones((8, 8)))


def test_types_seed_the_inputs() -> None:
    checked(body)
    with pytest.raises(ReplicationError, match="input 0, which varies over dp, tp"):
        checked(lambda x, w: lax.psum(wrong(x, w), "tp"))


def test_an_input_that_is_equal_holds_no_terms() -> None:
    with pytest.raises(ReplicationError, match="says that each device along tp holds one term"):
        checked(lambda x, w: lax.psum(mark(x @ w, "a/dp b {U:tp}"), "tp"), P("dp"), P())


def test_values_closed_over_are_known_by_their_types() -> None:
    known = {"mesh_axes": AXES, "kernel": "inner", "axis_sizes": SIZES}

    def outer(x, w):
        later = lambda y: mark(jnp.tanh(y + x) @ w, "a/dp b/tp")  # blocks of what nobody knows: of anything
        check_body(jax.make_jaxpr(later)(x), [x], **known)
        with pytest.raises(ReplicationError, match="differs along dp and tp"):
            check_body(jax.make_jaxpr(lambda: mark(x, "a b"))(), [], **known)
        with pytest.raises(ReplicationError, match="every device along dp holds the same block"):
            check_body(jax.make_jaxpr(lambda: mark(w, "a/dp b"))(), [], **known)
        return x

    jax.jit(jax.shard_map(outer, mesh=mesh(), in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp", "tp"))).trace(
        jnp.ones((8, 8)), jnp.ones((8, 8))
    )
