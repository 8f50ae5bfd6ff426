"""Fourier transforms on one device, and of a divided dimension if no other dimension can take its axes.

The latter is a transform in two factors, with three exchanges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd.comm.collectives import all_to_all
from spmd.modes import scope
from spmd.ops._create import iota
from spmd.ops._rearrange import rearrange
from spmd.ops._sizes import axis_size


def transformed(fn: Callable[..., Any], x: Any, dims: list[int]) -> Any:
    """A transform of the dimensions `dims`. XLA transforms the last ones, so they become last, in memory too."""
    order = [*(i for i in range(x.ndim) if i not in dims), *dims]
    out = _compat.row_major(fn(_compat.row_major(x.transpose(order)), axes=range(-len(dims), 0)))
    return out.transpose([order.index(i) for i in range(x.ndim)])


def factors(n: int, parts: int) -> tuple[int, int]:
    """Write n, a multiple of `parts`, as a product. The first factor is a multiple of `parts`. If the second can be one
    too, it is, and the two are as equal as possible."""
    rest, remainder = divmod(n, parts * parts)
    if remainder:
        return parts, n // parts
    first = max(d for d in range(1, math.isqrt(rest) + 1) if rest % d == 0)
    return parts * first, parts * (rest // first)


@scope(mapping=None)
def in_two_factors(x: Any, sizes: tuple[int, int], axes: tuple[str, ...], *, inverse: bool, norm: str) -> Any:
    """The transform of the last dimension, `"... (m n)/a"` to `"... (q k)/a"`, complex.

    With the sample `m N + n` and the frequency `q M + k`: transforms of length M along m, a factor for each k and n,
    transforms of length N along n. (W. M. Gentleman, G. Sande, Fast Fourier Transforms, AFIPS 1966.)
    """
    m, n = sizes
    wide = -(-n // axis_size(axes)) * axis_size(axes)  # as many columns as can be divided
    many = functools.partial(jnp.fft.ifftn if inverse else jnp.fft.fftn, norm=norm)
    x = rearrange(x, "... (m n)/a -> ... m/a n", n=n, a=axes)
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, wide - n)]) if wide > n else x
    x = transformed(many, all_to_all(x, "... m/a n -> ... m n/a", a=axes), [x.ndim - 2])
    turns = jnp.arange(m, dtype=jnp.int32)[:, None] * iota("n/a", n=wide, a=axes)[None, :]
    angle = turns.astype(x.real.dtype) * (math.tau / (m * n) * (1 if inverse else -1))
    x = x * lax.expand_dims(lax.complex(jnp.cos(angle), jnp.sin(angle)), range(x.ndim - 2))
    x = all_to_all(x, "... k n/a -> ... k/a n", a=axes)
    x = transformed(many, x[..., :n] if wide > n else x, [x.ndim - 1])
    if wide > n:
        return _in_blocks(x, axes)
    x = all_to_all(x, "... k/a q -> ... k q/a", a=axes)
    return rearrange(x, "... k q/a -> ... (q k)/a", a=axes)


def _in_blocks(x: Any, axes: tuple[str, ...]) -> Any:
    """`"... k/a q"` to `"... (q k)/a"` with one k on each device, though a does not divide q.

    Row k has for block d the frequencies `q K + k` from `d N` on. Their number is `N / K`, rounded up or down. Each
    pair of devices exchanges the larger number, and each device puts its block in order.
    """
    parts, n = axis_size(axes), x.shape[-1]
    places = -(-n // parts)
    start = lambda row, block: (block * n - row + parts - 1) // parts  # the first q of a row that is in a block
    row, block = iota("k/a", k=parts, a=axes), jnp.arange(parts, dtype=jnp.int32)
    there = start(row[:, None, None], block[None, :, None]) + jnp.arange(places, dtype=jnp.int32)[None, None, :]
    x = _taken(x, jnp.minimum(there, n - 1).reshape(row.size, parts * places))
    x = all_to_all(x.reshape(*x.shape[:-1], parts, places), "... k/a d c -> ... k d/a c", a=axes)
    x = jnp.moveaxis(x, -3, -2).reshape(*x.shape[:-3], x.shape[-2], parts * places)
    block = iota("d/a", d=parts, a=axes)[:, None]
    wanted = block * n + jnp.arange(n, dtype=jnp.int32)[None, :]
    here = wanted % parts * places + wanted // parts - start(wanted % parts, block)
    return rearrange(_taken(x, here), "... d/a r -> ... (d r)/a", a=axes)


def _taken(x: Any, at: Any) -> Any:
    """Elements of the last dimension, chosen row by row."""
    return jnp.take_along_axis(x, lax.expand_dims(at, range(x.ndim - 2)), axis=-1)
