"""Routes in names: they lead from the source to the target, and names, axes of size 1 and dtypes change nothing else."""

import random
from dataclasses import replace

import pytest

from spmd.accelerators import hardware
from spmd.comm.planner._route import Request, route, seconds_of
from tests.comm.test_resharding import placements
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
