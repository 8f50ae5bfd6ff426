"""The collectives: what they make equal, what they make different."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd._jaxprs import axes_of, shape_of
from spmd.checker._axes import Origin
from spmd.checker._report import nonlinear_use
from spmd.checker._rules import compute
from spmd.checker._state import EVERYWHERE, SCALAR, UNKNOWN, ZERO, State, normal
from spmd.checker._walk import Walk


def _grouped(eqn: Any) -> bool:
    """A collective within groups leaves the groups different."""
    return eqn.params.get("axis_index_groups") is not None


def reduces(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """psum: equal on its axes, and no partial sum any more."""
    names = axes_of(eqn)
    axes = walk.axes.mask(names)
    if _grouped(eqn):
        return [operand._replace(partial=operand.partial & ~axes) for operand in operands]
    return [
        State(o.different & ~axes, o.partial & ~axes, o.uniform, o.flags, walk.origins.without(o.origin, names))
        for o in operands
    ]


def extremes(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """pmax and pmin: equal on their axes; of a partial sum they mean nothing."""
    flawed = []
    for operand in operands:
        if operand.partial and not operand.flags & ZERO:
            walk.fault(eqn, operand.partial, nonlinear_use)
            operand = operand._replace(partial=0, flags=operand.flags | UNKNOWN)
        flawed.append(operand)
    return reduces(walk, eqn, flawed)


def gathers(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """all_gather: equal on its axes. Which one it was is kept, for the day the copy leaves the kernel."""
    [o] = operands
    names = axes_of(eqn)
    axes = walk.axes.mask(names)
    if _grouped(eqn):
        return [o._replace(uniform=0)]
    rank = len(shape_of(eqn.outvars[0]))
    dim = eqn.params["all_gather_dimension"]
    same = not o.different & axes
    if eqn.params.get("tiled"):
        uniform = o.uniform if same else o.uniform & ~(1 << dim)
    else:
        low = (1 << dim) - 1
        uniform = (o.uniform & low) | ((o.uniform & ~low) << 1) | (same << dim)
    origin = walk.origins.without(o.origin, names)
    # A gather to invarying leaves nothing to advise: JAX knows that its result is equal.
    for name in names if eqn.primitive.name == "all_gather" else ():
        origin |= walk.origins.bit(id(eqn), Origin("gather", name, eqn=eqn, callers=tuple(walk.callers)))
    return [State(o.different & ~axes, o.partial & ~axes, normal(uniform, rank), o.flags, origin)]


def _made_different(walk: Walk, eqn: Any, operand: State, uniform: int, partial: int) -> State:
    names = axes_of(eqn)
    origin = operand.origin
    for name in names:
        origin |= walk.origin_of(eqn, name)
    different = operand.different | walk.axes.mask(names)
    return State(different, partial, uniform, operand.flags, origin)


def scatters(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """psum_scatter: each device has another block of the sum."""
    axes = walk.axes.mask(axes_of(eqn))
    uniform = EVERYWHERE if operands[0].uniform == EVERYWHERE else 0
    if eqn.params.get("tiled"):
        uniform = operands[0].uniform
    return [_made_different(walk, eqn, o, uniform, o.partial & ~axes) for o in operands]


def permutes(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """ppermute: equal values stay equal if every device gets one.

    Rings complete a sum by hand, so a partial sum loses its mark.
    """
    names = axes_of(eqn)
    axes = walk.axes.mask(names)
    count = 1
    for name in names:
        count *= walk.axes.sizes.get(name, 0)
    complete = count > 0 and len(eqn.params.get("perm", ())) == count
    result = []
    for operand in operands:
        if complete and not operand.different & axes:
            result.append(operand)
        else:
            # Who gets nothing gets zeros, which are constant too.
            result.append(_made_different(walk, eqn, operand, operand.uniform, operand.partial & ~axes))
    return result


def exchanges(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """all_to_all and other exchanges: each device has something else."""
    axes = walk.axes.mask(axes_of(eqn))
    result = []
    for operand in operands:
        zero = EVERYWHERE if operand.flags & ZERO or operand.uniform == EVERYWHERE else 0
        result.append(_made_different(walk, eqn, operand, zero, operand.partial & ~axes))
    return result


def indexes(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """axis_index: a scalar that differs on its axis."""
    return [_made_different(walk, eqn, SCALAR, EVERYWHERE, 0)]


def _each(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """An identity on several values at once."""
    return list(operands)


def splits(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """Our own local slice. Its second operand, the block's index, adds nothing."""
    return [_made_different(walk, eqn, operands[0], operands[0].uniform, operands[0].partial)]


def retypes(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """Our own casts: a relayout knows what is equal, and opaque code tells nothing of its arguments and results."""
    names, to = eqn.params["axes"], eqn.params["to"]
    if to in ("hidden", "shown"):
        return compute(walk, eqn, operands)
    if to != "invarying":
        return list(operands)
    axes = walk.axes.mask(names)
    return [o._replace(different=o.different & ~axes, origin=walk.origins.without(o.origin, names)) for o in operands]


def relays(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """Our own change of layout: different along the axes that divide the result, equal along the others it used."""
    [o] = operands
    there = {axis for axes in eqn.params["request"].target for axis in axes}
    moving = [axis for axis in eqn.params["moving"] if axis not in there]
    origin = walk.origins.without(o.origin, moving)
    new = [axis for axis in eqn.params["moving"] if axis in there]
    for axis in new:
        origin |= walk.origin_of(eqn, axis)
    different = (o.different & ~walk.axes.mask(moving)) | walk.axes.mask(new)
    uniform = EVERYWHERE if o.uniform == EVERYWHERE else 0
    return [State(different, o.partial, uniform, o.flags, origin)]


def declares_partial(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """A cast to JAX's own unreduced type: the user says that it is a partial sum."""
    axes = walk.axes.mask(axes_of(eqn) or eqn.params.get("to_unreduced", ()))
    return [operand._replace(partial=operand.partial | axes) for operand in operands]


COLLECTIVES: dict[str, Callable[[Walk, Any, Sequence[State]], list[State]]] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "unreduced_psum"), reduces),
    **dict.fromkeys(("pmax", "pmin"), extremes),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), gathers),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter", "psum_scatter"), scatters),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all", "pgather"), exchanges),
    "ppermute": permutes,
    "axis_index": indexes,
    "spmd_split": splits,
    "spmd_retype": retypes,
    "spmd_relayout": relays,
    **dict.fromkeys(("optimization_barrier", "device_put", "copy_p"), _each),
    **dict.fromkeys(("vary_unreduced_cast", "vary_unreduced_cast_p"), declares_partial),
}
