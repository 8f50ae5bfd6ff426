"""`search`: which mesh suits a program best, by bounds where they decide and by traces where they do not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd._text import bytes_text
from spmd._trees.leaves import kind_of, not_int
from spmd.accelerators import Hardware
from spmd.accelerators import hardware as _hardware
from spmd.errors import Impossible, MeshError, SizeError, SpmdError
from spmd.inspect._explanation import explain
from spmd.inspect._program import building
from spmd.mesh import make_mesh
from spmd.searcher._result import (
    Bound,
    Found,
    Row,
    Search,
    Sizes,
    Untraced,
    bytes_at_rest,
    factorisations,
    key_of,
    name_of,
    row_of,
    undivided,
)

AXES = ("dp", "fsdp", "cp", "tp", "pp")
_CALL = "search(build, devices=...)"
_BUILD = "def build(mesh): return fn, args, or fn, args, spmd.searcher.Bound(...)"


def search(
    build: Callable[..., Any],
    *,
    devices: int,
    axes: Sequence[str] = AXES,
    hardware: str | Hardware,
    memory: float = 0.9,
    where: Callable[[Mapping[str, int]], bool] | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    overlap: Sequence[str] = (),
    top: int = 10,
    most: int | None = None,
    trace: Sequence[Mapping[str, int]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Return which mesh suits a program best: every factorisation of the device count, excluded by a bound or traced.

    Each way to divide the devices over the axes is a candidate, with each combination of `choices`. Bounds exclude
    candidates before anything is traced, in this order: `where`, what `build` raises as `spmd.errors.Impossible`,
    arguments that the mesh does not divide, memory at rest, the memory that `build` states. The others are traced on
    abstract meshes, the lowest bound on time first. The search stops where no other bound is below the time of row
    `top`: these rows are then the best of all. No device is needed, and nothing is compiled or run.

    A row is priced as `explain` prices it, with the axes of the mesh in the order that takes the least time: the last
    lie inside a node. Compute, memory traffic and collectives follow one another, except for the collectives over the
    axes of `overlap`: they take place beside compute and memory traffic. Rows whose estimated peak exceeds the memory
    are excluded and counted. Equal candidates stay in the order of the sizes, so two searches give the same.

    Units: seconds and bytes, of one device.

    Communication: none. Nothing runs.

    Args:
      build: `build(mesh, **choice)` to `(fn, args)` as `explain` takes them, or `(fn, args, bound)` with a
        `spmd.searcher.Bound`. It raises `spmd.errors.Impossible("why")` where the program cannot run. It is called
        once for each candidate.
      devices: The number of devices.
      axes: The names of the mesh axes, outermost first. A mesh has all of them, with size 1 where nothing is divided.
      hardware: The name of a preset, or a `spmd.accelerators.Hardware`.
      memory: The part of a device's memory that a step may take.
      where: Which meshes to consider: `lambda mesh: mesh["tp"] <= 8`.
      choices: Further coordinates by the names that `build` takes: `{"micro": [8, 16], "mapping": [one, other]}`.
      overlap: The mesh axes whose collectives the program runs beside compute, such as the gathers of FSDP that
        fetch the next layer: `("dp", "fsdp")`. Whether it does is yours to know.
      top: How many rows are certain to be the best.
      most: The most candidates to trace. If it ends the search, `proven` is False.
      trace: Meshes to trace whatever their bound says, such as the one in use.
      progress: Called with how many candidates are done and how many there are.

    Returns:
      A `spmd.searcher.Search`: `.best`, `.rows`, `.why(mesh)`.

    Raises:
      MeshError: If no mesh is left, or an axis is named twice.
      SizeError: If `devices`, `top` or `most` is not an int of at least 1, or `memory` is not between 0 and 1.
      SpmdError: If `build` returns something else, a bound exceeds what the trace says, or a preset is not known.

    Example:
      >>> import jax, spmd
      >>> def build(mesh):
      ...     kernel = spmd.kernel("b/dp d, d f/tp -> b/dp f/tp", mesh=mesh)
      ...     args = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
      ...     return kernel(lambda x, w: spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")), args
      >>> found = spmd.search(build, devices=8, axes=("dp", "tp"), hardware="h100")
      >>> found.best.mesh
      {'tp': 2, 'dp': 4}

    References:
      Prices: `spmd.accelerators.Hardware.collective_seconds`. Best first by lower bounds: Land and Doig, "An Automatic
        Method of Solving Discrete Programming Problems", Econometrica 28 (1960)
    """
    _check(devices, axes, memory, top, most)
    found = Found(devices, tuple(axes), _hardware(hardware), top)
    job = _Job(build, found.hardware, memory, overlap)
    left = _left(job, found, where, choices or {})
    asked = [one for one in left if any(key_of(one.mesh, {}) == key_of(mesh, {}) for mesh in trace)]
    left = sorted((one for one in left if one not in asked), key=lambda one: one.seconds)
    for one in [*asked, *left]:
        if one not in asked and (found.traced == most or one.seconds >= found.worst):
            break
        found.traced += 1
        try:
            found.rows.append(job.row(one))
        except _Excluded as reason:
            found.exclude(one.mesh, one.choice, reason.kind, reason.text)
        if progress is not None:
            progress(found.traced, len(asked) + len(left))
    found.rest = [Untraced(one.mesh, one.choice, one.seconds) for one in [*asked, *left][found.traced :]]
    if not found.rows:
        advice = "sizes that a mesh divides, or another where="
        if any(count and kind.startswith("memory") for kind, count in found.counts.items()):
            advice = "more devices, or hardware with more memory"
        raise MeshError(f"no mesh of {devices:,} devices is left.", call=_CALL, got=found.reasons(), advice=advice)
    return Search(found)


def _check(devices: Any, axes: Sequence[str], memory: Any, top: Any, most: Any) -> None:
    for name, value in (("devices", devices), ("top", top), ("most", 1 if most is None else most)):
        if fault := not_int(name, value, 1):
            raise SizeError(fault, call=_CALL, advice=f"as in {name}=8")
    if not isinstance(memory, int | float) or not 0 < memory <= 1:
        rule = f"memory, the part of a device's memory that a step may take, is above 0 and at most 1, not {memory!r}."
        raise SizeError(rule, call=_CALL)
    twice = [axis for i, axis in enumerate(axes) if axis in axes[:i]]
    if twice or not axes or isinstance(axes, str):
        fault = f"names '{twice[0]}' twice" if twice and not isinstance(axes, str) else f"is {axes!r}"
        raise MeshError(f"axes is a sequence of names, each once, but it {fault}.", call=_CALL, advice='("dp", "tp")')


class _Excluded(Exception):
    """A candidate cannot be the best."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A mesh and its choices, what `build` makes of them, and a lower bound on its time."""

    mesh: Sizes
    choice: Mapping[str, Any]
    fn: Any
    args: Sequence[Any]
    bound: Bound
    seconds: float


@dataclass(frozen=True)
class _Job:
    """A program on the meshes of one search."""

    build: Callable[..., Any]
    hardware: Hardware
    memory: float
    overlap: Sequence[str]

    def made(self, mesh: Sizes, choice: Mapping[str, Any]) -> tuple[Any, Sequence[Any], Bound]:
        named: dict[str, Any] = mesh
        place = make_mesh(abstract=True, **named)
        try:
            with building(_CALL, place):
                made = self.build(place, **choice)
        except Impossible as error:
            raise _Excluded("impossible", error.fault.rule.rstrip(".")) from None
        parts: tuple[Any, ...] = made if isinstance(made, tuple) else ()
        fits = len(parts) in (2, 3) and callable(parts[0]) and isinstance(parts[1], tuple | list)
        if not fits or not isinstance(parts[-1], Bound | tuple | list):
            rule = f"build returns a function and its arguments, and a Bound if it likes, not {kind_of(made)}."
            raise SpmdError(rule, call=_CALL, advice=_BUILD)
        return parts[0], parts[1], parts[2] if len(parts) == 3 else Bound()

    def candidate(self, mesh: Sizes, choice: Mapping[str, Any]) -> _Candidate:
        """A candidate that no bound excludes."""
        fn, args, bound = self.made(mesh, choice)
        if array := undivided(args):
            raise _Excluded("sizes", f"the mesh does not divide the argument {array}")
        self.check_room("memory at rest", "the arguments", bytes_at_rest(args))
        self.check_room("memory stated", "the stated bound", bound.memory)
        return _Candidate(mesh, choice, fn, args, bound, bound.seconds(mesh, self.hardware, overlap=self.overlap))

    def check_room(self, kind: str, what: str, size: float) -> None:
        room = self.memory * self.hardware.hbm_bytes
        if size > room:
            raise _Excluded(kind, f"{what}: {bytes_text(int(size))} of {bytes_text(int(room))}")

    def row(self, one: _Candidate) -> Row:
        """A candidate as its trace says it."""
        try:
            with _naming(one.mesh, one.choice):
                explained = explain(one.fn, *one.args, compiled=False)
        except SizeError as error:
            raise _Excluded("refused", error.fault.rule.rstrip(".")) from None
        bound = one.bound
        row = row_of(explained, one.mesh, one.choice, self.hardware, bound, self.overlap)
        for what, stated, said in (("seconds", one.seconds, row.seconds), ("bytes of memory", bound.memory, row.peak)):
            if stated > said * (1 + 1e-6):
                rule = f"build states a bound of {stated:.6g} {what}, and the trace has {said:.6g}."
                advice = "a bound that never exceeds the trace"
                raise SpmdError(rule, call=_CALL, got=[f"the mesh: {row.name}"], advice=advice)
        self.check_room("memory", "the estimated peak", row.peak)
        return row


@contextlib.contextmanager
def _naming(mesh: Sizes, choice: Mapping[str, Any]) -> Iterator[None]:
    """An error of the user's program, of one mesh among thousands, says of which."""
    try:
        yield
    except (_Excluded, SizeError):
        raise
    except Exception as error:
        error.add_note(f"So it is on the mesh {name_of(mesh, choice)}, which search tries.")
        raise


def _left(
    job: _Job,
    found: Found,
    where: Callable[[Mapping[str, int]], bool] | None,
    choices: Mapping[str, Sequence[Any]],
) -> list[_Candidate]:
    """The candidates that no bound excludes, in the order of the sizes."""
    left = []
    combinations = [dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values())]
    for mesh, choice in itertools.product(factorisations(found.devices, found.axes), combinations):
        found.considered += 1
        try:
            with _naming(mesh, choice):
                if where is not None and not where(mesh):
                    raise _Excluded("where", "where= leaves it out")
                left.append(job.candidate(mesh, choice))
        except _Excluded as reason:
            found.exclude(mesh, choice, reason.kind, reason.text)
    return left
