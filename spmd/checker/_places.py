"""Which elements of the whole a piece holds, as far as slices, joins and permutations decide it.

A halo written by hand slices the edge of a block, sends it to the next device and joins it to the block there. No
layout says how the result lies: neighbours' data are in it. But each element is known by its distance from the place
where it lies, counted in elements of the whole dimension, and a stencil reads the same distances everywhere. An edge
that came from the wrong side, or the other edge of the neighbour, lies more than a block away from its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import spmd.checker._permutations as permutations
from spmd.checker._state import HIDDEN, NONE, STEP, Axes, State, is_divided, size_of
from spmd.checker._table import Map

OWN = -1  # nobody brought it

Element = tuple[int, int]  # how far behind its place it belongs, and the number of the equation that brought it here
Elements = frozenset[Element]
Run = tuple[int, Elements]  # so many places, and what lies at each of them

MOST = 32  # runs, and elements of a run; nobody writes a stencil with more by hand


class Places(NamedTuple):
    """The elements along one dimension.

    Attributes:
      axes: The mesh axes that divide it.
      local: The elements of one block.
      runs: The dimension in runs. At place j with distance d lies element `j + d` of the block here; one beyond its end
        is one of the next block. No element: a constant.
      around: The elements of the whole, if what leaves at one end came in at the other; otherwise 0.
      joined: The number of the equation that put pieces one after another, or -1.
    """

    axes: Axes
    local: int
    runs: tuple[Run, ...]
    around: int = 0
    joined: int = -1


class Wrong(NamedTuple):
    """Elements that lie at a wrong place.

    Attributes:
      place: The place in the block.
      distance: How far behind it they belong.
      at: The number of the equation to blame.
    """

    place: int
    distance: int
    at: int


def of(state: State, d: int) -> Places | None:
    """The places along one dimension of a value. A block that nothing was done to is where it is."""
    if state.places:
        return state.places[d]
    [*_, (size, axes)] = dim = state.dims[d]
    held = set(axes)
    if len(dim) > 1 or not is_divided(axes) or not held.isdisjoint(state.different | state.partial):
        return None
    if any(p.axis in held and p.kind != STEP for p in state.pending):
        return None
    return from_place(axes, size, size, 0)


def from_place(axes: Axes, local: int, size: int, first: int) -> Places:
    """A piece that begins with one element of the block here."""
    return Places(axes, local, ((size, frozenset(((first, OWN),))),))


def _constant(state: State, d: int) -> bool:
    """Whether a dimension has the same elements on each device, such as a mask of a block."""
    return not any(axes is HIDDEN or is_divided(axes) for _, axes in state.dims[d]) and not state.places


def _made(like: Places, runs: Iterable[Run]) -> Places | None:
    """Places with these runs; neighbouring runs of one kind are one."""
    out: list[Run] = []
    for size, elements in runs:
        if size and out and out[-1][1] == elements:
            out[-1] = (out[-1][0] + size, elements)
        elif size:
            out.append((size, elements))
    if not out or len(out) > MOST or any(len(elements) > MOST for _, elements in out):
        return None
    return like._replace(runs=tuple(out))


def _moved(elements: Elements, by: int, at: int = OWN) -> Elements:
    return frozenset([(d + by, at if at >= 0 else brought) for d, brought in elements])


def kept(places: Sequence[Places | None]) -> tuple[Places | None, ...]:
    """What a state keeps: nothing where no dimension is known."""
    return tuple(places) if any(one is not None for one in places) else ()


# --- primitives -------------------------------------------------------------------------------------------------


def _cut(places: Places | None, start: int, size: int) -> Places | None:
    """The places from `start` on."""
    if places is None:
        return None
    out, first = [], 0
    for length, elements in places.runs:
        taken = min(first + length, start + size) - max(first, start)
        if taken > 0:
            out.append((taken, _moved(elements, start)))
        first += length
    return _made(places, out)


def sliced(state: State, starts: Sequence[int], sizes: Sequence[int]) -> tuple[Places | None, ...]:
    """Of a part of a value. Of a whole block nothing is said that its layout does not say."""
    divided = [size_of(dim) != n and is_divided(dim[0][1]) for dim, n in zip(state.dims, sizes, strict=True)]
    if not state.places and not any(divided):
        return ()
    return kept([_cut(of(state, d), start, n) for d, (start, n) in enumerate(zip(starts, sizes, strict=True))])


def padded(eqn: Any, state: State) -> tuple[Places | None, ...]:
    """Constants beside what is there."""
    if not state.places:
        return ()
    out = []
    for d, (low, high, inside) in enumerate(eqn.params["padding_config"]):
        one = of(state, d)
        if one is None or inside or min(low, high) < 0:
            out.append(None if (low, high, inside) != (0, 0, 0) else one)
            continue
        runs = [(low, NONE), *((n, _moved(elements, -low)) for n, elements in one.runs), (high, NONE)]
        out.append(_made(one, runs))
    return kept(out)


def joined(operands: Sequence[State], along: int, at: int) -> tuple[Places | None, ...]:
    """Of arrays one after another."""
    rank = len(operands[0].dims)
    return kept([_in_line(operands, d, at) if d == along else union([(o, d) for o in operands]) for d in range(rank)])


def _in_line(operands: Sequence[State], d: int, at: int) -> Places | None:
    given = [(of(o, d), size_of(o.dims[d]), _constant(o, d)) for o in operands]
    known = [one for one, _, _ in given if one is not None]
    if not _alike(known) or any(one is None and not constant for one, _, constant in given):
        return None
    runs: list[Run] = []
    first = 0
    for one, size, _ in given:
        here = ((size, NONE),) if one is None else one.runs
        runs += [(n, _moved(elements, -first)) for n, elements in here]
        first += size
    return _made(_first(known)._replace(joined=at), runs)


def _alike(known: Sequence[Places]) -> bool:
    return bool(known) and all(one[:2] == known[0][:2] for one in known)


def _first(known: Sequence[Places]) -> Places:
    """One for all: what any of them says besides its runs."""
    return known[0]._replace(around=max(one.around for one in known), joined=max(one.joined for one in known))


def union(given: Sequence[tuple[State, int]]) -> Places | None:
    """The places of a dimension that several operands have: at each one the elements of all."""
    known = []
    for state, d in given:
        one = of(state, d)
        if one is not None:
            known.append(one)
        elif not _constant(state, d):
            return None
    if not _alike(known) or len({sum(n for n, _ in one.runs) for one in known}) > 1:
        return None
    ends = sorted({end for one in known for end in _ends(one)})
    runs = []
    for first, last in zip((0, *ends), ends, strict=False):
        runs.append((last - first, NONE.union(*(_at(one, first) for one in known))))
    return _made(_first(known), runs)


def _ends(one: Places) -> list[int]:
    out, end = [], 0
    for n, _ in one.runs:
        end += n
        out.append(end)
    return out


def _at(one: Places, place: int) -> Elements:
    end = 0
    for n, elements in one.runs:
        end += n
        if place < end:
            return elements
    return NONE


def passed(m: Map, operands: Sequence[State], rank: int) -> tuple[Places | None, ...]:
    """Of a result of an equation of the table. What is needed whole is not where it was, and a dimension that the table
    does not name is new."""
    labels: dict[int, list[tuple[State, int]]] = {}
    for operand, given in zip(operands, m.operands, strict=False):
        for d, label in enumerate(given):
            if label is not None:
                labels.setdefault(label, []).append((operand, d))
    lost = {None, *m.whole, *m.made}
    named = [*m.result, *[None] * rank][:rank]
    return kept([None if label in lost or label not in labels else union(labels[label]) for label in named])


def permuted(eqn: Any, state: State, axes: Axes, sizes: Mapping[str, int], at: int) -> tuple[Places | None, ...]:
    """Of another device's value, if all get one from as far away."""
    count = math.prod(sizes.get(a, 0) for a in axes)
    perm = eqn.params.get("perm", ())
    if not count or any(max(pair) >= count for pair in perm):
        return ()
    found, out = permutations.moves(permutations.sends(perm, count)), []
    for d in range(len(state.dims)):
        one = of(state, d)
        if one is None or not set(axes) & set(one.axes):
            out.append(one)
        elif found.shift is None or one.axes != tuple(a for a in sizes if a in axes):
            out.append(None)
        else:
            by = -found.shift * one.local
            around = one.local * count if found.wraps else one.around
            runs = [(n, _moved(elements, by, at)) for n, elements in one.runs]
            out.append(_made(one._replace(around=around), runs))
    return kept(out)


# --- what is wrong ----------------------------------------------------------------------------------------------


def _near(distance: int, around: int) -> int:
    """The shorter way."""
    distance = distance % around if around else distance
    return distance - around if around and 2 * distance > around else distance


def differs(one: Places, first: int, around: int) -> int | None:
    """A distance at which elements lie, if they are said to begin at `first` and do not."""
    every = sorted({d for _, elements in one.runs for d, _ in elements})
    return next((d for d in every if _near(d - first, around or one.around)), None)


def misplaced(one: Places) -> Wrong | None:
    """Elements at one place of each block that do not belong there, though others may not lie as far away.

    A rule for the whole dimension is the same wherever blocks begin. So a distance of a block or more belongs to all
    places of a block or to none: whoever sends whole blocks has it everywhere. And where the neighbour's element
    should lie, the element at the other end of the own block does not.
    """
    if sum(n for n, _ in one.runs) != one.local or all(at < 0 for _, elements in one.runs for _, at in elements):
        return None
    near = [(n, {_near(d, one.around): at for d, at in elements}) for n, elements in one.runs]
    everywhere = set.intersection(*({*distances} for _, distances in near))
    place = 0
    for n, distances in near:
        far = sorted(d for d in distances if abs(d) >= one.local and d not in everywhere)
        if far and 2 * n < one.local:
            return Wrong(place, far[0], distances[far[0]])
        place += n
    return _own_end(one, near)


def _own_end(one: Places, near: Sequence[tuple[int, Mapping[int, int]]]) -> Wrong | None:
    """A place where the own block's other end lies, and not the neighbour's element as elsewhere."""
    length, usual = max(near, key=lambda run: run[0])
    crosses, place, found = False, 0, None
    for n, distances in near:
        crosses |= any(place + d < 0 or place + n + d > one.local for d in distances)
        for d in sorted({*distances}.difference(usual)):
            instead = {d - one.local, d + one.local}.intersection(usual).difference(distances)
            if found is None and instead and n < length and 0 <= place + d < one.local:
                found = Wrong(place, d, one.joined)
        place += n
    return found if crosses and one.joined >= 0 else None


def carried_on(given: State, out: State) -> list[tuple[Places, Wrong]]:
    """What is misplaced in what a loop gives on, where it was given a block to which nothing was done.

    Elements that only move may be those of a queue on each device, whose first ones go to the end of the next queue.
    """
    found = []
    for d, one in enumerate(out.places):
        block = None if given.places else of(given, d)
        if one is None or block is None or block[:2] != one[:2]:
            continue
        wrong = misplaced(one)
        if wrong is not None and len(_at(one, wrong.place)) > 1:
            found.append((one, wrong))
    return found
