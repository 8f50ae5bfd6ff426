"""How many rounds show what a loop does: as many as a value needs from where it is made to where it comes out.

A block may go round a ring of devices, a state may be handed on to another one, and a queue moves by one place in each
round. The first two rounds, the last, and so many more show a loop of 500.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spmd import _compat
from spmd._jaxprs.primitives import of_verbs
from spmd._jaxprs.walker import Domain, Equation, Held, Role, Variable, axes_of, equations, held, opened, shape_of, walk
from spmd.checker._choices import INDEXED

WHILE = 0  # what stands for the length of a loop that a test ends

_ROUNDS = 3  # the first, the second and the last
_LOOPS = ("scan", "while")
_PASSES = of_verbs("ppermute", "all_to_all", "ragged_all_to_all", "pbroadcast")
# What may put elements of an array at another place of the same dimension. A product with a matrix that the program
# closes over may do so too.
_SHIFTS = frozenset((
    *("slice", "concatenate", "pad", "rev", "split", "sort", "conv_general_dilated", "reduce_window", "dot_general"),
    *INDEXED,
))  # fmt: skip

Carries = frozenset[int]


def shortened(ours: Any, base: Any) -> dict[int, int]:
    """Return how many rounds show what loops do, for each length of scans that a program has where nothing is divided
    too, and for `WHILE`.

    Args:
      ours: The program.
      base: The same where nothing is divided.
    """
    lengths = {eqn.params.get("length", WHILE) for eqn in equations(base) if eqn.primitive.name in _LOOPS}
    found: dict[int, int] = {}
    for body in (eqn for eqn in equations(ours) if eqn.primitive.name == "shard_map"):
        sizes = _compat.made_manual(body)
        for eqn in (one for one in equations(body.params["jaxpr"]) if one.primitive.name in _LOOPS):
            length = eqn.params.get("length", WHILE)
            found[length] = max(found.get(length, 0), _ROUNDS + _ring(eqn, sizes) + _way(eqn))
    return {length: few for length, few in found.items() if length in lengths and (few < length or length == WHILE)}


def is_shortened(eqn: Equation, rounds: Collection[int]) -> bool:
    """Return whether an equation is a scan of one of these lengths."""
    return eqn.primitive.name == "scan" and eqn.params["length"] in rounds


def _ring(loop: Equation, sizes: Mapping[str, int]) -> int:
    """The most devices that a block of a loop goes round."""
    inner = (one for part in held(loop) for one in equations(part.jaxpr) if one.primitive.name in _PASSES)
    return max((math.prod(sizes.get(axis, 1) for axis in axes_of(one)) for one in inner), default=0)


def _way(loop: Equation) -> int:
    """The most rounds that a value needs through the states of a loop, and along their dimensions."""
    [body] = [part for part in held(loop) if part.role == Role.LOOP]
    inner, walked = opened(body.jaxpr)[0], _Carried()
    count = len(body.stacked) - sum(body.stacked)
    first = len(inner.invars) - sum(body.sliced) - count
    of = lambda i: frozenset((i - first,)) if first <= i < first + count else frozenset[int]()
    outs = walk(body.jaxpr, [of(i) for i in range(len(inner.invars))], walked)
    long = max((max(shape_of(inner.invars[first + i]), default=0) for i in walked.shifted), default=0)
    return _longest(outs[:count]) + long


def _longest(made_of: Sequence[Carries]) -> int:
    """From how many states, one after another, a value gets where it comes to last.

    >>> _longest([frozenset(), frozenset((0,)), frozenset((1,)), frozenset((2, 3))])
    3
    """
    reached, rounds = [frozenset((i,)) for i in range(len(made_of))], 0
    while True:  # each state with those that it is made of, and with those that these are made of
        further = [one.union(*(made_of[i] for i in one)) for one in reached]
        if further == reached:
            return rounds
        reached, rounds = further, rounds + 1


class _Carried(Domain):
    """Which states of a loop each value of its body is made of.

    Attributes:
      shifted: The states whose elements may come to another place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shifted: set[int] = set()

    def constant(self, var: Variable | None, value: Any) -> Carries:
        return frozenset()

    def join(self, one: Carries, other: Carries) -> Carries:
        return one | other

    def decided(self, value: Carries, predicate: Carries) -> Carries:
        return value | predicate

    def step(self, eqn: Equation, operands: Sequence[Carries]) -> list[Carries]:
        found = frozenset[int]().union(*operands)
        if eqn.primitive.name in _SHIFTS:
            self.shifted |= found
        return [found] * len(eqn.outvars)

    def unread(self, eqn: Equation, operands: Sequence[Carries]) -> list[Carries]:
        return self.step(eqn, operands)

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Carries]) -> list[Carries]:
        return self.run(eqn, part, operands)
