"""What a plan costs that it need not: gathers in loops and of activations, each with a constraint that was tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spmd._compat import is_typed
from spmd._jaxprs.lines import is_transposed, line_of, short_line
from spmd._jaxprs.walker import shape_of
from spmd._text import bytes_text, fields_of
from spmd.propagation._module import Dims, Number, Place
from spmd.propagation._moves import Move, text_of

_MOST = 4  # costs for which constraints are tried, the dearest first
_TRIES = 6  # constraints for each of them


Plan = Any  # a `Propagation`, which this module stands below


@dataclass(frozen=True)
class Constraint:
    """A layout that was asked for, and what the program sends then.

    Attributes:
      layout: The layout, `b d/dp`.
      value: What is to lie so, in words.
      text: The line that asks for it.
      bytes: What one device sends in one call with it.
    """

    layout: str
    value: str
    text: str
    bytes: int
    ask: Any = field(repr=False, compare=False, default=None)


@dataclass(frozen=True)
class Cost:
    """Moves that a program may do without.

    Attributes:
      kind: "loop", a loop moves in each round what does not change; "weight", the same of an argument; "beside", it
        moves what changes, and not what does not change beside it; "activation", a value that was computed is gathered;
        "sum", an operation sums more over devices than a gather of an operand sends.
      move: The first of them.
      count: How many moves there are like it.
      bytes: What one device sends for all of them in one call.
      before: What it sends for the whole program.
      constraint: The constraint that makes the whole program send the least, of those that were tried; None where none
        of them saves anything.
    """

    kind: str
    move: Move
    count: int
    bytes: int
    before: int
    constraint: Constraint | None

    def __str__(self) -> str:
        said = f"{_SAID[self.kind]}: {self.move.text}, {bytes_text(self.bytes)}; {self.move.why}"
        if self.constraint is None:
            return f"{said}; none of the constraints that were tried sends less"
        one = self.constraint
        tried = f"{one.text} on {one.value}: the program sends {bytes_text(one.bytes)} instead of"
        return f"{said}; {tried} {bytes_text(self.before)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return fields_of(self)


_SAID = {
    "loop": "in each round a loop moves what does not change",
    "weight": "in each round a loop moves an argument that does not change",
    "beside": "in each round a loop moves what changes, and not what does not change beside it",
    "activation": "what was computed is gathered",
    "sum": "a sum over devices sends more than a gather before it",
}


def costs_of(plan: Plan) -> tuple[Cost, ...]:
    """The costs of a plan, the dearest first."""
    found: dict[Any, list[Move]] = {}
    # those that divide the first dimension of an input, and along which the forward pass sums no array
    first = {axis.name for place in plan.reading.inputs if place.dims for axis in place.dims[0]}
    summed = [one for one in plan.moves if one.kind == "psum" and one.phase == "forward" and one.shape]
    data = first.difference(*({axis.name for axis in one.raw.axes} for one in summed))
    for move in plan.moves:
        if kind := _kind(move, data):
            found.setdefault((kind, move.text, move.where), []).append(move)
    dearest = sorted(found.items(), key=lambda one: -sum(move.total_bytes for move in one[1]))
    costs = []
    for i, ((kind, *_), moves) in enumerate(dearest):
        tried = _tried(plan, kind, moves[0]) if i < _MOST else None
        if kind == "sum" and tried is None:
            continue  # most sums are the cheapest way
        spent = sum(move.total_bytes for move in moves)
        costs.append(Cost(kind, moves[0], len(moves), spent, plan.total_bytes, tried))
    return tuple(costs)


def least(plan: Plan) -> Plan:
    """The plan with constraints of its costs, as long as a kernel of it sends less. Where all that uses a sum keeps a
    slice, a kernel scatters it, and sends half."""
    sent = lambda one: sum(raw.bytes * raw.count // (2 if raw.scatters else 1) for raw in one.reading.moves)
    best = plan
    for constraint in [one.constraint for one in plan.costs if one.constraint is not None]:
        best = min(best, with_asks(best, [constraint.ask]), key=sent)
    return best if best is plan else least(best)


def _kind(move: Move, data: set[str]) -> str:
    raw = move.raw
    if move.kind == "psum" and any(one.bytes < raw.bytes for one in raw.beside):
        return "sum"
    if move.asked or move.kind not in ("all_gather", "all_to_all", "ppermute"):
        return ""
    if raw.unchanging:
        return "weight" if raw.part else "loop"
    if raw.beside:
        return "beside"
    of_data = not data.isdisjoint(axis.name for axis in raw.axes)
    return "activation" if move.kind == "all_gather" and not raw.part and of_data else ""


# --- constraints ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ask:
    """A layout to ask for: of an input by its number, or of a result of an equation."""

    dims: Dims
    shape: tuple[int, ...]
    input: int | None = None
    number: Number = ()
    result: int = 0


def _tried(plan: Plan, kind: str, move: Move) -> Constraint | None:
    """The best of the constraints, if it sends less than none."""
    best, least = None, plan.total_bytes
    for ask in itertools.islice(_asks(plan, kind, move), _TRIES):
        sent = with_asks(plan, [ask]).total_bytes
        if sent < least:
            best, least = ask, sent
    return None if best is None else _said(plan, best, least)


def with_asks(plan: Plan, asks: Sequence[_Ask]) -> Plan:
    """The plan of the program with constraints; the plan itself where they divide unevenly, which JAX does not."""
    found: dict[int | None, dict[int, Any]] = {}
    try:
        for ask in asks:
            spec = PartitionSpec(*[tuple(axis.name for axis in axes) or None for axes in ask.dims])
            maker = None if ask.input is not None else id(plan.traced.equations[ask.number[-1]])
            place = ask.result if ask.input is None else ask.input
            found.setdefault(maker, {})[place] = NamedSharding(plan.traced.mesh, spec)
        return plan.again(found)
    except ValueError:
        return plan


def _asks(plan: Plan, kind: str, move: Move) -> Iterator[_Ask]:
    raw, shape = move.raw, move.shape
    for one in raw.beside:
        yield from _ask(plan, one.argument, one.maker, one.dims, one.shape)
    if kind == "sum":
        return
    if any(axis.text != axis.name for dims in (raw.source.dims, raw.target.dims) for axes in dims for axis in axes):
        return  # no string says a part of an axis
    layouts = [*([raw.target.dims] if kind != "activation" else []), *_elsewhere(move), raw.target.dims]
    for dims in dict.fromkeys(layouts):
        yield from _ask(plan, raw.argument, raw.maker, dims, shape)
    for number in (raw.user, raw.maker):
        yield from _ask(plan, None, number, raw.source.dims, shape)
    for other in plan.moves:  # what the backward pass moves, the forward pass may have moved on the same line
        if move.phase == "backward" and other.phase == "forward" and other.where == move.where:
            yield from _asks(plan, "activation", other)


def _ask(plan: Plan, argument: int | None, maker: Number, dims: Dims, shape: tuple[int, ...]) -> Iterator[_Ask]:
    if argument is not None and tuple(plan.traced.given[argument].shape) == tuple(shape):
        var, ask = plan.variables[argument], _Ask(dims, shape, input=argument)
    elif (result := _result(plan, maker, shape)) is not None:
        var, ask = plan.traced.equations[maker[-1]].outvars[result], _Ask(dims, shape, number=maker, result=result)
    else:
        return
    if not is_typed(var):  # on Explicit axes a constraint asserts what the type says
        yield ask


def _elsewhere(move: Move) -> Iterator[Dims]:
    """The layouts in which the axes that are moved divide another dimension."""
    source, target = move.raw.source.dims, move.raw.target.dims
    gone = [axis for before, behind in zip(source, target, strict=True) for axis in before if axis not in behind]
    rest = [tuple(axis for axis in axes if axis not in gone) for axes in target]
    for i, size in enumerate(move.shape):
        axes = (*rest[i], *gone)
        dims = (*rest[:i], axes, *rest[i + 1 :])
        if gone and dims not in (source, target) and size % math.prod(axis.size for axis in axes) == 0:
            yield dims


def _result(plan: Plan, number: Number, shape: Sequence[int]) -> int | None:
    """Return which result of an equation has this shape; None where that is not one alone, or nobody can name it: the
    backward pass made it, or it is kept for that."""
    eqns = [plan.traced.equations[i] for i in number]
    if not eqns or is_transposed(eqns[-1], eqns[:-1]):
        return None
    fitting = [i for i, var in enumerate(eqns[-1].outvars) if shape_of(var) == tuple(shape)]
    if len(fitting) != 1 or plan.names.kept.get(eqns[-1].outvars[fitting[0]]):
        return None
    return fitting[0]


def _said(plan: Plan, ask: _Ask, sent: int) -> Constraint:
    labels = _labels(plan, ask)
    layout = text_of(Place(ask.dims), labels, ask.shape, plan.mesh)
    if ask.input is not None:
        name = plan.traced.parameters[ask.input]
        value = f"the argument {name}"
    else:
        *callers, eqn = (plan.traced.equations[i] for i in ask.number)
        name, line = "x", short_line(line_of(eqn, callers))
        value = f"what {eqn.params.get('name', eqn.primitive.name)} gives" + (f" at {line}" if line else "")
    # inside of `auto_axes` the mesh has the types of another one
    how = "spec" if AxisType.Explicit in plan.traced.mesh.axis_types else "sharding(mesh)"
    text = f'jax.lax.with_sharding_constraint({name}, spmd.Layout("{layout}").{how})'
    return Constraint(layout, value, text, sent, ask)


def _labels(plan: Plan, ask: _Ask) -> Any:
    if ask.input is not None:
        return plan.labels[ask.input]
    *path, eqn = (plan.traced.equations[i] for i in ask.number)
    made: Mapping[Any, Any] = plan.names.made
    return made.get((tuple(map(id, path)), id(eqn)), [()] * len(eqn.outvars))[ask.result]
