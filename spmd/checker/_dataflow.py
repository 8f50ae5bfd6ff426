"""The abstract interpreter: one flat loop over the equations of a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.core
from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs import is_unknown, opened
from spmd.checker._axes import AxisBits, Origin, Origins
from spmd.checker._collectives import COLLECTIVES
from spmd.checker._control import CONTROL, call, collectives_of
from spmd.checker._markers import assert_equal_marker, layout_marker
from spmd.checker._places import Place, Places
from spmd.checker._rules import TABLE, compute
from spmd.checker._source import is_transposed
from spmd.checker._state import EVERYWHERE, UNKNOWN, State, constant_state, literal_state, normal
from spmd.errors import Fault
from spmd.language import Layout

# Rules that give one state per output. What is in no table and holds no jaxpr is a plain computation.
SPECIAL: dict[str, Callable[[Walk, Any, Sequence[State]], list[State]]] = {
    **COLLECTIVES,
    **CONTROL,
    "spmd_layout": layout_marker,
    "spmd_assert_equal": assert_equal_marker,
}

# What these give was written elsewhere, at a time that a pass over values does not know.
OUTSIDE = frozenset(("get", "swap", "addupdate", "freeze", "ref_get", "ref_swap", "io_callback", "infeed", "recv"))


class Walk:
    """One run of the pass, with what it found.

    Attributes:
      kernel: Its name, for messages.
      axes: The mesh axes as bits.
      wanted: The axes that the caller asked about.
      checked: Those that markers are checked on where the walk is: the axes of the kernel's own shard_map.
      active: Whether the walk is inside a body. Outside, values are global and layouts say nothing.
      callers: The equations whose jaxprs we are inside of.
      arg_names: What the kernel calls the inputs of its body.
      arg_layouts: Their layouts, where they are told.
      root: The jaxpr that is walked, for those who look again.
      trusting: Whether a layout is believed once it was checked; not where the question is what a value is.
      faults: How many findings there were, to see whether a rule had one.
      outputs: The output states of each body.
    """

    def __init__(self, kernel: str, axes: Iterable[str], sizes: Mapping[str, int] | None = None) -> None:
        self.kernel = kernel
        self.axes = AxisBits(axes, sizes)
        self.origins = Origins()
        self.wanted = self.checked = self.axes.mask(tuple(axes))
        self.active = False
        self.trusting = True
        self.arg_names: tuple[str, ...] = ()
        self.arg_layouts: tuple[Layout, ...] = ()
        self.root: Any = None
        self._places: Places | None = None
        self.callers: list[Any] = []
        self.failures: list[Fault] = []
        self.faults = 0
        self.outputs: list[list[State]] = []
        self._memo: dict[Any, tuple[Any, list[State]]] = {}
        self._collectives: dict[int, tuple[Any, tuple[tuple[str, int], ...]]] = {}

    def place(self, eqn: Any) -> Place | None:
        """How the operand of a layout's marker lies, for a message; the first question reads the whole jaxpr again."""
        if self._places is None:
            self._places = Places(self.root, self.arg_names, self.arg_layouts)
        return self._places.of(eqn)

    # --- findings -----------------------------------------------------------------------------------------

    def report(self, eqn: Any, failure: Fault) -> None:
        """Note a finding."""
        self.failures.append(failure)
        self.faults += 1

    def fault(self, eqn: Any, axes: int, describe: Callable[[Walk, Any, Sequence[str]], Fault]) -> None:
        """Note a wrong use of a partial sum, unless JAX wrote it: layouts claim nothing about cotangents."""
        axes &= self.checked
        if self.active and axes and not is_transposed(eqn, self.callers):
            self.report(eqn, describe(self, eqn, self.axes.names(axes)))

    def mark(self) -> int:
        """Where the findings stand, for `rewind`."""
        return len(self.failures)

    def rewind(self, mark: int) -> None:
        """Forget the findings after `mark`."""
        del self.failures[mark:]

    def origin_of(self, eqn: Any, axis: str) -> int:
        """The bit of an equation that makes its output different."""
        return self.origins.bit(id(eqn), Origin(eqn.primitive.name, axis, eqn=eqn, callers=tuple(self.callers)))

    def collectives_in(self, jaxpr: Any) -> tuple[tuple[str, int], ...]:
        """The collectives in a jaxpr, at any depth, each kind and set of axes once."""
        inner, _ = opened(jaxpr)
        known = self._collectives.get(id(inner))
        if known is None:
            # The jaxpr is kept so that its id is not given to another one.
            known = self._collectives[id(inner)] = (inner, tuple(dict.fromkeys(collectives_of(self, inner))))
        return known[1]

    # --- the walk -----------------------------------------------------------------------------------------

    def enter(self, eqn: Any, jaxpr: Any, operands: Sequence[State]) -> list[State]:
        """Run a jaxpr that an equation holds. Once per set of operands, if nothing was found in it."""
        inner, consts = opened(jaxpr)
        key = (id(inner), tuple(operands), self.checked)
        known = self._memo.get(key)
        if known is not None:
            return known[1]
        before = self.faults
        self.callers.append(eqn)
        try:
            outs = self.run(inner, consts, operands)
        finally:
            self.callers.pop()
        if self.faults == before:
            self._memo[key] = (inner, outs)
        return outs

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[State]) -> list[State]:
        """The states of a jaxpr's outputs."""
        env: dict[Any, State] = dict(zip(jaxpr.invars, operands, strict=True))
        if consts:
            env.update((var, self.constant(value)) for var, value in zip(jaxpr.constvars, consts, strict=True))
        else:
            env.update((var, State()) for var in jaxpr.constvars)
        for eqn in jaxpr.eqns:
            ins = [literal_state(v.val) if isinstance(v, Literal) else env[v] for v in eqn.invars]
            outs = self.step(eqn, ins)
            if type(outs) is State:
                for var in eqn.outvars:
                    env[var] = outs
            else:
                env.update(zip(eqn.outvars, outs, strict=True))
        return [literal_state(v.val) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def constant(self, value: Any) -> State:
        """What the jaxpr closed over: an array, or a value of the trace around it."""
        if not isinstance(value, jax.core.Tracer):
            return constant_state(value)
        partial = _compat.unreduced_axes(value)
        return State(self.axes.mask(_compat.varying_axes(value) | partial), self.axes.mask(partial))

    def step(self, eqn: Any, ins: Sequence[State]) -> Any:
        """One equation: a list with a state per output, or one state for all of them."""
        name = eqn.primitive.name
        special = SPECIAL.get(name)
        if special is not None:
            return special(self, eqn, ins)
        if name not in TABLE and eqn.params:
            outs = call(self, eqn, ins)
            if outs is not None:
                return outs
        if not eqn.outvars:
            return []
        out = compute(self, eqn, ins)
        unread = name in OUTSIDE or (name not in TABLE and is_unknown(eqn))
        return out._replace(flags=out.flags | UNKNOWN) if unread else out


def walk_closed(walk: Walk, jaxpr: Any, operands: Sequence[State] | None = None) -> list[State]:
    """Run the pass over a whole closed jaxpr, whose inputs are global (equal) unless given."""
    walk.root = jaxpr
    inner, consts = opened(jaxpr)
    if operands is None:
        operands = [State(uniform=0 if getattr(v.aval, "shape", ()) else EVERYWHERE) for v in inner.invars]
    else:
        ranks = [len(getattr(v.aval, "shape", ())) for v in inner.invars]
        operands = [s._replace(uniform=normal(s.uniform, rank)) for s, rank in zip(operands, ranks, strict=True)]
    return walk.run(inner, consts, operands)
