"""What every equation gave: its states and the names of its dimensions, kept for those who show a program.

The pass of a kernel's first call keeps nothing. These walks run when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd import _compat
from spmd._jaxprs.walker import Domain, Equation, Held, opened, walk
from spmd.checker import _names
from spmd.checker._dataflow import Dataflow, typed, walk_closed
from spmd.checker._state import HIDDEN, STEP, UNREAD, Axes, Dim, State, is_divided

Path = tuple[int, ...]  # the equations around, outermost first


class Recording(Domain):
    """A walk that remembers. The last round of a loop is the one that counts, so no jaxpr is skipped as known.

    Attributes:
      made: The results of each equation, by the equations around it and its own identity.
      given: What each jaxpr that an equation holds is given, by the equations around it and its own identity.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made: dict[tuple[Path, int], Sequence[Any]] = {}
        self.given: dict[tuple[Path, int], Sequence[Any]] = {}

    @property
    def path(self) -> Path:
        return tuple(map(id, self.callers))

    def context(self) -> None:
        return None

    def keep(self, eqn: Equation, operands: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        self.made[self.path, id(eqn)] = self.shown(outs)
        return outs

    def run(self, eqn: Equation, part: Held, operands: Sequence[Any]) -> list[Any]:
        self.given[(*self.path, id(eqn)), id(opened(part.jaxpr)[0])] = self.shown(operands)
        return super().run(eqn, part, operands)

    def shown(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return what is kept of values."""
        return values


class States(Recording, Dataflow):
    """The pass itself. Outside of every body a value is global; then what it was in the body that it left is kept."""

    def keep(self, eqn: Equation, operands: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        """Outside of every body, JAX's types say how values lie on Explicit axes."""
        super().keep(eqn, operands, outs)
        if not self.active and any(map(_compat.is_typed, eqn.outvars)):
            made = self.made[self.path, id(eqn)]
            self.made[self.path, id(eqn)] = [typed(v.aval) or one for v, one in zip(eqn.outvars, made, strict=True)]
        return outs

    def shown(self, values: Sequence[State]) -> Sequence[State | None]:
        """A loop stacks what a body gave, and slices it: then it is no longer what left that body."""
        if self.active:
            return values
        left = [(value, value.left[0] if value.left else None) for value in values]
        return [one if one is not None and len(one.dims) == len(value.dims) else None for value, one in left]


class Names(Recording, _names.Names):
    """What each dimension is called."""


def record(jaxpr: Any, name: str) -> tuple[States, Names]:
    """Walk over a whole program twice: once for its states, once for the names of dimensions. Where no body says the
    sizes of the mesh axes, the types of its arguments do."""
    invars = opened(jaxpr)[0].invars
    typed_ones = (var.aval.sharding.mesh.shape for var in invars if _compat.is_typed(var))
    states = States(name, (), next(typed_ones, None))
    walk_closed(states, jaxpr)
    names = Names(states.sizes)
    walk(jaxpr, [names.constant(var, None) for var in invars], names)
    return states, names


# --- as text --------------------------------------------------------------------------------------------------------


def inferred_text(state: State, names: Sequence[Sequence[tuple[str, int]]], sizes: Mapping[str, int]) -> str:
    """Return what is known of a value, `b/dp s {U:tp}`.

    Args:
      state: What is known.
      names: For each dimension its parts, each with its size on the whole array. A dimension without a name, or of
        another size, is written as its size on the whole array.
      sizes: The sizes of the mesh axes, in their order.
    """
    words = [_dim_text(dim, parts, sizes) for dim, parts in zip(state.dims, names, strict=True)]
    differs = state.different.union(p.axis for p in state.pending if p.kind == STEP)
    for mark, axes in (("U", state.partial), ("V", differs)):
        words += [f"{{{mark}:{','.join(a for a in sizes if a in axes)}}}"] if axes else []
    done: dict[str, list[str]] = {}
    for axis in sizes:
        kinds = {p.kind for p in state.pending if p.axis == axis} - {STEP}
        if kinds:
            done.setdefault(", ".join(sorted(kinds - {UNREAD})), []).append(axis)
    pending = " and ".join(f"{kinds} over {', '.join(axes)}" for kinds, axes in done.items() if kinds)
    unknown = [f"? over {', '.join(done[''])}"] if "" in done else []
    words = words if state.dims or (done and not words) else ["scalar", *words]
    return " ".join([*words, *([f"? pending {pending}"] if pending else []), *unknown])


def _dim_text(dim: Dim, parts: Sequence[tuple[str, int]], sizes: Mapping[str, int]) -> str:
    """One dimension: a name for each factor if the whole sizes are those of the names, else the whole sizes."""
    factors = [(_whole(size, axes, sizes), axes) for size, axes in dim]
    unknown = any(axes is HIDDEN for _, axes in dim)
    if unknown and len(factors) == len(parts) == 1 and factors[0][0] and parts[0][1] % factors[0][0] == 0:
        return f"{parts[0][0]}/?"
    named = None if unknown else _named(factors, parts)
    shown = [(str(size), axes if axes is HIDDEN or is_divided(axes) else ()) for size, axes in factors]
    texts = ["/".join((name, *axes)) for name, axes in (shown if named is None else named)]
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


def _whole(size: int, axes: Axes, sizes: Mapping[str, int]) -> int:
    for axis in axes if is_divided(axes) else ():
        size *= sizes.get(axis, 1)
    return size


def _named(factors: Sequence[tuple[int, Axes]], parts: Sequence[tuple[str, int]]) -> list[tuple[str, Axes]] | None:
    """The parts, each with the axes that divide it; what follows the first part of a factor is whole."""
    rest = list(parts)
    found: list[tuple[str, Axes]] = []
    for whole, axes in factors:
        held = axes if is_divided(axes) else ()
        while rest and rest[0][1] and whole % rest[0][1] == 0 and (whole > 1 or not found):
            name, size = rest.pop(0)
            found.append((name, held))
            whole, held = whole // size, ()
        if whole != 1:
            return None
    return None if rest or not found else found
