"""The changes of layout that the compiler's plan has, each with its string, its line, its bytes and its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Var
from jax.sharding import AxisType

from spmd import _compat
from spmd._jaxprs.facts import CallName
from spmd._jaxprs.lines import LineName, gradient_line, is_transposed, line_of
from spmd._jaxprs.walker import Equation, shape_of
from spmd._text import bytes_text
from spmd.checker._table import TABLE
from spmd.inspect._program import of_sharding
from spmd.inspect._recorded import Labels
from spmd.inspect._reports import fields_of
from spmd.propagation._module import Number, RawMove
from spmd.propagation._values import WholeNames, text_of

# Primitives whose own work is to put an array somewhere: the user asked for it.
_SUMS = ("psum", "psum_scatter")
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
      inputs: What the dimensions of the program's inputs are called.
      variables: The inputs.
    """

    def __init__(
        self,
        equations: Sequence[Any],
        names: WholeNames,
        sizes: Mapping[str, int],
        inputs: Sequence[Labels],
        variables: Sequence[Any],
    ) -> None:
        self._variables = variables
        self._equations, self._names, self._sizes, self._inputs = equations, names, sizes, inputs
        self._asking: dict[Any, list[tuple[Any, Any]]] = {}
        for eqn in equations:
            sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
            if eqn.primitive.name in _ASKED and isinstance(eqn.invars[0], Var):
                dims = of_sharding(sharding, len(shape_of(eqn.invars[0])), sizes)
                self._asking.setdefault(eqn.invars[0], []).append((eqn, dims))

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
            raw.kind,
            tuple(axis.text for axis in raw.axes),
            raw.group_size,
            raw.bytes,
            raw.count,
            raw.exact,
            CallName(f'{raw.kind}("{pattern}")', raw.kind, pattern),
            source,
            target,
            line,
            self._why(raw, labels, eqn),
            "backward" if backward else "forward",
            any("rematted_computation" in str(one.source_info.name_stack) for one in eqns),
            raw.kind not in _SUMS and eqn is not None and eqn.primitive.name in _ASKED,
            eqn is not None and _is_typed(eqn),
            raw.branch,
            raw.type.dtype,
            raw.type.shape,
            raw,
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
        if raw.argument is not None and len(known := self._inputs[raw.argument]) == len(shape):
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
            return f"{name or 'the result'} adds up what is divided over {along}{_asked_sum(eqn)}{kept}"
        if name in _ASKED:
            return {"shard_map": "the specs of a shard_map ask for it"}.get(name, f"a {name} asks for it")
        if not raw.user:
            return "the result is to lie so"
        pairs = zip(labels, raw.type.shape, raw.source.dims, raw.target.dims, strict=True)
        whole = [_called(one, size) for one, size, before, behind in pairs if len(behind) < len(before)]
        if raw.kind in ("all_gather", "all_to_all") and whole:
            pointwise = name in TABLE and TABLE[name].map is TABLE["add"].map
            return (
                f"{name} takes it so, as it lies beside it"
                if pointwise
                else f"{name} needs {' and '.join(whole)} whole"
            )
        return f"{name} takes it so"


def _is_typed(eqn: Equation) -> bool:
    """Return whether the types of Explicit axes ask for what an equation moves."""
    sharding = eqn.params.get("out_sharding") if eqn.primitive.name != "reshard" else eqn.params["dst_sharding"]
    return bool(sharding is not None and AxisType.Explicit in sharding.mesh.axis_types)


def _asked_sum(eqn: Any) -> str:
    """Return what the types say of a sum over devices."""
    if eqn is None or not _is_typed(eqn):
        return ""
    left = _compat.unreduced_spec(eqn.params["out_sharding"].spec) if eqn.primitive.name != "reshard" else ()
    return ", and a reshard takes the sum" if left else ", and its out_sharding= has no partial sum"


def _called(label: Sequence[tuple[str, int]], size: int) -> str:
    return " ".join(name for name, _ in label) or f"the dimension of {size}"
