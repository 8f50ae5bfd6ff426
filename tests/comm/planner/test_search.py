"""The search finds what a search without any estimate finds."""

import heapq
import itertools

import numpy as np
import pytest

from spmd.comm.planner._moves import Problem, State, moves
from spmd.comm.planner._route import search
from tests.comm.planner.test_problem import placements
from tests.conftest import case_count


def fewest(problem: Problem, seconds=lambda move: 0.0) -> tuple[float, int, int]:
    """Seconds, elements and collectives of the cheapest route, by Dijkstra's algorithm over the same steps."""
    start, goal = State(problem.source, problem.summed), State(problem.target)
    number = itertools.count()
    queue, done = [((0.0, 0, 0), next(number), start)], set()
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state == goal:
            return cost
        if state in done:
            continue
        done.add(state)
        for move in moves(problem, state, sends=False, limit=problem.limit):
            new = (round(cost[0] + seconds(move), 9), cost[1] + move.elements, cost[2] + move.collectives)
            heapq.heappush(queue, (new, next(number), move.after))
    raise AssertionError("no route")


@pytest.mark.parametrize("seed", range(case_count(12)))
def test_the_route_is_the_cheapest(seed):
    rng = np.random.default_rng(seed)
    source, target = (placements(rng, 3, 2) for _ in range(2))
    used = {axis for axes in (*source, *target) for axis in axes}
    summed = tuple(axis for axis in range(3) if axis not in used and rng.random() < 0.5)
    problem = Problem((24, 24), (2, 2, 2), source, target, summed)
    route = search(problem)
    if not route.exceeds:
        assert route.cost == fewest(problem)
    assert route.elements >= problem.bound(State(source, summed))
    states = [State(source, summed), *(move.after for move in route.moves)]
    assert states[-1] == State(target)
    for before, move in zip(states, route.moves, strict=False):
        assert move in list(moves(problem, before, sends=False, limit=problem.whole))


@pytest.mark.parametrize("slow", ["all_to_all", "ppermute", "all_gather"])
def test_time_counts_before_bytes(slow):
    seconds = lambda move: move.elements * (100.0 if move.kind == slow else 1.0)
    problem = Problem((8, 8), (2, 2, 2), ((0,), (2,)), ((1,), ()))
    route = search(problem, seconds=seconds)
    assert route.cost == pytest.approx(fewest(problem, seconds)) and route.elements >= search(problem).elements
