"""Routes in names: they lead from the source to the target, and names, axes of size 1 and dtypes change nothing else."""

import heapq
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from spmd.accelerators import hardware
from spmd.comm.planner._moves import Problem, State, moves
from spmd.comm.planner._route import Request, route, search, seconds_of
from tests.comm.planner.test_moves import placements as drawn_placements
from tests.comm.test_resharding import placements
from tests.conftest import case_count
from tests.sampler import seeds

MESHES = [{"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 4}, {"x": 3, "y": 2}]
TPU = hardware("tpu-v5p")


def draw(seed: int) -> Request:
    dice = random.Random(seed)
    mesh = dice.choice(MESHES)
    source, target = (dice.choice(placements(tuple(mesh))) for _ in range(2))
    used = {a for axes in (*source, *target) for a in axes}
    summed = tuple(a for a in mesh if a not in used and dice.random() < 0.4)
    return Request((24, 48), tuple(mesh.items()), source, target, summed, prefer=dice.choice(["collectives", "bytes"]))


def renamed(found, names):
    """The legs with other names of axes."""
    turn = lambda axes: tuple(names[a] for a in axes)
    sides = lambda placement: tuple(map(turn, placement))
    return [
        replace(leg, axes=turn(leg.axes), before=sides(leg.before), after=sides(leg.after), summed=turn(leg.summed))
        for leg in found.legs
    ]


@pytest.mark.parametrize("seed", seeds(times=2))
def test_legs_lead_from_the_source_to_the_target(seed):
    request = draw(seed)
    found = route(request)
    at, summed = request.source, set(request.summed)
    for leg in found.legs:
        assert leg.before == at and set(leg.summed) <= summed
        front = [len(list(common(a, b))) for a, b in zip(request.source, request.target, strict=True)]
        assert all(leg.after[i][:n] == request.source[i][:n] for i, n in enumerate(front)), "what both ends share stays"
        at, summed = leg.after, set(leg.summed)
    assert (at, summed) == (request.target, set())
    assert sum(leg.nbytes for leg in found.legs) >= found.bound
    assert (found.bound == 0) or found.legs


def common(one, other):
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


@pytest.mark.parametrize("seed", seeds(times=2))
def test_what_changes_nothing(seed):
    request = draw(seed)
    found = route(request)
    names = {"x": "y", "y": "z", "z": "x"}
    turn = lambda axes: tuple(names[a] for a in axes)
    other = replace(
        request,
        mesh=tuple((names[a], n) for a, n in request.mesh),
        source=tuple(map(turn, request.source)),
        target=tuple(map(turn, request.target)),
        summed=turn(request.summed),
    )
    assert list(route(other).legs) == renamed(found, names)
    unit = replace(request, mesh=(("r", 1), *request.mesh), source=(("r", *request.source[0]), request.source[1]))
    assert route(unit) == found
    wide = route(replace(request, itemsize=8))
    assert [leg.nbytes for leg in wide.legs] == [2 * leg.nbytes for leg in found.legs] and wide.bound == 2 * found.bound


@pytest.mark.parametrize("seed", seeds(times=2))
def test_the_preference_decides(seed):
    """Fewest bytes, or least time on a machine; and the time is that of the machine's own formula."""
    request = replace(draw(seed), prefer="collectives")
    nbytes = lambda found: sum(leg.nbytes for leg in found.legs)

    def seconds(found):
        mesh = dict(request.mesh)
        return sum(seconds_of(TPU, leg.kind, leg.nbytes, leg.collectives, leg.axes, mesh) for leg in found.legs)

    usual = route(request)
    least = route(replace(request, prefer="bytes"))
    quick = route(replace(request, prefer="latency", hardware=TPU))
    assert nbytes(least) <= nbytes(usual) or usual.exceeds != least.exceeds
    assert seconds(quick) <= min(seconds(usual), seconds(least)) * (1 + 1e-9) + 1e-12
    assert not any(leg.kind == "sends" for leg in usual.legs) or len(set(dict(request.mesh).values())) > 1


def test_axes_that_are_kept_take_no_part():
    """Slices may travel over an axis that holds copies, unless values differ along it."""
    request = Request((24, 48), (("x", 2), ("y", 2), ("z", 2)), ((), ("x", "y")), (("x",), ("y",)))
    over = lambda found: {a for leg in found.legs for a in (*leg.axes, *leg.after[0], *leg.after[1])}
    assert "z" in over(route(request)) and "z" not in over(route(replace(request, kept=("z",))))


def test_what_is_there_needs_no_legs():
    there = (("x",), ("y",))
    assert route(Request((8, 8), (("x", 2), ("y", 2)), there, there)).legs == ()


def test_a_step_without_collectives_takes_no_time():
    assert seconds_of(TPU, "split", 0, 0, (), {}) == 0
    one, two = (seconds_of(TPU, "all_gather", n * 1e6, n, ("x",), {"x": 4}) for n in (1, 2))
    assert two == pytest.approx(2 * one) and one > 0


# -------------------- the search finds what a search without any estimate finds


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
    source, target = (drawn_placements(rng, 3, 2) for _ in range(2))
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
