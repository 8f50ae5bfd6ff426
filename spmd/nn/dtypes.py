"""The dtype of statistics, softmaxes and sums."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

__all__ = ["wide"]


def wide(x: Any) -> Any:
    """float32, or the dtype of x if it is a wider real or complex one."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4 else jnp.float32
