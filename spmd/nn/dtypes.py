"""The dtype of statistics, softmaxes and sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide(x: Any) -> Any:
    """float32, or the dtype of x if it is a wider real or complex one."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4 else jnp.float32


# --- the rank of what is combined with larger arrays ------------------------------------------------------------------


def with_rank(x: Any, rank: int) -> jax.Array:
    """The array with dimensions of size 1 in front. A reshape would not tell the checker which dimensions are new."""
    return jnp.expand_dims(x, tuple(range(rank - x.ndim)))
