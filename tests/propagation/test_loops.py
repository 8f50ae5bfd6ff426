"""Loops and branches as functions of a kernel: equal numbers, no byte more than the plan says, and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import propagate
from tests.propagation.frozen import compare, enter, run
from tests.propagation.programs import AXES, PLAIN
from tests.sampler import rare, share

NAMED = {one.name: one for one in PLAIN}
LOOPED = ("layers", "layers_gradient", "layers_fsdp_gradient", "micro_batches")


@pytest.mark.parametrize("name", share(LOOPED))
def test_a_frozen_loop_has_the_numbers_and_sends_no_more_than_what_was_compiled(mesh, name):
    sent, auto = compare(NAMED[name], mesh)
    assert sent <= auto


@pytest.mark.parametrize("name", share(("llama_loss", "llama_gradient")))
@rare
def test_a_frozen_llama(name):
    """All of a model of `examples/`: attention, a scan over its layers, a lookup, a loss over a divided vocabulary."""
    sent, auto = compare(NAMED[name], spmd.make_mesh(**AXES), gradient=name == "llama_loss", rtol=0.05)  # bfloat16
    assert sent < auto


PROGRAMS = {}
entered = functools.partial(enter, PROGRAMS)


@entered("b/dp d, d f/tp, f/tp d")
def until(x, w, v):
    def step(carry):
        x, n = carry
        return x + 0.1 * jnp.tanh(x @ w) @ v, n + 1

    return jax.lax.while_loop(lambda c: (c[1] < 5) & (jnp.abs(c[0]).max() < 50), step, (x, 0))


@entered("b/dp d, d f/tp, f/tp d")
def loops_in_loops(x, w, v):
    def outer(x, i):
        def inner(y, _):
            return jnp.tanh(y @ w) @ v, y.sum(1)

        y, sums = jax.lax.scan(inner, x, None, length=2)
        return x + i * y / 100, sums

    return jax.lax.scan(outer, x, jnp.arange(3.0), reverse=True)


@entered("b/dp d, d f/tp, f/tp d")
def branches_of_a_loop(x, w, v):
    def step(i, x):
        return jax.lax.cond(i % 2 == 0, lambda x: x + jnp.tanh(x @ w) @ v, lambda x: 0.5 * x, x)

    return jax.lax.fori_loop(0, 4, step, x)


@entered("b/dp d, d f/tp, f/tp d")
def recomputed_gradient(x, w, v):
    layer = jax.checkpoint(lambda x, _: (jnp.tanh(x @ w) @ v / 8, None))
    return jax.grad(lambda x: jax.lax.scan(layer, x, None, length=3)[0].sum())(x)


@entered("b/dp s d, d e/tp, e/tp d")
def recurrent_gradient(x, w, v):
    def loss(w, v):
        step = lambda h, x: (jnp.tanh(h + jnp.tanh(x @ w) @ v), None)
        return (jax.lax.scan(step, jnp.zeros((16, 32)), jnp.transpose(x, (1, 0, 2)))[0] ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(w, v)


@entered("b/dp d, d/dp f/tp, f/tp d/dp")
def steps_of_descent(x, w, v):
    def step(ws, _):
        slopes = jax.grad(lambda ws: jnp.sum((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2))(ws)
        return jax.tree.map(lambda w, slope: w - 0.001 * slope, ws, slopes), None

    return jax.lax.scan(step, (w, v), None, length=3)[0]


@entered("b/dp d, l d/dp f/tp, l f/tp d/dp")
def batches_of_layers(x, w, v):
    def batch(total, x):
        step = lambda x, wv: (x + jnp.tanh(x @ wv[0]) @ wv[1], None)
        return total + jax.grad(lambda w: jax.lax.scan(step, x, (w, v))[0].sum())(w), None

    return jax.lax.scan(batch, jnp.zeros_like(w), x.reshape(2, 8, 32))[0]


@pytest.mark.parametrize("name", share(PROGRAMS))
def test_a_program(mesh, name):
    sent, auto = compare(PROGRAMS[name], mesh, gradient=name != "until")
    assert sent <= auto


def test_a_loop_that_counts_has_a_gradient(mesh):
    fn, args = NAMED["layers"].make(mesh)
    text = propagate(fn, *args).freeze("frozen")
    assert "jax.lax.fori_loop(0, 3, " in text
    rng = np.random.default_rng(0)
    values = [jax.device_put(0.3 * rng.normal(size=x.shape).astype("float32"), x.sharding) for x in args]
    frozen = run(text, mesh)
    loss = lambda fn: jax.grad(lambda *args: (fn(*args) ** 2).sum(), argnums=(0, 1, 2))
    for want, have in zip(loss(fn)(*values), loss(frozen)(*values), strict=True):
        np.testing.assert_allclose(want, have, rtol=1e-4, atol=1e-4)


def test_a_loop_that_may_end_early_asks_a_function(mesh):
    fn, args = PROGRAMS["until"].make(mesh)
    assert "jax.lax.while_loop(v1_goes_on, v1, " in propagate(fn, *args).freeze()
