"""Gathered copies that leave a kernel whole: traced again with their gathers invarying, or an error that says why not.

A copy is equal along an axis, and JAX types it varying there. A gather `to="invarying"` gives the same array with the
right type, and another gradient: a slice of the cotangent, which is free, but where data that differ use the copy too,
the cotangent must be completed by an all-reduce, which costs twice the reduce-scatter of a varying copy. So the type is
chosen where nothing else pays for it, and the user decides elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._jaxprs.facts import gather_around
from spmd._jaxprs.lines import is_transposed
from spmd._jaxprs.walker import Domain, Equation, Held, Role, Variable, axes_of, equations, held, opened, shape_of, walk
from spmd._text import bytes_text, sent_bytes
from spmd.checker import OutputFacts, check_jaxpr, early, explain_output, line_of
from spmd.checker._history import EQUAL, History
from spmd.errors import Fix, ReplicationError, SpmdError
from spmd.kernels._outputs import Unequal
from spmd.kernels._translate import carried_axes
from spmd.language import Layout, axes_product
from spmd.mesh import no_mesh
from spmd.modes import EVERYWHERE, Frame

Places = frozenset[Any]


class Accepted(NamedTuple):
    """A kernel whose trace JAX accepts: a function of its arrays, and the places of the gathers that are invarying."""

    run: Any
    jaxpr: Any
    places: Places


def traced_again(
    plan: Any, frame: Frame, specs: Any, leaves: Sequence[Any], error: Unequal | ReplicationError
) -> Accepted:
    """The kernel with the gathers invarying whose copies leave it whole, or are the carry of a loop.

    Args:
      plan: The kernel.
      frame: Its frame.
      specs: The specs of its arguments.
      leaves: The arguments.
      error: Why JAX refused it: results that vary, or an error of which `carried_axes` knows the axes.

    Raises:
      ReplicationError: If a result or a carry is not a copy, if its gathers are not all ours to choose, or if another
        use pays.
    """

    def traced(places: Places) -> Accepted | None:
        run = plan.jit(plan.mapped(frame.replace(invarying=places), specs), inline=True)
        try:
            with no_mesh():
                return Accepted(run, run.trace(*leaves).jaxpr, places)
        except (Unequal, SpmdError):
            return None  # whatever it was, what was wrong before is

    if isinstance(error, Unequal):
        refusal: _Results | _Carry = _diagnosis(plan, frame, specs, leaves, error)
        places = refusal.places()
    else:
        refusal = _Carry(error)
        every = traced(frozenset([EVERYWHERE]))
        places = frozenset() if every is None else _needed(every.jaxpr, carried_axes(error))
    again = traced(places) if places else None
    if again is None:
        raise refusal.error()
    paid = _Uses(dict(frame.sizes)).paid(again.jaxpr)
    if paid or not refusal.computes(again.jaxpr):
        raise refusal.error(paid)
    return again


def _needed(jaxpr: Any, axes: Iterable[str]) -> Places:
    """The chosen gathers that make a carry of a loop, or a result, equal by JAX's type."""
    history = History(jaxpr)
    found: set[Any] = set()
    for axis in axes:
        equal = lambda eqn, _, axis=axis: axis in axes_of(eqn) and eqn.primitive.name in EQUAL
        for atom in _ends(jaxpr):
            if axis in _compat.varying_type(atom.aval):
                continue
            for eqn, _, callers in filter(None, map(history.made.get, history.behind(atom, equal))):
                known = gather_around(eqn, callers)
                if known is not None and known.chosen:
                    found.add(known.place)
    return frozenset(found)


def _ends(jaxpr: Any) -> Iterator[Any]:
    """The results of the kernel's body, and what each loop in it carries on."""
    for eqn in equations(jaxpr):
        for part in held(eqn):
            atoms = opened(part.jaxpr)[0].outvars
            kept = len(part.stacked) - sum(part.stacked) if part.role == Role.LOOP else len(atoms)
            yield from (x for x in atoms[:kept] if part.role in (Role.LOOP, Role.MAP) and not isinstance(x, Literal))


# --- why a result varies ------------------------------------------------------------------------------------


class _Carry(NamedTuple):
    """A loop whose carry is a copy after one step, and not before."""

    refused: ReplicationError

    def error(self, paid: Sequence[Paid] = ()) -> ReplicationError:
        if not paid:
            return self.refused
        fault = self.refused.fault
        advice = f'{fault.advice}; or gather to="invarying", and the other uses pay'
        return ReplicationError(replace(fault, got=[*fault.got, *_lines(paid)], advice=advice))

    def computes(self, again: Any) -> bool:
        """Return whether the body takes no derivative. In a derivative JAX's types decide what is summed, and no other
        trace of this body shows what they changed."""
        return not _derives(_body(again))


class _Results(NamedTuple):
    """Results that vary: a body traced with outputs that may, what these really are, and what types suspect in it.

    A suspicion in the body is the cause where no other trace is accepted. In one that is, numbers decide on it.
    """

    plan: Any
    frame: Frame
    unequal: Unequal
    jaxpr: Any
    facts: list[OutputFacts]
    inside: ReplicationError | None

    def places(self) -> Places:
        """The calls whose results must be invarying for JAX to accept all results; none where that is not certain."""
        found: set[Any] = set()
        for index, axes in self.unequal.faults:
            for axis in axes:
                calls = self.facts[index].calls.get(axis, ())
                if not calls or any(call is None or call.place is None for call in calls):
                    return frozenset()
                found.update(call.place for call in calls if call is not None)
        return frozenset(found)

    def error(self, paid: Sequence[Paid] = ()) -> ReplicationError:
        """Return what is wrong, and the lines to paste."""
        if self.inside is not None:
            return self.inside
        got: list[str] = []
        fixes: list[Fix] = []
        advice: list[str] = []
        differs = any(axis in self.facts[i].different for i, axes in self.unequal.faults for axis in axes)
        for index, axes in self.unequal.faults:
            for axis in axes:
                line, to_paste, words = _one_axis(self.facts[index], self.plan.outputs, index, axis)
                got.append(line)
                fixes += to_paste
                advice += words
        if paid:
            got += _lines(paid)
            extra = bytes_text(sum(one.once for one in paid))
            advice.append(f'or gather once more, to="invarying", for the result alone: {extra} more forward')
        signature = self.plan.signature
        error = ReplicationError(
            _DIFFERS if differs else _PAYS if paid else _LEAVES,
            call=signature.text,
            source=signature.source,
            got=[*got, self.frame.describe()],
            fix=tuple(dict.fromkeys(fixes)),
            advice="; ".join(dict.fromkeys(advice)) or None,
        )
        error.program = self.jaxpr
        return early(error, self.facts[self.unequal.faults[0][0]].line)

    def computes(self, again: Any) -> bool:
        """Return whether the body computes the same as before: types decide derivatives, and nothing else. (The trace
        for the diagnosis adds a dimension to each result.)"""
        before, after = _body(self.jaxpr), _body(again)
        if not (_derives(before) or _derives(after)):
            return True
        one, two = list(_steps(before)), list(_steps(after))
        return one[: len(two)] == two


_DIFFERS = "a result differs along a mesh axis on which its layout says that it is equal."
_LEAVES = 'a gathered copy leaves the kernel whole: gather it to="invarying", so that JAX too knows that it is equal.'
_PAYS = 'a gathered copy leaves the kernel whole. Gathered to="invarying", another use of it costs more backward.'


def _diagnosis(plan: Any, frame: Frame, specs: Any, leaves: Sequence[Any], unequal: Unequal) -> _Results:
    everywhere = frame.axis_names

    def body(*shards: Any) -> Any:
        flat = plan.run(frame.replace(diagnosing=True), shards, local=True)
        return tuple(_compat.pvary(x, everywhere)[None] for x in flat)

    body.__wrapped__ = plan.signature.fn  # so that the jaxpr says where it was written
    mapped = plan.shard_map(body, specs, P(everywhere))
    program = jax.make_jaxpr(plan.jit(mapped))(*leaves)
    [entry] = program.eqns
    known = {"mesh_axes": everywhere, "kernel": plan.signature.text}
    known |= {"arg_names": plan.paths, "arg_layouts": plan.layouts}
    inside = None
    try:
        check_jaxpr(entry.params["jaxpr"], how=plan.check, always=True, **known)
    except ReplicationError as error:
        error.program, inside = program, error
    return _Results(plan, frame, unequal, program, explain_output(entry.params["jaxpr"], **known), inside)


def _one_axis(fact: OutputFacts, outputs: Any, index: int, axis: str) -> tuple[str, Sequence[Fix], Sequence[str]]:
    """Say what is wrong with one result along one axis, with fixes and advice."""
    path, layout = outputs.paths[index], outputs.layouts[index]
    if axis in fact.different:
        reason = "; ".join(fact.reasons.get(axis, ())[:3])
        got = f'{path}: "{layout.short}" says equal on {axis}, and it differs there' + (f": {reason}" if reason else "")
        return got, [], [_close(layout, axis)]
    lines = ", ".join(x for x in fact.copies.get(axis, ()) if x)
    how = f"is a gathered copy on {axis} (gathered at {lines})" if lines else f"is equal on {axis}, and typed varying"
    calls = [call.again for call in fact.calls.get(axis, ()) if call is not None and call.again is not None]
    fixes = calls or _retype(layout, axis, path)
    return f"{path} {how}", fixes, [] if fixes else [f'a gather over {axis} with to="invarying"']


def _retype(layout: Layout, axis: str, path: str) -> list[Fix]:
    """Return how a copy that came from no gather (a carry that varies from the start) becomes equal by JAX's type."""
    if layout.is_scalar:
        return [Fix("reduce", (path,), "scalar -> scalar", {"op": "mean"})]
    i = next((i for i, dim in enumerate(layout.dims) if len(dim.atoms) == 1 and dim.atoms[0].named), None)
    if i is None:
        return []
    [atom] = layout.dims[i].atoms
    cut = replace(layout.dims[i], atoms=(replace(atom, axes=(*(atom.axes or ()), axis)),))
    block = Layout.from_dims((*layout.dims[:i], cut, *layout.dims[i + 1 :]), layout.unreduced, layout.reduced)
    whole = Fix("split", (path,), f"{layout.short} -> {block.short}")
    return [Fix("all_gather", (whole,), f"{block.short} -> {layout.short}", {"to": "invarying"})]


def _close(layout: Layout, axis: str) -> str:
    partial = Layout.from_dims(layout.dims, unreduced=(*layout.unreduced, axis), reduced=layout.reduced)
    return (
        f'psum(x, "{partial.short} -> {layout.short}") if each device holds a part of a sum; all_gather(...) if a block'
    )


# --- who pays -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paid:
    """One gather that other uses pay for, in bytes that a device sends in one backward pass.

    Attributes:
      axes: The axes of the gather.
      once: The reduce-scatters of a varying copy, and as much as the gather itself.
      uses: For each use, if the copy is invarying, the collective, its bytes, how often it runs (0: nobody knows), and
        the line.
      alone: Whether one device is alone along the axes, and sends nothing: these are the bytes of each of two.
    """

    axes: tuple[str, ...]
    once: int
    uses: tuple[tuple[str, int, int, str], ...]
    alone: bool

    def lines(self) -> Iterator[str]:
        along, each = ", ".join(self.axes), "per device" + " of two" * self.alone
        yield f'backward, to="varying": a reduce-scatter over {along}, {bytes_text(self.once)} {each}'
        for kind, sent, times, line in self.uses:
            often = "" if times == 1 else f", {times} times" if times else ", in each step of a loop"
            where = f", for the use at {line}" if line else ""
            yield f'backward, to="invarying": {_NAMES[kind]} over {along}, {bytes_text(sent)} {each}{often}{where}'


def _lines(paid: Iterable[Paid]) -> list[str]:
    return [line for one in paid for line in one.lines()]


_NAMES = {"psum": "an all-reduce", "all_gather": "an all-gather"}


class _Uses(Domain):
    """Which uses of a gathered copy pay for it: those by data that differ, if a gradient comes back to the gather.

    A value is known by what it is made of: an argument that has a gradient, then chosen gathers, then uses, each of
    which JAX marks by a cast to varying.
    """

    rules: ClassVar[Any] = {
        **dict.fromkeys(("all_gather_invariant", "spmd_retype"), lambda self, eqn, ins: self.gather(eqn, ins)),
        "pvary": lambda self, eqn, ins: self.use(eqn, ins, "psum"),
        "spmd_split": lambda self, eqn, ins: self.use(eqn, ins, "all_gather"),
        "stop_gradient": lambda self, eqn, ins: [frozenset()],
    }

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.gathers: dict[int, tuple[Any, int, Any]] = {}  # the equation, how often it runs, the place of its call
        self.uses: dict[int, tuple[Any, str, int, str]] = {}
        self.ends: frozenset[Any] = frozenset()

    def paid(self, jaxpr: Any) -> list[Paid]:
        """Each call whose uses send more, or more often, than the gradient of a varying copy."""
        walk(jaxpr, [frozenset(["argument"])] * len(opened(jaxpr)[0].invars), self)
        made = {token[1:] for token in self.ends if token[0] == "use"}
        calls: dict[Any, tuple[dict[int, None], dict[int, None]]] = {}
        for gather, (_, _, where) in self.gathers.items():
            uses = [use for use in self.uses if (gather, use) in made]
            if uses:  # a copy without one, of another round through the same call, has no gradient to send
                gathers, every = calls.setdefault(where, ({}, {}))
                gathers[gather] = None
                every |= dict.fromkeys(uses)
        return [one for gathers, uses in calls.values() if (one := self._priced(gathers, uses))]

    def _priced(self, gathers: Iterable[int], uses: Iterable[int]) -> Paid | None:
        known = [self.gathers[gather] for gather in gathers]
        axes = self._axes(eqn for eqn, *_ in known)
        # One device alone sends nothing. It is priced as two, so that a program has one meaning on all meshes.
        devices = lambda axes: max(2, axes_product(axes, self.sizes))
        once = often = 0
        for eqn, times, _ in known:
            once += max(times, 1) * sent_bytes("psum_scatter", _bytes(eqn.outvars[0]), devices(self._axes([eqn])))
            often += max(times, 1)
        found = []
        for eqn, kind, times, line in map(self.uses.__getitem__, uses):
            size = _bytes(eqn.invars[0] if kind == "psum" else eqn.outvars[0])
            found.append((kind, sent_bytes(kind, size, devices(axes)), times, line))
        # The compiler puts the sums of one pass together, and not those of the steps of a loop.
        cheap = all(0 < times <= often for *_, times, _ in found)
        if cheap and sum(sent * times for _, sent, times, _ in found) <= once:
            return None
        return Paid(axes, once, tuple(found), axes_product(axes, self.sizes) == 1)

    def _axes(self, eqns: Iterable[Any]) -> tuple[str, ...]:
        every = {axis for eqn in eqns for axis in axes_of(eqn)}
        return tuple(axis for axis in self.sizes if axis in every)

    def _times(self) -> int:
        """Return how often one call of the kernel comes here; 0 where nobody knows."""
        around = [eqn for eqn in self.callers if eqn.primitive.name in ("scan", "while")]
        return math.prod(eqn.params.get("length", 0) for eqn in around)

    def gather(self, eqn: Equation, operands: Sequence[Any]) -> list[Any]:
        known = gather_around(eqn, self.callers)
        if known is None or not known.chosen or not operands[0]:
            return self.step(eqn, operands)
        self.gathers[id(eqn)] = eqn, self._times(), known.place
        return [operands[0] | {("gather", id(eqn))}]

    def use(self, eqn: Equation, operands: Sequence[Any], kind: str) -> list[Any]:
        own, axes = gather_around(eqn, self.callers), set(axes_of(eqn))
        copies = []
        for token in operands[0]:
            if token[0] == "gather":
                gather, _, where = self.gathers[token[1]]
                inside = own is not None and own.place == where  # a part of the call itself
                copies += [token[1]] if axes & set(axes_of(gather)) and not inside else []
        if copies:
            self.uses.setdefault(id(eqn), (eqn, kind, self._times(), line_of(eqn, self.callers)))
        return [operands[0] | {("use", gather, id(eqn)) for gather in copies}]

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Any]) -> Sequence[Any]:
        body = opened(part.jaxpr)[0]
        given = [value if _smooth(var) else frozenset() for value, var in zip(operands, body.invars, strict=True)]
        outs = self.run(eqn, part, given)
        self.ends |= frozenset().union(*outs)
        return outs

    def constant(self, var: Variable | None, value: Any) -> Any:
        return frozenset()

    def step(self, eqn: Equation, operands: Sequence[Any]) -> list[Any]:
        every = frozenset().union(*operands)
        return [every if _smooth(var) else frozenset() for var in eqn.outvars]

    def join(self, one: Any, other: Any) -> Any:
        return one | other


def _smooth(var: Variable) -> bool:
    """Return whether a value has a gradient."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _bytes(var: Variable) -> int:
    return int(var.aval.size) * int(var.aval.dtype.itemsize)


# --- the same program ---------------------------------------------------------------------------------------

_TYPES_ONLY = frozenset(
    ("spmd_layout", "spmd_names", "spmd_assert_equal", "spmd_retype", "spmd_fused", "pvary", "pcast")
)
_ALIKE = {"all_gather_invariant": "all_gather"}


def _derives(body: Iterable[tuple[Any, tuple[Any, ...]]]) -> bool:
    """Return whether there is a derivative in a body."""
    return any(is_transposed(eqn, callers) for eqn, callers in body)


def _body(jaxpr: Any, callers: tuple[Equation, ...] = (), within: bool = False) -> list[tuple[Any, tuple[Any, ...]]]:
    """The equations of the kernel's body, at any depth, with those around them."""
    found: list[tuple[Any, tuple[Any, ...]]] = []
    for eqn in opened(jaxpr)[0].eqns:
        found += [(eqn, callers)] if within else []
        for part in held(eqn):
            found += _body(part.jaxpr, (*callers, eqn) if within else (), within or part.role == Role.MAP)
    return found


def _steps(equations: Iterable[tuple[Any, tuple[Any, ...]]]) -> Iterator[Any]:
    for eqn, _ in equations:
        name = eqn.primitive.name
        if name not in _TYPES_ONLY:
            yield _ALIKE.get(name, name), [shape_of(var) for var in eqn.outvars], axes_of(eqn)
