"""Norms, of features that are whole or divided."""

import jax.numpy as jnp

from spmd import nn
from tests.layers import LayerCase, cases, fit, placements, total


def plain_rms(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


@cases("rms_norm", draw=3)
def _():
    """dp divides tokens, sp the sequence, tp the features: the gradient of the scale is complete."""
    for mesh, axes in placements("dp", "sp", "tp"):
        yield LayerCase(
            name="rms_norm",
            fn=lambda axes: lambda x, scale: nn.rms_norm(x, scale, tp=axes["tp"]),
            ins=("b/dp s/sp d/tp", "d/tp"),
            outs="b/dp s/sp d/tp",
            shapes=fit(mesh, axes, b=(3, "dp"), s=(5, "sp"), d=(7, "tp")),
            mesh=mesh,
            axes=axes,
            reference=plain_rms,
            forward=lambda c: c.traffic("psum", "tp", "b/dp s/sp 1", dtype="float32"),
            backward=lambda c: total(
                c.traffic("psum", "tp", "b/dp s/sp 1", dtype="float32"), c.traffic("psum", ("dp", "sp"), "d/tp")
            ),
        )


@cases("layer_norm", draw=2)
def _():
    for mesh, axes in placements("dp", "sp", "tp"):
        yield LayerCase(
            name="layer_norm",
            fn=lambda axes: lambda x, scale, bias: nn.layer_norm(x + 30, scale, bias, tp=axes["tp"]),
            ins=("b/dp s/sp d/tp", "d/tp", "d/tp"),
            outs="b/dp s/sp d/tp",
            shapes=fit(mesh, axes, b=(3, "dp"), s=(5, "sp"), d=(7, "tp")),
            mesh=mesh,
            axes=axes,
            reference=plain_layer_norm,
            forward=lambda c: c.traffic("psum", "tp", "b/dp s/sp 1", 2, dtype="float32"),
            backward=lambda c: total(
                c.traffic("psum", "tp", "b/dp s/sp 1", 2, dtype="float32"),
                c.traffic("psum", ("dp", "sp"), "d/tp", 2),
            ),
            dtypes=("float32",),  # of numbers around 30, bfloat16 keeps three digits
            tolerance=1e-4,
        )


def plain_layer_norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None] + bias[None, None]
