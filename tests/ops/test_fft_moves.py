"""Rearrangements with a way back of their own: values against NumPy, and no array of zeros in a gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd._jaxprs.walker import equations
from spmd.ops._fft_job import JOINED, cut, joined, transposed

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
MANY = np.random.default_rng(1).normal(size=(JOINED + 1, 2, 3)).astype(np.float32)
PROGRAMS = {
    "cut": (X, lambda x: cut(x, 3, 1), lambda x: np.stack(np.split(x, 3, 1))),
    "cut the first": (X, lambda x: cut(x, 2, 0), lambda x: np.stack(np.split(x, 2, 0))),
    "joined": (X, lambda x: joined(x, 1), lambda x: np.concatenate(list(x), 1)),
    "joined again": (X, lambda x: joined(cut(x, 4, 2), 2), lambda x: x),
    "nothing cut": (X[:0], lambda x: cut(x, 3, 1), lambda x: np.zeros((3, 0, 2, 8), x.dtype)),
    "nothing cut into": (X[:, :0], lambda x: cut(x, 3, 1), lambda x: np.zeros((3, 4, 0, 8), x.dtype)),
    "nothing joined": (X[:, :0], lambda x: joined(x, 1), lambda x: np.zeros((0, 32), x.dtype)),
    "planes": (X, lambda x: transposed(x, (1, 0, 2)), lambda x: x.transpose(1, 0, 2)),
    "many planes": (MANY, lambda x: transposed(x, (2, 0, 1)), lambda x: x.transpose(2, 0, 1)),
    "turned": (X, lambda x: transposed(x, (2, 1, 0)), lambda x: x.transpose(2, 1, 0)),
    "not turned": (X, lambda x: transposed(x, (0, 1, 2)), lambda x: x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_gradients_and_batches(name):
    x, move, wanted = PROGRAMS[name]
    np.testing.assert_array_equal(jax.jit(move)(x), wanted(x))
    by = np.random.default_rng(2).normal(size=wanted(x).shape).astype(np.float32)
    # A rearrangement sends each number to one place, so the way back is the same for the numbers of the places.
    places = wanted(np.arange(x.size).reshape(x.shape)).ravel()
    back = np.empty(x.size, np.float32)
    back[places] = by.ravel()
    pull = jax.linear_transpose(move, jax.ShapeDtypeStruct(x.shape, x.dtype))
    np.testing.assert_array_equal(jax.jit(pull)(by)[0], back.reshape(x.shape))
    for dim in (0, x.ndim):
        batch = np.stack([x, 2 * x], dim)
        found = jax.jit(jax.vmap(move, in_axes=dim))(batch)
        np.testing.assert_array_equal(found, np.stack([wanted(x), wanted(2 * x)]))


@pytest.mark.parametrize("name", ["cut", "joined", "planes", "turned"])
def test_the_way_back_is_a_move_too(name):
    """JAX's own transpose of slices pads each with zeros, and adds these arrays up."""
    x, move, wanted = PROGRAMS[name]
    pull = functools.partial(jax.linear_transpose(move, jax.ShapeDtypeStruct(x.shape, x.dtype)))
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(pull)(jnp.asarray(wanted(x))).jaxpr)]
    assert names == ["spmd_move"]
    plain = jax.vjp(lambda x: jnp.concatenate([x[:, :3], x[:, 3:]], 0), x)[1]
    slices = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(plain)(jnp.zeros((8, 3, 8))).jaxpr)]
    assert "pad" in slices, "what is avoided here"


def test_a_transpose_of_nothing_is_no_equation():
    assert jax.make_jaxpr(lambda x: transposed(x, (0, 1, 2)))(X).eqns == []
