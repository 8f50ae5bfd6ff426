"""What a loop need not do in each round, a frozen loop does once, if that is right and sends less."""

import functools

import jax
import jax.numpy as jnp
import pytest

from spmd import propagate
from tests.propagation.frozen import compare, enter
from tests.sampler import share

ONCE = {}
once = functools.partial(enter, ONCE)


@once("l b/dp d, d f/tp, f/tp d")
def sums_of_gradients(x, w, v):
    loss = lambda ws, x: jnp.sum((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

    def add(total, x):
        found, slopes = jax.value_and_grad(loss)((w, v), x)
        return jax.tree.map(jnp.add, total, (found, slopes)), found

    return jax.lax.scan(add, (0.0, (jnp.zeros_like(w), jnp.zeros_like(v))), x)


@once("l b/dp d, d/dp f/tp")
def sums_in_loops(x, w):
    outer = lambda total, i: jax.lax.fori_loop(0, 2, lambda j, t: t - jnp.tanh(x[i] @ w).sum(0) / 3, total)
    return jax.lax.fori_loop(0, 3, lambda i, t: t + 2 * outer(jnp.zeros(64), i), jnp.zeros(64))


@once("b/dp d")
def means_and_variances(x):
    def step(carry, i):
        mean, variance = carry
        return (0.5 * mean + (x * i).mean(0), variance + ((x - i) ** 2).mean(0)), None

    return jax.lax.scan(step, (jnp.zeros(32), jnp.zeros(32)), jnp.arange(4.0))[0]


@once("b/dp d, d/dp f")
def gathered_in_each_round(x, w):
    return jax.lax.fori_loop(0, 4, lambda _, y: jnp.tanh(y @ w) @ w.T + x, x)


@once("b/dp d")
def sorted_in_each_round(x):
    y = jnp.tanh(x)
    return jax.lax.scan(
        lambda total, row: (total + jnp.sort(y, axis=0) * row, None), jnp.zeros_like(y), jnp.arange(6.0)
    )[0]


@pytest.mark.parametrize("name", share(ONCE))
def test_what_once_does_is_done_once(mesh, name):
    """XLA on CPUs sums in each round, and moves again what does not change, if that is inside of a sort or a product."""
    sent, auto = compare(ONCE[name], mesh)
    assert sent < auto


KEPT = {}
kept = functools.partial(enter, KEPT)


@kept("b/dp d")
def read_in_the_loop(x):
    return jax.lax.fori_loop(0, 3, lambda i, t: t + (x * t[None]).sum(0), jnp.zeros(32))


@kept("b/dp d")
def begun_elsewhere(x):
    return jax.lax.fori_loop(0, 3, lambda i, t: t + x.sum(0), jnp.ones(32))


@kept("b/dp d")
def the_largest(x):
    return jax.lax.fori_loop(0, 3, lambda i, t: t + (x * i).max(0), jnp.zeros(32))


@kept("b/dp d")
def squared(x):
    return jax.lax.fori_loop(0, 3, lambda i, t: t + (x * i).sum(0) ** 2, jnp.zeros(32))


@kept("b/dp d")
def as_a_stack(x):
    return jax.lax.scan(lambda carry, i: (carry, (x * i).sum(0)), 0.0, jnp.arange(3.0))[1]


@pytest.mark.parametrize("name", share(KEPT))
def test_sums_that_stay_in_their_loop(mesh, name):
    fn, args = KEPT[name].make(mesh)
    assert "{U:" not in propagate(fn, *args).freeze()
    sent, auto = compare(KEPT[name], mesh)
    assert sent <= auto
