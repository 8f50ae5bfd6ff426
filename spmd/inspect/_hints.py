"""Sums over devices that run too often, or on more than they need: they may wait until after a loop, or until an array
is smaller."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.lines import gradient_line, is_transposed, line_of
from spmd._jaxprs.walker import Equation, Role, Variable, axes_of, held, opened, shape_of
from spmd._text import bytes_text, sent_bytes

_SUMS = frozenset(("psum", "psum_invariant"))
# Linear in their first operand, or in each of them.
_LINEAR_NAMES = """neg convert_element_type reshape transpose squeeze reduce_sum slice dynamic_slice copy rev
    spmd_layout name sharding_constraint pcast pvary mul div dot_general scatter-add scatter_add"""
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


class _Scope(NamedTuple):
    """A jaxpr that runs: the equation that holds it, and the scope around it."""

    jaxpr: Any
    times: int = 1
    eqn: Any = None
    part: Any = None
    outer: Any = None

    @property
    def callers(self) -> list[Any]:
        return [] if self.outer is None else [*self.outer.callers, self.eqn]


def hints_of(jaxpr: Any) -> tuple[Hint, ...]:
    """The hints on a whole program, the dearest first. Equal ones are put together."""
    found: dict[tuple[Any, ...], list[Hint]] = {}
    live = _compat.live_jaxpr(opened(jaxpr)[0])
    for one in _hints(_Scope(live), {}):
        found.setdefault((one.where, one.kind, one.axes, one.advice), []).append(one)
    return tuple(sorted(map(_together, found.values()), key=lambda one: one.least - one.bytes))


def _together(ones: Sequence[Hint]) -> Hint:
    times, now, least = (sum(getattr(one, name) for one in ones) for name in ("times", "bytes", "least"))
    return replace(ones[0], times=times, bytes=now, least=least)


def _hints(scope: _Scope, sizes: dict[str, int]) -> Iterator[Hint]:
    for eqn in scope.jaxpr.eqns:
        if eqn.primitive.name in _SUMS:
            yield from _of_sum(eqn, scope, sizes)
        inside = {**sizes, **_compat.made_manual(eqn)} if eqn.primitive.name == "shard_map" else sizes
        for part in held(eqn) if eqn.params else ():
            if part.role in (Role.CALL, Role.LOOP, Role.BRANCH, Role.MAP):
                times = scope.times * eqn.params.get("length", 1) if part.role == Role.LOOP else scope.times
                yield from _hints(_Scope(opened(part.jaxpr)[0], times, eqn, part, scope), inside)


def _of_sum(eqn: Equation, scope: _Scope, sizes: dict[str, int]) -> Iterator[Hint]:
    axes = tuple(axis for axis in axes_of(eqn) if sizes.get(axis, 1) > 1)
    devices = math.prod(sizes[axis] for axis in axes)
    if devices < 2:
        return
    backward = is_transposed(eqn, scope.callers)
    for out in eqn.outvars:
        size = _size(out)
        least, rounds = _followed(out, scope, frozenset(axes))
        now = sent_bytes("psum", size, devices) * scope.times
        then = sent_bytes("psum", least, devices) * scope.times // rounds
        if then < now:
            kind = "often" if rounds > 1 else "large"
            where = gradient_line(eqn) if backward and not line_of(eqn) else line_of(eqn, scope.callers)
            place = os.path.basename(where.partition(" (")[0])
            yield Hint(place, kind, axes, scope.times, now, then, _advice(kind, backward, axes))


def _advice(kind: str, backward: bool, axes: Sequence[str]) -> str:
    marks = ",".join(axes)
    if backward:
        when = "before the loop" if kind == "often" else "before it is gathered, sliced or repeated"
        return f'spmd.defer(x, "... -> ... {{R:{marks}}}") {when}, for the x whose gradient it is'
    behind = "behind the loop" if kind == "often" else "behind what makes it smaller"
    return f"carry what each device has, and spmd.psum it {behind}"


def _followed(var: Variable, scope: _Scope, axes: frozenset[str]) -> tuple[int, int]:
    """The least bytes that a sum becomes while it goes through linear operations alone, and the rounds of the loops in
    which it is only added up."""
    least, rounds = _size(var), 1
    while True:
        users = [one for one in scope.jaxpr.eqns if any(atom is var for atom in one.invars)]
        left = [i for i, atom in enumerate(scope.jaxpr.outvars) if atom is var]
        if len(users) + len(left) != 1:
            return least, rounds
        if users:
            [user] = users
            if (carry := _added(user, var, scope)) is not None:
                rounds *= scope.eqn.params["length"]
                var, scope = scope.eqn.outvars[carry], scope.outer
                continue
            if not _is_linear(user, var, axes) or user.primitive.name == "scan":
                return least, rounds
            var = user.outvars[0]
            least = min(least, _size(var))
        elif scope.part is not None and scope.part.role == Role.CALL:
            var, scope = scope.eqn.outvars[left[0]], scope.outer
        else:
            return least, rounds


def _added(eqn: Equation, var: Variable, scope: _Scope) -> int | None:
    """The carry of a `scan` to which an equation adds a value, if the loop does nothing else with it."""
    if eqn.primitive.name not in _ADDS or scope.eqn is None or scope.eqn.primitive.name != "scan":
        return None
    [other] = [atom for atom in eqn.invars if atom is not var] or [None]
    body, part = scope.jaxpr, scope.part
    count = len(part.stacked) - sum(part.stacked)
    first = len(part.sliced) - sum(part.sliced) - count
    for i in range(count):
        carry = body.invars[first + i]
        uses = sum(atom is carry for one in body.eqns for atom in one.invars)
        if carry is other and uses == 1 and body.outvars[i] is eqn.outvars[0]:
            kept = sum(atom is eqn.outvars[0] for one in body.eqns for atom in one.invars)
            again = sum(atom is eqn.outvars[0] for atom in body.outvars)
            return i if kept == 0 and again == 1 else None
    return None


def _is_linear(eqn: Equation, var: Variable, axes: frozenset[str]) -> bool:
    """Return whether a sum may wait until behind an equation: what else it takes is equal along the axes."""
    if eqn.primitive.name not in _LINEAR or len(eqn.outvars) != 1:
        return False
    others = [atom for atom in eqn.invars if atom is not var and not isinstance(atom, Literal)]
    if eqn.primitive.name in ("div", "dynamic_slice", "reduce_sum") and eqn.invars[0] is not var:
        return False
    if eqn.primitive.name.startswith("scatter") and eqn.invars[-1] is not var:
        return False
    return all(axes.isdisjoint(_compat.varying_type(atom.aval)) for atom in others)


def _size(atom: Variable) -> int:
    return math.prod(shape_of(atom)) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 0)
