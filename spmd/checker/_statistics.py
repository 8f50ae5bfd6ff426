"""Numbers of a piece that are meant as such, so that a curve of a device's own sum is not a mistake.

The logsumexp of each block is right where `exp(z - pmax(z))` weighs it, the mean of each block where its distance to
the mean of all is added, and the norm of each block where its square goes into a psum. Such a program shows that it
knows whose number this is: it compares the number with what a collective makes of it, gathers one of each device, or
undoes the curve.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from spmd._jaxprs import axes_of, held
from spmd.checker._history import EQUAL, GATHERS, History

_COLLECTED = EQUAL | GATHERS
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
# These pass a value on, in another shape or type.
_MOVES = """pvary pcast broadcast_in_dim reshape squeeze expand_dims convert_element_type copy stop_gradient
    reduce_precision spmd_retype spmd_fused"""
_CARRY = frozenset(_MOVES.split())
_NEAR = _CARRY | {"add", "max"}  # and these with an epsilon, or the maximum that was taken off before
_UNDO = {"square": "sqrt", "integer_pow": "sqrt", "exp": "log", "log": "exp"}
_NEAREST = 64  # values behind a term, among which a collective is looked for


class Statistics:
    """From which arrays a program makes numbers that it takes for those of one device.

    Args:
      history: Where the values of the program come from.
      divided: The axes that divide a variable; None where the walk was not yet.
    """

    def __init__(self, history: History, divided: Callable[[Any], Collection[str] | None]) -> None:
        self._history, self._divided = history, divided
        self._numbers: dict[str, list[Any]] = {}

    def meant(self, eqn: Any, axis: str) -> bool:
        """Whether an equation works on a sum over an array of which the program makes a device's own number."""
        if axis not in self._numbers:
            self._numbers[axis] = [*self._compared(axis), *self._gathered(axis), *self._undone()]
        own = {var for atom in self._numbers[axis] for var in self._pieces(atom, axis)}
        return bool(own) and any(var in own for atom in eqn.invars for var in self._pieces(atom, axis))

    def _equations(self, *names: str) -> list[Any]:
        return [eqn for eqn, _, _ in self._history.made.values() if eqn.primitive.name in names]

    def _collects(self, axis: str) -> Callable[[Any], bool]:
        return lambda eqn: eqn.primitive.name in _COLLECTED and axis in axes_of(eqn)

    def _ends(self, axis: str) -> Callable[[Any], bool]:
        collects = self._collects(axis)
        return lambda eqn: eqn.primitive.name in _PRODUCTS or collects(eqn)

    def _pieces(self, atom: Any, axis: str) -> list[Any]:
        """The divided arrays that a number is made of."""
        return [var for var in self._history.behind(atom, self._ends(axis)) if axis in (self._divided(var) or ())]

    def _same(self, atom: Any, carry: frozenset[str] = _CARRY) -> list[Any]:
        """The variables that hold this value, in whatever shape, nearest first."""
        return list(self._history.behind(atom, lambda eqn: eqn.primitive.name not in carry and not held(eqn)))

    def _compared(self, axis: str) -> Iterator[Any]:
        """What is compared with that which a collective over the axis makes of it: `z - pmax(z)`."""
        collects, ends = self._collects(axis), self._ends(axis)
        for eqn in self._equations("sub", "div"):
            for own, other in (eqn.invars, eqn.invars[::-1]):
                near = itertools.islice(self._history.behind(other, ends), _NEAREST)
                producers = filter(None, map(self._history.producer, near))
                given = {var for made, _ in producers if collects(made) for x in made.invars for var in self._same(x)}
                if given.intersection(self._same(own)):
                    yield own

    def _gathered(self, axis: str) -> Iterator[Any]:
        """What is gathered though the axis does not divide it: one number of each device."""
        for eqn in self._equations(*GATHERS):
            divided = self._divided(eqn.invars[0])
            if axis in axes_of(eqn) and not (eqn.params.get("tiled") if divided is None else axis in divided):
                yield eqn.invars[0]

    def _undone(self) -> Iterator[Any]:
        """What goes through a curve and back: `sqrt(s) ** 2`, `exp(log(s))`, `m / n * n`."""
        for eqn in self._equations(*_UNDO):
            curves = filter(None, map(self._history.producer, self._same(eqn.invars[0], _NEAR)))
            for curve, _ in curves if eqn.params.get("y", 2) == 2 else ():
                if curve.primitive.name == _UNDO[eqn.primitive.name]:
                    yield curve.invars[0]
        for eqn in self._equations("mul"):
            for one, other in (eqn.invars, eqn.invars[::-1]):
                for quotient, _ in filter(None, map(self._history.producer, self._same(one))):
                    if quotient.primitive.name == "div" and set(self._same(quotient.invars[1], _NEAR)) & set(
                        self._same(other)
                    ):
                        yield other
