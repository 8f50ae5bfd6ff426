"""How often a value is too large: the powers of the axis sizes in it.

A sum in place of a mean has the same layout. But the program is traced again with one device along an axis, and the
two traces differ in their numbers only. A local mean over 4 of 8 elements contains the number 4, and on one device it
contains 8. So each literal has a power of the axis size. Products add powers, roots halve them, and a sum over equal
values adds one. A result with a power that is not zero changes with the mesh.

Where the equations of the traces differ, or the layout of a value is not known, there is no finding.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.core
import numpy as np
from jax.extend.core import Literal

from spmd._facts import per_shard_reason
from spmd._jaxprs import Held, Role, axes_of, held, opened, shape_of
from spmd._walker import Domain, walk
from spmd.checker._columns import counting
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._pieces import SUMS, Here, Piece, completed, guarded, left, piece_of
from spmd.checker._powers import ZERO, Grown, Operand, Power, alike, nearly, power_of, together
from spmd.checker._report import scaled
from spmd.checker._source import line_of
from spmd.checker._state import FREE, HIDDEN, Dim, State, axes_of_dim, plain

ROUNDS = 20  # of a loop, until its powers settle
MOST = 4000  # pairing more equations one by one takes too long
# What verbs write, and what sends nothing along one device: the whole array stays, so that no twin is asked.
_MOVES = """pvary pcast all_gather all_gather_invariant all_gather_reduced ppermute all_to_all spmd_retype spmd_relayout
    spmd_split spmd_assert_equal spmd_block spmd_layout spmd_fused pmax pmin"""
_WHOLE = frozenset(_MOVES.split()) | SUMS
# What leaves the numbers as they are, however the array lies.
_ARRANGES = frozenset(("reshape", "transpose", "broadcast_in_dim", "squeeze", "spmd_layout", "spmd_fused"))


class Value(NamedTuple):
    """A state, the power of the axis size in it, the equation that brought that in, and what a piece is."""

    state: State
    power: Power = None
    where: Any = None
    piece: Piece | None = None

    @property
    def operand(self) -> Operand:
        return Operand(self.power, self.state)

    @property
    def here(self) -> Here:
        return Here(self.operand, self.piece)


class Scales(Domain):
    """A walk over one trace, with another one beside it. A value is a state and a power.

    Args:
      engine: Makes the states.
      axis: The mesh axis that has one device in the other trace.
      size: How many it has in this one.
      beside: The states of the values in the other trace.
    """

    def __init__(self, engine: Dataflow, axis: str, size: int, beside: Mapping[Any, State]) -> None:
        super().__init__()
        self.engine, self.axis, self.size = engine, axis, size
        self.callers = engine.callers
        self.twins: dict[int, Any] = {}
        self._constants: dict[int, Any] = {}
        self._beside = beside
        self._left: list[Value] = []
        self._rounds: list[int] = []

    # --- the two traces ----------------------------------------------------------------------------------------

    def align(self, jaxpr: Any, other: Any) -> None:
        """Pair the equations of two traces, as far as they correspond."""
        one, two = (self._without_markers(part) for part in (jaxpr, other))
        (inner, _), (like, values) = opened(jaxpr), opened(other)
        if len(inner.constvars) == len(values):
            self._constants.update((id(var), value) for var, value in zip(inner.constvars, values, strict=True))
        for eqn, twin in _pairs(one, two):
            self.twins[id(eqn)] = twin
            for part, like in zip(held(eqn), held(twin), strict=False) if eqn.params else ():
                if part.role != Role.MAP or self._shrinks(eqn):
                    self.align(part.jaxpr, like.jaxpr)

    def _shrinks(self, eqn: Any) -> bool:
        """Whether the mesh of a body has one device along the axis in the other trace."""
        twin, mesh = self.twins.get(id(eqn)), eqn.params["mesh"]
        return twin is not None and self.axis in mesh.shape and twin.params["mesh"].shape.get(self.axis) == 1

    def _without_markers(self, jaxpr: Any) -> list[Any]:
        """The equations but for layouts, of which a verb that moves nothing leaves one more."""
        return [eqn for eqn in opened(jaxpr)[0].eqns if eqn.primitive.name != "spmd_layout"]

    def _power_of_arrays(self, value: Any, other: Any) -> Power:
        """Zero if the other trace has the same array."""
        if isinstance(value, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
            return None
        return ZERO if value is other or _equal(value, other) else None

    def _power(self, value: Any, other: Any) -> Fraction | None:
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
        power = None
        if value is not None:
            other = self._constants.get(id(var))
            power = ZERO if not shape_of(var) else None if other is None else self._power_of_arrays(value, other)
        return Value(self.engine.constant(var, value), power)

    def literal(self, value: Any) -> Value:
        return Value(self.engine.literal(value))

    def join(self, one: Value, other: Value) -> Value:
        operands, near = nearly((one.operand, other.operand))
        power = near(together(operands))  # a carry may start with zeros
        return Value(self.engine.join(one.state, other.state), power, one.where or other.where)

    def same(self, one: Value, other: Value) -> bool:
        """The layers of a stream differ in their paths only, because each path is longer than the one before it."""
        return one.state == other.state and one.piece == other.piece and alike(one.power, other.power)

    def unsettled(self, value: Value) -> Value:
        return Value(self.engine.unsettled(value.state))

    def sliced(self, value: Value, operand: Any) -> Value:
        return value._replace(state=self.engine.sliced(value.state, operand), piece=None)

    def stacked(self, value: Value, result: Any) -> Value:
        return value._replace(state=self.engine.stacked(value.state, result), piece=None)

    def carried(self, value: Value) -> Value:
        return value._replace(state=self.engine.carried(value.state), piece=None)

    def decided(self, value: Value, predicate: Value) -> Value:
        power = value.power if predicate.power == ZERO else None
        return value._replace(state=self.engine.decided(value.state, predicate.state), power=power, piece=None)

    def unread(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        return [Value(state) for state in self.engine.unread(eqn, [v.state for v in operands])]

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Value]) -> Sequence[Value]:
        """A body. Nothing is known if its mesh does not shrink in the other trace."""
        shrinks = self._shrinks(eqn)
        powers = [value.power if shrinks else None for value in operands]

        def run(states: Sequence[State]) -> list[State]:
            given = [Value(s, p, v.where) for s, p, v in zip(states, powers, operands, strict=True)]
            self._left = self.run(eqn, part, given)
            return [value.state for value in self._left]

        states = self.engine.enter(eqn, part, [value.state for value in operands], run)
        return [value._replace(state=state, piece=None) for value, state in zip(self._left, states, strict=True)]

    # --- loops -------------------------------------------------------------------------------------------------

    def loop(self, eqn: Any, body: Held, test: Held | None, operands: Sequence[Value]) -> Sequence[Value]:
        self.engine.enter_loop(eqn, body, [value.state for value in operands])
        self._rounds.append(eqn.params["length"] if test is None else 0)
        outs = [self.carried(value) for value in super().loop(eqn, body, test, operands)]
        self._rounds.pop()
        self.engine.leave_loop()
        return outs

    def settle(self, once: Callable[[Sequence[Value]], list[Value]], carry: Sequence[Value]) -> list[Value]:
        """Each round has the powers that the one before it left: what a layer adds to a stream is in it from then on.
        The last round counts, if the loop gets there. How often other loops run is not known."""
        start, found = carry, []
        for _ in range(ROUNDS):
            outs = list(once(carry))
            found.append(outs)
            ended = [self.carried(out) for out in outs[: len(carry)]]
            states = [self.engine.join(one.state, out.state) for one, out in zip(carry, ended, strict=True)]
            merged = [out._replace(state=state) for out, state in zip(ended, states, strict=True)]
            if all(map(self.same, merged, carry)):
                return self._ended(found, start)
            carry = merged
        return [*map(self.unsettled, carry), *map(self.unsettled, outs[len(carry) :])]

    def _ended(self, found: Sequence[list[Value]], start: Sequence[Value]) -> list[Value]:
        """The results of a loop, from those of its rounds."""
        count, length = len(start), self._rounds[-1]
        ran = found[:length] or found
        last, every = ran[-1], [functools.reduce(self.join, values) for values in zip(*ran, strict=True)]
        if not length:
            every = [*map(self.join, every[:count], start), *every[count:]]
        powers = [value.power for value in (*(last if length else every)[:count], *every[count:])]
        return [out._replace(power=power) for out, power in zip(found[-1], powers, strict=True)]

    # --- equations ---------------------------------------------------------------------------------------------

    def equation(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        twin = self.twins.get(id(eqn))
        others = twin.invars if twin is not None else ()  # a body may have other constants
        if len(others) == len(eqn.invars) and any(isinstance(atom, Literal) for atom in eqn.invars):
            pairs = zip(operands, eqn.invars, others, strict=True)
            operands = [self._number(value, atom, other) for value, atom, other in pairs]
        if eqn.primitive.name not in _ARRANGES:
            operands = [value if self._known(value.state) else value._replace(power=None) for value in operands]
        rule = self.engine.rules.get(eqn.primitive.name)
        if rule is None and eqn.params and any(part.role != Role.SCALARS for part in held(eqn)):
            return super().equation(eqn, operands)
        states = [value.state for value in operands]
        outs = self.engine.step(eqn, states) if rule is None else rule(self.engine, eqn, states)
        powers = [self._result(eqn, twin, i, operands, state) for i, state in enumerate(outs)]
        where = next((value.where for value in operands if value.where), None)
        if where is None and any(powers) and (len(operands) > 1 or powers[0] != operands[0].power):
            where = eqn, tuple(self.callers)
        if eqn.primitive.name == "spmd_layout" and eqn.params["role"] == "output":
            self._check(eqn, outs[0], powers[0], where)
        piece = piece_of(eqn, [value.here for value in operands], self.axis) if len(outs) == 1 else None
        pairs = zip(outs, powers, strict=True)
        return [Value(state, power, where if power else None, piece) for state, power in pairs]

    def step(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        return self.equation(eqn, operands)

    def _number(self, value: Value, atom: Any, other: Any) -> Value:
        known = isinstance(atom, Literal) and isinstance(other, Literal)
        return value._replace(power=self._power(atom.val, other.val)) if known else value

    def _known(self, state: State) -> bool:
        """Whether it is known what the value is along the axis."""
        return self.axis not in state.different and not any(p.axis == self.axis for p in state.pending)

    def _result(self, eqn: Any, twin: Any, number: int, operands: Sequence[Value], state: State) -> Power:
        name = eqn.primitive.name
        if per_shard_reason(eqn, self.callers):
            return None
        if not self._known(state):  # a layout that is said afterwards, as by `rearrange`, is that of the same numbers
            return operands[0].power if name in _ARRANGES and twin is not None else None
        if name == "spmd_layout":
            return left(eqn, operands[0].here)
        if state.table is not None and twin is not None and self._same_numbers(state, twin.outvars[0]):
            return ZERO
        if name in _WHOLE:
            return self._moved(eqn, operands)
        if twin is None or len(eqn.outvars) != len(twin.outvars):
            return None
        if not self._fits(eqn, twin, number, state):
            return None
        if name == "axis_index":
            return ZERO if self.axis not in axes_of(eqn) else None
        if name == "dynamic_slice" and self.axis in state.divided and _takes_all(twin):
            return operands[0].power  # its own block
        if name in ("reduce_sum", "dot_general") and self._resized(eqn, operands):
            return None
        given = [value.operand for value in operands]
        if name == "concatenate":  # of the whole there are more rows, and the other columns pick as they do here
            pairs = zip(given, counting(self.engine, eqn), strict=True)
            given = [Operand(ZERO, one.state) if counts else one for one, counts in pairs]
        if name == "select_n" and operands[0].power is None:
            return guarded([value.here for value in operands])
        return self._sorted(eqn, number, given) if name in ("sort", "top_k") else power_of(eqn, given, number)

    def _same_numbers(self, state: State, var: Any) -> bool:
        """Whether integers that shapes and `axis_index` decide are those of the whole array in the other trace."""
        other = self._beside.get(var)
        if other is None or other.table is None:
            return False
        here, there = whole_of(state, self.engine.sizes), whole_of(other, {**self.engine.sizes, self.axis: 1})
        return here is not None and there is not None and np.array_equal(here, there)

    def _moved(self, eqn: Any, operands: Sequence[Value]) -> Power:
        """What is the same whole array, or a sum over devices: of equal values, that is one for each of them."""
        state, power = operands[0][:2]
        name = eqn.primitive.name
        if power is None and (name in SUMS or name in ("pmax", "pmin")):
            return completed(eqn, operands[0].here, self.axis)
        if name not in SUMS or self.axis not in axes_of(eqn) or self.axis in state.axes:
            return power if power is None or self._known(state) else None
        if isinstance(power, Fraction):
            return power + 1
        return power if isinstance(power, Grown) and not power.factor else None

    @staticmethod
    def _sorted(eqn: Any, number: int, operands: Sequence[Operand]) -> Power:
        """A positive factor does not change the order of keys."""
        if len(eqn.outvars) == 1:
            return operands[0].power
        keys = operands[: eqn.params.get("num_keys", 1)]
        if not all(isinstance(one.power, Fraction) for one in keys):
            return None
        return operands[number].power if number < len(operands) else ZERO

    def _fits(self, eqn: Any, twin: Any, number: int, state: State) -> bool:
        """Whether both traces mean an array of one whole shape."""
        here, there = shape_of(eqn.outvars[number]), shape_of(twin.outvars[number])
        if len(here) != len(there):
            return False
        times = [self.size if self.axis in axes_of_dim(dim) else 1 for dim in state.dims]
        constant = [len(dim) == 1 and dim[0][1] is FREE for dim in state.dims]  # as far as it goes, there too
        if eqn.primitive.name == "broadcast_in_dim":
            constant = [free or d in _stretched(twin) for d, free in enumerate(constant)]
        places = zip(here, there, times, constant, strict=True)
        return all(n * k == m or (free and n * self.size == m) for n, m, k, free in places)

    def _resized(self, eqn: Any, operands: Sequence[Value]) -> bool:
        """Whether a sum has another number of equal terms in the other trace."""
        twin = self.twins[id(eqn)]
        if eqn.primitive.name == "reduce_sum":
            places = [eqn.params["axes"]]
        else:
            places = eqn.params["dimension_numbers"][0]
        sizes = [[shape_of(e.invars[0])[d] for d in places[0]] for e in (eqn, twin)]
        unclear = [[_is_unclear(v.state.dims[d]) for d in dims] for v, dims in zip(operands, places, strict=True)]
        terms = zip(*sizes, *unclear, strict=True)
        return any(one != two and all(rest) for one, two, *rest in terms)

    def _check(self, eqn: Any, state: State, power: Power, where: Any) -> None:
        if power and self._known(state) and not state.partial:
            times = float(self.size) ** float(power) if isinstance(power, Fraction) else None
            fault = scaled(eqn, self.axis, times, where)
            self.engine.note(eqn, "scale", fault, where=where or (eqn, tuple(self.callers)))


def _equal(one: Any, other: Any) -> bool:
    try:
        return np.array_equal(np.asarray(one), np.asarray(other))
    except (TypeError, ValueError, RuntimeError):  # keys, deleted buffers
        return False


def whole_of(state: State, sizes: Mapping[str, int]) -> np.ndarray | None:
    """The whole array of integers whose blocks the devices hold. None if there are too many, or they lie otherwise."""
    table, divided = state.table, [axes_of_dim(dim) for dim in state.dims]
    values = table.values
    if values is None or not {*table.axes} <= state.divided:
        return None
    if any(axes and len(dim) > 1 for axes, dim in zip(divided, state.dims, strict=True)):
        return None
    order = [axis for axes in divided for axis in axes]
    if len({*order}) < len(order):
        return None
    lead = [axis for axis in sizes if axis in order]
    full = values.reshape([sizes[a] if a in table.axes else 1 for a in lead] + list(values.shape[len(table.axes) :]))
    full = np.broadcast_to(full, [sizes[a] for a in lead] + list(table.shape))
    places, shape = [], []
    for d, axes in enumerate(divided):
        places += [lead.index(axis) for axis in axes] + [len(lead) + d]
        shape.append(table.shape[d] * math.prod(sizes[axis] for axis in axes))
    return full.transpose(places).reshape(shape)


def _takes_all(eqn: Any) -> bool:
    return shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0])


def _stretched(eqn: Any) -> set[int]:
    """The dimensions of a broadcast along which one element is repeated. A piece may have no more than that one."""
    kept = dict(zip(eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0]), strict=True))
    return {d for d in range(len(shape_of(eqn.outvars[0]))) if kept.get(d, 1) == 1}


def _is_unclear(dim: Dim) -> bool:
    """Whether elements along a dimension may be equal."""
    return any(axes is FREE or axes is HIDDEN for _, axes in dim)


def _pairs(one: Sequence[Any], two: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Equations of two traces that correspond. Where one has more, as a verb sends nothing along one device, those of
    the same primitive at the same line do."""
    names = [[(eqn.primitive.name, None if any(held(eqn)) else len(eqn.invars)) for eqn in side] for side in (one, two)]
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
    every = {axis: _beside(jaxpr, axis, sizes[axis], other) for axis, other in others.items()}
    inner, _ = opened(jaxpr)

    def with_one(eqn: Any) -> dict[str, Sequence[int]]:
        twins = {axis: one.twins.get(id(eqn)) for axis, one in every.items()}
        return {axis: shape_of(twin.outvars[0]) for axis, twin in twins.items() if twin is not None}

    findings: list[Any] = []
    for scales in every.values():
        scales.engine.with_one = with_one
        whole = [scales.engine.kept(State(tuple(map(plain, shape_of(v))))) for v in inner.invars]
        walk(jaxpr, [Value(state, ZERO) for state in whole], scales)
        findings += [one for one in scales.engine.findings if one.kind == "scale"]
    return findings


def _beside(jaxpr: Any, axis: str, size: int, other: Any) -> Scales:
    """A walk over the trace of a program, with the one beside it that has one device along an axis."""
    engine, beside = Dataflow("", ()), Dataflow("", ())
    engine.root = jaxpr
    walk_closed(beside, other)
    scales = Scales(engine, axis, size, beside.known)
    scales.align(jaxpr, other)
    return scales
