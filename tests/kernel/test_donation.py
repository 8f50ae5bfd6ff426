"""Who gives a donated buffer away: a call from Python, and nobody who is being traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import spmd


def placed(mesh):
    return spmd.shard(jnp.ones((4, 8)), "b/dp d", mesh=mesh)


@pytest.fixture
def mesh():
    return spmd.make_mesh(dp=2)


@pytest.fixture
def square(mesh):
    return spmd.kernel("b/dp d -> b/dp d", mesh=mesh, donate="x")(lambda x: x * x)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_a_call_from_python_donates(mesh, square, mode):
    x = placed(mesh)
    with spmd.mode(mode):
        square(x)
    assert x.is_deleted()


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
@pytest.mark.parametrize(
    "traced",
    [
        lambda f, x: jax.jit(lambda x: f(x))(x),
        lambda f, x: jax.grad(lambda x: f(x).sum())(x),  # the square's backward pass needs x
        lambda f, x: jax.jit(jax.grad(lambda x: f(x).sum()))(x),
        lambda f, x: jax.vmap(f)(x[None]),
    ],
    ids=["jit", "grad", "jit of grad", "vmap"],
)
def test_a_traced_call_keeps_the_buffer(mesh, square, mode, traced):
    x = placed(mesh)
    with spmd.mode(mode):
        jax.block_until_ready(traced(square, x))
    assert not x.is_deleted()
