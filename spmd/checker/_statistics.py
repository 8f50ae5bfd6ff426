"""Numbers of a piece that are meant as such, so that a curve of a device's own sum is not a mistake.

The logsumexp of each block is right where `exp(z - pmax(z))` weighs it, the mean of each block where its distance to
the mean of all is added, and the norm of each block where its square goes into a psum. Such a program shows that it
knows whose number this is: it compares the number with what a collective makes of it, gathers one of each device,
undoes the curve, or adds the square of what it took off before a square.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from spmd._jaxprs import axes_of, held
from spmd.checker._history import EQUAL, GATHERS, History
from spmd.checker._values import MOVES, Values

_COLLECTED = EQUAL | GATHERS
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_NEAR = MOVES | {"add", "max"}  # with an epsilon, or the maximum that was taken off before
_TIMES = MOVES | {"mul", "div"}  # with a number of elements
_UNDO = {"square": "sqrt", "integer_pow": "sqrt", "exp": "log", "log": "exp"}
_NEAREST = 64  # values behind a term, among which a collective is looked for


class Statistics:
    """From which arrays a program makes numbers that it takes for those of one device.

    Args:
      history: Where the values of the program come from.
      values: Which variables hold one value.
      divided: The axes that divide a variable; None where the walk was not yet.
    """

    def __init__(self, history: History, values: Values, divided: Callable[[Any], Collection[str] | None]) -> None:
        self._history, self._divided = history, divided
        self._numbers: dict[str, list[Any]] = {}
        self._values = values

    def meant(self, eqn: Any, axis: str) -> bool:
        """Whether an equation works on a sum over an array of which the program makes a device's own number."""
        if axis not in self._numbers:
            self._numbers[axis] = [*self._compared(axis), *self._gathered(axis), *self._undone(), *self._restored(axis)]
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

    def _same(self, atom: Any, carry: frozenset[str] = MOVES) -> list[Any]:
        """The variables that hold this value, in whatever shape, nearest first."""
        return list(self._history.behind(atom, lambda eqn: eqn.primitive.name not in carry and not held(eqn)))

    def _one(self, atom: Any, carry: frozenset[str] = MOVES) -> set[Any]:
        """The same, one for all that were made in the same way."""
        return set(map(self._values.one, self._same(atom, carry)))

    def _producers(self, variables: Iterable[Any]) -> list[Any]:
        return [made[0] for made in map(self._history.producer, variables) if made is not None]

    def _near(self, atom: Any, axis: str) -> list[Any]:
        """The equations nearest behind a value, as far as a product or a collective."""
        return self._producers(itertools.islice(self._history.behind(atom, self._ends(axis)), _NEAREST))

    def _compared(self, axis: str) -> Iterator[Any]:
        """What is compared with that which a collective over the axis makes of it: `z - pmax(z)`."""
        collects = self._collects(axis)
        for eqn in self._equations("sub", "div"):
            for own, other in (eqn.invars, eqn.invars[::-1]):
                given = {
                    var for one in self._near(other, axis) if collects(one) for x in one.invars for var in self._one(x)
                }
                if given.intersection(self._one(own)):
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
            curves = self._producers(self._same(eqn.invars[0], _NEAR))
            for curve in curves if eqn.params.get("y", 2) == 2 else ():
                if curve.primitive.name == _UNDO[eqn.primitive.name]:
                    yield curve.invars[0]
        for eqn in self._equations("mul"):
            for one, other in (eqn.invars, eqn.invars[::-1]):
                for quotient in self._producers(self._same(one)):
                    divides = quotient.primitive.name == "div"
                    if divides and self._one(quotient.invars[1], _NEAR) & self._one(other):
                        yield other

    def _restored(self, axis: str) -> Iterator[Any]:
        """What is taken off before a square, and added as a square: `v + m**2`, where `v` is the variance around `m`.

        The sum is a mean of squares again, which may be averaged over devices."""
        for eqn in self._equations("add"):
            for one, other in (eqn.invars, eqn.invars[::-1]):
                means = filter(None, map(self._squared, self._producers(self._same(other, _TIMES))))
                taken = {
                    var for centred in map(self._squared, self._near(one, axis)) for var in self._taken_off(centred)
                }
                yield from (mean for mean in means if taken.intersection(self._one(mean)))

    def _squared(self, eqn: Any) -> Any:
        """What an equation squares."""
        square = eqn.primitive.name == "square" or (eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2)
        square = square or (eqn.primitive.name == "mul" and len(set(map(self._values.one, eqn.invars))) == 1)
        return eqn.invars[0] if square else None

    def _taken_off(self, atom: Any) -> set[Any]:
        """What was subtracted to make a value."""
        made = self._producers(self._same(atom)) if atom is not None else ()
        return set().union(*(self._one(one.invars[1]) for one in made if one.primitive.name == "sub"))
