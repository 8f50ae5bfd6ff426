"""What the checker infers of a random body, against what the devices hold.

The checker says of each value, at every equation, how its dimensions are divided, along which axes it is a partial sum,
and along which it is equal. Here the body is run in NumPy (`devices.py`) on its mesh and on a mesh of ones. Then

- a value is equal along each axis that its state does not have, it is constant along what is called constant, zero
  where it is called zero, and the integers that the checker follows are those that it holds;
- what the devices hold, put together as the state says, is the value on one device. This is asked of states that have
  nothing pending and nothing different; in a body with a mistake, only of what does not come from a finding or a
  released value;
- a body whose values lie as meant, all of them, has no finding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd._jaxprs.facts import CallName
from spmd._jaxprs.lines import line_of
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._state import FREE, HIDDEN, UNREAD, Dim, State
from tests.checker import devices
from tests.checker.harness import Apart, whole
from tests.checker.random_bodies import OWN_SIZE, Move, Plan, Trace, arguments, axes_of, drawn, traced
from tests.sampler import Choices

Key = tuple[Any, ...]
SUMS = ("psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "psum_scatter")
RELEASED, TOLD = 1, 2
# An agreement is not an accident after so many draws of numbers, if they make another value in so many of them.
OTHERS, OFTEN = 24, 6
# A fault is not an accident if so many of so many other draws show one.
AGAIN, ENOUGH = 8, 4


class Said(NamedTuple):
    """What the checker says of an equation."""

    operands: Sequence[State]
    outs: Sequence[State]
    faulty: bool  # whether it found something there


class Every(dict):
    """The rule of every primitive: the checker's own, and what it gave is kept."""

    def get(self, name: Any, default: Any = None) -> Any:
        return kept


def kept(walk: Any, eqn: Any, operands: Sequence[State]) -> Sequence[State]:
    rule, known, key = Dataflow.rules.get(eqn.primitive.name), len(walk.findings), key_of(walk.callers, eqn)
    outs = walk.equation(eqn, operands) if rule is None else rule(walk, eqn, operands)
    before = walk.said.get(key)  # a mistake in an earlier round of a loop
    walk.said[key] = Said(operands, outs, len(walk.findings) > known or bool(before and before.faulty))
    return outs


class Recorded(Dataflow):
    """The pass, which keeps what it says of each equation, and looks into a jaxpr each time that it is called."""

    rules = Every()

    def __init__(self, axes: Sequence[str]) -> None:
        super().__init__("body", axes)
        self.said: dict[Key, Said] = {}

    def context(self) -> None:
        return None

    def _check_returned(self, eqn: Any, outs: Any) -> None:
        """A body returns nothing; its values are marked."""


def key_of(callers: Sequence[Any], eqn: Any) -> Key:
    return (*map(id, callers), id(eqn))


class Ran(NamedTuple):
    """What the devices of a mesh held: for each equation, each time that it ran, the arrays of its results."""

    held: dict[Key, list[list[devices.Arrays]]]
    eqns: dict[Key, tuple[Any, tuple[Any, ...]]]
    machine: devices.Machine


def ran(trace: Trace, sizes: dict[str, int], plan: Plan, seed: int, moved: bool = False) -> Ran:
    held: dict[Key, list[list[devices.Arrays]]] = {}
    eqns: dict[Key, tuple[Any, tuple[Any, ...]]] = {}

    def saw(eqn: Any, callers: list[Any], outs: list[devices.Arrays]) -> None:
        key = key_of([outer, *callers], eqn)
        held.setdefault(key, []).append(outs)
        eqns.setdefault(key, (eqn, tuple(callers)))

    machine = devices.Machine(sizes, saw)
    [outer] = trace.jaxpr.jaxpr.eqns
    blocks = [
        devices.shards(x, [axes_of(dim) for dim in lies.dims], machine)
        for x, lies in zip(arguments(seed, plan, moved), plan.args, strict=True)
    ]
    consts = [dict.fromkeys(range(len(machine.places)), devices.wide(c)) for c in trace.jaxpr.consts]
    with np.errstate(all="ignore"):
        machine.run(outer.params["jaxpr"], [*consts, *blocks], range(len(machine.places)))
    return Ran(held, eqns, machine)


# --- the same equation in both traces -------------------------------------------------------------------------


def skeleton(jaxpr: Any, path: Key, found: dict[Key, list[str]]) -> Any:
    """The names of the primitives of a jaxpr and of those in it, and a key for each place."""
    body, names = opened(jaxpr), []
    for eqn in body.eqns:
        inner = tuple(skeleton(part, (*path, id(eqn)), found) for part in parts_of(eqn))
        names.append((eqn.primitive.name, inner))
        found.setdefault((*path, id(eqn)), [])
    return tuple(names)


def opened(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def parts_of(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                yield part


def pairs_of(trace: Trace, alone: Trace) -> dict[Key, Key]:
    """For each equation on the mesh the one on one device, where both traces have the same equations; otherwise for the
    marks alone."""
    mine: dict[Key, list[str]] = {}
    other: dict[Key, list[str]] = {}
    if skeleton(trace.jaxpr, (), mine) == skeleton(alone.jaxpr, (), other):
        return dict(zip(mine, other, strict=True))
    marks = [
        [(id(outer), id(eqn)) for eqn in outer.params["jaxpr"].eqns if is_mark(eqn)]
        for outer in (one.jaxpr.jaxpr.eqns[0] for one in (trace, alone))
    ]
    return dict(zip(*marks, strict=True))


def is_mark(eqn: Any) -> bool:
    return eqn.primitive.name == "spmd_layout" and eqn.params["call"].startswith("v")


# --- comparisons ------------------------------------------------------------------------------------------------


def close(one: np.ndarray, two: np.ndarray) -> bool:
    if one.dtype.kind in "biu":
        return bool((one == two).all())
    gap = np.abs(one - two)
    scale = float(np.abs(two).max(initial=1.0))
    if scale < np.inf and not np.isnan(gap.max(initial=0.0)):
        return bool(gap.max(initial=0.0) <= 1e-7 * scale)
    return bool(np.allclose(one, two, rtol=1e-7, atol=1e-7, equal_nan=True))


def facts(state: State, arrays: devices.Arrays, machine: devices.Machine) -> str:
    """What is wrong in what a state says of the values of a mesh, whatever the program is."""
    shape = arrays[0].shape
    if any(int(np.prod([n for n, _ in dim])) != size for dim, size in zip(state.dims, shape, strict=False)):
        return f"dimensions {state.dims} of an array of shape {shape}"
    every = devices.stacked(arrays, machine)
    if not every.size:
        return ""
    for at, axis in enumerate(machine.sizes):
        if axis not in state.axes and not close(every, np.broadcast_to(every.take([0], at), every.shape)):
            return f"it is called equal along {axis}, and is not"
    if state.zero and every.astype(bool).any():
        return "it is called zero, and is not"
    return constants(state, every, len(machine.sizes)) or tables(state, every, machine)


def constants(state: State, every: np.ndarray, lead: int) -> str:
    value = every.reshape(*every.shape[:lead], *(n for dim in state.dims for n, _ in dim), *every.shape[lead + len(state.dims) :])  # fmt: skip
    for i, axes in enumerate(axes for dim in state.dims for _, axes in dim):
        if axes is FREE and not close(value, np.broadcast_to(value.take([0], lead + i), value.shape)):
            return f"it is called constant along a factor of {state.dims}, and is not"
    return ""


def tables(state: State, every: np.ndarray, machine: devices.Machine) -> str:
    values = None if state.table is None else state.table.values
    if values is None:
        return ""
    wide = np.asarray(values, np.float64 if values.dtype.kind not in "biu" else None)
    lead = [machine.sizes[a] if a in state.table.axes else 1 for a in machine.sizes]
    wide = np.broadcast_to(wide.reshape(*lead, *wide.shape[len(state.table.axes) :]), every.shape)
    return "" if close(every, wide) else "the integers that the checker follows are others"


def is_whole(state: State) -> bool:
    """Whether a state says how the value is put together."""
    hidden = any(axes is HIDDEN for dim in state.dims for _, axes in dim)
    return not (state.pending or state.different or hidden)


def together(arrays: devices.Arrays, dims: Sequence[Dim], partial: frozenset[str], machine: devices.Machine) -> Any:
    """The whole value; None where the devices do not agree."""
    try:
        return whole(devices.stacked(arrays, machine), dims, partial, tuple(machine.sizes), close)
    except (Apart, ValueError):
        return None


def agrees(found: Any, alone: np.ndarray) -> bool:
    """A constant dimension of what was put together is one element of it."""
    if found is None or found.ndim != alone.ndim:
        return False
    fits = all(n in (1, m) for n, m in zip(found.shape, alone.shape, strict=True))
    return fits and close(np.broadcast_to(found, alone.shape), alone)


def same_sizes(found: Any, alone: np.ndarray) -> bool:
    return found is None or all(n in (1, m) for n, m in zip(found.shape, alone.shape, strict=True))


# --- one body -----------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What came of one body.

    Attributes:
      text: What it is.
      faults: What the numbers say against the checker.
      known: How many values have a state that says how they are put together, and were compared.
      values: How many values there are.
      mistake: The name of the wrong move, if there is one and the numbers show it.
      findings: The kinds of what was found.
      primitives: The names of the primitives.
    """

    text: str
    faults: list[str]
    known: int = 0
    values: int = 0
    mistake: str = ""
    findings: tuple[str, ...] = ()
    primitives: frozenset[str] = frozenset()
    paired: bool = True

    @property
    def outcomes(self) -> tuple[str, ...]:
        """What the soak counts: whether it was right, or which mistake was found or not."""
        mistake = f"{'found' if self.findings else 'missed'} {self.mistake}" if self.mistake else "right"
        return mistake, *(() if self.paired else ("compared at marks only",))


class Judge:
    """The comparison of one body."""

    def __init__(self, choices: Choices, often: tuple[Move, ...] = ()) -> None:
        self.plan = plan = drawn(choices)._replace(often=often)
        before = len(choices.drawn)
        self.trace = traced(choices, plan, plan.mesh)
        replay = Choices(choices.seed, choices.drawn[before:])
        ones = dict.fromkeys(plan.mesh, 1)
        try:
            self.single: Trace | None = traced(replay, plan, ones)
        except (TypeError, ValueError):  # a mistake that no shapes allow on one device
            if not self.trace.mistake:
                raise
            self.single = None
        self.mesh = ran(self.trace, plan.mesh, plan, choices.seed)
        self.alone = self.single and ran(self.single, ones, plan, choices.seed)
        self.pairs = self.single and pairs_of(self.trace, self.single)

    def with_numbers(self, seed: int) -> Judge:
        """The same body with other arguments."""
        other = copy.copy(self)
        other.mesh, other.alone = (
            run and ran(trace, run.machine.sizes, self.plan, seed, moved=True)
            for trace, run in ((self.trace, self.mesh), (self.single, self.alone))
        )
        return other

    def verdict(self) -> Verdict:
        """What the checker says now, against what was held."""
        with np.errstate(all="ignore"):
            return self._verdict()

    def _verdict(self) -> Verdict:
        self.faults: list[str] = []
        self.known = self.values = 0
        self.walk = Recorded(tuple(self.plan.mesh))
        walk_closed(self.walk, self.trace.jaxpr)
        right = not self.trace.mistake
        doubts = {} if right else self.doubtful()
        for key, (eqn, callers) in self.mesh.eqns.items():
            if doubts.get(key, 0) < TOLD:
                self.compare(key, eqn, callers, not doubts.get(key, 0))
        shown = self.shown(self.mesh, self.alone)
        findings = [one for one in self.walk.findings if one.certain]
        if not shown and findings and not right:
            shown = self.shown_by_other_numbers()
        if 1 in self.plan.mesh.values():
            # Along one device a term of a sum is the sum. The checker reports a missing reduction all the same, as JAX
            # does, and a ring that takes no step there is such a one.
            findings = [one for one in findings if one.kind not in ("partial", "nonlinear", "mixed")]
        if not shown and findings:
            self.faults.append(f"an alarm, and the numbers agree: {findings[0].kind}: {findings[0]}")
        if right and shown:
            self.faults.append(f"the body is not right: {shown}")
        names = frozenset(eqn.primitive.name for eqn, _ in self.mesh.eqns.values())
        paired = bool(self.pairs) and len(self.pairs) > len(self.trace.lies)
        kinds = tuple(one.kind for one in findings)
        return Verdict(self.text(), self.faults, self.known, self.values, self.trace.mistake if shown else "", kinds, names, paired)  # fmt: skip

    def text(self) -> str:
        args = ", ".join(map(str, self.plan.args))
        steps = [f"!{name}" if name == self.trace.mistake else name for name in self.trace.steps]
        return f"{self.plan.mesh} {args}: {' '.join(steps)}"

    def compare(self, key: Key, eqn: Any, callers: Sequence[Any], sure: bool) -> None:
        """All values of one equation, each time that it ran."""
        said = self.walk.said.get(key)
        if said is None:
            return
        times = self.mesh.held[key]
        twin = self.pairs.get(key) if self.pairs and self.alone else None
        others = self.alone.held.get(twin, []) if self.alone and twin else []
        comparable = sure and len(others) == len(times) and not local(eqn, callers)
        for i, outs in enumerate(times):
            for k, (state, arrays) in enumerate(zip(said.operands if is_mark(eqn) else said.outs, outs, strict=True)):
                if len(arrays) < len(self.mesh.machine.places) or not arrays[0].size:
                    continue
                self.values += 1
                wrong = facts(state, arrays, self.mesh.machine)
                vague = state.table is not None
                if not wrong and comparable and is_whole(state) and not vague:
                    found = together(arrays, state.dims, state.partial, self.mesh.machine)
                    if self.trace.mistake and not same_sizes(found, others[i][k][0]):
                        continue  # what a mistake calls a block is cut as one
                    self.known += 1
                    wrong = "" if agrees(found, others[i][k][0]) else "put together, it is not the value on one device"
                if wrong:
                    self.faults.append(
                        f"{eqn.primitive.name} at {line_of(eqn, tuple(callers))}: {wrong}: {told(state)}"
                    )
                    return

    def doubtful(self) -> dict[Key, int]:
        """Equations whose values come from one that was released, which is unknown, or from a finding: what is told as a
        mistake is believed from there on."""
        found: dict[Key, int] = {}
        [outer] = self.trace.jaxpr.jaxpr.eqns
        self.spread(outer.params["jaxpr"], (id(outer),), {}, found)
        return found

    def spread(self, jaxpr: Any, path: Key, doubts: dict[Any, int], found: dict[Key, int]) -> int:
        """Go through a jaxpr, and give the largest doubt in it."""
        largest = 0
        for eqn in opened(jaxpr).eqns:
            key = (*path, id(eqn))
            doubt = max([doubts.get(atom, 0) for atom in eqn.invars if not hasattr(atom, "val")], default=0)
            doubt = max(doubt, doubt_of(eqn, self.walk.said.get(key)))
            for part in map(opened, parts_of(eqn)):
                doubt = max(doubt, self.spread(part, key, dict.fromkeys([*part.invars, *part.constvars], doubt), found))
            found[key] = doubt
            doubts.update(dict.fromkeys(eqn.outvars, doubt))
            largest = max(largest, doubt)
        return largest

    def shown_by_other_numbers(self) -> str:
        """As `shown`: a decision may be the same by accident, and numbers that data hardly change are one."""
        values, draws = [], []
        at = len(self.plan.args) + self.trace.steps.index(self.trace.mistake)
        for seed in range(OTHERS):
            again = [ran(one, machine.sizes, self.plan, seed, moved=True) for one, machine in self.traces()]
            found = self.shown(*again)
            if found:
                return found
            values.append(again[1].held[marks_of(again[1])[at]])
            draws.append(again[0])
        if self.changes_nothing(at, draws):
            return "it gives what it was given, as a sort of what is sorted does"
        first = np.stack([np.ravel(one[0][0][0]) for one in values])
        moved = (np.abs(first - np.median(first, 0)) > devices.CLOSE).any(1).sum()
        return "" if moved >= OFTEN else "its numbers hardly depend on data"

    def changes_nothing(self, at: int, draws: Sequence[Ran]) -> bool:
        """Whether a mistake gives an earlier value that lies alike, whatever the numbers: no type sees that of data."""
        marks, lies = marks_of(self.mesh), self.trace.lies
        pairs = [[(run.held[marks[i]][0][0], run.held[marks[at]][0][0]) for run in draws] for i in range(at)]
        same = [
            all(np.array_equal(one, two) for given in pair for one, two in zip(*given, strict=True)) for pair in pairs
        ]
        return any(known and lies[i] == lies[at] for i, known in enumerate(same))

    def traces(self) -> list[tuple[Trace, devices.Machine]]:
        return [(one, ran.machine) for one, ran in ((self.trace, self.mesh), (self.single, self.alone)) if one and ran]

    def shown(self, mesh: Ran, alone: Ran | None) -> str:
        """Which of the marked values does not lie as meant; nothing if all do."""
        if not alone:
            return "on one device its shapes do not fit"
        sizes = mesh.machine.sizes
        marks = marks_of(mesh), marks_of(alone)
        for i, (key, twin, lies) in enumerate(zip(*marks, self.trace.lies, strict=True)):
            dims = [tuple((n // math.prod(sizes[a] for a in axes), axes) for n, axes in dim) for dim in lies.dims]
            found = together(mesh.held[key][0][0], dims, lies.partial, mesh.machine)
            if not agrees(found, alone.held[twin][0][0][0]):
                return f"value {i}, which is meant as {lies}"
        return ""


def marks_of(one: Ran) -> list[Key]:
    """The marks of a body's values, in order."""
    return [key for key, (eqn, callers) in one.eqns.items() if is_mark(eqn) and not callers]


def doubt_of(eqn: Any, said: Said | None) -> int:
    """Whether an equation is at fault, or forgets that nobody knew how its operands lie."""
    if said is None or said.faulty or any(p.kind == UNREAD for out in said.outs for p in out.pending):
        return TOLD  # a mistake that was told at another equation is told no more, and leaves this mark
    known = lambda states: all(map(is_whole, states))
    forgets = not known(said.operands) and known(said.outs)
    counts = eqn.primitive.name in SUMS and any(
        state.table is not None for state in said.operands
    )  # devices: never an error
    return RELEASED if forgets or counts or local(eqn, ()) else 0


def local(eqn: Any, callers: Sequence[Any]) -> bool:
    """Whether an equation asks for the sizes of its mesh, or is a step of a verb of ours, which may."""
    for one in (*callers, eqn):
        names = [getattr(scope, "name", "") for scope in getattr(one.source_info.name_stack, "stack", ())]
        if OWN_SIZE in names or any(isinstance(name, CallName) for name in names):
            return True
    return False


def told(state: State) -> str:
    return f"{state.dims} partial {set(state.partial)} different {set(state.different)} pending {set(state.pending)}"


def judged(choices: Choices) -> Verdict:
    """One random body. A fault counts if it shows with half of other numbers, too. Which of several numbers is the largest,
    if they nearly agree, is a matter of rounding."""
    judge = Judge(choices)
    verdict = judge.verdict()
    if not verdict.faults:
        return verdict
    others = [judge.with_numbers(seed).verdict() for seed in range(AGAIN)]
    right = [one for one in others if not one.faults]
    return verdict if len(right) <= AGAIN - ENOUGH else right[0]
