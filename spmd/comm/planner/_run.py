"""A route, run on one device's shard inside a shard_map."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd import _compat
from spmd.comm import _lax
from spmd.comm._lax import retype
from spmd.comm._marks import assert_equal_p
from spmd.comm.planner._digits import Round, Rounds, permutation, schedule
from spmd.comm.planner._route import Axes, Leg, Request, route

__all__ = ["run"]


Copies = frozenset[str]


def run(x: Any, legs: Sequence[Leg], mesh: Mapping[str, int], copies: Copies, equal: Axes) -> Any:
    """The steps on a shard that has one dimension per factor.

    Args:
      x: The shard.
      legs: The steps.
      mesh: All mesh axes with their sizes, in mesh order.
      copies: Axes along which the result, where it is not divided, is typed varying; else it is invarying.
      equal: Axes along which the result is invarying whatever the steps did: those of size 1 that leave.
    """
    for leg in legs:
        x = _STEPS[leg.kind](x, leg, mesh, copies)
    return retype(x, tuple(a for a in equal if a in _compat.varying_axes(x)), "invarying")


# --- splitting, gathering, exchanging -------------------------------------------------------------------------


def _kept(before: Axes, after: Axes) -> int:
    """How many axes stay in front."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))


def _runs(leg: Leg) -> tuple[list[Axes], list[Axes]]:
    """The axes that each dimension loses, and those that it gains."""
    keep = [_kept(a, b) for a, b in zip(leg.before, leg.after, strict=True)]
    lost = [axes[k:] for axes, k in zip(leg.before, keep, strict=True)]
    return lost, [axes[k:] for axes, k in zip(leg.after, keep, strict=True)]


def _split(x: Any, leg: Leg, mesh: Mapping[str, int], copies: Copies) -> Any:
    for dim, gained in enumerate(_runs(leg)[1]):
        for axis in gained:
            x = _lax.slice_block(x, axis, dim, mesh[axis])
    return x


def _all_gather(x: Any, leg: Leg, mesh: Mapping[str, int], copies: Copies) -> Any:
    lost, _ = _runs(leg)
    divided_later = {axis for axes in leg.after for axis in axes}
    kind = {a: "varying" if a in copies or a in divided_later else "invarying" for a in leg.axes}
    if len(set(kind.values())) > 1:
        for dim, axes in enumerate(lost):
            for axis in reversed(axes):
                x = _lax.all_gather(x, (axis,), dim, kind[axis])
        return x
    to = kind[leg.axes[0]]
    dims = [dim for dim, axes in enumerate(lost) if axes]
    if len(dims) == 1:
        return _lax.all_gather(x, lost[dims[0]], dims[0], to)
    return _joined(_lax.all_gather(x[None], leg.axes, 0, to), lost, leg.axes, mesh)


def _all_to_all(x: Any, leg: Leg, mesh: Mapping[str, int], copies: Copies) -> Any:
    lost, gained = _runs(leg)
    losing, gaining = ([dim for dim, axes in enumerate(side) if axes] for side in (lost, gained))
    if len(losing) == len(gaining) == 1 and lost[losing[0]] == gained[gaining[0]]:
        return _lax.all_to_all(x, lost[losing[0]], split=gaining[0], concat=losing[0])
    x = _lax.all_to_all(_pieces(x, gained, leg.axes, mesh), leg.axes, split=0, concat=0)
    return _joined(x, lost, leg.axes, mesh)


def _psum_scatter(x: Any, leg: Leg, mesh: Mapping[str, int], copies: Copies) -> Any:
    _, gained = _runs(leg)
    gaining = [dim for dim, axes in enumerate(gained) if axes]
    if len(gaining) == 1 and set(gained[gaining[0]]) == set(leg.axes):
        return _lax.psum_scatter(x, gained[gaining[0]], gaining[0])
    return _lax.psum_scatter(_pieces(x, gained, leg.axes, mesh), leg.axes, 0)[0]


def _psum(x: Any, leg: Leg, mesh: Mapping[str, int], copies: Copies) -> Any:
    return _lax.psum(x, leg.axes)


def _pieces(x: Any, gained: list[Axes], group: Axes, mesh: Mapping[str, int]) -> Any:
    """One piece for each device of the group, in front. Of the axes gained that are not in the group, whose devices
    hold the same, each device keeps its own block."""
    axes = [(axis, dim) for dim, run in enumerate(gained) for axis in (*run, "")]
    local = list(x.shape)
    x = x.reshape([mesh[a] if a else local[d] // math.prod(mesh[b] for b in gained[d]) for a, d in axes])
    for place, (axis, _) in enumerate(axes):
        if axis and axis not in group:
            x = _lax.slice_block(x, axis, place, mesh[axis])
    order = [place for axis in group for place, (a, _) in enumerate(axes) if a == axis]
    rest = [place for place in range(len(axes)) if place not in order]
    shape = [math.prod(mesh[a] for a in group), *(x.shape[p] for p in rest if not axes[p][0])]
    return x.transpose(order + rest).reshape(shape)


def _joined(x: Any, lost: list[Axes], group: Axes, mesh: Mapping[str, int]) -> Any:
    """The pieces in front, one from each device of the group, put in their places."""
    x = x.reshape([mesh[a] for a in group] + list(x.shape[1:]))
    order = [place for dim, run in enumerate(lost) for place in (*(group.index(a) for a in run), len(group) + dim)]
    shape = [x.shape[len(group) + dim] * math.prod(mesh[a] for a in run) for dim, run in enumerate(lost)]
    return x.transpose(order).reshape(shape)


# --- point to point -------------------------------------------------------------------------------------------


def _ppermute(x: Any, leg: Leg, mesh: Mapping[str, int], copies: Copies) -> Any:
    kind = Exchange.of(leg, mesh, once=True)
    if kind.shape(x.shape) != x.shape:
        return _exchanged(x, leg, kind, copies)
    [one] = _rounds(kind, x.shape).rounds
    return _between(x, leg, copies, lambda x: lax.ppermute(x, leg.axes, _pairs(one)))


def _sends(x: Any, leg: Leg, mesh: Mapping[str, int], copies: Copies) -> Any:
    return _exchanged(x, leg, Exchange.of(leg, mesh, once=False), copies)


def _exchanged(x: Any, leg: Leg, kind: Exchange, copies: Copies) -> Any:
    """What only some of the devices that hold a block send: as a primitive, whose gradient is the way back."""
    if _compat.varying_axes(x).intersection(leg.axes) <= {a for run in kind.before for a in run}:
        out = exchange_p.bind(x, kind=kind)
        leaving = (a for a in leg.axes if a in copies and a not in _compat.varying_axes(out))
        return _compat.pvary(out, tuple(leaving))
    return _between(x, leg, copies, lambda x: _in_rounds(_compat.pvary(x, leg.axes), kind))


def _between(x: Any, leg: Leg, copies: Copies, move: Callable[[Any], Any]) -> Any:
    """Run what moves shards from the devices of some axes to those of others, and type the result.

    Axes that come in hold equal shards, and so do afterwards those that leave. Where JAX knows the former, it is told
    the latter, and the gradient is the way back. Where the shards that come in are typed varying, their gradients are
    parts of a sum: then one of the results' equal gradients is taken, and goes back to one.
    """
    here, there = ({a for axes in side for a in axes} for side in (leg.before, leg.after))
    copied = [a for a in leg.axes if a not in here and a in _compat.varying_axes(x)]
    fresh = tuple(a for a in leg.axes if a not in here and a not in copied)
    x = retype(x, fresh, "varying") if not copied else _compat.pvary(x, fresh)
    out = move(x)
    leaving = tuple(a for a in leg.axes if a not in there)
    if copied:
        stay = tuple(a for a in leaving if a in copies)
        out = assert_equal_p.bind(out, axes=stay, why="equal shards moved") if stay else out
        return retype(out, tuple(a for a in leaving if a not in copies), "invarying", once=True)
    return _compat.pvary(retype(out, leaving, "invarying"), tuple(a for a in leaving if a in copies))


@dataclass(frozen=True)
class Exchange:
    """A change of places over some axes, as a parameter of a primitive: one permutation, or rounds of pieces."""

    axes: Axes
    sizes: tuple[int, ...]
    before: tuple[Axes, ...]
    after: tuple[Axes, ...]
    once: bool

    @staticmethod
    def of(leg: Leg, mesh: Mapping[str, int], *, once: bool) -> Exchange:
        """That of a step; axes that stay in front are left out."""
        before, after = (
            tuple(tuple(a for a in axes if a in leg.axes) for axes in side) for side in (leg.before, leg.after)
        )
        return Exchange(leg.axes, tuple(mesh[a] for a in leg.axes), before, after, once)

    def in_front(self) -> Exchange:
        """With another dimension before the others."""
        return replace(self, before=((), *self.before), after=((), *self.after))

    def whole(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes that shards of this shape make together."""
        return tuple(n * self._count(run) for n, run in zip(local, self.before, strict=True))

    def shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a shard afterwards."""
        return tuple(
            n * self._count(a) // self._count(b) for n, a, b in zip(local, self.before, self.after, strict=True)
        )

    def _count(self, axes: Axes) -> int:
        return math.prod(self.sizes[self.axes.index(a)] for a in axes)


@functools.lru_cache(maxsize=256)
def _rounds(kind: Exchange, local: tuple[int, ...]) -> Rounds:
    before, after = (
        tuple(tuple(kind.axes.index(a) for a in axes) for axes in side) for side in (kind.before, kind.after)
    )
    return (permutation if kind.once else schedule)(kind.whole(local), kind.sizes, before, after)


def _pairs(one: Round) -> list[tuple[int, int]]:
    """Who sends to whom."""
    return list(zip(one.sender.tolist(), range(len(one.sender)), strict=True))


def _in_rounds(x: Any, kind: Exchange) -> Any:
    """Each device's target, put together from the pieces that come in."""
    found = _rounds(kind, x.shape)
    me = _lax.axis_index(kind.axes, dict(zip(kind.axes, kind.sizes, strict=True)))
    if kind.once:
        [one] = found.rounds
        part = lax.dynamic_slice(x, _corner(one.reads, found.piece, me), found.piece)
        return lax.ppermute(part, kind.axes, _pairs(one))
    out = _compat.pvary(jnp.zeros(kind.shape(x.shape), x.dtype), tuple(_compat.varying_axes(x)))
    for one in found.rounds:
        piece = lax.dynamic_slice(x, _corner(one.reads, found.piece, me), found.piece)
        if (one.sender != np.arange(len(one.sender))).any():
            piece = lax.ppermute(piece, kind.axes, _pairs(one))
        out = lax.dynamic_update_slice(out, piece, _corner(one.writes, found.piece, me))
    return out


def _corner(places: np.ndarray, piece: tuple[int, ...], me: Any) -> list[Any]:
    """Where this device's piece starts."""
    starts = places * np.array(piece, np.int32)
    return [jnp.asarray(column)[me] if column.any() else np.int32(0) for column in starts.T]


def _exchange_shape(x: Any, *, kind: Exchange) -> Any:
    there = [a for run in kind.after for a in run]
    out = _compat.with_varying(x, there, kind.shape(x.shape))
    return _compat.without_varying(out, [a for a in kind.axes if a not in there])


def _exchange_run(x: Any, *, kind: Exchange) -> Any:
    return _in_rounds(_compat.pvary(x, kind.axes), kind)


def _exchange_transpose(cotangent: Any, *, kind: Exchange) -> Any:
    back = replace(kind, before=kind.after, after=kind.before)
    if not kind.once:
        return exchange_p.bind(cotangent, kind=back)
    mesh = tuple(zip(kind.axes, kind.sizes, strict=True))
    legs = route(Request(back.whole(cotangent.shape), mesh, back.before, back.after)).legs
    return run(cotangent, legs, dict(mesh), frozenset(), ())


def _exchange_batch(args: Any, dims: Any, *, kind: Exchange) -> Any:
    [x], [batch] = args, dims
    return exchange_p.bind(jnp.moveaxis(x, batch, 0), kind=kind.in_front()), 0


exchange_p = _compat.linear_primitive(
    "spmd_exchange",
    abstract=_exchange_shape,
    run=_exchange_run,
    transpose=_exchange_transpose,
    batch=_exchange_batch,
)

_STEPS: dict[str, Callable[[Any, Leg, Mapping[str, int], Copies], Any]] = {
    "split": _split,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "psum_scatter": _psum_scatter,
    "psum": _psum,
    "ppermute": _ppermute,
    "sends": _sends,
}
