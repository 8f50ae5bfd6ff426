"""The lines in place of a function of JAX that reduces a divided dimension. Those of messages are run with them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests.errors.registry import Pasted

X = np.arange(64, dtype=np.float32).reshape(4, 16) ** 0.5


def told(body: Any, pattern: str, *args: Any) -> str:
    """The text of the one finding."""
    kernel = spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=4))(body)
    [finding] = spmd.check(kernel, *(args or (X,)))
    return str(finding)


def test_a_cached_function_is_told_from_its_calls() -> None:
    """JAX traces `jnp.var` once for arrays of one shape, and each call names its own."""
    for name, body in {"x": lambda x, y: x.var(1), "y": lambda x, y: y.var(1)}.items():
        assert f"m = spmd.reduce({name}, " in told(body, "b/dp d/tp, b/dp d/tp -> b/dp", X, X)


def test_the_square_of_an_argument_is_written() -> None:
    text = told(lambda x: x * jax.lax.rsqrt((x * x).mean(1, keepdims=True)), "b/dp d/tp -> b/dp d/tp")
    assert text.endswith('\nfix: spmd.reduce(x ** 2, "b/dp d/tp -> b/dp 1", op="mean")')


def test_dimensions_that_no_argument_has_get_new_names() -> None:
    text = told(lambda x: jnp.exp(jnp.tanh(x.T).mean(0)), "a/dp b/tp -> a/dp")
    assert text.endswith('reduce(<the array>, "c/tp d/dp -> d/dp", op="mean")')


def test_the_divisor_of_a_variance_is_that_of_the_call() -> None:
    fix = Pasted(told(lambda x: x.var(ddof=3), "b/dp d/tp -> scalar"))
    mended = spmd.kernel("b/dp d/tp -> scalar", mesh=spmd.make_mesh(dp=2, tp=4))(lambda x: fix(1, x=x, **fix(x=x)))
    np.testing.assert_allclose(mended(X), X.var(ddof=3), rtol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: jnp.exp(x.mean(1) + (2 * x).mean(1)),  # of two means it is not known which
        lambda x: jnp.linalg.norm(x, ord=3, axis=1),  # nobody can write into it
        lambda x: jnp.exp(x.astype(jnp.int32).sum(1)),  # these are other numbers than x
    ],
)
def test_no_line_where_it_would_mean_something_else(body: Any) -> None:
    assert "\nfix:" not in told(body, "b/dp d/tp -> b/dp")
