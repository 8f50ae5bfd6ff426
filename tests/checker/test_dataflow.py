"""Raw bodies: what goes in, what comes out, and what is known again where it enters another one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from tests.checker.harness import mesh

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def mapped(body, ins, outs, **how):
    return jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, **how)


def kinds(fn, *args):
    return [(one.kind, one.certain) for one in spmd.check(fn, *args)]


def test_raw_specs_claim_less_than_strings():
    """One result per device is legal where nobody gave a string. What was done to pieces may be meant."""
    pieces = mapped(lambda x: jnp.sort(x, 0), P("dp"), P("dp"))
    assert kinds(pieces, X) == [("pending", False)]
    turned = mapped(lambda x: x.T, P("dp", "tp"), P("dp", "tp"))
    assert kinds(turned, X) == [("layout", False)]
    assert kinds(mapped(lambda x: x.T, P("dp", "tp"), P("tp", "dp")), X) == []
    per_shard = spmd.per_shard("runs")(lambda x: jnp.sort(x, 0))
    assert kinds(mapped(per_shard, P("dp"), P("dp")), X) == []


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_what_only_a_derivative_reads_is_not_a_result(wrap):
    """JAX keeps maxima of blocks and the like for the backward pass of a ring."""

    def ring(q, k):
        largest = jnp.full_like(q[:, 0], -jnp.inf)
        for _ in range(2):
            largest = jnp.maximum(largest, (q @ k.T).max(1))
            k = lax.ppermute(k, "dp", [(0, 1), (1, 0)])
        return largest

    body = wrap(mapped(ring, (P("dp"), P("dp")), P("dp")))
    assert kinds(jax.grad(lambda q, k: body(q, k).sum(), (0, 1)), X, X) == []
    pieces = wrap(mapped(lambda x: lax.cummax(x, 0), P("dp"), P("dp")))
    value = jax.value_and_grad(lambda x: pieces(x).sum())
    assert ("pending", False) in kinds(value, X)


def test_the_derivative_of_a_sort_counts_places_in_the_piece():
    pieces = mapped(lambda x: jnp.sort(x, 0), P("dp"), P("dp"))
    assert kinds(jax.value_and_grad(lambda x: pieces(x).sum()), X) == [("pending", False)]


@pytest.mark.parametrize("complete", [True, False])
def test_a_body_in_a_body(complete):
    """The inner one has its own axes. Terms of a sum that it returns as blocks are added up outside, curved."""

    def inner(x):
        finish = (lambda y: lax.psum(y, "tp")) if complete else (lambda y: y)
        rows = jax.shard_map(lambda y: jnp.sin(finish(y.sum(1))), in_specs=P(None, "tp"), out_specs=P() if complete else P("tp"), axis_names={"tp"})  # fmt: skip
        return rows(x).sum()[None]

    outer = mapped(inner, P("dp"), P("dp"), axis_names={"dp"})
    assert [kind for kind, _ in kinds(outer, X)] == ([] if complete else ["nonlinear"])
