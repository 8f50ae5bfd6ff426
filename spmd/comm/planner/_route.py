"""Routes in the user's names. Axes that take no part are set aside, and the others become numbers and names again."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from spmd.accelerators import Hardware
from spmd.comm.planner._moves import Move, Placement, Problem, State, common_front, moves
from spmd.language import axes_product

# --- the cheapest sequence of steps: A* with the lower bound as the estimate of what is still to come -----------------


Seconds = Callable[[Move], float]
PATIENCE = 40_000
"""How many steps the search looks at, a second or two, before it takes the best route so far. If it has none yet, it
goes where the bound is smallest until it has one. This is enough for three axes, and for most plans on four."""


class Route(NamedTuple):
    """A sequence of steps.

    Attributes:
      moves: The steps.
      cost: Seconds if they count, elements that a device sends, collectives.
      exceeds: Whether some array on the way is larger per device than both ends.
    """

    moves: tuple[Move, ...]
    cost: tuple[float, int, int]
    exceeds: bool = False

    @property
    def elements(self) -> int:
        return self.cost[1]


class _Cost(NamedTuple):
    """What is compared, in this order. All are sums but one, a maximum, so a better start stays better however it goes
    on."""

    seconds: float = 0.0
    elements: int = 0
    collectives: int = 0
    peak: int = 0
    sizes: int = 0
    steps: int = 0


@functools.lru_cache(maxsize=8192)
def search(problem: Problem, *, sends: bool = False, seconds: Seconds | None = None, fastest: float = 0.0) -> Route:
    """The cheapest route.

    Args:
      problem: The problem.
      sends: Whether point-to-point rounds may be used.
      seconds: The time of a step, if time counts before bytes.
      fastest: The least seconds per element that any step takes.
    """
    for limit in (problem.limit, problem.whole):
        found = _search(problem, sends, seconds, fastest, limit)
        if found is not None:
            time = sum(map(seconds, found)) if seconds else 0.0
            cost = _compared(time), sum(move.elements for move in found), sum(move.collectives for move in found)
            return Route(found, cost, limit > problem.limit)
    raise AssertionError("gathering everything is always possible")


def _search(
    problem: Problem, sends: bool, seconds: Seconds | None, fastest: float, limit: int
) -> tuple[Move, ...] | None:
    start, goal = State(problem.source, problem.summed), State(problem.target)
    best: dict[State, _Cost] = {start: _Cost()}
    came: dict[State, tuple[Move, ...]] = {start: ()}
    times = {start: 0.0}
    left = {start: problem.bound(start)}
    count = itertools.count()
    queue = [(_estimate(_Cost(), left[start], fastest), next(count), start, _Cost())]
    looked = 0
    while queue:
        _, _, state, cost = heapq.heappop(queue)
        if cost != best[state]:
            continue  # a cheaper way here was found meanwhile
        if state == goal or (looked > PATIENCE and goal in best):
            return came[goal]
        for move in moves(problem, state, sends=sends, limit=limit):
            looked += 1
            local = problem.local(move.after.placement)
            time = times[state] + (seconds(move) if seconds else 0.0)
            new = _Cost(
                _compared(time),
                cost.elements + move.elements,
                cost.collectives + move.collectives,
                max(cost.peak, local if move.after != goal else 0),
                cost.sizes + local * min(move.steps, 2),
                cost.steps + move.steps,
            )
            if move.after not in best or new < best[move.after]:
                best[move.after], came[move.after], times[move.after] = new, (*came[state], move), time
                if move.after not in left:
                    left[move.after] = problem.bound(move.after)
                guess = _estimate(new, left[move.after], fastest)
                if looked > PATIENCE:
                    guess = _Cost(-1.0, elements=left[move.after], collectives=new.elements)
                heapq.heappush(queue, (guess, next(count), move.after, new))
    return None


def _estimate(cost: _Cost, left: int, fastest: float) -> _Cost:
    """The least cost of a route through here."""
    return _Cost(
        _compared(cost.seconds + left * fastest),
        cost.elements + left,
        cost.collectives + (left > 0),
        cost.peak,
        cost.sizes,
        cost.steps,
    )


def _compared(time: float) -> float:
    """A time in whole picoseconds, so that sums of the same times in another order are equal and bytes decide."""
    return round(time, 12)


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
        self.front = [a[: common_front(a, b)] for a, b in zip(source, target, strict=True)]
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
