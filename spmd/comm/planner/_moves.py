"""The steps of a relayout, and what each sends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from spmd.comm.planner._problem import MOST, Placement, Problem, State, cuts, ordered
from spmd.comm.planner._sends import rounds_between


class Move(NamedTuple):
    """One step.

    Attributes:
      kind: What it is.
      axes: The axes whose devices talk to each other. None for a split.
      after: How the array lies then.
      elements: How many elements a device sends, rounded up for a psum.
      collectives: How many collectives it takes: none for a split, and for sends their rounds.
      steps: What it counts for if all else is equal: a ppermute of cut shards more than a split and a ppermute.
    """

    kind: str
    axes: tuple[int, ...]
    after: State
    elements: int
    collectives: int = 1
    steps: int = 1


def moves(problem: Problem, state: State, *, sends: bool, limit: int) -> Iterator[Move]:
    """Every step from `state`.

    Args:
      problem: The problem.
      state: Where the array lies.
      sends: Whether point-to-point rounds may be used.
      limit: Elements per device that no step may exceed.
    """
    yield from _landings(problem, state, limit)
    if not state.summed:
        yield from _permutes(problem, state)
    yield from _sums(problem, state)
    yield from _gathers(problem, state, limit)
    if sends and not state.summed and state.placement != problem.target and (rounds := rounds_between(problem, state)):
        # Last: of two steps that cost the same, the first is taken, and one gather is simpler than its sends.
        everyone = tuple(range(len(problem.axes)))
        yield Move("sends", everyone, State(problem.target), problem.bound(state), rounds)


def _landings(problem: Problem, state: State, limit: int) -> Iterator[Move]:
    """split and all_to_all: some dimensions lose the axes at their end, which land at the end of others, in any order.
    Axes on which the array is equal may stand between them, and each device keeps its own block of those. Some of the
    axes lost may land nowhere. Along these every device gets the same, as from an all_gather."""
    placement, local = state.placement, problem.local(state.placement)
    free = problem.free(state)
    for keep in itertools.product(*(range(len(axes) + 1) for axes in placement)):
        lost = tuple(axis for axes, k in zip(placement, keep, strict=True) for axis in axes[k:])
        gains = [i for i, k in enumerate(keep) if k == len(placement[i])]
        if not gains:
            continue
        kept = tuple(axes[:k] for axes, k in zip(placement, keep, strict=True))
        if not lost:
            for after, _ in _landed(problem, kept, gains, (), free):
                yield Move("split", (), State(after, state.summed), 0, 0)
        group = problem.count(lost)
        for landing in _choices(lost):
            if not landing or (state.summed and len(landing) < len(lost)):
                continue
            for after, run in _landed(problem, kept, gains, landing, free):
                shard = local * group // problem.count(run)
                if shard <= limit:
                    yield Move("all_to_all", lost, State(after, state.summed), shard - shard // group)


def _landed(
    problem: Problem, kept: Placement, gains: list[int], must: tuple[int, ...], may: tuple[int, ...]
) -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Placements in which the axes `must` and any of the axes `may` have landed behind `kept` in the dimensions
    `gains`."""
    for extra in _choices(may):
        axes = must + extra
        if not axes:
            continue
        for run in ordered(axes, len(axes)):
            for runs in cuts(run, len(gains)):
                after = list(kept)
                for i, more in zip(gains, runs, strict=True):
                    after[i] += more
                if problem.fits(tuple(after)):
                    yield tuple(after), run


def _choices(axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _permutes(problem: Problem, state: State) -> Iterator[Move]:
    """ppermute: whole shards change places. Afterwards the target is reached or one gather away, or the axes of a
    dimension stand in another order. Equal shards may be cut first, so that every device sends another part."""
    blocks = problem.blocks(state.placement)
    yield from _reordered(problem, state)
    for after, there in problem.finer:
        if after == state.placement or any(n % m for n, m in zip(there, blocks, strict=True)):
            continue
        axes = {a for x, y in zip(state.placement, after, strict=True) for a in _differing(x, y)}
        if there == blocks:
            yield Move("ppermute", tuple(sorted(axes)), State(after), problem.local(after))
        elif any(a != b[: len(a)] for a, b in zip(state.placement, after, strict=True)):
            axes = tuple(sorted(axes.union(problem.free(state))))
            yield Move("ppermute", axes, State(after), problem.local(after), steps=3)


def _reordered(problem: Problem, state: State) -> Iterator[Move]:
    """Axes of different sizes in another order within their dimensions. Among axes of equal size, another one could
    have been moved in the first place, at no greater cost."""
    choices = []
    for axes in state.placement:
        mixed = len({problem.axes[a] for a in axes}) > 1 and len(axes) <= MOST
        choices.append(list(itertools.permutations(axes)) if mixed else [axes])
    for after in itertools.product(*choices):
        axes = {a for x, y in zip(state.placement, after, strict=True) for a in _differing(x, y)}
        if axes:
            yield Move("ppermute", tuple(sorted(axes)), State(after), problem.local(after))


def _differing(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    """The axes behind the common front of both."""
    shared = next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
    return x[shared:] + y[shared:]


def _gathers(problem: Problem, state: State, limit: int) -> Iterator[Move]:
    """all_gather: dimensions lose the axes at their end."""
    placement, local = state.placement, problem.local(state.placement)
    for keep in itertools.product(*(range(len(axes) + 1) for axes in placement)):
        lost = tuple(axis for axes, k in zip(placement, keep, strict=True) for axis in axes[k:])
        larger = local * problem.count(lost)
        if lost and larger <= limit:
            after = tuple(axes[:k] for axes, k in zip(placement, keep, strict=True))
            yield Move("all_gather", lost, State(after, state.summed), larger - local)


def _sums(problem: Problem, state: State) -> Iterator[Move]:
    """psum and psum_scatter: the sum is completed on some axes. If it is scattered, they land as in an all_to_all."""
    local, every = problem.local(state.placement), list(range(len(state.placement)))
    for done in _choices(state.summed):
        if not done:
            continue
        rest, parts = tuple(a for a in state.summed if a not in done), problem.count(done)
        yield Move("psum", done, State(state.placement, rest), -(-2 * local * (parts - 1) // parts))
        for after, run in _landed(problem, state.placement, every, done, problem.free(state)):
            shard = local * parts // problem.count(run)
            yield Move("psum_scatter", done, State(after, rest), shard - shard // parts)
