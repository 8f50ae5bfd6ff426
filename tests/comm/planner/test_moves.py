"""Every step that the planner knows can be done by those who take part in it, with what it says that they send."""

import itertools
import math
import random

import numpy as np
import pytest

from spmd.comm.planner._moves import (
    MOST_ROUNDS,
    Problem,
    State,
    cuts,
    moves,
    ordered,
    permutation,
    rounds_between,
    schedule,
)
from tests.comm.test_resharding import placements as every_placement
from tests.conftest import case_count


def draw(seed):
    rng = np.random.default_rng(seed)
    axes = tuple(int(n) for n in rng.choice([2, 3], 3))
    source, target = (placements(rng, 3, 2) for _ in range(2))
    used = {axis for side in (*source, *target) for axis in side}
    summed = tuple(axis for axis in range(3) if axis not in used and rng.random() < 0.5)
    return Problem((36, 12), axes, source, target, summed)


def partners(problem, axes):
    """For each device those that it talks to: the devices that differ from it along these axes only."""
    every = list(itertools.product(*map(range, problem.axes)))
    same = lambda one, other: all(a == b for i, (a, b) in enumerate(zip(one, other, strict=True)) if i not in axes)
    return [[j for j, other in enumerate(every) if same(one, other)] for one in every]


def check(problem, state, move):
    before, after = held(problem, state.placement), held(problem, move.after.placement)
    groups = partners(problem, move.axes)
    missing = max(len(new - old) for new, old in zip(after, before, strict=True))
    for device, wanted in enumerate(after):
        there = [before[other] for other in groups[device]]
        assert wanted <= set().union(*there), "somebody who takes part has it"
        if move.kind == "ppermute":
            assert any(wanted <= one for one in there), "it comes from one device"
        if move.kind == "split":
            assert wanted <= before[device], "each device keeps a part of what it has"
        if move.kind == "all_gather":
            assert wanted > before[device]
    sums = move.kind in ("psum", "psum_scatter")
    assert set(move.after.summed) == set(state.summed) - (set(move.axes) if sums else set())
    if not sums:
        assert move.elements >= missing, "no fewer than some device lacks"
    if move.kind in ("all_gather", "split"):
        assert move.elements == missing
    assert move.collectives == 0 if move.kind == "split" else move.collectives >= 1


@pytest.mark.parametrize("seed", range(case_count(12)))
def test_steps_can_be_done(seed):
    problem = draw(seed)
    if not (problem.fits(problem.source) and problem.fits(problem.target)):
        return
    state, rng = State(problem.source, problem.summed), np.random.default_rng(seed)
    for _ in range(3):
        found = list(moves(problem, state, sends=True, limit=problem.limit))
        for move in found:
            check(problem, state, move)
            assert move.after != state and problem.fits(move.after.placement)
            assert problem.local(move.after.placement) <= problem.limit or move.kind in ("split", "ppermute", "psum")
        if not found:
            return
        state = found[rng.integers(len(found))].after


def kinds(problem, **how):
    state = State(problem.source, problem.summed)
    return {move.kind for move in moves(problem, state, sends=how.get("sends", False), limit=how.get("limit", 999))}


def test_each_kind_stands_where_it_is_possible():
    whole, row, column = ((), ()), ((0,), ()), ((), (0,))
    assert kinds(Problem((4, 4), (2,), whole, row)) == {"split"}
    assert kinds(Problem((4, 4), (2,), row, column)) == {"all_to_all", "all_gather"}
    assert kinds(Problem((4, 4), (2,), row, column), sends=True) == {"all_to_all", "all_gather", "sends"}
    assert "all_gather" not in kinds(Problem((4, 4), (2,), row, column), limit=8)
    assert kinds(Problem((4, 4), (2,), whole, row, (0,))) == {"psum", "psum_scatter"}
    assert kinds(Problem((5, 5), (2,), whole, ((), ()), (0,))) == {"psum"}, "5 does not divide"
    assert "ppermute" in kinds(Problem((4, 4), (2, 2), ((0, 1), ()), ((1, 0), ())))


def test_sums_cost_what_is_known():
    [psum] = [m for m in moves(Problem((12,), (4,), ((),), ((),), (0,)), State(((),), (0,)), sends=False, limit=12)
              if m.kind == "psum"]  # fmt: skip
    assert psum.elements == 18  # an all-reduce: 2S(n-1)/n
    found = moves(Problem((12,), (4,), ((),), ((0,),), (0,)), State(((),), (0,)), sends=False, limit=12)
    assert {m.elements for m in found if m.kind == "psum_scatter"} == {9}  # S(n-1)/n


# -------------------- a relayout in numbers: shards, free axes, and the bound, which is what the device that lacks most lacks


def held(problem, placement):
    """For each device the positions of its block."""
    positions = np.arange(problem.whole).reshape(problem.sizes)
    found = []
    for at in itertools.product(*map(range, problem.axes)):
        block = positions
        for dim, axes in enumerate(placement):
            for axis in axes:
                block = np.split(block, problem.axes[axis], dim)[at[axis]]
        found.append(set(block.flat))
    return found


def placements(rng, axes, dims):
    chosen = rng.permutation(axes)[: rng.integers(axes + 1)]
    found = [[] for _ in range(dims)]
    for axis in chosen:
        found[rng.integers(dims)].append(int(axis))
    return tuple(map(tuple, found))


@pytest.mark.parametrize("seed", range(case_count(20)))
def test_the_bound_of_complete_arrays_is_what_some_device_lacks(seed):
    rng = np.random.default_rng(seed)
    axes = tuple(int(n) for n in rng.choice([2, 3], 3))
    source, target = (placements(rng, 3, 2) for _ in range(2))
    problem = Problem((12, 36), axes, source, target)
    if not (problem.fits(source) and problem.fits(target)):
        return
    pairs = zip(held(problem, target), held(problem, source), strict=True)
    assert problem.bound(State(source)) == max(len(want - have) for want, have in pairs)
    assert problem.local(source) == len(held(problem, source)[0])


def test_the_bounds_of_sums_are_the_known_ones():
    summed = lambda target: Problem((12,), (4,), ((),), target, (0,))
    assert summed(((),)).bound(State(((),), (0,))) == 18  # an all-reduce: 2S(n-1)/n
    assert summed(((0,),)).bound(State(((),), (0,))) == 9  # a reduce-scatter: S(n-1)/n


def test_an_axis_is_free_where_nothing_uses_it():
    problem = Problem((12, 36), (2, 3, 2), ((0,), ()), ((), ()))
    assert problem.free(State(((0,), ()), (2,))) == (1,)


def test_runs_are_cut_in_every_way():
    assert list(cuts((0, 1), 2)) == [((), (0, 1)), ((0,), (1,)), ((0, 1), ())]
    assert list(cuts((), 0)) == [()] and list(cuts((0,), 0)) == []
    assert len(list(ordered(range(3)))) == 1 + 3 + 6 + 6 and len(list(ordered(range(5)))) == 2**5


# -------------------- rounds of sends, run in NumPy: each round is a permutation of the devices, and together they make the target

MESHES = [(2, 2, 2), (4, 2), (2, 3), (3, 4), (6, 4), (2, 3, 4)]


def numbered(placement):
    return tuple(tuple(map(int, run)) for run in placement)


def block(whole, device, placement, mesh):
    """What a device holds."""
    cut = []
    for n, run in zip(whole.shape, placement, strict=True):
        number = 0
        for axis in run:
            number = number * mesh[axis] + device[axis]
        width = n // math.prod(mesh[axis] for axis in run)
        cut.append(slice(number * width, (number + 1) * width))
    return whole[tuple(cut)]


def run(found, have, want):
    """The targets put together from what the rounds send, and how many rounds send something."""
    out, sent = [np.full(one.shape, -1) for one in want], 0
    for one in found.rounds:
        assert sorted(one.sender) == list(range(len(have)))
        sent += bool((one.sender != np.arange(len(have))).any())
        for receiver, sender in enumerate(one.sender):
            read, write = (
                tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, found.piece, strict=True))
                for at in (one.reads[sender], one.writes[receiver])
            )
            assert (out[receiver][write] == -1).all()
            out[receiver][write] = have[sender][read]
    return out, sent


def ends(shape, mesh, source, target):
    whole = np.arange(math.prod(shape)).reshape(shape)
    devices = list(itertools.product(*map(range, mesh)))
    return [[block(whole, device, side, mesh) for device in devices] for side in (source, target)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_rounds_make_the_target_and_send_no_more_than_the_bound(mesh) -> None:
    shape, dice = (math.prod(mesh),) * 2, random.Random(0)
    everything = [numbered(one) for one in every_placement(tuple(map(str, range(len(mesh)))))]
    for _ in range(40):
        source, target = dice.sample(everything, 2)
        problem = Problem(shape, mesh, source, target)
        have, want = ends(shape, mesh, source, target)
        found = schedule(shape, mesh, source, target)
        out, sent = run(found, have, want)
        assert all((a == b).all() for a, b in zip(out, want, strict=True)), (source, target)
        assert sent * math.prod(found.piece) == problem.bound(State(source)), (source, target)
        assert rounds_between(problem, State(source)) == (sent if sent <= MOST_ROUNDS else 0)


def test_a_permutation_of_cut_shards_makes_the_target() -> None:
    mesh, shape = (2, 4), (8, 8)
    for source, target in [(((0,), ()), ((1,), ())), (((), (0,)), ((), (1,))), (((0,), ()), ((1, 0), ()))]:
        have, want = ends(shape, mesh, source, target)
        out, sent = run(permutation(shape, mesh, source, target), have, want)
        assert sent == 1 and all((a == b).all() for a, b in zip(out, want, strict=True))


@pytest.mark.parametrize("mesh", [(8, 8, 8), (32, 16)], ids=str)
def test_many_devices_are_scheduled(mesh) -> None:
    source, target = ((0,), (1,)), ((1,), (0,))
    shape = (math.prod(mesh[:2]),) * 2
    have, want = ends(shape, mesh, source, target)
    out, _ = run(schedule(shape, mesh, source, target), have, want)
    assert all((a == b).all() for a, b in zip(out, want, strict=True))
