"""The cheapest sequence of steps: A* with the lower bound as the estimate of what is still to come."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

from spmd.comm.planner._moves import Move, moves
from spmd.comm.planner._problem import Problem, State

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
