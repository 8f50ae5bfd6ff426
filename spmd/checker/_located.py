"""Where a program begins to differ from one device: at the first value that no layout makes of the value there.

Both programs are one text, traced on two meshes, so their equations correspond. Of each value the numbers are known on
all devices, and on one. A right value is a block of that, a copy, or what a reduction over the devices completes.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.facts import CallName
from spmd._jaxprs.lines import line_of
from spmd._jaxprs.walker import Equation, Role, Variable, equations, held, opened
from spmd.checker._numbers import rounded, subsets
from spmd.checker._primitives import Array, draws
from spmd.checker._simulator import Simulator

Known = Mapping[Variable, Array]

_COMPLETE = (np.sum, np.mean, np.max, np.min)
_CLOSE = 1e-6
_NOBODY: frozenset[int] = frozenset()
_NOTHING: frozenset[str] = frozenset()
# No layout fits; nobody knows; a reduction completes it; it is as on one device.
_LOST, _UNKNOWN, _TERM, _WHOLE = range(4)

Where = tuple[Equation, tuple[Equation, ...]]


class Located(NamedTuple):
    """Where a program begins to differ.

    Attributes:
      found: The equations that make a value which fits no layout of values that fit one, with those around them.
      lines: Their lines, and those of all that they read before it is complete: of a maximum over a block, say.
      behind: The lines of all that reads a value which fits no layout. Nobody knows whether that is right.
      seen: All lines that were looked at, in the order of the program.
      noisy: Whether random numbers are among the values that fit no layout.
      counts: For those of `lines` with a number that is smaller than on one device, as the size of a block is: both.
    """

    found: Sequence[Where] = ()
    lines: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()
    seen: Sequence[str] = ()
    noisy: bool = False
    counts: Mapping[str, tuple[str, str]] = MappingProxyType({})

    @property
    def at_loops(self) -> bool:
        """Whether loops are among the equations: the round that was looked at does not show what makes the value."""
        return any(eqn.primitive.name in ("scan", "while") for eqn, _ in self.found)

    def clears(self, lines: Collection[str]) -> bool:
        """Return whether what stands at one of these lines is complete before values begin to differ."""
        known = bool(self.found) and "" not in self.lines and not set(self.seen).isdisjoint(lines)
        return known and (self.lines | self.behind).isdisjoint(lines)


def located(ours: Any, base: Any, here: Known, there: Known) -> Located:
    """Return where values begin to differ. Only those equations count from which a result is reached through values
    that fit no layout.

    Args:
      ours: The program on its mesh.
      base: The same on a mesh of ones.
      here: The numbers of the first, with the mesh axes in front; inside of a loop those of one round.
      there: The numbers of the second.
    """
    one, other = ([eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"] for jaxpr in (ours, base))
    if len(one) != len(other):
        return Located()
    walk, guilty = _Walk(here, there), set[int]()
    for body, twin in zip(one, other, strict=True):
        if max(_compat.made_manual(twin).values(), default=1) == 1:
            walk.machine.sizes = dict(_compat.made_manual(body))
            guilty |= walk.visit(body.params["jaxpr"], twin.params["jaxpr"], (body,), [_NOBODY] * len(body.invars))
    first = [walk.found[number] for number in sorted(guilty, key=lambda one: (one in walk.absorbed, one))]
    lines = _NOTHING.union(*(walk.read[number] for number in guilty))
    behind = frozenset(line for line, origins in walk.behind if origins & guilty)
    counts = {line: pair for line, pair in walk.counts.items() if line in lines}
    return Located(first, lines, behind, tuple(walk.seen), walk.noisy, counts)


def at_round(look: Callable[[int], Located], rounds: int) -> Located:
    """Return where values begin to differ, in the first round that shows it. A loop whose results differ is among what
    is found in the rounds before.

    Args:
      look: What is found where the values inside of loops are those of this round.
      rounds: How many rounds the longest loop has.
    """
    first = look(0)
    if not first.at_loops:
        return first
    before, number = 0, rounds
    while number - before > 1:
        middle = (before + number) // 2
        before, number = (middle, number) if look(middle).at_loops else (before, middle)
    found = look(number)
    return found if found.found and not found.at_loops else first


class _Walk:
    """Bodies, each beside itself on a mesh of ones.

    Attributes:
      found: The equations that make a value which fits no layout of values that fit one.
      read: For each of them the lines of what it reads before that is complete.
      behind: The lines of all that reads a value which fits no layout, and the equations that it comes from.
      seen: All lines, in order.
      noisy: Whether random numbers are among the values that fit no layout.
      counts: As of `Located`.
      numbers: Whether a variable is made of numbers of the program alone. These may be sizes of blocks.
      absorbed: Those of which a value is made that fits one again, such as the indices of a table that is divided.
        Where there are others, they are innocent.
      lost: For each variable whose numbers fit no layout, or are of another size, which of these equations it comes
        from.
      open: For each variable that is not complete, the lines that it comes from.
    """

    def __init__(self, here: Known, there: Known) -> None:
        self.here, self.there, self.machine = here, there, Simulator(0)
        self.lost: dict[Variable, frozenset[int]] = {}
        self.open: dict[Variable, frozenset[str]] = {}
        self.found: list[Where] = []
        self.read: list[frozenset[str]] = []
        self.behind: list[tuple[str, frozenset[int]]] = []
        self.seen: dict[str, None] = {}
        self.noisy = False
        self.counts: dict[str, tuple[str, str]] = {}
        self.numbers: dict[Variable, bool] = {}
        self.absorbed: set[int] = set()

    def visit(
        self, one: Any, other: Any, callers: tuple[Equation, ...], given: Sequence[frozenset[int]]
    ) -> frozenset[int]:
        """Look at a jaxpr and its twin, whose inputs come from these equations. Return what its results come from."""
        first, second = opened(one)[0], opened(other)[0]
        for var, like, origins in zip(first.invars, second.invars, given, strict=False):
            self._mark(var, like, origins, self.open.get(var, _NOTHING))
        for eqn, twin in _corresponding(first.eqns, second.eqns):
            read = _NOTHING.union(*(self.open.get(v, _NOTHING) for v in eqn.invars if not isinstance(v, Literal)))
            if twin is None:
                self.open.update(dict.fromkeys(eqn.outvars, read | {line_of(eqn, callers)}))
                self.lost.update(dict.fromkeys(eqn.outvars, _NOBODY.union(*map(self._origins, eqn.invars))))
                continue
            self._compare(eqn, twin, callers, read)
        return _NOBODY.union(*map(self._origins, first.outvars))

    def _compare(self, eqn: Equation, twin: Equation, callers: tuple[Equation, ...], read: frozenset[str]) -> None:
        """Look at an equation and its twin."""
        operands, line = [self._origins(atom) for atom in eqn.invars], line_of(eqn, callers)
        origins = _NOBODY.union(*operands)
        made = bool(eqn.invars) and not (held(eqn) or draws(eqn))
        self.numbers.update(dict.fromkeys(eqn.outvars, made and all(map(self._is_number, eqn.invars))))
        own = not any(isinstance(name, CallName) for _, name in _compat.name_stack(eqn))  # and not a verb's
        for one, other in zip(eqn.invars, twin.invars, strict=False):
            if own and isinstance(one, Literal) and isinstance(other, Literal) and abs(one.val) < abs(other.val):
                self.counts[line] = f"{one.val:g}", f"{other.val:g}"
        parts = (
            zip(held(eqn), held(twin), strict=False) if eqn.params.get("length") == twin.params.get("length") else ()
        )
        for part, like in parts:
            if part.role == Role.SCALARS:  # a part of the equation's own work
                continue
            inner = opened(part.jaxpr)[0]
            for var, atom in zip(inner.invars, part.of(eqn.invars), strict=False):
                self.open[var] = _NOTHING if isinstance(atom, Literal) else self.open.get(atom, _NOTHING)
                self.numbers[var] = self._is_number(atom)
            origins |= self.visit(part.jaxpr, like.jaxpr, (*callers, eqn), part.of(operands))
            read = read.union(*(self.open.get(v, _NOTHING) for v in inner.outvars if not isinstance(v, Literal)))
        self.seen.setdefault(line)
        read |= {line} if line or not read else _NOTHING
        self.behind += [(line, _NOBODY.union(*operands))] if any(operands) else []
        new = origins or (frozenset((len(self.found),)) if own else _NOBODY)
        fits = [self._mark(var, like, new, read) for var, like in zip(eqn.outvars, twin.outvars, strict=False)]
        self.noisy |= _LOST in fits and draws(eqn)
        if _LOST in fits and own and not origins:
            self.found.append((eqn, callers))
            self.read.append(read)
        elif min(fits, default=_LOST) > _UNKNOWN:
            self.absorbed |= origins

    def _origins(self, atom: Variable) -> frozenset[int]:
        return _NOBODY if isinstance(atom, Literal) else self.lost.get(atom, _NOBODY)

    def _is_number(self, atom: Variable) -> bool:
        return isinstance(atom, Literal) or self.numbers.get(atom, False)

    def _mark(self, var: Variable, like: Variable, origins: frozenset[int], read: frozenset[str]) -> int:
        """Keep where a variable comes from if it is not complete, and return how it fits."""
        fit = self._fit(self.here.get(var), self.there.get(like))
        fit = max(fit, _UNKNOWN) if self._is_number(var) else fit
        self.open[var] = _NOTHING if fit == _WHOLE else read
        earlier = frozenset(one for one in origins if one < len(self.found))  # what nobody knows is no new origin
        self.lost[var] = {_LOST: origins, _UNKNOWN: earlier}.get(fit, _NOBODY)
        return fit

    def _fit(self, x: Array | None, y: Array | None) -> int:
        """Return whether an array may be what the devices hold of another one. Of other sizes nobody knows."""
        lead = self.machine.lead
        if x is None or y is None or x.ndim != y.ndim or any(n > 1 for n in y.shape[:lead]):
            return _UNKNOWN
        joined = [self._joined(x, one) for one in _layouts(x.shape[lead:], y.shape[lead:], self.machine.sizes)]
        if any(_close(one, y) for one in joined):
            return _WHOLE
        return _TERM if any(self._completes(one, y) for one in joined) else _LOST if joined else _UNKNOWN

    def _joined(self, x: Array, layout: Sequence[Sequence[str]]) -> Array:
        for dim, axes in enumerate(layout):
            x = self.machine.joined(x, axes, dim) if axes else x
        return x

    def _completes(self, x: Array, y: Array) -> bool:
        """Return whether what devices hold is equal to an array after a reduction over some of the axes."""
        differing = [i for i in range(self.machine.lead) if x.shape[i] > 1]
        return any(_close(fn(x, axis=at, keepdims=True), y) for at in subsets(differing) for fn in _COMPLETE)


def _corresponding(ones: Sequence[Equation], others: Sequence[Equation]) -> Iterator[tuple[Equation, Equation | None]]:
    """The equations of a trace, each with that of another one which stands at its line. A verb has none along
    one device.
    """
    keys = [[(eqn.primitive.name, line_of(eqn)) for eqn in eqns] for eqns in (ones, others)]
    twins: dict[int, Equation] = {}
    for i, j, count in difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks():
        twins.update(zip(range(i, i + count), others[j : j + count], strict=True))
    return ((eqn, twins.get(i)) for i, eqn in enumerate(ones))


def _layouts(local: Sequence[int], whole: Sequence[int], sizes: Mapping[str, int]) -> Iterator[list[tuple[str, ...]]]:
    """The axes that may divide each dimension."""
    wide = [axis for axis, n in sizes.items() if n > 1]
    orders = [()] + [axes for k in range(len(wide)) for axes in itertools.permutations(wide, k + 1)]
    times = lambda axes: math.prod(sizes[axis] for axis in axes)
    dims = [[axes for axes in orders if n * times(axes) == m] for n, m in zip(local, whole, strict=True)]
    for layout in itertools.product(*dims):
        axes = list(itertools.chain.from_iterable(layout))
        if len(set(axes)) == len(axes):
            yield list(layout)


def _close(x: Array, y: Array) -> bool:
    if x.dtype.kind not in "fc":
        return bool((x == y).all())
    return bool(np.isclose(x, y, rtol=_CLOSE, atol=_CLOSE * max(rounded(x, y), 1e-30), equal_nan=True).all())
