"""Loops over a divided dimension, carries, and decisions that differ."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checker._dataflow import walk_closed
from spmd.checker._state import OWN
from tests.checker.harness import AXES, Inside, seen, suspicions, trace, varying

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def total(x):
    return lax.scan(lambda c, r: (c + r, None), varying(jnp.zeros(x.shape[1])), varying(x))[0]


LOOPS = {
    "rows that are put together again": (lambda x: lax.scan(lambda c, r: (c, jnp.sin(r)), 0.0, x)[1], {"a/dp b": True}),
    "a carry through a piece": (total, {"a/dp b": False}),
    "a carry through a whole": (total, {"a b/tp": True}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_a_divided_dimension(name):
    body, [(layout, known)] = LOOPS[name][0], list(LOOPS[name][1].items())
    found = seen(body, layout, args=(X,))
    assert found.agree() == known and found.kinds == []
    assert known or "recurrence" in {p.kind for p in found.states[0].pending}


@pytest.mark.parametrize("axis", AXES)
def test_a_decision_of_a_piece_divides_what_it_decides(axis):
    """Branches that differ along an axis may meet collectives of other axes only."""

    def body(x, w):
        return lax.cond((x > 0).any(), lambda: w * lax.pmax(w.sum(), axis), lambda: w)

    found = seen(body, "a/dp b", "a b", args=(X, W))
    assert found.kinds == (["divergent"] if axis == "dp" else [])
    assert "dp" in found.states[0].axes and "tp" not in found.states[0].axes


PRODUCTS = {
    "*": lambda p, q: q * p,
    "@": lambda p, q: q @ p,
    "einsum": lambda p, q: jnp.einsum("...ij,...jk->...ik", q, p),
    "vmap": jax.vmap(lambda p, q: q @ p),
    "solve": lambda p, q: jnp.linalg.solve(q, p),
    "inv": lambda p, q: jnp.linalg.inv(q) @ p,
    "pairs": lambda p, q: (q[0] @ p[0], (q[0] @ p[1][..., None])[..., 0] + q[1]),
}
MATRICES = np.random.default_rng(2).normal(size=(24, 2, 2)).astype(np.float32) + 4 * np.eye(2, dtype=np.float32)


@pytest.mark.parametrize("of", [2, 3, 4, 6], ids="{} a device".format)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_scan_of_each_piece_is_suspected(name, of):
    """`associative_scan` takes single elements out of a block of two, and puts them beside slices of it."""
    rows = MATRICES[: 4 * of]
    given = (rows, rows[:, 0]) if name == "pairs" else rows
    kernel = spmd.kernel("t/tp ... -> t/tp ...", mesh=spmd.make_mesh(tp=4))
    found = suspicions(kernel(lambda x: lax.associative_scan(PRODUCTS[name], x)), given)
    assert found and {one.kind for one in found} == {"pending"}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_scan_of_a_whole_is_none(name):
    rows = MATRICES[:8]
    given = (rows, rows[:, 0]) if name == "pairs" else rows
    kernel = spmd.kernel("t ... -> t ...", mesh=spmd.make_mesh(tp=4))
    assert suspicions(kernel(lambda x: lax.associative_scan(PRODUCTS[name], x)), given) == []


ALONE = {
    "squeezed": lambda x: x.squeeze(0),
    "reshaped": lambda x: x.reshape(x.shape[1:]),
    "picked": lambda x: x[0],
    "picked at an index": lambda x: lax.dynamic_index_in_dim(x, 0, 0, keepdims=False),
    "spread": lambda x: jnp.broadcast_to(x, (3, *x.shape[1:]))[2],
}


@pytest.mark.parametrize("name", ALONE)
def test_an_element_of_a_block_completes_nothing(name):
    """It differs, and nobody has sent it: a slice that meets it is a slice still. What a neighbour sent may be a halo."""

    def body(one, x, w):
        own, piece = ALONE[name](one), x[0]
        other = lax.ppermute(x[:1], "dp", [(0, 1), (1, 0)])[0]
        chosen = lax.cond(own[0] > 0, lambda: piece, lambda: varying(w[0], "dp"))
        return [varying(y)[None] for y in (own + piece, other + piece, jnp.where(own > 0, piece, w[0]), chosen)]

    walk = Inside("kernel", AXES)
    walk_closed(walk, trace(body, P("dp"), P("dp"), P(), args=(X[:2], X, X)))
    states = walk.outputs[-1][1]
    assert [{p.kind for p in state.pending} - {OWN} for state in states] == [{"slice"}, set(), {"slice"}, {"slice"}]
    assert walk.findings == [] and all("dp" in state.axes for state in states)


def test_a_mistake_in_the_first_round_of_a_loop_is_told():
    """From the second round on the carry is unknown, because of it."""
    found = seen(lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c), x.sum(0)), "a/dp b", args=[X])
    assert found.kinds == ["nonlinear"]
