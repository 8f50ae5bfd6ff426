"""Loops and branches: a step over a divided dimension sees one piece, and devices that decide differently part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd.checker._report_equations as report
from spmd._jaxprs.walker import COMMUNICATES, Equation, Held, axes_of, equations, held, shape_of
from spmd.checker._engine import Engine
from spmd.checker._finding import Finding
from spmd.checker._state import NONE, STEP, Pending, State, axes_of_dim, free, hidden, normal, plain, size_of, unify

# The place of an axis in a dimension of several factors, larger than all others: a step of a loop loses their order.
NESTED = 63


class Control(Engine):
    """An engine that knows loops and branches."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._loops: list[Any] = []
        self._diverged = False

    def sliced(self, value: State, operand: Any) -> State:
        """One step of a loop over the leading dimension. Over a divided one it is an element of a piece."""
        axes = axes_of_dim(value.dims[0]) if value.dims else ()
        axes = tuple(filter(self.wide, axes))
        order = enumerate(axes) if axes and len(value.dims[0]) == 1 else ((NESTED, a) for a in axes)
        steps = {Pending(STEP, a, self._step(i)) for i, a in order if a not in value.different}
        return self.kept(value._replace(dims=value.dims[1:], pending=value.pending | steps, table=None))

    def _step(self, place: int) -> int:
        """Return what tells the steps of the loop that the walk is in from those of loops around it, and the place of
        the axis among those that divide the dimension."""
        return -2 - place - (NESTED + 1) * len(self._loops)

    def _steps(self, value: State) -> dict[Pending, int]:
        """The steps of this loop that a value comes from, each with the place of its axis."""
        first = self._step(0)
        places = {p: first - p.at for p in value.pending if p.kind == STEP}
        return {p: place for p, place in places.items() if 0 <= place <= NESTED}

    def stacked(self, value: State, result: Any) -> State:
        """Steps differ from one another, but for known integers, which are the same in each. Those over a divided
        dimension are put together as it was."""
        length = shape_of(result)[0]
        steps = self._steps(value)
        order = sorted((place, p.axis) for p, place in steps.items())
        axes = tuple(axis for _, axis in order)
        leading = normal([(length, axes)]) if axes else plain(length) if value.table is None else free(length)
        different = value.different
        if [place for place, _ in order] != list(range(len(axes))) or not value.divided.isdisjoint(axes):
            leading = hidden(length)
            different |= set(axes) - value.divided
        pending = value.pending.difference(steps)
        dims = (leading, *value.dims)
        return self.kept(value._replace(dims=dims, different=different, pending=pending, table=None))

    def loop(self, eqn: Equation, body: Held, test: Held | None, operands: Sequence[State]) -> Sequence[State]:
        self._loops.append(eqn)
        outs = list(map(self.carried, super().loop(eqn, body, test, operands)))
        self._loops.pop()
        return outs

    def of_rounds(self, earlier: list[Finding], last: list[Finding]) -> list[Finding]:
        """Those of the last round. What an earlier one found is told where the last one knows too little to find it."""
        first = {(one.kind, one.line): one for one in reversed(earlier)}
        return last or list(first.values())[::-1]

    def carried(self, value: State) -> State:
        """A carry that went through a piece was not given what the other pieces hold."""
        steps = self._steps(value)
        if not steps or not self._loops:
            return value
        if self.silent(self._loops[-1]):
            return self.unknown_like(value)
        number = self.number(self._loops[-1])
        pending = value.pending.difference(steps) | {Pending("recurrence", p.axis, number) for p in steps}
        return self.kept(value._replace(pending=pending, table=None))

    def decided(self, value: State, predicate: State) -> State:
        """Devices that take another branch, or stop earlier, hold other values. After `vmap`, so do rows."""
        if predicate.dims:
            pairs = zip(value.dims, predicate.dims, strict=False)
            rows = [unify(v, p, value.different, predicate.different) or hidden(size_of(v)) for v, p in pairs]
            dims = (*rows, *value.dims[len(rows) :])
            lost = value.divided.difference(*map(axes_of_dim, dims))
            value = self.kept(value._replace(dims=dims, different=value.different | lost, table=None))
        if not predicate.axes:
            return value
        unknown = NONE if self._diverged else {p.axis for p in predicate.pending}  # a fault is told once
        pending = value.pending if self._diverged else value.pending | predicate.pending
        different = value.different | (predicate.axes - unknown - value.divided)
        return self.kept(
            value._replace(
                different=different,
                partial=value.partial - different,
                pending=frozenset(p for p in pending if p.axis not in different),
                table=None,
            )
        )

    def decides(self, eqn: Equation, predicate: State) -> None:
        """Devices that disagree must not meet a collective that waits for all of them."""
        self._diverged = False
        if not predicate.axes or not self.active:
            return
        found: dict[str, None] = {}
        axes: set[str] = set()
        for inner in (one for part in held(eqn) for one in equations(part.jaxpr, derivatives=False)):
            waiting = predicate.axes.intersection(axes_of(inner)) if inner.primitive.name in COMMUNICATES else NONE
            if waiting:
                found[inner.primitive.name] = None
                axes |= waiting
        self._diverged = bool(axes)
        if axes:
            along = [a for a in self.sizes if a in axes]
            self.note(eqn, "divergent", report.divergent(self, eqn, list(found), along))
