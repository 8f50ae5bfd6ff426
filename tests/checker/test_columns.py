"""Rows that are counted: what `x[jnp.arange(n), index]` picks is right for a block, and wrong for a whole array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd

X = jax.ShapeDtypeStruct((8, 16), "float32")
Y = jax.ShapeDtypeStruct((8,), "int32")

RIGHT = {
    "of all operands": ("b/dp n, b/dp -> b/dp", lambda x, y: x[jnp.arange(len(x)), y]),
    "of one column": ("b/dp n, b/dp -> b/dp", lambda x, y: x[jnp.arange(len(x)), 2] + 0.0 * y.astype("float32")),
    "added to": ("b/dp n, b/dp -> b/dp n", lambda x, y: x.at[jnp.arange(len(x)), y].add(1.0)),
    "of a new array": ("b/dp n, b/dp -> b/dp n", lambda x, y: jnp.zeros_like(x).at[jnp.arange(len(x)), y].set(1.0)),
    "of a whole one": ("b n, b -> b", lambda x, y: x[jnp.arange(len(x)), y]),
}
# The kind of what is found, and a part of its text.
WRONG = {
    "of a whole array": ("b n, b/dp -> b/dp", lambda x, y: x[jnp.arange(len(y)), y], "disagree", "gather"),
    "added to a whole one": (
        "b n, b/dp -> b n",
        lambda x, y: x.at[jnp.arange(len(y)), y].add(1.0),
        "disagree",
        "scatter",
    ),
    "of divided columns": ("b/dp n/tp, b/dp -> b/dp", lambda x, y: x[jnp.arange(len(x)), y], "pending", "along tp."),
    "of whole indices": ("b/dp n, b -> b/dp", lambda x, y: x[jnp.arange(len(x)), y[: len(x)]], "disagree", "gather"),
    "not as indices": ("b n, b/dp -> b/dp k", lambda x, y: jnp.stack([jnp.arange(len(y)), y], 1), "disagree", ""),
}


def findings(pattern, body):
    return spmd.check(spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=4))(body), X, Y)


@pytest.mark.parametrize("name", RIGHT)
def test_no_alarm(name):
    pattern, body = RIGHT[name]
    assert not findings(pattern, body)
    x, y = np.arange(128, dtype=np.float32).reshape(8, 16), np.arange(8, dtype=np.int32)
    run = spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=4))(body)
    np.testing.assert_array_equal(run(x, y), jax.jit(body)(x, y))


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found(name):
    pattern, body, kind, text = WRONG[name]
    found = findings(pattern, body)
    assert found and found[0].kind == kind and text in str(found[0])


def test_what_was_picked_lies_as_its_rows():
    """So a sum of means of it is found, too: other rows are picked of the whole, and in the same way."""

    def loss(x, y):
        return jax.lax.psum(-x[jnp.arange(len(x)), y].mean(), "dp")

    assert [one.kind for one in findings("b/dp n, b/dp -> scalar", loss)] == ["scale"]
