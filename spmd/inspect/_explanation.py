"""An explanation: the collectives of one program, written and compiled, with its memory and time, as people read it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from spmd._jaxprs import errors as jax_errors
from spmd._jaxprs.facts import CallName, left_axes, left_text
from spmd._jaxprs.lines import short_line
from spmd._jaxprs.walker import equations
from spmd._text import Line, Report, Row, Table, bytes_text, fields_of, html_page, seconds_text, si_text, wrapped
from spmd._trees.arguments import explained
from spmd._trees.leaves import kind_of
from spmd.accelerators import Hardware, hardware
from spmd.errors import MeshError, SpmdError
from spmd.inspect._collectives import CollectiveReport, axes_text, by_part, collectives_of_text, counts_by_kind, grouped
from spmd.inspect._hints import Hint, hints_of
from spmd.inspect._match import Communication, communications, moved_text, with_plan
from spmd.inspect._program import Program, check_mesh, meshes_of_jaxpr, stage
from spmd.inspect._records import Boundary, Written
from spmd.inspect._written import Memory, Time, estimate, memory_of, seconds_of
from spmd.inspect._written import written as read
from spmd.mesh import crossing, crossing_text, sizes_for

_HEAD = ("collective", "axes", "times", "bytes", "time", "where", "call")
_CHOSEN = 'to="invarying" was chosen: this copy leaves the kernel whole, and no other use of it pays for that'
_LOOSE = "* in a loop of unknown length (counted once) or in a branch (counted as taken, the dearest in the time)"


@dataclass(repr=False, eq=False)
class Explanation(Report):
    """What one program sends and costs. `explain` makes it, and printing it shows `table()`.

    Attributes:
      name: The function's name.
      mesh: Axis sizes.
      written: The program as its jaxpr says it; None for a program that came lowered or compiled.
      compiled: The compiled collectives; None where nothing was compiled.
      memory: Bytes on one device.
      hardware: The machine that times are for, or None.
      platform: What it was compiled for: "cpu", "gpu", "tpu"; empty where nothing was compiled.
      missing: What could not be found out, and why.
      crossing: The mesh axes that cross processes, as far as the mesh has devices.
      plan: The compiler's plan, a `spmd.propagation.Propagation`, where the compiler divides the program, or kernels
        leave axes to it; else None.
      hints: Sums over devices that run too often, or on more than they need, each with what to write.
      left: The mesh axes that kernels leave to the compiler (`auto=`), each with the kernels.

    Example:
      >>> import jax, spmd
      >>> @spmd.kernel("b/dp d -> d", mesh=spmd.make_mesh(dp=4))
      ... def column_sums(x):
      ...     return spmd.reduce(x, "b/dp d -> d", "sum")
      >>> report = spmd.explain(column_sums, jax.ShapeDtypeStruct((8, 2), "float32"))
      >>> report.counts, report.total_bytes, report.unwritten
      ({'psum': 1}, 12, ())
    """

    name: str
    mesh: Mapping[str, int]
    written: Written | None
    compiled: CollectiveReport | None
    memory: Memory | None = None
    hardware: Hardware | None = None
    platform: str = ""
    missing: Sequence[str] = ()
    crossing: Sequence[str] = ()
    plan: Any = None
    left: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hints: Sequence[Hint] = ()

    @functools.cached_property
    def collectives(self) -> tuple[Communication, ...]:
        """The written collectives in program order, then those that nobody wrote."""
        found = communications(self.written, self.compiled, planned=self.plan is not None)
        return found if self.plan is None else with_plan(found, self.plan, self.compiled is not None, self.left or None)

    @property
    def open(self) -> tuple[Any, ...]:
        """What the compiler's plan leaves open, where nothing was compiled: each a `spmd.propagation.Open`."""
        return self.plan.open if self.plan is not None and self.compiled is None and not self.left else ()

    @functools.cached_property
    def time(self) -> Time | None:
        """Estimated seconds; None without `hardware`, or without the written view."""
        if self.hardware is None or self.written is None:
            return None
        return estimate(self.written, self.collectives, self.hardware, self.mesh)

    @property
    def unwritten(self) -> tuple[Communication, ...]:
        """Compiled collectives that nobody wrote: the compiler's own. For a program that came compiled these are all,
        because the written view is missing. Where nothing was compiled, those of the compiler's plan."""
        return tuple(one for one in self.collectives if not one.written)

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call, including those that nobody wrote."""
        return sum(one.total_bytes for one in self.collectives)

    @property
    def between_processes(self) -> tuple[Communication, ...]:
        """The collectives over axes that cross processes. Part of what they send stays inside a process."""
        return tuple(one for one in self.collectives if set(one.axes) & set(self.crossing))

    @property
    def counts(self) -> dict[str, int]:
        """Return how many collectives of each kind one call runs, in the order of their names. Each array counts: where
        the compiler combines several, `.compiled.counts` has fewer."""
        return counts_by_kind((one.kind, one.ran) for one in self.collectives if one.ran)

    @property
    def exact(self) -> bool:
        """False if a loop of unknown length was counted once, or it is not known which branch is taken."""
        return all(one.exact for one in self.collectives)

    def by_axis(self) -> dict[str, tuple[Communication, ...]]:
        """Return the collectives by mesh axes, keyed as a layout writes them: `"tp"`, `"dp/tp"`."""
        return grouped(self.collectives, lambda one: axes_text(one.axes))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = "name mesh platform counts total_bytes exact collectives written compiled memory time plan missing"
        sent = sum(one.total_bytes for one in self.between_processes)
        found = fields_of(self, *names.split(), "crossing", "hints", "left", "open")
        return {**found, "bytes_between_processes": sent}

    def table(self, width: int | None = None) -> str:
        """Return the explanation as text.

        Args:
          width: The number of columns. By default it is that of the terminal.
        """
        return self._text(width)

    def __repr__(self) -> str:
        counts = ", ".join(f"{kind}={count}" for kind, count in self.counts.items()) or "no collectives"
        counts += f", open={len(self.open)}" if self.open else ""
        return f"Explanation({self.name}: {counts}, unwritten={len(self.unwritten)}, total_bytes={self.total_bytes})"

    def _repr_html_(self) -> str:
        shown = [table for table in (_sent_table(self), _costs(self)) if table.rows]
        return html_page(_heading(self), shown, empty="" if self.collectives or self.open else "no collectives")

    def _lines(self, width: int) -> list[Line]:
        """A heading, what is sent, and what it costs."""
        width = max(width, 40)
        heading: list[Line] = [[(line, "bold")] for line in wrapped(_heading(self), width)]
        empty: list[Line] = [] if self.collectives or self.open else [[("no collectives", "")]]
        planned = [] if self.plan is None or self.left else self.plan.cost_lines(width)
        return [*heading, [("", "")], *planned, *empty, *_sent_table(self).lines(width), *_costs(self).lines(width)]


def _heading(it: Explanation) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in it.mesh.items())
    count = math.prod(it.mesh.values())
    on = f" on {sizes}" if sizes else ""
    devices = f"{count:,} device{'s' * (count != 1)}"
    made = f", compiled for {it.platform}" if it.platform else "" if it.compiled is not None else ", not compiled"
    across = f"; {crossing_text(it.crossing)}" if it.crossing else ""
    return f"{it.name or 'program'}{on}: {devices}{made}{across}"


# -------------------- what is sent


def _sent_table(it: Explanation) -> Table:
    """The collectives by phase and by axis, and what is moved around kernels."""
    written = [one for one in it.collectives if one.written]
    rows: list[Row] = []
    for title, ones in by_part(written).items():
        rows += _section(title, [*_rows(it, ones), _sum(it, ones)])
    if it.unwritten:
        nobody = it.written is not None and it.compiled is not None
        title = "NOBODY WROTE" if nobody else "compiled" if it.written is None else "the compiler's plan"
        ones = [*_rows(it, it.unwritten, "loud" if nobody else ""), _sum(it, it.unwritten)]
        rows += _section(title, ones, "title" if it.written is None else "loud title")
    elif it.compiled is not None and written:
        rows += _section("nobody wrote", _text_rows(["nothing: every compiled collective belongs to a written one"]))
    if len(by_axis := it.by_axis()) > 1 or it.unwritten or it.between_processes:
        most = sorted(by_axis.items(), key=lambda part: -sum(one.total_bytes for one in part[1]))
        sums = [*(_sum(it, ones, axes, "") for axes, ones in most), _sum(it, it.collectives)]
        sums += [_sum(it, it.between_processes, "between processes")] if it.crossing else []
        rows += _section("by axis", sums)
    if it.open:
        rest = (
            Row(("?", axes_text(one.axes), "", "", "", short_line(one.where), one.operation), "", (str(one),))
            for one in it.open
        )
        rows += _section("left open", [*rest, Row((it.plan.open_text,), "total")], "loud title")
    hinted = (Row(("psum", axes_text(one.axes), "", "", "", one.where, ""), "", (str(one),)) for one in it.hints)
    rows += _section("sums that may wait", hinted)
    rows += _section("left to the compiler", _text_rows(left_text(it.left)))
    rows += [] if it.written is None else _around(it.written, it.compiled is not None, it.plan is not None)
    return Table(rows, _HEAD, right=(2, 3, 4), below=(5, 6), indent=2)


def _section(title: str, rows: Iterable[Row], style: str = "title") -> list[Row]:
    """Rows under a title; nothing where there are none."""
    found = [Row((title,), style), *rows]
    return found[1:] and found


def _text_rows(lines: Iterable[str]) -> list[Row]:
    return [Row((line,)) for line in dict.fromkeys(lines)]


def _rows(it: Explanation, ones: Iterable[Communication], style: str = "") -> list[Row]:
    """A verb on a pytree, or the same line in each layer, is one row."""

    def row_key(one: Communication) -> Any:
        key = one.kind, one.axes, one.text, one.where, one.written, one.implicit, one.recomputed, one.branch
        return *key, one.note

    return [_row(it, alike, style) for alike in grouped(ones, row_key).values()]


def _row(it: Explanation, ones: Sequence[Communication], style: str) -> Row:
    one = ones[0]
    implicit = "implicit in this call" if one.implicit and one.phase == "forward" else ""
    chosen = isinstance(one.text, CallName) and one.text.gather is not None and one.text.gather.chosen
    remarks = (implicit, _CHOSEN if chosen else "", one.branch and f"in {one.branch}", one.note)
    own = isinstance(one.text, CallName) and one.text.verb == one.kind
    call = f'"{one.text.pattern}"' if own else one.text
    times = f"{sum(o.count for o in ones)}{'' if all(o.exact for o in ones) else '*'}"
    cells = (one.kind, axes_text(one.axes), times, *_bytes_and_time(it, ones), one.where, call)
    return Row(cells, style, tuple(filter(None, remarks)))


def _sum(it: Explanation, ones: Sequence[Communication], name: str = "total", style: str = "total") -> Row:
    return Row((name, "", str(sum(one.ran for one in ones)), *_bytes_and_time(it, ones), "", ""), style)


def _bytes_and_time(it: Explanation, ones: Sequence[Communication]) -> tuple[str, str]:
    time = "" if it.hardware is None else seconds_text(sum(seconds_of(one, it.hardware, it.mesh) for one in ones))
    return bytes_text(sum(one.total_bytes for one in ones)), time


def _around(written: Written, compiled: bool, planned: bool) -> list[Row]:
    """Return what is moved to enter kernels, the islands in them, what is meant per shard, and the layouts asked of the
    compiler."""
    boundary = [one for one in written.boundary if not (planned and one.text.startswith("reshard:"))]  # the plan has it
    known = [one for one in boundary if one.source is not None]
    moved = list(map(_boundary_text, known))
    if blank := len(boundary) - len(known):
        plural = "s that say" if blank > 1 else " that says"
        moved.append(f"{blank} argument{plural} no sharding: taken to lie as the kernel wants")
    islands = (f"{one.where}  {one.text} ({'not ' * one.opaque}looked into)" for one in written.islands)
    meant = (f"{one.where}  {one.why}{' (here on whole arrays)' * one.whole}" for one in written.per_shard)
    asked = (f"{one.where}  {one.text}" for one in written.constraints if not compiled)
    return [
        *_section("moved to enter a kernel", _text_rows(moved if known or not compiled else ())),
        *_section("islands", _text_rows(islands)),
        *_section("meant per shard", _text_rows(meant)),
        *_section("layouts asked of the compiler", _text_rows(asked)),
    ]


def _boundary_text(one: Boundary) -> str:
    sent = ", nothing is sent" if one.bytes == 0 else f", {bytes_text(one.bytes * one.count)}" if one.bytes else ""
    return "  ".join(filter(None, (one.where, moved_text(one)))) + sent + (one.note and f"; {one.note}")


# -------------------- what it costs


def _costs(it: Explanation) -> Table:
    """Memory, time, and what is not known: names, numbers, and what these are made of."""
    memory = [] if it.memory is None else _memory_rows(it.memory, it.hardware)
    rows = _section("memory per device", memory)
    if it.time is not None and it.hardware is not None and it.written is not None:
        rows += _section(f"time on {it.time.hardware}", _time_rows(it.time, it.hardware, it.written))
    rows += _section("meanwhile", [] if it.written is None else _window_rows(it.written, it.hardware))
    rows += _section("not known", _text_rows([*it.missing, *([] if it.exact else [_LOOSE])]))
    return Table(rows, right=(1,), below=(2,), indent=2)


def _memory_rows(memory: Memory, machine: Hardware | None) -> list[Row]:
    estimated = memory.temporaries is None and memory.estimated is not None
    temporaries, total = (memory.estimated, memory.peak) if estimated else (memory.temporaries, memory.total)
    kernels = memory.opened not in (None, memory.estimated)
    without = f"{bytes_text(memory.opened or 0)} without kernels, " if kernels else ""
    unfused = f"estimated; {without}{bytes_text(memory.unfused or 0)} if nothing is fused" if estimated else ""
    share = "" if machine is None else f"{_share(total, machine.hbm_bytes)} of {si_text(machine.hbm_bytes, 'B')}"
    rows = [
        ("arguments", memory.arguments, ""),
        ("constants", memory.constants or None, "arrays that functions close over"),
        ("outputs", memory.outputs, ""),
        ("temporaries", temporaries, unfused),
        ("donated", memory.aliased or None, "of the outputs lie in arguments"),
        ("about" if estimated else "together", total, share),
        ("on the host", memory.host or None, "besides, in its own memory"),
    ]
    return [Row((name, bytes_text(size), text)) for name, size, text in rows if size is not None]


def _time_rows(time: Time, machine: Hardware, written: Written) -> list[Row]:
    products = ", ".join(
        f"{si_text(n, 'FLOP')} {dtype} at {si_text(machine.peak(dtype), 'FLOP/s')}"
        for dtype, n in written.matmul_flops.items()
    )
    axes = ", ".join(f"{axes} {seconds_text(seconds)}" for axes, seconds in time.by_axis.items() if seconds)
    traffic = f"{bytes_text(written.hbm_bytes)} at {si_text(machine.hbm_bandwidth, 'B/s')}"
    if time.kernels:
        left_out = (f"{name} {bytes_text(max(0, round(size)))}" for name, size in written.left_out.items())
        traffic += f"; inside {', '.join(left_out)}"
    rows = [
        ("compute", time.compute, products or "no matrix products"),
        ("memory", time.memory, traffic),
        ("communication", time.communication, axes or "none"),
    ]
    if time.idle > 1e-9:
        why = f"{_share(time.idle, 1)}: another device runs a dearer branch"
        rows.append(("of it waiting", time.idle * time.serial, why))
    if time.serial:
        of_peak = [_of_peak(time, one) for one in (time.overlapped, time.serial)]
        rows += [
            ("all overlaps", time.overlapped, f"{time.bound} binds, {of_peak[0]}"),
            ("nothing overlaps", time.serial, of_peak[1]),
        ]
    return [Row((name, seconds_text(seconds), text)) for name, seconds, text in rows]


def _of_peak(time: Time, seconds: float) -> str:
    """The share of the peak, and the one that is known as MFU, which does not count what is computed again."""
    useful = f"; MFU, without what is computed again: {_share(time.compute - time.again, seconds)}"
    return f"{_share(time.compute, seconds)} of peak FLOP/s{useful if time.again else ''}"


def _window_rows(written: Written, machine: Hardware | None) -> list[Row]:
    """Return what each `spmd.meanwhile` computes while it sends, and how much of the time of the collectives that
    covers."""
    rows = []
    for one in written.windows:
        sent = [written.collectives[i] for i in one.collectives]
        each = ", ".join(f"{c.kind} {axes_text(c.axes)} {bytes_text(c.total_bytes)}" for c in sent) or "nothing"
        computed = ", ".join(f"{si_text(n, 'FLOP')} {dtype}" for dtype, n in one.flops.items()) or "no products"
        text, share = f"{each} beside {computed}", ""
        if machine is not None:
            sends = sum(c.count * machine.collective_seconds(c.kind, c.bytes, c.axes, written.mesh) for c in sent)
            takes = sum(n / machine.peak(dtype) for dtype, n in one.flops.items())
            share = _share(min(takes, sends), sends) if sends else ""
            text = f"of {seconds_text(sends)} is covered: {each}; beside it {computed}, {seconds_text(takes)}"
        rows.append(Row((f"{one.where}, {one.phase}", share, text)))
    return rows


def _share(part: float, whole: float) -> str:
    return "<1%" if 0 < part < 0.005 * whole else f"{part / whole:.0%}"


# --- `explain`: what a program sends, from which line, what the compiler made of it, and what it costs ----------------


@explained
def explain(
    fn: Any,
    *args: Any,
    mesh: Any = None,
    hardware: str | Hardware | None = None,
    compiled: Any = None,
    layouts: Any = None,
    **kwargs: Any,
) -> Explanation:
    """Return what a program sends, from which line, over which mesh axes, what the compiler made of it, and its cost.

    Two views are put side by side. *Written*: each collective of the traced program with the user's string,
    bytes, loops multiplied out, forward or backward, and what is moved to enter a kernel. *Compiled*: what the
    optimised program runs, matched to what was written; collectives that nobody wrote are marked. Nothing is
    run. `fn` is traced once and compiled once.

    Where the devices of the mesh belong to several processes, it names the axes that cross them, and sums what is sent
    over those apart: between hosts the links are slower.

    On a mesh without devices (`spmd.make_mesh(..., abstract=True)`) there is no compiled program; the written
    view, bytes and times are the same. A program without any kernel is divided by the compiler alone. Then the
    compiler's plan takes the place of the compiled program, as `spmd.propagate` gives it, and with a compiled program
    it says from which line and for which reason a collective comes that nobody wrote.

    Args:
      fn: A kernel, a `jax.jit`ed, differentiated or plain function with kernels in it, or what `.trace`,
        `.lower` or `.compile` returned (then without arguments; lowered and compiled programs have no written
        view).
      *args: Arguments of `fn`, arrays or `jax.ShapeDtypeStruct`s. Their shardings, if they have any, say what the
        boundary of a kernel moves.
      mesh: The mesh, where neither `fn` nor its arguments carry one.
      hardware: For times: a `spmd.accelerators.Hardware`, or the name of a preset ("h100").
      compiled: False for the written view alone, or a compiled program of `fn` to look at instead. By default
        `fn` is compiled if its mesh has devices; with True it is an error if it has none.
      layouts: Layouts for the arrays among the arguments of a program without kernels, as `spmd.propagate` takes them:
        they name the dimensions.
      **kwargs: Keyword arguments of `fn`.

    Returns:
      An `Explanation`.

    Raises:
      SpmdError: `fn` is none of the above, or `hardware` is not known.
      MeshError: `compiled=True` on a mesh without devices, or `mesh` is not the program's own.

    Example:
      >>> import jax, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4, abstract=True)
      >>> @spmd.kernel("b/dp d/tp -> b/dp d", mesh=mesh)
      ... def gather(x):
      ...     return spmd.all_gather(x, "b/dp d/tp -> b/dp d")
      >>> report = spmd.explain(gather, jax.ShapeDtypeStruct((8, 64), "float32"))
      >>> [(one.kind, one.axes, one.bytes, one.count, one.phase) for one in report.collectives]
      [('all_gather', ('tp',), 768, 1, 'forward')]
    """
    machine = None if hardware is None else _hardware(hardware)
    if not (compiled is None or isinstance(compiled, bool) or hasattr(compiled, "memory_analysis")):
        rule = f"compiled is None, True, False or a compiled program, not {kind_of(compiled)}."
        raise SpmdError(rule, call="explain(..., compiled=...)", advice="as in compiled=jax.jit(fn).lower(x).compile()")
    given = None if mesh is None else sizes_for(mesh, "explain(..., mesh=...)")
    program = stage("explain", fn, args, kwargs, mesh)
    check_mesh("explain", meshes_of_jaxpr(program.jaxpr), given)
    missing: list[str] = []
    if compiled is True and not program.has_devices:
        rule = "a program is compiled for devices, and this mesh has none."
        raise MeshError(rule, call="explain(..., compiled=True)", advice="compiled=None, or a mesh with devices")
    stats = _compiled(program, compiled, missing)
    found = program.mesh  # of some it is known once they are compiled
    sizes = {} if found is None else sizes_for(found, "")
    known = program.jaxpr is not None and isinstance(found, Mesh | AbstractMesh)
    alone = known and all(eqn.primitive.name != "shard_map" for eqn in equations(program.jaxpr))  # no kernel divides it
    written = None if program.jaxpr is None else read(program, sizes, asks=not alone)
    if written is None:
        missing.append("written view: a lowered or compiled program has no strings; pass the function itself")
    report = None if stats is None else collectives_of_text(stats.as_text(), mesh=sizes or None)
    left = {} if program.jaxpr is None else left_axes(program.jaxpr)
    plan = None
    if not hasattr(fn, "jaxpr") and (left or alone):
        from spmd.propagation import propagate  # which reads programs as this room does

        try:
            plan = propagate(fn, *args, mesh=mesh, layouts=layouts, **kwargs)
        except SpmdError as error:
            missing.append(f"the compiler's plan: {error.fault.got[0] if error.fault.got else error.fault.rule}")
    return Explanation(
        program.name,
        sizes or (report.mesh if report is not None and report.mesh else {}),
        written,
        report,
        memory=memory_of(written, stats),
        hardware=machine,
        platform=found.devices.flat[0].platform if stats is not None and isinstance(found, Mesh) else "",
        missing=missing,
        crossing=crossing(found),
        plan=plan,
        left=left,
        hints=() if program.jaxpr is None else hints_of(program.jaxpr),
    )


_hardware = hardware


def _compiled(program: Program, compiled: Any, missing: list[str]) -> Any:
    """The compiled program to look at, or None; then `missing` says why."""
    if hasattr(compiled, "memory_analysis"):
        return compiled
    abstract = "compiled view: needs devices, and the mesh is abstract"
    if not program.has_devices:
        missing.append(abstract)
        return None
    if compiled is False:
        return None
    try:
        return program.compiled
    except ValueError as error:  # the mesh of a traced program may be unknown until JAX needs its devices
        if compiled is True or program.mesh is not None or not jax_errors.lacks_devices(error):
            raise
        missing.append(abstract)
        return None
