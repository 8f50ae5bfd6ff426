"""Normalization over the features, whole or divided, and the dtype of statistics, softmaxes and sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from spmd import Layout, annotate, einsum, random, reduce, scope, size
from spmd._trees.arguments import explained
from spmd.errors import LayoutError, SizeError
from spmd.language import Axes
from spmd.modes import current_frame


@explained
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


@explained
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


# --- dropout with the mask of the whole array -------------------------------------------------------------------------


@explained
def dropout(x: Any, key: Any, layout: str, /, *, rate: float, **names: Any) -> jax.Array:
    """Set a random part of the numbers to zero, and scale the rest to keep the expectation.

    The mask is the one that `jax.random.bernoulli` draws for the key and the shape of the whole array. Each device
    makes its own part of it. Devices that hold the same numbers drop the same ones, devices that hold different parts
    have different masks, and a run repeats bit for bit on any mesh. Pass one key that is equal on all devices, and a
    new key for each layer and each step.

    Layouts: x and the result have the given layout, in which all dimensions are named. The string is the caller's: its
    names and mapping are those of the kernel. Sizes that the kernel does not know come from x.

    Communication: none, forward and backward.

    Memory: the mask is kept for the backward pass, one byte per number.

    Args:
      x: An array.
      key: A key of `jax.random`, threefry, undivided.
      layout: The layout of x.
      rate: The share that is dropped, at least 0 and below 1; 0 returns x.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      An array like x.

    Raises:
      LayoutError: If rate is out of range, or the layout has `...`, an unnamed dimension, or another rank than x.
      SizeError: If a size does not fit.
      SpmdError: If x does not have this layout, or the key differs between devices.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=2)
      >>> @spmd.kernel("b/dp d/tp, scalar -> b/dp d/tp", mesh=mesh)
      ... def drop(x, key):
      ...     return spmd.nn.dropout(x, key, "b/dp d/tp", rate=0.5)
      >>> key, x = jax.random.key(0), jnp.ones((4, 6))
      >>> print(jnp.array_equal(drop(x, key) > 0, jax.random.bernoulli(key, 0.5, x.shape)))
      True

    References:
      Srivastava et al., "Dropout", https://jmlr.org/papers/v15/srivastava14a.html
    """
    if not 0 <= rate < 1:
        rule = f"rate is the share that is dropped, at least 0 and below 1, not {rate!r}."
        raise LayoutError(rule, call=f'dropout(x, key, "{layout}")')
    x = annotate(x, layout, **names)  # a mask of another rank would broadcast
    if rate == 0:
        return x
    kept = random.bernoulli(key, layout, p=1 - rate, **{**_sizes(x, layout, names), **names})
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def _sizes(x: Any, layout: str, names: dict[str, Any]) -> dict[str, int]:
    """The sizes of the dimensions that are not composites, from the array."""
    dims = Layout(layout).dims
    single = {dim.atoms[0].name: i for i, dim in enumerate(dims) if len(dim.atoms) == 1}
    found = {}
    for name, at in single.items():
        if name.isidentifier() and name != "_" and name not in names:
            asked = Layout.from_dims([replace(dim, bracket=i == at) for i, dim in enumerate(dims)])
            found[name] = size(x, str(asked), **names)
    return found


# --- dtypes ------------------------------------------------------------------------------------------------------

# The dtype of statistics, softmaxes and sums.


def wide(x: Any) -> Any:
    """float32, or the dtype of x if it is a wider real or complex one."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4 else jnp.float32


def wide_einsum(x: Any, y: Any, pattern: str, **names: Any) -> jax.Array:
    """`einsum` with a result that is at least float32. The derivatives of a product in bfloat16 are such products.

    Those of a plain einsum would multiply in float32, at half the speed or less on GPUs, and be rounded to bfloat16
    afterwards. Slopes in float16 would underflow, so its derivatives do multiply in float32.
    """
    if not x.dtype == y.dtype == jnp.bfloat16:
        return einsum(x, y, pattern, preferred_element_type=wide(x), **names)
    frame = current_frame("spmd.einsum")  # that of the kernel: JAX may ask for a slope long after its body

    def multiplied(x: Any, y: Any, dtype: Any = None) -> jax.Array:
        with frame.enter():
            return einsum(x, y, pattern, preferred_element_type=dtype, **names)

    @jax.custom_jvp
    def product(x: Any, y: Any) -> jax.Array:
        return multiplied(x, y, wide(x))

    def slope(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        (x, y), (dx, dy) = primals, tangents
        is_zero = lambda pair: any(isinstance(one, SymbolicZero) for one in pair)
        terms = [multiplied(*pair) for pair in ((dx, y), (x, dy)) if not is_zero(pair)]
        return product(x, y), sum(terms[1:], start=terms[0]).astype(wide(x))

    product.defjvp(slope, symbolic_zeros=True)
    return product(x, y)


# --- the rank of what is combined with larger arrays ------------------------------------------------------------------


def with_rank(x: Any, rank: int) -> jax.Array:
    """The array with dimensions of size 1 in front. A reshape would not tell the checker which dimensions are new."""
    return jnp.expand_dims(x, tuple(range(rank - x.ndim)))
