"""The rank of what is combined with larger arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["with_rank"]


def with_rank(x: Any, rank: int) -> jax.Array:
    """The array with dimensions of size 1 in front. A reshape would not tell the checker which dimensions are new."""
    return jnp.expand_dims(x, tuple(range(rank - x.ndim)))
