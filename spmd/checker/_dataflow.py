"""The whole pass: the engine, the primitives with code of their own, and the bodies that it enters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import spmd.checker._report_equations as report_equations
import spmd.checker._report_strings as report
from spmd import _compat
from spmd._jaxprs import walker
from spmd._jaxprs.facts import kernel_around
from spmd._jaxprs.lines import is_differentiated, is_ours
from spmd._jaxprs.walker import Equation, Held, Rule, Variable, held, opened, shape_of
from spmd.checker._claims import assert_equal_marker, layout_marker, order_marker
from spmd.checker._collectives import COLLECTIVES
from spmd.checker._control import Control
from spmd.checker._history import shown_spec
from spmd.checker._shapes import RULES as SHAPES
from spmd.checker._state import HIDDEN, NONE, QUIET, Dim, State, axes_of_dim, hidden, normal, plain
from spmd.language import axes_tuple


def _pallas(walk: Dataflow, eqn: Equation, operands: Sequence[State]) -> Sequence[State]:
    """JAX's interpreter of Pallas calls fails on values that vary, and only when the program is lowered."""
    varying = any(_compat.varying_type(result.aval) for result in eqn.outvars)
    if walk.active and varying and eqn.params.get("interpret") is True:
        walk.note(eqn, "interpreted", report_equations.interpreted(walk, eqn))
    return walk.unread(eqn, operands)


class Dataflow(Control):
    """One run of the pass."""

    rules: ClassVar[Mapping[str, Rule]] = {
        **SHAPES,
        **COLLECTIVES,
        "pallas_call": _pallas,
        "spmd_layout": layout_marker,
        "spmd_assert_equal": assert_equal_marker,
        "spmd_order": order_marker,
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
            if made and differentiated and self.history.only_for_derivatives(eqn.outvars[index]):
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
    differing: dict[int, frozenset[str]] = {}  # values share their states

    def mistyped(var: Variable) -> list[str]:
        state = walk.known.get(var) if not hasattr(var, "val") else None
        if state is None:
            return []
        axes = differing.get(id(state))
        if axes is None:
            axes = differing[id(state)] = state.axes & own
        if not axes:
            return []
        left = axes - _compat.varying_type(var.aval)  # nearly always nothing
        return [a for a in walk.sizes if a in left - _compat.unreduced_type(var.aval)] if left else []

    if not any(map(mistyped, walk.known)):
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
                report_equations.mistyped(eqn, walk.callers, mistyped(wrong[0])),
                where=(eqn, tuple(walk.callers)),
            )
        walk.callers = before
        if walk.findings:
            return
