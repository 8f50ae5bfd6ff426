"""Rotary position embeddings, for given positions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import LayoutError, SizeError, did_you_mean
from spmd.nn.norm import wide, with_rank

SCALINGS = ("linear", "ntk", "llama3")


def rotary_embedding(x: Any, positions: Any, frequencies: Any, *, interleaved: bool = False) -> jax.Array:
    """Rotate the features of each head by angles that grow with the position.

    The positions are an argument, so the result is right for a divided sequence: pass `spmd.iota("s/cp")`, or
    `spmd.parallel.sequence_positions` for a balanced placement. Angles are at least float32, whatever the dtype of x.
    This is plain JAX, for any mode.

    Layouts: x `"... s h k"`, divided in any way except along k; positions `"s"` or `"... s"`; frequencies `"k/2"` (half
    of k, whole). The result is like x.

    Communication: none, forward and backward.

    Args:
      x: Queries or keys.
      positions: Their positions, integers.
      frequencies: Angles per position, from `rotary_frequencies`. If there are fewer than k/2, the remaining features
        stay as they are (partial rotary embeddings).
      interleaved: Whether features 2i and 2i+1 are a pair, as in the paper. Otherwise i and i + k/2 are, as in Llama's
        weights on Hugging Face and in GPT-NeoX.

    Returns:
      The array, rotated, in the dtype of x.

    Raises:
      SizeError: If there are more frequencies than pairs of features.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> turn = spmd.kernel("s/cp h k -> s/cp h k", mesh=mesh)(lambda x: spmd.nn.rotary_embedding(
      ...     x, spmd.iota("s/cp"), spmd.nn.rotary_frequencies(2)))
      >>> print(jnp.round(100 * turn(jnp.ones((4, 1, 2)))[1, 0]))  # by one radian
      [-30. 138.]

    References:
      Su et al., "RoFormer", https://arxiv.org/abs/2104.09864
    """
    turned = 2 * frequencies.shape[-1]
    if turned > x.shape[-1]:
        rule = f"{turned // 2} frequencies turn {turned} features, and x has {x.shape[-1]}."
        raise SizeError(rule, call="rotary_embedding(x, positions, frequencies)")
    at, turns = positions.astype(wide(x)), frequencies.astype(wide(x))
    angles = at[..., None, None] * turns.reshape((1,) * (positions.ndim + 1) + (-1,))
    angles = with_rank(angles, x.ndim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turning, rest = x[..., :turned].astype(wide(x)), x[..., turned:]
    if interleaved:
        one, two = turning[..., 0::2], turning[..., 1::2]
        pairs = jnp.stack([one * cos - two * sin, one * sin + two * cos], axis=-1)
        out = pairs.reshape(turning.shape)
    else:
        one, two = jnp.split(turning, 2, axis=-1)
        out = jnp.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)
    return jnp.concatenate([out.astype(x.dtype), rest], axis=-1)


def rotary_frequencies(
    k: int,
    *,
    theta: float = 10_000.0,
    scaling: str | None = None,
    factor: float = 1.0,
    original_length: int = 8192,
    low: float = 1.0,
    high: float = 4.0,
) -> jax.Array:
    """The angles per position for `rotary_embedding`: theta ** (-2i/k), stretched for sequences longer than trained on.

    Communication: none; the numbers are the same on all devices.

    Args:
      k: The number of rotated features, an even number: the size of a head, or less for partial rotary embeddings.
      theta: The base; a larger base rotates slower.
      scaling: None, or one of three. "linear" divides all angles by the factor (position interpolation). "ntk" raises
        the base to theta * factor ** (k / (k - 2)), which keeps the fastest angle and divides the slowest by the
        factor. "llama3" divides by the factor those that rotate less than `low` times in the original length, keeps
        those that rotate more than `high` times, and blends in between.
      factor: How many times longer sequences become.
      original_length: For "llama3", the length trained on.
      low: For "llama3", the number of rotations below which the factor fully applies.
      high: For "llama3", the number of rotations above which it does not apply.

    Returns:
      k/2 angles, fastest first: float32, or float64 if `jax_enable_x64` is set.

    Raises:
      LayoutError: If the scaling is unknown.
      SizeError: If k is odd.

    Example:
      >>> import spmd
      >>> print(spmd.nn.rotary_frequencies(4), spmd.nn.rotary_frequencies(4, scaling="linear", factor=2.0))
      [1.   0.01] [0.5   0.005]

    References:
      Linear: https://arxiv.org/abs/2306.15595. NTK-aware: https://arxiv.org/abs/2309.00071 (section 3.1). Llama 3:
      https://github.com/meta-llama/llama-models (apply_scaling).
    """
    call = f"rotary_frequencies({k!r})"
    if k % 2:
        raise SizeError(f"features are rotated in pairs, and {k} is odd.", call=call)
    if scaling not in (None, *SCALINGS):
        shown = ", ".join(map(repr, SCALINGS))
        hint = did_you_mean(str(scaling), SCALINGS) or "."
        raise LayoutError(f"scaling is None or one of {shown}, not {scaling!r}{hint}", call=call)
    if scaling == "ntk" and k > 2:
        theta = theta * factor ** (k / (k - 2))
    frequencies = theta ** (-jnp.arange(0, k, 2, dtype=float) / k)
    if scaling == "linear":
        frequencies = frequencies / factor
    if scaling == "llama3":
        turns = original_length * frequencies / (2 * math.pi)
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    return frequencies
