"""In which order the elements of a divided dimension lie, as far as our own operations say so.

A sequence in zig-zag and one in order have the same layout: the same axes divide the same dimension. But attention and
rotary embeddings compare positions. So `parallel` says in which order its tokens are. That is followed from value to
value, as long as the block keeps its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from spmd.checker._state import Axes, Dim, Factor, State


class Order(NamedTuple):
    """The order along the dimension that these axes divide.

    Attributes:
      placement: Its name.
      axes: The mesh axes.
      at: The number of the equation that said so.
    """

    placement: str
    axes: Axes
    at: int


def _block(dims: Sequence[Dim], axes: Axes) -> Factor | None:
    """The block of the dimension that these axes divide; None where they divide none."""
    return next((factor for dim in dims for factor in dim if factor[1] == axes), None)


def _known(state: State) -> list[Order]:
    return [one for one in sorted(state.order) if _block(state.dims, one.axes) is not None] if state.order else []


def kept(operands: Sequence[State], dims: Sequence[Dim]) -> frozenset[Order]:
    """Return what is known of a result with these dimensions: of blocks that are as large as those of the operands."""
    found: dict[Axes, set[Order]] = {}
    for operand in operands:
        for one in _known(operand):
            if _block(operand.dims, one.axes) == _block(dims, one.axes):
                found.setdefault(one.axes, set()).add(one)
    alike = [orders for orders in found.values() if len({one.placement for one in orders}) == 1]
    return frozenset(min(orders, key=lambda one: one.at) for orders in alike)


def differing(operands: Sequence[State]) -> tuple[Order, Order] | None:
    """Two orders of operands that are combined element by element."""
    seen: dict[Axes, Order] = {}
    for operand in operands:
        for one in _known(operand):
            first = seen.setdefault(one.axes, one)
            if first.placement != one.placement:
                return first, one
    return None


def pair(one: Order, other: Order) -> frozenset[Any]:
    """Two orders that were mixed up, whichever of them was right."""
    return frozenset((order.placement, order.axes) for order in (one, other))


def claimed(state: State, said: Order) -> Order | None:
    """The order in which a value is, if it is another one than it is said to be in."""
    return next((one for one in _known(state) if one.axes == said.axes and one.placement != said.placement), None)


def made(state: State, order: Order) -> frozenset[Order]:
    """Return what is known of a value that is in this order now."""
    return frozenset((order, *(one for one in state.order if one.axes != order.axes)))
