"""The collectives of `jax.lax` with types that fit: invarying values are cast before they travel.

Along axes of size 1 they are those of `_compat.alone`, which compile to nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd import _compat

Axes = tuple[str, ...]
Groups = tuple[tuple[int, ...], ...] | None
F = TypeVar("F", bound=Callable[..., Any])


def once(*static: str) -> Callable[[F], F]:
    """A function that JAX differentiates once for all arrays of one type, and not at every call.

    Where a gradient is taken of what the caller does, JAX derives the derivative of each primitive anew, and a gather
    takes four times as long to trace. A `jit` remembers it. Elsewhere the `jit` costs more than what it holds, and is
    left out. Its equations stand in the jaxpr as if it were not there, with the line and the scope of the caller.

    Args:
      *static: The parameters that are not arrays.
    """

    def remembered(fn: F) -> F:
        jitted = jax.jit(fn, static_argnames=static, inline=_compat.INLINE)

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            for x in args:
                if _compat.primal(x) is not None:
                    return jitted(*args, **kwargs)
            return fn(*args, **kwargs)

        return called  # type: ignore[return-value]

    return remembered


@once("axes")
def psum(x: Any, axes: Axes) -> Any:
    """The sum over `axes`, whatever JAX's type is on each. The result is invarying on them."""
    unreduced = tuple(a for a in axes if a in _compat.unreduced_axes(x))
    rest = tuple(a for a in axes if a not in unreduced)
    if unreduced:
        x = lax.psum(x, unreduced)
    if _compat.of_one(rest):
        return _compat.alone("psum_invariant", x, rest)
    return lax.psum(_compat.pvary(x, rest), rest) if rest else x


def pmax(x: Any, axes: Axes) -> Any:
    """The maximum over `axes`. It has no gradient of its own."""
    if _compat.of_one(axes):
        return _compat.alone("pmax", x, axes)
    return lax.pmax(_compat.pvary(x, axes), axes) if axes else x


def pmin(x: Any, axes: Axes) -> Any:
    """The minimum over `axes`. It has no gradient of its own."""
    if _compat.of_one(axes):
        return _compat.alone("pmin", x, axes)
    return lax.pmin(_compat.pvary(x, axes), axes) if axes else x


@once("axes", "dim", "to", "groups")
def all_gather(x: Any, axes: Axes, dim: int, to: str, groups: Groups = None) -> Any:
    """The blocks along `axes`, major axis first, joined in dimension `dim`. All verbs run within groups of devices, if
    there are any, numbered along `axes`."""
    if _compat.of_one(axes):
        return _compat.alone("all_gather" if to == "varying" else "all_gather_invariant", x, axes, dim)
    return lax.all_gather(_compat.pvary(x, axes), axes, axis=dim, tiled=True, to=to, axis_index_groups=groups)


@once("axes", "dim", "groups")
def psum_scatter(x: Any, axes: Axes, dim: int, groups: Groups = None) -> Any:
    """The sum over `axes`, of which each device keeps its block of dimension `dim`."""
    if _compat.of_one(axes):
        return _compat.alone("reduce_scatter", x, axes, dim)
    x = _compat.pvary(x, axes)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, axis_index_groups=groups, tiled=True)


@once("axes", "split", "concat", "groups")
def all_to_all(x: Any, axes: Axes, split: int, concat: int, groups: Groups = None) -> Any:
    """Divide dimension `split` over `axes`, and make dimension `concat` whole along them."""
    if _compat.of_one(axes):
        return _compat.alone("all_to_all", x, axes)
    x = _compat.apart(_compat.pvary(x, axes))
    return lax.all_to_all(x, axes, split, concat, axis_index_groups=groups, tiled=True)


def ppermute(x: Any, axes: Axes, sizes: dict[str, int], perm: Sequence[tuple[int, int]]) -> Any:
    """Send block `i` to place `j` for each pair. Blocks are numbered with the first of `axes` as the major one.

    JAX numbers devices by the axes in *mesh* order, whatever order is asked for, so the pairs are renumbered.
    """
    order = tuple(a for a in sizes if a in axes)

    def renumber(block: int) -> int:
        place = {}
        for axis in reversed(axes):
            block, place[axis] = divmod(block, sizes[axis])
        index = 0
        for axis in order:
            index = index * sizes[axis] + place[axis]
        return index

    return lax.ppermute(_compat.pvary(x, axes), order, [(renumber(i), renumber(j)) for i, j in perm])


def axis_index(axes: Axes, sizes: dict[str, int]) -> Any:
    """Return which block of a dimension divided over `axes` this device holds."""
    index: Any = 0
    for axis in axes:
        index = index * sizes[axis] + lax.axis_index(axis)
    return index


def is_first(axes: Sequence[str]) -> Any:
    """Return whether this device is the first one along `axes`."""
    return functools.reduce(operator.and_, (lax.axis_index(a) == 0 for a in axes))


def at_least_int32(numbers: Any) -> Any:
    """Whole numbers that can be compared with sizes, which small integers cannot hold."""
    return numbers.astype(jnp.int32) if numbers.dtype.itemsize < 4 else numbers


def slice_block(x: Any, axis: str, dim: int, parts: int) -> Any:
    """This device's block of dimension `dim`. Backward one all-gather if `x` is equal by JAX's type. If it is a
    gathered copy nothing is sent, and the zero-padded cotangent is a partial sum."""
    index = lax.axis_index(axis)
    if axis in _compat.varying_axes(x) or axis not in _compat.manual_axes():
        return _split_run(x, index, dim=dim, parts=parts, axis=axis)
    return _split_p.bind(x, index, dim=dim, parts=parts, axis=axis)


def _split_shape(x: Any, index: Any, *, dim: int, parts: int, axis: str) -> Any:
    shape = (*x.shape[:dim], x.shape[dim] // parts, *x.shape[dim + 1 :])
    return _compat.with_varying(x, (axis,), shape)


def _split_run(x: Any, index: Any, *, dim: int, parts: int, axis: str) -> Any:
    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, index * size, size, dim)


def _split_transpose(cotangent: Any, *, dim: int, parts: int, axis: str) -> Any:
    return all_gather(cotangent, (axis,), dim, "invarying")


_split_p = _compat.linear_primitive(
    "spmd_split", abstract=_split_shape, run=_split_run, transpose=_split_transpose, along="dim"
)


def argsort(x: Any, axis: int = -1, *, descending: bool = False) -> Any:
    """A stable `jnp.argsort`. Its places are varying where `x` is; JAX types those of `jnp.argsort` as equal."""
    axis %= x.ndim
    turned = (lambda y: jnp.flip(y, axis)) if descending else (lambda y: y)  # twice: equal ones keep their order
    places = lax.broadcasted_iota(np.int32 if x.shape[axis] < 2**31 else np.int64, x.shape, axis)
    places = _compat.pvary(places, sorted(_compat.varying_axes(x)))
    return turned(lax.sort((turned(x), turned(places)), dimension=axis, num_keys=1)[1])


def to_invarying(x: Any, axes: Axes) -> Any:
    """`x`, equal along `axes`, typed invarying there. No communication, forward or backward.

    The first device along them gets the cotangent and the others get zeros, because x is typed varying and the
    cotangents of equal copies are parts of a sum.
    """
    return retype(x, tuple(a for a in axes if a in _compat.varying_axes(x)), "invarying")


def to_reduced(x: Any, axes: Axes) -> Any:
    """`x`, equal along `axes`, typed as JAX's reduced there. No communication forward. Backward each device keeps its
    own term, and if `x` is invarying one all-reduce adds them up."""
    varying = tuple(a for a in axes if a in _compat.varying_axes(x))
    rest = tuple(a for a in axes if a not in varying and a not in _compat.reduced_axes(x))
    x = retype(x, varying, "reduced")
    return lax.pcast(x, rest, to="reduced") if rest else x


def retype(x: Any, axes: Axes, to: str) -> Any:
    """`x` with another of JAX's types along `axes`, and nothing else: a cast that JAX does not have, or one whose
    transpose in JAX communicates.

    Args:
      x: An array.
      axes: The axes along which its type changes.
      to: What it becomes. "invarying": it varies and is equal. "reduced": it varies and is equal; and "terms", the
        transpose, from unreduced, where each device keeps its own term. "hidden": it varies, and JAX is not told; and
        "shown", the transpose. Both ways each device's cotangent is that of its own shard. "reference": as "hidden", of
        what a reference computes in place of opaque code.
    """
    return _retype_p.bind(x, axes=axes, to=to) if axes else x


_TYPES: dict[str, Callable[[Any, Axes], Any]] = {
    "invarying": _compat.without_varying,
    "reduced": _compat.as_reduced,
    "terms": _compat.as_terms,
    "hidden": _compat.without_varying,
    "reference": _compat.without_varying,
    "shown": lambda x, axes: _compat.with_varying(x, axes, x.shape),
}
_TRANSPOSES = {"reduced": "terms", "terms": "reduced", "hidden": "shown", "shown": "hidden", "reference": "shown"}


def _retype_transpose(cotangent: Any, *, axes: Axes, to: str) -> Any:
    return of_copies(cotangent, axes) if to == "invarying" else retype(cotangent, axes, _TRANSPOSES[to])


def of_copies(cotangent: Any, axes: Axes) -> Any:
    """The cotangents of equal copies along `axes`, terms of a sum, of which the first is the whole."""
    cotangent = _compat.pvary(cotangent, axes)
    many = [a for a in axes if lax.axis_size(a) > 1]
    return jnp.where(is_first(many), cotangent, jnp.zeros((), cotangent.dtype)) if many else cotangent


_retype_p = _compat.linear_primitive(
    "spmd_retype",
    abstract=lambda x, *, axes, to: _TYPES[to](x, axes),
    run=lambda x, **_: x,
    transpose=_retype_transpose,
)
