"""Where a value comes from: read backward through a jaxpr, once there is something to tell."""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.facts import kernel_around
from spmd._jaxprs.lines import is_of_library, is_transposed, line_of
from spmd._jaxprs.primitives import of_verbs
from spmd._jaxprs.walker import Domain, Equation, Held, Role, Variable, axes_of, held, opened, shape_of, walk
from spmd.language import Layout, Size, axes_tuple, bind

# What makes a value equal along its axes, and what makes it different.
EQUAL = of_verbs("psum", "pmax", "pmin")
GATHERS = of_verbs("all_gather")
_MOVES = of_verbs("ppermute")
_DIFFERENT = (
    _MOVES | of_verbs("psum_scatter", "all_to_all", "ragged_all_to_all", "pgather") | {"axis_index", "spmd_split"}
)
# Those whose results differ whatever their operands are: nothing behind them is a reason.
_ENDS = (EQUAL | GATHERS | _DIFFERENT) - _MOVES
_GATHERED = EQUAL | GATHERS | {"spmd_assert_equal"}


Atoms = tuple[Any, ...]
"""Variables, of which another one is made."""


@dataclass(frozen=True)
class Origin:
    """One reason why a value is as it is on one axis."""

    kind: str  # "input", "gather", or the name of the primitive
    axis: str
    label: str = ""
    eqn: Any = None
    callers: tuple[Equation, ...] = ()


class History(Domain):
    """Which equation made each variable of a jaxpr, at any depth, and which operands its inputs are.

    In this walk the value of a variable is the variable itself: what it is made of is kept beside.

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
        super().__init__()
        self.made: dict[Any, tuple[Any, int, tuple[Any, ...]]] = {}
        self.made_of: dict[Any, Atoms] = {}  # the input of a jaxpr, or the result of an equation that holds one
        self.inputs: dict[Any, tuple[str, frozenset[str]]] = {}
        self.order: dict[int, int] = {}
        self.arguments: dict[Any, tuple[str, Layout]] = {}
        self._names, self._layouts = tuple(names), tuple(layouts)
        invars, self._results = opened(jaxpr)[0].invars, opened(jaxpr)[0].outvars
        for i, (var, axes) in enumerate(zip(invars, varying, strict=False)):
            self.inputs[var] = f"input {i}, which varies over {', '.join(axes)}", frozenset(axes)
        walk(jaxpr, [(var,) for var in invars], self)

    # --- the walk

    def constant(self, var: Variable | None, value: Any) -> Atoms:
        return () if var is None else (var,)

    def join(self, one: Atoms, other: Atoms) -> Atoms:
        return tuple(dict.fromkeys((*one, *other)))

    def decided(self, value: Atoms, predicate: Atoms) -> Atoms:
        return self.join(value, predicate)

    def step(self, eqn: Equation, operands: Sequence[Atoms]) -> list[Atoms]:
        return [()] * len(eqn.outvars)

    def equation(self, eqn: Equation, operands: Sequence[Atoms]) -> list[Atoms]:
        self.order.setdefault(id(eqn), len(self.order))
        callers = tuple(self.callers)
        for i, (var, atoms) in enumerate(zip(eqn.outvars, super().equation(eqn, operands), strict=True)):
            self.made[var] = eqn, i, callers
            self._add(var, atoms)
        return [(var,) for var in eqn.outvars]

    def run(self, eqn: Equation, part: Held, operands: Sequence[Atoms]) -> list[Atoms]:
        inputs = opened(part.jaxpr)[0].invars
        if part.role == Role.MAP:
            self._label(eqn, inputs)
        else:
            for var, atoms in zip(inputs, operands, strict=True):
                self._add(var, atoms)
        return super().run(eqn, part, [(var,) for var in inputs])

    def _add(self, var: Variable, atoms: Atoms) -> None:
        if atoms:
            self.made_of[var] = self.join(self.made_of.get(var, ()), atoms)

    def _label(self, eqn: Equation, inputs: Sequence[Any]) -> None:
        """Record what messages call the inputs of a body, and what strings say of them."""
        kernel = kernel_around(tuple(self.callers))
        leaves = kernel.arguments if kernel else ()
        labels = labels_of(opened(eqn.params["jaxpr"])[0], len(inputs), self._names or [leaf.path for leaf in leaves])
        for var, label, spec in zip(inputs, labels, eqn.params["in_specs"], strict=True):
            axes = frozenset(axis for entry in _compat.partitions(spec) for axis in axes_tuple(entry))
            self.inputs.setdefault(var, (f"{label}, which is divided by {shown_spec(spec)}", axes))
        told = list(zip(self._names, self._layouts, strict=False)) or [(leaf.path, leaf.layout) for leaf in leaves]
        if len(told) <= len(inputs):  # constants that JAX hoisted come before the arguments
            self.arguments.update(zip(inputs[len(inputs) - len(told) :], told, strict=True))
        self._names = ()

    # --- questions

    def sizes(self, mesh: Mapping[str, int]) -> Mapping[str, Size]:
        """The sizes of the names of the arguments."""
        return bind([(n, shape_of(v), lies) for v, (n, lies) in self.arguments.items()], mesh, local=True).sizes

    def behind(self, atom: Variable, stop: Callable[[Any, tuple[Any, ...]], bool] | None = None) -> Iterator[Any]:
        """The variables that a value is made of, nearest first. `stop(eqn, callers)` ends the way back."""
        seen: set[Any] = set()
        todo = collections.deque([atom])
        while todo:
            var = todo.popleft()
            if isinstance(var, Literal) or var in seen:
                continue
            seen.add(var)
            yield var
            made = self.made.get(var)
            if made is not None and stop is not None and stop(made[0], made[2]):
                continue
            todo += self.operands(var)

    def operands(self, var: Variable) -> Sequence[Any]:
        """Return what a value is made of at once."""
        made = self.made.get(var)
        return self.made_of.get(var, made[0].invars if made is not None else ())

    def sources(self, atom: Variable, axis: str) -> list[Origin]:
        """Return why a value differs along an axis, oldest first."""
        found: dict[Any, Origin] = {}
        marks: list[Origin] = []
        ends = lambda eqn, _: axis in axes_of(eqn) and eqn.primitive.name in _ENDS
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

    def gathers(self, atom: Variable, axis: str) -> list[Origin]:
        """The gathers that made a value equal along an axis."""
        found: dict[int, Origin] = {}

        def ends(eqn: Equation, _: Any) -> bool:
            return axis in (*axes_of(eqn), *eqn.params.get("moving", ())) and eqn.primitive.name in _GATHERED

        for var in self.behind(atom, ends):
            made = self.made.get(var)
            if made is not None:
                eqn, _, callers = made
                copies = eqn.primitive.name == "spmd_assert_equal" and eqn.params.get("copies")
                if axis in axes_of(eqn) and (eqn.primitive.name == "all_gather" or copies):
                    found[id(eqn)] = Origin("gather", axis, "", eqn, callers)
        return sorted(found.values(), key=lambda o: self.order[id(o.eqn)])

    def made_by(self, atom: Variable, name: str) -> bool:
        """Return whether an equation of this primitive is among those that made a value."""
        return any(var in self.made and self.made[var][0].primitive.name == name for var in self.behind(atom))

    def declared(self, atom: Variable, axes: Sequence[str]) -> bool:
        """Return whether a string says that a value, or what it is made of, is a partial sum along these axes."""
        for var in self.behind(atom):
            made = self.made.get(var)
            said = made[0].params if made is not None and made[0].primitive.name == "spmd_layout" else None
            if said is not None and set(axes) <= {*said["layout"].unreduced}:
                return True
        return False

    def sum_behind(self, atom: Variable) -> Any:
        """The value that another one is a multiple of, in another shape."""
        while (made := self.producer(atom)) is not None:
            operands = [x for x in made[0].invars if not isinstance(x, Literal)]
            if len(operands) != 1 or made[0].primitive.name.startswith("reduce_") or held(made[0]):
                break
            [atom] = operands
        return atom

    @functools.cached_property
    def forward(self) -> set[Any]:
        """What results are made of without a backward pass in between."""
        found: set[Any] = set()
        ends = lambda eqn, callers: is_transposed(eqn, callers) or eqn.outvars[0] in found
        for atom in self._results:
            found |= set(self.behind(atom, ends))
        return found

    def producer(self, atom: Variable) -> tuple[Any, tuple[Any, ...]] | None:
        """The equation that made a value, and the equations around it."""
        made = None if isinstance(atom, Literal) else self.made.get(atom)
        return None if made is None else (made[0], made[2])

    def line(self, atom: Variable) -> str:
        """The nearest line of the user's among those that made a value."""
        made = (self.made[var] for var in self.behind(atom) if var in self.made)
        return next((line for eqn, _, callers in made if (line := line_of(eqn, callers))), "")


def labels_of(body: Any, count: int, names: Sequence[str] = ()) -> list[str]:
    """Return what messages call the inputs. Constants that JAX hoisted out of the body come before the arguments."""
    names = names or getattr(getattr(body, "debug_info", None), "arg_names", None) or ()
    hoisted = count - len(names)
    if hoisted < 0:
        return [f"input {i}" for i in range(count)]
    named = [f"argument {name}" if name else f"input {i + hoisted}" for i, name in enumerate(names)]
    return [*(f"input {i}" for i in range(hoisted)), *named]


def shown_spec(spec: Any) -> str:
    """A spec without the extras that differ from one JAX to the next."""
    return "P(" + ", ".join(repr(entry) for entry in _compat.partitions(spec)) + ")"


# --- calls -----------------------------------------------------------------------------------------------------------

# The user's call that made an equation: nobody can write a collective into a function that is not theirs.

_ROOMS = ("spmd.fft", "spmd.stencil", "spmd.linalg", "spmd", "spmd.parallel", "spmd.nn")
# Functions of JAX whose like has another name here.
_OTHERWISE = {
    "pad": "spmd.stencil.halo",
    "gather": "spmd.take",
    "logsumexp": 'spmd.reduce(..., "logsumexp")',
    "tree_norm": "spmd.parallel.global_norm",
}


class Call(NamedTuple):
    """One expression of the user's, and the function of a library that it calls.

    Attributes:
      expression: What was running, and where the expression begins and ends there; None where nobody knows.
      body: The jaxpr of the function, if JAX traced it alone. It may have been traced at another call.
      names: The functions that were running inside of it, outermost first.
    """

    expression: Any
    body: Any
    names: tuple[str, ...]

    def is_of(self, other: Call) -> bool:
        """Tell whether both are the same call."""
        same = self.expression is not None and self.expression == other.expression
        return same or (self.body is not None and self.body is other.body)

    @property
    def namesake(self) -> str | None:
        """The public function of this package with the name of one that was running, or that is like the call."""
        named = itertools.product(self.names, _ROOMS)
        like = (_OTHERWISE.get(name, f"{room}.{name}") for name, room in named if name in _public(room))
        return next((_OTHERWISE[name] for name in self.names[:1] if name in _OTHERWISE), next(like, None))

    @property
    def operand(self) -> str | None:
        """The array that it is called on, as the user wrote it: `x**2` of `jnp.sum(x**2, 1)` and of `(x**2).sum(1)`."""
        if self.expression is None:
            return None
        code, (first, start, last, end) = self.expression
        lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
        if len(lines) != 1:
            return None
        text = lines[0][start:end].decode()
        try:
            called = ast.parse(text, mode="eval").body
        except SyntaxError:
            return None
        if not isinstance(called, ast.Call):
            return None
        of = called.func.value if isinstance(called.func, ast.Attribute) else None
        owner = of
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        function = of is None or (_is_module(owner.id, code) if isinstance(owner, ast.Name) else False)
        node = (called.args or [None])[0] if function else None if function is None else of
        return None if node is None else ast.get_source_segment(text, node)


@functools.cache
def _public(room: str) -> Sequence[str]:
    """The public names of a room. The package loads a room when it is asked for."""
    return functools.reduce(getattr, room.split(".")[1:], sys.modules["spmd"]).__all__


def _is_module(name: str, code: Any) -> bool | None:
    """Return whether a name is a module and not an array where this code runs; None where nobody knows. A cell of a
    notebook has its imports in another one."""
    if name in _imported(code.co_filename):
        return True
    if name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return False
    return True if isinstance(vars(sys.modules["__main__"]).get(name), types.ModuleType) else None


@functools.lru_cache(maxsize=64)
def _imported(file: str) -> frozenset[str]:
    """The names that a file imports."""
    found = (node for node in ast.walk(ast.parse("".join(linecache.getlines(file)))) if hasattr(node, "names"))
    names = (one for node in found if not isinstance(node, ast.Global | ast.Nonlocal) for one in node.names)
    return frozenset(one.asname or one.name.partition(".")[0] for one in names)


def call_around(eqn: Equation, callers: Sequence[Equation]) -> Call:
    """Return the user's call that an equation is a part of."""
    inside = list(itertools.takewhile(lambda one: one.primitive.name != "shard_map", reversed(callers)))
    library = next(filter(_runs_library, reversed(inside)), None)
    stack = _compat.call_stack(eqn if library is None else library)
    running = itertools.takewhile(lambda one: is_of_library(one[0].co_filename), stack)
    names = [code.co_qualname.partition(".")[0] for code, _ in running]
    expression = stack[len(names)] if len(names) < len(stack) else None
    if library is None:
        return Call(expression, None, tuple(names[::-1]))
    return Call(expression, opened(library.params["jaxpr"])[0], (*names[::-1], library.params.get("name", "")))


def given_to(walk: Any, atom: Variable, call: Call) -> Iterator[Any]:
    """The variables that a call was given, of those that a value of it is made of. A function that is called again has
    the same jaxpr, and what it is given then is not known yet."""
    outside = lambda *where: not call.is_of(call_around(*where))
    for var in filter(walk.known.__contains__, walk.history.behind(atom, outside)):
        made = walk.history.producer(var)
        if not walk.history.operands(var) if made is None else outside(*made):
            yield var


def _runs_library(eqn: Equation) -> bool:
    """Return whether an equation calls a function of a library that was traced alone."""
    jaxpr = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
    file = None if jaxpr is None else getattr(opened(jaxpr)[0].debug_info, "func_filename", None)
    return file is not None and is_of_library(file)
