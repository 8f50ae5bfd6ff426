"""What a collective makes of a value that differs: of local maxima the maximum, of masked terms the one that is left.

`lax.psum(jnp.where(mine, rows, 0), "tp")` does not add anything up if `mine` is true on one device only: it hands on
what that device has. A layout does not say so, but the power of an axis size needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from spmd._jaxprs import axes_of, shape_of
from spmd.checker._powers import ZERO, Grown, Operand, Power, either, further
from spmd.checker._state import FREE, axes_of_dim

# What a piece is: a local maximum, or a number counted from the first one of a block, and whether it is in the block.
MAX, MIN, ONE, TERM, TAKEN = "max", "min", "one", "term", "taken"
COUNTED, NOT_BEFORE, NOT_AFTER, MINE = "counted", "not before", "not after", "mine"
HOT, DECIDED = "hot", "decided"


class Piece(NamedTuple):
    """What a value is on each device along an axis.

    Attributes:
      kind: `MAX` or `MIN` of the elements here; `ONE`: not zero on at most one device; `TERM` of a sum over
        devices, whatever its state is; `TAKEN`: elements of a whole array, nobody knows which; `COUNTED` from the
        first row of the block here; `NOT_BEFORE` and `NOT_AFTER` the block; `MINE`: true on at most one device;
        `HOT`: so along these dimensions together; `DECIDED`: a mask, by data that depend on the size of the axis.
      power: The power of the axis size in it.
      size: The rows of a block.
      of: Which numbers were counted: the id of an equation.
      along: The dimensions of a `HOT` mask along which not more than one device has anything.
    """

    kind: str
    power: Power = ZERO
    size: int = 0
    of: int = 0
    along: tuple[int, ...] = ()


class Here(NamedTuple):
    """An operand: its power and state, and the piece that it is."""

    operand: Operand
    piece: Piece | None


_PASS = """pvary pcast stop_gradient name copy copy_p reshape squeeze transpose broadcast_in_dim
    spmd_retype spmd_layout spmd_fused optimization_barrier reduce_precision"""
SUMS = frozenset(("psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "psum_scatter"))
_COMPLETE: Mapping[str, tuple[str, ...]] = {"pmax": (MAX,), "pmin": (MIN,), **dict.fromkeys(SUMS, (ONE, TERM))}


def completed(eqn: Any, here: Here, axis: str) -> Power:
    """The power of what a collective makes of a piece."""
    piece, kinds = here.piece, _COMPLETE.get(eqn.primitive.name, ())
    return further(piece.power, eqn) if piece is not None and piece.kind in kinds and axis in axes_of(eqn) else None


def left(eqn: Any, here: Here) -> Power:
    """The power of what a layout is left on. Behind an output nobody adds up what devices have."""
    power, piece = here.operand.power, here.piece
    if power is None and piece is not None and piece.kind == TAKEN and eqn.params["role"] == "output":
        return piece.power
    return power


def piece_of(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """The piece that a result is, of an equation with one result."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, given, axis) if rule is not None else None


def _first(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """The same numbers. One of them in many places might be undone by a term or a factor, if it has no one power."""
    piece, old, new = given[0].piece, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if piece is None or (piece.along and (old != new or eqn.primitive.name == "transpose")):
        return None
    return None if math.prod(new) > math.prod(old) and isinstance(piece.power, Grown) else piece


def _converted(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    hot = given[0].piece is not None and given[0].piece.kind == HOT
    return Piece(MINE) if not hot and is_mine(given[0], axis) else _first(eqn, given, axis)


def _largest(kind: str) -> Callable[..., Piece | None]:
    def rule(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
        [(operand, piece)] = given
        divided = any(axis in axes_of_dim(operand.state.dims[d]) for d in eqn.params["axes"])
        if divided and operand.power is not None:
            return Piece(kind, further(operand.power, eqn))
        return piece._replace(power=further(piece.power, eqn)) if piece is not None and piece.kind == kind else None

    return rule


def _counted(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """Numbers of the whole, less that of the first row here."""
    whole, first = given
    start = first.operand.state.table
    if whole.operand.power != ZERO or axis in whole.operand.state.axes or start is None or axis not in start.axes:
        return None
    values = start.values
    if values is None or values.dtype.kind not in "iu":
        return None
    along = np.sort(np.moveaxis(values, start.axes.index(axis), 0), axis=0)
    gap = int(np.diff(along, axis=0).min())
    return Piece(COUNTED, size=gap, of=id(eqn)) if gap > 0 else None


def _compared(kind: str, swapped: str) -> Callable[..., Piece | None]:
    """`number >= 0` or `number < size`, in either order."""

    def rule(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
        for at, made in ((0, kind), (1, swapped)):
            piece, bound = given[at].piece, _integer(eqn.invars[1 - at], given[1 - at])
            if piece is None or piece.kind != COUNTED or bound is None:
                continue
            strict = eqn.primitive.name in ("lt", "gt")
            inside = bound + strict >= 0 if made == NOT_BEFORE else bound + (not strict) <= piece.size
            return piece._replace(kind=made) if inside else None
        return _decided(eqn, given)

    return rule


def _one_hot(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """`number == iota`: one device has the row that a number counts, so that no other one has anything in this row."""
    for here, other in (given, given[::-1]):
        piece, table = here.piece, other.operand.state.table
        if piece is None or piece.kind != COUNTED or table is None or table.axes or table.values is None:
            continue
        values = np.asarray(table.values)
        if values.dtype.kind in "iu" and ((values >= 0) & (values < piece.size)).all():
            along = [d for d, dim in enumerate(here.operand.state.dims) if all(axes is FREE for _, axes in dim)]
            return piece._replace(kind=HOT, along=tuple(along))
    return _decided(eqn, given)


def _contracted(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """Rows that a one-hot mask takes."""
    contracted = eqn.params["dimension_numbers"][0]
    for (mask, value), dims in zip((given, given[::-1]), contracted, strict=True):
        if mask.piece is not None and mask.piece.kind == HOT and {*dims} <= {*mask.piece.along}:
            return _one(value)
    return None


def _added(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """`zeros.at[places].add(rows)`: each device adds its own rows."""
    old, places, new = given
    numbers = eqn.params["dimension_numbers"]
    if not old.operand.state.zero or axis in old.operand.state.axes or places.operand.power != ZERO:
        return None
    window = [*numbers.update_window_dims, *numbers.scatter_indices_batching_dims]
    rows = [dim for d, dim in enumerate(new.operand.state.dims) if d not in window]
    at = places.operand.state.dims[:-1]
    mine = [axis in axes_of_dim(dim) for dim in at]
    if not any(mine) or len(rows) != len(at) or new.operand.power is None:
        return None
    alike = all(dim[0][1] is FREE or (axis in axes_of_dim(dim)) is one for dim, one in zip(rows, mine, strict=True))
    return Piece(TERM, further(new.operand.power, eqn)) if alike else None


def _decided(eqn: Any, given: Sequence[Here], axis: str = "") -> Piece | None:
    """A comparison of elements that grow: which of them pass may depend on the size, and on nothing else."""
    powers = [here.operand.power for here in given]
    known = all(power == ZERO or isinstance(power, Grown) for power in powers)
    return Piece(DECIDED) if known and any(isinstance(power, Grown) and power.varies for power in powers) else None


def guarded(given: Sequence[Here]) -> Power:
    """The power of `where(x > 0, x, 1)`, if x has none of its own but grows: so does the result, whichever it takes."""
    mask, *cases = given
    if mask.piece is None or mask.piece.kind != DECIDED:
        return None
    power = either([case.operand for case in cases])
    return power if isinstance(power, Grown) else None


def _integer(atom: Any, here: Here) -> int | None:
    """The number that an operand is on each device."""
    table = here.operand.state.table
    if isinstance(atom, Literal):
        values = np.asarray(atom.val)
    elif table is None or table.axes or table.values is None:
        return None
    else:
        values = np.asarray(table.values)
    counts = values.dtype.kind in "iu" and values.size  # a float may be infinite
    return int(values.flat[0]) if counts and (values == values.flat[0]).all() else None


def _both(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    if any(is_mine(here, axis) for here in given):
        return Piece(MINE)
    bounds = [here.piece for here in given if here.piece is not None and here.piece.kind in (NOT_BEFORE, NOT_AFTER)]
    if len(bounds) == 2 and bounds[0].kind != bounds[1].kind and bounds[0].of == bounds[1].of:
        return Piece(MINE)
    return bounds[0] if bounds else None


def is_mine(here: Here, axis: str) -> bool:
    """Whether a mask is true on at most one device along an axis."""
    if here.piece is not None and here.piece.kind in (MINE, HOT):
        return True
    table = here.operand.state.table
    if table is None or axis not in table.axes or table.dtype.kind != "b":
        return False
    values = table.values
    if values is None:
        return False
    return bool((values.sum(axis=table.axes.index(axis)) <= 1).all())


def _selected(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """`where(mine, x, 0)`."""
    mask, *cases = given
    if len(cases) != 2 or not cases[0].operand.state.zero or not is_mine(mask, axis):
        return None
    return _one(cases[1])


def _one(here: Here) -> Piece | None:
    """What one device has. Elements of an array have its power, whichever they are."""
    power = here.operand.power
    if power is None and here.piece is not None and here.piece.kind in (ONE, TAKEN):
        power = here.piece.power
    return Piece(ONE, power) if power is not None else None


def _product(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    one, other = given
    for mask, value in ((one, other), (other, one)):
        if eqn.primitive.name == "mul" and is_mine(mask, axis):
            return _one(value)
    if one.piece is None or one.piece.kind not in (ONE, TAKEN):
        return None
    power, by = one.piece.power, other.operand.power
    if not isinstance(power, Fraction) or not isinstance(by, Fraction):
        return None
    return Piece(one.piece.kind, power - by if eqn.primitive.name == "div" else power + by)


def _scattered(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """A block of a complete sum, whichever it is."""
    power = completed(eqn, given[0], axis)
    return Piece(TAKEN, power) if power is not None else None


def _taken(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    power = given[0].operand.power
    return Piece(TAKEN, further(power, eqn, *eqn.invars[1:])) if power is not None else None


_Rule = Callable[[Any, Sequence[Here], str], "Piece | None"]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_PASS.split(), _first),
    "convert_element_type": _converted,
    "reduce_max": _largest(MAX),
    "reduce_min": _largest(MIN),
    "sub": _counted,
    "ge": _compared(NOT_BEFORE, NOT_AFTER),
    "gt": _compared(NOT_BEFORE, NOT_AFTER),
    "lt": _compared(NOT_AFTER, NOT_BEFORE),
    "le": _compared(NOT_AFTER, NOT_BEFORE),
    "and": _both,
    "select_n": _selected,
    "mul": _product,
    "div": _product,
    "eq": _one_hot,
    "dot_general": _contracted,
    "scatter-add": _added,
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), _scattered),
    "gather": _taken,
    "dynamic_slice": _taken,
    "slice": _taken,
}
