"""Bodies from outside: what goes in, what comes out, and what is known again where it enters another one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._state import State, plain
from tests.checker.harness import AXES, mesh

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def mapped(body, ins, outs, **how):
    return jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, **how)


def walked(fn, *args, axes=AXES, states=None):
    walk = Dataflow("kernel", axes)
    outs = walk_closed(walk, jax.jit(fn).trace(*args).jaxpr, states)
    return walk, outs


def kinds(fn, *args, axes=()):
    return [(one.kind, one.certain) for one in walked(fn, *args, axes=axes)[0].findings]


def test_a_partial_sum_may_not_leave():
    part = mapped(lambda x: x.sum(0), P("dp"), P("dp"))
    whole = mapped(lambda x: lax.psum(x.sum(0), "dp"), P("dp"), P())
    assert kinds(part, X, axes=AXES) == [("partial", True)] and kinds(whole, X, axes=AXES) == []


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


def test_what_left_a_body_is_known_in_the_next():
    """As JAX's residuals do: a partial sum that leaves for the same place is one again; in another place nobody knows."""
    seen = []

    class Looking(Dataflow):
        def _entered(self, state, spec, var):
            found = super()._entered(state, spec, var)
            seen.append(found)
            return found

        def _check_returned(self, eqn, outs):
            pass

    def program(again):
        first = mapped(lambda x: lax.psum(x.sum(1), "dp") * 1.0, P("dp", "tp"), P("tp"))
        second = mapped(lambda y: y * 2.0, again, again)
        return lambda x: second(first(x))

    for again, partial in ((P("tp"), {"tp"}), (P("dp"), set())):
        seen.clear()
        walk_closed(Looking("kernel", AXES), jax.jit(program(again)).trace(X).jaxpr)
        assert set(seen[-1].partial) == partial


def test_outside_values_are_whole():
    walk, [out] = walked(mapped(lambda x: x * 2.0, P("dp", "tp"), P("dp", "tp")), X)
    assert out.axes == frozenset() and out.dims == (plain(8), plain(8)) and walk.active is False
    _, [kept] = walked(lambda x: x + 1.0, X, states=[State((plain(8), plain(8)), different=frozenset(["ep"]))])
    assert kept.different == {"ep"}, "axes of a mesh around it stay"


def test_axes_of_the_mesh_that_are_not_manual_say_nothing():
    some = mapped(lambda x: x.sum(0), P("dp"), P("dp"), axis_names={"dp"})
    walk, _ = walked(some, X)
    assert walk.sizes == {"dp": 2}


@pytest.mark.parametrize("complete", [True, False])
def test_a_body_in_a_body(complete):
    """The inner one has its own axes, and the outer ones stay as they are."""

    def inner(x):
        finish = (lambda y: lax.psum(y, "tp")) if complete else (lambda y: y)
        rows = jax.shard_map(lambda y: finish(y.sum(1)), in_specs=P(None, "tp"), out_specs=P() if complete else P("tp"), axis_names={"tp"})  # fmt: skip
        return rows(x).sum()[None]

    outer = mapped(inner, P("dp"), P("dp"), axis_names={"dp"})
    walk, _ = walked(outer, X)
    assert [one.kind for one in walk.findings if one.kind == "partial"] == ["partial"] * (not complete)
