"""Rows of a divided table: `jnp.where(mine, table[ids - start], 0)` has zeros for the rows that other devices have.

All devices look up the same ids. Each of them subtracts where its block starts, and a mask leaves the rows that it has.
Whatever the mask, the result is not the rows of the whole table until a collective puts it together. A result that is
combined with the mask or the ids once more may be this device's block again, as a gradient is, and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

import spmd.checker._integers as integers
from spmd._jaxprs import COMMUNICATES
from spmd.checker._state import NONE, State, axes_of_dim

Axes = frozenset[str]
NOTHING = State()

# What leaves rows as they are, however the array lies.
_MOVES = frozenset(("pvary", "pcast", "reshape", "transpose", "broadcast_in_dim", "squeeze", "convert_element_type"))


def zeros_for_others(walk: Any, eqn: Any, operands: Sequence[State]) -> Axes:
    """The axes along which a choice between rows and zeros has zeros for the rows of other devices."""
    mask, *cases = operands
    rows = [atom for atom, case in zip(eqn.invars[1:], cases, strict=True) if not case.zero]
    if not mask.different or len(cases) != 2 or len(rows) != 1 or not walk.active or walk.silent(eqn):
        return NONE
    taken = _taken(walk, rows[0])
    if taken is None:
        return NONE
    table, indices = taken.invars
    [dim] = taken.params["dimension_numbers"].start_index_map
    state = walk.known.get(table)
    if state is None:
        return NONE
    axes = frozenset(axes_of_dim(state.dims[dim]))
    unclear = state.different | {p.axis for p in state.pending}
    if not axes or not axes.isdisjoint(unclear) or not axes <= mask.different:
        return NONE
    for start in _subtractions(walk, indices, state.dims[dim]):
        if _differs_only_by(walk, eqn.invars[0], start, axes) and _differs_only_by(walk, indices, start, axes):
            return axes
    return NONE


def by_device(walk: Any, atom: Any, axes: Axes) -> bool:
    """Whether some devices along these axes leave a value out, by their number: it is zero there."""
    eqn = _made(walk, atom)
    if eqn is None or eqn.primitive.name not in ("select_n", "mul"):
        return False
    states = [walk.literal(one.val) if isinstance(one, Literal) else walk.known.get(one, NOTHING) for one in eqn.invars]
    if eqn.primitive.name == "select_n" and not any(state.zero for state in states[1:]):
        return False
    tables = [state.table for state in states if state.table is not None]
    numbers = (t for t in tables if axes <= {*t.axes} and all(integers.is_constant(t, d) for d in range(len(t.shape))))
    return any(not table.entries.all() for table in numbers)


def _taken(walk: Any, atom: Any) -> Any:
    """The gather of rows along one dimension that a value is, in another shape or type."""
    eqn = _made(walk, atom)
    if eqn is None or eqn.primitive.name != "gather":
        return None
    return eqn if len(eqn.params["dimension_numbers"].start_index_map) == 1 else None


def _made(walk: Any, atom: Any) -> Any:
    """The equation that made a value, before it got another shape or type."""
    for _ in range(20):
        behind, made = walk.history.made_of.get(atom, ()), walk.history.producer(atom)
        if behind:
            if len(behind) > 1:
                return None
            [atom] = behind
        elif made is None:
            return None
        elif made[0].primitive.name not in _MOVES:
            return made[0]
        else:
            atom = made[0].invars[0]
        if isinstance(atom, Literal):
            return None
    return None


def _subtractions(walk: Any, indices: Any, dim: Any) -> list[Any]:
    """The equations behind the indices that subtract from equal numbers where this device's block starts."""
    found = []
    for var in walk.history.behind(indices, lambda eqn: eqn.primitive.name == "sub"):
        made = walk.history.producer(var)
        if made is None or made[0].primitive.name != "sub":
            continue
        ids, start = (None if isinstance(atom, Literal) else walk.known.get(atom) for atom in made[0].invars)
        if ids is None or start is None or ids.number or start.table is None:
            continue
        if ids.axes.isdisjoint(axes_of_dim(dim)) and _starts(walk, start.table, dim):
            found.append(made[0])
    return found


def _starts(walk: Any, table: Any, dim: Any) -> bool:
    """Whether each device's number is where its block of a dimension starts."""
    while table.shape:
        if not integers.is_constant(table, 0):
            return False
        table = integers.row_of(table, 0)
    return len(dim) == 1 and integers.starts_of(table, dim[0][0], walk.sizes) == dim[0][1]


def _differs_only_by(walk: Any, atom: Any, by: Any, axes: Axes) -> bool:
    """Whether a value differs along these axes only because the result of one equation does."""
    history, todo, seen = walk.history, [atom], set()
    while todo:
        var = todo.pop()
        if isinstance(var, Literal) or var in seen:
            continue
        seen.add(var)
        state, made = walk.known.get(var), history.producer(var)
        equal = state is not None and state.axes.isdisjoint(axes)
        if equal or (made is not None and made[0] is by):
            continue
        behind = history.made_of.get(var) or (made[0].invars if made is not None else ())
        if not behind or (made is not None and made[0].primitive.name in COMMUNICATES):
            return False
        todo += behind
    return True
