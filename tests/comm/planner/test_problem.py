"""A relayout in numbers: shards, free axes, and the bound, which is what the device that lacks most lacks."""

import itertools

import numpy as np
import pytest

from spmd.comm.planner._moves import Problem, State, cuts, ordered
from tests.conftest import case_count


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
