"""Equal values and gradients in all modes; what differs is told leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.testing import (
    Mismatch,
    assert_modes_agree,
)
from tests.testing.harness import message


def test_modes_agree(mesh):
    @spmd.kernel("b/dp d/tp, d/dp f -> b/dp f/tp", mesh=mesh)
    def layer(x, w):
        x = spmd.all_gather(x, "b/dp d/tp -> b/dp d")
        w = spmd.all_gather(w, "d/dp f -> d f")
        return jnp.sin(spmd.split(spmd.einsum(x, w, "b/dp d, d f -> b/dp f"), "b/dp f -> b/dp f/tp"))

    draws = np.random.default_rng(3)
    x, w = (np.asarray(draws.normal(size=s), np.float32) for s in ((4, 8), (8, 12)))
    assert_modes_agree(layer, x, w)
    assert_modes_agree(layer, x, w, modes=("explicit", "reference"), grad=False)
    assert_modes_agree(lambda x: (layer(x, w) ** 2).sum(), x, modes=("explicit", "reference"))


def test_modes_that_do_not(mesh):
    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def local(x):
        return x * x.shape[0]

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def wrong_gradient(x):
        return jax.lax.stop_gradient(x) if x.shape[0] == 4 else x * 1.0  # whole arrays have no gradient

    x = jnp.asarray(np.arange(12.0).reshape(4, 3), jnp.float32)
    text = message(assert_modes_agree, local, x)
    assert text == GOLDEN["modes"]
    assert_modes_agree(wrong_gradient, x, grad=False)
    with pytest.raises(Mismatch, match=r"gradient of args\[0\]"):
        assert_modes_agree(wrong_gradient, x)


def test_a_shape_that_differs_is_a_difference(mesh):
    @spmd.kernel("b/dp d -> n", mesh=mesh)
    def shape(x):
        return spmd.reduce(x, "b/dp d -> d")[: x.shape[0]]

    with pytest.raises(Mismatch, match=r"float32\[2\]\s+float32\[3\]"):
        assert_modes_agree(shape, jnp.ones((4, 3)), modes=("explicit", "reference"), grad=False)


GOLDEN = {
    "modes": """\
local is not the same in all modes.
                     mode      largest difference  allowed there  elements
gradient of args[0]  explicit                2.61       6.22e-05  12 of 12
result               explicit                  22        0.00045  11 of 12""",
}
