"""Rounds of sends, run in NumPy: each round is a permutation of the devices, and together they make the target."""

import itertools
import math
import random

import numpy as np
import pytest

from spmd.comm.planner._moves import MOST_ROUNDS, Problem, State, permutation, rounds_between, schedule
from tests.comm.test_resharding import placements

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
    everything = [numbered(one) for one in placements(tuple(map(str, range(len(mesh)))))]
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
