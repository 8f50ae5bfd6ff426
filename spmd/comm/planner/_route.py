"""Routes in the user's names: what does not take part is set aside, the rest becomes numbers and back."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

from spmd.comm.planner._moves import Move
from spmd.comm.planner._problem import Placement, Problem, State
from spmd.comm.planner._search import Route, search
from spmd.hardware import Hardware

__all__ = ["Axes", "Leg", "NamedRoute", "Request", "route"]

Axes = tuple[str, ...]
MOST_BORROWED = 3


@dataclass(frozen=True)
class Request:
    """What is asked for, hashable: two equal requests are planned once.

    Attributes:
      sizes: The size of each dimension of the whole array.
      mesh: All mesh axes with their sizes, in mesh order.
      source: The axes of each dimension now, major first.
      target: The axes of each dimension then.
      summed: Axes on which the value is a partial sum now and complete then.
      kept: Axes on which values differ on both sides, which no step may use: partial sums that stay.
      itemsize: Bytes of an element.
      prefer: "collectives", "bytes" or "latency".
      hardware: The profile that "latency" weighs steps with, None for the others.
    """

    sizes: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    source: tuple[Axes, ...]
    target: tuple[Axes, ...]
    summed: Axes = ()
    kept: Axes = ()
    itemsize: int = 4
    prefer: str = "collectives"
    hardware: Hardware | None = None


@dataclass(frozen=True)
class Leg:
    """One step in names; axes of size 1 are left out.

    Attributes:
      kind: What it is.
      axes: The axes whose devices talk to each other, in mesh order.
      before: The axes of each dimension before it.
      after: The axes of each dimension after it.
      summed: The axes on which the value is still a partial sum after it.
      nbytes: What one device sends.
      collectives: How many collectives it takes.
    """

    kind: str
    axes: Axes
    before: tuple[Axes, ...]
    after: tuple[Axes, ...]
    summed: Axes
    nbytes: int
    collectives: int


@dataclass(frozen=True)
class NamedRoute:
    """The cheapest route.

    Attributes:
      legs: The steps.
      bound: Bytes that some device must receive, whatever the method.
      exceeds: Whether some array on the way is larger per device than both ends.
    """

    legs: tuple[Leg, ...]
    bound: int
    exceeds: bool


@functools.lru_cache(maxsize=8192)
def route(request: Request) -> NamedRoute:
    """Plan, once for each request."""
    asked = _Named(request, borrow=False)
    bound = asked.problem.bound(State(asked.problem.source, asked.problem.summed))
    if asked.problem.source == asked.problem.target and not asked.problem.summed:
        return NamedRoute((), 0, False)
    found = asked.search()
    if found.elements > bound and not request.summed and request.prefer == "collectives":
        # An axis that neither side names holds copies: slices of them may travel and be gathered at the end.
        wider = _Named(request, borrow=True)
        if len(wider.names) > len(asked.names):
            other = wider.search()
            if (other.exceeds, other.elements) < (found.exceeds, found.elements):
                asked, found = wider, other
    return NamedRoute(asked.legs(found.moves), bound * request.itemsize, found.exceeds)


class _Named:
    """A request as a problem in numbers, and the way back."""

    def __init__(self, request: Request, *, borrow: bool) -> None:
        self.request = request
        self.sizes = dict(request.mesh)
        source, target = (
            [tuple(a for a in axes if self.sizes[a] > 1) for axes in side] for side in (request.source, request.target)
        )
        self.front = [_common(a, b) for a, b in zip(source, target, strict=True)]
        rest = [(a[len(f) :], b[len(f) :]) for a, b, f in zip(source, target, self.front, strict=True)]
        summed = [a for a in request.summed if self.sizes[a] > 1]
        named = {a for pair in rest for axes in pair for a in axes}.union(summed)
        if borrow:
            used = {a for axes in self.front for a in axes}.union(request.kept)
            others = [a for a, n in request.mesh if n > 1 and a not in named and a not in used]
            named.update(sorted(others, key=lambda a: self.sizes[a])[:MOST_BORROWED])
        self.names = tuple(a for a, _ in request.mesh if a in named)
        number = {a: i for i, a in enumerate(self.names)}
        self.problem = Problem(
            sizes=tuple(n // self.count(f) for n, f in zip(request.sizes, self.front, strict=True)),
            axes=tuple(self.sizes[a] for a in self.names),
            source=tuple(tuple(number[a] for a in axes) for axes, _ in rest),
            target=tuple(tuple(number[a] for a in axes) for _, axes in rest),
            summed=tuple(number[a] for a in self.names if a in summed),
        )

    def count(self, axes: Axes) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def search(self) -> Route:
        """The route in numbers."""
        hardware, sends = self.request.hardware, self.request.prefer == "bytes"
        if hardware is None:
            return search(self.problem, sends=sends)
        links = {hardware.link(a, self.sizes) for a in self.names} | {hardware.default, *hardware.links.values()}
        links |= {hardware.node} if hardware.node else set()

        def seconds(move: Move) -> float:
            if not move.collectives:
                return 0.0
            axes, nbytes = [self.names[i] for i in move.axes], move.elements * self.request.itemsize
            return hardware.collective_seconds(move.kind, nbytes, axes, self.sizes)

        fastest = self.request.itemsize / sum(link.bandwidth for link in links)  # all links at once
        return search(self.problem, seconds=seconds, fastest=fastest)

    def legs(self, moves: tuple[Move, ...]) -> tuple[Leg, ...]:
        """The steps in names."""
        found, before = [], self.problem.source
        for move in moves:
            axes = tuple(self.names[i] for i in sorted(move.axes))
            after = move.after.placement
            summed = tuple(self.names[i] for i in move.after.summed)
            ends = self._placed(before), self._placed(after)
            found.append(Leg(move.kind, axes, *ends, summed, self._bytes(move, before), move.collectives))
            before = after
        return tuple(found)

    def _placed(self, placement: Placement) -> tuple[Axes, ...]:
        return tuple(
            front + tuple(self.names[i] for i in axes) for front, axes in zip(self.front, placement, strict=True)
        )

    def _bytes(self, move: Move, before: Placement) -> int:
        if move.kind != "psum":
            return move.elements * self.request.itemsize
        parts = self.problem.count(move.axes)
        return round(Fraction(2 * self.problem.local(before) * self.request.itemsize * (parts - 1), parts))


def _common(a: Axes, b: Axes) -> Axes:
    """The axes that both sides have in front."""
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return a[:shared]
