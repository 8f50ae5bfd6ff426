"""Routes that are put together rather than searched for, however many axes there are.

First what is equal is divided, which is free, and partial sums are scattered. Then blocks change places: the core.
Last come gathers. Two facts leave little to search:

* If in each dimension the axes of one side are the front of the other's, one exchange and one gather reach the bound.
* Otherwise the bound is the target shard. A core that sends c of the smallest shards makes a route of the target shard
  and c - 1 of the smallest shards. One permutation has c = 1. It does where the blocks of both sides have one shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from spmd.comm.planner._moves import Move, Placement, Problem, State, common_front, rounds_between

Path = tuple[State, ...]
Core = tuple[Placement, tuple[Placement, ...], Placement]

ENDS, MOST_DIVIDED, MOST_NEAR = 4, 128, 100
"""How many ways to divide what is equal are compared on each side, how many are looked at, and how many exchanges of
each."""


def composed(problem: Problem, *, sends: bool) -> Iterator[tuple[Move, ...]]:
    """Routes from the source to the target, each with another number of bytes or collectives. No array on the way is
    larger than both ends. There may be none, where sizes do not divide.

    Args:
      problem: The problem.
      sends: Whether point-to-point rounds may be used.
    """
    start, goal = State(problem.source, problem.summed), State(problem.target)
    for path in itertools.chain(_nested(problem, start), _through(problem, start, sends)):
        states = (start, *path, goal)
        if all(problem.fits(state.placement) for state in states):
            moves = _steps(problem, states, sends)
            if moves:
                yield moves


def gathered(problem: Problem) -> tuple[Move, ...]:
    """The route that needs the largest array: everything is completed, made whole and divided again."""
    whole = State(tuple(() for _ in problem.sizes))
    return _steps(
        problem, (State(problem.source, problem.summed), State(problem.source), whole, State(problem.target)), False
    )


def _steps(problem: Problem, states: Path, sends: bool) -> tuple[Move, ...]:
    """One step from each state to the next. Empty where there is none."""
    found: list[Move] = []
    for before, after in itertools.pairwise(states):
        if before != after:
            step = between(problem, before, after)
            if step is None and sends and not before.summed:
                step = sent(problem, before, after)
            if step is None:
                return ()
            found.append(step)
    return tuple(found)


def between(problem: Problem, before: State, after: State) -> Move | None:
    """The collective or split from one state to another. None if one does not do."""
    x, y = before.placement, after.placement
    front = [common_front(a, b) for a, b in zip(x, y, strict=True)]
    lost, run = (tuple(a for one, n in zip(side, front, strict=True) for a in one[n:]) for side in (x, y))
    gained, done = set(run), set(before.summed) - set(after.summed)
    mixed = any(len(a) > n < len(b) for a, b, n in zip(x, y, front, strict=True))
    fresh = gained - done - set(lost) - set(problem.free(before))
    local, there, parts = problem.local(x), problem.local(y), problem.count(tuple(done))
    if done and (lost or mixed or fresh or (gained and not done <= gained)):
        return None
    if done and gained:
        return Move("psum_scatter", tuple(sorted(done)), after, there * (parts - 1))
    if done:
        return problem.psum(before, tuple(sorted(done)))
    if not lost and not fresh:
        return Move("split", (), after, 0, 0)
    if not run:
        return Move("all_gather", lost, after, there - local)
    if not mixed and not fresh and (not before.summed or gained.issuperset(lost)):
        return Move("all_to_all", lost, after, there - there // problem.count(lost))
    axes, blocks = gained.union(lost), zip(problem.blocks(x), problem.blocks(y), strict=True)
    if before.summed or any(n % m for m, n in blocks):
        return None
    if local == there:
        return Move("ppermute", tuple(sorted(axes)), after, there)
    return Move("ppermute", tuple(sorted(axes.union(problem.free(before)))), after, there, steps=3)


def sent(problem: Problem, before: State, after: State) -> Move | None:
    """Rounds of sends from one complete state to another. None where they are too many."""
    piece = replace(problem, source=before.placement, target=after.placement, summed=())
    rounds = rounds_between(piece, before)
    return Move("sends", tuple(range(len(problem.axes))), after, piece.bound(before), rounds) if rounds else None


def _nested(problem: Problem, start: State) -> Iterator[Path]:
    """One exchange, and a gather of what is left, where the blocks of both sides lie in each other: each dimension
    loses what stands behind the first axis that is needed elsewhere."""
    ends = list(zip(start.placement, problem.target, strict=True))
    yield ()
    if not start.summed and all(common_front(a, b) == min(len(a), len(b)) for a, b in ends):
        wanted = {axis for a, b in ends for axis in b[len(a) :]}
        keep = (next((i for i, axis in enumerate(a) if axis in wanted), len(a)) for a, _ in ends)
        yield (
            State(tuple(a[: max(k, len(b))] if len(a) > len(b) else b for (a, b), k in zip(ends, keep, strict=True))),
        )


def _through(problem: Problem, start: State, sends: bool) -> Iterator[Path]:
    """Division and scattering, a core between the smallest shards, and gathers."""
    starts = _divided(problem, start.placement, (*problem.free(start), *start.summed), problem.target)
    ends = _divided(problem, problem.target, problem.free(State(problem.target)), problem.source)
    size = max(problem.local(starts[0]), problem.local(ends[0]))
    starts, ends = ([p for p in side if problem.local(p) == size][:ENDS] for side in (starts, ends))
    if starts and ends:
        for a, core, b in _cores(problem, starts, ends, sends):
            yield (*_scattered(start, a), *map(State, core), State(b))


def _scattered(start: State, placement: Placement) -> Iterator[State]:
    """From the source to a placement that divides it further: a split of what is equal, and sums that are scattered.
    A sum that has no room to land is completed where the shard is smallest."""
    if start.summed:
        there = {axis for run in placement for axis in run}
        front = (itertools.takewhile(lambda axis: axis not in start.summed, run) for run in placement)
        yield State(tuple(map(tuple, front)), start.summed)
        yield State(placement, tuple(a for a in start.summed if a not in there))
    yield State(placement)


def _divided(problem: Problem, placement: Placement, axes: Iterable[int], other: Placement) -> list[Placement]:
    """The placement with more axes behind its own, in as many blocks as the sizes allow. Axes stand in the order of the
    other side where it has them, and in its dimensions first."""
    home = {axis: (k, i) for i, run in enumerate(other) for k, axis in enumerate(run)}
    found = [placement]
    for axis in sorted(axes, key=lambda a: (a not in home, home.get(a), a)):
        dims = sorted(range(len(placement)), key=lambda i: (i != home.get(axis, (0, 0))[1], i))
        wider = [new for i in dims for one in found if problem.fits(new := (*one[:i], (*one[i], axis), *one[i + 1 :]))]
        found = wider[:MOST_DIVIDED] or found
    return found


def _cores(problem: Problem, starts: list[Placement], ends: list[Placement], sends: bool) -> Iterator[Core]:
    """Ways between the smallest shards: nothing, a permutation, rounds of sends, and otherwise exchanges, of which the
    last one may be a permutation."""
    if both := [p for p in starts if p in ends]:
        yield both[0], (), both[0]
        return
    shapes = {problem.blocks(b): b for b in reversed(ends)}
    have = {problem.blocks(a): a for a in reversed(starts)}
    if alike := [shape for shape in have if shape in shapes]:
        yield have[alike[0]], (), shapes[alike[0]]
        return
    if sends:
        a, b = min(itertools.product(have, shapes), key=lambda pair: math.prod(map(math.lcm, *pair)))
        yield have[a], (), shapes[b]
    for fitting, side, turn in (
        (_fitting(problem, starts, shapes), shapes, 1),
        (_fitting(problem, ends, have), have, -1),
    ):
        if fitting:
            p, between_them = fitting
            far = side[problem.blocks(between_them)]
            yield (p, (between_them,), far) if turn > 0 else (far, (between_them,), p)
    # One exchange, or two that meet.
    there = {p: (n, b) for b in ends for p, n in ((b, 1), *_near(problem, b).items())}
    met = [(-1 / n - 1 / there[p][0], a, p) for a in starts for p, n in _near(problem, a).items() if p in there]
    if met:
        _, a, p = min(met)
        yield a, (p,), there[p][1]


def _fitting(
    problem: Problem, starts: list[Placement], shapes: Iterable[tuple[int, ...]]
) -> tuple[Placement, Placement] | None:
    """A start, and what the smallest exchange makes of it whose blocks have one of these shapes."""
    found = []
    for a, shape in itertools.product(starts, shapes):
        for keep in itertools.product(*(range(len(run) + 1) for run in a)):
            kept = tuple(run[:k] for run, k in zip(a, keep, strict=True))
            lost = tuple(axis for run, k in zip(a, keep, strict=True) for axis in run[k:])
            ends = list(zip(a, kept, problem.blocks(kept), shape, strict=True))
            if lost and all(n % k == 0 and (run == rest or n == k) for run, rest, k, n in ends):
                after = _landed(problem, kept, lost, [n // k for _, _, k, n in ends])
                if after and problem.fits(after):
                    found.append((problem.count(lost), a, after))
    return min(found)[1:] if found else None


def _landed(problem: Problem, kept: Placement, axes: tuple[int, ...], room: list[int]) -> Placement | None:
    """The axes behind what is kept, so that each dimension gets as many blocks as it has room for."""
    if not axes:
        return kept
    for i, n in enumerate(room):
        if n % problem.axes[axes[0]] == 0:
            wider = (*kept[:i], (*kept[i], axes[0]), *kept[i + 1 :])
            less = [n // problem.axes[axes[0]] if j == i else m for j, m in enumerate(room)]
            if after := _landed(problem, wider, axes[1:], less):
                return after
    return None


@functools.lru_cache(maxsize=512)
def _near(problem: Problem, placement: Placement) -> dict[Placement, int]:
    """Placements that one all_to_all makes, with how many devices take part, the fewest first."""
    keeps = itertools.product(*(range(len(run), -1, -1) for run in placement))
    lost = {keep: [a for run, k in zip(placement, keep, strict=True) for a in run[k:]] for keep in keeps}
    found: dict[Placement, int] = {}
    for keep, axes in sorted(lost.items(), key=lambda one: problem.count(one[1])):
        gains = [i for i, k in enumerate(keep) if k == len(placement[i])]
        for order in itertools.permutations(axes):
            for dims in itertools.product(gains, repeat=len(order)):
                after = [run[:k] for run, k in zip(placement, keep, strict=True)]
                for axis, i in zip(order, dims, strict=True):
                    after[i] += (axis,)
                if problem.fits(tuple(after)):
                    found.setdefault(tuple(after), problem.count(axes))
                if len(found) > MOST_NEAR:
                    return found
    return found
