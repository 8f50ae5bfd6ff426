"""An explanation as text for a terminal, as HTML for a notebook, and for `rich`: the same sections in each."""

from __future__ import annotations

import html
import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spmd._units import bytes_text, seconds_text, si_text
from spmd.accelerators import Hardware
from spmd.inspect._groups import axes_text
from spmd.inspect._match import Communication, moved_text
from spmd.inspect._records import Written
from spmd.inspect._roofline import Time, seconds_of

if TYPE_CHECKING:
    from spmd.inspect._explain import Explanation

__all__ = ["as_html", "as_rich", "as_text"]

HEAD = ("collective", "axes", "times", "bytes", "time", "where", "call")
_RIGHT = (2, 3, 4)
_FLEXIBLE = 28  # columns that the call needs to stand on the line of its collective


@dataclass
class Row:
    """One line of a section: cells as in `HEAD`, and remarks under it."""

    cells: tuple[str, ...]
    remarks: list[str] = field(default_factory=list)
    total: bool = False


@dataclass
class Section:
    """A title, and under it rows of the table, facts (name, number, what it is made of) or lines of prose."""

    title: str
    rows: list[Row] = field(default_factory=list)
    facts: list[tuple[str, str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    loud: bool = False


def sections(it: Explanation) -> Iterator[Section]:
    """What there is to say, in order."""
    written = [one for one in it.collectives if one.written]
    parts = {
        "forward": [one for one in written if one.phase == "forward"],
        "forward again, for jax.checkpoint": [one for one in written if one.phase != "forward" and one.recomputed],
        "backward": [one for one in written if one.phase != "forward" and not one.recomputed],
    }
    for title, ones in parts.items():
        if ones:
            yield Section(title, [*_rows(it, ones), _total(it, ones, "total")])
    if it.unwritten:
        known = it.written is not None
        rows = [*_rows(it, it.unwritten), _total(it, it.unwritten, "total")]
        yield Section("nobody wrote" if known else "compiled", rows, loud=known)
    elif it.compiled is not None and written:
        yield Section("nobody wrote", lines=["nothing: every compiled collective belongs to a written one"])
    if len(by_axis := it.by_axis()) > 1 or it.unwritten:
        most = sorted(by_axis.items(), key=lambda part: -sum(one.total_bytes for one in part[1]))
        rows = [_total(it, ones, axes, total=False) for axes, ones in most]
        yield Section("by axis", [*rows, _total(it, it.collectives, "total")])
    yield from _written_sections(it)
    yield from _cost_sections(it)
    notes = [*it.missing]
    if not it.exact:
        notes.append("* in a loop of unknown length (counted once) or in a branch (counted as taken)")
    if notes:
        yield Section("not known", lines=notes)


def _rows(it: Explanation, ones: Iterable[Communication]) -> list[Row]:
    """A verb on a pytree, or the same line in each layer, is one row."""
    alike: dict[Any, list[Communication]] = {}
    for one in ones:
        key = (one.kind, one.axes, one.text, one.where, one.written, one.implicit, one.recomputed, one.branch)
        alike.setdefault((*key, one.note), []).append(one)
    return [_row(it, ones) for ones in alike.values()]


def _row(it: Explanation, ones: Sequence[Communication]) -> Row:
    one = ones[0]
    remarks = []
    if one.implicit and one.phase == "forward":
        remarks.append("implicit in this call")
    if one.branch:
        remarks.append(f"in {one.branch}")
    if one.note:
        remarks.append(one.note)
    own = re.fullmatch(rf"{one.kind}\([^\"]*(\".*\")\)", one.text)
    call = own.group(1) if own and one.written else one.text
    times = f"{sum(o.count for o in ones)}{'' if all(o.exact for o in ones) else '*'}"
    return Row((one.kind, axes_text(one.axes), times, *_costs(it, ones), one.where, call), remarks)


def _total(it: Explanation, ones: Sequence[Communication], name: str, total: bool = True) -> Row:
    times = str(sum(one.count if one.runs is None else one.runs for one in ones))
    return Row((name, "", times, *_costs(it, ones), "", ""), total=total)


def _costs(it: Explanation, ones: Sequence[Communication]) -> tuple[str, str]:
    time = "" if it.hardware is None else seconds_text(sum(seconds_of(one, it.hardware, it.mesh) for one in ones))
    return bytes_text(sum(one.total_bytes for one in ones)), time


def _written_sections(it: Explanation) -> Iterator[Section]:
    if it.written is None:
        return
    known = [one for one in it.written.boundary if one.source is not None]
    moved = [
        "  ".join(filter(None, (one.where, moved_text(one))))
        + (f", {bytes_text(one.bytes * one.count)}" if one.bytes else "" if one.bytes is None else ", nothing is sent")
        + (one.note and f"; {one.note}")
        for one in known
    ]
    if blank := len(it.written.boundary) - len(known):
        plural = "s that say" if blank > 1 else " that says"
        moved.append(f"{blank} argument{plural} no sharding: taken to lie as the kernel wants")
    if known or (moved and it.compiled is None):
        yield Section("moved to enter a kernel", lines=list(dict.fromkeys(moved)))
    if it.written.islands:
        inside = {True: " (not looked into)", False: " (looked into)"}
        lines = [f"{one.where}  {one.text}{inside[one.opaque]}" for one in it.written.islands]
        yield Section("islands", lines=list(dict.fromkeys(lines)))
    if it.written.constraints and it.compiled is None:
        lines = [f"{one.where}  {one.text}" for one in it.written.constraints]
        yield Section("layouts asked of the compiler", lines=list(dict.fromkeys(lines)))


def _cost_sections(it: Explanation) -> Iterator[Section]:
    if it.memory is not None:
        memory = it.memory
        parts = [("arguments", memory.arguments), ("outputs", memory.outputs), ("temporaries", memory.temporaries)]
        facts = [(name, bytes_text(size), "") for name, size in parts if size is not None]
        if memory.aliased:
            facts.append(("donated", bytes_text(memory.aliased), "of the outputs lie in arguments"))
        share = ""
        if it.hardware is not None:
            share = f"{_share(memory.total, it.hardware.hbm_bytes)} of {si_text(it.hardware.hbm_bytes, 'B')}"
        facts.append(("at least" if memory.temporaries is None else "together", bytes_text(memory.total), share))
        yield Section("memory per device", facts=facts)
    if it.time is not None and it.hardware is not None and it.written is not None:
        yield Section(f"time on {it.time.hardware}", facts=_times(it.time, it.hardware, it.written))


def _times(time: Time, machine: Hardware, written: Written) -> list[tuple[str, str, str]]:
    products = ", ".join(
        f"{si_text(n, 'FLOP')} {dtype} at {si_text(machine.peak(dtype), 'FLOP/s')}"
        for dtype, n in written.matmul_flops.items()
    )
    axes = ", ".join(f"{axes} {seconds_text(seconds)}" for axes, seconds in time.by_axis.items() if seconds)
    traffic = f"{bytes_text(written.hbm_bytes)} at {si_text(machine.hbm_bandwidth, 'B/s')}"
    rows = [
        ("compute", time.compute, products or "no matrix products"),
        ("memory", time.memory, traffic),
        ("communication", time.communication, axes or "none"),
    ]
    if time.serial:
        of_peak = [f"{_share(time.compute, one)} of peak FLOP/s" for one in (time.overlapped, time.serial)]
        rows += [
            ("all overlaps", time.overlapped, f"{time.bound} binds, {of_peak[0]}"),
            ("nothing overlaps", time.serial, of_peak[1]),
        ]
    return [(name, seconds_text(seconds), text) for name, seconds, text in rows]


def _share(part: float, whole: float) -> str:
    return "<1%" if 0 < part < 0.005 * whole else f"{part / whole:.0%}"


def _heading(it: Explanation) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in it.mesh.items())
    count = math.prod(it.mesh.values())
    on = f" on {sizes}" if sizes else ""
    devices = f"{count:,} device{'s' * (count != 1)}"
    made = f", compiled for {it.platform}" if it.platform else "" if it.compiled is not None else ", not compiled"
    return f"{it.name or 'program'}{on}: {devices}{made}"


# -------------------- text


def as_text(it: Explanation, width: int | None = None) -> str:
    """For a terminal of `width` columns. Calls stand beside their collectives, or under them if that is shorter."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    return "\n".join(line for line, _ in _text_lines(it, width))


def _text_lines(it: Explanation, width: int) -> list[tuple[str, str]]:
    """Lines, each with what it is: "heading", "title", "loud", "total", "remark", or nothing special."""
    width = max(width, 40)
    found = list(sections(it))
    rows = [row for section in found for row in section.rows]
    shown = [i for i in range(6) if any(row.cells[i] for row in rows)]
    widths = [max([len(HEAD[i]), *(len(row.cells[i]) for row in rows)]) for i in range(6)]
    column = 2 + sum(widths[i] + 2 for i in shown)
    under = _text_body(found, [i for i in shown if i != 5], widths, width, None)
    beside = _text_body(found, shown, widths, width, column) if width - column >= _FLEXIBLE else under
    lines = [(line, "heading") for line in textwrap.wrap(_heading(it), width)]
    if not rows:
        lines += [("", ""), ("no collectives", "")]
    lines += min(beside, under, key=len)
    return [(line.rstrip(), style) for line, style in lines]


def _text_body(
    found: Sequence[Section], shown: Sequence[int], widths: Sequence[int], width: int, column: int | None
) -> list[tuple[str, str]]:
    """The sections with the calls at `column`, or under their collectives."""
    lines = []
    if any(section.rows for section in found):
        head = f"  {_cells(HEAD, shown, widths)}{'' if column is None else '  ' + HEAD[6]}"
        lines += [("", ""), (head[:width], "remark")]
    for section in found:
        title = (section.title.upper(), "loud") if section.loud else (section.title, "title")
        lines += [("", ""), title]
        for row in section.rows:
            lines += _text_row(row, shown, widths, width, column, section.loud)
        lines += [(line, "") for line in _text_facts(section.facts, width)]
        for line in section.lines:
            first, *more = _wrapped(line, width - 2)
            more = _wrapped(line.removeprefix(first).strip(), width - 4) if more else []
            lines += [(f"  {first}", ""), *((f"    {part}", "") for part in more)]
    return lines


def _text_facts(facts: Sequence[tuple[str, str, str]], width: int) -> list[str]:
    names, numbers = (max((len(fact[i]) for fact in facts), default=0) for i in (0, 1))
    lines = []
    for name, number, text in facts:
        first = f"  {name.ljust(names)}  {number.rjust(numbers)}  "
        indent = " " * len(first)
        lines += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent) or [first]
    return lines


def _cells(cells: Sequence[str], shown: Sequence[int], widths: Sequence[int]) -> str:
    return "  ".join(cells[i].rjust(widths[i]) if i in _RIGHT else cells[i].ljust(widths[i]) for i in shown)


def _text_row(
    row: Row, shown: Sequence[int], widths: Sequence[int], width: int, column: int | None, loud: bool
) -> list[tuple[str, str]]:
    first = ("! " if loud and not row.total else "  ") + _cells(row.cells, shown, widths)
    if len(first.rstrip()) > width:
        first = first[: width - 1] + "…"
    call, where = row.cells[6], row.cells[5]
    if column is not None:
        parts = _wrapped(call, width - column) or [""]
        texts = [f"{first.ljust(column)}{parts[0]}", *(" " * column + part for part in parts[1:])]
    else:
        under = "  ".join(text for text in (where, call) if text)
        texts = [first, *(f"      {part}" for part in _wrapped(under, width - 6))]
    lines = [(text, "total" if row.total else "loud" if loud else "") for text in texts]
    indent = " " * (column or 6)
    for remark in row.remarks:
        wrapped = textwrap.wrap(remark, width, initial_indent=indent + "^ ", subsequent_indent=indent + "  ")
        lines += [(text, "remark") for text in wrapped]
    return lines


def _wrapped(call: str, width: int) -> list[str]:
    """A call on lines of `width`, broken between layouts where they are short enough."""
    tied = re.sub('"[^"]*"', lambda string: re.sub("(?<=[^,]) (?!->)", "\u00a0", string[0]), call)
    whole = textwrap.wrap(tied, width, break_on_hyphens=False)
    plain = textwrap.wrap(call, width, break_on_hyphens=False)
    best = whole if len(whole) <= len(plain) and all(len(part) <= width for part in tied.split(" ")) else plain
    return [part.replace("\u00a0", " ") for part in best]


# -------------------- HTML


_STYLE = """
.spmd-explain table {border-collapse: collapse; margin: 0.3em 0; font-size: 90%}
.spmd-explain th, .spmd-explain td {padding: 0.15em 0.7em; border: 0; text-align: left; vertical-align: top}
.spmd-explain .number {text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums}
.spmd-explain .title th {padding-top: 0.8em; border-bottom: 1px solid #8888}
.spmd-explain .total td {border-top: 1px solid #8884; font-weight: bold}
.spmd-explain .loud th, .spmd-explain .loud td {color: #e53935; font-weight: bold}
.spmd-explain .remark {opacity: 0.75; font-style: italic}
.spmd-explain code {white-space: pre-wrap; background: none; color: inherit}
"""


def as_html(it: Explanation) -> str:
    """For a notebook: one table with a part per section."""
    parts = [f'<div class="spmd-explain"><style>{_STYLE}</style><strong>{html.escape(_heading(it))}</strong>']
    found = list(sections(it))
    if any(section.rows for section in found):
        titles = "".join(f"<th{_number(i)}>{name}</th>" for i, name in enumerate(HEAD))
        parts.append(f"<table><thead><tr>{titles}</tr></thead>")
        parts += [_html_rows(section) for section in found if section.rows]
        parts.append("</table>")
    else:
        parts.append("<p>no collectives</p>")
    for section in found:
        if not section.rows:
            parts.append(_html_facts(section))
    return "\n".join([*parts, "</div>"])


def _html_rows(section: Section) -> str:
    loud = ' class="loud"' if section.loud else ""
    lines = [f"<tbody{loud}>", f'<tr class="title"><th colspan="{len(HEAD)}">{html.escape(section.title)}</th></tr>']
    for row in section.rows:
        cells = [f"<td{_number(i)}>{html.escape(text)}</td>" for i, text in enumerate(row.cells[:-1])]
        call = f"<code>{html.escape(row.cells[-1])}</code>" if row.cells[-1] else ""
        remarks = "".join(f'<br><span class="remark">{html.escape(text)}</span>' for text in row.remarks)
        total = ' class="total"' if row.total else ""
        lines.append(f"<tr{total}>{''.join(cells)}<td>{call}{remarks}</td></tr>")
    return "\n".join([*lines, "</tbody>"])


def _html_facts(section: Section) -> str:
    lines = [f'<table><tbody><tr class="title"><th colspan="3">{html.escape(section.title)}</th></tr>']
    for name, number, text in section.facts:
        lines.append(
            f'<tr><td>{html.escape(name)}</td><td class="number">{html.escape(number)}</td>'
            f"<td>{html.escape(text)}</td></tr>"
        )
    lines += [f'<tr><td colspan="3">{html.escape(line)}</td></tr>' for line in section.lines]
    return "\n".join([*lines, "</tbody></table>"])


def _number(column: int) -> str:
    return ' class="number"' if column in _RIGHT else ""


# -------------------- rich


_RICH = {"heading": "bold", "title": "bold cyan", "loud": "bold red", "total": "bold", "remark": "italic"}


class _Rich:
    def __init__(self, it: Explanation) -> None:
        self.it = it

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        for line, style in _text_lines(self.it, options.max_width):
            yield Text(line, style=_RICH.get(style, ""))


def as_rich(it: Explanation) -> Any:
    """For `rich.print`: the text of the console's width, in colours. Nobody else needs rich to be there."""
    return _Rich(it)
