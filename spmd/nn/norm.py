"""Normalization over the features, whole or divided."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd import SizeError, annotate, reduce, scope
from spmd.nn.dtypes import wide
from spmd.nn.rank import with_rank

__all__ = ["layer_norm", "rms_norm"]

Axes = str | tuple[str, ...] | None


@scope(mapping=None)
def rms_norm(x: Any, scale: Any = None, *, eps: float = 1e-6, tp: Axes = None) -> jax.Array:
    """RMSNorm: features divided by the root of their mean square, times a learned scale.

    Statistics are at least float32, whatever the dtype of x. All dimensions except the last may be divided in any way.

    Layouts: x `"... d/tp"`, scale `"d/tp"`, result `"... d/tp"`. With `tp=None` features are whole, as in the
    sequence-parallel residual stream `"b/dp s/tp d"`, and each device normalizes its own tokens.

    Communication: nothing forward for whole features. For divided features, a psum over tp of one float32 per token,
    forward and again backward: 8T(n-1)/n bytes each for the T tokens that a device holds. Backward, if the scale is
    equal by JAX's own type, its gradient is summed over the devices that hold other tokens, including those along the
    sequence: one psum of its local part per set of axes.

    Memory: x is kept for the backward pass.

    Args:
      x: The activations.
      scale: One number per feature, or None.
      eps: Added to the mean square.
      tp: The mesh axes that divide the features.

    Returns:
      An array like x.

    Raises:
      SpmdError: If the layouts of x and scale do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> norm = spmd.kernel("b d/tp, d/tp -> b d/tp", mesh=mesh)(lambda x, w: spmd.nn.rms_norm(x, w, tp="tp"))
      >>> print(norm(jnp.array([[3.0, -3.0, 3.0, 3.0]]), jnp.ones(4)).round(3))
      [[ 1. -1.  1.  1.]]

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", https://arxiv.org/abs/1910.07467
    """
    y = x.astype(wide(x))
    y = y * jax.lax.rsqrt(_mean(jnp.square(y), tp) + eps)
    return _scaled(y, scale, tp, "rms_norm").astype(x.dtype)


@scope(mapping=None)
def layer_norm(x: Any, scale: Any = None, bias: Any = None, *, eps: float = 1e-6, tp: Axes = None) -> jax.Array:
    """LayerNorm: features minus their mean, divided by their standard deviation, times a scale, plus a bias.

    Like `rms_norm`, but it also subtracts a mean. The variance is that of the centred features, so a large mean does
    not cost precision.

    Layouts: x `"... d/tp"`, scale and bias `"d/tp"`, result `"... d/tp"`.

    Communication: nothing forward for whole features. For divided features, two psums over tp of one float32 per token,
    forward and again backward. Scale and bias cost the same as in `rms_norm` backward.

    Memory: x is kept for the backward pass.

    Args:
      x: The activations.
      scale: One number per feature, or None.
      bias: One number per feature, or None.
      eps: Added to the variance.
      tp: The mesh axes that divide the features.

    Returns:
      An array like x.

    Raises:
      SpmdError: If the layouts of x, scale and bias do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> norm = spmd.kernel("b d/tp -> b d/tp", mesh=mesh)(lambda x: spmd.nn.layer_norm(x, tp="tp"))
      >>> print(norm(jnp.array([[101.0, 103.0, 101.0, 103.0]])).round(3))
      [[-1.  1. -1.  1.]]

    References:
      Ba, Kiros and Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450
    """
    y = x.astype(wide(x))
    y = y - _mean(y, tp)
    y = _scaled(y * jax.lax.rsqrt(_mean(jnp.square(y), tp) + eps), scale, tp, "layer_norm")
    return (y if bias is None else y + _like(bias, y, tp, "layer_norm", "bias")).astype(x.dtype)


def _mean(x: Any, tp: Axes) -> Any:
    return reduce(x, "... d/tp -> ... 1", "mean", tp=tp)


def _scaled(x: Any, scale: Any, tp: Axes, norm: str) -> Any:
    return x if scale is None else x * _like(scale, x, tp, norm, "scale")


def _like(features: Any, x: Any, tp: Axes, norm: str, what: str) -> Any:
    """One number per feature, with the dtype and the rank of x."""
    features = annotate(features, "d/tp", tp=tp)
    if features.shape != x.shape[-1:]:
        rule = f"{what} has one number for each feature."
        got = [f"x: {x.shape[-1]} features here", f"{what}: {features.shape[0]} here"]
        advice = f'gather it first if it rests divided, as in all_gather({what}, "d/fsdp -> d")'
        raise SizeError(rule, call=f"{norm}(x, {what}=...)", got=got, advice=advice)
    return with_rank(features.astype(x.dtype), x.ndim)
