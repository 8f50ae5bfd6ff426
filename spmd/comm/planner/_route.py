"""Routes in the user's names. Axes that take no part are set aside, and the others become numbers and names again."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from spmd.accelerators import Hardware
from spmd.comm.planner._compose import composed, gathered
from spmd.comm.planner._moves import Move, Placement, Problem, State, common_front, moves
from spmd.language import axes_product

# --- the cheapest sequence of steps: A* with the lower bound as the estimate of what is still to come -----------------


Seconds = Callable[[Move], float]
LARGE, LARGE_TIMED = 9, 12
"""With more axes times dimensions than these, the best of the routes that are put together is taken."""
PATIENCE = 10_000
"""How many steps the search looks at, a fifth of a second, before it takes the best route so far."""


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
    known = [_priced(problem, moves, seconds) for moves in composed(problem, sends=sends)]
    first = min(known, default=None)
    for limit in (problem.limit, problem.whole):
        many = len(problem.axes) * len(problem.sizes) > (LARGE_TIMED if seconds else LARGE)
        found = first[1] if first and many else _search(problem, sends, seconds, fastest, limit, first)
        if found is not None:
            cost, _ = _priced(problem, found, seconds)
            return Route(found, cost[:3], limit > problem.limit)
        first = _priced(problem, gathered(problem), seconds)
    raise AssertionError("gathering everything is always possible")


Priced = tuple[_Cost, tuple[Move, ...]]


def _priced(problem: Problem, moves: tuple[Move, ...], seconds: Seconds | None) -> Priced:
    """A route with what it costs."""
    cost, time = _Cost(), 0.0
    for move in moves:
        time += seconds(move) if seconds else 0.0
        cost = _after(problem, cost, time, move)
    return cost, moves


def _after(problem: Problem, cost: _Cost, time: float, move: Move) -> _Cost:
    """The cost of a route with one more step, after which `time` has passed in all."""
    local = problem.local(move.after.placement)
    return _Cost(
        _compared(time),
        cost.elements + move.elements,
        cost.collectives + move.collectives,
        max(cost.peak, local if move.after != State(problem.target) else 0),
        cost.sizes + local * min(move.steps, 2),
        cost.steps + move.steps,
    )


def _search(
    problem: Problem, sends: bool, seconds: Seconds | None, fastest: float, limit: int, known: Priced | None
) -> tuple[Move, ...] | None:
    """The cheapest route, or the best that was found when patience ended. `known` is one that is known already."""
    start, goal = State(problem.source, problem.summed), State(problem.target)
    best: dict[State, _Cost] = {start: _Cost()}
    came: dict[State, tuple[Move, ...]] = {start: ()}
    if known:
        best[goal], came[goal] = known
    times = {start: 0.0}
    left = {start: problem.bound(start)}
    count = itertools.count()
    queue = [(_estimate(_Cost(), left[start], fastest), next(count), start, _Cost())]
    looked, patience = 0, PATIENCE if len(problem.axes) * len(problem.sizes) <= LARGE_TIMED else PATIENCE // 5
    while queue:
        guess, _, state, cost = heapq.heappop(queue)
        if cost != best[state]:
            continue  # a cheaper way here was found meanwhile
        if state == goal or looked > patience or (goal in best and guess >= best[goal]):
            break
        for move in moves(problem, state, sends=sends, limit=limit):
            looked += 1
            time = times[state] + (seconds(move) if seconds else 0.0)
            new = _after(problem, cost, time, move)
            if move.after not in best or new < best[move.after]:
                if move.after not in left:
                    left[move.after] = problem.bound(move.after)
                guess = _estimate(new, left[move.after], fastest)
                if goal in best and move.after != goal and guess > best[goal]:
                    continue
                best[move.after], came[move.after], times[move.after] = new, (*came[state], move), time
                heapq.heappush(queue, (guess, next(count), move.after, new))
    return came.get(goal)


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

MOST_AXES = 8
"""Axes are cut into parts, and more of them carry slices, while a problem has no more axes than these."""
ROUND = 2**20
"""Bytes that one more collective must save for each device, where a plan for collectives takes rounds of sends; or half
of the target shard, if that is less."""


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
      axes: The axes, or parts of axes, whose devices talk to each other, in mesh order.
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


Parts = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True)
class NamedRoute:
    """The cheapest route.

    Attributes:
      legs: The steps.
      bound: Bytes that some device must receive whatever the method.
      exceeds: Whether some array on the way is larger per device than both ends.
      parts: The axes that steps take in parts: the names and sizes of the parts, the major one first.
    """

    legs: tuple[Leg, ...]
    bound: int
    exceeds: bool
    parts: Parts = ()


@functools.lru_cache(maxsize=8192)
def route(request: Request) -> NamedRoute:
    """Plan, once for each request."""
    best = _best(request)
    bound = best.problem.bound(State(best.problem.source, best.problem.summed))
    legs, parts = best.named
    return NamedRoute(legs, bound * request.itemsize, best.found.exceeds, parts)


def _best(request: Request) -> _Named:
    """The best of the plans with and without axes that nobody names, parts of axes, and rounds of sends."""
    best = _Named(request)
    start = State(best.problem.source, best.problem.summed)
    bound, hardware = best.problem.bound(start), request.hardware
    if start == State(best.problem.target):
        return best
    spare = _spare(request, best)
    for spares, order in ((spare, None), ((), 1), (spare, 1), (spare, -1)):
        improvable = best.found.exceeds or best.found.elements > bound
        # Steps over parts have fewer stages each, but are more: only their bytes count.
        if (spares or order) and (improvable or (hardware and not order)):
            one = _Named(request, spares, order)
            if one.is_new and len(one.names) <= MOST_AXES:
                best = min(best, one, key=lambda way: (way.found.exceeds, way.found.cost))
    if request.prefer == "collectives" and best.found.elements > bound and not request.summed:
        rounds = _best(replace(request, prefer="bytes"))
        (_, ours, count), (_, theirs, others) = best.found.cost, rounds.found.cost
        each = min(ROUND, best.problem.local(best.problem.target) * request.itemsize / 2)
        worth = theirs < ours and (ours - theirs) * request.itemsize >= each * (others - count)
        return rounds if worth or best.found.exceeds > rounds.found.exceeds else best
    if hardware is None:
        return best
    plain = _best(replace(request, prefer="collectives", hardware=None))
    return plain if _compared(plain.seconds(hardware)) < best.found.cost[0] else best


def seconds_of(
    hardware: Hardware, kind: str, nbytes: float, collectives: int, axes: Axes, mesh: Mapping[str, int], parts: Parts
) -> float:
    """The estimated time of one step, whose collectives send the same each. `mesh` is without parts."""
    if not collectives:
        return 0.0
    # Neighbouring parts that are all in the step, or all out of it, are one: the time is that of the devices.
    sizes, links, used = {}, dict(hardware.links), []
    cut = dict(parts)
    for axis, n in mesh.items():
        inside = ((name in axes, k) for name, k in cut.get(axis, ((axis, n),)))
        for number, (talks, run) in enumerate(itertools.groupby(inside, lambda one: one[0])):
            name = axis if number == 0 else _part(mesh, axis, number)
            sizes[name] = math.prod(k for _, k in run)
            used += [name] if talks else []
            if axis in links:
                links[name] = links[axis]
    hardware = replace(hardware, links=links) if len(links) > len(hardware.links) else hardware
    return collectives * hardware.collective_seconds(kind, nbytes / collectives, tuple(used), sizes)


def in_parts(mesh: Mapping[str, int], parts: Parts) -> dict[str, int]:
    """The mesh with parts in place of the axes that are cut."""
    cut = dict(parts)
    return dict(part for axis, n in mesh.items() for part in cut.get(axis, ((axis, n),)))


def _spare(request: Request, plain: _Named) -> Axes:
    """Axes that neither side names, which hold copies: slices of them may travel and be gathered at the end."""
    named = {*plain.names, *(a for axes in (*plain.front, request.kept) for a in axes)}
    spare = [a for _, a in sorted((n, a) for a, n in request.mesh if n > 1 and a not in named)]
    return tuple(spare[: MOST_AXES - len(plain.names)])


def _cut(mesh: Mapping[str, int], axes: Axes, order: int) -> Parts:
    """The axes that are no primes, in parts that are, the smaller ones in front or behind."""
    found = []
    for axis in axes:
        rest, primes = mesh[axis], []
        while rest > 1:
            primes.append(next(p for p in range(2, rest + 1) if rest % p == 0))
            rest //= primes[-1]
        if len(primes) > 1:
            found.append((axis, tuple((_part(mesh, axis, i), n) for i, n in enumerate(primes[::order]))))
    return tuple(found)


def _part(mesh: Mapping[str, int], axis: str, number: int) -> str:
    """A name for a part of an axis that no axis has."""
    return next(name for k in itertools.count(1) if (name := f"{axis}{'_' * k}{number + 1}") not in mesh)


class _Named:
    """A request as a problem in numbers, and the way back to names. `spare` are axes to use that neither side names.
    With an `order`, axes are cut into prime parts: 1 for the small ones in front, -1 for the small ones behind."""

    def __init__(self, request: Request, spare: Axes = (), order: int | None = None) -> None:
        self.request, self.mesh = request, dict(request.mesh)
        used = {*spare, *request.summed, *(a for side in (request.source, request.target) for run in side for a in run)}
        several = len({self.mesh[a] for a in used if self.mesh[a] > 1}) > 1
        self.parts = _cut(self.mesh, tuple(used), order) if order and several else ()
        self.is_new = order is None or (
            bool(self.parts) and (order > 0 or self.parts != _cut(self.mesh, tuple(used), 1))
        )
        cut = {axis: tuple(name for name, _ in names) for axis, names in self.parts}
        self.mesh = in_parts(self.mesh, self.parts)

        def fine(axes: Axes) -> Axes:
            return tuple(part for a in axes for part in cut.get(a, (a,)) if self.mesh[part] > 1)

        source, target = ([fine(axes) for axes in side] for side in (request.source, request.target))
        self.front = [a[: common_front(a, b)] for a, b in zip(source, target, strict=True)]
        rest = [(a[len(f) :], b[len(f) :]) for a, b, f in zip(source, target, self.front, strict=True)]
        summed = fine(request.summed)
        # Axes are numbered in order of appearance, so a problem is solved once whatever their names are.
        named = dict.fromkeys([*(a for axes, _ in rest for a in axes), *(a for _, axes in rest for a in axes), *summed])
        named.update(dict.fromkeys(fine(spare)))
        self.names = tuple(named)
        number = {a: i for i, a in enumerate(self.names)}
        held = {*self.names, *fine(request.kept), *(a for axes in self.front for a in axes)}
        self.problem = Problem(
            sizes=tuple(n // axes_product(f, self.mesh) for n, f in zip(request.sizes, self.front, strict=True)),
            axes=tuple(self.mesh[a] for a in self.names),
            source=tuple(tuple(number[a] for a in axes) for axes, _ in rest),
            target=tuple(tuple(number[a] for a in axes) for _, axes in rest),
            summed=tuple(sorted(number[a] for a in summed)),
            copies=math.prod(n for a, n in self.mesh.items() if a not in held) if summed else 1,
            parts=tuple(any(a in names for names in cut.values()) for a in self.names),
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
            nbytes, axes = move.elements * self.request.itemsize, self._in_mesh_order(move.axes)
            return seconds_of(hardware, move.kind, nbytes, move.collectives, axes, dict(self.request.mesh), self.parts)

        fastest = self.request.itemsize / sum(link.bandwidth for link in links)  # all links at once
        return search(self.problem, sends=sends, seconds=seconds, fastest=fastest)

    @property
    def named(self) -> tuple[tuple[Leg, ...], Parts]:
        """The steps in names, and the parts of axes that they need. Parts that stay together are one."""
        legs, before = [], self.problem.source
        for move in self.found.moves:
            axes, summed = (self._in_mesh_order(ids) for ids in (move.axes, move.after.summed))
            after = move.after.placement
            ends = self._placed(before), self._placed(after)
            legs.append(Leg(move.kind, axes, *ends, summed, move.elements * self.request.itemsize, move.collectives))
            before = after
        legs, parts = _joined(legs, self.parts)
        return tuple(
            replace(leg, nbytes=self._psum_bytes(leg, parts)) if leg.kind == "psum" else leg for leg in legs
        ), parts

    def seconds(self, hardware: Hardware) -> float:
        """The time of the route that is found."""
        mesh, (legs, parts) = dict(self.request.mesh), self.named
        return sum(seconds_of(hardware, leg.kind, leg.nbytes, leg.collectives, leg.axes, mesh, parts) for leg in legs)

    def _in_mesh_order(self, ids: tuple[int, ...]) -> Axes:
        found = {self.names[i] for i in ids}
        return tuple(a for a in self.mesh if a in found)

    def _placed(self, placement: Placement) -> tuple[Axes, ...]:
        return tuple(
            front + tuple(self.names[i] for i in axes) for front, axes in zip(self.front, placement, strict=True)
        )

    def _psum_bytes(self, leg: Leg, parts: Parts) -> int:
        """What a psum sends: of whole axes to the byte, where the search has rounded up."""
        mesh = in_parts(dict(self.request.mesh), parts)
        local = math.prod(n // axes_product(run, mesh) for n, run in zip(self.request.sizes, leg.before, strict=True))
        n, cut = axes_product(leg.axes, mesh), {part for _, names in parts for part, _ in names}
        whole = Fraction(2, n) if cut.isdisjoint(leg.axes) else 1
        return round(local * self.request.itemsize * (n - 1) * whole)


def _joined(legs: list[Leg], parts: Parts) -> tuple[tuple[Leg, ...], Parts]:
    """The steps without the cuts of axes that none of them needs."""
    runs = [run for leg in legs for side in (leg.before, leg.after) for run in side]
    sets = [frozenset(names) for leg in legs for names in (leg.axes, leg.summed)]
    whole: dict[str, str] = {}  # the first part of each run of parts that stay together, for each of them
    sizes, cuts = {}, []
    for axis, names in parts:
        groups: list[list[tuple[str, int]]] = []
        for (one, n), before in zip(names, (None, *names), strict=False):
            if before and _together(before[0], one, runs, sets):
                groups[-1].append((one, n))
            else:
                groups.append([(one, n)])
        named = [axis] if len(groups) == 1 else [group[0][0] for group in groups]
        for name, group in zip(named, groups, strict=True):
            whole.update({group[0][0]: name}, **{one: "" for one, _ in group[1:]})
            sizes[name] = math.prod(n for _, n in group)
        if len(groups) > 1:
            cuts.append((axis, tuple((name, sizes[name]) for name in named)))

    def coarse(axes: Axes) -> Axes:
        return tuple(name for a in axes if (name := whole.get(a, a)))

    def renamed(leg: Leg) -> Leg:
        before, after = (tuple(map(coarse, side)) for side in (leg.before, leg.after))
        return replace(leg, axes=coarse(leg.axes), before=before, after=after, summed=coarse(leg.summed))

    return tuple(map(renamed, legs)), tuple(cuts)


def _together(one: str, next_one: str, runs: list[Axes], sets: list[frozenset[str]]) -> bool:
    """Return whether two parts of an axis are everywhere side by side."""
    beside = all(
        (one in run) == (next_one in run) and (one not in run or run.index(next_one) == run.index(one) + 1)
        for run in runs
    )
    return beside and all((one in names) == (next_one in names) for names in sets)
