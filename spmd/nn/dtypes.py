"""In which dtype statistics, softmaxes and sums are made."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

__all__ = ["wide"]


def wide(x: Any) -> Any:
    """float32, or the dtype of x where that is a wider one of real or complex numbers."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4 else jnp.float32
