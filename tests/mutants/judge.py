"""What becomes of a mutant: rejected while it is traced, other numbers, and who finds that."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import numpy as np

import spmd
from spmd.errors import SpmdError
from spmd.kernels import _boundary, _copies, _plan
from tests.mutants.programs import Program
from tests.mutants.sites import Mutant, changed, mutants_of

__all__ = ["Verdict", "judge", "mutants", "other_mesh", "run", "said"]

UNKNOWN = "unknown"


@dataclass
class Verdict:
    """What became of one mutant.

    Attributes:
      program: The program's name.
      mutant: What was changed.
      rejected: Why JAX, or a call of ours by itself, does not take it; empty where it runs.
      by_jax: Whether it is JAX that does not take it.
      moved: How far its numbers are from the program's, in tolerances. None if it does not run.
      types: What the checker says of it; empty where that is silent.
      numbers: The mesh on which a wrong mutant has other numbers than on its own: one of ones, or if the correct
        program means something else there, one between. Empty where they agree, "unknown" where it means something
        else on both.
    """

    program: str
    mutant: Mutant
    rejected: str = ""
    by_jax: bool = False
    moved: float | None = None
    types: str = ""
    numbers: str = ""

    def __str__(self) -> str:
        moved = f"moved by {self.moved:.2g} tolerances" if self.moved is not None else f"rejected: {self.rejected}"
        return f"{self.program}: {self.mutant}: {moved}; types: {self.types or '-'}; numbers: {self.numbers or '-'}"

    @property
    def waits(self) -> bool:
        """Whether devices would wait for each other for ever."""
        return "divergent" in self.types.partition(":")[0] or "wait for each other" in self.types

    @property
    def wrong(self) -> bool:
        return bool(self.rejected) or self.waits or (self.moved is not None and self.moved > 1)

    @property
    def by_types(self) -> bool:
        return bool(self.rejected or self.types)

    @property
    def by_numbers(self) -> bool:
        """The assertion looks for devices that wait before it runs anything."""
        return bool(self.rejected) or self.waits or self.numbers not in ("", UNKNOWN)


class NeverMet(AssertionError):
    """The program did not come by the place of its mutant."""


class Refused(Exception):
    """JAX refuses a result of a kernel."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """No checker: what is refused now, JAX refuses, or a call of ours that sees its operands."""
    nothing = lambda *_, **__: None
    with (
        mock.patch.object(_plan, "check_jaxpr", nothing),
        mock.patch.object(_boundary, "check_body", nothing),
        mock.patch.object(_copies, "check_jaxpr", nothing),
        mock.patch.object(_copies._Results, "error", lambda *_: Refused("a result varies where its layout says equal")),
    ):
        yield


def mutants(program: Program) -> list[Mutant]:
    """All changes of a program."""
    return mutants_of(lambda: jax.jit(program.function(program.mesh)).trace(*program.args))


def lowered(program: Program, mesh: Mapping[str, int], mutant: Mutant | None = None) -> Any:
    """A program, or a mutant, ready to be compiled for a mesh."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(unchecked())
        met = stack.enter_context(changed(mutant)) if mutant else [None]
        found = jax.jit(program.function(mesh)).lower(*program.args)
        if not met and mesh == program.mesh:
            raise NeverMet(f"{program.name}: {mutant}")
    return found


def run(program: Program, mesh: Mapping[str, int], mutant: Mutant | None = None) -> Any:
    """The numbers of a program, or of a mutant, on one mesh."""
    return jax.device_get(lowered(program, mesh, mutant).compile()(*program.args))


def apart(program: Program, found: Any, wanted: Any) -> float:
    """The largest error, by the largest number of its array and the tolerance."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if a.dtype.kind not in "fc":
            worst = max(worst, 1.0 * (not np.array_equal(a, b)))
        elif a.size:
            a, b = (x.astype(np.complex128) for x in (a, b))
            error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.nan_to_num(np.abs(a - b), nan=np.inf))
            worst = max(worst, float(error.max() / (np.abs(np.nan_to_num(b)).max() + 1e-3)))
    return worst / program.tolerance


def said(program: Program, mutant: Mutant | None = None) -> str:
    """What the checker says of a program or of a mutant: the kinds of the findings, and the first one."""
    with changed(mutant) if mutant else contextlib.nullcontext():
        try:
            found = spmd.check(program.function(program.mesh), *program.args)
        except SpmdError as error:
            return first_line(error)
    return f"{', '.join(sorted({one.kind for one in found}))}: {first_line(found[0])}" if found else ""


def judge(
    program: Program, every: Sequence[Mutant], known: Mapping[Mutant, Verdict] | None = None
) -> Iterator[Verdict]:
    """The verdict on each of these mutants. Of those whose numbers are `known` only the checker is asked."""
    truth = None if known else run(program, program.mesh)
    other = None if known else other_mesh(program, truth)
    for mutant in every:
        yield judged(program, mutant, truth, other, known[mutant] if known else None)


def other_mesh(program: Program, truth: Any) -> Mapping[str, int] | None:
    """Another mesh on which the correct program has the numbers `truth`, if there is one."""
    return next((mesh for mesh in program.other_meshes() if agrees(program, mesh, truth)), None)


def judged(
    program: Program, mutant: Mutant, truth: Any, other: Mapping[str, int] | None, known: Verdict | None = None
) -> Verdict:
    """The verdict on a mutant; `other` is another mesh on which the correct program has the numbers `truth`."""
    verdict = Verdict(program.name, mutant)
    try:
        made = lowered(program, program.mesh, mutant)
    except NeverMet:
        raise
    except Exception as error:
        verdict.rejected = f"{type(error).__name__}: {first_line(error)}"
        verdict.by_jax = not isinstance(error, SpmdError)
        return verdict
    verdict.types = said(program, mutant)
    if verdict.waits:  # such a program must not run
        return verdict
    if known is not None:
        verdict.moved, verdict.numbers = known.moved, known.numbers
        return verdict
    numbers = jax.device_get(made.compile()(*program.args))
    verdict.moved = apart(program, numbers, truth)
    if verdict.wrong:
        verdict.numbers = UNKNOWN if other is None else other_numbers(program, mutant, numbers, other, truth)
    return verdict


def agrees(program: Program, mesh: Mapping[str, int], truth: Any) -> bool:
    """Whether the correct program means the same on another mesh."""
    try:
        return apart(program, run(program, mesh), truth) <= 1
    except Exception:  # its sizes do not suit the mesh
        return False


def other_numbers(program: Program, mutant: Mutant, numbers: Any, mesh: Mapping[str, int], truth: Any) -> str:
    """The mesh, if a mutant has other numbers there than on its own."""
    try:
        # no change is one along axes of one device: on a mesh of ones a mutant is the correct program
        theirs = run(program, mesh, mutant) if max(mesh.values()) > 1 else truth
    except Exception as refused:
        return f"{mesh}: {first_line(refused)}"
    error = apart(program, theirs, numbers)
    return f"{mesh}: {error:.2g} tolerances apart" if error > 1 else ""


def first_line(error: Any) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:160]
