"""Random numbers that each device draws with a key of its own: whether they are meant for its own block.

They depend on the mesh, and so do the results. This is meant where they meet the blocks of an array, element by
element. It is a mistake where copies of one array meet different numbers, or blocks of one array the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd._jaxprs.walker import Domain, Equation, Held, Variable, equations, opened, shape_of, walk
from spmd.checker._engine import Engine
from spmd.checker._primitives import draws
from spmd.checker._state import FREE, HIDDEN, STEP, State, axes_of_dim
from spmd.checker._table import TABLE


def is_meant(checked: Engine) -> bool:
    """Return whether some devices draw numbers of their own, and all that do draw them for their own blocks.

    Args:
      checked: The walk that knows how values lie.
    """
    found = _Noise(checked)
    walk(checked.root, [False] * len(opened(checked.root)[0].invars), found)
    return found.met == {True} or (found.drawn and not found.met)


class _Noise(Domain):
    """Which values are made of random numbers alone.

    Attributes:
      checked: The walk that knows how values lie.
      drawn: Whether devices draw numbers of their own.
      met: Whether it is meant, for each equation in which such numbers meet other values.
    """

    def __init__(self, checked: Engine) -> None:
        super().__init__()
        self.checked, self.drawn = checked, False
        self.met: set[bool] = set()

    def constant(self, var: Variable | None, value: Any) -> bool:
        return False

    def join(self, one: bool, other: bool) -> bool:
        return one and other

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[bool]) -> list[bool]:
        return self.run(eqn, part, operands)

    def call(self, eqn: Equation, part: Held, operands: Sequence[bool]) -> Sequence[bool]:
        """A jaxpr may be shared by several calls, so only those that draw are entered."""
        return super().call(eqn, part, operands) if any(map(draws, equations(part.jaxpr))) else self.step(eqn, operands)

    def step(self, eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        if draws(eqn) and shape_of(eqn.outvars[0]):  # one number is not one for each element
            drawn = bool(self._state(eqn.outvars[0]).axes)
            self.drawn |= drawn
            return [drawn] * len(eqn.outvars)
        states = list(map(self._state, eqn.invars))
        others = any(state.axes and state.dims for state, own in zip(states, operands, strict=True) if not own)
        if any(operands) and others:
            self.met.add(_fits(eqn, states, operands))
        return [any(operands) and not others] * len(eqn.outvars)

    def _state(self, atom: Variable) -> State:
        known = None if hasattr(atom, "val") else self.checked.known.get(atom)
        return known if isinstance(known, State) else State()


def _fits(eqn: Equation, states: Sequence[State], noisy: Sequence[bool]) -> bool:
    """Return whether random numbers differ along the axes that divide what they meet, and along no others."""
    entry = TABLE.get(eqn.primitive.name)
    labels = entry.map(eqn).operands if entry else [range(len(one.dims)) for one in states]
    axes, drawn, seen = set[str](), set[int | None](), set[str]()
    for state, own, places in zip(states, noisy, labels, strict=True):
        if own:
            axes |= state.axes
            drawn |= {label for dim, label in zip(state.dims, places, strict=False) if dim[0][1] is not FREE}
    for state, own, places in zip(states, noisy, labels, strict=True):
        if not own:
            seen |= {one.axis for one in state.pending if one.kind == STEP}
            for dim, label in zip(state.dims, places, strict=False):
                if label in drawn:
                    hidden = any(here is HIDDEN for _, here in dim)
                    seen |= (state.different & axes) if hidden else set(axes_of_dim(dim))
    return seen == axes
