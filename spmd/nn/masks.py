"""Attention masks from positions and segments, which need not be those of a whole sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import SizeError
from spmd._leaves import not_int
from spmd.errors import is_int
from spmd.nn.rank import with_rank

__all__ = ["attention_mask", "check_heads", "check_positive"]


def attention_mask(
    positions: tuple[Any, Any] | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segments: tuple[Any, Any] | None = None,
) -> jax.Array | None:
    """Which keys each query sees, from the positions of both and the segments of both.

    The positions are arguments, so the mask is right for a divided or permuted sequence (`spmd.iota`,
    `spmd.parallel.sequence_positions`) and for a cache. This is plain JAX, for any mode, inside and outside kernels.

    Layouts: positions and segments `"... s"` of the queries and `"... t"` of the keys, divided in any way; result
    `"... s t"`. Positions may leave out the dimensions of `...`.

    Communication: none.

    Args:
      positions: Integers of the queries and of the keys. No query sees a key at a negative position (an empty slot of a
        cache, padding).
      causal: A query sees keys at its own position and before.
      window: A query sees keys less than this many positions away: its own and `window - 1` before it (and after it, if
        not causal).
      segments: Integers of the queries and of the keys, for several documents in one sequence. A query only sees keys
        with its own number.

    Returns:
      Booleans, True where a query sees a key, or None if no mask was asked for.

    Raises:
      SizeError: If the window is not a positive int.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> at = jnp.arange(4)
      >>> print(spmd.nn.attention_mask((at, at), causal=True, window=2).astype(int))
      [[1 0 0 0]
       [1 1 0 0]
       [0 1 1 0]
       [0 0 1 1]]
    """
    check_positive("attention_mask(positions)", window=window)
    given = [x for pair in (positions, segments) if pair is not None for x in pair]
    rank = max((x.ndim for x in given), default=0)
    lifted = [with_rank(x, rank) for x in given]
    seen = []
    if positions is not None:
        q_at, k_at = lifted.pop(0)[..., :, None], lifted.pop(0)[..., None, :]
        ahead = q_at - k_at
        seen.append(jnp.broadcast_to(k_at >= 0, ahead.shape))
        if causal:
            seen.append(ahead >= 0)
        if window is not None:
            seen.append(jnp.abs(ahead) < window)
    if segments is not None:
        seen.append(lifted[0][..., :, None] == lifted[1][..., None, :])
    return functools.reduce(jnp.logical_and, seen) if seen else None


def check_heads(call: str, q: Any, k: Any) -> None:
    """Raise if the key heads do not divide the query heads."""
    if q.shape[-2] % k.shape[-2]:
        rule = f"each key head serves the same number of query heads, and {k.shape[-2]} do not divide {q.shape[-2]}."
        raise SizeError(rule, call=call, got=[f"q: shape {q.shape}", f"k: shape {k.shape}"])


def check_positive(call: str, **given: Any) -> None:
    """Raise if a window, a chunk or a cap is not above zero. Traced values are not checked."""
    for name, value in given.items():
        if value is None or isinstance(value, jax.Array):
            continue
        fault = not_int(name, value, 1, "None")
        if name == "softcap":
            above = is_int(value, 1) or (isinstance(value, float | np.floating) and value > 0)
            fault = "" if above else f"softcap is a number above zero, or None, not {value!r}."
        if fault:
            raise SizeError(fault, call=call)
