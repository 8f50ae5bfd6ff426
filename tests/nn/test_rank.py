"""Dimensions of size 1 in front."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.nn.norm import with_rank


@pytest.mark.parametrize(("shape", "rank"), [((), 2), ((3,), 1), ((3,), 4), ((2, 3), 3)])
def test_numbers_and_shape(shape, rank):
    x = np.arange(float(np.prod(shape, dtype=int)), dtype=np.float32).reshape(shape)
    found = with_rank(x, rank)
    assert found.shape == (1,) * (rank - len(shape)) + shape
    np.testing.assert_array_equal(found.ravel(), x.ravel())


def test_the_checker_knows_which_dimensions_are_new():
    """Positions of a block that meet numbers in another layout: a reshape would hide how they lie."""
    mesh = spmd.make_mesh(cp=4)
    body = lambda x, at: x * with_rank(at, x.ndim)
    mistaken = lambda x, at: x * with_rank(jnp.arange(at.shape[0], dtype=x.dtype), x.ndim)
    args = jax.ShapeDtypeStruct((2, 8), "float32"), jax.ShapeDtypeStruct((8,), "float32")
    found = [
        spmd.check(spmd.kernel("b s/cp, s/cp -> b s/cp", mesh=mesh, check="off")(fn), *args) for fn in (body, mistaken)
    ]
    assert not found[0] and [one.kind for one in found[1]] == ["disagree"]
