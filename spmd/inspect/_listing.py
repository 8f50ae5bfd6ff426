"""A program as its user wrote it, with the layouts that were inferred beside each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmd._jaxprs.lines import short_file
from spmd._text import Line, Row, Table, html_page, wrapped
from spmd.checker._finding import Finding
from spmd.inspect._reports import Report

_HEAD = ("source", "layouts")  # as HTML and a style sheet know the columns
_INDENT = 2  # spaces before each line; a finding has its mark there


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a line makes.

    Attributes:
      name: What the line calls it: `h`, `state.sum`, or `a, b` where it is not known which is which. A returned value
        does not have a name.
      layouts: How it lies, one text for each way: `("b/dp s f/tp",)`. A line that runs several times may have several.
    """

    name: str
    layouts: tuple[str, ...]

    def __str__(self) -> str:
        return "  ".join(filter(None, (self.name, " | ".join(self.layouts))))


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the program.

    Attributes:
      number: Its number in the file, from 1. Findings without a known line have 0.
      text: Its text. Without the source it is "", and values have the names of primitives.
      values: What it makes.
      findings: What is wrong with it.
    """

    number: int
    text: str
    values: tuple[Value, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """A function of the program.

    Attributes:
      name: Its name.
      file: Its file, as Python knows it.
      lines: Its lines, each of them where the source is known.
    """

    name: str
    file: str
    lines: tuple[SourceLine, ...]

    @property
    def has_source(self) -> bool:
        return any(line.text for line in self.lines)

    @property
    def title(self) -> str:
        """`norms  train.py:12`."""
        place = f"{short_file(self.file)}:{self.lines[0].number}" if self.file else ""
        return "  ".join(filter(None, (self.name, place)))


@dataclass(frozen=True)
class Source(Report):
    """The source of a program with the layout of each value; made by `spmd.check(...).source()`.

    Printing it shows the text. In a notebook it is a table.

    Attributes:
      blocks: The user's functions, in the order in which they run.
      mesh: The sizes of the mesh axes.
    """

    blocks: tuple[SourceBlock, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)

    def text(self, width: int | None = None) -> str:
        """The source, with what was found on lines of `width`, by default the terminal's. Layouts that do not fit
        beside a line of the program stand below it."""
        return self._text(width)

    def _repr_html_(self) -> str:
        return html_page(_heading(self), [_table(block) for block in self.blocks])

    def _lines(self, width: int) -> list[Line]:
        tables = [_table(block, "# ", width).lines() for block in self.blocks]
        return [[(_heading(self), "bold")], *(line for table in tables for line in table)]


def _heading(source: Source) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in source.mesh.items())
    return f"mesh {mesh}" if mesh else "the trace ended before its end" if source.blocks else "no kernel, no shard_map"


def _table(block: SourceBlock, mark: str = "", width: int | None = None) -> Table:
    """The lines of a block; `mark` begins what stands beside or below them."""
    rows = [Row((block.title or "nobody knows where",), "title")]
    texts = [line.text if line.text or block.has_source else f"line {line.number}" for line in block.lines]
    values = [";  ".join(map(str, line.values)) for line in block.lines]
    shown = [(text, value and mark + value) for text, value in zip(texts, values, strict=True)]
    for line, (text, value), beside in zip(block.lines, shown, _beside(shown, width), strict=True):
        start = " " * (len(line.text) - len(line.text.lstrip()))
        if line.number:
            rows.append(Row((text, value if beside else ""), "loud" if line.findings else ""))
        if not beside:
            more = f"{start}    {mark}  "
            rows += [Row((part, "")) for part in wrapped(value, width and width - _INDENT, f"{start}    ", more)]
        for one in line.findings:
            told = wrapped(f"{one.kind}: {one.rule}", width, f"{start}^ ", f"{start}  ")
            rows += [Row((part,), "loud") for part in told]
    return Table(rows, _HEAD if width is None else (), indent=_INDENT)


def _beside(shown: Sequence[tuple[str, str]], width: int | None) -> list[bool]:
    """Return whether layouts stand beside their line: in one column, which is where most of them fit. Others stand
    below."""
    if width is None:
        return [True for _ in shown]
    space = width - _INDENT - len("  ")
    columns = sorted({len(text) for text, value in shown if value})
    ways = [
        [not value or (len(text) <= column and column + len(value) <= space) for text, value in shown]
        for column in [*columns, width]
    ]
    return max(ways, key=sum)
