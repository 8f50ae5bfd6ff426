"""Where a value comes from: read backward through a jaxpr, once there is something to tell."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from spmd._facts import kernel_around
from spmd._jaxprs import Role, axes_of, held, opened
from spmd.checker._source import line_of
from spmd.language import Layout, axes_tuple

# What makes a value equal along its axes, and what makes it different.
EQUAL = frozenset(["psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"])
_GATHERS = frozenset(("all_gather", "all_gather_invariant", "all_gather_reduced"))
_DIFFERENT = frozenset(
    [
        "axis_index",
        "ppermute",
        "reduce_scatter",
        "unreduced_reduce_scatter",
        "psum_scatter",
        "all_to_all",
        "ragged_all_to_all",
        "pgather",
        "spmd_split",
    ]
)
# Those whose results differ whatever their operands are: nothing behind them is a reason.
_ENDS = (EQUAL | _GATHERS | _DIFFERENT) - {"ppermute"}
_GATHERED = EQUAL | _GATHERS | {"spmd_assert_equal"}


@dataclass(frozen=True)
class Origin:
    """One reason why a value is as it is on one axis."""

    kind: str  # "input", "gather", or the name of the primitive
    axis: str
    label: str = ""
    eqn: Any = None
    callers: tuple[Any, ...] = ()


class History:
    """Which equation made each variable of a jaxpr, at any depth, and which operands its inputs are.

    Args:
      jaxpr: The whole of it.
      names: What messages call the arguments of the first body.
      varying: The axes on which each input of the jaxpr itself varies.
      layouts: The layouts of the arguments.
    """

    def __init__(
        self,
        jaxpr: Any,
        names: Sequence[str] = (),
        varying: Sequence[Sequence[str]] = (),
        layouts: Sequence[Layout] = (),
    ) -> None:
        self.made: dict[Any, tuple[Any, int, tuple[Any, ...]]] = {}
        self.given: dict[Any, list[Any]] = {}
        self.inside: dict[Any, list[Any]] = {}
        self.inputs: dict[Any, tuple[str, frozenset[str]]] = {}
        self.order: dict[int, int] = {}
        self.arguments: dict[Any, tuple[str, Layout]] = {}
        self._names, self._layouts = tuple(names), tuple(layouts)
        inner = opened(jaxpr)[0]
        for i, (var, axes) in enumerate(zip(inner.invars, varying, strict=False)):
            self.inputs[var] = f"input {i}, which varies over {', '.join(axes)}", frozenset(axes)
        self._read(inner, ())

    def _read(self, jaxpr: Any, callers: tuple[Any, ...]) -> None:
        for eqn in jaxpr.eqns:
            self.order[id(eqn)] = len(self.order)
            for i, var in enumerate(eqn.outvars):
                self.made[var] = eqn, i, callers
            for part in held(eqn) if eqn.params else ():
                if part.role in (Role.CALL, Role.LOOP, Role.TEST, Role.BRANCH, Role.MAP):
                    self._enter(eqn, part, callers)

    def _enter(self, eqn: Any, part: Any, callers: tuple[Any, ...]) -> None:
        inner = opened(part.jaxpr)[0]
        for var, atom in zip(inner.invars, part.of(eqn.invars), strict=True):
            if part.role != Role.MAP:
                self.given.setdefault(var, []).append(atom)
        if part.role == Role.MAP:
            kernel = kernel_around(callers)
            names = self._names or [leaf.path for leaf in kernel.arguments] if kernel else self._names
            labels = labels_of(inner, len(inner.invars), names)
            for var, label, spec in zip(inner.invars, labels, eqn.params["in_specs"], strict=True):
                axes = frozenset(axis for entry in spec.partitions for axis in axes_tuple(entry))
                self.inputs.setdefault(var, (f"{label}, which is divided by {shown_spec(spec)}", axes))
            told = list(zip(self._names, self._layouts, strict=False))
            told = told or ([(leaf.path, leaf.layout) for leaf in kernel.arguments] if kernel else [])
            if len(told) <= len(inner.invars):  # constants that JAX hoisted come before the arguments
                self.arguments.update(zip(inner.invars[len(inner.invars) - len(told) :], told, strict=True))
            self._names = ()
        if part.role == Role.LOOP:  # a carry is also what the step before gave
            carries = len(part.stacked) - sum(part.stacked)
            first = len(inner.invars) - sum(part.sliced) - carries
            for var, atom in zip(inner.invars[first : first + carries], inner.outvars[:carries], strict=True):
                self.given[var].append(atom)
        if part.role == Role.TEST:  # it asks the carries of each step, and decides how many there are
            for var, atom in zip(inner.invars[-len(eqn.outvars) :], eqn.outvars, strict=True):
                self.given[var].append(atom)
            for var in eqn.outvars:
                self.inside.setdefault(var, []).append(inner.outvars[0])
        else:
            for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
                self.inside.setdefault(var, []).append(atom)
        if part.role == Role.BRANCH:
            for var in eqn.outvars:
                self.inside[var].append(eqn.invars[0])
        self._read(inner, (*callers, eqn))

    def behind(self, atom: Any, stop: Callable[[Any], bool]) -> Iterator[Any]:
        """The variables that a value is made of, nearest first. `stop(eqn)` ends the way back at an equation."""
        seen: set[Any] = set()
        todo = collections.deque([atom])
        while todo:
            var = todo.popleft()
            if isinstance(var, Literal) or var in seen:
                continue
            seen.add(var)
            yield var
            made = self.made.get(var)
            if made is not None and stop(made[0]):
                continue
            if var in self.inside:
                todo += self.inside[var]
            elif made is not None:
                todo += made[0].invars
            todo += self.given.get(var, ())

    def sources(self, atom: Any, axis: str) -> list[Origin]:
        """Why a value differs along an axis, oldest first."""
        found: dict[Any, Origin] = {}
        marks: list[Origin] = []
        ends = lambda eqn: axis in axes_of(eqn) and eqn.primitive.name in _ENDS
        for var in self.behind(atom, ends):
            if var in self.inputs:
                label, axes = self.inputs[var]
                if axis in axes:
                    found[var] = Origin("input", axis, label)
            made = self.made.get(var)
            if made is None:
                continue
            eqn, _, callers = made
            name = eqn.primitive.name
            if name in _DIFFERENT and axis in (*axes_of(eqn), eqn.params.get("axis")):
                found[id(eqn)] = Origin(name, axis, "", eqn, callers)
            elif name == "spmd_layout" and axis in eqn.params["layout"].axes:
                marks.append(Origin(name, axis, "", eqn, callers))
        inputs = [found[var] for var in self.inputs if var in found]
        made_ones = sorted((o for o in found.values() if o.eqn is not None), key=lambda o: self.order[id(o.eqn)])
        return [*inputs, *made_ones] or marks[-1:]

    def gathers(self, atom: Any, axis: str) -> list[Origin]:
        """The gathers that made a value equal along an axis."""
        found: dict[int, Origin] = {}

        def ends(eqn: Any) -> bool:
            return axis in (*axes_of(eqn), *eqn.params.get("moving", ())) and eqn.primitive.name in _GATHERED

        for var in self.behind(atom, ends):
            made = self.made.get(var)
            if made is not None:
                eqn, _, callers = made
                copies = eqn.primitive.name == "spmd_assert_equal" and eqn.params.get("copies")
                if axis in axes_of(eqn) and (eqn.primitive.name == "all_gather" or copies):
                    found[id(eqn)] = Origin("gather", axis, "", eqn, callers)
        return sorted(found.values(), key=lambda o: self.order[id(o.eqn)])

    def made_by(self, atom: Any, name: str) -> bool:
        """Whether an equation of this primitive is among those that made a value."""
        return any(var in self.made and self.made[var][0].primitive.name == name for var in self.behind(atom, _never))

    def declared(self, atom: Any, axes: Sequence[str]) -> bool:
        """Whether a string says that a value, or what it is made of, is a partial sum along these axes."""
        for var in self.behind(atom, _never):
            made = self.made.get(var)
            said = made[0].params if made is not None and made[0].primitive.name == "spmd_layout" else None
            if said is not None and set(axes) <= {*said["layout"].unreduced}:
                return True
        return False

    def sum_behind(self, atom: Any) -> Any:
        """The value that another one is a multiple of, in another shape."""
        while (made := self.producer(atom)) is not None:
            operands = [x for x in made[0].invars if not isinstance(x, Literal)]
            if len(operands) != 1 or made[0].primitive.name.startswith("reduce_") or held(made[0]):
                break
            [atom] = operands
        return atom

    def producer(self, atom: Any) -> tuple[Any, tuple[Any, ...]] | None:
        """The equation that made a value, and the equations around it."""
        made = None if isinstance(atom, Literal) else self.made.get(atom)
        return None if made is None else (made[0], made[2])

    def line(self, atom: Any) -> str:
        """The nearest line of the user's among those that made a value."""
        made = (self.made[var][0] for var in self.behind(atom, _never) if var in self.made)
        return next(filter(None, map(line_of, made)), "")


def _never(eqn: Any) -> bool:
    return False


def labels_of(body: Any, count: int, names: Sequence[str] = ()) -> list[str]:
    """What messages call the inputs. Constants that JAX hoisted out of the body come before the arguments."""
    names = names or getattr(getattr(body, "debug_info", None), "arg_names", None) or ()
    hoisted = count - len(names)
    if hoisted < 0:
        return [f"input {i}" for i in range(count)]
    named = [f"argument {name}" if name else f"input {i + hoisted}" for i, name in enumerate(names)]
    return [*(f"input {i}" for i in range(hoisted)), *named]


def shown_spec(spec: Any) -> str:
    """A spec without the extras that differ from one JAX to the next."""
    return "P(" + ", ".join(repr(entry) for entry in spec.partitions) + ")"
