"""`cond`: one branch where devices agree, a selection where they may not; values and gradients in all modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from tests.ops.harness import close, make_mesh, pulled

MESH = {"a": 4, "b": 2}


def turned(x, predicate):
    return spmd.cond(predicate, lambda x: (jnp.sin(x), x.sum()), lambda x: (2 * x, x[0, 0]), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("over", [True, False])
def test_a_predicate_that_is_equal_everywhere(over: bool, mode: str) -> None:
    """Only one branch is in the program that runs: a `lax.cond`."""
    x = jnp.arange(32.0).reshape(8, 4) / 7

    @spmd.kernel("x/a y/b, scalar -> x/a y/b", mesh=make_mesh(MESH))
    def body(x, t):
        return turned(x, t > 0)[0]

    t = jnp.float32(1 if over else -1)
    want, (gradient,) = pulled(jnp.sin if over else lambda x: 2 * x, x, by=x)
    out, (found, _) = pulled(getattr(body, mode), x, t, by=x)
    close(out, want)
    close(found, gradient)
    text = str(jax.make_jaxpr(getattr(body, mode))(x, t))
    assert "cond[" in text and "select_n" not in text


def test_a_predicate_that_differs() -> None:
    """Each block by its own sum, and its gradient by its own branch."""
    x = np.asarray(np.random.default_rng(0).normal(size=(8, 4)), np.float32)

    @spmd.kernel("x/a y/b -> x/a y/b", mesh=make_mesh(MESH))
    def body(x):
        with spmd.per_shard("the test is about branches of blocks"):
            return turned(x, x.sum() > 0)[0]

    positive = np.asarray(x).reshape(4, 2, 2, 2).sum((1, 3), keepdims=True) > 0
    positive = np.broadcast_to(positive, (4, 2, 2, 2)).reshape(8, 4)
    assert positive.any() and not positive.all()
    want, (gradient,) = pulled(lambda x: jnp.where(positive, jnp.sin(x), 2 * x), x, by=x)
    out, (found,) = pulled(body, x, by=x)
    close(out, want)
    close(found, gradient)
    assert "cond[" not in str(jax.make_jaxpr(body)(x))
