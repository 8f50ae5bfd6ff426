"""What is known of a whole program in the end: types say where and why, and numbers say whether."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmd import _compat
from spmd._jaxprs.facts import CallName, one_line
from spmd._jaxprs.lines import called_at, frames_of, is_ours, line_of, outside_jax
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, equations, held, opened, shape_of, walk
from spmd.checker._arbiter import Trial
from spmd.checker._engine import Engine
from spmd.checker._finding import Finding, found, question
from spmd.checker._hanging import hanging
from spmd.checker._located import Located
from spmd.checker._numbers import BLOCKS, LOCAL_SIZE, Cause, Difference, advice_on, cause_of, labelled
from spmd.checker._primitives import draws
from spmd.checker._simulator import Fault as Broken
from spmd.checker._state import FREE, HIDDEN, STEP, State, axes_of_dim
from spmd.checker._table import TABLE
from spmd.errors import Fault
from spmd.language import mesh_text

# What may be meant, or undone later: no string says otherwise.
_SUSPICIONS = frozenset(("nonlinear", "mixed", "pending", "copies", "disagree", "order", "gradient", "type"))

# A call that closes an axis which its string does not name moves what nobody wrote; and other arguments than those that
# were drawn may let devices part.
_ALWAYS = ("closed", "divergent")

_BACKWARD = frozenset(("gradient", "type"))  # what gradients tell, and results do not

_MORE = (
    "spmd.check(...).source() shows the layout of every value beside its line; reference= says what a program means "
    "that counts devices in Python, and build= makes a jax.shard_map for other meshes, so that lines can be compared"
)

_SHOWN = 3  # lines, or arrays, that a text lists


@dataclass(frozen=True)
class Verdict:
    """What `spmd.check` ends in.

    Attributes:
      kind: One word of the table below, or "" where there is nothing to check.
      reasons: What it rests on, or why nothing was compared; each a sentence or a line of the program.
      uncertain: The findings that may be meant, and were not compared.
      unreached: What no draw showed: the sides of choices that none took, and results that were one number in all.

    | kind | means |
    |---|---|
    | `proved` | types follow every value and suspect nothing; numbers agree, on every side of every choice |
    | `tested` | numbers agree; types lose or suspect a value, or a side is not reached: `reasons`, `unreached` |
    | `typed` | there is no body to check: the program is in JAX's Explicit mode, whose types follow every value |
    | `wrong` | there are findings |
    | `not tested` | there are no findings; numbers were not compared, or they depend on the mesh, perhaps on purpose |
    """

    kind: str
    reasons: Sequence[str] = ()
    uncertain: Sequence[Finding] = ()
    unreached: Sequence[str] = ()

    def __str__(self) -> str:
        if not self.kind:
            return ". ".join(self.reasons) or "no findings"
        n = len(self.uncertain)
        some = f"{question(self.uncertain)} {n} finding{'s' * (n > 1)}: " if n else ""
        head = self.kind if self.kind == "wrong" else (some or "no findings: ") + self.kind
        but = f", but for {_first(self.unreached)}" if self.unreached else ""
        return ". ".join([head + but, *self.reasons])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"kind": self.kind, "reasons": list(self.reasons), "unreached": list(self.unreached)}


def judge(
    findings: Sequence[Finding],
    trial: Trial,
    unknown: Sequence[str],
    cleared: Sequence[str] = (),
    believed: Sequence[str] = (),
) -> Verdict:
    """The verdict on a program.

    Args:
      findings: What is left of the findings.
      trial: What the numbers say.
      unknown: The lines where types lose a value.
      cleared: The lines where types suspect what numbers do not show. Other numbers may take another branch.
      believed: The lines of opaque code, for which its reference stands in.
    """
    if any(one.certain for one in findings):
        return Verdict("wrong", [f"not tested: {trial.why}" if trial.why else _compared(trial)])
    if trial.meant:  # a ring whose blocks are a dimension is one program on whole arrays, with its mistakes
        trial = replace(trial, why=f"{_compared(trial)}: reference= tells what is meant")
    if trial.why:
        return Verdict("not tested", [trial.why, *_factors_text(trial)], findings)
    if trial.apart:
        modes = f"They are others in auto and reference mode: {_first(apart_text(trial))}"
        advice = BLOCKS.replace("\n", " ")
        return Verdict("not tested", [_compared(trial), modes, counted_text(trial.counted), advice], findings)
    others = [one for one in unknown if one not in believed]
    lost = [f"Types lose a value at {_first(others)}"] if others else []
    lost += [f"The reference stands in for the opaque code at {_first(believed)}"] if believed else []
    doubt = [f"Types suspect {_first(cleared)}, and numbers do not show it"] if cleared else []
    open_ends = unreached(trial)
    sure = not (
        unknown or cleared or believed or trial.quiet or trial.shifts or trial.underived or open_ends or findings
    )
    read = [f"The permutation at {_first(trial.shifts)} is read as a shift"] if trial.shifts else []
    rest = [f"Gradients are not compared: {trial.underived}"] if trial.underived else []
    reasons = [_compared(trial), *read, *lost, *doubt, *rest]
    return Verdict("proved" if sure else "tested", reasons, findings, open_ends)


def unreached(trial: Trial) -> list[str]:
    """Return what no draw showed, in words."""
    flat = (f"numbers of {labelled(path)}, which are not finite or always the same" for path in trial.flat)
    return list(dict.fromkeys([*map(str, trial.unreached), *flat, *map(str, trial.captured)]))


def apart_text(trial: Trial) -> list[str]:
    """How each result of auto and reference mode differs from that of all meshes, in words."""
    return [_row(one, cause_of([(trial.sizes, one.factor)])) for one in trial.apart]


def difference_text(trial: Trial) -> str:
    """How the first result or gradient differs from that of one device, in words."""
    if trial.faults:
        return str(_of_fault(trial.faults[0], "it", mesh_text(trial.sizes)).rule)
    first = trial.differences[0]
    how = first.how(_causes(trial)[first.path])
    return f"{labelled(first.path)}: {how}" if how else _row(first, None)


def counted_text(lines: Iterable[str]) -> str:
    """Why modes differ where these lines ask for the size of an axis."""
    if not lines:
        return "arrays are whole there, and axes have their sizes"
    return f"spmd.axis_size counts devices at {_first([*lines])}, and arrays are whole there"


def _first(lines: Sequence[str]) -> str:
    return ", ".join([*lines[:_SHOWN], *(["..."] if len(lines) > _SHOWN else [])])


def _compared(trial: Trial) -> str:
    what = "results and gradients" if trial.gradients else "results"
    are = "differ from" if trial.wrong else "are"
    whole = "whole arrays, which depend on the sizes of axes too" if trial.meant else "one device"
    quiet = ", with one number in place of all random ones, which depend on the mesh" if trial.quiet else ""
    also = f"; on {_sizes_text(trial.also)} the results are, too" if trial.also else ""
    return f"On {_sizes_text(trial)} the {what} {are} those of {whole}{quiet}{_rounds_text(trial.rounds)}{also}"


def _rounds_text(rounds: Mapping[int, int]) -> str:
    """Return of which loops not all rounds were compared."""
    some = _first([f"{few} of {length:,}" for length, few in rounds.items()])
    return f", in {some} rounds of its loops" if rounds else ""


def _sizes_text(trial: Trial) -> str:
    """Return the mesh and the sizes at which numbers were compared, and those that were given."""
    axes = trial.whole or trial.sizes
    pairs = {**{axis: (n, axes[axis]) for axis, n in trial.sizes.items()}, **trial.names}
    return ", ".join(f"{name}={n}" + f" (given {was:,})" * (n != was) for name, (n, was) in pairs.items())


def confirmed(
    suspicions: Iterable[Finding],
    trial: Trial,
    name: str,
    unknown: Sequence[str] = (),
    *,
    whole: bool = True,
    walk: Engine | None = None,
) -> list[Finding]:
    """Return what is left of what types suspect when numbers have spoken, and what only numbers show.

    Where they could not be had, what contradicts a string is certain, and everything else is not. What JAX types
    wrongly is wrong where devices then hold different copies.

    Args:
      suspicions: What types suspect.
      trial: What the numbers say.
      name: The program, for messages.
      unknown: The lines where types lose a value: one of them may be wrong where types suspect nothing.
      whole: Whether numbers were asked of a whole program, and not because of these suspicions alone.
      walk: What suspects.
    """
    kept = list(suspicions)
    if trial.agrees:  # one number in place of random ones does not show which blocks get the same
        open_ones = hanging(kept, trial.unreached, walk) if walk is not None and trial.unreached and kept else []
        stays = lambda one: one.kind in _ALWAYS or (trial.quiet and one.kind == "noise")
        return [one if stays(one) else replace(one, certain=False) for one in kept if stays(one) or one in open_ones]
    if trial.meant:  # whole arrays would be in another order, too
        return [one for one in kept if one.kind in (*_ALWAYS, "order")]
    if kept and kept[0].kind != "closed":  # what is said of its operand says more
        kept = [one for one in kept if one.kind != "closed"]
    if trial.why and not trial.fails:
        return [replace(one, certain=one.certain and one.kind not in _SUSPICIONS) for one in kept]
    copies = any(fault.kind == "copies" for fault in trial.faults)
    kept = [one for one in kept if one.kind != "type" or copies or not trial.wrong]
    innocent = [] if walk is None else _innocent(kept, trial, walk)
    kept = [one for one in kept if one not in innocent]
    if walk is not None and walk.weaker and trial.wrong:
        kept = _explained(kept, trial, walk)
    if trial.wrong and (whole or innocent) and not any(one.certain for one in kept):
        kept.append(_by_numbers(trial, name, unknown))
    return kept


def about_gradients(suspicions: Iterable[Finding]) -> bool:
    """Return whether gradients have to be compared to decide on these."""
    return any(one.kind in _BACKWARD for one in suspicions)


def _innocent(suspicions: Iterable[Finding], trial: Trial, walk: Engine) -> list[Finding]:
    """Return the findings of a wrong program of which everything is complete before values begin to differ: a string
    may say otherwise, and do no harm. One that names other blocks misleads the strings after it. What only a gradient
    shows may be any of them, and noise that is the same fits. If all numbers are too large by the size of an axis, no
    element has met another one than it should.
    """
    first = trial.first() if trial.wrong and not trial.faults else Located()
    late = {"noise", "layout", *_ALWAYS, *_BACKWARD}
    known = [one for one in suspicions if one in walk.about and one.kind not in late]
    scaled = lambda: trial.wrong and not trial.faults and all(_causes(trial).values())
    return [one for one in known if (one.kind == "disagree" and scaled()) or first.clears(_lines(one, walk))]


def _lines(one: Finding, walk: Engine) -> set[str]:
    return {one.line, line_of(walk.about[one])} - {""}


def _explained(suspicions: list[Finding], trial: Trial, walk: Engine) -> list[Finding]:
    """Put the sums that a gradient adds in place of what comes of them, where values begin to differ at one."""
    begins = lambda one: one in walk.about and not _lines(one, walk).isdisjoint(trial.first().lines)
    sums = [one for one in walk.weaker if begins(one)]
    return [*sums, *(one for one in suspicions if one.kind not in _SUSPICIONS or begins(one))] if sums else suspicions


def _by_numbers(trial: Trial, name: str, unknown: Sequence[str]) -> Finding:
    """The finding that no type explains."""
    on = mesh_text(trial.sizes)
    if trial.faults:
        return _of_fault(trial.faults[0], name, on)
    causes, alone = _causes(trial), trial.by_axis
    got = [_row(one, causes[one.path]) for one in trial.differences[:_SHOWN]]
    more = len(trial.differences) - _SHOWN
    got += [f"and {more} more array{'s' * (more > 1)}"] if more > 0 else []
    guilty = [axis for axis, differences in alone.items() if differences]
    if guilty and len(guilty) < len(alone):
        got.append(f"it differs where {', '.join(guilty)} has several devices, and nowhere else")
    first, *whence = _whence(trial.first()) or [""]
    if first:
        got += [f"from {first} on, values fit no layout of those on one device", *whence]
    elif unknown:
        got.append(f"types follow every value but at {_first(unknown)}")
    advice = advice_on(trial.differences, [one for one in causes.values() if one])
    rule = f"{name} computes something else on several devices than on one."
    advice = advice or (LOCAL_SIZE if trial.first().counts else _MORE)
    return found(Fault(rule, got=(*got, on), advice=advice), "numbers", first or trial.line or called_at())


def _whence(located: Located) -> list[str]:
    """Return the line where values begin to differ, and what is known of it in words."""
    guilty = [line for line in located.seen if line and line in located.lines]
    found: Iterable[str] = (line_of(eqn, callers) for eqn, callers in located.found)
    begins = [*dict.fromkeys(filter(None, found))] or guilty[-1:]  # a verb's result that leaves has no line
    told: list[str] = [*begins[:1]]
    if before := [line for line in guilty if line not in begins]:
        told.append(f"it reads values that are not complete, or have another size: made at {_first(before[::-1])}")
    for number, whole in dict.fromkeys(located.counts[line] for line in guilty if line in located.counts):
        at = _first([line for line in guilty if located.counts.get(line) == (number, whole)])
        told.append(f"at {at} the number {number} is {whole} on one device: it depends on the size of a block")
    return told


def _causes(trial: Trial) -> dict[Any, Cause | None]:
    """Return which sizes of axes explain how each array differs."""
    return {one.path: cause_of(_factors(one, trial)) for one in trial.differences}


def _factors(one: Difference, trial: Trial) -> list[tuple[Mapping[str, int], float | None]]:
    """By which factor an array differs on each mesh: 1 where it does not."""
    found: list[tuple[Mapping[str, int], float | None]] = [(trial.sizes, one.factor)]
    for axis, differences in trial.by_axis.items():
        same = next((other.factor for other in differences if other.path == one.path), 1.0)
        found.append(({a: n if a == axis else 1 for a, n in trial.sizes.items()}, same))
    return found


def _factors_text(trial: Trial) -> list[str]:
    """Return by which factors arrays differ from those on one device, in words."""
    known = [(one, _causes(trial)[one.path]) for one in trial.differences]
    said = [f"{labelled(one.path)} is {how}" for one, cause in known if cause and (how := one.how(cause))]
    return [f"Compared with one device, {_first(said)}"] if said else []


def _row(one: Difference, cause: Any) -> str:
    how = one.how(cause)
    count = "" if one.largest is None else f"{one.wrong} of {one.size} numbers differ, by up to {one.largest:.3g}"
    return f"{labelled(one.path)}: {', '.join(part for part in (how, count) if part)}"


def _of_fault(fault: Broken, name: str, on: str) -> Finding:
    axes = ", ".join(fault.axes)
    if fault.kind == "divergent":
        rule = f"devices along {axes} decide differently here, and do not all reach a collective: they wait for ever."
        advice = "a decision that is equal there: reduce it with pmax or psum first"
    else:
        rule = f"output {fault.output} of {name} is said to be equal along {axes}, and devices hold different numbers."
        advice = "the collective that makes it equal, or the axis in its layout"
    line = line_of(fault.eqn, fault.callers) or called_at()
    return found(Fault(rule, got=(on,), advice=advice), "divergent" if fault.kind == "divergent" else "numbers", line)


def but_for_noise(trial: Trial, walk: Engine) -> Trial:
    """The same trial, if no device draws random numbers for its own block, or if these are those on one device; else
    one without random numbers, as what differs may be these.
    """
    if not trial.wrong or trial.faults or not is_meant(walk) or ((first := trial.first()).seen and not first.noisy):
        return trial
    quiet = trial.quieted() if trial.quieted else trial
    depend = "its random numbers depend on the mesh, because a key is folded with axis_index"
    return quiet if quiet.quiet else Trial(trial.sizes, why=depend)


def unknown_lines(walk: Engine, jaxpr: Any) -> list[str]:
    """The lines where types lose a value: what they know of the operands, they do not know of the result.

    What they lose inside a call of this package is known again where the call says how its result lies. Then its tests
    vouch for what is between; else the line is that of the call.
    """
    found = _Lost(walk)
    found.enter(jaxpr, ())
    return list(found.lines)


class _Lost:
    """The lines where types lose a value.

    Attributes:
      walk: The walk that knows how values lie.
      lines: These lines.
      made: For each value that is lost inside a call of this package, its equation and which call that is.
    """

    def __init__(self, walk: Engine) -> None:
        self.walk = walk
        self.lines: dict[str, None] = {}
        self.made: dict[Variable, tuple[Equation, Any]] = {}

    def enter(self, jaxpr: Any, callers: tuple[Equation, ...]) -> None:
        for eqn in opened(jaxpr)[0].eqns:
            self._step(eqn, callers)
            for part in held(eqn):
                self.enter(part.jaxpr, (*callers, eqn))
        if callers and callers[-1].primitive.name == "shard_map":
            self._leave(opened(jaxpr)[0].outvars, None)

    def _step(self, eqn: Equation, callers: tuple[Equation, ...]) -> None:
        at, around = outside_jax(eqn, callers)
        frames = (frame for one in (at, *reversed(around)) for frame in frames_of(one))
        call = next(frames, at) if is_ours(at) else None
        lost = [v for v in eqn.outvars if self._is_lost(v)]
        given = [v for v in eqn.invars if self._is_lost(v)]
        if eqn.primitive.name == "spmd_names":  # which says nothing of how a value lies
            self.made.update((v, self.made[x]) for v, x in zip(lost, given, strict=False) if x in self.made)
            return
        self._leave(given, call)
        if call is None and lost and not given:
            self.lines[_place(eqn)] = None
        self.made.update((v, (eqn, call)) for v in lost if call is not None)

    def _leave(self, values: Iterable[Variable], call: Any) -> None:
        """Values that are read outside of the call that lost them."""
        for eqn, of in (self.made[v] for v in values if v in self.made):
            if of != call:
                self.lines[_place(eqn)] = None

    def _is_lost(self, atom: Variable) -> bool:
        return not hasattr(atom, "val") and _is_lost(self.walk.known.get(atom))


def believed_lines(jaxpr: Any) -> list[str]:
    """The lines of opaque code, for which its reference stands in."""
    made = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "spmd_retype")
    return list(dict.fromkeys(_place(eqn) for eqn in made if eqn.params["to"] == "reference"))


def _place(eqn: Equation) -> str:
    """The line of an equation. Where the user has none, the call that it is a part of."""
    calls = (name for _, name in _compat.name_stack(eqn) if isinstance(name, CallName))
    return line_of(eqn) or next((one_line(name) for name in calls), eqn.primitive.name)


def _is_lost(state: Any) -> bool:
    if not isinstance(state, State):
        return False
    lost = state.different or any(axes is HIDDEN for dim in state.dims for _, axes in dim)
    return bool(lost) and state.table is None


# --- noise -----------------------------------------------------------------------------------------------------------

# Random numbers that each device draws with a key of its own: whether they are meant for its own block.
#
# They depend on the mesh, and so do the results. This is meant where they meet the blocks of an array, element by
# element. It is a mistake where copies of one array meet different numbers, or blocks of one array the same ones.


def is_meant(checked: Engine) -> bool:
    """Return whether some devices draw numbers of their own, and all that do draw them for their own blocks.

    Args:
      checked: The walk that knows how values lie.
    """
    found = _Noise(checked)
    walk(checked.root, [False] * len(opened(checked.root)[0].invars), found)
    return found.met == {True} or (found.drawn and not found.met)


class _Noise(Domain):
    """Which values are made of random numbers alone.

    Attributes:
      checked: The walk that knows how values lie.
      drawn: Whether devices draw numbers of their own.
      met: Whether it is meant, for each equation in which such numbers meet other values.
    """

    def __init__(self, checked: Engine) -> None:
        super().__init__()
        self.checked, self.drawn = checked, False
        self.met: set[bool] = set()

    def constant(self, var: Variable | None, value: Any) -> bool:
        return False

    def join(self, one: bool, other: bool) -> bool:
        return one and other

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[bool]) -> list[bool]:
        return self.run(eqn, part, operands)

    def call(self, eqn: Equation, part: Held, operands: Sequence[bool]) -> Sequence[bool]:
        """A jaxpr may be shared by several calls, so only those that draw are entered."""
        return super().call(eqn, part, operands) if any(map(draws, equations(part.jaxpr))) else self.step(eqn, operands)

    def step(self, eqn: Equation, operands: Sequence[bool]) -> list[bool]:
        if draws(eqn) and shape_of(eqn.outvars[0]):  # one number is not one for each element
            drawn = bool(self._state(eqn.outvars[0]).axes)
            self.drawn |= drawn
            return [drawn] * len(eqn.outvars)
        states = list(map(self._state, eqn.invars))
        others = any(state.axes and state.dims for state, own in zip(states, operands, strict=True) if not own)
        if any(operands) and others:
            self.met.add(_fits(eqn, states, operands))
        return [any(operands) and not others] * len(eqn.outvars)

    def _state(self, atom: Variable) -> State:
        known = None if hasattr(atom, "val") else self.checked.known.get(atom)
        return known if isinstance(known, State) else State()


def _fits(eqn: Equation, states: Sequence[State], noisy: Sequence[bool]) -> bool:
    """Return whether random numbers differ along the axes that divide what they meet, and along no others."""
    entry = TABLE.get(eqn.primitive.name)
    labels = entry.map(eqn).operands if entry else [range(len(one.dims)) for one in states]
    axes, drawn, seen = set[str](), set[int | None](), set[str]()
    for state, own, places in zip(states, noisy, labels, strict=True):
        if own:
            axes |= state.axes
            drawn |= {label for dim, label in zip(state.dims, places, strict=False) if dim[0][1] is not FREE}
    for state, own, places in zip(states, noisy, labels, strict=True):
        if not own:
            seen |= {one.axis for one in state.pending if one.kind == STEP}
            for dim, label in zip(state.dims, places, strict=False):
                if label in drawn:
                    hidden = any(here is HIDDEN for _, here in dim)
                    seen |= (state.different & axes) if hidden else set(axes_of_dim(dim))
    return seen == axes
