"""Sums that run too often: each hint is followed, the numbers stay, and the bytes become what it said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import explain
from spmd.inspect import collectives
from tests.inspect.harness import DEVICES


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def micro_batches(defers):
    """A loss of eight micro-batches, whose weight is whole along dp."""

    @spmd.kernel("m b/dp d, d f -> scalar", mesh=DEVICES)
    def loss(x, w):
        if defers:
            w = spmd.defer(w, "... -> ... {R:dp}")
        step = lambda total, rows: (total + jnp.tanh(rows @ w).sum(), None)
        return spmd.psum(jax.lax.scan(step, 0 * x.sum(), x)[0], "{U:dp} -> scalar")

    return jax.grad(loss, argnums=1), (random(8, 16, 32), random(32, 16))


def gathered_rows(defers):
    """Rows of x meet weights that tp divides."""

    @spmd.kernel("n d, k, d f/tp -> scalar", mesh=DEVICES)
    def loss(x, rows, w):
        if defers:
            x = spmd.defer(x, "... -> ... {R:tp}")
        return spmd.psum(jnp.tanh(x[rows] @ w).sum(), "{U:tp} -> scalar")

    return jax.grad(loss), (random(8, 32), np.arange(128, dtype=np.int32) % 8, random(32, 16))


@pytest.mark.parametrize("make, kind, times", [(micro_batches, "often", 8), (gathered_rows, "large", 1)])
def test_a_gradient_that_is_summed_too_often_or_too_large(make, kind, times):
    fn, args = make(False)
    [hint] = explain(fn, *args).hints
    assert (hint.kind, hint.times) == (kind, times) and "spmd.defer(x, " in hint.advice
    assert hint.where.startswith("test_hints.py:")
    better, _ = make(True)
    np.testing.assert_allclose(jax.jit(fn)(*args), jax.jit(better)(*args), rtol=1e-5, atol=1e-5)
    before, after = (collectives(one, *args).by_kind()["psum"].total_bytes for one in (fn, better))
    assert before - after == hint.bytes - hint.least > 0
    assert explain(better, *args).hints == ()


def added(waits):
    @spmd.kernel("m b/dp d -> d", mesh=DEVICES)
    def total(x):
        if waits:
            carried, _ = jax.lax.scan(lambda total, rows: (total + rows.sum(0), None), 0 * x[0].sum(0), x)
            return spmd.psum(carried, "d {U:dp} -> d")
        add = lambda total, rows: (total + spmd.psum(rows.sum(0), "d {U:dp} -> d"), None)
        return jax.lax.scan(add, spmd.zeros("d", d=32), x)[0]

    return total, (random(6, 16, 32),)


def test_a_sum_in_a_loop_that_only_adds_it_up():
    often, args = added(False)
    [hint] = explain(often, *args).hints
    assert hint.kind == "often" and "runs 6 times, and once behind the loop suffices" in str(hint)
    assert "sums that may wait" in str(explain(often, *args)) and explain(often, *args).to_dict()["hints"]
    once, _ = added(True)
    np.testing.assert_allclose(often(*args), once(*args), rtol=1e-5, atol=1e-5)
    assert collectives(once, *args).total_bytes == hint.least < hint.bytes == collectives(often, *args).total_bytes


def test_sums_that_cannot_wait():
    @spmd.kernel("m b/dp d, d -> d, m", mesh=DEVICES)
    def needed(x, start):
        """Each round needs the sum of the one before."""

        def step(total, rows):
            return total + spmd.psum((rows * 2).sum(0), "d {U:dp} -> d"), total.max()

        return jax.lax.scan(step, start, x)

    @spmd.kernel("m b/dp d -> d", mesh=DEVICES)
    def curved(x):
        step = lambda total, rows: (total + jnp.tanh(spmd.psum(rows.sum(0), "d {U:dp} -> d")), None)
        return jax.lax.scan(step, spmd.zeros("d", d=32), x)[0]

    assert explain(needed, random(6, 16, 32), random(32)).hints == ()
    assert explain(curved, random(6, 16, 32)).hints == ()


def test_a_factor_that_differs_keeps_a_sum_where_it_is():
    @spmd.kernel("b/dp d -> b/dp", mesh=DEVICES)
    def scaled(x):
        return x @ spmd.psum(x.sum(0), "d {U:dp} -> d")

    assert explain(scaled, random(8, 32)).hints == ()


@pytest.mark.parametrize(
    "then, found", [(jnp.sum, ["large"]), (jax.jit(jnp.sum), ["large"]), (lambda y: (y * y).sum(), [])]
)
def test_a_sum_is_followed_into_calls_and_not_through_a_product_with_itself(then, found):
    @spmd.kernel("d/dp f -> scalar", mesh=DEVICES)
    def total(w):
        return then(spmd.psum(w.sum(0), "f {U:dp} -> f"))

    assert [one.kind for one in explain(total, random(16, 4), compiled=False).hints] == found
