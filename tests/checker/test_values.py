"""Expressions that were traced twice are one value, and no others are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from spmd._walker import equations
from spmd.checker._history import History
from spmd.checker._values import Values

X = jnp.ones((4, 6))


def results(body):
    """What stands for each result of a body."""
    jaxpr = jax.make_jaxpr(body)(X, X)
    values = Values(History(jaxpr))
    return [values.one(atom) for atom in jaxpr.jaxpr.outvars]


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y: (x.mean(0), x.mean(0)),
        lambda x, y: (x.mean(0), x.mean(0, keepdims=True)),
        lambda x, y: (jnp.sin(x + y), jnp.sin(x + y)[None]),
        lambda x, y: (jax.jit(jnp.sin)(x), jnp.sin(x)),
        lambda x, y: (x.sum(1).astype("float16"), x.sum(1)),
        lambda x, y: (jax.lax.sort((x, y))[1], jax.lax.sort((x, y))[1]),
    ],
)
def test_one_value(body):
    one, other = results(body)
    assert one is other


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y: (x.mean(0), y.mean(0)),
        lambda x, y: (x.sum(0), x.sum(1)),
        lambda x, y: (x.reshape(6, 4).sum(0), x.sum(0)),
        lambda x, y: (x - y, y - x),
        lambda x, y: (x + 1.0, x + 2.0),
        lambda x, y: (jax.lax.sort((x, y))[0], jax.lax.sort((x, y))[1]),
    ],
)
def test_two_values(body):
    one, other = results(body)
    assert one is not other


def test_a_row_of_a_loop_is_not_the_array():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, row: (c + jnp.sin(row), None), jnp.zeros(6), x)[0])(X)
    values = Values(History(jaxpr))
    [sine] = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "sin"]
    assert values.one(sine.invars[0]) is not values.one(jaxpr.jaxpr.invars[0])


def test_numbers_are_themselves():
    jaxpr = jax.make_jaxpr(lambda x: x * 2.0)(X)
    assert Values(History(jaxpr)).one(jaxpr.eqns[0].invars[1]) == "2.0"
