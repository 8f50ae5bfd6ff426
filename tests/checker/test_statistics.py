"""Whose number a sum is: a program that knows it is a device's own makes no finding, and another one makes it still."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd

X = jax.ShapeDtypeStruct((8, 16), "float32")


def kinds(body, pattern="a n/tp -> a"):
    kernel = spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=4))(body)
    return [one.kind for one in spmd.check(kernel, X)]


def square(x):
    return (x**2).sum(1)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: lax.pmean(jnp.sqrt(square(x)), "tp"),
        lambda x: lax.psum(jnp.sqrt(square(x)) ** 3, "tp"),
        lambda x: lax.psum(jnp.exp(square(x)), "tp"),
        lambda x: lax.psum(square(x) / (1.0 + square(x)), "tp"),
        lambda x: lax.psum(jnp.exp(x - jax.nn.logsumexp(x, axis=1, keepdims=True)).sum(1), "tp"),
    ],
)
def test_a_curve_of_a_part_alone_is_a_mistake(body):
    assert set(kinds(body)) & {"nonlinear", "mixed", "pending"}


def test_another_array_is_another_number():
    """The norms of the one are gathered, which says nothing of those of the other one."""

    def body(x):
        own = jnp.linalg.norm(x, axis=1)
        other = jnp.tanh(x @ jnp.ones((x.shape[1], 3)))
        return jnp.linalg.norm(lax.all_gather(own, "tp"), axis=0) + other.sum(1)

    assert "nonlinear" in kinds(lambda x: lax.psum(body(x), "tp") / 4)


def test_the_maximum_of_another_value_is_not_a_comparison():
    """A softmax over the whole compares elements with a maximum, and not a sum with sums."""

    def body(x):
        top = lax.pmax(x.max(1, keepdims=True), "tp")
        e = jnp.exp(x - top)
        return e / e.sum(1, keepdims=True)

    assert kinds(body, "a n/tp -> a n/tp") == ["nonlinear"]


def test_a_square_that_nothing_was_taken_off_before_is_a_curve():
    """`v + m**2` is a mean of squares where `v` is the variance around `m`; of another mean it is not."""

    def around_another_mean(x):
        return lax.pmean(x.var(1) + (2 * x).mean(1) ** 2, "tp") - lax.pmean(x.mean(1), "tp") ** 2

    def without_a_variance(x):
        return lax.pmean(x.mean(1) ** 2, "tp") - lax.pmean(x.mean(1), "tp") ** 2

    def without_a_mean(x):
        return lax.pmean(x.var(1), "tp") + lax.pmean(x.mean(1), "tp") ** 2

    assert all(kinds(body) for body in (around_another_mean, without_a_variance, without_a_mean))
