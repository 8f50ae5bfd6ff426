"""Text for people: tables and sentences, plain, in colours with `rich`, and as HTML."""

from __future__ import annotations

import dataclasses
import html
import linecache
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Line = list[tuple[str, str]]
"""Pieces of text, each with its style for `rich`: "bold red", or "" for none."""

STYLES = {"title": "bold cyan", "loud": "bold red", "total": "bold", "remark": "italic"}
_ROOM = 28  # columns that the last cell needs beside the others, unless it is shorter


def shown_width(width: int | None) -> int:
    """The width of a report: what is asked for, or that of the terminal."""
    return width or shutil.get_terminal_size((100, 24)).columns


def plain(lines: Iterable[Line]) -> str:
    """The lines without their styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def rich_lines(lines: Iterable[Line]) -> Iterator[Any]:
    """The lines as `rich` prints them. Nothing else needs `rich` to be installed."""
    from rich.text import Text

    for line in lines:
        yield Text.assemble(*line, no_wrap=True, overflow="ignore")


def wrapped(text: str, width: int | None, first: str = "", more: str = "  ") -> list[str]:
    """A text on lines of `width`. `first` begins the first line, and `more` begins the others.

    A string in it is broken between its layouts, if that takes no more lines.
    """
    if width is None or len(first) + len(text) <= width:
        return [(first + text).rstrip()]
    room = max(width, len(first) + 8, len(more) + 8)

    def broken(words: str) -> list[str]:
        return textwrap.wrap(words, room, initial_indent=first, subsequent_indent=more, break_on_hyphens=False)

    tied = re.sub('"[^"]*"', lambda string: re.sub("(?<=[^,]) (?!->)", "\u00a0", string[0]), text)
    whole, words = broken(tied), broken(text)
    fits = max(map(len, tied.split(" "))) <= room - max(len(first), len(more))
    return [line.replace("\u00a0", " ") for line in (whole if fits and len(whole) <= len(words) else words)]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
      cells: A text for each column. A single one spans all columns.
      style: What the row is, one or two words of `STYLES`: "title", "total", "loud", "loud title"; "" for a plain one.
      remarks: Sentences under it.
    """

    cells: tuple[str, ...]
    style: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def spans(self) -> bool:
        return len(self.cells) == 1

    @property
    def colour(self) -> str:
        return STYLES.get(self.style.partition(" ")[0], "")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts in aligned columns. Columns in which every row is empty are left out. A text with nothing beside it
    may be wider than its column.

    Attributes:
      rows: The rows; a tuple of texts is a plain one.
      head: What stands above the columns, if anything.
      right: The columns that are aligned to the right.
      below: Where the width does not hold all columns, these stand below their row.
      indent: Spaces before each row. A loud row has its mark there.

    >>> print(Table([("a", "10"), ("long", "2")], right=(1,)).text())
    a     10
    long   2
    """

    rows: Sequence[Row | tuple[str, ...]]
    head: tuple[str, ...] = ()
    right: tuple[int, ...] = ()
    below: tuple[int, ...] = ()
    indent: int = 0

    def text(self, width: int | None = None) -> str:
        """The table as text, on lines of `width` if there is one."""
        return plain(self.lines(width))

    def lines(self, width: int | None = None) -> list[Line]:
        """The table as lines: whole rows if the last column has room, or if that is shorter, some columns below."""
        beside = _Columns(self, ())
        if not self.below or width is None:
            return beside.lines(width)
        below = _Columns(self, self.below).lines(width)
        return min(beside.lines(width), below, key=len) if beside.has_room(width) else below

    def html(self) -> str:
        """The table as an HTML element. A cell has the name of its column as its class, or `number`."""
        names = ["number" if i in self.right else name for i, name in enumerate(self.head)]
        count = max([len(self.head), *(len(row.cells) for row in self.all_rows)])
        names += ["number" if i in self.right else "" for i in range(len(names), count)]
        used = [i for i in range(count) if any(row.cells[i:] and row.cells[i] for row in self.full)]
        parts = ["<table>"]
        if self.head and self.full:
            heads = [_element("th", names[i], self.head[i]) for i in used]
            parts.append(f"<thead><tr>{''.join(heads)}</tr></thead>")
        for row in self.all_rows:
            cells = [_element("td", names[i], row.cells[i]) for i in used if row.cells[i:]]
            if row.spans:
                tag = "th" if "title" in row.style else "td"
                cells = [f'<{tag} colspan="{max(len(used), 1)}">{html.escape(row.cells[0])}</{tag}>']
            remarks = "".join(f'<br><span class="remark">{html.escape(text)}</span>' for text in row.remarks)
            cells[-1] = cells[-1].removesuffix("</td>") + remarks + "</td>" if remarks else cells[-1]
            parts.append(f"<tr{_class(row.style)}>{''.join(cells)}</tr>")
        return "\n".join([*parts, "</table>"])

    @property
    def all_rows(self) -> list[Row]:
        return [row if isinstance(row, Row) else Row(row) for row in self.rows]

    @property
    def full(self) -> list[Row]:
        """The rows that do not span the columns."""
        return [row for row in self.all_rows if not row.spans]


def html_page(heading: str, tables: Iterable[Table], empty: str = "") -> str:
    """Tables under a heading, as a notebook shows them; `empty` is a sentence in place of a table."""
    parts = [f'<div class="spmd-table"><style>{_CSS}</style><strong>{html.escape(heading)}</strong>']
    parts += [f"<p>{html.escape(empty)}</p>"] if empty else []
    return "\n".join([*parts, *(table.html() for table in tables), "</div>"])


# JupyterLab and nbconvert align all cells to the right, where carets stand under other words than they are meant for.
_CSS = """
.spmd-table table {border-collapse: collapse; margin: 0.3em 0; font-size: 90%}
.spmd-table th, .spmd-table td {padding: 0.15em 0.7em; border: 0}
.spmd-table th, .spmd-table td {text-align: left !important; vertical-align: top !important}
.spmd-table .number {text-align: right !important; white-space: nowrap; font-variant-numeric: tabular-nums}
.spmd-table .title th {padding-top: 0.8em; border-bottom: 1px solid #8888}
.spmd-table .total td {border-top: 1px solid #8884; font-weight: bold}
.spmd-table .loud th, .spmd-table .loud td {color: #e53935; font-weight: bold}
.spmd-table .remark {opacity: 0.75; font-style: italic}
.spmd-table :is(.call, .source, .message):is(td) {white-space: pre-wrap; font-family: ui-monospace, monospace}
"""


def _element(tag: str, name: str, text: str) -> str:
    return f"<{tag}{_class(name)}>{html.escape(text)}</{tag}>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


class _Columns:
    """A table with the columns `below` under their rows: which stand beside each other, and how wide they are."""

    def __init__(self, table: Table, below: Sequence[int]) -> None:
        self.table, self.below = table, below
        rows = [row.cells for row in table.full]
        columns = range(len(rows[0]) if rows else 0)
        self.kept = [i for i in columns if i not in below and any(row[i] for row in rows)]
        rows += [table.head] if table.head else []
        self.widths = {i: max(len(row[i]) for row in rows if self._needs(row, i)) for i in self.kept}
        self.last = table.indent + sum(self.widths[i] + 2 for i in self.kept[:-1])  # where the last column begins

    def _needs(self, row: Sequence[str], column: int) -> bool:
        """Return whether a text must stand inside of its column, because something stands beside it."""
        return column == self.kept[-1] or column in self.table.right or any(row[i] for i in self.kept if i > column)

    def has_room(self, width: int) -> bool:
        """Return whether the last column can stand beside the others."""
        return not self.kept or width - self.last >= min(_ROOM, self.widths[self.kept[-1]])

    def lines(self, width: int | None) -> list[Line]:
        indent = " " * self.table.indent
        found: list[Line] = []
        if self.table.head and self.kept:
            found += [[(line, STYLES["remark"])] for line in self._aligned(self.table.head, indent, width)]
        for row in self.table.all_rows:
            if "title" in row.style:
                texts = ["", *row.cells]
            elif row.spans:
                texts = wrapped(row.cells[0], width, indent, f"{indent}  ")
            else:
                texts = self._aligned(row.cells, "! " if "loud" in row.style else indent, width)
                if under := "  ".join(row.cells[i] for i in self.below if row.cells[i]):
                    texts += wrapped(under, width, f"{indent}    ", f"{indent}    ")
            found += [[(text, row.colour)] for text in texts]
            start = f"{indent}    " if self.below else " " * self.last
            for remark in row.remarks:
                found += [[(text, STYLES["remark"])] for text in wrapped(remark, width, f"{start}^ ", f"{start}  ")]
        return found

    def _aligned(self, cells: Sequence[str], start: str, width: int | None) -> list[str]:
        """A row; what is too long is wrapped in the last column, or if that has no room, over the whole width."""
        right, widths = self.table.right, self.widths
        *texts, last = (cells[i].rjust(widths[i]) if i in right else cells[i].ljust(widths[i]) for i in self.kept)
        first = start + "".join(f"{text}  " for text in texts)
        if width is None or self.has_room(width):
            return wrapped(last.rstrip(), width, first, " " * len(first))
        return wrapped(f"{first}{last}".rstrip(), width, "", f"{start}    ")


# --- what reports have in common: they print as lines, and are plain values for JSON ----------------------------------


class Report:
    """A value that prints as lines."""

    def _lines(self, width: int) -> list[Line]:
        raise NotImplementedError

    def _text(self, width: int | None = None) -> str:
        """The lines as text, by default as wide as the terminal."""
        return plain(self._lines(shown_width(width)))

    def __str__(self) -> str:
        return self._text()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from rich_lines(self._lines(options.max_width))


def fields_of(value: Any, *names: str) -> dict[str, Any]:
    """Attributes as plain values, for JSON; of a dataclass those that it shows, unless some are named."""
    shown = names or [one.name for one in dataclasses.fields(value) if one.repr]
    return {name: plain_value(getattr(value, name)) for name in shown}


def plain_value(value: Any) -> Any:
    """A value as JSON has it: a mapping, a list, or what it says itself by `to_dict`."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    if isinstance(value, Mapping):
        return {name: plain_value(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain_value(one) for one in value]
    return value


# --- units -------------------------------------------------------------------------------------------------------

# Quantities for people, and the bytes that a collective sends.


def bytes_text(count: int) -> str:
    """A number of bytes.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**20)
    ('512 B', '1.5 KiB', '3 MiB')
    """
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            return f"{amount:.4g} {unit}"
    raise AssertionError("unreachable: the last unit returns")


def seconds_text(seconds: float) -> str:
    """A duration for people.

    >>> [seconds_text(s) for s in (0, 3.2e-7, 0.00123, 0.5, 75.0)]
    ['0 s', '320 ns', '1.23 ms', '500 ms', '75 s']
    """
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if seconds >= 0.9995 * scale or unit == "ns":
            amount = seconds / scale
            return f"{amount:,.0f} {unit}" if amount >= 1000 else f"{amount:.3g} {unit}"
    raise AssertionError("unreachable: the last unit returns")


def si_text(amount: float, unit: str) -> str:
    """An amount with a decimal prefix.

    >>> si_text(9.894e14, "FLOP/s"), si_text(80e9, "B"), si_text(12, "B")
    ('989 TFLOP/s', '80 GB', '12 B')
    """
    for scale, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if amount >= scale:
            return f"{amount / scale:.3g} {letter}{unit}"
    return f"{amount:.3g} {unit}"


def sent_bytes(kind: str, operand: int, devices: int) -> int:
    """Bytes that a device sends in one collective whose operands on it have `operand` bytes.

    The larger side of an all_gather is its result, `devices` times the operand.

    >>> [sent_bytes(kind, 64, 4) for kind in ("all_gather", "psum_scatter", "psum", "all_to_all", "ppermute")]
    [192, 48, 96, 48, 64]
    """
    share = Fraction(devices - 1, devices)
    exact = {
        "all_gather": operand * devices * share,
        "psum": 2 * operand * share,
        "ppermute": Fraction(operand),
        "pbroadcast": Fraction(operand),
    }.get(kind, operand * share)
    return round(exact)


# --- notebook ----------------------------------------------------------------------------------------------------

# The names of a notebook's cells. The file name of a cell is a number that its author has never seen.

_HASHED = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")  # Jupyter: a hash of the cell's text
_NUMBERED = re.compile(r"<ipython-input-(\d+)-")  # the IPython shell


def shown_file(name: str) -> str:
    """`In[3]` for the file name of a notebook's cell, other names as they are.

    IPython keeps the text of each cell under its file name in `linecache`, and what it ran in `In`, by number. Of cells
    with the same text, the last one that ran is meant.
    """
    numbered = _NUMBERED.match(name)
    if numbered:
        return f"In[{numbered.group(1)}]"
    if not _HASHED.search(name):
        return name
    text = "".join(linecache.getlines(name)).strip()
    ran = getattr(sys.modules.get("__main__"), "In", None)
    found = [i for i, cell in enumerate(ran) if str(cell).strip() == text] if isinstance(ran, list) and text else []
    return f"In[{found[-1]}]" if found else "a cell"
