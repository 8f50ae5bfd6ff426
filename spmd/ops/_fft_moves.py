"""Rearrangements of a block that XLA for CPUs makes in one pass over the memory, forward and backward.

XLA joins slices of one array in one pass, and a transpose that does the same takes two. But the gradient of a slice is
an array of zeros with the slice in it, and the gradient of many slices is a sum of as many such arrays. So these
operations have transposes of their own: the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmd import _compat

JOINED = 16  # the most pieces that are joined one by one; more would make programs large


@dataclass(frozen=True)
class _Cut:
    """Dimension `dim` in `n` pieces, which are stacked in front."""

    n: int
    dim: int
    fixed: bool = False  # whether it undoes a join

    def run(self, x: Any) -> Any:
        # Otherwise XLA removes a join and a cut that follow each other, but for some of the pieces only, and then
        # refuses an exchange of pieces that lie in memory in different orders.
        x = _compat.row_major(x) if self.fixed else x
        before, size, behind = x.shape[: self.dim], x.shape[self.dim], x.shape[self.dim + 1 :]
        return jnp.moveaxis(x.reshape(*before, self.n, size // self.n, *behind), self.dim, 0)

    def back(self) -> _Join:
        return _Join(self.n, self.dim)

    def beside(self, dims: int) -> _Cut:
        return self


@dataclass(frozen=True)
class _Join:
    """The reverse: the `n` pieces of a stack, one behind the other in dimension `dim`."""

    n: int
    dim: int

    def run(self, pieces: Any) -> Any:
        return jax.lax.concatenate([jax.lax.index_in_dim(pieces, i, keepdims=False) for i in range(self.n)], self.dim)

    def back(self) -> _Cut:
        return _Cut(self.n, self.dim, fixed=True)

    def beside(self, dims: int) -> _Join:
        return self


@dataclass(frozen=True)
class _Transpose:
    """A transpose. If there are few planes, it goes plane by plane, which suits caches better."""

    order: tuple[int, ...]

    def run(self, x: Any) -> Any:
        place = self.order.index(0) if self.order else 0
        if 0 < place < x.ndim - 1 and x.shape[0] <= JOINED:
            rest = [i - 1 for i in self.order if i]
            return jnp.stack([x[i].transpose(rest) for i in range(x.shape[0])], place)
        return x.transpose(self.order)

    def back(self) -> _Transpose:
        return _Transpose(tuple(self.order.index(i) for i in range(len(self.order))))

    def beside(self, dims: int) -> _Transpose:
        return _Transpose((*self.order, dims))


def cut(x: Any, n: int, dim: int) -> Any:
    """A stack of the `n` pieces of dimension `dim`."""
    return _move_p.bind(x, step=_Cut(n, dim))


def joined(pieces: Any, dim: int) -> Any:
    """The pieces of a stack, one behind the other in dimension `dim` of the result."""
    return _move_p.bind(pieces, step=_Join(pieces.shape[0], dim))


def transposed(x: Any, order: tuple[int, ...]) -> Any:
    """`x.transpose(order)`."""
    return _move_p.bind(x, step=_Transpose(order)) if order != tuple(range(x.ndim)) else x


def _type(x: Any, *, step: Any) -> Any:
    plain = jax.eval_shape(step.run, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return _compat.with_varying(x, (), plain.shape)


def _batch(args: Any, dims: Any, *, step: Any) -> Any:
    """With a dimension behind all others, which stays there."""
    [x], [batch] = args, dims
    last = x.ndim - 1
    return _move_p.bind(jnp.moveaxis(x, batch, last), step=step.beside(last)), _rank_of(x, step)


def _rank_of(x: Any, step: Any) -> int:
    return x.ndim - 1 + {_Cut: 1, _Join: -1, _Transpose: 0}[type(step)]


_move_p = _compat.linear_primitive(
    "spmd_move",
    abstract=_type,
    run=lambda x, *, step: step.run(x),
    transpose=lambda cotangent, *, step: _move_p.bind(cotangent, step=step.back()),
    batch=_batch,
)
