"""Routes in the user's names. Axes that take no part are set aside, and the others become numbers and names again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from spmd.accelerators import Hardware
from spmd.comm.planner._moves import Move
from spmd.comm.planner._problem import Placement, Problem, State
from spmd.comm.planner._search import Route, search
from spmd.language import axes_product

Axes = tuple[str, ...]

MOST_BORROWED = 3


@dataclass(frozen=True)
class Request:
    """What is asked for. It is hashable, so two equal requests are planned once.

    Attributes:
      sizes: The size of each dimension of the whole array.
      mesh: All mesh axes with their sizes, in mesh order.
      source: The axes of each dimension now, major first.
      target: The axes of each dimension then.
      summed: Axes on which the value is a partial sum now and complete then.
      kept: Axes that no step may use, because values differ along them on both sides, as in partial sums that stay.
      itemsize: Bytes of an element.
      prefer: "collectives", "bytes" or "latency".
      hardware: The profile with which "latency" weighs steps. None for the others.
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
    """One step in names, without axes of size 1.

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
      bound: Bytes that some device must receive whatever the method.
      exceeds: Whether some array on the way is larger per device than both ends.
    """

    legs: tuple[Leg, ...]
    bound: int
    exceeds: bool


@functools.lru_cache(maxsize=8192)
def route(request: Request) -> NamedRoute:
    """Plan, once for each request."""
    best = _Named(request)
    bound = best.problem.bound(State(best.problem.source, best.problem.summed))
    if best.problem.source == best.problem.target and not best.problem.summed:
        return NamedRoute((), 0, False)
    if (best.found.elements > bound or request.hardware) and not request.summed:
        if spare := _spare(request, best):
            best = min(best, _Named(request, spare), key=lambda one: (one.found.exceeds, one.found.cost))
        if request.prefer == "collectives" and len({n for _, n in request.mesh if n > 1}) > 1:
            # Blocks of axes of different sizes rarely lie in each other: rounds of sends may be better in all respects,
            # and where they do not even divide in each other, only rounds need no larger array on the way.
            rounds = _Named(replace(request, prefer="bytes"))
            (_, ours, count), (_, theirs, others) = best.found.cost, rounds.found.cost
            better = theirs < ours and others <= count
            best = rounds if better or best.found.exceeds > rounds.found.exceeds else best
    return NamedRoute(best.legs, bound * request.itemsize, best.found.exceeds)


def seconds_of(
    hardware: Hardware, kind: str, nbytes: float, collectives: int, axes: Axes, mesh: Mapping[str, int]
) -> float:
    """The estimated time of one step, whose collectives send the same each."""
    if not collectives:
        return 0.0
    return collectives * hardware.collective_seconds(kind, nbytes / collectives, axes, mesh)


def _spare(request: Request, plain: _Named) -> Axes:
    """Axes that neither side names, which hold copies: slices of them may travel and be gathered at the end."""
    named = {*plain.names, *(a for axes in (*plain.front, request.kept) for a in axes)}
    return tuple(a for _, a in sorted((n, a) for a, n in request.mesh if n > 1 and a not in named)[:MOST_BORROWED])


class _Named:
    """A request as a problem in numbers, and the way back to names. `spare` are axes to use that neither side names."""

    def __init__(self, request: Request, spare: Axes = ()) -> None:
        self.request, self.mesh = request, dict(request.mesh)
        source, target = (
            [tuple(a for a in axes if self.mesh[a] > 1) for axes in side] for side in (request.source, request.target)
        )
        self.front = [_common(a, b) for a, b in zip(source, target, strict=True)]
        rest = [(a[len(f) :], b[len(f) :]) for a, b, f in zip(source, target, self.front, strict=True)]
        summed = [a for a in request.summed if self.mesh[a] > 1]
        # Axes are numbered in order of appearance, so a problem is solved once whatever their names are.
        named = dict.fromkeys([*(a for axes, _ in rest for a in axes), *(a for _, axes in rest for a in axes), *summed])
        named.update(dict.fromkeys(spare))
        self.names = tuple(named)
        number = {a: i for i, a in enumerate(self.names)}
        self.problem = Problem(
            sizes=tuple(n // axes_product(f, self.mesh) for n, f in zip(request.sizes, self.front, strict=True)),
            axes=tuple(self.mesh[a] for a in self.names),
            source=tuple(tuple(number[a] for a in axes) for axes, _ in rest),
            target=tuple(tuple(number[a] for a in axes) for _, axes in rest),
            summed=tuple(sorted(number[a] for a in summed)),
        )

    @functools.cached_property
    def found(self) -> Route:
        """The route in numbers."""
        hardware, sends = self.request.hardware, self.request.prefer != "collectives"
        if hardware is None:
            return search(self.problem, sends=sends)
        links = {hardware.default, *hardware.links.values()}
        links |= {hardware.node} if hardware.node else set()

        def seconds(move: Move) -> float:
            nbytes = move.elements * self.request.itemsize
            return seconds_of(hardware, move.kind, nbytes, move.collectives, self._in_mesh_order(move.axes), self.mesh)

        fastest = self.request.itemsize / sum(link.bandwidth for link in links)  # all links at once
        return search(self.problem, sends=sends, seconds=seconds, fastest=fastest)

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The steps in names."""
        found, before = [], self.problem.source
        for move in self.found.moves:
            axes, summed = (self._in_mesh_order(ids) for ids in (move.axes, move.after.summed))
            after = move.after.placement
            ends = self._placed(before), self._placed(after)
            found.append(Leg(move.kind, axes, *ends, summed, self._bytes(move, before), move.collectives))
            before = after
        return tuple(found)

    def _in_mesh_order(self, ids: tuple[int, ...]) -> Axes:
        found = {self.names[i] for i in ids}
        return tuple(a for a in self.mesh if a in found)

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
    """The common front of both sides."""
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return a[:shared]
