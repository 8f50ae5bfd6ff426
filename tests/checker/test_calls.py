"""The user's call that made an equation, and what it was given."""

from __future__ import annotations

import linecache
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

X = np.arange(64, dtype=np.float32).reshape(4, 16) ** 0.5
ROWS = "b/dp d/tp -> b/dp"
CUBE = "b/dp s/tp d -> b/dp s/tp d"


def told(body: Any, pattern: str, *args: Any) -> str:
    """The text of the one finding."""
    kernel = spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=4))(body)
    [finding] = spmd.check(kernel, *(args or (X,)))
    return str(finding)


def test_a_cached_function_is_told_from_its_calls() -> None:
    """JAX traces `jnp.var` once for arrays of one shape, and each call names its own."""
    for name, body in {"x": lambda x, y: x.var(1), "y": lambda x, y: y.var(1)}.items():
        text = told(body, "b/dp d/tp, b/dp d/tp -> b/dp", X, X)
        assert f'\nadvice: spmd.all_gather({name}, "b/dp d/tp -> b/dp d") in place of {name};' in text


def test_the_user_can_complete_what_they_sum_themselves() -> None:
    """Between two calls of the user's there is a place for a collective, and inside of one there is none."""
    assert told(lambda x: jnp.exp(x.mean(1)), ROWS).endswith('\nfix: spmd.reduce(x, "b/dp d/tp -> b/dp", op="mean")')
    kept = told(lambda x: x - x.mean(1, keepdims=True), "b/dp d/tp -> b/dp d/tp")
    assert kept.endswith('\nfix: spmd.reduce(x, "b/dp d/tp -> b/dp 1", op="mean")')
    with jax.numpy_rank_promotion("allow"):  # d is put behind two others
        broadcast = told(lambda x: x - x.mean((0, 1)), CUBE, jnp.ones((4, 8, 3)))
    assert broadcast.endswith('\nfix: spmd.reduce(x, "b/dp s/tp d/1 -> d/1", op="mean")')
    kept = told(lambda x: x - x.mean((0, 1), keepdims=True), CUBE, jnp.ones((4, 8, 3)))
    assert kept.endswith('\nfix: spmd.reduce(x, "b/dp s/tp d/1 -> 1 1 d/1", op="mean")')
    assert "\nadvice: spmd.all_gather(x, " in told(lambda x: jnp.linalg.norm(x, axis=1), ROWS)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: jnp.exp(x.mean(1) + (2 * x).mean(1)),  # of two means it is not known which
        lambda x: jnp.exp(x.astype(jnp.int32).sum(1)),  # these are other numbers than x
        lambda x: jnp.exp(x.T.mean(0)),  # the argument lies otherwise
        lambda x: (x + 1).var(1),  # what it is given has no name
    ],
)
def test_no_line_where_it_would_mean_something_else(body: Any) -> None:
    assert "\nfix:" not in told(body, ROWS)


def test_a_function_that_goes_on_with_a_piece() -> None:
    """A sort of a piece can be replaced, and what a median does with it cannot."""
    assert "\nadvice: spmd.sort, which takes a divided dimension" in told(jnp.sort, "b/dp d/tp -> b/dp d/tp")
    assert 'all_gather(x, "b/dp d/tp -> b/dp d") in place of x' in told(lambda x: jnp.median(x, 1), ROWS)
    assert "\nadvice: spmd.softmax, " in told(lambda x: jax.nn.softmax(x), "b/dp d/tp -> b/dp d/tp")


def test_a_function_whose_like_has_another_name_or_room() -> None:
    """No advice names a module, and a loop of JAX that pads inside is not a halo."""
    advice = lambda body: told(body, "b/dp d/tp -> b/dp d/tp").rpartition("advice: ")[2]
    assert advice(lambda x: jnp.fft.fft(x).real).startswith("spmd.fft.fft, which takes")
    assert advice(lambda x: jnp.pad(x, ((0, 0), (1, 1)))[:, 2:]).startswith("spmd.stencil.halo, which takes")
    assert advice(lambda x: x[:, jnp.array([3, 1, 0, 2])]).startswith("spmd.take, which takes")
    assert 'spmd.reduce(..., "logsumexp"), which takes' in told(lambda x: jax.nn.logsumexp(x, 1), ROWS)
    assert "halo" not in advice(lambda x: jax.lax.associative_scan(jnp.add, x, axis=1))


def test_what_a_function_is_called_on_is_written_as_the_user_wrote_it() -> None:
    wrong = {
        "x + 1": lambda x: jnp.sin((x + 1).mean(1)),
        "x * x": lambda x: jnp.sin(jnp.mean(x * x, axis=1)),
        "jnp.tanh(x)": lambda x: jnp.sin(jnp.tanh(x).mean(1)),
    }
    for text, body in wrong.items():
        assert told(body, ROWS).endswith(f'\nfix: spmd.reduce({text}, "b/dp d/tp -> b/dp", op="mean")')
    other = "def body(x):\n    return other_jnp.sin(other_jnp.mean(x * 2, axis=1))\n"
    linecache.cache["<cell>"] = (len(other), None, other.splitlines(keepends=True), "<cell>")
    cell: dict[str, Any] = {"other_jnp": jnp}  # its imports are in another cell
    exec(compile(other, "<cell>", "exec"), cell)
    assert 'advice: spmd.reduce(<what is averaged>, "b/dp d/tp -> b/dp", op="mean")' in told(cell["body"], ROWS)
    with mock.patch.dict(vars(sys.modules["__main__"]), other_jnp=jnp):  # as in a notebook
        assert told(cell["body"], ROWS).endswith('\nfix: spmd.reduce(x * 2, "b/dp d/tp -> b/dp", op="mean")')
    hidden = eval("lambda x: jnp.sin((x + 1).mean(1))", {"jnp": jnp})  # nobody has its source
    assert 'advice: spmd.reduce(<what is averaged>, "b/dp d/tp -> b/dp", op="mean")' in told(hidden, ROWS)


def test_a_function_that_is_called_again() -> None:
    """JAX keeps one jaxpr of it. What the second call is given is not known where the first one is told of."""

    def power(x, v):
        for _ in range(2):
            v = lax.psum(x.T @ lax.psum(x @ v, "tp"), "dp")
            v = v / jnp.linalg.norm(v)
        return v

    body = spmd.kernel("n/dp d/tp, d/tp -> d/tp", mesh=spmd.make_mesh(dp=2, tp=4))(power)
    found = spmd.check(body, *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 8), (8,))))
    assert "nonlinear" in [one.kind for one in found] and "all_gather" in f"{found[0].advice}"


def test_singular_values_with_vectors_and_without() -> None:
    """One primitive with other results."""
    body = lambda x: jnp.linalg.svd(x, full_matrices=False)[1] + jnp.linalg.svd(x, compute_uv=False)
    rows = jax.ShapeDtypeStruct((4, 6, 4), "float32")
    assert not spmd.check(spmd.kernel("b/dp i j -> b/dp k", mesh=spmd.make_mesh(dp=2, tp=4), k=4)(body), rows)
