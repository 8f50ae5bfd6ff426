"""The problem in numbers alone: sizes, axes as numbers, and the bound on what must travel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Placement = tuple[tuple[int, ...], ...]
"""For each dimension the axes that divide it, major first."""


class State(NamedTuple):
    """How an array lies on the mesh on the way: its placement, and the axes on which it is still a partial sum."""

    placement: Placement
    summed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """From one placement to another.

    Mesh axes are numbers, and `axes` are their sizes. An axis of size 1 is not part of the problem, and neither is an
    axis that stands at the front of a dimension on both sides.

    Attributes:
      sizes: The sizes of the dimensions, divided by the axes that stay in front.
      axes: The size of each axis.
      source: Where the array lies.
      target: Where it is to lie.
      summed: Axes on which the source is a partial sum and the target is complete.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    source: Placement
    target: Placement
    summed: tuple[int, ...] = ()

    @cached_property
    def whole(self) -> int:
        """Elements of the array that the devices with one setting of the axes in front hold together."""
        return math.prod(self.sizes)

    @cached_property
    def limit(self) -> int:
        """The larger of the two ends, per device, which an intermediate should not exceed."""
        return max(self.local(self.source), self.local(self.target))

    def count(self, axes: Sequence[int]) -> int:
        """How many blocks the axes make."""
        total = 1
        for axis in axes:
            total *= self.axes[axis]
        return total

    def blocks(self, placement: Placement) -> tuple[int, ...]:
        """Into how many blocks each dimension is divided."""
        return tuple(self.count(axes) for axes in placement)

    def local(self, placement: Placement) -> int:
        """Elements per device."""
        return self.whole // math.prod(self.blocks(placement))

    def fits(self, placement: Placement) -> bool:
        """Whether every dimension divides."""
        return all(not axes or size % self.count(axes) == 0 for size, axes in zip(self.sizes, placement, strict=True))

    def free(self, state: State) -> tuple[int, ...]:
        """The axes on which the array is equal."""
        used = {axis for axes in state.placement for axis in axes}.union(state.summed)
        return tuple(axis for axis in range(len(self.axes)) if axis not in used)

    def bound(self, state: State) -> int:
        """Elements that some device must receive to come from `state` to the target, whatever the method.

        For a complete source it is what the target shard needs and the source shard lacks, on the device where that is
        most. Two blocks of a dimension lie in each other on every device if one list of axes is the front of the other.
        Otherwise the first axes that differ are set independently, and there are devices where the blocks do not meet.
        So no device needs to be looked at.

        For a partial sum of u parts no element of the target is there before something came in, so it is at least the
        target shard. Bringing u parts together takes u - 1 transfers. Giving the sum to q devices takes q - 1 more,
        which come later. Some device has at least the average of these: S(n-1)/n for a reduce-scatter, 2S(n-1)/n for an
        all-reduce.
        """
        wanted = self.local(self.target)
        if state.summed:
            devices = self.count(range(len(self.axes)))
            holders = devices // math.prod(self.blocks(self.target))
            transfers = self.whole * (self.count(state.summed) - 1 + holders - 1)
            return max(wanted, -(-transfers // devices))
        kept = 1
        for size, have, want in zip(self.sizes, state.placement, self.target, strict=True):
            shared = min(len(have), len(want))
            if have[:shared] != want[:shared]:
                return wanted
            kept *= size // self.count(have if len(have) > len(want) else want)
        return wanted - kept

    @cached_property
    def finer(self) -> tuple[tuple[Placement, tuple[int, ...]], ...]:
        """The target, and each placement from which one gather leads to it, with their blocks."""
        free = self.free(State(self.target))
        found = []
        for used in ordered(free):
            for runs in cuts(used, len(self.sizes)):
                placement = tuple(axes + run for axes, run in zip(self.target, runs, strict=True))
                if self.fits(placement):
                    found.append((placement, self.blocks(placement)))
        return tuple(found)


MOST = 4
"""With more axes than these, not every order is tried."""


def ordered(axes: Sequence[int], least: int = 0) -> Iterator[tuple[int, ...]]:
    """Every choice of the axes in every order, or, if they are many, in the order given."""
    for count in range(least, len(axes) + 1):
        yield from itertools.permutations(axes, count) if len(axes) <= MOST else itertools.combinations(axes, count)


def cuts(run: tuple[int, ...], parts: int) -> Iterator[Placement]:
    """Every way to cut a run into consecutive parts, which may be empty."""
    if not parts:
        if not run:
            yield ()
        return
    for inner in itertools.combinations_with_replacement(range(len(run) + 1), parts - 1):
        yield tuple(run[a:b] for a, b in itertools.pairwise((0, *inner, len(run))))
