"""A route, run on one device's shard inside a shard_map.

A collective over several dimensions is one of `jax.lax` between two local transpositions. The first puts the pieces in
front, one for each device of the group. The second puts what comes in where it belongs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

import spmd.comm._lax as _lax
from spmd import _compat
from spmd.comm._marks import assert_equal_p
from spmd.comm.planner._moves import Placement, Rounds, common_front, permutation, schedule
from spmd.comm.planner._route import Axes, Leg, NamedRoute, Parts, Request, in_parts, route
from spmd.language import axes_product, axes_tuple

Copies = frozenset[str]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mesh:
    """The mesh of a plan, whose steps may be over parts of axes.

    Attributes:
      sizes: The axes, in mesh order, with parts in place of the axes that are cut.
      axis_of: The axis that each part belongs to.
    """

    sizes: dict[str, int]
    axis_of: dict[str, str]

    @classmethod
    def of(cls, request: Request, parts: Parts) -> Mesh:
        return cls(in_parts(dict(request.mesh), parts), {part: axis for axis, names in parts for part, _ in names})

    def wide(self, axes: Iterable[str]) -> Axes:
        """The axes of the mesh to which these, or these parts, belong."""
        found = {self.axis_of.get(a, a) for a in axes}
        return tuple(dict.fromkeys(axis for a in self.sizes if (axis := self.axis_of.get(a, a)) in found))

    def closed(self, axes: Iterable[str]) -> Axes:
        """All parts of the axes to which these belong, in mesh order."""
        found = self.wide(axes)
        return tuple(a for a in self.sizes if self.axis_of.get(a, a) in found)

    def among(self, axes: Axes) -> tuple[Axes, Groups | None]:
        """The axes of a collective whose devices are numbered along `axes`, the first being the major one. If these
        are not whole axes, also the groups, as JAX's `axis_index_groups`."""
        if not any(a in self.axis_of for a in axes):
            return axes, None
        every = self.closed(axes)
        counts = [self.sizes[a] for a in every]
        rest = [i for i, a in enumerate(every) if a not in axes]
        places = np.arange(math.prod(counts)).reshape(counts).transpose([*rest, *(every.index(a) for a in axes)])
        return self.wide(axes), tuple(map(tuple, places.reshape(-1, axes_product(axes, self.sizes)).tolist()))

    def index(self, axis: str) -> Any:
        """Which place along an axis or a part this device has."""
        whole = self.axis_of.get(axis, axis)
        parts = self.closed((axis,))
        behind = axes_product(parts[parts.index(axis) + 1 :], self.sizes)
        return lax.axis_index(whole) // behind % self.sizes[axis]


def run(x: Any, request: Request, copies: Copies) -> Any:
    """Bring a shard that has one dimension per factor from the source to the target of a request.

    What JAX's types and cotangents mean, along each mesh axis and at each step:

    * a block (the axis divides a dimension): varying, and so is its cotangent, the block's own;
    * a copy typed invarying: the cotangent is invarying too, the same complete value on every device;
    * a copy typed varying: equal as well, but the cotangents of the copies are parts of a sum;
    * a part of a sum: varying; the cotangent of each part is the whole sum's.

    The steps after the sums of a plan take a whole array from blocks and copies to blocks and copies. So their
    transpose is the plan of the way back, in which copies are typed invarying. Copies are typed varying at the ends
    only. One that leaves is made varying by a pvary, whose transpose adds the parts up. One that enters is made
    invarying by `to_invarying`, whose transpose gives the whole cotangent to one device. A copy never becomes invarying
    in another way, because each device would get the cotangent, and their sum would be as many times too large. Some
    steps have transposes in JAX that already do this, and as cheaply. These are left to JAX.

    Along an axis of size 1 all four are the same, and a plan does not have it. There the value is only retyped.

    Args:
      x: The shard.
      request: What is asked for. All axes that the steps use are manual here.
      copies: Of the axes that divide the source and not the target, those along which the result is typed varying.

    Returns:
      The shard, varying along the axes of the target, `copies`, and what neither side names and x varies on.
    """
    here, there = _axes(request.source), _axes(request.target)
    unit = {a for a, n in request.mesh if n == 1}
    x = _compat.pvary(x, tuple(a for a, _ in request.mesh if a in here))
    x = _lax.psum(x, tuple(a for a in request.summed if a in unit))
    gone = tuple(a for a, n in request.mesh if n == 1 and a in here - there)
    x = _run(_lax.to_invarying(x, gone), _without(request, unit), copies - unit)
    x = _compat.pvary(x, tuple(a for a in gone if a in copies))
    for dim, axes in enumerate(request.target):
        for axis in axes:
            if axis in unit - here:
                x = _lax.slice_block(x, axis, dim, 1)
    # The check of the body sees that blocks are exchanged, and cannot tell that they make a whole.
    equal = tuple(a for a, _ in request.mesh if a in copies and a in here - there)
    return assert_equal_p.bind(x, axes=equal, why="a plan of the whole", copies=True) if equal else x


def _run(x: Any, request: Request, copies: Copies) -> Any:
    """The same without axes of size 1."""
    found = route(request)
    on = Mesh.of(request, found.parts)
    here, there = _axes(request.source), _axes(request.target)
    copies = copies | (_compat.varying_axes(x) - here - there - set(request.summed))
    plain = all(_is_own_reverse(leg, copies, request) for leg in found.legs) and not found.parts
    if gone := tuple(a for a, _ in request.mesh if a in copies and a in here - there):
        # The transpose of a gather is one reduce-scatter. In levels the sum may send less.
        back = replace(request, source=request.target, target=request.source, summed=gone)
        plain = plain and len(route(back).legs) <= len(found.legs)
    if plain:
        for leg in found.legs:
            x = _STEPS[leg.kind](x, leg, on, copies)
        return x
    moving = on.wide({a for leg in found.legs for a in _all_axes(leg)}.union(request.summed))
    terms = tuple(a for a in request.summed if a in _compat.unreduced_axes(x))
    x = _lax.retype(x, terms, "terms")
    equal = _compat.varying_axes(x) - here - set(request.summed)
    return _bound(_lax.to_invarying(x, tuple(a for a in moving if a in equal)), request, found, moving, copies)


def _axes(placement: tuple[Axes, ...]) -> Copies:
    return frozenset(a for axes in placement for a in axes)


def _without(request: Request, unit: set[str]) -> Request:
    source, target = (
        tuple(tuple(a for a in axes if a not in unit) for axes in side) for side in (request.source, request.target)
    )
    return replace(request, source=source, target=target, summed=tuple(a for a in request.summed if a not in unit))


def _is_own_reverse(leg: Leg, copies: Copies, request: Request) -> bool:
    """Return whether a step leaves what the end of the plan asks for, and JAX's transpose of it is the step back, with
    no more bytes than needed."""
    before, after = _axes(leg.before), _axes(leg.after)
    if request.summed:
        return leg.kind in ("psum", "psum_scatter")
    return (
        leg.kind in ("split", "all_gather")
        or (leg.kind == "all_to_all" and before - after <= copies)
        or (leg.kind == "ppermute" and before == after)
    )


def _all_axes(leg: Leg) -> set[str]:
    lost, gained = _runs(leg)
    return {*leg.axes, *(a for run in (*lost, *gained) for a in run)}


# --- splitting, gathering, exchanging -------------------------------------------------------------------------


def _runs(leg: Leg) -> tuple[list[Axes], list[Axes]]:
    """The axes that each dimension loses, and those that it gains."""
    lost, gained = [], []
    for before, after in zip(leg.before, leg.after, strict=True):
        keep = common_front(before, after)
        lost.append(before[keep:])
        gained.append(after[keep:])
    return lost, gained


def _split(x: Any, leg: Leg, on: Mesh, copies: Copies) -> Any:
    for dim, gained in enumerate(_runs(leg)[1]):
        for axis in gained:
            x = _block(x, axis, dim, on)
    return x


def _block(x: Any, axis: str, dim: int, on: Mesh) -> Any:
    """This device's block along an axis or a part."""
    if axis not in on.axis_of:
        return _lax.slice_block(x, axis, dim, on.sizes[axis])
    size = x.shape[dim] // on.sizes[axis]
    return lax.dynamic_slice_in_dim(x, on.index(axis) * size, size, dim)


def _all_gather(x: Any, leg: Leg, on: Mesh, copies: Copies) -> Any:
    lost, _ = _runs(leg)
    divided_later = _axes(leg.after)
    kind = {a: "varying" if on.axis_of.get(a, a) in copies or a in divided_later else "invarying" for a in leg.axes}
    dims = [dim for dim, axes in enumerate(lost) if axes]
    if len(set(kind.values())) > 1:
        for dim in dims:
            for axis in reversed(lost[dim]):
                x = _lax.all_gather(x, (axis,), dim, kind[axis])
        return x
    to = kind[leg.axes[0]]
    if len(dims) == 1:
        axes, groups = on.among(lost[dims[0]])
        return _lax.all_gather(x, axes, dims[0], to, groups)
    axes, groups = on.among(leg.axes)
    return _joined(_lax.all_gather(x[None], axes, 0, to, groups), lost, leg.axes, on.sizes)


def _all_to_all(x: Any, leg: Leg, on: Mesh, copies: Copies) -> Any:
    lost, gained = _runs(leg)
    losing, gaining = ([dim for dim, axes in enumerate(side) if axes] for side in (lost, gained))
    if len(losing) == len(gaining) == 1 and lost[losing[0]] == gained[gaining[0]]:
        axes, groups = on.among(lost[losing[0]])
        return _lax.all_to_all(x, axes, gaining[0], losing[0], groups)
    axes, groups = on.among(leg.axes)
    pieces = _pieces(x, gained, leg.axes, on)
    return _joined(_lax.all_to_all(pieces, axes, 0, 0, groups), lost, leg.axes, on.sizes)


def _psum_scatter(x: Any, leg: Leg, on: Mesh, copies: Copies) -> Any:
    _, gained = _runs(leg)
    gaining = [dim for dim, axes in enumerate(gained) if axes]
    if len(gaining) == 1 and set(gained[gaining[0]]) == set(leg.axes):
        axes, groups = on.among(gained[gaining[0]])
        return _lax.psum_scatter(x, axes, gaining[0], groups)
    axes, groups = on.among(leg.axes)
    return _lax.psum_scatter(_pieces(x, gained, leg.axes, on), axes, 0, groups)[0]


def _psum(x: Any, leg: Leg, on: Mesh, copies: Copies) -> Any:
    axes, groups = on.among(leg.axes)
    if groups is None:
        return _lax.psum(x, axes)
    # JAX has no psum in groups: the terms are gathered and added up.
    return _lax.all_gather(x[None], axes, 0, "varying", groups).sum(0, dtype=x.dtype)


def _pieces(x: Any, gained: list[Axes], group: Axes, on: Mesh) -> Any:
    """One piece for each device of the group, in front. If an axis that is gained is not in the group, its devices hold
    the same, and each keeps its own block. If no dimension gains an axis of the group, its devices all get the same."""
    axes, sizes = [axis for run in gained for axis in (*run, "")], on.sizes
    local = iter(n // axes_product(run, sizes) for n, run in zip(x.shape, gained, strict=True))
    x = x.reshape([sizes[axis] if axis else next(local) for axis in axes])
    for place, axis in enumerate(axes):
        if axis and axis not in group:
            x = _block(x, axis, place, on)
    to_front = [axes.index(axis) for axis in group if axis in axes]
    rest = [place for place in range(len(axes)) if place not in to_front]
    x = x.transpose(to_front + rest).reshape(
        [sizes[a] if a in axes else 1 for a in group] + [x.shape[p] for p in rest if not axes[p]]
    )
    shape, counts = x.shape[len(group) :], tuple(sizes[a] for a in group)
    count = axes_product(group, sizes)
    if x.shape[: len(group)] == counts:
        return x.reshape(count, *shape)
    copied = jnp.broadcast_to(x, (*counts, *shape)).reshape(count, *shape)
    return lax.optimization_barrier(copied)  # otherwise XLA takes equal pieces for one array, and fails to lay it out


def _joined(x: Any, lost: list[Axes], group: Axes, sizes: dict[str, int]) -> Any:
    """The pieces in front, one from each device of the group, put where they belong."""
    x = x.reshape([sizes[a] for a in group] + list(x.shape[1:]))
    order = [place for dim, run in enumerate(lost) for place in (*(group.index(a) for a in run), len(group) + dim)]
    shape = [x.shape[len(group) + dim] * axes_product(run, sizes) for dim, run in enumerate(lost)]
    return x.transpose(order).reshape(shape)


# --- point to point -------------------------------------------------------------------------------------------


def _ppermute(x: Any, leg: Leg, on: Mesh, copies: Copies) -> Any:
    axes = on.closed(leg.axes)
    found = _rounds(permutation, leg, axes, on, x.shape)
    [one] = found.rounds
    if found.piece != x.shape:
        x = lax.dynamic_slice(x, corner(one.reads, found.piece, _number(axes, on)), found.piece)
    return _sent(x, one.sender, axes, on)


def _sends(x: Any, leg: Leg, on: Mesh, copies: Copies) -> Any:
    """Each device's target, put together from the pieces that come in."""
    axes = on.closed(leg.axes)
    found = _rounds(_schedule, leg, axes, on, x.shape)
    me = _number(axes, on)
    ends = zip(x.shape, leg.before, leg.after, strict=True)
    shape = [n * axes_product(before, on.sizes) // axes_product(after, on.sizes) for n, before, after in ends]
    x = _compat.pvary(x, on.wide(axes))
    out = _compat.pvary(jnp.zeros(shape, x.dtype), tuple(_compat.varying_axes(x)))
    for one in found.rounds:
        piece = lax.dynamic_slice(x, corner(one.reads, found.piece, me), found.piece)
        if (one.sender != np.arange(len(one.sender))).any():
            piece = _sent(piece, one.sender, axes, on)
        out = lax.dynamic_update_slice(out, piece, corner(one.writes, found.piece, me))
    return out


_schedule = functools.lru_cache(maxsize=256)(schedule)


def _rounds(
    make: Callable[[tuple[int, ...], tuple[int, ...], Placement, Placement], Rounds],
    leg: Leg,
    axes: Axes,
    on: Mesh,
    local: tuple[int, ...],
) -> Rounds:
    """The rounds of a step, over its axes only. Axes that stay in front divide nothing here."""
    before, after = (
        tuple(tuple(axes.index(a) for a in run if a in axes) for run in side) for side in (leg.before, leg.after)
    )
    counts = tuple(on.sizes[a] for a in axes)
    whole = tuple(n * math.prod(counts[a] for a in run) for n, run in zip(local, before, strict=True))
    return make(whole, counts, before, after)


def _number(axes: Axes, on: Mesh) -> Any:
    """Which place this device has along all these axes together."""
    index: Any = 0
    for axis in axes:
        index = index * on.sizes[axis] + on.index(axis)
    return index


def _sent(x: Any, sender: np.ndarray, axes: Axes, on: Mesh) -> Any:
    """Each device gets the array of its sender. Devices are numbered along whole axes, in mesh order."""
    wide = on.wide(axes)
    sizes = {a: axes_product(on.closed((a,)), on.sizes) for a in wide}
    return _lax.ppermute(x, wide, sizes, [(int(s), r) for r, s in enumerate(sender)])


def corner(places: np.ndarray, piece: tuple[int, ...], me: Any) -> list[Any]:
    """Return where this device's piece starts."""
    starts = places * np.array(piece, np.int32)
    return [jnp.asarray(column)[me] if column.any() else np.int32(0) for column in starts.T]


# --- with a gradient of its own -------------------------------------------------------------------------------


def _bound(x: Any, request: Request, found: NamedRoute, moving: Axes, copies: Copies) -> Any:
    """The steps as one primitive. It shows them as a jaxpr, and its transpose is the plan of the way back."""
    given = {"request": request, "found": found, "moving": moving, "copies": copies}
    return relayout_p.bind(x, **given, jaxpr=jax.make_jaxpr(functools.partial(_plain, **given))(x))


def _plain(x: Any, *, request: Request, found: NamedRoute, moving: Axes, copies: Copies) -> Any:
    """The steps with everything typed varying."""
    x, on = _compat.pvary(x, moving), Mesh.of(request, found.parts)
    for leg in found.legs:
        x = _STEPS[leg.kind](x, leg, on, frozenset(moving))
    kept = _axes(request.target) | copies
    return _lax.to_invarying(_compat.pvary(x, moving), tuple(a for a in moving if a not in kept))


def _type(x: Any, *, jaxpr: Any, **_: Any) -> Any:
    return jaxpr.out_avals[0]


def _transpose(cotangent: Any, *, request: Request, moving: Axes, copies: Copies, **_: Any) -> Any:
    # Where the result is a copy that is typed varying, the cotangents are parts of a sum, which the way back adds up. A
    # cotangent that varies along another axis that divides nothing is a part of a sum too, and stays one.
    there, varying = _axes(request.target), _compat.varying_axes(cotangent)
    summed = tuple(a for a in moving if a in copies and a not in there)
    parts = varying - there - set(summed)
    kept = tuple(a for a, _ in request.mesh if a in parts or a in request.kept)
    back = replace(request, source=request.target, target=request.source, summed=summed, kept=kept)
    return _compat.pvary(run(_compat.pvary(cotangent, summed), back, frozenset()), request.summed)


def _batch(
    args: Any, dims: Any, *, request: Request, found: NamedRoute, moving: Axes, copies: Copies, jaxpr: Any
) -> Any:
    """With a dimension in front that nothing divides."""
    [x], [batch] = args, dims
    x = jnp.moveaxis(x, batch, 0)
    ends = {side: ((), *getattr(request, side)) for side in ("source", "target")}
    request = replace(request, sizes=(x.shape[0], *request.sizes), **ends)
    legs = tuple(replace(leg, before=((), *leg.before), after=((), *leg.after)) for leg in found.legs)
    return _bound(x, request, replace(found, legs=legs), moving, copies), 0


relayout_p = _compat.linear_primitive(
    "spmd_relayout",
    abstract=_type,
    run=lambda x, *, jaxpr, **_: jaxpr_as_fun(jaxpr)(x)[0],
    transpose=_transpose,
    batch=_batch,
)

_STEPS: dict[str, Callable[[Any, Leg, Mesh, Copies], Any]] = {
    "split": _split,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "psum_scatter": _psum_scatter,
    "psum": _psum,
    "ppermute": _ppermute,
    "sends": _sends,
}


# --- outside kernels: arrays that lie on the mesh already are moved by the planned steps ------------------------------


def uneven(sizes: Iterable[int]) -> bool:
    """Return whether the size of some axis does not divide a larger one. XLA of jax 0.12 then aborts the process on
    some direct changes of layout ("Could not slice dimension"), but not on steps of one axis at a time."""
    return any(a % b and b % a for a, b in itertools.combinations(sizes, 2))


def move(x: Any, target: NamedSharding) -> Any:
    """`x` brought to another sharding by the planned steps. None if JAX's own way is as good, or the only one.

    Args:
      x: An array, or the tracer of a gradient that is taken outside jit.
      target: Where it is to lie.
    """
    source = getattr(_compat.concrete(x), "sharding", None)
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)  # not every collective takes keys
    if keys or not isinstance(source, NamedSharding) or not _comparable(source, target):
        return None
    steps = program(source, target, tuple(x.shape), x.dtype.itemsize)
    return None if steps is None else steps(x)


def _comparable(a: NamedSharding, b: NamedSharding) -> bool:
    """Return whether both are on one mesh and in one memory, and differ in nothing but divisions."""
    return (
        a.mesh == b.mesh
        and a.memory_kind == b.memory_kind
        and not any(s.spec.unreduced or s.spec.reduced for s in (a, b))
    )


@functools.lru_cache(maxsize=1024)
def program(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], itemsize: int) -> Any:
    """The steps, to be compiled once. None if nothing travels."""
    before, after = _placement(source, len(shape)), _placement(target, len(shape))
    mesh = tuple(source.mesh.shape.items())
    request = Request(shape, mesh, before, after, itemsize=itemsize)
    if not any(leg.collectives for leg in route(request).legs):
        return None
    body = functools.partial(run, request=request, copies=frozenset())
    moved = jax.shard_map(body, mesh=source.mesh, in_specs=source.spec, out_specs=target.spec)
    return jax.jit(moved, out_shardings=target)


def _placement(sharding: NamedSharding, rank: int) -> tuple[Axes, ...]:
    return tuple(map(axes_tuple, _compat.partitions(sharding.spec, rank)))
