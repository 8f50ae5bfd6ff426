"""The arbiter: a program on its mesh, and on a mesh of ones, in numbers.

A layout says how an array is divided, and not what it means: on a mesh whose axes all have size 1 the same strings are
plain JAX on whole arrays. Both are interpreted on one device (`_simulator`), with the same random arguments, forward
and backward. What differs is wrong, whatever the types say.

A program may mean to depend on the sizes of axes: blocks that are shifted by one, stages of a pipeline. On whole arrays
it then depends on them as well, so what differs from a mesh of ones is compared with reference mode too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding

from spmd import _compat
from spmd._jaxprs.errors import first_line
from spmd._jaxprs.facts import per_shard_reason
from spmd._jaxprs.lines import line_of_body, line_of_error
from spmd._jaxprs.traces import FlatProgram
from spmd._jaxprs.walker import equations
from spmd._python.ambient import Ambient
from spmd._trees.leaves import held_dtype, is_key
from spmd.checker._arguments import drawn
from spmd.checker._choices import LARGE, SIDE, Captured, Unreached
from spmd.checker._drives import drives
from spmd.checker._located import Located, at_round, located
from spmd.checker._numbers import Difference, compared, labelled, largest, pulled, rounded
from spmd.checker._primitives import Array, NotSimulated, Outside
from spmd.checker._reach import Reach, left_by_sizes
from spmd.checker._readings import Reading, read_as, readings
from spmd.checker._rounds import WHILE, shortened
from spmd.checker._simulator import (
    COUNTS,
    FOR_ONE_NUMBER,
    Fault,
    NoSuchDevice,
    Parted,
    Run,
    TooLarge,
    held_number,
    simulate,
)
from spmd.language import mesh_text
from spmd.mesh import no_mesh, resized, with_sizes
from spmd.modes import Mode, counting, interpreted, mode

collecting = Ambient("check", False)  # whether `check` looks at everything at the end, in place of each kernel

_MOST = 200_000_000  # numbers that one run computes; each equation costs 50 of them
_QUICK = 1_000_000  # those of a run that has to be quick
_DRAWN = 2**22  # numbers in the arguments
_CLOSE = 1e-6  # what the rounding of double precision may become, as a part of the largest number of an array
_ROUNDED = 32  # times the rounding of a type whose bits are computed with
_NUDGED = 1e-14  # by which part of itself a number changes where it is asked what rounding may become
_AMPLIFIED = 100  # times what becomes of that: a sum in another order rounds more often
_NOISE = (0.31, 0.64, 0.87, 0.12, 0.5)  # what stands in for random numbers in each draw
# How large random arguments are where an array begins, and where it ends. A branch or a maximum may hide a mistake from
# numbers that are alike on all devices.
_SCALES = ((1.0, 1.0), (0.1, 3.0), (3.0, 0.1), (0.3, 0.3))
_DRIVEN = 40  # draws that are tried for the sides of choices which these do not take
_POSITIVE = 2  # the draw without negative numbers, of which there are logarithms and roots
# To which power given numbers are raised: what is sorted stays so, and zeros and ones stay what they are.
_POWERS = (0.8, 1.25, 0.6, 1.5)


@dataclass(frozen=True)
class Trial:
    """What the numbers of a program say.

    Attributes:
      sizes: The mesh.
      differences: How results and gradients differ there from those on a mesh of ones.
      faults: What went wrong there: devices that part, copies that are not equal.
      gradients: Whether gradients were compared.
      line: Where its first body begins.
      meant: Whether they differ in reference mode as well, where arrays are whole and axes have their sizes: then the
        program means to depend on these.
      why: Why nothing was compared; "" where something was.
      fails: Whether that is because the program raises an error where nothing is divided.
      large: Whether that is because there are too many numbers.
      agrees_as_given: Whether that is because it agrees for the given arguments, and not for others.
      along: How it differs on other meshes: `along(sizes)`, where something differs.
      quiet: Whether one number stood in for all random ones.
      quieted: The same trial with one number in place of the random ones, which may depend on the mesh.
      shifts: The lines of permutations by numbers that were taken as shifts.
      underived: Why gradients were not compared, where the program has none.
      unreached: The sides of choices that no draw took.
      flat: Where results and gradients stand, in what `pulled` gives, that were one number in all draws.
      captured: The arrays that the program closes over and that are one number, as zeros are.
      whole: The sizes of the mesh that the program is given, if those are others.
      names: For each name whose size is another one, that size and the one that is given.
      first: Where values begin to differ; asked where something does.
      apart: How results differ from these in reference mode, where arrays are whole and axes have their sizes; compared
        where all meshes agree.
      counted: The lines that ask for these sizes there.
      rounds: How many rounds were compared of a scan of each of these lengths, if not all.
      also: The same on a mesh whose axes have other sizes, where results agree too.
    """

    sizes: Mapping[str, int]
    differences: tuple[Difference, ...] = ()
    faults: tuple[Fault, ...] = ()
    gradients: bool = False
    line: str = ""
    meant: bool = False
    why: str = ""
    fails: bool = False
    large: bool = False
    agrees_as_given: bool = False
    along: Callable[[Mapping[str, int]], Sequence[Difference] | None] = field(default=lambda _: None, compare=False)
    quiet: bool = False
    quieted: Callable[[], Trial] | None = field(default=None, compare=False)
    shifts: tuple[str, ...] = ()
    underived: str = ""
    unreached: tuple[Unreached, ...] = ()
    flat: tuple[Any, ...] = ()
    captured: tuple[Captured, ...] = ()
    whole: Mapping[str, int] | None = None
    names: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    first: Callable[[], Located] = field(default=Located, compare=False)
    apart: tuple[Difference, ...] = ()
    counted: tuple[str, ...] = ()
    rounds: Mapping[int, int] = field(default_factory=dict)
    also: Trial | None = None

    @property
    def wrong(self) -> bool:
        return bool(self.differences or self.faults) and not self.meant

    @property
    def agrees(self) -> bool:
        return not (self.differences or self.faults or self.why)

    @functools.cached_property
    def by_axis(self) -> dict[str, Sequence[Difference]]:
        """Return how it differs where one axis alone has several devices, if there are several axes and it is known."""
        found = {axis: self.along(sizes) for axis, sizes in _alone(self.sizes).items()}
        return {axis: one for axis, one in found.items() if one is not None}


_Runner = Callable[..., Run]
"""From a jaxpr to what it makes of its arguments; with numbers that are read as sizes of its mesh."""


def too_large(sizes: Mapping[str, int]) -> Trial:
    """Return that nothing was compared on this mesh, because there are too many numbers."""
    return Trial(sizes, why="there are too many numbers: smaller structs can be compared", large=True)


class _Failed(Exception):
    """The program raises an error where it is traced."""


def tried(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    mesh: Any,
    sizes: Mapping[str, int],
    *,
    gradients: bool = True,
    alone: bool = False,
    modes: bool = False,
    traced: FlatProgram | None = None,
    reference: Callable[..., Any] | None = None,
    written: Mapping[str, int] | None = None,
    given: tuple[FlatProgram, Sequence[Any]] | None = None,
    once: bool = False,
    rtol: float | None = None,
    quick: bool = False,
    unsure: bool = True,
) -> Trial:
    """Compare a program on a mesh with the same on a mesh of ones. Nothing is compiled, and no device is needed.

    Args:
      fn: A function of arrays.
      arrays: Its arguments: arrays, or structs of arrays.
      mesh: The mesh of its bodies, for one that reads it off its arguments.
      sizes: The sizes of all mesh axes.
      gradients: Whether gradients are compared, where there are any; not those of a program that takes some itself.
      alone: Whether they are compared also where results differ, because a suspicion is about them alone.
      modes: Whether results are compared with those of reference mode too.
      traced: The program as it was traced on its mesh, if it was.
      reference: The same on whole arrays, to compare with in place of the program on a mesh of ones.
      written: The sizes for which the program may have numbers of its own, if those are others.
      given: The program and its arguments at the sizes that it is asked about, for a trial that says what these alone
        have.
      once: Whether one draw is enough, of results and of gradients, where these are compared.
      rtol: How large a difference may be, as a part of the largest number of an array.
      quick: Whether the results of one draw of few numbers are enough: the given ones if there are any, because what
        is right may need them, or drawn ones with which no index leaves its array.
      unsure: Whether types suspect or lose a value. Then one draw runs all rounds of each loop.
    """
    if all(n == 1 for n in sizes.values()):
        return Trial(sizes, why="each axis of the mesh has one device")
    if sum(math.prod(np.shape(x)) for x in arrays) > _DRAWN:
        return too_large(sizes)
    program, found = _Program(fn, arrays, mesh, sizes, traced, reference, written or sizes, given), Trial(sizes)
    program.close, program.unsure = rtol or _CLOSE, unsure and not quick
    if quick:
        program.be_quick(arrays)
    # The gradient of a wrong result says no more, and costs ten times as much. Some programs have none.
    every = [(False, 1)] * (gradients and not alone) + [(True, None)] * gradients + [(False, None)]
    one_draw = [(grad, 1) for grad in (True, False) if gradients or not grad]
    turns = one_draw if once else [(False, 1)] if quick else every
    for grad, draws in turns:
        try:
            trial = program.tried(grad, draws=draws)
            if quick and trial.wrong and program.leaves():
                return Trial(sizes, why="an index leaves its array")
            if trial.wrong or draws is None or once or quick:
                quieted = functools.partial(program.quieted, grad)
                trial = replace(trial, quieted=quieted, underived=found.why or trial.underived)
                return program.across_modes(trial) if modes and trial.agrees and reference is None else trial
        except _Failed as error:
            found = Trial(sizes, why=f"{error}")
        except TooLarge:
            return too_large(sizes)
        except NotSimulated as error:
            return Trial(sizes, why=f"{error}", fails=isinstance(error, _FailsWhole | NoSuchDevice))
    return found


def is_traced(fn: Callable[..., Any], arrays: Sequence[Any], mesh: Any, sizes: Mapping[str, int]) -> bool:
    """Tell whether a program can be traced with these arguments, on its mesh and where nothing is divided."""
    structs = _structs_of(arrays)
    try:
        for one in (sizes, dict.fromkeys(sizes, 1)):
            _on_mesh(mesh, one, "explicit", fn, structs)
    except _Failed:
        return False
    return True


class _Turn(NamedTuple):
    """Arguments that are compared.

    Attributes:
      draws: With integers that are large, and last with small ones where these leave an array.
      ties: Whether numbers may be equal, or zero, where a gradient may be any of several.
      loose: Whether given numbers are replaced by others, which may not be sorted, or a mask.
      driven: Whether they were made to take another side of a choice.
      finite: Whether all numbers are finite.
      beyond: Whether integers are negative that may be places: what differs then tells nothing.
    """

    draws: Sequence[list[Any]]
    ties: bool = False
    loose: bool = False
    driven: bool = False
    finite: bool = True
    beyond: bool = False


class _FailsWhole(NotSimulated):
    """The program raises an error where nothing is divided, and not on its mesh."""


class _Program:
    """A program of arrays to results and gradients, traced once for each mesh. The trace is differentiated."""

    def __init__(
        self,
        fn: Callable[..., Any],
        arrays: Sequence[Any],
        mesh: Any,
        sizes: Mapping[str, int],
        traced: FlatProgram | None,
        reference: Callable[..., Any] | None,
        written: Mapping[str, int],
        at_given: tuple[FlatProgram, Sequence[Any]] | None,
    ) -> None:
        self.reference, self.written, self.at_given = reference, written, at_given
        self.shifts: list[str] = []
        self.few: Mapping[int, int] = {}
        self.rounds: Mapping[int, int] = {}
        self.unsure, self.ran = True, False
        self.reach = Reach({}, (), 0)
        self.rounded, self.close, self.most = 0.0, _CLOSE, _MOST
        self.fn, self.mesh, self.sizes, self.grad = fn, mesh, dict(sizes), False
        given = all(map(_has_numbers, arrays))
        real = any(jnp.issubdtype(held_dtype(x), jnp.inexact) for x in arrays)
        alike = bool(reference) or all(map(_is_open, arrays))
        with jax.ensure_compile_time_eval():  # the program may be asked about while another one is traced
            bold = [True] * any(jnp.issubdtype(held_dtype(x), jnp.integer) for x in arrays)
            seeds = range(len(_SCALES) if real or not given else 1)
            kept = lambda seed: "numbers" if reference or not seed else "order"
            self.turns = [_Turn([_filled(arrays, seed, one, kept(seed)) for one in (*bold, False)]) for seed in seeds]
            if given and real:
                self.turns.append(_Turn([list(arrays)], ties=True))
            if not alike:
                self.turns += [_Turn([_filled(arrays, seed, False, "")], loose=True) for seed in (0, 1)]
            counts = [_has_numbers(x) and np.size(x) == 1 and _is_integer(x) for x in arrays]
            if any(counts) and not reference:
                first = self.turns[0].draws[-1]
                more = [x + np.ones((), x.dtype) if own else x for own, x in zip(counts, first, strict=True)]
                self.turns.append(_Turn([more, first], loose=True))
        self.fixed = [_has_numbers(x) and np.size(x) > 1 for x in arrays]
        self.structs = _structs_of(self.turns[0].draws[-1])
        self.specs = list(map(_typed_spec, arrays))
        self.whole: dict[bool, Any] = {}
        self.pulled: dict[Any, tuple[Any, _Form]] = {}
        self.forward: dict[Any, FlatProgram] = {} if traced is None else {(*sizes.items(), "explicit"): traced}

    def be_quick(self, arrays: Sequence[Any]) -> None:
        """Compute less, and try the given arguments first, if they have numbers."""
        self.most = _QUICK
        if not all(map(_is_open, arrays)):
            self.turns.sort(key=lambda turn: not turn.ties)

    def tried(self, grad: bool, quiet: bool = False, draws: int | None = None) -> Trial:
        """Compare results, and gradients, for this many draws of the arguments, or for all. Long scans run a few of
        their rounds, and all if these do not agree, or do not show all there is."""
        self.grad = grad
        ours, form = self._traced(self.sizes)
        try:
            base, other, unknown = self._base(form)
        except NotSimulated:
            if faults := self._faults():  # which nothing is needed to compare with
                return Trial(self.sizes, faults=faults, line=line_of_body(first_body(ours)))
            raise
        whole = (ours, self.sizes), (base, other)
        self.few = {} if self.reference else shortened(ours, base)
        if self.unsure:  # devices may leave a loop at different times
            self.few.pop(WHILE, None)
        if self.few and (trial := self._in_few_rounds(whole, form, quiet, draws)):
            return replace(trial, why=unknown, fails=bool(unknown))
        self.few = {}
        return self._compared(whole, form, unknown, quiet, draws)

    def _in_few_rounds(self, programs: Any, form: _Form, quiet: bool, draws: int | None) -> Trial | None:
        """Return what a few rounds of each scan show, if they agree and show all there is."""
        with contextlib.suppress(NotSimulated):
            trial = self._compared(programs, form, "", quiet, draws)
            # What types suspect may decide differently on each device, in a round that is not run.
            if trial.agrees and not (self.reach.needs_rounds or (self.unsure and self.reach.inside)):
                return replace(trial, rounds={n: few for n, few in self.few.items() if n != WHILE})
        return None

    def _compared(self, programs: Any, form: _Form, unknown: str, quiet: bool, draws: int | None) -> Trial:
        """Compare the program on its mesh with that where nothing is divided."""
        (ours, sizes), (base, other) = programs
        self.shifts.clear()
        gradients = "gradient" in form.tree.unflatten(form.shapes)
        meant: Trial | None = None
        read: tuple[Reading, ...] = ()
        told: set[Any] = set()  # what has numbers in some draw: where all are NaN, nothing is compared
        given = self._ordered(self.structs)
        reach = Reach({}, (), 0) if draws else Reach.of(ours, base, given, form.results, self.few)
        self.reach = reach
        # A loop that a test ends runs once whole; any, if types do not know what its rounds hand on.
        once_whole = self.unsure and not self.ran
        self.rounds = {} if once_whole else {n: few for n, few in self.few.items() if n != WHILE}
        turns = itertools.chain(self.turns[:draws], self._driven(reach, ours, quiet) if draws is None else ())
        for turn, number in zip(turns, itertools.cycle(_NOISE), strict=False):
            try:
                shown = self._outcome(turn, number if quiet else None, form, (ours, sizes), (base, other), read, reach)
            except Parted as error:
                return Trial(sizes, faults=(error.fault,))
            self.rounds, self.ran = self.few, True
            if shown is None:
                continue
            run, found, wanted, differences = shown
            told.update(path for path, x in zip(form.paths(), wanted, strict=True) if not _is_nan(x))
            if not (differences or found.faults):
                reach.add(found.taken, wanted, apart=not (turn.driven and turn.ties))
            if not (differences or found.faults) or (turn.driven and (turn.loose or turn.beyond)):
                continue
            if any(map(per_shard_reason, equations(ours))):  # then numbers may differ
                return Trial(sizes, why="a part of it is meant per shard")
            trial = Trial(sizes, tuple(differences), tuple(found.faults), gradients, quiet=quiet)
            trial = self._located(trial, form, wanted, run, ours, base)
            if trial.faults or self.reference or self.few:
                return trial
            if self._same_on_whole_arrays(form, found.outs, run):
                meant = replace(trial, meant=True)
            elif turn.loose:
                why = "it agrees for arguments like these, which may be sorted, or a mask, and not for others"
                return Trial(sizes, why=why, agrees_as_given=True)
            elif read or not other or not (read := self._read(ours, base, other, form, run)):
                if self.shifts:
                    raise NoSuchDevice(FOR_ONE_NUMBER)
                self._check_leaves(ours, base, other, run)
                return trial
        if meant or read:  # a number that is read so may be another one, and the program wrong
            said = " and ".join(map(str, read))
            return meant or Trial(sizes, why=f"it agrees if {said}; jax.lax.axis_size gives the size on any mesh")
        agreed = Trial(
            sizes,
            gradients=gradients,
            why=unknown,
            fails=bool(unknown),
            quiet=quiet,
            shifts=tuple(dict.fromkeys(self.shifts)),
            unreached=reach.unreached + self._left_by_sizes(other),
            flat=tuple(form.paths()[i] for i in reach.flat),
            captured=reach.captured,
        )
        return self._but_for_nan(agreed, form, told)

    def _outcome(
        self,
        turn: _Turn,
        noise: float | None,
        form: _Form,
        ours: tuple[Any, Mapping[str, int]],
        base: tuple[Any, Mapping[str, int]],
        read: Sequence[Reading],
        reach: Reach,
    ) -> tuple[_Runner, Run, Sequence[Array], list[Difference]] | None:
        """What these arguments show of the program on its mesh and where nothing is divided, each with its sizes: what
        runs both, the two results, and how they differ. None if they tell nothing."""
        try:
            draw, run, wanted = self._wanted(turn, noise, base[0], read, base[1])
            found = run(ours[0], read, ours[1], choices=reach.choices)
        except Parted:
            raise
        except NotSimulated:
            if turn.driven:
                return None
            raise
        if turn.beyond:
            reach.see(found.taken)
        if not turn.finite and _part(found.outs[-form.results :], wanted[-form.results :]):
            return None
        differences = self._differences(form, found.outs, wanted, finite=turn.driven)
        if differences and not found.faults:
            nudged = self._run(draw, self.grad, noise, nudged=True)(base[0], read, base[1])
            if self._are_rounding(differences, form, nudged.outs, wanted):
                return None
        if turn.ties or not turn.finite:  # where numbers are equal or zero, the gradient may be any of several
            differences = [one for one in differences if one.path[0].key == "result"]
        return run, found, wanted, differences

    def _wanted(
        self, turn: _Turn, noise: float | None, base: Any, read: Sequence[Reading], other: Mapping[str, int]
    ) -> tuple[list[Any], _Runner, Sequence[Array]]:
        """The first of the draws that leaves no array, its runner, and the results where nothing is divided."""
        for draw in turn.draws[:-1]:
            run = self._run(draw, self.grad, noise)
            with contextlib.suppress(Outside):
                return draw, run, run(base, read, other, inside=True).outs
        draw = turn.draws[-1]
        run = self._run(draw, self.grad, noise)
        return draw, run, run(base, read, other, inside=turn.driven).outs

    def _left_by_sizes(self, other: Mapping[str, int]) -> tuple[Unreached, ...]:
        """What the sizes that are given have alone, on the mesh and where nothing is divided."""
        if self.at_given is None:
            return ()
        (program, arrays), here = self.at_given, self.forward[*self.sizes.items(), "explicit"]
        found = left_by_sizes(program.jaxpr, here.jaxpr)
        if program is not here and other and (twin := self.forward.get((*other.items(), "explicit"))):
            with contextlib.suppress(_Failed):
                whole = _on_mesh(self.mesh, other, "explicit", self.fn, _structs_of(arrays))
                found += (one for one in left_by_sizes(whole.jaxpr, twin.jaxpr) if one.question == SIDE)
        return tuple(dict.fromkeys(found))

    def _ordered(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments in the order in which a program with its gradient takes them."""
        return jax.tree.leaves(pulled(lambda: None, arrays, grad=self.grad)[1])

    def _driven(self, reach: Reach, ours: Any, quiet: bool) -> Iterator[_Turn]:
        """Draws that take sides of choices which no draw before took. What takes one is tried with other numbers, too:
        a negative one may hide what a positive one shows."""
        starts = [turn.draws[-1] for turn in self.turns if not (turn.ties or turn.loose)]
        numbered = [np.float64(i) if _is_real(x) else np.int64(i) for i, x in enumerate(starts[0])]
        places = [int(x) for x in self._ordered(numbered)]
        aims = [one.at(places) for one in reach.open]
        for drive in itertools.islice(drives(starts[0], aims) if aims else (), _DRIVEN):
            if not drive.scales:
                reach.give_up(LARGE)
            if not reach.open:
                return
            loose = not drive.keeps and any(self.fixed[i] for i in drive.places)
            for number, start in enumerate(starts[::_POSITIVE]):
                turn = _Turn([drive.of(start)], drive.ties, loose, True, drive.finite, drive.beyond)
                if number == 0 and not self._reaches(turn, reach, ours, quiet):
                    break
                yield turn
        reach.give_up(LARGE)

    def _reaches(self, turn: _Turn, reach: Reach, ours: Any, quiet: bool) -> bool:
        """Return whether these arguments take a side that none before took."""
        with contextlib.suppress(NotSimulated):
            run = self._run(turn.draws[0], self.grad, _NOISE[0] if quiet else None)
            return reach.adds(run(ours, choices=reach.choices).taken)
        return False

    def across_modes(self, trial: Trial) -> Trial:
        """The same trial, which tells whether reference mode has the results that all meshes share."""
        self.grad, lines = False, dict[str, None]()
        token = counting.set(lines)
        try:
            ours, form = self._traced(self.sizes)
            whole = self._on_whole_arrays(form)
        finally:
            counting.reset(token)
        if not whole or any(map(per_shard_reason, equations(ours))):
            return trial
        with contextlib.suppress(NotSimulated):
            plain, nudged = (self._run(self.turns[0].draws[-1], grad=False, nudged=one) for one in (False, True))
            self.rounds = self.few
            if self.few and not self._differences(form, plain(whole).outs, plain(ours).outs):
                return trial
            self.rounds = {}
            found = plain(whole).outs
            differences = self._differences(form, found, plain(ours).outs)
            if differences and not self._are_rounding(differences, form, nudged(whole).outs, found):
                return replace(trial, apart=tuple(differences), counted=tuple(lines))
        return trial

    def _located(self, trial: Trial, form: _Form, wanted: Sequence[Array], run: _Runner, ours: Any, base: Any) -> Trial:
        """The same trial, which tells what differs, on which meshes, and from where on."""
        along = functools.partial(self._along, form, wanted, run)
        first = functools.cache(functools.partial(self._first, form, wanted, run, ours, base))
        return replace(trial, line=line_of_body(first_body(ours)), along=along, first=first)

    def _first(self, form: _Form, wanted: Sequence[Array], run: _Runner, ours: Any, base: Any) -> Located:
        """Return where the program on its mesh begins to differ. A reference has no equations like it: the program on
        one device stands in, if it does the same."""
        with contextlib.suppress(_Failed, NotSimulated):
            if self.reference:
                base, other = self._traced(dict.fromkeys(self.sizes, 1))
                if other != form or self._differences(form, run(base).outs, wanted):
                    return Located()

            def look(number: int) -> Located:
                here, there = (run(one, keep=number) for one in (ours, base))
                return located(ours, base, here.known, there.known)

            with np.errstate(all="ignore"):  # sums of infinite numbers
                return at_round(look, run(ours, keep=0).rounds)
        return Located()

    def _but_for_nan(self, trial: Trial, form: _Form, told: Collection[Any]) -> Trial:
        """The same trial, if each result and gradient had a number in some draw."""
        silent = [path for path in form.paths() if path not in told]
        if lacking := [labelled(path) for path in silent if path[0].key == "result"]:
            why = f"all numbers of {lacking[0]} are NaN, or rounding, for the arguments that were drawn: give others"
            return Trial(self.sizes, why=why)
        return replace(trial, gradients=False, underived=f"all of {labelled(silent[0])} are NaN") if silent else trial

    def _check_leaves(self, ours: Any, base: Any, other: Mapping[str, int], run: _Runner) -> None:
        """Refuse a program in which an index leaves its array on one device alone: there JAX takes another element."""
        if _leaves(run, base) and not _leaves(run, ours) and self._always_leaves(ours, base, other, run):
            raise NotSimulated(f"an index leaves its array on {mesh_text(other)}, and none does on the mesh; {COUNTS}")

    def _always_leaves(self, ours: Any, base: Any, other: Mapping[str, int], run: _Runner) -> bool:
        """Return whether an index leaves its array on one device, whatever numbers are read as."""
        return all(_leaves(run, base, one, other) for one in readings(ours, base, self.written))

    def leaves(self) -> bool:
        """Return whether an index leaves its array with the numbers that are drawn first: it may fit what is meant."""
        ours, form = self._traced(self.sizes)
        run = self._run(self.turns[0].draws[-1], self.grad)
        return not self.turns[0].ties and any(_leaves(run, one) for one in (ours, self._base(form)[0]))

    def quieted(self, grad: bool) -> Trial:
        """Return the trial without random numbers. A loop that draws until a number is right may not end then."""
        try:
            return self.tried(grad, quiet=True)
        except NotSimulated as error:
            return Trial(self.sizes, why=f"{error}")

    def _faults(self) -> tuple[Fault, ...]:
        """Return what goes wrong on the mesh itself, forward."""
        forward = self.forward[*self.sizes.items(), "explicit"]
        try:
            return tuple(self._run(self.turns[0].draws[-1], grad=False)(forward.jaxpr).faults)
        except Parted as error:
            return (error.fault,)

    def _read(self, ours: Any, base: Any, other: Mapping[str, int], form: _Form, run: _Runner) -> tuple[Reading, ...]:
        """Return which numbers to read as sizes of axes, so that the program agrees on all meshes; none where no such
        reading is known."""
        for several in readings(ours, base, self.written):
            with contextlib.suppress(NotSimulated):  # a loop may not end with another number
                wanted = run(base, several, other).outs
                along = functools.partial(self._along, form, wanted, run, read=several, base=base)
                if along(self.sizes) == [] and not any(map(along, _alone(self.sizes).values())):  # None: who can tell
                    return several
        return ()

    def _along(
        self,
        form: _Form,
        wanted: Sequence[Array],
        run: _Runner,
        sizes: Mapping[str, int],
        read: Sequence[Reading] = (),
        base: Any = None,
    ) -> list[Difference] | None:
        """Return how the program differs on another mesh; None where that cannot be told."""
        try:
            jaxpr, other = self._traced(sizes)
            read = () if sizes == self.written else read
            if read and len(read_as(read, sizes, jaxpr)) != len(read_as(read, sizes, base)):
                return None  # a number that is made of the sizes of arrays is the same there
            found = run(jaxpr, read, sizes).outs
        except (_Failed, NotSimulated):
            return None
        return self._differences(form, found, wanted) if other == form else None

    def _base(self, form: _Form) -> tuple[Any, Mapping[str, int], str]:
        """The program where nothing is divided, and the sizes of its mesh; or as little as it allows: then equal
        numbers prove nothing, and the third result says why."""
        sizes = self.sizes
        if self.reference is not None:
            return self._meant(self.reference, form), {}, ""
        first: _Failed | None = None
        for one in (dict.fromkeys(sizes, 1), None, *({**sizes, axis: 1} for axis, n in sizes.items() if n > 1)):
            try:
                if one is None:
                    jaxpr = self._on_whole_arrays(form)
                else:
                    jaxpr, other = self._traced(one)
                    if other != form:
                        raise _Failed(f"a result has another shape on {mesh_text(one)}")
                if jaxpr:
                    return jaxpr, one or {}, f"{first}; {COUNTS}" if one and max(one.values()) > 1 else ""
            except _Failed as error:
                first = first or error
        raise _FailsWhole(f"{first}; {COUNTS}")

    def _meant(self, reference: Callable[..., Any], form: _Form) -> Any:
        """The function on whole arrays that says what the program means."""
        found, other = self._pulled(_on_mesh(self.mesh, self.sizes, "reference", reference, self.structs), self.sizes)
        if other != form:
            raise NotSimulated("reference= has results of another structure or shape")
        return found

    def _run(self, draw: Any, grad: bool, noise: float | None = None, nudged: bool = False) -> _Runner:
        """Traced programs on these arguments, or on some with other last digits."""
        _, given = pulled(lambda: None, draw, grad=grad)
        with jax.ensure_compile_time_eval():
            numbers = [_nudged(held_number(x)) if nudged else held_number(x) for x in jax.tree.leaves(given)]

        def run(jaxpr: Any, read: Sequence[Reading] = (), sizes: Any = (), **how: Any) -> Run:
            how = {"noise": noise, "numbers": read_as(read, sizes, jaxpr), "rounds": self.rounds, **how}
            found = simulate(jaxpr, numbers, self.most, shifted=True, **how)
            self.shifts += found.shifts
            self.rounded = max(self.rounded, found.rounded)
            return found

        return run

    def _traced(self, sizes: Mapping[str, int], how: Mode = "explicit") -> tuple[Any, _Form]:
        """Results and gradients on a mesh of these sizes, and their form."""
        key, structs = (*sizes.items(), how), _placed(self.structs, self.specs, self.mesh, sizes)
        if key not in self.forward:
            self.forward[key] = _on_mesh(self.mesh, sizes, how, self.fn, structs)
        if (key, self.grad) not in self.pulled:
            found, form = self._pulled(self.forward[key], sizes, how)
            _check_testable(found, sizes)
            self.pulled[key, self.grad] = found, form
        return self.pulled[key, self.grad]

    def _pulled(self, program: FlatProgram, sizes: Mapping[str, int], how: Mode = "explicit") -> tuple[Any, _Form]:
        """A traced program with its gradients."""
        run, given = pulled(program, _placed(self.structs, self.specs, self.mesh, sizes), grad=self.grad)
        leaves, structure = jax.tree.flatten(given)
        flat = lambda *given: run(*jax.tree.unflatten(structure, given))
        found = _on_mesh(self.mesh, sizes, how, flat, leaves)
        with no_mesh():
            live = _compat.live_jaxpr(found.jaxpr.jaxpr)  # what a derivative makes and nothing reads has no sides
        return ClosedJaxpr(live, found.jaxpr.consts), _Form(
            found.structure, tuple(one.shape for one in found.jaxpr.out_avals)
        )

    def _same_on_whole_arrays(self, form: _Form, found: Sequence[Array], run: _Runner) -> bool:
        whole = self._on_whole_arrays(form)
        with contextlib.suppress(NotSimulated):
            return bool(whole) and not self._differences(form, found, run(whole).outs)
        return False

    def _on_whole_arrays(self, form: _Form) -> Any:
        """The program in reference mode, traced once for all draws; False if it has none."""
        if self.grad not in self.whole:
            try:
                jaxpr, found = self._traced(self.sizes, "reference")
                whole = found == form and first_body(jaxpr) is None  # a raw shard_map is divided in this mode too
                self.whole[self.grad] = jaxpr if whole else False
            except (_Failed, NotSimulated):
                self.whole[self.grad] = False
        return self.whole[self.grad]

    def _are_rounding(self, differences: Sequence[Difference], form: _Form, *both: Sequence[Array]) -> bool:
        """Return whether rounding explains the differences: arguments with other last digits change the results on one
        device as much. A loop does so that does not settle, or that divides by what is nearly zero."""
        moved = {one.path: one.largest or 0.0 for one in self._differences(form, *both, exact=True)}
        return all(one.largest and one.largest <= _AMPLIFIED * moved.get(one.path, 0.0) for one in differences)

    def _differences(
        self, form: _Form, *both: Sequence[Array], exact: bool = False, finite: bool = False
    ) -> list[Difference]:
        """Return how numbers differ from others: with `exact` in any digit, with `finite` where the others are."""
        if finite:
            known = [_is_finite(wanted) for _, wanted in zip(*both, strict=True)]
            both = tuple([np.where(k, x, 0) for k, x in zip(known, one, strict=True)] for one in both)
        found, wanted = (jax.tree.unflatten(form.tree, one) for one in both)
        gradients = max(map(largest, jax.tree.leaves(wanted.get("gradient"))), default=0.0)
        close = 0.0 if exact else max(self.close, _ROUNDED * self.rounded)
        least = lambda path: max(1e-3 * gradients * (path[0].key == "gradient"), 1e-30)
        differ = compared(found, wanted, lambda path, x, y: close * max(rounded(x, y), least(path)))
        return sorted(differ, key=lambda one: one.path[0].key != "result")


def _leaves(run: _Runner, jaxpr: Any, read: Sequence[Reading] = (), sizes: Mapping[str, int] | None = None) -> bool:
    """Return whether an index leaves its array in a program, where JAX takes an element inside in its place."""
    try:
        run(jaxpr, read, sizes or {}, inside=True)
    except Outside:
        return True
    return False


@contextlib.contextmanager
def for_numbers(sizes: Mapping[str, int], how: Mode = "explicit", collect: bool = True) -> Iterator[None]:
    """What surrounds a trace for numbers, on a mesh of these sizes. A `print` in the body prints nothing: it would
    print shapes that the user did not give."""
    with collecting(collect), interpreted(True), resized(tuple(sizes.items())), mode(how), no_mesh():
        with contextlib.redirect_stdout(cast("IO[str]", _Quiet(sys.stdout))):
            yield


class _Quiet:
    """A stream that drops what a trace for numbers writes. What other threads write passes."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if resized.value else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _on_mesh(
    mesh: Any, sizes: Mapping[str, int], how: Mode, fn: Callable[..., Any], structs: Sequence[Any]
) -> FlatProgram:
    """A function traced on a mesh of these sizes."""
    around = [jax.sharding.use_abstract_mesh(_like(mesh, sizes)), no_mesh()]
    while True:  # some programs read their mesh off the context, and a `shard_map` may have another one
        try:
            with for_numbers(sizes, how), around.pop(0):
                return FlatProgram.of(fn, *structs)
        except Exception as error:  # of the program, which may raise anything
            if not around or not isinstance(error, ValueError):
                at = f" at {line}" if (line := line_of_error(error)) else ""
                said = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
                raise _Failed(f"it fails on {mesh_text(sizes)}{at}: {said}") from error


def _alone(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """For each axis the mesh on which it alone has several devices; none for a mesh that has one such axis."""
    wide = [axis for axis, n in sizes.items() if n > 1]
    return {axis: {**dict.fromkeys(sizes, 1), axis: sizes[axis]} for axis in wide if len(wide) > 1}


class _Form(NamedTuple):
    """The structure of a program's results, and their shapes."""

    tree: Any
    shapes: tuple[Any, ...]

    @property
    def results(self) -> int:
        """How many of them are results, and no gradients; these stand at the end of `shapes`."""
        return sum(path[0].key == "result" for path in self.paths())

    def paths(self) -> list[Any]:
        """Return where each result and gradient stands in what `pulled` gives."""
        places = jax.tree.unflatten(self.tree, range(len(self.shapes)))
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(places)[0]]


def _structs_of(arrays: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(np.shape(x), held_dtype(x)) for x in arrays]


def _typed_spec(x: Any) -> Any:
    """The spec of an argument whose type says how it lies; None of any other."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding.spec


def _placed(structs: Sequence[Any], specs: Sequence[Any], mesh: Any, sizes: Mapping[str, int]) -> list[Any]:
    """The same structs, and those that have a spec with its type on a mesh of these sizes."""
    lies = lambda spec: NamedSharding(_like(mesh, sizes), spec)
    pairs = zip(structs, specs, strict=True)
    return [x if s is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies(s)) for x, s in pairs]


def _like(mesh: Any, sizes: Mapping[str, int]) -> Any:
    """A mesh with other sizes. Where types say how arrays lie, it is of the same devices too."""
    if AxisType.Explicit not in mesh.axis_types:
        return with_sizes(mesh, sizes)
    return mesh.abstract_mesh.update(axis_sizes=with_sizes(mesh, sizes).axis_sizes)


def _check_testable(jaxpr: Any, sizes: Mapping[str, int]) -> None:
    """Refuse a program that cannot be compared on this mesh."""
    for eqn in equations(jaxpr):
        made = _compat.made_manual(eqn) if eqn.primitive.name == "shard_map" else {}
        if any(sizes.get(axis, n) != n for axis, n in made.items()):
            raise NotSimulated("a jax.shard_map has a mesh of its own: reference= or build= tells what it means")


def _filled(arrays: Sequence[Any], seed: int, bold: bool, kept: str) -> list[Any]:
    """Arguments for a trial. Those without values are drawn. Given numbers may be sorted, or a mask: "numbers" keeps
    their signs, their order, and zeros and ones; "order" only their order, and which of them are equal; "" nothing.
    Where an array has one number everywhere, "numbers" keeps its sign.
    """
    draws = np.random.default_rng((seed, 7))

    def one(x: Any) -> Any:
        if not _has_numbers(x):
            return jax.ShapeDtypeStruct(np.shape(x), held_dtype(x))
        if is_key(x):
            return x
        given, real = np.asarray(x), jnp.issubdtype(x.dtype, jnp.inexact)
        if not real and (kept or given.size == 1):
            return given
        alike = _is_constant(given)
        if not real and not alike:  # the small ones on one device, so that no block is like another
            return (np.sort(given, None) if seed else draws.permutation(given.reshape(-1))).reshape(given.shape)
        if kept == "order" and given.dtype.kind == "f" and not alike:
            return _in_their_order(given, draws, seed)
        if kept and not alike:
            scales = np.isfinite(given) & (given != 0)  # a score of -inf stays one
            return (given * np.where(scales, np.abs(given), 1) ** (_POWERS[seed] - 1)).astype(given.dtype)
        if kept == "numbers" and given.any():
            return _scaled((given * draws.uniform(0.5, 1.5, given.shape)).astype(given.dtype), seed)
        return jax.ShapeDtypeStruct(given.shape, given.dtype)

    structs = [one(x) for x in arrays]
    drawn_ones = drawn(structs, seed, bold=bold and seed > 0)
    pairs = zip(structs, drawn_ones, strict=True)
    return [_positive(_scaled(x, seed), seed) if isinstance(s, jax.ShapeDtypeStruct) else x for s, x in pairs]


def _has_numbers(x: Any) -> bool:
    """Return whether this process knows what is in an array. No process holds the whole of a partial sum."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return getattr(x, "is_fully_addressable", True) and not getattr(_typed_spec(x), "unreduced", ())


def _is_open(x: Any) -> bool:
    """Return whether other numbers do as well as those of an argument: it has none, or one everywhere."""
    free = np.size(x) == 1 or jnp.issubdtype(x.dtype, jnp.inexact) if hasattr(x, "dtype") else True
    return is_key(x) or not _has_numbers(x) or (_is_constant(x) and free)


def _is_finite(x: Array) -> Array:
    return np.isfinite(x) if x.dtype.kind in "fc" else np.ones(x.shape, bool)


def _part(found: Sequence[Array], wanted: Sequence[Array]) -> bool:
    """Return whether some numbers are finite on one side alone. Of infinite arguments that tells nothing: 0 times one
    of them is nan, and what is left out is not."""
    return any((_is_finite(x) != _is_finite(y)).any() for x, y in zip(found, wanted, strict=True))


def _is_integer(x: Any) -> bool:
    return jnp.issubdtype(held_dtype(x), jnp.integer)


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(held_dtype(x), jnp.inexact)


def _is_nan(x: Array) -> bool:
    return bool(x.size) and x.dtype.kind in "fc" and bool(np.isnan(x).all())


def _nudged(x: Array) -> Array:
    """An array with other last digits. What is equal stays so, and a whole number stays what it is."""
    real = x.dtype.kind in "fc"
    with np.errstate(invalid="ignore"):
        return np.where(x == np.round(x), x, x * (1 + _NUDGED * np.sin(1e3 * x.real))) if real else x


def _is_constant(x: Any) -> bool:
    given = np.asarray(x)
    return not given.size or bool((given == given.flat[0]).all())


def _in_their_order(given: Array, draws: np.random.Generator, seed: int) -> Array:
    """Random numbers in the order of these."""
    every, places = np.unique(given, return_inverse=True)
    new = np.sort(_positive(draws.normal(size=every.shape), seed))[places.reshape(given.shape)]
    return np.where(np.isfinite(given), new, given).astype(given.dtype)


def _scaled(x: Any, seed: int) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return (np.asarray(x) * np.geomspace(*_SCALES[seed], np.size(x)).reshape(np.shape(x))).astype(x.dtype)


def _positive(x: Any, seed: int) -> Any:
    return np.abs(x).astype(x.dtype) if seed == _POSITIVE and jnp.issubdtype(x.dtype, jnp.inexact) else x


def first_body(jaxpr: Any) -> Any:
    """The equation of the first body in a program; None if it has none."""
    return next((eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"), None)
