"""What becomes of a declared partial sum in each primitive: it may pass through linear operations only.

A rule is called only if an operand is certainly a partial sum, or certainly zero; it returns the mask of axes
on which the output is a partial sum, and whether the output is certainly zero. Faults go to `walk.fault`.
What no rule knows loses the mark in silence: a mark is a certainty, its absence is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmd.checker._report import mixed_sum, nonlinear_use, scaled_by_different
from spmd.checker._rounding import rounds
from spmd.checker._state import UNKNOWN, ZERO, State
from spmd.checker._walk import Walk

Linear = tuple[int, bool]
LinearRule = Callable[[Walk, Any, Sequence[State]], Linear]

FAULT = (0, False)


def forgets(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """No rule: the mark is lost."""
    return 0, False


def passes(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """Linear in the first operand; the others say where to look."""
    first = operands[0]
    moved = 0
    for other in operands[1:]:
        moved |= other.different
    return first.partial & ~moved, bool(first.flags & ZERO)


def converts(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """A change of type is linear unless it rounds."""
    [operand] = operands
    if operand.partial and not operand.flags & ZERO and rounds(eqn):
        return nonlinear(walk, eqn, operands)
    return operand.partial, bool(operand.flags & ZERO)


def sums(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """A sum (or a concatenation, or a choice): all terms are partial sums, or zero."""
    partial, zero = 0, True
    for operand in operands:
        if not operand.flags & ZERO:
            zero = False
            partial |= operand.partial
    if zero:
        for operand in operands:
            partial |= operand.partial
        return partial, True
    for operand in operands:
        if operand.flags & ZERO:
            continue
        if operand.flags & UNKNOWN:
            partial &= operand.partial
            continue
        # A value that differs without a mark is taken for what it is added to, e.g. a gradient accumulator.
        wrong = partial & ~(operand.partial | operand.different)
        if wrong:
            walk.fault(eqn, wrong, mixed_sum)
            return FAULT
    return partial, False


def fetches(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """As `passes`; what stands in for elements outside of the array is added once per device, if it is a number."""
    fill = eqn.params.get("fill_value")
    if operands[0].partial and not operands[0].flags & ZERO and fill and fill == fill:  # NaN remains NaN
        walk.fault(eqn, operands[0].partial, mixed_sum)
        return FAULT
    return passes(walk, eqn, operands)


def updates(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """`dynamic_update_slice(operand, update, *indices)`: both are partial sums, or zero."""
    return _placed(walk, eqn, operands[:2], operands[2:])


def scatters(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """`operand.at[indices].add(updates)`, or `.set`."""
    operand, indices, update = operands
    return _placed(walk, eqn, [operand, update], [indices])


def _placed(walk: Walk, eqn: Any, terms: Sequence[State], indices: Sequence[State]) -> Linear:
    partial, zero = sums(walk, eqn, terms)
    for index in indices:
        partial &= ~index.different
    return partial, zero


def selects(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """A choice by an equal predicate; the cases are a sum."""
    predicate, cases = operands[0], operands[1:]
    if predicate.partial and not predicate.flags & ZERO:
        return nonlinear(walk, eqn, operands[:1])
    partial, zero = sums(walk, eqn, cases)
    wrong = partial & predicate.different
    if wrong and not zero and not (predicate.flags & UNKNOWN):
        walk.fault(eqn, wrong, scaled_by_different)
        return FAULT
    return partial & ~predicate.different, zero


def product(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """A product is linear in one factor while the others are equal."""
    partial = doubled = different = unknown = 0
    for operand in operands:
        if operand.flags & ZERO:
            return 0, True
        doubled |= partial & operand.partial
        partial |= operand.partial
        different |= operand.different & ~operand.partial
        unknown |= operand.flags & UNKNOWN
    if unknown:
        return 0, False
    if doubled:
        walk.fault(eqn, doubled, nonlinear_use)
        return FAULT
    if partial & different:
        walk.fault(eqn, partial & different, scaled_by_different)
        return FAULT
    return partial, False


def quotient(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """Linear in the numerator only, and of whole numbers not even in that."""
    if operands[1].partial:
        return nonlinear(walk, eqn, operands[1:])
    if operands[0].partial and not operands[0].flags & ZERO and rounds(eqn):
        return nonlinear(walk, eqn, operands[:1])
    return product(walk, eqn, operands)


def nonlinear(walk: Walk, eqn: Any, operands: Sequence[State]) -> Linear:
    """f of a partial sum is not a partial sum of f."""
    wrong = 0
    for operand in operands:
        if not operand.flags & ZERO:
            wrong |= operand.partial
    if wrong:
        walk.fault(eqn, wrong, nonlinear_use)
        return FAULT
    return 0, False
