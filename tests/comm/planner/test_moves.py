"""Every step that the planner knows can be done by those who take part in it, with what it says that they send."""

import itertools

import numpy as np
import pytest

from spmd.comm.planner._moves import Problem, State, moves
from tests.comm.planner.test_problem import held, placements
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
