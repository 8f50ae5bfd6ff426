"""What is known of one value: how each dimension is divided, and what it is along the axes that do not divide it.

A dimension is an ordered list of factors, each with its size here and the mesh axes that divide it: `((2, ()), (3,
("tp",)))` is two runs of three elements, and each run is a block of one that is divided over tp. Merging dimensions
joins their lists, and splitting them takes the lists apart, so that computing on a merged dimension loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Axes = tuple[str, ...]
Factor = tuple[int, Axes]
Dim = tuple[Factor, ...]  # at least one

FREE: Axes = ("*",)  # the value is constant along the factor, and fits any layout
HIDDEN: Axes = ("?",)  # nobody knows how the factor lies
NONE: frozenset[Any] = frozenset()

# Not reported: in a loop over a divided dimension, a step is an element of a piece.
STEP = "step"
# Not reported either: what came out of a jaxpr that no walk reads. It may have communicated.
UNREAD = "unread"
# Nor this: it differs because it is an element of each block. It has met nothing of other devices.
OWN = "own"
QUIET = frozenset((STEP, UNREAD, OWN))


class Pending(NamedTuple):
    """Something that was done to a piece along `axis` as if it were the whole."""

    kind: str
    axis: str
    at: int  # the number of the equation that did it


class State(NamedTuple):
    """One value.

    Attributes:
      dims: The factors of each dimension.
      partial: The axes along which it is a term of a sum.
      different: The axes along which it differs in an unknown way.
      pending: What was done to a piece and is not complete yet.
      zero: Whether it is zero, which does not change a sum.
      table: The integers that each device holds, where only shapes and `axis_index` decide them.
      order: In which order the elements of divided dimensions lie, where our markers say so; see `Order`.
      left: Its state in the body that it left, and its spec there. JAX's residuals enter another body so.
    """

    dims: tuple[Dim, ...] = ()
    partial: frozenset[str] = NONE
    different: frozenset[str] = NONE
    pending: frozenset[Pending] = NONE
    zero: bool = False
    table: Any = None
    left: Any = None
    order: frozenset[Any] = NONE

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which it may differ."""
        known = self.divided | self.partial | self.different
        return known | {p.axis for p in self.pending} if self.pending else known

    @property
    def divided(self) -> frozenset[str]:
        """The axes that divide a dimension."""
        return NONE.union(*map(axes_of_dim, self.dims))


def is_divided(axes: Axes) -> bool:
    """Return whether mesh axes divide a factor."""
    return bool(axes) and axes is not FREE and axes is not HIDDEN


@lru_cache(maxsize=4096)
def axes_of_dim(dim: Dim) -> Axes:
    """The mesh axes that divide a dimension."""
    found: Axes = ()
    for _, axes in dim:
        if axes and axes is not FREE and axes is not HIDDEN:
            found += axes
    return found


def plain(size: int) -> Dim:
    """A dimension that no axis divides."""
    return ((size, ()),) if size != 1 else ((1, FREE),)


def free(size: int) -> Dim:
    return ((size, FREE),)


def hidden(size: int) -> Dim:
    return ((size, HIDDEN),)


def remade(dim: Dim, size: int) -> Dim:
    """A dimension made of another one in an unknown order. It is whole if that one is."""
    return hidden(size) if axes_of_dim(dim) or any(axes is HIDDEN for _, axes in dim) else plain(size)


@lru_cache(maxsize=4096)
def size_of(dim: Dim) -> int:
    return math.prod(size for size, _ in dim)


def is_empty(dims: Sequence[Dim]) -> bool:
    """Return whether an array with these dimensions has no elements."""
    for dim in dims:
        for factor in dim:
            if factor[0] == 0:
                return True
    return False


def emptied(state: State) -> State:
    """The state of an array without elements, whatever was done to it: it lies in any way, and is equal everywhere."""
    return State(tuple(free(size_of(dim)) for dim in state.dims), zero=True, table=state.table)


def normal(factors: Iterable[Factor]) -> Dim:
    """Factors in their canonical form, so that equal dimensions compare equal.

    What follows a divided factor is part of its block. A factor of one element adds nothing if no axis divides it.
    """
    out: list[Factor] = []
    for size, axes in factors:
        if size == 1 and (not axes or axes is FREE):
            continue
        if out:
            last_size, last = out[-1]
            if axes == last and not is_divided(axes):
                out[-1] = (last_size * size, last)
                continue
            if not axes and is_divided(last):
                out[-1] = (last_size * size, last)
                continue
            if last_size == 1 and is_divided(last) and is_divided(axes):
                out[-1] = (size, last + axes)
                continue
        out.append((size, axes))
    return tuple(out) or ((1, FREE),)


def refined(factors: Sequence[Factor], ends: Sequence[int]) -> list[Factor] | None:
    """The same factors, cut so that runs of them have the sizes whose suffix products are `ends`.

    None where a factor would have to be cut across, or is empty. The axes of a factor stay with its leading part.
    """
    out: list[Factor] = []
    after = math.prod(size for size, _ in factors)
    if not after:  # nothing has no parts
        return None
    wanted = sorted((e for e in set(ends) if e < after), reverse=True)
    for size, axes in factors:
        after //= size
        head = axes
        while wanted and wanted[0] > after:
            end = wanted[0]
            if end % after or (size * after) % end:
                return None
            wanted.pop(0)
            cut = end // after
            if cut < size:
                out.append((size // cut, head))
                size = cut
                head = axes if axes is FREE or axes is HIDDEN else ()
        out.append((size, head))
        while wanted and wanted[0] == after:
            wanted.pop(0)
    return out


def ends_of(sizes: Sequence[int]) -> list[int]:
    """The suffix products of sizes: where, counted from the end, each one begins."""
    out, after = [], 1
    for size in reversed(sizes):
        out.append(after)
        after *= size
    return out[::-1]


def _cut_alike(one: Dim, two: Dim) -> list[tuple[int, Axes, Axes]] | None:
    """The factors of two dimensions of one size, cut at the same places. None where a factor would be cut across, and
    where one of them has a block of one element, for which the other has no place."""
    ends = [*ends_of([s for s, _ in one]), *ends_of([s for s, _ in two])]
    if 0 in ends or 0 in (size_of(one), size_of(two)):
        return None
    left, right = refined(one, ends), refined(two, ends)
    if left is None or right is None or [s for s, _ in left] != [s for s, _ in right]:
        return None
    return [(size, a, b) for (size, a), (_, b) in zip(left, right, strict=True)]


def _finest(one: Dim, two: Dim, factors: Iterable[Factor]) -> Dim:
    """These factors, as one of both dimensions has them if that has more: blocks that came around a dimension."""
    out = normal(factors)
    return next((dim for dim in (one, two) if len(dim) > len(out) and normal(dim) == out), out)


def unify(one: Dim, two: Dim, one_free: frozenset[str] = NONE, two_free: frozenset[str] = NONE) -> Dim | None:
    """The dimension that two operands have together; None where they certainly disagree.

    Args:
      one: How the first one lies.
      two: How the second one lies.
      one_free: The axes along which the first operand differs in an unknown way.
      two_free: The same of the second.
    """
    if one == two or (two[0][1] is FREE and len(two) == 1):
        return one
    if one[0][1] is FREE and len(one) == 1:
        return two
    pairs = _cut_alike(one, two)
    if pairs is None:
        return hidden(size_of(one))
    out: list[Factor] = []
    for size, a, b in pairs:
        if a == b or b is FREE:
            axes = a
        elif a is FREE:
            axes = b
        elif a is HIDDEN or b is HIDDEN:
            other = b if a is HIDDEN else a
            axes = other if is_divided(other) else HIDDEN
        elif not a:
            axes = b if not one_free.isdisjoint(b) else None
        elif not b:
            axes = a if not two_free.isdisjoint(a) else None
        else:
            axes = HIDDEN if (not one_free.isdisjoint(b) or not two_free.isdisjoint(a)) else None
        if axes is None:
            return None
        out.append((size, axes))
    return _finest(one, two, out)


def join_dims(one: Dim, two: Dim) -> Dim:
    """Return what is certain of a dimension that is one or the other."""
    if one == two:
        return one
    pairs = _cut_alike(one, two) if size_of(one) == size_of(two) else None
    if pairs is None:
        return hidden(size_of(one))
    out = [(size, a if a == b else b if a is FREE else a if b is FREE else HIDDEN) for size, a, b in pairs]
    return _finest(one, two, out)


def join(one: State, two: State) -> State:
    """Return what is certain of a value that is one or the other."""
    if one is two or one == two:
        return one
    dims = tuple(map(join_dims, one.dims, two.dims))
    partial = one.partial if two.zero else two.partial if one.zero else one.partial & two.partial
    held = one.axes | two.axes
    pending = one.pending | two.pending
    kept = {axis for dim in dims for axis in axes_of_dim(dim)} | partial | {p.axis for p in pending}
    lost = held - kept
    different = one.different | two.different | lost
    return State(
        dims,
        partial - different,
        different,
        still_pending(pending, (one, two), lost),
        one.zero and two.zero,
        one.table if one.table == two.table else None,
        order=one.order & two.order if one.order else NONE,
    )


def still_pending(pending: Iterable[Pending], of: Iterable[State], lost: frozenset[str] = NONE) -> frozenset[Pending]:
    """Return what is pending in a value that is made of others.

    What differs in an unknown way may hold what other devices have, as a halo does, and complete what was done to a
    piece. An element of a block does not.

    Args:
      pending: What was done to them.
      of: The values.
      lost: The axes along which nobody knows any more what it is.
    """
    for one in of:
        if one.different:
            lost = lost | one.different.difference([p.axis for p in one.pending if p.kind == OWN])
    return frozenset([p for p in pending if p.axis not in lost])


def hide(dims: Sequence[Dim], axes: Iterable[str]) -> tuple[Dim, ...]:
    """The same dimensions. Those that one of these axes divides become hidden."""
    return tuple(dim if set(axes).isdisjoint(axes_of_dim(dim)) else hidden(size_of(dim)) for dim in dims)


def equal_along(state: State, axes: frozenset[str]) -> State:
    """The value, equal along these axes. How it became equal is not known."""
    dims = hide(state.dims, axes)
    lost = state.divided.difference(axes, *map(axes_of_dim, dims))
    pending = frozenset(p for p in state.pending if p.axis not in axes)
    different = (state.different - axes) | lost
    return state._replace(dims=dims, partial=state.partial - axes, different=different, pending=pending, table=None)


# --- order -----------------------------------------------------------------------------------------------------------

# In which order the elements of a divided dimension lie, as far as our own operations say so.
#
# A sequence in zig-zag and one in order have the same layout: the same axes divide the same dimension. But attention
# and rotary embeddings compare positions. So `parallel` says in which order its tokens are. That is followed from
# value to value, as long as the block keeps its size.


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


def kept_order(operands: Sequence[State], dims: Sequence[Dim]) -> frozenset[Order]:
    """Return what is known of a result with these dimensions: of blocks that are as large as those of the operands."""
    found: dict[Axes, set[Order]] = {}
    for operand in operands:
        for one in _known(operand):
            if _block(operand.dims, one.axes) == _block(dims, one.axes):
                found.setdefault(one.axes, set()).add(one)
    alike = [orders for orders in found.values() if len({one.placement for one in orders}) == 1]
    return frozenset(min(orders, key=lambda one: one.at) for orders in alike)


def differing_orders(operands: Sequence[State]) -> tuple[Order, Order] | None:
    """Two orders of operands that are combined element by element."""
    seen: dict[Axes, Order] = {}
    for operand in operands:
        for one in _known(operand):
            first = seen.setdefault(one.axes, one)
            if first.placement != one.placement:
                return first, one
    return None


def order_pair(one: Order, other: Order) -> frozenset[Any]:
    """Two orders that were mixed up, whichever of them was right."""
    return frozenset((order.placement, order.axes) for order in (one, other))


def claimed_order(state: State, said: Order) -> Order | None:
    """The order in which a value is, if it is another one than it is said to be in."""
    return next((one for one in _known(state) if one.axes == said.axes and one.placement != said.placement), None)


def with_order(state: State, order: Order) -> frozenset[Order]:
    """Return what is known of a value that is in this order now."""
    return frozenset((order, *(one for one in state.order if one.axes != order.axes)))
