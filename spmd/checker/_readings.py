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

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.lines import LineName, line_of
from spmd._jaxprs.walker import equations, shape_of
from spmd.language import axes_tuple

_MOST = 16  # readings that are tried
_EQUATIONS = 20_000  # that all of them may have together


Number = tuple[float, bool]  # and whether its type is that of an integer


@dataclass(frozen=True)
class Reading:
    """A number of a program, as what the sizes of axes make it.

    Attributes:
      number: The number.
      says: What it is: "size", "last", "share", or "block".
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
        return math.isclose(value, self.number, rel_tol=1e-6) and (whole or self.says != "block")

    def on(self, sizes: Mapping[str, int]) -> float:
        """Return what the number is on a mesh of these sizes."""
        n = math.prod(sizes[axis] for axis in self.axes)
        return {"size": n, "last": n - 1, "share": 1 / n, "block": self.number * self.count / n}[self.says]

    def __str__(self) -> str:
        axes = ", ".join(self.axes)
        form = {"size": "the size", "last": "one less than the size", "share": "one over the size"}
        what = f"{form[self.says]} of {axes}" if self.says in form else f"the size of a block along {axes}"
        return f"{self.number:g} at {self.line or 'several lines'} is read as {what}"


@dataclass(frozen=True)
class ReadShift:
    """A permutation for one number of devices, as the shift that it is there."""

    line: str

    def __str__(self) -> str:
        return f"the permutation at {self.line} is read as a shift"


def read_as(several: Sequence[Reading], sizes: Mapping[str, int], jaxpr: Any) -> dict[int, float]:
    """Return what the numbers of a program are on a mesh of these sizes, by the `id` of each `Literal`."""
    found = {}
    for atom, number, line in _numbers(jaxpr) if several else ():
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
    lines: dict[Number, dict[LineName, None]] = {}
    same = {(number, line) for _, number, line in _numbers(ours)}  # others are made of the sizes of arrays
    for _, number, line in _numbers(base):
        if (number, line) in same:
            lines.setdefault(number, {})[line] = None
    everywhere, alone = [], []
    for one in dict.fromkeys(_possible(ours, written)):
        at = list(dict.fromkeys(line for number in lines if one.may_be(number) for line in lines[number]))
        everywhere += [replace(one, line=at[0]) if len(at) == 1 else one] if at else []
        alone += [replace(one, line=line) for line in at] if len(at) > 1 else []
    pairs = itertools.combinations(everywhere, 2)
    most = min(_MOST, _EQUATIONS // max(1, sum(1 for _ in equations(base))))
    return itertools.islice(itertools.chain(((one,) for one in (*everywhere, *alone)), pairs), most)


def _possible(ours: Any, written: Mapping[str, int]) -> Iterator[Reading]:
    several = [axes for k in range(1, len(written) + 1) for axes in itertools.combinations(written, k)]
    for says, number in (("size", lambda n: n), ("share", lambda n: 1 / n), ("last", lambda n: n - 1)):
        for axes in several:
            n = math.prod(written[axis] for axis in axes)
            yield Reading(number(n), says, axes, n)
    for eqn in equations(ours):
        if eqn.primitive.name == "shard_map":
            for spec, var in zip(eqn.params["in_specs"], eqn.invars, strict=True):
                for dim, axes in enumerate(_compat.partitions(spec, len(shape_of(var)))):
                    if axes := axes_tuple(axes or ()):
                        n = math.prod(written[axis] for axis in axes)
                        yield Reading(shape_of(var)[dim] // n, "block", axes, n)


def _numbers(jaxpr: Any) -> Iterator[tuple[Literal, Number, LineName]]:
    """The real numbers that stand in equations, and where."""
    for eqn in equations(jaxpr):
        for atom in eqn.invars:
            if isinstance(atom, Literal) and np.ndim(atom.val) == 0:
                whole = jnp.issubdtype(atom.aval.dtype, jnp.integer)
                if whole or jnp.issubdtype(atom.aval.dtype, jnp.floating):
                    yield atom, (float(atom.val), whole), line_of(eqn)
