"""The dtype of statistics, softmaxes and sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from spmd import einsum
from spmd.modes import current_frame


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
