"""Draws that take the sides which others leave: arguments that are changed in the ways that matter to choices.

A number is set to what it is compared with, arguments are made large or small, or one block of them is, some are made
equal, or one element is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from spmd._trees.leaves import held_dtype, is_key
from spmd.checker._choices import Choice
from spmd.checker._numbers import subsets
from spmd.checker._primitives import Array

_TIMES = (1e4, 1e-4)  # by which arguments are multiplied
_PARTS = 1e5  # more than a number of half precision may be
_NUMBERS = 6  # of a program, that arguments are made equal to
_SEVERAL = 6  # sets of arguments that are made large while the others are not


class Drive(NamedTuple):
    """A change of arguments that may take another side.

    Attributes:
      places: The arguments that change.
      new: From such an argument to another one.
      keeps: Whether given arrays stay what they may be: sorted, or a mask.
      finite: Whether numbers stay finite.
      ties: Whether numbers become equal, or zero.
      scales: Whether they become large or small.
      beyond: Whether integers become negative, and the program compares nothing with such a number. They may be places,
        which are not negative: what differs then says nothing.
    """

    places: Collection[int]
    new: Callable[[Array], Any]
    keeps: bool = False
    finite: bool = True
    ties: bool = False
    scales: bool = False
    beyond: bool = False

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments, changed. What is too large for their type is infinite."""
        with np.errstate(all="ignore"):
            return [_cast(self.new(np.asarray(x)), x) if i in self.places else x for i, x in enumerate(arrays)]


def drives(arrays: Sequence[Any], aims: Sequence[Choice]) -> Iterator[Drive]:
    """Changes of arguments that may take the sides which are left, the likely ones first.

    Args:
      arrays: The arguments of a draw.
      aims: The choices that have such sides.
    """
    reads = sorted(frozenset[int]().union(*(one.reads for one in aims)))
    numbers = list(dict.fromkeys(x for one in aims for x in one.numbers))[:_NUMBERS]
    floats, ints, flags = ([i for i in reads if _kind(arrays[i]) == kind] for kind in ("float", "int", "bool"))
    times = lambda by: lambda x: x * by
    for by in _TIMES if floats else ():
        yield Drive(floats, times(by), keeps=True, scales=True)
        yield from (Drive(floats, _half(times(by), last), keeps=True, scales=True) for last in (False, True))
    if floats:  # parts that are large, and cancel
        yield Drive(floats, lambda x: x + _half(_PARTS)(np.full(x.shape, -_PARTS)), scales=True)
    if ints:
        near = (y for x in numbers if x == int(x) for y in (x, x + 1, x - 1))
        least = min((0, *(one.least for one in aims)))
        yield from (Drive(ints, _half(x), beyond=x < least) for x in dict.fromkeys((*near, 0, 1, 2, -1)))
        yield Drive(ints, lambda x: x % 2, ties=True)
    if flags:
        yield from (
            Drive(flags, new, keeps=True) for x in (True, False) for new in (_half(x), _every(x), _half(x, last=True))
        )
    if not floats:
        return
    yield Drive(floats, np.sign, ties=True)
    yield Drive(floats, _half(0), ties=True)
    yield Drive(floats, np.negative)
    for x in numbers:
        yield from (Drive(floats, _half(y), ties=True) for y in (x * 1.5 + 1e-3, x * 0.5 - 1e-3, x))
    yield from (Drive(floats, _first(x), keeps=True, finite=False) for x in (np.inf, np.nan))
    yield Drive(floats, _half(-np.inf), finite=False)
    for several in list(subsets(floats))[:_SEVERAL]:
        yield from (Drive(several, times(by), keeps=True) for by in _TIMES)
    yield Drive(floats, np.zeros_like, ties=True)


def _kind(x: Any) -> str:
    if is_key(x):
        return "key"
    dtype = held_dtype(x)
    if jnp.issubdtype(dtype, jnp.inexact):
        return "float"
    return "bool" if dtype == np.bool_ else "int"


def _cast(new: Array, like: Any) -> Array:
    dtype = held_dtype(like)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        new = np.clip(np.asarray(new, np.float64), float(info.min), float(info.max))
        new = np.where(new >= float(info.max), info.max, new.astype(np.int64)) if info.bits < 64 else new
    return np.asarray(new).astype(dtype)


def _every(y: Any) -> Callable[[Array], Array]:
    return lambda x: np.full_like(x, y)


def _half(y: Any, last: bool = False) -> Callable[[Array], Array]:
    """Change one half of an array, along its first dimension that has several elements: some blocks, and not all."""

    def new(x: Array) -> Array:
        place = next((d for d, n in enumerate(x.shape) if n > 1), None)
        if place is None:
            return np.broadcast_to(y(x) if callable(y) else y, x.shape)
        shape = [-1 if d == place else 1 for d in range(x.ndim)]
        chosen = (np.arange(x.shape[place]) < x.shape[place] // 2).reshape(shape) != last
        return np.where(chosen, y(x) if callable(y) else y, x)

    return new


def _first(y: float) -> Callable[[Array], Array]:
    """Change the first element alone."""
    return lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, y, x)
