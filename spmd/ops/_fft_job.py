"""One Fourier transform of a distributed array: what its string asks for, and the route of layouts that gets there."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _compat
from spmd.comm._call import Call, Operand
from spmd.comm.planner._route import Request
from spmd.comm.planner._route import route as cheapest
from spmd.errors import Fix, SizeError
from spmd.language import Atom, Dim, Layout, axes_product
from spmd.ops._fft_walls import Wall, frequencies
from spmd.ops._reduce import plain_dims

# --- the route: which dimensions are transformed when, and the layouts in between ------------------------------------
#
# Pure Python on placements. A dimension can be transformed while it is whole on each device. So the divided ones are
# freed one after another, or several at once, by moving their mesh axes to other dimensions. Dijkstra's algorithm finds
# the route that sends the fewest bytes, of those whose every change frees a dimension. The planner says what each
# change of layout sends. Routes are short and few, and each is searched once.
#
# This search is not the planner's. Between two layouts here dimensions must be whole, in an order for real transforms,
# sizes and item sizes change, and some dimensions are padded; the planner's states and its bound know none of this.


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
        for to, sizes, padded, price in _changes(job, state):
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


def _itemsize(job: Job, left: frozenset[int]) -> int:
    if left == job.moved:
        return job.given
    return job.itemsize // 2 if job.real == "last" and not left else job.itemsize


def _changes(job: Job, state: _State) -> Iterator[tuple[Placement, tuple[int, ...], frozenset[tuple[int, Axes]], int]]:
    """The layouts that may come next: the target if it frees something, and every move of whole groups of axes."""
    item = _itemsize(job, state.left)
    for to in dict.fromkeys((job.target, *_freed(job, state))):
        if to == state.at or not (to != job.target or _frees(state, to)):
            continue
        fitted = _fitted(job, state, to)
        if fitted is not None:
            sizes, padded = fitted
            request = Request(sizes, job.mesh, state.at, to, (), (), item, "collectives", None)
            yield to, sizes, padded, sum(leg.nbytes for leg in cheapest(request).legs)


def _frees(state: _State, to: Placement) -> bool:
    """Return whether the target is progress: nothing is left to transform, or some dimension becomes whole or is
    cropped."""
    return (
        not state.left
        or any(state.at[i] and not to[i] for i in state.left)
        or any(state.at[i] != to[i] == base for i, base in state.padded)
    )


def _freed(job: Job, state: _State) -> Iterator[Placement]:
    """All ways to take axes away from one or several of the waiting dimensions: all its axes, or, from a padded one,
    those that it was padded for."""
    bases = dict(state.padded)
    waiting = [i for i in sorted(state.left | set(bases)) if state.at[i] != bases.get(i, ())]
    for count in range(1, len(waiting) + 1):
        for group in itertools.combinations(waiting, count):
            takers = [i for i in sorted(job.movable) if i not in group]
            for order in itertools.permutations(group):
                for chosen in itertools.product(takers, repeat=count):
                    to = [bases.get(i, ()) if i in group else axes for i, axes in enumerate(state.at)]
                    for giver, taker in zip(order, chosen, strict=True):
                        to[taker] = (*to[taker], *state.at[giver][len(bases.get(giver, ())) :])
                    yield tuple(to)


def _fitted(job: Job, state: _State, to: Placement) -> tuple[tuple[int, ...], frozenset[tuple[int, Axes]]] | None:
    """The sizes that make the change possible, and what is padded after it. None if padding cannot help.

    A dimension is padded when it takes over axes behind its own: each of its blocks gets zeros at its end. It is
    cropped when it has given these axes away again. In between nothing else is done to it.
    """
    sizes, padded, bases = [], set(), dict(state.padded)
    for i, (have, want) in enumerate(zip(state.at, to, strict=True)):
        n = job.before[i] if i in state.left else job.after[i]
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


# --- what the string of a transform asks for -------------------------------------------------------------------------


def renamed_dims(call: Call) -> tuple[int, ...]:
    """Return which dimensions of the pattern have a new name."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    for layout in (src, dst):
        plain_dims(call, layout)
        if layout.unreduced or layout.reduced:
            rule = "a Fourier transform is of complete values, without marks."
            call.fail(rule, advice=f"psum them first, then {call.name}")
    same = len(src.dims) == len(dst.dims)
    if not same or [d.ellipsis for d in src.dims] != [d.ellipsis for d in dst.dims]:
        rule = "the dimensions of both sides match by position, so there are as many, and '...' stands in one place."
        call.fail(rule, got=[f'"{src.short}": {len(src.dims)}', f'"{dst.short}": {len(dst.dims)}'])
    pairs = list(zip(src.dims, dst.dims, strict=True))
    moved = [i for i, (a, b) in enumerate(pairs) if a.names != b.names]
    for i in moved:
        dim = next((d for d in pairs[i] if len(d.atoms) != 1), None)
        if dim is not None:
            call.fail("a transformed dimension has one name on each side.", at=dim.span)
        if dst.dims[i].atoms[0].name in src.names:
            rule = f"{dst.dims[i].atoms[0].name} is another dimension on the left: transforms keep the order."
            call.fail(rule, at=dst.dims[i].span)
    if not moved:
        rule = "the transform is along the dimensions that get another name, and none does."
        call.fail(rule, fix=call.paste(src, _renaming(src)))
    _check_order(call, [(src.dims[i], dst.dims[i]) for i in moved])
    return tuple(moved)


def _check_order(call: Call, pairs: list[tuple[Dim, Dim]]) -> None:
    """Refuse names that repeat those of the left side in another order, as in `"x y -> ky kx"`. They say that something
    is transposed, and the positions say that nothing is. Other libraries do transpose."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    left, right = ([one[side].atoms[0].name for one in pairs] for side in (0, 1))
    one, other = _told_apart(left), _told_apart(right)
    if one == other or sorted(one) != sorted(other):
        return
    meant = dict(zip(one, left, strict=True))
    own = dict(zip(other, (after for _, after in pairs), strict=True))
    of = {before: own[told] for told, before in meant.items()}
    both = zip(src.dims, dst.dims, strict=True)
    ordered = Layout.from_dims([of.get(a.atoms[0].name, b) if a.atoms else b for a, b in both])
    i = next(i for i, told in enumerate(one) if told != other[i])
    rule = (
        f"dimensions match by position, so {left[i]} would become {right[i]}, which by its name is the transform "
        f"of {meant[other[i]]}: transforms keep the order."
    )
    by_name = (of[name].atoms[0].name for name in left)
    by_position = f"by position: {_arrows(left, right)}; any other names would say so"
    got = [by_position, f"by name: {_arrows(left, by_name)}, and transposed"]
    in_order = call.paste(src, ordered)
    fix = None if in_order is None else Fix("rearrange", (in_order,), f"{ordered.short} -> {dst.short}")
    call.fail(rule, at=pairs[i][1].span, got=got, fix=fix)


def _told_apart(names: list[str]) -> list[str]:
    """Names without their common beginning and end: `x`, `y` for `kx`, `ky`."""
    names = [name.casefold() for name in names]
    for _ in range(2):  # the front, then, written backwards, the back
        shared = sum(1 for _ in itertools.takewhile(lambda c: len(set(c)) == 1, zip(*names, strict=False)))
        names = [name[: shared - 1 if shared else None : -1] for name in names]
    return names


def _arrows(left: Iterable[str], right: Iterable[str]) -> str:
    return ", ".join(f"{a} -> {b}" for a, b in zip(left, right, strict=True))


def _renaming(src: Layout) -> Layout:
    """The right side that transforms the last dimension."""
    i = max(i for i, dim in enumerate(src.dims) if not dim.ellipsis) if src.names else 0
    dims = list(src.dims)
    if dims and len(dims[i].atoms) == 1:
        dims[i] = Dim((Atom(f"k{dims[i].atoms[0].name}", dims[i].atoms[0].axes),))
    return Layout.from_dims(dims)


def job_of(call: Call, operand: Operand, dtype: Any, moved: tuple[int, ...], pad: bool, wall: Wall | None) -> Job:
    """The work in terms of factors, one per array axis."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    extra = len(call.ellipsis_shape())
    counts = [extra if dim.ellipsis else len(dim.atoms) for dim in src.dims]
    places = [sum(counts[:i]) for i in range(len(counts))]  # of each dim, its first factor
    target: list[tuple[str, ...]] = []
    after: list[int] = []
    for i, (dim, place, count) in enumerate(zip(dst.dims, places, counts, strict=True)):
        those = operand.factors[place : place + count]
        if dim.ellipsis:
            target += [()] * extra
            after += [factor.size for factor in those]
            continue
        least = wall.least if wall is not None and i in moved else 0
        for atom, factor in zip(dim.atoms, those, strict=True):
            after.append(_size_after(call, atom, factor, pad, i == moved[-1], least))
            target.append(atom.axes or ())
    real = {"fft.rfft": "first", "fft.irfft": "last"}.get(call.name, "" if wall is None else "both")
    single = [i for i, dim in enumerate(src.dims) if len(dim.atoms) == len(dst.dims[i].atoms) == 1]
    return Job(
        source=tuple(f.axes for f in operand.factors),
        target=tuple(target),
        before=tuple(f.size for f in operand.factors),
        after=tuple(after),
        moved=frozenset(places[i] for i in moved),
        half=places[moved[-1]] if real in ("first", "last") else -1,
        real=real,
        movable=frozenset(places[i] for i in single),
        mesh=call.frame.sizes,
        given=dtype.itemsize,
        itemsize=np.result_type(dtype, np.complex64).itemsize if wall is None else dtype.itemsize,
    )


def _size_after(call: Call, atom: Atom, factor: Any, pad: bool, last: bool, least: int) -> int:
    """The size of a factor on the right, at least `least`. Its name is bound to it, and its axes divide it."""
    size, fix = factor.size, None
    if last and call.name == "fft.rfft":
        size = frequencies(call, atom, size, pad)
        fix = None if pad else call.paste(call.src, call.dst, pad=True)
    elif last and call.name == "fft.irfft":
        size = _samples(call, atom, size, pad)
    if size < least:
        rule = f"a cosine transform of type 1 has an element at each wall, and {atom.name} has one element."
        call.fail(rule, at=atom.span, advice="type=2, with walls half an element beyond", error=SizeError)
    call.bind(atom.name, size, f"{call.name} of {factor.name}", atom.span)
    call.local(size, atom.axes or (), atom.name, atom.span, fix=fix)
    return size


def _samples(call: Call, atom: Atom, size: int, pad: bool) -> int:
    """Return how many samples a half spectrum of `size` entries belongs to."""
    known = call.sizes.get(atom.name)
    if pad and known is None:
        rule = f"the size of {atom.name} says how many of the {size} entries are padding, and it is not known."
        call.fail(rule, at=atom.span, advice=f"{atom.name}={2 * size - 2}, if nothing is padding", error=SizeError)
    n = known[0] if known else 2 * (size - 1)
    if n < 1:
        rule = "one frequency belongs to one sample; without a size it would belong to 2 (1 - 1) = 0 samples."
        call.fail(rule, at=atom.span, fix=f"{atom.name}=1", error=SizeError)
    padded = size - (n // 2 + 1)
    if padded < 0 or (padded and not pad):
        rule = f"{size} frequencies belong to {2 * size - 2} or {2 * size - 1} samples, not to {n}."
        got = [f"{atom.name} = {n}: {known[1]}"] if known else []
        advice = f"{atom.name}={2 * size - 2}" + (
            f", or pad=True if the last {padded} are padding" if padded > 0 else ""
        )
        call.fail(rule, at=atom.span, got=got, advice=advice, error=SizeError)
    return n


# --- rearrangements of a block that XLA for CPUs makes in one pass over the memory, forward and backward --------------
#
# XLA joins slices of one array in one pass, and a transpose that does the same takes two. But the gradient of a slice
# is an array of zeros with the slice in it, and the gradient of many slices is a sum of as many such arrays. So these
# operations have transposes of their own: the way back.


JOINED = 16  # the most pieces that are joined one by one; more would make programs large


@dataclass(frozen=True)
class _Cut:
    """Dimension `dim` in `n` pieces, which are stacked in front."""

    n: int
    dim: int
    fixed: bool = False  # whether it undoes a join

    def run(self, x: Any) -> Any:
        # Otherwise XLA removes a join and a cut that follow each other, but for some of the pieces only, and then
        # refuses an exchange of pieces that lie in memory in different orders.
        x = _compat.row_major(x) if self.fixed else x
        before, size, behind = x.shape[: self.dim], x.shape[self.dim], x.shape[self.dim + 1 :]
        return jnp.moveaxis(x.reshape(*before, self.n, size // self.n, *behind), self.dim, 0)

    def back(self) -> _Join:
        return _Join(self.n, self.dim)


@dataclass(frozen=True)
class _Join:
    """The reverse: the `n` pieces of a stack, one behind the other in dimension `dim`."""

    n: int
    dim: int

    def run(self, pieces: Any) -> Any:
        return jax.lax.concatenate([jax.lax.index_in_dim(pieces, i, keepdims=False) for i in range(self.n)], self.dim)

    def back(self) -> _Cut:
        return _Cut(self.n, self.dim, fixed=True)


@dataclass(frozen=True)
class _Transpose:
    """A transpose of the first dimensions; others stay. If there are few planes, it goes plane by plane, which suits
    caches better."""

    order: tuple[int, ...]

    def run(self, x: Any) -> Any:
        order = (*self.order, *range(len(self.order), x.ndim))
        place = order.index(0) if order else 0
        if 0 < place < x.ndim - 1 and x.shape[0] <= JOINED:
            rest = [i - 1 for i in order if i]
            return jnp.stack([x[i].transpose(rest) for i in range(x.shape[0])], place)
        return x.transpose(order)

    def back(self) -> _Transpose:
        return _Transpose(tuple(self.order.index(i) for i in range(len(self.order))))


def cut(x: Any, n: int, dim: int) -> Any:
    """A stack of the `n` pieces of dimension `dim`."""
    return _move_p.bind(x, step=_Cut(n, dim))


def joined(pieces: Any, dim: int) -> Any:
    """The pieces of a stack, one behind the other in dimension `dim` of the result."""
    return _move_p.bind(pieces, step=_Join(pieces.shape[0], dim))


def transposed(x: Any, order: tuple[int, ...]) -> Any:
    """`x.transpose(order)`."""
    return _move_p.bind(x, step=_Transpose(order)) if order != tuple(range(x.ndim)) else x


def _type(x: Any, *, step: Any) -> Any:
    plain = jax.eval_shape(step.run, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return _compat.with_varying(x, (), plain.shape)


def _batch(args: Any, dims: Any, *, step: Any) -> Any:
    """With a dimension behind all others, which stays there."""
    [x], [batch] = args, dims
    out = _move_p.bind(jnp.moveaxis(x, batch, -1), step=step)
    return out, out.ndim - 1


_move_p = _compat.linear_primitive(
    "spmd_move",
    abstract=_type,
    run=lambda x, *, step: step.run(x),
    transpose=lambda cotangent, *, step: _move_p.bind(cotangent, step=step.back()),
    batch=_batch,
)
