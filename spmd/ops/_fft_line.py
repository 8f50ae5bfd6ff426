"""Fourier transforms on one device, and of a dimension that is divided and has none beside it: in two factors, three
exchanges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd.comm.collectives import all_to_all
from spmd.mode import scope
from spmd.ops._create import iota
from spmd.ops._rearrange import rearrange

__all__ = ["along", "factors", "in_two_factors"]


def along(fn: Callable[..., Any], x: Any, dims: list[int]) -> Any:
    """A transform of the dimensions `dims`, as XLA has it: of the last ones, in memory too."""
    order = [*(i for i in range(x.ndim) if i not in dims), *dims]
    out = _compat.row_major(fn(_compat.row_major(x.transpose(order)), axes=range(-len(dims), 0)))
    return out.transpose([order.index(i) for i in range(x.ndim)])


def factors(n: int, parts: int) -> tuple[int, int] | None:
    """n as a product of two multiples of `parts`, as equal as can be; None where there is none."""
    rest, remainder = divmod(n, parts * parts)
    if remainder:
        return None
    first = max(d for d in range(1, math.isqrt(rest) + 1) if rest % d == 0)
    return parts * first, parts * (rest // first)


@scope(mapping=None)
def in_two_factors(x: Any, sizes: tuple[int, int], axes: tuple[str, ...], *, inverse: bool, norm: str) -> Any:
    """The transform of the last dimension, `"... (m n)/a"` to `"... (q k)/a"`, complex.

    With the sample `m N + n` and the frequency `q M + k`: transforms of length M along m, a factor for each k and n,
    transforms of length N along n. (W. M. Gentleman, G. Sande, Fast Fourier Transforms, AFIPS 1966.)
    """
    m, n = sizes
    many = functools.partial(jnp.fft.ifftn if inverse else jnp.fft.fftn, norm=norm)
    x = rearrange(x, "... (m n)/a -> ... m/a n", n=n, a=axes)
    x = along(many, all_to_all(x, "... m/a n -> ... m n/a", a=axes), [x.ndim - 2])
    turns = jnp.arange(m, dtype=jnp.int32)[:, None] * iota("n/a", n=n, a=axes)[None, :]  # below m n
    angle = turns.astype(x.real.dtype) * (math.tau / (m * n) * (1 if inverse else -1))
    x = x * lax.expand_dims(lax.complex(jnp.cos(angle), jnp.sin(angle)), range(x.ndim - 2))
    x = along(many, all_to_all(x, "... k n/a -> ... k/a n", a=axes), [x.ndim - 1])
    x = all_to_all(x, "... k/a q -> ... k q/a", a=axes)
    return rearrange(x, "... k q/a -> ... (q k)/a", a=axes)
