"""Numbers of a program that may be sizes of its mesh: in `x / 4`, where dp has four devices.

On another mesh such a number stays what it is, and a right program computes something else there. Whether it is a size
is asked of the numbers: the program has to agree on all meshes with it read so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.lines import is_transposed, line_of
from spmd._jaxprs.walker import Equation, equations, held, opened, shape_of
from spmd.checker._history import History
from spmd.checker._numbers import subsets
from spmd.language import axes_tuple

_MOST = 16  # readings that are tried
_EQUATIONS = 20_000  # that all of them may have together


Number = tuple[float, bool]  # and whether its type is that of an integer


@dataclass(frozen=True)
class Reading:
    """A number of a program, as what the sizes of axes make it.

    Attributes:
      number: The number.
      says: What it is, one of `_SAYS`.
      axes: The axes.
      count: How many devices these have where the number was written.
      line: Where it stands; "" if it is read so at all lines.
    """

    number: float
    says: str
    axes: tuple[str, ...]
    count: int
    line: str = ""

    def may_be(self, number: Number) -> bool:
        """Return whether a number may be read so. Only an integer can be the size of a block."""
        value, whole = number
        return math.isclose(value, self.number, rel_tol=1e-6) and (whole or self.says not in ("block", "end"))

    def on(self, sizes: Mapping[str, int]) -> float:
        """Return what the number is on a mesh of these sizes."""
        n = math.prod(sizes[axis] for axis in self.axes)
        if self.says == "last":
            return n - 1
        if self.says == "end":
            return (self.number + 1) * self.count / n - 1
        return self.number * n / self.count if self.says in ("size", "whole") else self.number * self.count / n

    @property
    def divided(self) -> float:
        """Return the number where arrays are divided over the axes: the size of a block makes it another one."""
        return {"whole": self.number / self.count, "mean": self.number * self.count}.get(self.says, self.number)

    def stands(self, value: float) -> bool:
        """Return whether a number of the program where arrays are divided may be this one."""
        return math.isclose(value, self.divided, rel_tol=1e-6)

    def __str__(self) -> str:
        what = _SAYS[self.says].format(axes=", ".join(self.axes))
        return f"{self.divided:g} at {self.line or 'several lines'} is read as {what}"


_SAYS = {
    "size": "the size of {axes}",
    "last": "one less than the size of {axes}",
    "share": "one over the size of {axes}",
    "block": "the size of a block along {axes}",
    "end": "one less than the size of a block along {axes}",
    "whole": "the size of {axes} times that of a block",
    "mean": "one over the size of {axes} times that of a block",
}


def read_as(several: Sequence[Reading], sizes: Mapping[str, int], jaxpr: Any) -> dict[int, float]:
    """Return what the numbers of a program are on a mesh of these sizes, by the `id` of each `Literal` or constant."""
    found = {}
    for atom, number, line, _ in _numbers(jaxpr) if several else ():
        for one in several:
            if one.may_be(number) and one.line in ("", line):
                found[id(atom)] = one.on(sizes)
    return found


def readings(ours: Any, base: Any, written: Mapping[str, int]) -> Iterator[tuple[Reading, ...]]:
    """The ways to read numbers of a program as sizes: one at all lines where it stands, one at one line, and two.

    Args:
      ours: The program on its mesh, whose blocks have sizes too.
      base: The same on the mesh where it is read.
      written: The sizes for which the numbers may have been written.
    """
    lines: dict[Number, dict[str, None]] = {}
    here: dict[str, set[float]] = {}
    history = History(base)
    for _, (value, _), line, _ in _numbers(ours):
        here.setdefault(line, set()).add(value)
    for _, number, line, eqn in _numbers(base):
        if number[1] or eqn is None or not _is_slope(eqn, history):
            lines.setdefault(number, {})[line] = None
    everywhere, alone = [], []
    for one in dict.fromkeys(_possible(ours, written)):
        found = [line for number in lines if one.may_be(number) for line in lines[number]]
        at = [line for line in dict.fromkeys(found) if any(map(one.stands, here.get(line, ())))]
        everywhere += [replace(one, line=at[0]) if len(at) == 1 else one] if at else []
        alone += [replace(one, line=line) for line in at] if len(at) > 1 else []
    pairs = itertools.combinations(everywhere, 2)
    most = min(_MOST, _EQUATIONS // max(1, sum(1 for _ in equations(base))))
    return itertools.islice(itertools.chain(((one,) for one in (*everywhere, *alone)), pairs), most)


def _possible(ours: Any, written: Mapping[str, int]) -> Iterator[Reading]:
    count = lambda axes: math.prod(written[axis] for axis in axes)
    groups = list(subsets(list(written)))
    for says, number in (("size", lambda n: n), ("share", lambda n: 1 / n), ("last", lambda n: n - 1)):
        for axes in groups:
            yield Reading(number(count(axes)), says, axes, count(axes))
    bodies = [eqn for eqn in equations(ours) if eqn.primitive.name == "shard_map"]
    for axes, size in (dim for eqn in bodies for dims in _inputs(eqn) for dim in dims if dim[0]):
        yield Reading(size // count(axes), "block", axes, count(axes))
        if size > count(axes):  # else it is zero, as many a number
            yield Reading(size // count(axes) - 1, "end", axes, count(axes))
    if any(written[axis] != n for eqn in bodies for axis, n in _compat.made_manual(eqn).items()):
        return  # of another mesh, on which the written size times a block is not the whole
    # What JAX keeps for a derivative is not an array of the program.
    wholes = dict.fromkeys(
        one for eqn in bodies if not is_transposed(eqn) for dims in _inputs(eqn) for one in _some(dims)
    )
    for axes, size in wholes:
        number = count(axes) * size
        if size and number not in {other for _, other in wholes}:  # else it may be that one, and the size is forgotten
            yield Reading(number, "whole", axes, count(axes))
            yield Reading(1 / number, "mean", axes, count(axes))


_Dim = tuple[tuple[str, ...], int]  # the axes that divide a dimension, or several, and the size of the whole


def _inputs(body: Any) -> Iterator[list[_Dim]]:
    """The dimensions of each input of a body."""
    for spec, var in zip(body.params["in_specs"], body.invars, strict=True):
        shape = shape_of(var)
        yield list(zip(map(axes_tuple, _compat.partitions(spec, len(shape))), shape, strict=True))


def _some(dims: Sequence[_Dim]) -> Iterator[_Dim]:
    """Some dimensions of an array together, of which one is divided."""
    for several in subsets(dims):
        if axes := tuple(axis for one, _ in several for axis in one):
            yield axes, math.prod(size for _, size in several)


def _is_slope(eqn: Equation, history: History) -> bool:
    """Return whether a backward pass alone reads what an equation makes: the 2 of `2 * x`, from `x**2`, is JAX's. The
    user's own factors are in the backward pass too."""
    return not is_transposed(eqn) and history.forward.isdisjoint(eqn.outvars)


def _numbers(jaxpr: Any) -> Iterator[tuple[Any, Number, str, Equation | None]]:
    """The real numbers that stand in equations, and where; and those that the program closes over."""
    for eqn in equations(jaxpr):
        for atom in eqn.invars:
            if isinstance(atom, Literal) and (number := _real(atom.val, atom.aval.dtype)):
                yield atom, number, line_of(eqn), eqn
    closed = (part.jaxpr for eqn in equations(jaxpr) for part in held(eqn))
    for value in itertools.chain.from_iterable(opened(one)[1] for one in (jaxpr, *closed)):
        if not isinstance(value, jax.core.Tracer) and (number := _real(value, value.dtype)):
            yield value, number, "a constant from outside", None


def _real(value: Any, dtype: Any) -> Number | None:
    whole = jnp.issubdtype(dtype, jnp.integer)
    real = np.ndim(value) == 0 and (whole or jnp.issubdtype(dtype, jnp.floating))
    return (float(value), whole) if real else None
