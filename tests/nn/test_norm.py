"""Norms: the gradient of a scale, beside the formula that is silently wrong elsewhere."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd import nn
from spmd.modes import MODES
from tests.nn.cases_norm import plain_rms
from tests.nn.harness import MESH, mapped, normal


def test_the_gradient_of_a_norm_where_the_sequence_is_divided():
    """Each device sees its tokens only: the gradient of a scale that all have is the sum over all of them."""
    x, scale, weights = normal(2, 4, 8, 5), normal(3, 5), normal(4, 4, 8, 5)
    truth = jax.jit(jax.grad(lambda scale: (plain_rms(x, scale) * weights).sum()))(scale)

    def partial(x, scale, weights):
        scale = lax.pcast(scale, ("dp", "tp"), to="varying")  # as a framework without types sees it
        gradient = jax.grad(lambda scale: (plain_rms(x, scale) * weights).sum())(scale)
        return gradient[None, None]

    parts = mapped(partial, (P("dp", "tp"), P(), P("dp", "tp")), P("dp", "tp"))(x, scale, weights)
    assert np.abs(parts[0, 0] - truth).max() > 0.1
    np.testing.assert_allclose(parts.sum((0, 1)), truth, atol=1e-5)

    def gradient(x, scale, weights):
        loss = lambda scale: spmd.reduce(nn.rms_norm(x, scale) * weights, "b/dp s/tp d -> scalar")
        return spmd.grad(loss)(scale)

    kernel = spmd.kernel("b/dp s/tp d, d, b/dp s/tp d -> d", mesh=MESH)
    for mode in MODES:
        np.testing.assert_allclose(jax.jit(getattr(kernel(gradient), mode))(x, scale, weights), truth, atol=1e-5)
    # deferred, the gradient is a partial sum, which does not leave the kernel as if it were complete
    with pytest.raises(spmd.errors.SpmdError, match="psum"):
        kernel(lambda x, scale, weights: gradient(x, spmd.defer(scale, "d -> d {R:dp,tp}"), weights))(x, scale, weights)
