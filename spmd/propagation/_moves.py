"""A plan in the words of its program: the names of dimensions, where values lie, and each change of layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jax.extend.core import Var
from jax.sharding import AxisType

from spmd import _compat
from spmd._jaxprs.facts import CallName, LayoutName
from spmd._jaxprs.lines import LineName, gradient_line, is_transposed, line_of
from spmd._jaxprs.primitives import PRIMITIVES, UNKNOWN
from spmd._jaxprs.walker import Domain, Equation, Held, Rule, call_of, opened, shape_of, walk
from spmd._text import bytes_text, fields_of
from spmd.checker._names import Labels
from spmd.checker._state import State, plain
from spmd.inspect._program import of_sharding
from spmd.inspect._recorded import Names, Path, Recording, States, inferred_text
from spmd.language import Layout
from spmd.propagation._module import Number, Place, RawMove, Reading, Typed


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
    """How each value lies outside of every `shard_map`, as the module says."""

    def __init__(self, reading: Reading, equations: Sequence[Any]) -> None:
        super().__init__()
        self._places = reading.places
        self._number = {id(eqn): i for i, eqn in enumerate(equations)}

    def keep(self, eqn: Equation, operands: Sequence[Any], outs: Sequence[Any]) -> Sequence[State | None]:
        number = tuple(self._number[i] for i in (*self.path, id(eqn)))
        found = _fitted(eqn.outvars, self._places.get(number, ()))
        return super().keep(eqn, operands, [old if new is None else new for new, old in zip(found, outs, strict=True)])

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


# --- the changes of layout that the plan has, each with its string, its line, its bytes and its reason ----------------


# Primitives whose own work is to put an array somewhere: the user asked for it.
_SUMS = ("psum", "psum_scatter")
_TURNS = ("transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", "broadcast_in_dim")
_ASKED = ("sharding_constraint", "reshard", "shard_map", "layout_constraint")


@dataclass(frozen=True)
class Move:
    """A change of layout that the compiler needs.

    Attributes:
      kind: `all_gather`, `psum` (any all-reduce), `psum_scatter`, `all_to_all`, `ppermute`.
      axes: The mesh axes it runs over. Of a part of an axis, its name as Shardy writes it, `tp:(1)2`.
      group_size: Devices per group.
      bytes: Bytes that one device sends, one execution; as `spmd.inspect.Collective` counts them.
      count: How often one call runs it, scans multiplied out.
      exact: Whether `count` is certain. In a `while` it is counted once, in a branch as taken.
      text: The verb that does the same, `all_gather("b/dp s d -> b s d")`.
      source: How the array lies before, `b/dp s d`.
      target: How it lies behind.
      where: `file:line (function)`, the user's line that needs it.
      why: The reason, in words.
      phase: "forward" or "backward".
      recomputed: Whether a `jax.checkpoint` runs it again in the backward pass.
      asked: Whether the user asked for it, by a constraint, a `reshard` or the specs of a `shard_map`.
      typed: Whether the user's types ask for it, on Explicit axes: a `reshard`, or an `out_sharding=`.
      branch: Whether it stands in a branch.
      dtype: The dtype of the array, as the compiler calls it.
      shape: Its whole shape.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    count: int
    exact: bool
    text: str
    source: str
    target: str
    where: LineName
    why: str
    phase: str
    recomputed: bool
    asked: bool
    typed: bool
    branch: bool
    dtype: str
    shape: tuple[int, ...]
    raw: RawMove = field(repr=False, compare=False)

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call of the program."""
        return self.bytes * self.count

    @property
    def said(self) -> str:
        """What it sends, and why."""
        times = f" in each of {self.count} rounds" if self.count > 1 else ""
        return f"sends {bytes_text(self.bytes)}{times}: {self.why}"

    def __str__(self) -> str:
        return f"{self.text} {self.said}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**fields_of(self), "total_bytes": self.total_bytes}


class Reader:
    """Makes `Move`s of the moves of a module.

    Args:
      equations: The equations of the program by their numbers.
      names: What their dimensions are called.
      sizes: The sizes of the mesh axes.
      variables: The program's inputs.
    """

    def __init__(
        self, equations: Sequence[Any], names: WholeNames, sizes: Mapping[str, int], variables: Sequence[Any]
    ) -> None:
        self._equations, self._names, self._sizes, self._variables = equations, names, sizes, variables
        self._asking: dict[Any, list[tuple[Any, Any]]] = {}
        for eqn in equations:
            sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            for var in eqn.invars[:1] if eqn.primitive.name in _ASKED else ():  # a shard_map may have none
                if isinstance(var, Var):
                    dims = of_sharding(sharding, len(shape_of(var)), sizes)
                    self._asking.setdefault(var, []).append((eqn, dims))
        self._typed: dict[int, bool] = {}  # the equations whose results types ask for, and whether by a reshard behind
        taken: set[Any] = set()  # what a `reshard` takes, as the end of `jax.sharding.auto_axes` has one
        for eqn in reversed(equations):
            behind = not taken.isdisjoint(eqn.outvars)
            if _is_typed(eqn) or behind:
                self._typed[id(eqn)] = behind and not _is_typed(eqn)
            if (_is_typed(eqn) and eqn.primitive.name == "reshard") or (behind and eqn.primitive.name in _TURNS):
                taken.update(atom for atom in eqn.invars if isinstance(atom, Var))

    def move(self, raw: RawMove) -> Move:
        eqns = [self._equations[i] for i in raw.user or raw.maker]
        if raw.kind not in _SUMS and (constraint := self._constraint(raw)) is not None:
            eqns = [*(self._equations[i] for i in raw.maker[:-1]), constraint]
        eqn, callers = (eqns[-1], eqns[:-1]) if eqns else (None, [])
        backward = eqn is not None and is_transposed(eqn, callers)
        labels = self._labels(raw)
        source, target = (text_of(p, labels, raw.type.shape, self._sizes) for p in (raw.source, raw.target))
        pattern = f"{source} -> {target}"
        line = LineName() if eqn is None else line_of(eqn, callers) or (gradient_line(eqn) if backward else LineName())
        return Move(
            **{name: getattr(raw, name) for name in ("kind", "group_size", "bytes", "count", "exact", "branch")},
            axes=tuple(axis.text for axis in raw.axes),
            text=CallName(f'{raw.kind}("{pattern}")', raw.kind, pattern),
            source=source,
            target=target,
            where=line,
            why=self._why(raw, labels, eqn),
            phase="backward" if backward else "forward",
            recomputed=any("rematted_computation" in str(one.source_info.name_stack) for one in eqns),
            asked=raw.kind not in _SUMS and eqn is not None and eqn.primitive.name in _ASKED,
            typed=id(eqn) in self._typed,
            dtype=raw.type.dtype,
            shape=raw.type.shape,
            raw=raw,
        )

    def _constraint(self, raw: RawMove) -> Any:
        """The constraint that asks for a move, of which the module keeps the layout alone."""
        value = self._equations[raw.maker[-1]] if raw.maker else None
        atoms = self._variables if value is None else value.outvars
        key = (
            raw.argument
            if value is None
            else next((i for i, v in enumerate(atoms) if shape_of(v) == raw.type.shape), None)
        )
        wanted = tuple(tuple(axis.name for axis in axes) for axes in raw.target.dims)
        asking = self._asking.get(atoms[key], ()) if key is not None else ()
        return next((eqn for eqn, dims in asking if dims == wanted), None)

    # --- names --------------------------------------------------------------------------------------------

    def _labels(self, raw: RawMove) -> Labels:
        """Return what the dimensions are called of what is moved: as its maker says, else as its user does."""
        shape = raw.type.shape
        best: Labels = ((),) * len(shape)
        if raw.argument is not None and len(known := self._names.known[self._variables[raw.argument]]) == len(shape):
            best = known
        for number, table, atoms in (
            (raw.maker, self._names.made, "outvars"),
            (raw.user, self._names.taken, "invars"),
        ):
            found = self._known(number, table, atoms, shape)
            best = tuple(own or more for own, more in zip(best, found, strict=True)) if found else best
        return best

    def _known(self, number: Number, table: Any, atoms: str, shape: tuple[int, ...]) -> Labels | None:
        if not number:
            return None
        *path, eqn = (self._equations[i] for i in number)
        labels = table.get((tuple(map(id, path)), id(eqn)), ())
        alike = [one for one, atom in zip(labels, getattr(eqn, atoms), strict=False) if shape_of(atom) == shape]
        return next((one for one in alike if any(one)), None)

    # --- reasons ------------------------------------------------------------------------------------------

    def _why(self, raw: RawMove, labels: Labels, eqn: Any) -> str:
        name = "" if eqn is None else eqn.primitive.name
        if raw.kind in _SUMS:
            along = ", ".join(axis.text for axis in raw.axes)
            kept = "; only a slice of it is kept, so some compilers make a psum_scatter of it" if raw.scatters else ""
            return f"{name or 'the result'} adds up what is divided over {along}{self._asked_sum(eqn)}{kept}"
        if raw.source.partial and not raw.target.partial:
            return f"{name} compares what each device has found over {', '.join(axis.text for axis in raw.axes)}"
        if name in _ASKED:
            return {"shard_map": "the specs of a shard_map ask for it"}.get(name, f"a {name} asks for it")
        if not raw.user:
            return "the result is to lie so"
        pairs = zip(labels, raw.type.shape, raw.source.dims, raw.target.dims, strict=True)
        whole = [_called(one, size) for one, size, before, behind in pairs if len(behind) < len(before)]
        if raw.kind in ("all_gather", "all_to_all") and whole:
            pointwise = PRIMITIVES.get(name, UNKNOWN).pointwise
            return (
                f"{name} takes it so, as it lies beside it"
                if pointwise
                else f"{name} needs {' and '.join(whole)} whole"
            )
        return f"{name} takes it so"

    def _asked_sum(self, eqn: Any) -> str:
        """Return what the types say of a sum over devices."""
        if id(eqn) not in self._typed:
            return ""
        if self._typed[id(eqn)]:
            return ", and the out_sharding= around it has no partial sum"
        left = _compat.unreduced_spec(eqn.params["out_sharding"].spec) if eqn.primitive.name != "reshard" else ()
        return ", and a reshard takes the sum" if left else ", and its out_sharding= has no partial sum"


def _is_typed(eqn: Equation) -> bool:
    """Return whether the types of Explicit axes ask for what an equation moves."""
    sharding = eqn.params.get("out_sharding") if eqn.primitive.name != "reshard" else eqn.params["dst_sharding"]
    return bool(sharding is not None and AxisType.Explicit in sharding.mesh.axis_types)


def _called(label: Sequence[tuple[str, int]], size: int) -> str:
    return " ".join(name for name, _ in label) or f"the dimension of {size}"
