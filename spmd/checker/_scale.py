"""How often a value is too large: the powers of the axis sizes in it.

A sum in place of a mean has the same layout. But the program is traced again with one device along an axis, and the
two traces differ in their numbers only. A local mean over 4 of 8 elements contains the number 4, and on one device it
contains 8. So each literal has a power of the axis size. Products add powers, roots halve them, and a sum over equal
values adds one. A result with a power that is not zero changes with the mesh.

Where the traces differ in their equations, or nobody knows how a value lies, nothing is said.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from spmd._jaxprs import Held, Role, axes_of, held, opened, shape_of
from spmd._walker import Domain, walk
from spmd.checker._dataflow import Dataflow
from spmd.checker._report import scaled
from spmd.checker._source import line_of
from spmd.checker._state import FREE, HIDDEN, State, plain

Power = Fraction | None  # None: nobody knows
ZERO = Fraction(0)
MOST = 4000  # pairing more equations one by one takes too long
_PASS = """neg abs real imag conj copy copy_p stop_gradient name pvary pcast reduce_precision convert_element_type
    transpose squeeze reshape broadcast_in_dim rev slice reduce_max reduce_min cumsum cummax cummin sort
    spmd_retype spmd_relayout spmd_split spmd_layout spmd_assert_equal spmd_block pmax pmin all_gather
    all_gather_invariant all_gather_reduced ppermute all_to_all optimization_barrier sharding_constraint reduce_sum
    copysign"""
_SAME = frozenset(_PASS.split())
_SUMS = frozenset(("psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "psum_scatter"))
_EVEN = frozenset(("add", "sub", "add_any", "concatenate", "max", "min"))


class Value(NamedTuple):
    """A state, the power of the axis size in it, and the equation that brought it in."""

    state: State
    power: Power = None
    where: Any = None


class Scales(Domain):
    """A walk over one trace, with another one beside it. A value is a state and a power.

    Args:
      engine: Makes the states.
      axis: The mesh axis that has one device in the other trace.
      size: How many it has in this one.
    """

    def __init__(self, engine: Dataflow, axis: str, size: int) -> None:
        super().__init__()
        self.engine, self.axis, self.size = engine, axis, size
        self.callers = engine.callers
        self.twins: dict[int, Any] = {}
        self._left: list[Value] = []

    # --- the two traces ----------------------------------------------------------------------------------------

    def align(self, jaxpr: Any, other: Any) -> None:
        """Pair the equations of two traces, as far as they correspond."""
        one, two = (self._without_markers(part) for part in (jaxpr, other))
        for eqn, twin in _pairs(one, two):
            self.twins[id(eqn)] = twin
            for part, like in zip(held(eqn), held(twin), strict=False) if eqn.params else ():
                self.align(part.jaxpr, like.jaxpr)

    def _without_markers(self, jaxpr: Any) -> list[Any]:
        """The equations but for layouts, of which a verb that moves nothing leaves one more. Each is its own twin."""
        eqns = opened(jaxpr)[0].eqns
        self.twins.update((id(eqn), eqn) for eqn in eqns if eqn.primitive.name == "spmd_layout")
        return [eqn for eqn in eqns if eqn.primitive.name != "spmd_layout"]

    def _power(self, value: Any, other: Any) -> Power:
        """The power of the axis size by which a number differs in the other trace."""
        try:
            one, two = float(value), float(other)
        except (TypeError, ValueError):
            return None
        if one == two or (np.isnan(one) and np.isnan(two)):
            return ZERO
        if not one or not two or not np.isfinite(one / two) or one / two < 0:
            return None
        power = Fraction(np.log(one / two) / np.log(self.size)).limit_denominator(4)
        return power if np.isclose(float(self.size) ** float(power), one / two, rtol=1e-3) else None

    # --- values ------------------------------------------------------------------------------------------------

    def constant(self, var: Any, value: Any) -> Value:
        return Value(self.engine.constant(var, value), ZERO if value is not None and not shape_of(var) else None)

    def literal(self, value: Any) -> Value:
        return Value(self.engine.literal(value))

    def join(self, one: Value, other: Value) -> Value:
        power = self._even((one, other))  # a carry may start with zeros
        return Value(self.engine.join(one.state, other.state), power, one.where or other.where)

    def same(self, one: Value, other: Value) -> bool:
        return one[:2] == other[:2]

    def unsettled(self, value: Value) -> Value:
        return Value(self.engine.unsettled(value.state))

    def sliced(self, value: Value, operand: Any) -> Value:
        return value._replace(state=self.engine.sliced(value.state, operand))

    def stacked(self, value: Value, result: Any) -> Value:
        return value._replace(state=self.engine.stacked(value.state, result))

    def decided(self, value: Value, predicate: Value) -> Value:
        return value._replace(state=self.engine.decided(value.state, predicate.state))

    def unread(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        return [Value(state) for state in self.engine.unread(eqn, [v.state for v in operands])]

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Value]) -> Sequence[Value]:
        """A body; where its mesh does not shrink in the other trace, nothing is known."""
        twin = self.twins.get(id(eqn))
        mesh = eqn.params["mesh"]
        shrinks = twin is not None and self.axis in mesh.shape and twin.params["mesh"].shape.get(self.axis) == 1
        powers = [value.power if shrinks else None for value in operands]

        def run(states: Sequence[State]) -> list[State]:
            given = [Value(s, p, v.where) for s, p, v in zip(states, powers, operands, strict=True)]
            self._left = self.run(eqn, part, given)
            return [value.state for value in self._left]

        states = self.engine.enter(eqn, part, [value.state for value in operands], run)
        return [value._replace(state=state) for value, state in zip(self._left, states, strict=True)]

    # --- equations ---------------------------------------------------------------------------------------------

    def equation(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        twin = self.twins.get(id(eqn))
        if twin is not None and any(isinstance(atom, Literal) for atom in eqn.invars):
            pairs = zip(operands, eqn.invars, twin.invars, strict=True)
            operands = [self._number(value, atom, other) for value, atom, other in pairs]
        rule = self.engine.rules.get(eqn.primitive.name)
        if rule is None and eqn.params and any(part.role != Role.SCALARS for part in held(eqn)):
            return super().equation(eqn, operands)
        states = [value.state for value in operands]
        outs = self.engine.step(eqn, states) if rule is None else rule(self.engine, eqn, states)
        power = None if twin is None else self._result(eqn, operands, outs)
        where = next((value.where for value in operands if value.where), None)
        if power and where is None and eqn.primitive.name not in _SAME:
            where = eqn, tuple(self.callers)
        if eqn.primitive.name == "spmd_layout" and eqn.params["role"] == "output":
            self._check(eqn, outs[0], power, where)
        return [Value(state, power, where if power else None) for state in outs]

    def step(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        return self.equation(eqn, operands)

    def _number(self, value: Value, atom: Any, other: Any) -> Value:
        known = isinstance(atom, Literal) and isinstance(other, Literal)
        return value._replace(power=self._power(atom.val, other.val)) if known else value

    def _known(self, state: State) -> bool:
        """Whether it is known what the value is along the axis."""
        return self.axis not in state.different and not any(p.axis == self.axis for p in state.pending)

    def _result(self, eqn: Any, operands: Sequence[Value], outs: Sequence[State]) -> Power:
        name = eqn.primitive.name
        powers = [value.power for value in operands]
        if not outs or not all(map(self._known, outs)):
            return None
        if name in _EVEN:
            return self._even(operands)
        if not powers:
            return self._made(eqn)
        if powers[0] is None:
            return None
        if name == "select_n":
            return None if powers[0] else self._even(operands[1:])
        if name in _SUMS:
            return powers[0] + (self.axis in axes_of(eqn) and self.axis not in operands[0].state.axes)
        if name in _SAME:
            return None if name == "reduce_sum" and self._resized(eqn, operands[0].state) else powers[0]
        known = [power for power in powers if power is not None]
        if len(known) < len(powers):
            return None
        if name in ("mul", "dot_general"):
            return known[0] + known[1]
        if name == "div":
            return known[0] - known[1]
        return self._root(eqn, known)

    def _made(self, eqn: Any) -> Power:
        """What is made of nothing: numbers that are the same in both traces."""
        twin = self.twins[id(eqn)]
        if eqn.primitive.name == "iota" and shape_of(eqn.outvars[0]) == shape_of(twin.outvars[0]):
            return ZERO
        return ZERO if eqn.primitive.name == "axis_index" and self.axis not in axes_of(eqn) else None

    @staticmethod
    def _root(eqn: Any, powers: Sequence[Fraction]) -> Power:
        """Powers and roots of a value; of everything else, only what has no power keeps none."""
        name = eqn.primitive.name
        factor = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "square": Fraction(2)}.get(name)
        if name == "integer_pow":
            factor = Fraction(eqn.params["y"])
        if factor is not None:
            return powers[0] * factor
        return ZERO if not any(powers) else None

    @staticmethod
    def _even(operands: Sequence[Value]) -> Power:
        """A sum of values with one power; zeros do not count."""
        found = {value.power for value in operands if not value.state.zero}
        return found.pop() if len(found) == 1 else None if found else ZERO

    def _resized(self, eqn: Any, state: State) -> bool:
        """Whether a sum has another number of equal terms in the other trace."""
        one, two = (shape_of(e.invars[0]) for e in (eqn, self.twins[id(eqn)]))
        unclear = lambda dim: any(axes is FREE or axes is HIDDEN for _, axes in dim)
        return any(one[d] != two[d] and unclear(state.dims[d]) for d in eqn.params["axes"])

    def _check(self, eqn: Any, state: State, power: Power, where: Any) -> None:
        if power and self._known(state) and not state.partial:
            times = float(self.size) ** float(power)
            fault = scaled(eqn, self.axis, times, where)
            self.engine.note(eqn, "scale", fault, where=where or (eqn, tuple(self.callers)))


def _pairs(one: Sequence[Any], two: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Equations of two traces that correspond. Where one has more, as a verb sends nothing along one device, those of
    the same primitive at the same line do."""
    names = [[(eqn.primitive.name, len(eqn.invars)) for eqn in side] for side in (one, two)]
    if names[0] == names[1]:
        yield from zip(one, two, strict=True)
    elif len(one) + len(two) < MOST:
        keys = [
            [(name, line_of(eqn)) for name, eqn in zip(*side, strict=True)]
            for side in zip(names, (one, two), strict=True)
        ]
        for start, begin, count in difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
            yield from zip(one[start : start + count], two[begin : begin + count], strict=True)


def check_scale(jaxpr: Any, others: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Any]:
    """The findings of scale along each axis.

    Args:
      jaxpr: The trace of the program.
      others: For each mesh axis, the trace with one device along it.
      sizes: The sizes of the axes.
    """
    findings: list[Any] = []
    for axis, other in others.items():
        engine = Dataflow("", ())
        engine.root = jaxpr
        scales = Scales(engine, axis, sizes[axis])
        scales.align(jaxpr, other)
        inner, _ = opened(jaxpr)
        whole = [engine.kept(State(tuple(map(plain, shape_of(v))))) for v in inner.invars]
        start = [Value(state, ZERO) for state in whole]
        walk(jaxpr, start, scales)
        findings += [one for one in engine.findings if one.kind == "scale"]
    return findings
