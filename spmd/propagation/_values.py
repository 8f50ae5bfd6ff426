"""What the dimensions of each value are called, and how each value lies, by its equation: for those who print them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jax.extend.core import Var

from spmd import _compat
from spmd._jaxprs.facts import LayoutName
from spmd._jaxprs.lines import is_transposed
from spmd._jaxprs.walker import Domain, Equation, Held, Rule, Variable, call_of, opened, shape_of, walk
from spmd.checker._state import Axes, State, axes_of_dim, plain
from spmd.checker._table import MOVES, TABLE
from spmd.inspect._recorded import Labels, Names, Path, Recording, States, inferred_text
from spmd.language import Layout
from spmd.propagation._module import Number, Place, Reading, Typed


class WholeNames(Names):
    """The names of dimensions in code on whole arrays: constraints name them, and the layouts of arguments.

    Attributes:
      taken: The names of each equation's operands, by the equations around it and its own identity.
      kept: For each variable that an equation uses or a jaxpr returns: whether only a backward pass uses it.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self.taken: dict[tuple[Path, int], Sequence[Labels]] = {}
        self.kept: dict[Any, bool] = {}

    def keep(self, eqn: Equation, operands: Sequence[Labels], outs: Sequence[Labels]) -> Sequence[Labels]:
        self.taken[self.path, id(eqn)] = operands
        backward = is_transposed(eqn, self.callers)
        self.kept |= {atom: self.kept.get(atom, True) and backward for atom in eqn.invars if isinstance(atom, Var)}
        return super().keep(eqn, operands, outs)

    def run(self, eqn: Equation, part: Held, operands: Sequence[Labels]) -> list[Labels]:
        self.returned(part.jaxpr)
        return super().run(eqn, part, operands)

    def returned(self, jaxpr: Any) -> None:
        """Note what a jaxpr returns."""
        self.kept |= dict.fromkeys((var for var in opened(jaxpr)[0].outvars if isinstance(var, Var)), False)

    def marked(self, eqn: Equation, given: Labels) -> list[Labels]:
        if any(one.primitive.name == "shard_map" for one in self.callers):
            return super().marked(eqn, given)
        mapped = eqn.params.get("mapped", ())
        return [self.named(eqn.params["layout"], given, shape_of(eqn.outvars[0]), {}, mapped)]

    def constrained(self, eqn: Equation, given: Labels) -> list[Labels]:
        layout = _named_by(eqn)
        return [given if layout is None else self.named(layout, given, shape_of(eqn.outvars[0]), {})]

    rules: ClassVar[Mapping[str, Rule]] = {
        **Names.rules,
        "sharding_constraint": lambda walk, eqn, operands: walk.constrained(eqn, *operands),
    }


def names_of(jaxpr: Any, sizes: Mapping[str, int], layouts: Sequence[Layout | None]) -> WholeNames:
    """Walk over a program for the names of its dimensions.

    Args:
      jaxpr: The closed jaxpr.
      sizes: The sizes of the mesh axes.
      layouts: For each input a layout that names its dimensions, or None.
    """
    names = WholeNames(sizes)
    variables = opened(jaxpr)[0].invars
    blank = [names.constant(var, None) for var in variables]
    asked = _Asked()
    walk(jaxpr, range(len(blank)), asked)
    told = [own or asked.found.get(i) for i, own in enumerate(layouts or [None] * len(blank))]
    given = [
        one if layout is None else names.named(layout, one, shape_of(var), {})
        for one, layout, var in zip(blank, told, variables, strict=True)
    ]
    names.returned(jaxpr)
    walk(jaxpr, given, names)
    return names


class _Asked(Domain):
    """The layouts that kernels in auto mode ask for the inputs of a program, which have their numbers as values."""

    rules: ClassVar[Mapping[str, Rule]] = {"sharding_constraint": lambda walk, eqn, operands: walk.ask(eqn, *operands)}

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Layout | None] = {}

    def constant(self, var: Variable | None, value: Any) -> None:
        return None

    def step(self, eqn: Equation, operands: Sequence[int | None]) -> list[None]:
        return [None] * len(eqn.outvars)

    def equation(self, eqn: Equation, operands: Sequence[int | None]) -> Sequence[int | None]:
        part = call_of(eqn)  # what a loop is given is not all of an input
        return self.step(eqn, operands) if part is None else self.call(eqn, part, operands)

    def ask(self, eqn: Equation, number: int | None) -> list[None]:
        if number is not None:
            self.found.setdefault(number, _named_by(eqn))
        return [None]


def _named_by(eqn: Equation) -> Layout | None:
    """The layout of ours that a constraint asks for."""
    names = [name for _, name in reversed(_compat.name_stack(eqn)) if isinstance(name, LayoutName)]
    return names[0].layout if names else None


class Places(Recording):
    """How each value lies outside of every `shard_map`, as the module says.

    Attributes:
      open: Equations that work along a dimension which the module leaves divided, by their number, what they do, and
        the axes that divide it; with the equations around each.
    """

    def __init__(self, reading: Reading, equations: Sequence[Any]) -> None:
        super().__init__()
        self._places = reading.places
        self._number = {id(eqn): i for i, eqn in enumerate(equations)}
        sums = {move.maker for move in reading.moves if move.kind == "psum"}
        self._moved = {move.user for move in reading.moves} | sums
        self.open: dict[tuple[Number, str, Axes], Sequence[Any]] = {}

    def constant(self, var: Variable | None, value: Any) -> State | None:
        return None

    def step(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[State | None]:
        return [None] * len(eqn.outvars)

    def keep(self, eqn: Equation, operands: Sequence[Any], outs: Sequence[Any]) -> Sequence[State | None]:
        number = tuple(self._number[i] for i in (*self.path, id(eqn)))
        found = _fitted(eqn.outvars, self._places.get(number, ()))
        self._left_open(eqn, number, operands)
        return super().keep(eqn, operands, [old if new is None else new for new, old in zip(found, outs, strict=True)])

    def _left_open(self, eqn: Equation, number: Number, operands: Sequence[State | None]) -> None:
        name = eqn.primitive.name
        entry = TABLE.get(name)
        if entry is None or number in self._moved:
            return
        m = entry.map(eqn)
        for labels, operand in zip(m.operands, operands, strict=False):
            for label, dim in zip(labels, operand.dims if operand else (), strict=False):
                kind = None if label is None else m.whole.get(label, m.reduced.get(label))
                if (
                    kind
                    and kind not in MOVES
                    and (label in m.whole or kind == "position")
                    and (axes := axes_of_dim(dim))
                ):
                    self.open[number, kind, axes] = [*self.callers, eqn]

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Any]) -> Sequence[State | None]:
        return [None] * len(eqn.outvars)  # the body's own walk says how values lie there

    def join(self, one: State | None, other: State | None) -> State | None:
        return one

    def same(self, one: Any, other: Any) -> bool:
        return True

    def sliced(self, value: State | None, operand: Any) -> State | None:
        return value and value._replace(dims=value.dims[1:])

    def stacked(self, value: State | None, result: Any) -> State | None:
        return value and value._replace(dims=(plain(shape_of(result)[0]), *value.dims))


def _fitted(variables: Sequence[Any], made: Sequence[tuple[Typed, Place]]) -> list[State | None]:
    """Return which of the values that an equation became are its results: the last ones of their shapes."""
    found: list[State | None] = []
    rest = list(made)
    for var in reversed(variables):
        shape = shape_of(var)
        at = next((i for i in reversed(range(len(rest))) if rest[i][0].shape[: len(shape)] == shape), None)
        found.append(None if at is None else state_of(rest[at][1], shape))
        rest = rest if at is None else rest[:at]
    return found[::-1]


def state_of(place: Place, shape: Sequence[int]) -> State:
    """A place as the checker's state of a value."""
    parts = [math.prod(axis.size for axis in axes) for axes in place.dims]
    dims = zip(shape, parts, place.dims, strict=False)  # a key has one dimension less than what it is made of
    made = tuple(((-(-size // part), tuple(axis.text for axis in axes)),) for size, part, axes in dims)
    return State(made, partial=frozenset(axis.text for axis in place.partial))


def text_of(place: Place, labels: Labels, shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    """A place as a layout, `b/dp s {U:tp}`."""
    parts = {axis.text: axis.size for one in (*place.dims, place.partial) for axis in one}
    names = labels if len(labels) == len(shape) else ((),) * len(shape)
    return inferred_text(state_of(place, shape), names, {**sizes, **parts}).replace("scalar {", "{")


class Recorded:
    """The states of a whole program: in the bodies of `shard_map` the checker's, elsewhere those of the module.

    Attributes:
      made: As of `Recording`.
      given: As of `Recording`.
      sizes: The sizes of the mesh axes, and of their parts.
    """

    def __init__(self, states: States | None, places: Places, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.made = {} if states is None else dict(states.made)
        self.given = {**places.given, **({} if states is None else states.given)}
        for key, found in places.made.items():
            known = self.made.get(key, found)
            self.made[key] = [old if new is None else new for new, old in zip(found, known, strict=True)]
