"""The collectives: what they complete, what they make whole, what they divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from spmd._jaxprs.lines import gradient_line
from spmd._jaxprs.primitives import COLLECTIVES
from spmd._jaxprs.walker import Equation, Variable, axes_of, shape_of, vmapped_dims
from spmd.checker._engine import Engine
from spmd.checker._reports import (
    copies_reduced,
    gathered_out_of_order,
    nonlinear_use,
    not_completed,
    summed_by_gradient,
)
from spmd.checker._state import (
    FREE,
    HIDDEN,
    NONE,
    Axes,
    Dim,
    Pending,
    State,
    axes_of_dim,
    equal_along,
    free,
    hidden,
    hide,
    is_divided,
    normal,
    plain,
    size_of,
)
from spmd.language import axes_product

# Which reduction completes what was done to a piece. A kind that is not here is completed by no reduction.
COMPLETES = {"max": "pmax", "min": "pmin", "all": "pmin", "any": "pmax"}
_NAMES = ("position", "sort", "top_k", "product", "fft", "index", "slice", "linear algebra", "fold", "group")
WRONG = frozenset((*COMPLETES, *_NAMES))


def _grouped(eqn: Equation) -> bool:
    """A collective within groups leaves the groups different."""
    return eqn.params.get("axis_index_groups") is not None


def _unplaced(walk: Engine, operand: State, shape: Sequence[int], different: Axes) -> State:
    """A value whose dimensions are unknown. It may differ along the axes of the operand, and along these. Along other
    axes a term of a sum is one still, and what was done to a piece is done."""
    pending = _left(operand, frozenset(different))
    partial = operand.partial.difference(different)
    unknown = (operand.axes - partial - {p.axis for p in pending} | operand.different).union(different)
    return walk.kept(State(tuple(map(hidden, shape)), partial, unknown, pending))


def _left(operand: State, over: frozenset[str]) -> frozenset[Pending]:
    """Return what is left pending after a collective over these axes."""
    return frozenset([p for p in operand.pending if p.axis not in over])


# --- reductions ---------------------------------------------------------------------------------------------------


def _reduces(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """psum, pmax, pmin: equal along their axes."""
    axes = walk.tracked(axes_of(eqn))
    if _grouped(eqn) or vmapped_dims(eqn):
        return [_unplaced(walk, o, shape_of(v), axes) for o, v in zip(operands, eqn.outvars, strict=True)]
    name = COLLECTIVES[eqn.primitive.name]
    if axes and name == "psum" and walk.active and walk.checked.issuperset(axes) and walk.adds_up_gradients(eqn):
        line = gradient_line(eqn)
        walk.once(
            ("gradient", line, axes), lambda: walk.note(eqn, "gradient", summed_by_gradient(walk, eqn, axes), line=line)
        )
    outs = [_reduced(walk, eqn, o, atom, axes, name) for o, atom in zip(operands, eqn.invars, strict=True)]
    return walk.counted(eqn, operands, outs) if len(outs) == 1 else outs


def _reduced(walk: Engine, eqn: Equation, operand: State, atom: Variable, axes: Axes, name: str) -> State:
    over = frozenset(axes_of(eqn))
    pending = _left(operand, over)
    if name == "psum":
        _check_copies(walk, eqn, operand, axes)
    elif operand.partial & over and not operand.zero:
        walk.fault(eqn, operand.partial & over, "nonlinear", nonlinear_use)
    wrong = sorted(p for p in operand.pending - pending if p.kind in WRONG and COMPLETES.get(p.kind) != name)
    if wrong:
        walk.fault(eqn, {p.axis for p in wrong}, "pending", lambda w, e, a: not_completed(w, e, a, wrong))
    blocks = over & operand.divided
    dims = hide(operand.dims, tuple(blocks)) if blocks else operand.dims
    lost = (operand.divided - over).difference(*map(axes_of_dim, dims)) if blocks else NONE
    out = _after(walk, operand, dims, axes_of(eqn))
    return walk.kept(out._replace(different=out.different | lost))


def _check_copies(walk: Engine, eqn: Equation, operand: State, axes: Axes) -> None:
    """A sum of copies is n times the value. Counting devices, and a mean of copies, are right."""
    equal = [a for a in axes if a not in operand.axes]
    if not equal or operand.zero or operand.table is not None:
        return
    if any(dim[0][1] is HIDDEN for dim in operand.dims):
        return
    walk.fault(eqn, equal, "copies", copies_reduced)


# --- gathers ------------------------------------------------------------------------------------------------------


def _gathers(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """all_gather: equal along its axes, the blocks one after another."""
    [operand] = operands
    axes = walk.tracked(axes_of(eqn))
    dim, shape = eqn.params["all_gather_dimension"], shape_of(eqn.outvars[0])
    if _grouped(eqn):
        return [_unplaced(walk, operand, shape, axes)]
    tiled = eqn.params.get("tiled")
    if not axes:
        dims = operand.dims if tiled else (*operand.dims[:dim], free(1), *operand.dims[dim:])
        return walk.counted(eqn, operands, [walk.kept(operand._replace(dims=dims, table=None))])
    out = _joined(walk, eqn, operand, axes, dim) if tiled else _listed(walk, operand, axes, dim, shape[dim])
    return walk.counted(eqn, operands, [out])


def _after(walk: Engine, operand: State, dims: Sequence[Dim], axes: Axes) -> State:
    """Return what was gathered, reduced or moved along these axes."""
    over = frozenset(axes)
    return walk.kept(
        operand._replace(
            dims=tuple(dims),
            partial=operand.partial - over,
            different=operand.different - over,
            pending=_left(operand, over),
            table=None,
        )
    )


def _joined(walk: Engine, eqn: Equation, operand: State, axes: Axes, dim: int) -> State:
    """Blocks one after another in dimension `dim`."""
    count = axes_product(axes, walk.sizes)
    joined = _joined_dim(operand.dims[dim], axes, count)
    dims = list(operand.dims)
    over = set(axes)
    if joined is not None:
        dims[dim] = joined
        return _after(walk, operand, dims, axes)
    held = over & operand.divided
    dims = list(hide(operand.dims, tuple(held)))
    size = size_of(operand.dims[dim]) * count
    dims[dim] = hidden(size)
    here = set(axes_of_dim(operand.dims[dim]))
    new: set[Pending] = set()
    if over <= here:
        walk.fault(eqn, axes, "order", lambda w, e, a: gathered_out_of_order(w, e, operand, dim, axes))
    elif not held and not over & operand.axes and not operand.zero:
        # Copies, one after another.
        dims[dim] = normal([(count, FREE), *operand.dims[dim]])
    elif held and not walk.silent(eqn):
        new = {Pending("gather", a, walk.number(eqn)) for a in held - here}
    left = operand.divided.difference(over, *map(axes_of_dim, dims))
    out = _after(walk, operand, dims, axes)
    return walk.kept(out._replace(different=out.different | left, pending=out.pending | new))


def _joined_dim(dim: Dim, axes: Axes, count: int) -> Dim | None:
    """A dimension whose blocks along `axes` are joined; None where that is not a dimension in order."""
    size, have = dim[0]
    if not is_divided(have):
        return None
    at = next((i for i in range(len(have)) if have[i : i + len(axes)] == axes), None)
    if at is None:
        return None
    before, after = have[:at], have[at + len(axes) :]
    first = (count, before)
    return normal([first, (size, after), *dim[1:]]) if after else normal([(count * size, before), *dim[1:]])


def _listed(walk: Engine, operand: State, axes: Axes, dim: int, count: int) -> State:
    """Blocks along a dimension of their own."""
    over = set(axes)
    held = over & operand.divided
    if not held and not over & operand.axes:
        return _after(walk, operand, (*operand.dims[:dim], free(count), *operand.dims[dim:]), axes)
    dims = list(operand.dims)
    exact = False
    for i, one in enumerate(operand.dims):
        if axes_of_dim(one)[: len(axes)] == axes and is_divided(one[0][1]):
            size, have = one[0]
            dims[i] = normal([(size, have[len(axes) :]), *one[1:]])
            exact = True
    if not exact:
        dims = list(hide(operand.dims, axes))
    lost = operand.divided.difference(over, *map(axes_of_dim, dims))
    new = plain(count) if exact else hidden(count)
    out = _after(walk, operand, (*dims[:dim], new, *dims[dim:]), axes)
    return walk.kept(out._replace(different=out.different | lost))


# --- scatters and exchanges -----------------------------------------------------------------------------------------


def _divided_dim(dim: Dim, axes: Axes, count: int) -> Dim | None:
    """A dimension of which each device keeps its block along `axes`."""
    size, have = dim[0]
    if have is HIDDEN or size % count:
        return None
    if have is FREE:
        return normal([(size // count, FREE), *dim[1:]])
    return normal([(size // count, (*have, *axes)), *dim[1:]])


def _is_whole(cut: Dim | None, axes: Axes) -> bool:
    """Return whether the blocks along these axes make the whole. Those of a constant are all the same."""
    return cut is not None and (cut[0][1] is FREE or set(axes) <= set(axes_of_dim(cut)))


def _scatters(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """psum_scatter: each device has another block of the sum."""
    axes = walk.tracked(axes_of(eqn))
    if not axes and eqn.params.get("tiled"):  # alone along its axes, which some versions of JAX write otherwise
        return [walk.kept(o._replace(partial=o.partial.difference(axes_of(eqn)))) for o in operands]
    dim = eqn.params["scatter_dimension"]
    outs = []
    for operand, atom, var in zip(operands, eqn.invars, eqn.outvars, strict=True):
        shape = shape_of(var)
        if _grouped(eqn) or not eqn.params.get("tiled"):
            outs.append(_unplaced(walk, operand, shape, axes))
            continue
        summed = _reduced(walk, eqn, operand, atom, axes, "psum")
        count = axes_product(axes, walk.sizes)
        cut = _divided_dim(summed.dims[dim], axes, count)
        whole = _is_whole(cut, axes)
        different = summed.different if whole else summed.different | set(axes)
        dims = tuple((cut or hidden(shape[dim])) if d == dim else one for d, one in enumerate(summed.dims))
        outs.append(walk.kept(summed._replace(dims=dims, different=different)))
    return walk.counted(eqn, operands, outs) if len(outs) == 1 else outs


def _split(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Our own local slice: this device's block. Its second operand is the block's index."""
    operand, dim, axes = operands[0], eqn.params["dim"], walk.tracked((eqn.params["axis"],))
    if not axes:
        return [walk.kept(operand._replace(table=None))]
    cut = None if set(axes) & operand.axes else _divided_dim(operand.dims[dim], axes, eqn.params["parts"])
    dims = tuple(
        (cut or hidden(shape_of(eqn.outvars[0])[dim])) if d == dim else one for d, one in enumerate(operand.dims)
    )
    known = _is_whole(cut, axes)
    lost = operand.divided.difference(*map(axes_of_dim, dims))
    different = operand.different | lost | (NONE if known else set(axes) - operand.partial)
    return [walk.kept(operand._replace(dims=dims, different=different, table=None))]


def _exchanges(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """all_to_all: one dimension is made whole, and another one divided."""
    axes = walk.tracked(axes_of(eqn))
    if not axes and eqn.params.get("tiled"):
        return list(operands)
    outs = []
    for operand, var in zip(operands, eqn.outvars, strict=True):
        known = eqn.params.get("tiled") and not _grouped(eqn)  # a pgather is not
        out = _exchanged(walk, eqn, operand, axes, shape_of(var)) if known else None
        outs.append(out or _unplaced(walk, operand, shape_of(var), axes))
    return outs


def _ragged(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """ragged_all_to_all: the result depends on the rows, on the buffer that they are written into, and on offsets."""
    rows, axes = operands[0], {axis for operand in operands for axis in operand.axes}
    [out] = eqn.outvars
    return [_unplaced(walk, rows, shape_of(out), (*axes, *walk.tracked(axes_of(eqn))))]


def _exchanged(walk: Engine, eqn: Equation, operand: State, axes: Axes, shape: Sequence[int]) -> State | None:
    if not axes:
        return operand
    split, concat = eqn.params["split_axis"], eqn.params["concat_axis"]
    if split == concat or operand.partial & set(axes):
        return None
    count = math.prod(walk.sizes[a] for a in axes)
    dims = list(operand.dims)
    if operand.axes.isdisjoint(axes) and all(here is FREE for _, here in dims[split]):
        dims[concat], dims[split] = normal([(count, FREE), *dims[concat]]), free(shape[split])
        return walk.kept(operand._replace(dims=tuple(dims), table=None))
    joined = _joined_dim(dims[concat], axes, count)
    if joined is None:  # the blocks of another dimension come to lie around this one
        found = [(d, left) for d, dim in enumerate(dims) if (left := _without(dim, axes)) is not None]
        if len(found) != 1 or dims[concat][0][1] is HIDDEN:
            return None
        [(from_, dims[from_])] = found
        around = [(count, ()), *dims[concat]]
        joined = tuple(around) if from_ == split else normal(around)
    cut = _divided_dim(dims[split], axes, count)
    if cut is None or not axes_of_dim(cut):
        return None
    dims[concat], dims[split] = joined, cut
    return walk.kept(operand._replace(dims=tuple(dims), pending=_left(operand, frozenset(axes)), table=None))


def _without(dim: Dim, axes: Axes) -> Dim | None:
    """The part of a dimension that is in one of its blocks along `axes`; None if these do not divide it."""
    size, have = dim[0]
    at = next((i for i in range(len(have)) if is_divided(have) and have[i : i + len(axes)] == axes), None)
    return None if at is None else normal([(size, have[:at] + have[at + len(axes) :]), *dim[1:]])


def _permutes(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """ppermute: another device's value. Equal values stay equal if every device gets one."""
    axes = walk.tracked(axes_of(eqn))
    count = math.prod(walk.sizes.get(a, 0) for a in axes)
    complete = len(eqn.params.get("perm", ())) == count
    outs = []
    for operand in operands:
        if not axes or (complete and not set(axes) & operand.axes):
            outs.append(operand)
            continue
        over = frozenset(axes)
        dims = hide(operand.dims, axes)
        lost = operand.divided.difference(*map(axes_of_dim, dims))
        out = _after(walk, operand, dims, axes)
        outs.append(walk.kept(out._replace(different=out.different | over | lost)))
    return walk.counted(eqn, operands, outs) if len(outs) == 1 else outs


def _broadcasts(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """pbroadcast: the value of one device, on all."""
    [operand, *_], axes = operands, frozenset(walk.tracked(axes_of(eqn)))
    if operand.partial & axes and not operand.zero:
        walk.fault(eqn, operand.partial & axes, "nonlinear", nonlinear_use)
    return [walk.kept(equal_along(operand, axes))]


def _indexes(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """axis_index: a scalar that differs along its axis."""
    out = walk.kept(State(different=frozenset(walk.tracked(axes_of(eqn)))))
    return walk.counted(eqn, operands, [out])


# --- our own --------------------------------------------------------------------------------------------------------


def _each(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """An identity on several values at once."""
    return list(operands)


def _retypes(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Our own casts. A relayout knows what is equal. Opaque code says nothing about its arguments and results."""
    axes, to = frozenset(walk.tracked(eqn.params["axes"])), eqn.params["to"]
    if to in ("hidden", "reference", "shown"):
        return walk.hidden(eqn, operands)
    if to != "invarying":
        return list(operands)
    return [walk.kept(equal_along(o, axes)) for o in operands]


def _relays(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Our own change of layout, which knows what it makes."""
    [o] = operands
    target, completed = eqn.params["request"].target, frozenset(eqn.params["request"].summed)
    shape = shape_of(eqn.outvars[0])
    dims = tuple(normal([(n, walk.tracked(axes))]) for n, axes in zip(shape, target, strict=True))
    held = {axis for dim in dims for axis in axes_of_dim(dim)}
    moving = set(walk.tracked(eqn.params["moving"]))
    different = (o.axes - o.divided - moving) | (o.different - moving)
    different = frozenset(different - held) - o.partial
    return [walk.kept(State(dims, o.partial - held - completed, different, zero=o.zero))]


def _declares_partial(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """A cast to JAX's own unreduced type. With it the user says that the value is a partial sum."""
    axes = frozenset(walk.tracked(axes_of(eqn) or eqn.params.get("to_unreduced", ())))
    return [walk.kept(o._replace(partial=o.partial | axes, different=o.different - axes)) for o in operands]


_RULES = {
    **dict.fromkeys(("psum", "pmax", "pmin"), _reduces),
    "all_gather": _gathers,
    "psum_scatter": _scatters,
    "all_to_all": _exchanges,
    "pgather": _exchanges,
    "ragged_all_to_all": _ragged,
    "ppermute": _permutes,
    "pbroadcast": _broadcasts,
}
RULES: dict[str, Callable[[Engine, Any, Sequence[State]], list[State]]] = {
    **{name: _RULES[verb] for name, verb in COLLECTIVES.items() if verb in _RULES},
    "axis_index": _indexes,
    "spmd_split": _split,
    "spmd_retype": _retypes,
    "spmd_relayout": _relays,
    **dict.fromkeys(("optimization_barrier", "device_put"), _each),
    **dict.fromkeys(("vary_unreduced_cast", "vary_unreduced_cast_p"), _declares_partial),
}
