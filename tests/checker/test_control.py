"""Loops over a divided dimension, carries, and decisions that differ."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.checker.harness import AXES, seen, varying

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


def test_a_mistake_in_the_first_round_of_a_loop_is_told():
    """From the second round on the carry is unknown, because of it."""
    found = seen(lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c), x.sum(0)), "a/dp b", args=[X])
    assert found.kinds == ["nonlinear"]
