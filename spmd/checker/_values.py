"""Which variables hold one value: an expression that is written twice is traced twice, and is one value.

`x.mean(0) - lax.pmean(x.mean(0), "tp")` takes the mean twice, and `x.var(0)` takes it once more inside. JAX gives each
of them variables of its own. Here they are one, in whatever shape and type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import Literal

from spmd._jaxprs import Role, held, opened, shape_of
from spmd.checker._history import Atoms, History
from spmd.checker._table import TABLE

# These pass a value on, in another shape or type.
_MOVES = """pvary pcast broadcast_in_dim reshape squeeze expand_dims convert_element_type copy stop_gradient
    reduce_precision spmd_retype spmd_fused"""
MOVES = frozenset(_MOVES.split())


class Values:
    """One variable for all that hold a value."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._first: dict[Any, Any] = {}
        made: dict[Any, Any] = {}
        for eqn, _, _ in history.made.values():
            self._first.update((var, var) for var in _of_rounds(eqn))
        for var, (eqn, i, _) in history.made.items():  # operands come before results
            if held(eqn):
                continue  # `one` looks inside
            self._first[var] = self.one(eqn.invars[0]) if eqn.primitive.name in MOVES else var
            key = None if eqn.effects or eqn.primitive.name in MOVES else self._key(eqn, i)
            if key is not None:
                self._first[var] = made.setdefault(key, var)

    def one(self, atom: Any) -> Any:
        """The first variable that holds what this one does; of a number, the number itself."""
        if isinstance(atom, Literal):
            return str(np.asarray(atom.val)) if np.ndim(atom.val) == 0 else id(atom)
        seen = set()
        while atom not in self._first and atom not in seen:
            seen.add(atom)
            behind: Atoms = self._history.made_of.get(atom, ())
            if len(behind) != 1 or shape_of(behind[0]) != shape_of(atom):  # a row of an array is not the array
                return atom
            [atom] = behind
        return self._first.get(atom, atom)

    def _key(self, eqn: Any, i: int) -> Any:
        """What decides a result. Along which dimensions it was made depends on the shapes, if not elementwise."""
        entry = TABLE.get(eqn.primitive.name)
        shapes = () if entry is not None and entry.says == "elementwise" else tuple(map(shape_of, eqn.invars))
        key = eqn.primitive.name, i, tuple(sorted(eqn.params.items())), tuple(map(self.one, eqn.invars)), shapes
        try:
            hash(key)
        except TypeError:  # parameters that cannot be compared
            return None
        return key


def _of_rounds(eqn: Any) -> list[Any]:
    """The inputs and results of a loop: what a round is given is not what it gives."""
    loops = [part for part in held(eqn) if part.role in (Role.LOOP, Role.TEST)] if eqn.params else []
    inputs = [var for part in loops for var in opened(part.jaxpr)[0].invars]
    return [*inputs, *eqn.outvars] if loops else []
