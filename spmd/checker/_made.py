"""What a value was made by, as far as a fix needs it: the reduction that it is a part of, the argument that it is.

A state says how a value lies. It does not say that a partial sum is a mean, or that it is the sum of an argument with
a name, and each of these needs another fix. So the equations that made the value are read backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from spmd._jaxprs.walker import Equation, Variable, call_of, opened, shape_of
from spmd.checker._history import Call, call_around
from spmd.checker._state import FREE, HIDDEN, Axes, Dim, State, axes_of_dim
from spmd.checker._table import TABLE, rounds
from spmd.language import Layout


@dataclass(frozen=True)
class Made:
    """A reduction over a divided dimension. Each device has reduced its own block only."""

    op: str  # "sum", "mean", "max", ...; "scaled": a sum divided by the number of its terms, for whatever reason
    axes: frozenset[str] = frozenset()
    name: str | None = None  # what was reduced, as the user writes it
    layout: Layout | None = None  # how it lay, or how an argument does that lies and is as large as it
    shape: tuple[int, ...] = ()  # of what was reduced
    dims: tuple[int, ...] = ()
    call: Call | None = None  # the user's, that did it

    @property
    def count(self) -> int:
        """How many terms one number has on each device."""
        return math.prod(self.shape[d] for d in self.dims)

    @property
    def with_ones(self) -> tuple[int, ...]:
        """The shape of the result if it keeps what is reduced, with size 1."""
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.shape))


@dataclass(frozen=True)
class Place:
    """One value, whose state is known.

    Attributes:
      dims: The mesh axes that divide each dimension, None where that is not known.
      made: The reduction that it is a part of, if there is one.
      counts: Whether it is an arange that nothing was done to.
      name: The argument that it is, as messages call it.
    """

    dims: tuple[Axes | None, ...]
    made: Made | None = None
    counts: bool = False
    name: str | None = None

    def like(self, layout: Layout) -> Layout | None:
        """A layout with the axes that the value has; None where the dimensions do not correspond, or are not known."""
        extra = len(self.dims) - len(layout.dims)
        if extra and not layout.has_ellipsis:
            return None
        rest = list(self.dims)
        dims = []
        for dim in layout.dims:
            if dim.ellipsis:  # their axes are not checked there
                del rest[: extra + 1]
                dims.append(dim)
                continue
            axes = rest.pop(0)
            if axes is None or (dim.composite and axes != dim.axes):
                return None
            dims.append(dim if axes == dim.axes else replace(dim, atoms=(replace(dim.atoms[0], axes=axes),)))
        if len({axis for dim in dims for axis in dim.axes}) != sum(len(dim.axes) for dim in dims):
            return None
        return layout.from_dims(tuple(dims), unreduced=sorted(self.made.axes) if self.made else ())


_UNSEEN = ("hidden", "reference")  # what opaque code is given, and what its reference computes
_REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "prod": "prod", "and": "all", "or": "any"}
_PENDING = frozenset(("max", "min", "product", "all", "any"))


def place_of(walk: Any, atom: Variable, state: State) -> Place | None:
    """Return how a value lies and what it was made by; None where that is not known."""
    if state.different or any(p.kind not in _PENDING for p in state.pending):
        return None
    dims = tuple(map(_axes, state.dims))
    if not state.axes and not _whole(walk, atom):
        dims = (None,) * len(dims)
    at = _At(walk, atom)
    made = at.reduction() if state.partial or state.pending else None
    if made is None and (state.partial or state.pending):
        return None
    if made is not None and made.op == "sum":
        made = replace(made, axes=state.partial)
    argument = at.argument()
    return Place(dims, made, at.counts(), argument and argument[0])


def reduction_of(walk: Any, atom: Variable) -> Made | None:
    """The reduction over a divided dimension that a value is a part of; None where that is not known."""
    return _At(walk, atom).reduction()


def operation_of(walk: Any, atom: Variable) -> str | None:
    """Return whether a partial sum is a "sum" or a "mean" of what each device has; None where that is not known."""
    at = _At(walk, atom)
    if (reduction := at.reduction()) is not None:
        return reduction.op
    while (made := at.made()) is not None and is_moved(made[0]):
        at = made[1].of(made[0].invars[0])
    return "sum" if made is not None and made[0].primitive.name in ("reduce_sum", "dot_general") else None


def is_moved(eqn: Equation) -> bool:
    """Return whether an equation gives the numbers that it is given."""
    return eqn.primitive.name in (*_SAME, *_SHAPED)


def lying(state: State) -> Place:
    """Return how a value lies by its state alone. A dimension along which it is constant is not divided."""
    dims = tuple(() if {axes for _, axes in dim} == {FREE} else _axes(dim) for dim in state.dims)
    return Place(dims, Made("sum", state.partial) if state.partial else None)


def _whole(walk: Any, atom: Variable) -> bool:
    """Return whether an equal value is as large as whole arguments. Of another shape, as noise, it may be a block."""
    made = [(var, walk.history.made.get(var)) for var in walk.history.behind(atom)]
    argument = lambda var: var in walk.history.arguments or bool(walk.history.made_of.get(var))
    return all(argument(var) if one is None else _keeps_sizes(one[0]) for var, one in made)


def _keeps_sizes(eqn: Equation) -> bool:
    name = eqn.primitive.name
    if name in _RULES or name in ("all_gather", "all_gather_invariant", "spmd_split") or call_of(eqn) is not None:
        return True
    return name in TABLE and TABLE[name].says == "elementwise"


def _axes(dim: Dim) -> Axes | None:
    return None if len(dim) > 1 or any(axes is HIDDEN or axes is FREE for _, axes in dim) else axes_of_dim(dim)


@dataclass(frozen=True)
class _At:
    """A variable, and the calls whose jaxprs it is in: the same jaxpr may be called from several places."""

    walk: Any
    atom: Variable
    calls: tuple[Any, ...] = ()

    def made(self) -> tuple[Any, _At] | None:
        """The equation that made it, and where that stands; None for an argument, and for what loops give."""
        at = self._outside()
        if isinstance(at.atom, Literal):
            return None
        found = at.walk.history.made.get(at.atom)
        if found is None:
            return None
        eqn, index, _ = found
        inner = call_of(eqn)
        if inner is None:
            return eqn, at
        return replace(at, atom=opened(inner.jaxpr)[0].outvars[index], calls=(*at.calls, eqn)).made()

    def _outside(self) -> _At:
        """The operand of the call whose input it is."""
        at = self
        while at.calls and not isinstance(at.atom, Literal):
            inner = call_of(at.calls[-1])
            assert inner is not None
            inputs = opened(inner.jaxpr)[0].invars
            if at.atom not in inputs:
                break
            operand = inner.of(at.calls[-1].invars)[inputs.index(at.atom)]
            at = replace(at, atom=operand, calls=at.calls[:-1])
        return at

    def of(self, operand: Any) -> _At:
        return replace(self, atom=operand)

    def written_for(self, call: Call) -> str | None:
        """Return how the user writes it, who calls a function on it; None of what the function has made of that."""
        made = self.walk.history.producer(self.atom)
        return call.operand if made is not None and not call.is_of(call_around(*made)) else None

    def layout_of(self, state: State) -> Layout | None:
        """The layout of an argument that lies as it does, and is as large."""
        alike = lambda var, layout: shape_of(var) == shape_of(self.atom) and _as_said(layout, state)
        arguments = self.walk.history.arguments.items()
        return next((layout for var, (_, layout) in arguments if alike(var, layout)), None)

    def callers_of(self, eqn: Equation) -> tuple[Any, ...]:
        """The equations around an equation that reads it."""
        made = self.walk.history.made.get(eqn.outvars[0])
        return self.calls or (made[2] if made else ())

    def state(self) -> State | None:
        """Its state, if no other call of the same jaxpr can have had another one."""
        at = self._outside()
        if isinstance(at.atom, Literal):
            return None
        if not at.calls:
            return at.walk.known.get(at.atom)
        operand = at.converted()
        return operand and operand.state()

    def converted(self) -> _At | None:
        """The operand, if this is the operand in another type."""
        made = self.made()
        if made is None or made[0].primitive.name not in (*_SAME, "convert_element_type"):
            return None
        return made[1].of(made[0].invars[0])

    def value(self) -> float | None:
        """The number that it is, of a literal."""
        at = self._outside()
        if isinstance(at.atom, Literal):
            found = np.asarray(at.atom.val)
            return float(found) if found.ndim == 0 and found.dtype.kind in "iuf" else None
        operand = at.converted()
        return operand and operand.value()

    def argument(self) -> tuple[str, Layout] | None:
        """The argument of the kernel that it is."""
        made = self.made()
        if made is None:
            atom = self._outside().atom
            return None if isinstance(atom, Literal) else self.walk.history.arguments.get(atom)
        eqn, at = made
        name = eqn.primitive.name
        if name == "spmd_layout" and not _as_said(eqn.params["layout"], at.of(eqn.invars[0]).state()):
            return None
        same = name in _SAME or name == "spmd_layout" or (name == "spmd_retype" and eqn.params["to"] not in _UNSEEN)
        return at.of(eqn.invars[0]).argument() if same else None

    def counts(self) -> bool:
        made = self.made()
        if made is None:
            return False
        eqn, at = made
        return at.of(eqn.invars[0]).counts() if eqn.primitive.name in _SAME else eqn.primitive.name == "iota"

    def reduction(self) -> Made | None:
        """The reduction over a divided dimension that it is a part of; None where that is not known."""
        made = self.made()
        if made is None:
            argument = self.argument()
            return Made("sum") if argument is not None and argument[1].unreduced else None
        eqn, at = made
        rule = _RULES.get(eqn.primitive.name)
        return None if rule is None else rule(eqn, [at.of(operand) for operand in eqn.invars])

    def whole(self) -> bool:
        """Return whether it is certainly complete and the same on all devices."""
        state = self.state()
        return self.value() is not None if state is None else not state.axes


def _as_said(layout: Layout, state: State | None) -> bool:
    """Return whether a value lies as a layout says."""
    if state is None or layout.has_ellipsis or len(layout.dims) != len(state.dims):
        return False
    return [dim.axes for dim in layout.dims] == list(map(_axes, state.dims))


# --- one primitive ------------------------------------------------------------------------------------------


def _follow(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    return ins[0].reduction()


def _changed(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    """The reduction behind a value that was changed. The argument's name does not describe this value."""
    made = ins[0].reduction()
    return made and replace(made, name=None)


def _reshaped(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    """The reduction behind a value of another shape: each element still has as many terms."""
    made = ins[0].reduction()
    return made and (made if shape_of(eqn.outvars[0]) == made.with_ones else replace(made, name=None))


def _converted(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    """The sum of rounded parts is not the rounded sum."""
    return None if rounds(eqn) else _changed(eqn, ins)


def _retyped(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    return None if eqn.params["to"] in _UNSEEN else ins[0].reduction()


def _marked(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    layout, made = eqn.params["layout"], ins[0].reduction()
    if layout.unreduced:
        return made if made is not None and made.op == "sum" else Made("sum")
    return made if layout.has_ellipsis else None


def _sum(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    """A sum of parts of the same kind is one too."""
    ops = {made and made.op for made in (one.reduction() for one in ins)}
    [op] = ops if len(ops) == 1 else [None]
    return Made(op) if op in ("sum", "mean") else None


def _product(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    """A part times a value that is equal on all devices is a part. Divided by the number of its terms it is a mean."""
    first, second = ins
    if eqn.primitive.name == "mul" and first.whole():
        first, second = second, first
    made = first.reduction()
    if made is None or not second.whole() or (eqn.primitive.name == "div" and rounds(eqn)):
        return None
    if made.op == "sum" and made.count and second.value() in (made.count, 1 / made.count):
        together = made.call is not None and made.call.is_of(call_around(eqn, ins[0].callers_of(eqn)))
        return replace(made, op="mean" if together else "scaled")
    return replace(made, name=None)  # each element still has as many terms


def _reduced(op: str) -> Callable[[Any, Sequence[_At]], Made | None]:
    def rule(eqn: Equation, ins: Sequence[_At]) -> Made | None:
        gone, state = tuple(eqn.params["axes"]), ins[0].state()
        if state is None or any(_axes(state.dims[d]) is None for d in gone):
            return None
        axes = frozenset(axis for d in gone for axis in axes_of_dim(state.dims[d]))
        if not axes:
            return _changed(eqn, ins) if op == "sum" else None
        if state.partial or state.pending:
            return None
        call = call_around(eqn, ins[0].callers_of(eqn))
        name, layout = ins[0].argument() or (ins[0].written_for(call), ins[0].layout_of(state))
        return Made(op, axes, name, layout, shape_of(eqn.invars[0]), gone, call)

    return rule


def _contracted(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    states = [one.state() for one in ins]
    known = all(state is not None and not (state.partial or state.pending or state.different) for state in states)
    if not known or states[0] is None:
        return None
    (gone, _), _ = eqn.params["dimension_numbers"]
    axes = frozenset(axis for d in gone for axis in axes_of_dim(states[0].dims[d]))
    return Made("sum", axes, shape=shape_of(eqn.invars[0]), dims=tuple(gone))


def _summed(eqn: Equation, ins: Sequence[_At]) -> Made | None:
    made = ins[0].reduction()
    return Made("sum") if made is not None and made.op == "sum" else None


_SHAPED = ("transpose", "squeeze", "reshape", "broadcast_in_dim")
_SAME = ("copy", "copy_p", "pvary", "pcast", "optimization_barrier", "name", "spmd_fused", "spmd_names")
_RULES: dict[str, Callable[[Any, Sequence[_At]], Made | None]] = {
    **dict.fromkeys(_SAME, _follow),
    "spmd_retype": _retyped,
    "spmd_layout": _marked,
    **dict.fromkeys(("neg", "real", "imag", "conj", "reduce_precision"), _changed),
    **dict.fromkeys(_SHAPED, _reshaped),
    "convert_element_type": _converted,
    **dict.fromkeys(("add", "sub", "add_any"), _sum),
    **dict.fromkeys(("mul", "div"), _product),
    **{f"reduce_{name}": _reduced(op) for name, op in _REDUCTIONS.items()},
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), _summed),
    "dot_general": _contracted,
}
