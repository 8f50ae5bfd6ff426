"""Sums over devices that run too often, or on more than they need: they may wait until after a loop, or until an array
is smaller."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.lines import gradient_line, is_transposed, line_of, short_line
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, axes_of, opened, shape_of, walk
from spmd._text import bytes_text, sent_bytes
from spmd.inspect._collectives import grouped
from spmd.language import axes_product

_SUMS = frozenset(("psum", "psum_invariant"))
# Linear in their first operand, or in each of them.
_LINEAR_NAMES = """neg convert_element_type reshape transpose squeeze reduce_sum slice dynamic_slice copy rev
    spmd_layout spmd_names name sharding_constraint pcast pvary mul div dot_general scatter-add scatter_add"""
_LINEAR = frozenset(_LINEAR_NAMES.split())
_ADDS = frozenset(("add", "add_any"))


@dataclass(frozen=True)
class Hint:
    """A sum over devices that costs more than it need.

    Attributes:
      where: `file.py:12`, the user's line.
      kind: "often", it runs in each round of a loop and once behind it suffices; "large", what it sums becomes smaller.
      axes: The mesh axes that it runs over.
      times: How often one call runs it.
      bytes: Bytes that one device sends for it in one call.
      least: The same, if it waits.
      advice: What to write.
    """

    where: str
    kind: str
    axes: tuple[str, ...]
    times: int
    bytes: int
    least: int
    advice: str

    def __str__(self) -> str:
        along = ", ".join(self.axes)
        runs = f"runs {self.times} times" if self.times > 1 else "runs once"
        why = "once behind the loop suffices" if self.kind == "often" else "what it sums becomes smaller"
        sizes = f"{bytes_text(self.bytes)}, and {bytes_text(self.least)} if it waits"
        return f"this sum over {along} {runs}, and {why} ({sizes}): {self.advice}"


@dataclass(eq=False, slots=True)
class _Link:
    """A sum over devices, or what linear operations alone make of it; or the carry of a loop.

    Attributes:
      size: Its bytes.
      axes: The mesh axes of the sum; none of a carry.
      carry: To which carry it was added, if to any.
      rounds: The rounds of the loop that has added it up.
      uses: How often it is used.
      next: What a linear operation makes of it.
    """

    size: int = 0
    axes: frozenset[str] = frozenset()
    carry: _Link | None = None
    rounds: int = 1
    uses: int = 0
    next: _Link | None = None


class _Sums(Domain):
    """The sums of a program, each with what is known where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...], int, int, bool, _Link]] = []

    def join(self, one: Any, other: Any) -> None:
        return None

    def same(self, one: Any, other: Any) -> bool:
        return True  # a loop is walked once

    def use(self, links: Sequence[_Link | None]) -> list[None]:
        """Count uses, and forget what was used."""
        for one in links:
            if one is not None:
                one.uses += 1
        return [None] * len(links)

    def step(self, eqn: Equation, operands: Sequence[_Link | None]) -> list[_Link | None]:
        self.use(operands)
        links = [one for one in operands if one is not None]
        sums = [one for one in links if one.axes]
        if len(sums) != 1 or len(eqn.outvars) != 1:
            return [None] * len(eqn.outvars)
        adds = eqn.primitive.name in _ADDS and len(links) == 2
        if adds or _is_linear(eqn, operands, sums[0].axes):
            carry = next((one for one in links if one is not sums[0]), None)
            sums[0].next = _Link(_size(eqn.outvars[0]), sums[0].axes, carry)
        return [sums[0].next]

    def sum(self, eqn: Equation, operands: Sequence[_Link | None]) -> list[_Link | None]:
        """A sum over devices."""
        self.use(operands)
        maps = [one for one in self.callers if one.primitive.name == "shard_map"]
        sizes = {axis: n for one in maps for axis, n in _compat.made_manual(one).items() if n > 1}
        axes = tuple(axis for axis in axes_of(eqn) if axis in sizes)
        if not axes:
            return [None] * len(eqn.outvars)
        times = math.prod(one.params.get("length", 1) for one in self.callers)
        backward = is_transposed(eqn, self.callers)
        where = short_line(gradient_line(eqn) if backward and not line_of(eqn) else line_of(eqn, self.callers))
        links = [_Link(_size(out), frozenset(axes)) for out in eqn.outvars]
        self.found += [(where, axes, axes_product(axes, sizes), times, backward, link) for link in links]
        return [*links]

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[_Link | None]) -> Sequence[None]:
        return self.use(super().mapped(eqn, part, self.use(operands)))

    def branches(self, eqn: Equation, parts: Sequence[Held], operands: Sequence[_Link | None]) -> Sequence[None]:
        return super().branches(eqn, parts, self.use(operands))

    def loop(self, eqn: Equation, body: Held, test: Held | None, operands: Sequence[_Link | None]) -> Sequence[Any]:
        """What a scan only adds up in a carry may be summed behind it."""
        given: list[Any] = self.use(operands)
        count = len(body.stacked) - sum(body.stacked)
        first = len(body.operands) - sum(body.sliced) - count
        given[first : first + count] = carries = [_Link() for _ in range(count)]
        outs = super().loop(eqn, body, test, given)
        found: list[Any] = [None] * len(outs)
        for i, (out, carry) in enumerate(zip(outs, carries, strict=False)):
            once = carry.uses == 1 and [*outs].count(out) == 1
            if out is not None and once and out.carry is carry and out.uses == 0:
                out.uses, out.next = 1, _Link(out.size, out.axes, rounds=eqn.params["length"])
                found[i] = out.next
        return found


_Sums.rules = dict.fromkeys(_SUMS, _Sums.sum)


def hints_of(jaxpr: Any) -> tuple[Hint, ...]:
    """The hints on a whole program, the dearest first. Equal ones are put together."""
    live, sums = _compat.live_jaxpr(opened(jaxpr)[0]), _Sums()
    sums.use(walk(live, [None] * len(live.invars), sums))
    cheaper = (one for one in itertools.starmap(_hint, sums.found) if one.least < one.bytes)
    alike = grouped(cheaper, lambda one: (one.where, one.kind, one.axes, one.advice)).values()
    sums_of = lambda ones: {name: sum(getattr(one, name) for one in ones) for name in ("times", "bytes", "least")}
    return tuple(sorted((replace(ones[0], **sums_of(ones)) for ones in alike), key=lambda one: one.least - one.bytes))


def _hint(where: str, axes: tuple[str, ...], devices: int, times: int, backward: bool, link: _Link) -> Hint:
    """The hint on a sum, with the least bytes that it becomes while it goes through linear operations alone, and is
    only added up in loops."""
    size, least, rounds = link.size, link.size, 1
    while link.uses == 1 and link.next is not None:
        link = link.next
        least, rounds = min(least, link.size), rounds * link.rounds
    kind = "often" if rounds > 1 else "large"
    now, then = (sent_bytes("psum", n, devices) * times for n in (size, least))
    return Hint(where, kind, axes, times, now, then // rounds, _advice(kind, backward, axes))


def _advice(kind: str, backward: bool, axes: Sequence[str]) -> str:
    marks = ",".join(axes)
    if backward:
        when = "before the loop" if kind == "often" else "before it is gathered, sliced or repeated"
        return f'spmd.defer(x, "... -> ... {{R:{marks}}}") {when}, for the x whose gradient it is'
    behind = "behind the loop" if kind == "often" else "behind what makes it smaller"
    return f"carry what each device has, and spmd.psum it {behind}"


def _is_linear(eqn: Equation, operands: Sequence[Any], axes: frozenset[str]) -> bool:
    """Return whether a sum, one of the operands, may wait until behind an equation: what else that takes is equal along
    the axes."""
    name, places = eqn.primitive.name, [i for i, one in enumerate(operands) if one is not None]
    first = name in ("div", "dynamic_slice", "reduce_sum") and places != [0]
    last = name.startswith("scatter") and places != [len(operands) - 1]
    if name not in _LINEAR or len(places) > 1 or first or last:
        return False
    others = [atom for i, atom in enumerate(eqn.invars) if i not in places and not isinstance(atom, Literal)]
    return all(axes.isdisjoint(_compat.varying_type(atom.aval)) for atom in others)


def _size(atom: Variable) -> int:
    return math.prod(shape_of(atom)) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 0)
