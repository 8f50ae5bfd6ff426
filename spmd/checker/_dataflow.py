"""The whole pass: the engine, loops and branches, the primitives with code of their own, and bodies."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import spmd.checker._reports as report
from spmd import _compat
from spmd._jaxprs import walker
from spmd._jaxprs.facts import kernel_around
from spmd._jaxprs.lines import is_differentiated, is_ours
from spmd._jaxprs.walker import COMMUNICATES, Equation, Held, Rule, Variable, axes_of, equations, held, opened, shape_of
from spmd.checker._claims import assert_equal_marker, layout_marker, order_marker
from spmd.checker._collectives import RULES as COLLECTIVES
from spmd.checker._engine import Engine
from spmd.checker._finding import Finding
from spmd.checker._history import shown_spec
from spmd.checker._linear import LINEAR
from spmd.checker._shapes import RULES as SHAPES
from spmd.checker._state import (
    HIDDEN,
    NONE,
    QUIET,
    STEP,
    Dim,
    Pending,
    State,
    axes_of_dim,
    free,
    hidden,
    normal,
    plain,
    size_of,
    still_pending,
    unify,
)
from spmd.checker._table import TABLE
from spmd.language import axes_tuple

# --- control ---------------------------------------------------------------------------------------------------------

# Loops and branches: a step over a divided dimension sees one piece, and devices that decide differently part.

# The place of an axis in a dimension of several factors, larger than all others: a step of a loop loses their order.
NESTED = 63


class Control(Engine):
    """An engine that knows loops and branches."""

    def __init__(self, *given: Any, **facts: Any) -> None:
        super().__init__(*given, **facts)
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
                pending=still_pending(pending, (value,), predicate.axes - unknown - value.divided),
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


# --- dataflow --------------------------------------------------------------------------------------------------------


def _pallas(walk: Dataflow, eqn: Equation, operands: Sequence[State]) -> Sequence[State]:
    """JAX's interpreter of Pallas calls fails on values that vary, and only when the program is lowered."""
    varying = any(_compat.varying_type(result.aval) for result in eqn.outvars)
    if walk.active and varying and eqn.params.get("interpret") is True:
        walk.note(eqn, "interpreted", report.interpreted(walk, eqn))
    return walk.unread(eqn, operands)


def _names(walk: Dataflow, eqn: Equation, operands: Sequence[State]) -> Sequence[State]:
    """A value passes, and names of one size are compared when the walk has ended."""
    walk.compares_names = True
    return operands


class Dataflow(Control):
    """One run of the pass.

    Attributes:
      compares_names: Whether it met names of dimensions that have one size.
    """

    compares_names = False

    rules: ClassVar[Mapping[str, Rule]] = {
        **SHAPES,
        **COLLECTIVES,
        "pallas_call": _pallas,
        "spmd_layout": layout_marker,
        "spmd_kept": layout_marker,
        "spmd_assert_equal": assert_equal_marker,
        "spmd_order": order_marker,
        "spmd_names": _names,
    }

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[State]) -> Sequence[State]:
        return self.enter(eqn, part, operands, lambda inner: self.run(eqn, part, inner))

    def enter(
        self, eqn: Equation, part: Held, operands: Sequence[State], run: Callable[[Sequence[State]], list[State]]
    ) -> list[State]:
        """The body of a kernel: its inputs are what the specs say. Outer axes, if any, stay as they are."""
        body, _ = opened(part.jaxpr)
        made = _compat.made_manual(eqn)
        own = frozenset(made)
        self.sizes.update(made)
        entering = zip(operands, eqn.params["in_specs"], body.invars, strict=True)
        before = self.active, self.checked, self.kernel
        kernel = kernel_around(self.callers)
        raw = kernel is None and not self.wanted
        self.active, self.checked, self.kernel = True, (self.wanted & own) or own, kernel or self.kernel
        outs = run([self._entered(state, spec, var) for state, spec, var in entering])
        self.outputs.append((eqn, outs))
        (self._check_raw if raw else self._check_returned)(eqn, outs)
        self.active, self.checked, self.kernel = before
        ended = zip(outs, eqn.outvars, eqn.params["out_specs"], strict=True)
        return [self._outside(state, own, var, spec) for state, var, spec in ended]

    def _entered(self, state: State, spec: Any, var: Variable) -> State:
        """An input of a body. What another body gave, and what lies as it did there, is what it was there."""
        rank = len(shape_of(var))
        entries = _axes_by_dim(spec, rank)
        held = NONE.union(*entries)
        if state.left is not None and state.left[1] == spec and len(state.left[0].dims) == rank:
            return state.left[0]
        dims = tuple(
            normal([(n, self.tracked(axes))]) if axes else (dim if _still(dim, n) else plain(n))
            for n, axes, dim in zip(shape_of(var), entries, state.dims, strict=True)
        )
        partial = frozenset(self.tracked(getattr(spec, "unreduced", ()) or ()))
        return self.kept(State(dims, state.partial | partial, state.different - held, zero=state.zero))

    def _outside(self, state: State, own: frozenset[str], var: Variable, spec: Any) -> State:
        """Return what a body gave, as a whole array."""
        shape = shape_of(var)
        held = state.axes - own
        dims = tuple(plain(n) if not held else hidden(n) for n in shape)
        return self.kept(State(dims, state.partial - own, frozenset(held - state.partial), left=(state, spec)))

    def _check_raw(self, eqn: Equation, outs: Sequence[State]) -> None:
        """Specs do not claim anything about whole arrays, so what was done to pieces may be meant."""
        if self.silent(eqn):
            return
        differentiated = any(map(is_differentiated, (eqn, *self.callers)))
        for index, (state, spec) in enumerate(zip(outs, eqn.params["out_specs"], strict=True)):
            made = [p for p in state.pending if p.axis in self.checked and p.kind not in QUIET]
            if made and differentiated and eqn.outvars[index] not in self.history.forward:
                continue
            if pending := sorted(made):
                fault = report.pending_returned(self, eqn, index, pending, spec)
                self.note(eqn, "pending", fault, where=self.made_pending[pending[0].at], certain=False)
                continue
            entries = _axes_by_dim(spec, len(state.dims))
            said = [self.tracked(axes) for axes in entries]
            have = [axes_of_dim(dim) for dim in state.dims]
            known = not any(axes is HIDDEN for dim in state.dims for _, axes in dim)
            # What JAX's derivative keeps of a body is put together in some way, and taken apart in the same way.
            known = known and not differentiated
            if known and said != have and {*sum(said, ())} == {*sum(have, ())} and not state.different:
                self.note(eqn, "layout", report.returned_otherwise(self, eqn, index, state, spec), certain=False)

    def _check_returned(self, eqn: Equation, outs: Sequence[State]) -> None:
        """A partial sum that no layout declares. Among what JAX's derivative keeps of a body it is allowed."""
        if self.silent(eqn) or any(map(is_differentiated, (eqn, *self.callers))):
            return
        for index, (state, spec) in enumerate(zip(outs, eqn.params["out_specs"], strict=True)):
            left = state.partial & self.checked - set(getattr(spec, "unreduced", ()) or ())
            if left and not state.zero:
                axes = [a for a in self.sizes if a in left]
                self.note(eqn, "partial", report.returned_partial(self, eqn, index, axes, shown_spec(spec)))


def _axes_by_dim(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """The axes that divide each dimension. A spec may leave the last ones out."""
    return list(map(axes_tuple, _compat.partitions(spec, rank)))


def typed(aval: Any) -> State | None:
    """Return how a value lies by its type: the axes in their order, and those along which it is a partial sum. None of
    a type that does not say it."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    sizes, dims = sharding.mesh.shape, []
    for n, entry in zip(aval.shape, _compat.partitions(sharding.spec, len(aval.shape)), strict=True):
        axes = tuple(axis for axis in axes_tuple(entry) if sizes[axis] > 1)
        local = n // math.prod(sizes[axis] for axis in axes)
        dims.append(normal([(local, axes)]) if axes else plain(local))
    return State(tuple(dims), _compat.unreduced_spec(sharding.spec))


def _still(dim: Dim, n: int) -> bool:
    """Return whether what is known of a whole dimension is known of it in the body."""
    return len(dim) == 1 and dim[0][0] == n


def walk_closed(dataflow: Dataflow, jaxpr: Any, operands: Sequence[State] | None = None) -> list[State]:
    """Run the pass over a whole closed jaxpr, whose inputs are global (equal) unless given."""
    dataflow.root = jaxpr
    inner, _ = opened(jaxpr)
    if operands is None:
        operands = [dataflow.kept(State(tuple(map(plain, shape_of(v))))) for v in inner.invars]
    outs = walker.walk(jaxpr, list(map(dataflow.kept, operands)), dataflow)
    others = [one for one in dataflow.findings if one.kind != "gradient"]
    if others:  # they say more than a sum, or a type, that comes of them
        dataflow.weaker = [one for one in dataflow.findings if one.kind == "gradient"]
        dataflow.findings[:] = others
    for entry, _ in dataflow.outputs if not dataflow.findings else ():
        _check_types(dataflow, entry)
    return outs


def _check_types(walk: Dataflow, entry: Any) -> None:
    """JAX types some results equal that are not, such as those of a sort whose keys differ and whose payload does not.
    Only the first of them is told: what is made of it has the wrong type, too."""
    if not entry.params.get("check_vma", True):  # JAX types nothing there
        return
    own = frozenset(_compat.made_manual(entry)) & (walk.wanted or frozenset(walk.sizes))

    def mistyped(var: Variable) -> list[str]:
        state = walk.known.get(var) if not hasattr(var, "val") else None
        left = state.axes & own - _compat.varying_type(var.aval) if state else NONE
        return [a for a in walk.sizes if a in left - _compat.unreduced_type(var.aval)] if left else []

    alike = {(id(state), _compat.varying_type(var.aval)): var for var, state in walk.known.items()}
    if not any(map(mistyped, alike.values())):  # many values have one state, and few types differ
        return
    for eqn in walker.equations(entry.params["jaxpr"]):
        wrong = [] if held(eqn) or eqn.primitive.name.startswith("spmd_") else [v for v in eqn.outvars if mistyped(v)]
        if not wrong or any(map(mistyped, eqn.invars)):
            continue
        made = walk.history.producer(wrong[0])
        walk.callers, before = list(made[1] if made else ()), walk.callers
        inside = itertools.takewhile(lambda one: one.primitive.name != "shard_map", reversed(walk.callers))
        if not walk.silent(eqn) and not any(map(is_ours, (eqn, *inside))):
            walk.note(
                eqn,
                "type",
                report.mistyped(eqn, walk.callers, mistyped(wrong[0])),
                where=(eqn, tuple(walk.callers)),
            )
        walk.callers = before
        if walk.findings:
            return


# --- rules -----------------------------------------------------------------------------------------------------------

# What the checker knows of each primitive, in words: read off its tables, for `python -m spmd rules`.


class Rules(NamedTuple):
    """The rules in words.

    Attributes:
      table: For each primitive of the table, how dimensions pass, and the name of what becomes of a partial sum.
      partial: For each such name, what it says.
      own: For each primitive with code of its own, what that does.
    """

    table: Mapping[str, tuple[str, str]]
    partial: Mapping[str, str]
    own: Mapping[str, str]


def rules() -> Rules:
    """Every primitive that the checker has a rule for. What has none makes values unknown.

    >>> rules().table["reduce_max"], rules().partial["curved"]
    (('reduced: max', 'curved'), 'f of a partial sum is not a partial sum of f.')
    >>> rules().own["psum"]
    'psum, pmax, pmin: equal along their axes.'
    """
    own = Dataflow.rules
    table = {name: (entry.says, entry.linear) for name, entry in TABLE.items() if name not in own}
    partial = {name: _first_line(LINEAR[name]) for name in dict.fromkeys(linear for _, linear in table.values())}
    return Rules(table, partial, {name: _first_line(rule) for name, rule in own.items()})


def _first_line(rule: Any) -> str:
    return (inspect.getdoc(rule) or "").partition("\n")[0]
