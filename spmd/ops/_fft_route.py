"""The route of a distributed Fourier transform: which dimensions are transformed when, and the layouts in between.

Pure Python on placements. A dimension can be transformed while it is whole on each device. So the divided ones are
freed one after another, or several at once, by moving their mesh axes to other dimensions. Dijkstra's algorithm finds
the route that sends the fewest bytes, of those whose every change frees a dimension; the planner says what each change
of layout sends. Routes are short and few, and each is searched once.

This search is not the planner's. Between two layouts here dimensions must be whole, in an order for real transforms,
sizes and item sizes change, and some dimensions are padded; the planner's states and its bound know none of this.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spmd.comm.planner._route import Request
from spmd.comm.planner._route import route as cheapest
from spmd.language import axes_product

Axes = tuple[str, ...]
Placement = tuple[Axes, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done. Dimensions go by position.

    Attributes:
      source: The mesh axes of each dimension before.
      target: The same after.
      before: The global size of each dimension before.
      after: The same after. The real transforms change the size of one dimension.
      moved: The dimensions that are transformed.
      half: The halved dimension of a real transform, transformed first forward and last backward; otherwise -1.
      real: "" for a complex transform, "first" where dimension `half` starts real, "last" where it ends real, "both"
        where nothing becomes complex.
      movable: The dimensions that may take over axes, which are those with one name.
      together: Whether several dimensions may give axes away at once. In auto mode XLA would gather.
      mesh: Size of each mesh axis.
      given: Bytes of a number before the first transform.
      itemsize: Bytes of a number after it.
    """

    source: Placement
    target: Placement
    before: tuple[int, ...]
    after: tuple[int, ...]
    moved: frozenset[int]
    half: int
    real: str
    movable: frozenset[int]
    together: bool
    mesh: tuple[tuple[str, int], ...]
    given: int
    itemsize: int

    def parts(self, axes: Axes) -> int:
        return axes_product(axes, dict(self.mesh))

    def of_wide_axes(self) -> Job:
        """The same without axes of size 1: a dimension along them is one block, and so is whole."""
        sides = ((tuple(a for a in axes if self.parts((a,)) > 1) for axes in x) for x in (self.source, self.target))
        source, target = map(tuple, sides)
        return self if (source, target) == (self.source, self.target) else replace(self, source=source, target=target)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: transform the dimensions `moved`, or go to the placement `to`.

    Attributes:
      moved: The dimensions to transform, all whole here. Empty for a change of layout.
      to: The placement after it. None for a transform.
      sizes: The size that each dimension has during the change, padded if it would not divide.
    """

    moved: tuple[int, ...] = ()
    to: Placement | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _State:
    """Where a search stands: the placement, the dimensions left to transform, and each padded dimension with the axes
    that it has without the padding, before and after."""

    at: Placement
    left: frozenset[int]
    padded: frozenset[tuple[int, Axes]] = frozenset()


@functools.lru_cache(maxsize=1024)
def route(job: Job) -> tuple[Stage, ...] | None:
    """The stages of the cheapest route. None if no dimension can take over the axes of one that must be whole."""
    if not job.together and (stages := _search(job, singly=True)) is not None:
        return stages
    return _search(job, singly=False)


def _search(job: Job, *, singly: bool) -> tuple[Stage, ...] | None:
    start = _sliced(job)
    first = () if start == job.source else (Stage(to=start, sizes=job.before),)
    tie = itertools.count()
    queue: list[tuple[int, int, int, _State, tuple[Stage, ...]]] = [(0, 0, next(tie), _State(start, job.moved), first)]
    seen: set[_State] = set()
    while queue:
        spent, steps, _, state, stages = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        state, stages = _transformed(job, state, stages)
        if not state.left and state.at == job.target and not state.padded:
            return stages
        for to, sizes, padded, price in _changes(job, state, singly):
            new = _State(to, state.left, padded)
            stage = Stage(to=to, sizes=sizes)
            heapq.heappush(queue, (spent + price, steps + 1, next(tie), new, (*stages, stage)))
    return None


def _sliced(job: Job) -> Placement:
    """The source, cut further: if a dimension is not transformed, the target's additional axes may divide it at
    once."""
    used = {axis for axes in job.source for axis in axes}
    out = []
    for i, (have, want) in enumerate(zip(job.source, job.target, strict=True)):
        more = want[len(have) :] if want[: len(have)] == have and i not in job.moved else ()
        out.append((*have, *itertools.takewhile(lambda axis: axis not in used, more)))
    return tuple(out)


def _transformed(job: Job, state: _State, stages: tuple[Stage, ...]) -> tuple[_State, tuple[Stage, ...]]:
    """The state and stages after every transform that is possible here."""
    left = state.left
    while True:
        ready = tuple(i for i in sorted(left) if not state.at[i] and _in_turn(job, left, i))
        if not ready:
            return _State(state.at, left, state.padded), stages
        if job.real == "first" and job.half in ready:
            ready = (job.half,)  # first, by itself: its result is complex
        left = left - set(ready)
        stages = (*stages, Stage(moved=ready))


def _in_turn(job: Job, left: frozenset[int], i: int) -> bool:
    if job.real == "first":
        return i == job.half or job.half not in left
    return not (job.real == "last" and i == job.half) or left == {i}


def _size(job: Job, left: frozenset[int], i: int) -> int:
    return job.before[i] if i in left else job.after[i]


def _itemsize(job: Job, left: frozenset[int]) -> int:
    if left == job.moved:
        return job.given
    return job.itemsize // 2 if job.real == "last" and not left else job.itemsize


def _changes(
    job: Job, state: _State, singly: bool
) -> Iterator[tuple[Placement, tuple[int, ...], frozenset[tuple[int, Axes]], int]]:
    """The layouts that may come next: the target if it frees something, and every move of whole groups of axes."""
    item = _itemsize(job, state.left)
    for to in dict.fromkeys((job.target, *_freed(job, state), *(_homeward(job, state) if singly else ()))):
        if to == state.at or not (to != job.target or _frees(state, to)) or (singly and not _single(state.at, to)):
            continue
        fitted = _fitted(job, state, to)
        if fitted is not None:
            sizes, padded = fitted
            request = Request(sizes, job.mesh, state.at, to, (), (), item, "collectives", None)
            yield to, sizes, padded, sum(leg.nbytes for leg in cheapest(request).legs)


def _frees(state: _State, to: Placement) -> bool:
    """Whether the target is progress: nothing is left to transform, or some dimension becomes whole or is cropped."""
    return (
        not state.left
        or any(state.at[i] and not to[i] for i in state.left)
        or any(state.at[i] != to[i] == base for i, base in state.padded)
    )


def _single(at: Placement, to: Placement) -> bool:
    """Whether it is one exchange: axes go from one dimension to one other."""
    pairs = list(zip(at, to, strict=True))
    givers = sum(want[: len(have)] != have for have, want in pairs)
    takers = sum(have[: len(want)] != want for have, want in pairs)
    return givers <= 1 and (takers <= 1 or not givers)


def _freed(job: Job, state: _State) -> Iterator[Placement]:
    """All ways to take axes away from one or several of the waiting dimensions: all its axes, or, from a padded one,
    those that it was padded for."""
    bases = dict(state.padded)
    waiting = [i for i in sorted(state.left | set(bases)) if state.at[i] != bases.get(i, ())]
    for count in range(1, (len(waiting) if job.together else min(len(waiting), 1)) + 1):
        for group in itertools.combinations(waiting, count):
            takers = [i for i in sorted(job.movable) if i not in group]
            for order in itertools.permutations(group):
                for chosen in itertools.product(takers, repeat=count):
                    to = [bases.get(i, ()) if i in group else axes for i, axes in enumerate(state.at)]
                    for giver, taker in zip(order, chosen, strict=True):
                        to[taker] = (*to[taker], *state.at[giver][len(bases.get(giver, ())) :])
                    yield tuple(to)


def _homeward(job: Job, state: _State) -> Iterator[Placement]:
    """Once all is transformed: the moves of minor axes to where the target has them next."""
    for giver, axes in enumerate(() if state.left else state.at):
        for keep, taker in itertools.product(range(len(axes)), range(len(state.at))):
            moved = (*state.at[taker], *axes[keep:])
            if taker != giver and moved == job.target[taker][: len(moved)]:
                yield tuple(axes[:keep] if i == giver else moved if i == taker else a for i, a in enumerate(state.at))


def _fitted(job: Job, state: _State, to: Placement) -> tuple[tuple[int, ...], frozenset[tuple[int, Axes]]] | None:
    """The sizes that make the change possible, and what is padded after it. None if padding cannot help.

    A dimension is padded when it takes over axes behind its own: each of its blocks gets zeros at its end. It is
    cropped when it has given these axes away again. In between nothing else is done to it.
    """
    sizes, padded, bases = [], set(), dict(state.padded)
    for i, (have, want) in enumerate(zip(state.at, to, strict=True)):
        n = _size(job, state.left, i)
        if i in bases:
            if want not in (have, bases[i]):
                return None
            n += -n % job.parts(have)
            padded |= {(i, bases[i])} if want == have else set()
        elif n % job.parts(want):
            if want[: len(have)] != have:
                return None
            n += -n % job.parts(want)
            padded.add((i, have))
        sizes.append(n)
    return tuple(sizes), frozenset(padded)
