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
from spmd.checker._powers import ZERO, Grown, Operand, Power, further
from spmd.checker._state import axes_of_dim

# What a piece is: a local maximum, or a number counted from the first one of a block, and whether it is in the block.
MAX, MIN, ONE, TAKEN = "max", "min", "one", "taken"
COUNTED, NOT_BEFORE, NOT_AFTER, MINE = "counted", "not before", "not after", "mine"


class Piece(NamedTuple):
    """What a value is on each device along an axis.

    Attributes:
      kind: `MAX` or `MIN` of the elements here; `ONE`: not zero on at most one device; `TAKEN`:
        elements of a whole array, nobody knows which; `COUNTED` from the first row of
        the block here; `NOT_BEFORE` and `NOT_AFTER` the block; `MINE`: true on at most one device.
      power: The power of the axis size in it.
      size: The rows of a block.
      of: Which numbers were counted: the id of an equation.
    """

    kind: str
    power: Power = ZERO
    size: int = 0
    of: int = 0


class Here(NamedTuple):
    """An operand: its power and state, and the piece that it is."""

    operand: Operand
    piece: Piece | None


_PASS = """pvary pcast stop_gradient name copy copy_p reshape squeeze transpose broadcast_in_dim
    spmd_retype spmd_layout optimization_barrier reduce_precision"""
SUMS = frozenset(("psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "psum_scatter"))
_COMPLETE: Mapping[str, str] = {"pmax": MAX, "pmin": MIN, **dict.fromkeys(SUMS, ONE)}


def completed(eqn: Any, here: Here, axis: str) -> Power:
    """The power of what a collective makes of a piece."""
    piece, kind = here.piece, _COMPLETE.get(eqn.primitive.name)
    return further(piece.power, eqn) if piece is not None and piece.kind == kind and axis in axes_of(eqn) else None


def piece_of(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """The piece that a result is, of an equation with one result."""
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, given, axis) if rule is not None else None


def _first(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    """The same numbers. One of them in many places might be undone by a term or a factor, if it has no one power."""
    piece = given[0].piece
    repeats = math.prod(shape_of(eqn.outvars[0])) > math.prod(shape_of(eqn.invars[0]))
    return None if repeats and piece is not None and isinstance(piece.power, Grown) else piece


def _converted(eqn: Any, given: Sequence[Here], axis: str) -> Piece | None:
    return Piece(MINE) if is_mine(given[0], axis) else _first(eqn, given, axis)


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
        return None

    return rule


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
    if here.piece is not None and here.piece.kind == MINE:
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
    if one.piece is None or one.piece.kind != ONE:
        return None
    power, by = one.piece.power, other.operand.power
    if not isinstance(power, Fraction) or not isinstance(by, Fraction):
        return None
    return Piece(ONE, power - by if eqn.primitive.name == "div" else power + by)


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
    "gather": _taken,
    "dynamic_slice": _taken,
}
