"""What becomes of a partial sum in each primitive: it may pass through linear operations only.

A rule gives the axes on which the output is a partial sum, those on which nobody knows it any more, and whether it is
certainly zero. Faults go to `walk.fault`. Where no rule knows, the mark is lost without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd._jaxprs.walker import Equation
from spmd.checker._reports import mixed_blocks, mixed_sum, nonlinear_use, scaled_by_different
from spmd.checker._state import NONE, State
from spmd.checker._table import rounds

Axes = frozenset[str]
Linear = tuple[Axes, Axes, bool]
LinearRule = Callable[[Any, Any, Sequence[State]], Linear]


def _faulty(walk: Any, eqn: Equation, axes: Axes, kind: str, describe: Any) -> Linear:
    walk.fault(eqn, axes, kind, describe)
    return NONE, axes, False


def forgets(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """The result is not marked."""
    return NONE, frozenset().union(*(o.partial for o in operands)), False


def passes(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """Linear in the first operand. The other operands say where to look."""
    first = operands[0]
    moved = frozenset().union(*(o.axes for o in operands[1:])) & first.partial
    return first.partial - moved, moved, first.zero


def fetches(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """As `passes`. A number that stands in for elements outside of the array is added once per device."""
    fill = eqn.params.get("fill_value")
    if operands[0].partial and not operands[0].zero and fill and fill == fill:  # NaN remains NaN
        return _faulty(walk, eqn, operands[0].partial, "mixed", mixed_sum)
    return passes(walk, eqn, operands)


def converts(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """A change of type is linear unless it rounds."""
    [operand] = operands
    if operand.partial and not operand.zero and rounds(eqn):
        return curved(walk, eqn, operands)
    return operand.partial, NONE, operand.zero


def sums(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """A sum (or a concatenation, or a choice): all terms are partial sums, or zero."""
    terms = [o for o in operands if not o.zero]
    partial: Axes = frozenset().union(*(o.partial for o in operands))
    if not terms:
        return partial, NONE, True
    partial = frozenset().union(*(o.partial for o in terms))
    lost: Axes = NONE
    for operand in terms:
        # A value that differs in a way nobody knows is taken for what it is added to, such as a part of one device.
        lost |= partial & (operand.different | {p.axis for p in operand.pending})
        wrong = partial - operand.partial - lost
        if wrong:
            return _faulty(walk, eqn, wrong, "mixed", mixed_blocks if wrong <= operand.divided else mixed_sum)
    return partial - lost, lost, False


def writes(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """As `sums`, of an array and of what is written over some of its elements."""
    return sums(walk, eqn, operands[:2])


def selects(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """A choice by an equal predicate. Its cases are added up."""
    predicate, cases = operands[0], operands[1:]
    if predicate.partial and not predicate.zero:
        return curved(walk, eqn, operands[:1])
    partial, lost, zero = sums(walk, eqn, cases)
    wrong = partial & predicate.divided
    if wrong and not zero:
        return _faulty(walk, eqn, wrong, "mixed", scaled_by_different)
    moved = partial & predicate.axes
    return partial - moved, lost | moved, zero


def product(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """A product is linear in one factor while the others are equal."""
    if any(o.zero for o in operands):
        return NONE, NONE, True
    partial = doubled = divided = unknown = NONE
    for operand in operands:
        doubled |= partial & operand.partial
        partial |= operand.partial
        divided |= operand.divided - operand.different
        unknown |= operand.different | {p.axis for p in operand.pending}
    if doubled:
        return _faulty(walk, eqn, doubled, "nonlinear", nonlinear_use)
    if partial & divided - unknown:
        return _faulty(walk, eqn, partial & divided - unknown, "nonlinear", scaled_by_different)
    return partial - unknown, partial & unknown, False


def grouped(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """A product of rows with the matrix of their group. How many are in a group, each device counts of its own rows."""
    rows, _, counts = operands
    curved(walk, eqn, [counts._replace(partial=counts.partial - rows.divided - rows.different)])
    return product(walk, eqn, operands[:2])


def quotient(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """Linear in the numerator only. A quotient of integers is not linear in either."""
    if operands[1].partial:
        return curved(walk, eqn, operands[1:])
    if operands[0].partial and not operands[0].zero and rounds(eqn):
        return curved(walk, eqn, operands[:1])
    partial, lost, zero = product(walk, eqn, operands)
    return partial, lost, zero and operands[0].zero


def curved(walk: Any, eqn: Equation, operands: Sequence[State]) -> Linear:
    """f of a partial sum is not a partial sum of f."""
    wrong: Axes = frozenset().union(*(o.partial for o in operands if not o.zero))
    if wrong:
        return _faulty(walk, eqn, wrong, "nonlinear", nonlinear_use)
    return NONE, NONE, False


LINEAR: dict[str, LinearRule] = {
    rule.__name__: rule
    for rule in (forgets, passes, converts, sums, writes, selects, product, grouped, quotient, curved)
}
