"""What the tests of the assertions share: a kernel with its arguments, and the text of a difference."""

import re

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.testing import (
    Mismatch,
)


def make_mlp(mesh):
    @spmd.kernel("b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d", mesh=mesh)
    def mlp(x, w_in, w_out):
        x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")
        w_in = spmd.all_gather(w_in, "d/dp f/tp -> d f/tp")
        h = jnp.sin(spmd.einsum(x, w_in, "b/dp s d, d f/tp -> b/dp s f/tp"))
        w_out = spmd.all_gather(w_out, "f/tp d/dp -> f/tp d")
        return spmd.einsum(h, w_out, "b/dp s f/tp, f/tp d -> b/dp s/tp d")

    return mlp


LAYOUTS = "b/dp s/tp d", "d/dp f/tp", "f/tp d/dp"
SHAPES = (4, 8, 6), (6, 12), (12, 6)


def structs(mesh, *layouts):
    at = layouts or LAYOUTS
    return tuple(
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=spmd.Layout(a).sharding(mesh))
        for s, a in zip(SHAPES, at, strict=True)
    )


def message(fn, *args, **kwargs) -> str:
    """The text of a Mismatch, without the lines' numbers."""
    with pytest.raises(Mismatch) as caught:
        fn(*args, **kwargs)
    assert isinstance(caught.value, AssertionError)
    return re.sub(r"(\.py:)\d+", r"\1N", str(caught.value))
