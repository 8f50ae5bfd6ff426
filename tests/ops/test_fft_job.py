"""Routes of transforms: each stage is possible, the ends are right, and no other order of stages sends fewer bytes."""

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest

from spmd.comm.planner._route import Request
from spmd.comm.planner._route import route as cheapest
from spmd.ops._fft_job import Job, route
from tests.sampler import seeds

MESHES = [{"a": 2, "b": 2}, {"a": 2, "b": 4}, {"a": 4}, {"a": 3, "b": 2}]


def placements(axes, dims):
    """Every placement of some of the axes, in every order."""
    for count in range(len(axes) + 1):
        for used in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), dims - 1):
                yield tuple(used[a:b] for a, b in itertools.pairwise((0, *cuts, count)))


def used(placement) -> set:
    return {axis for axes in placement for axis in axes}


def draw(seed: int, kind: str, dims: int = 3) -> Job:
    """A job whose sizes divide over all axes, so that only the odd size of a spectrum needs padding."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    half = {"complex": -1, "first": dims - 1, "last": dims - 1}[kind]
    choices = list(placements(tuple(mesh), dims))
    source = rng.choice([p for p in choices if kind != "last" or not p[half]])
    target = rng.choice([p for p in choices if (kind != "first" or not p[half]) and used(p) == used(source)])
    moved = frozenset(rng.sample(range(dims), rng.randint(1, dims))) | ({half} if half >= 0 else set())
    whole = math.prod(mesh.values()) * 2
    real, spectrum = (whole,) * dims, tuple(whole // 2 + 1 if i == half else whole for i in range(dims))
    before, after = (spectrum, real) if kind == "last" else (real, spectrum)
    numbers = {"complex": "", "first": "first", "last": "last"}[kind]
    given = 4 if kind == "first" else 8
    movable = frozenset(range(dims))
    return Job(source, target, before, after, moved, half, numbers, movable, tuple(mesh.items()), given, 8)


def item(job: Job, left: frozenset) -> int:
    if left == job.moved:
        return job.given
    return job.itemsize // 2 if job.real == "last" and not left else job.itemsize


def size(job: Job, left: frozenset, i: int) -> int:
    return job.before[i] if i in left else job.after[i]


def price(job: Job, left: frozenset, at, to, sizes) -> int:
    request = Request(sizes, job.mesh, at, to, (), (), item(job, left), "collectives", None)
    return sum(leg.nbytes for leg in cheapest(request).legs)


def followed(job: Job, stages) -> int:
    """Go the way of the stages, and count the bytes."""
    at, left, spent = job.source, job.moved, 0
    padded = {}
    for stage in stages:
        if stage.moved:
            assert set(stage.moved) <= left and not any(at[i] for i in stage.moved), "whole, and not yet transformed"
            if job.real == "first" and job.half in left:
                assert stage.moved == (job.half,), "the real dimension comes first, alone"
            left -= set(stage.moved)
            if job.real == "last" and job.half in stage.moved:
                assert not left, "the real dimension comes last"
            continue
        for i, (have, want) in enumerate(zip(at, stage.to, strict=True)):
            assert stage.sizes[i] % job.parts(have) == 0 and stage.sizes[i] % job.parts(want) == 0
            n = size(job, left, i)
            assert n <= stage.sizes[i] < n + max(job.parts(have), job.parts(want))
            if stage.sizes[i] != n:
                padded[i] = padded.get(i, have)
            if padded.get(i) == want:
                del padded[i]
        spent += price(job, left, at, stage.to, stage.sizes)
        at = stage.to
    assert (at, left, padded) == (job.target, frozenset(), {})
    return spent


def freeing(job: Job, at, left) -> Iterator:
    """The placements after some waiting dimensions have given all their axes to the ends of others. The target, if that
    frees one or none waits."""
    full = sorted(left)
    if not left or any(not job.target[i] for i in left):
        yield job.target
    for count in range(1, len(full) + 1):
        for givers in itertools.permutations(full, count):
            for takers in itertools.product([i for i in range(len(at)) if i not in givers], repeat=count):
                to = [() if i in givers else axes for i, axes in enumerate(at)]
                for giver, taker in zip(givers, takers, strict=True):
                    to[taker] += at[giver]
                yield tuple(to)


def anywhere(job: Job, at, left) -> list:
    """All placements of the same axes."""
    return [p for p in placements(tuple(dict(job.mesh)), len(at)) if used(p) == used(at)]


def fewest(job: Job, next_from: Callable) -> int:
    """The bytes of the best order: Dijkstra's algorithm without any idea of what helps."""
    tie, queue, done = itertools.count(), [(0, 0, job.source, job.moved)], set()
    while queue:
        spent, _, at, left = heapq.heappop(queue)
        left = frozenset(i for i in left if at[i])
        if at == job.target and not left:
            return spent
        if (at, left) in done:
            continue
        done.add((at, left))
        for to in set(next_from(job, at, left)) - {at}:
            heapq.heappush(queue, (spent + price(job, left, at, to, job.before), next(tie), to, left))
    raise AssertionError("no route")


CHOICES = (19, 29, 57)  # jobs with several orders, of which the one of the fewest changes sends more


@pytest.mark.parametrize("seed", sorted({*seeds(times=3), *CHOICES}))
def test_no_order_sends_fewer_bytes(seed):
    """Of those whose every change frees a dimension. Over all placements there are better ones, seldom: for 42 of 1000
    such jobs, by a factor of 1.6 at most."""
    job = draw(seed, "complex", dims=2 + seed % 2)
    spent = followed(job, route(job))
    assert spent == fewest(job, freeing), job
    assert fewest(job, anywhere) <= spent <= 2 * fewest(job, anywhere), job


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("kind", ["first", "last"])
def test_real_transforms_keep_their_order(seed, kind):
    """The spectrum's odd size makes some dimensions padded, so bytes are compared with the plainest way only."""
    job = draw(seed, kind)
    stages = route(job)
    assert stages is not None
    followed(job, stages)


def test_what_cannot_move_stays_unmoved():
    job = draw(0, "complex")
    stuck = dataclasses.replace(
        job, mesh=(("a", 2), ("b", 2)), source=(("a",), (), ()), target=((), ("a",), ()), moved=frozenset({0, 1, 2}),
        movable=frozenset(),
    )  # fmt: skip
    assert route(stuck) is not None  # the target itself takes the axis
    assert route(dataclasses.replace(stuck, target=(("a",), (), ()))) is None


def test_axes_of_one_device_divide_nothing():
    job = draw(1, "complex")
    wide = dataclasses.replace(job, mesh=(*job.mesh, ("r", 1)), source=(("r", *job.source[0]), *job.source[1:]))
    assert wide.of_wide_axes() == dataclasses.replace(job, mesh=wide.mesh)
    assert job.of_wide_axes() is job
