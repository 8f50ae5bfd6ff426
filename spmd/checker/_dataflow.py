"""The pass: a state for every value, and what each equation makes of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax.core

from spmd import _compat, _walker
from spmd._jaxprs import COMMUNICATES, Held, axes_of, held, is_unknown, opened, shape_of
from spmd._walker import Rule, equations
from spmd.checker._axes import Origin
from spmd.checker._collectives import COLLECTIVES
from spmd.checker._markers import assert_equal_marker, layout_marker
from spmd.checker._report import divergent, interpreted, returned_partial
from spmd.checker._rules import TABLE, compute
from spmd.checker._state import EVERYWHERE, UNKNOWN, ZERO, State, constant_state, join, literal_state, normal
from spmd.checker._walk import Walk

# What these give was written elsewhere, at a time that a pass over values does not know.
OUTSIDE = frozenset(("get", "swap", "addupdate", "freeze", "ref_get", "ref_swap", "io_callback", "infeed", "recv"))


def _pallas(walk: Dataflow, eqn: Any, operands: Sequence[State]) -> Sequence[State]:
    """JAX's interpreter of Pallas calls fails on values that vary, and only when the program is lowered."""
    varying = any(_compat.is_varying(result.aval) for result in eqn.outvars)
    if walk.active and varying and eqn.params.get("interpret") is True:
        walk.findings.append(interpreted(walk, eqn))
    return walk.unread(eqn, operands)


RULES: dict[str, Rule] = {
    **dict.fromkeys(TABLE, compute),
    "pallas_call": _pallas,
    **COLLECTIVES,
    "spmd_layout": layout_marker,
    "spmd_assert_equal": assert_equal_marker,
}


class Dataflow(Walk):
    """One run of the pass."""

    rules = RULES

    def context(self) -> Hashable:
        return self.active, self.checked

    # --- values -------------------------------------------------------------------------------------------

    def constant(self, var: Any, value: Any) -> State:
        """What the jaxpr closed over: an array, or a value of the trace around it."""
        if value is None:
            return State()
        if not isinstance(value, jax.core.Tracer):
            return constant_state(value)
        partial = _compat.unreduced_axes(value)
        return State(self.axes.mask(_compat.varying_axes(value) | partial), self.axes.mask(partial))

    def literal(self, value: Any) -> State:
        return literal_state(value)

    def step(self, eqn: Any, operands: Sequence[State]) -> Sequence[State]:
        outs = compute(self, eqn, operands)
        return [_unknown(out) for out in outs] if eqn.primitive.name in OUTSIDE else outs

    def unread(self, eqn: Any, operands: Sequence[State]) -> Sequence[State]:
        outs = self.step(eqn, operands)
        return [_unknown(out) for out in outs] if is_unknown(eqn) else outs

    # --- loops and branches -------------------------------------------------------------------------------

    def join(self, one: State, other: State) -> State:
        return join(one, other)

    def same(self, one: State, other: State) -> bool:
        """Where it came from does not matter, only what it is."""
        return one[:4] == other[:4]

    def unsettled(self, value: State) -> State:
        return _unknown(value)

    def sliced(self, value: State, operand: Any) -> State:
        return value._replace(uniform=normal(value.uniform >> 1, max(_rank(operand) - 1, 0)))

    def stacked(self, value: State, result: Any) -> State:
        """Steps differ from one another, so the new leading dimension is not constant."""
        uniform = value.uniform if value.flags & ZERO else normal(value.uniform << 1, _rank(result))
        return value._replace(uniform=uniform)

    def decided(self, value: State, predicate: State) -> State:
        """Devices that take another branch, or stop earlier, hold other values."""
        if not predicate.different & ~value.different:
            return value
        different = value.different | predicate.different
        return value._replace(different=different, origin=value.origin | predicate.origin)

    def decides(self, eqn: Any, predicate: State) -> None:
        """Devices that disagree must not meet a collective that waits for all of them."""
        if not predicate.different or predicate.flags & UNKNOWN or not self.active:
            return
        found: dict[str, None] = {}
        axes = 0
        for inner in (one for part in held(eqn) for one in equations(part.jaxpr, derivatives=False)):
            waiting = self.axes.mask(axes_of(inner)) if inner.primitive.name in COMMUNICATES else 0
            if waiting & predicate.different:
                found[inner.primitive.name] = None
                axes |= waiting & predicate.different
        if axes:
            self.findings.append(divergent(self, eqn, list(found), self.axes.names(axes), predicate))

    # --- shard_map ----------------------------------------------------------------------------------------

    def mapped(self, eqn: Any, part: Held, operands: Sequence[State]) -> Sequence[State]:
        """The body of a kernel: its inputs are what the specs say. Outer axes, if any, stay as they are."""
        body, _ = opened(part.jaxpr)
        mesh = eqn.params["mesh"]
        manual = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes")) or frozenset(mesh.axis_names)
        self.axes.sizes.update((name, size) for name, size in mesh.shape.items() if name in manual)
        own = self.axes.mask(manual)
        specs = eqn.params["in_specs"]
        labels = _labels(self, body, len(specs))
        inner = [_seed(self, *one) for one in zip(operands, specs, body.invars, labels, strict=True)]
        before = self.active, self.checked
        self.active, self.checked = True, (self.wanted & own) or own
        outs = self.run(eqn, part, inner)
        self.outputs.append(outs)
        _check_returned(self, eqn, outs)
        self.active, self.checked = before
        return [State(s.different & ~own, s.partial & ~own, 0, s.flags & ~ZERO, s.origin) for s in outs]


def _unknown(state: State) -> State:
    return state._replace(flags=state.flags | UNKNOWN)


def _rank(atom: Any) -> int:
    return len(shape_of(atom))


def _spec_axes(spec: Any) -> list[tuple[str, int]]:
    """`(axis, dim)` pairs of a PartitionSpec."""
    pairs: list[tuple[str, int]] = []
    for dim, entry in enumerate(getattr(spec, "partitions", None) or ()):
        names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        pairs += [(name, dim) for name in names]
    return pairs


def _labels(walk: Walk, body: Any, count: int) -> list[str]:
    """What messages call the inputs. Constants that JAX hoisted out of the body come before the arguments."""
    names = walk.arg_names if not walk.active else ()
    if not names:
        names = getattr(getattr(body, "debug_info", None), "arg_names", None) or ()
    hoisted = count - len(names)
    if hoisted < 0:
        return [f"input {i}" for i in range(count)]
    named = [f"argument {name}" if name else f"input {i + hoisted}" for i, name in enumerate(names)]
    return [*(f"input {i}" for i in range(hoisted)), *named]


def _seed(walk: Walk, state: State, spec: Any, var: Any, label: str) -> State:
    different, uniform, origin = state.different, state.uniform, state.origin
    for axis, _ in _spec_axes(spec):
        different |= walk.axes.bit(axis)
        origin |= walk.origins.bit(id(var), Origin("input", axis, f"{label}, which is divided by {_shown(spec)}"))
    partial = walk.axes.mask(getattr(spec, "unreduced", ()) or ())
    return State(different | partial, state.partial | partial, uniform, state.flags, origin)


def _shown(spec: Any) -> str:
    """A spec without the extras that differ from one JAX to the next."""
    return "P(" + ", ".join(repr(entry) for entry in spec.partitions) + ")"


def _check_returned(walk: Walk, eqn: Any, outs: Sequence[State]) -> None:
    for index, (state, spec) in enumerate(zip(outs, eqn.params["out_specs"], strict=True)):
        left = state.partial & walk.checked & ~walk.axes.mask(getattr(spec, "unreduced", ()) or ())
        if left and not state.flags & (ZERO | UNKNOWN):
            walk.findings.append(returned_partial(walk, eqn, index, walk.axes.names(left), _shown(spec)))


def walk_closed(dataflow: Dataflow, jaxpr: Any, operands: Sequence[State] | None = None) -> list[State]:
    """Run the pass over a whole closed jaxpr, whose inputs are global (equal) unless given."""
    dataflow.root = jaxpr
    inner, _ = opened(jaxpr)
    if operands is None:
        operands = [State(uniform=0 if shape_of(v) else EVERYWHERE) for v in inner.invars]
    else:
        pairs = zip(operands, inner.invars, strict=True)
        operands = [state._replace(uniform=normal(state.uniform, _rank(var))) for state, var in pairs]
    return _walker.walk(jaxpr, operands, dataflow)
