"""Pictures: grids of cells, as text and as SVG. Boxes that know their sizes are put beside and below each other.

Text in SVG is monospaced, so that widths are known. There are no ids, styles or references, which could clash in a
notebook. A light card lies under the drawing, so that it reads the same on dark and light pages.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Protocol

from spmd._text import Line, plain, rich_lines, shown_width, wrapped
from spmd.errors import SpmdError

# --- a picture as a value: grids of cells. Text and SVG are drawn from it ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of a grid.

    Attributes:
      lines: What stands in it.
      colour: The number of its colour. None: it holds nothing.
      index: The block that it stands for, as a reader names it.
      devices: The devices that hold it; empty in a summary.
      tip: The text that an SVG shows where the mouse points at the cell.
    """

    lines: tuple[str, ...] = ()
    colour: int | None = None
    index: str = ""
    devices: tuple[int, ...] = ()
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells in rows and columns.

    Attributes:
      rows: What stands beside each row.
      columns: What stands above each column.
      cells: The cells, row by row.
      title: What stands above the grid.
      row_label: What the rows are.
      column_label: What the columns are.
      margins: Whether cells reach into their neighbours: to the left, to the right, up, down.
      framed: Whether the cells are the subject, with a frame; else the grid is a list beside it.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    title: str = ""
    row_label: str = ""
    column_label: str = ""
    margins: tuple[bool, bool, bool, bool] = (False, False, False, False)
    framed: bool = True

    def cut(self, most_columns: int, most_rows: int | None = None) -> Iterator[Grid]:
        """The grid in parts of at most so many columns and rows, none much smaller than the others."""
        for run in _even(len(self.rows), most_rows or len(self.rows)):
            for across in _even(len(self.columns), most_columns):
                cells = tuple(row[across] for row in self.cells[run])
                yield replace(self, rows=self.rows[run], columns=self.columns[across], cells=cells)

    @property
    def texts(self) -> list[str]:
        """Everything that must fit into the width of a column."""
        return [*self.columns, *(line for row in self.cells for cell in row for line in cell.lines)]


def _even(count: int, most: int) -> list[slice]:
    parts = max(1, -(-count // max(1, most)))
    size = max(1, -(-count // parts))
    return [slice(at, at + size) for at in range(0, count, size)]


_GAP = "   "  # between grids


# --- grids as text: frames of box characters, and colours where the terminal has them ---------------------------------


def heading(parts: Sequence[str], width: int) -> list[Line]:
    """Return what is drawn, on one line if it fits."""
    whole = "   ".join(filter(None, parts))
    return sentences([whole] if len(whole) <= width else filter(None, parts), width)


def sentences(texts: Iterable[str], width: int, indent: str = "", more: str = "  ") -> list[Line]:
    """Each sentence on as many lines as it takes; `indent` begins the first, and `more` begins the others."""
    return [[(line, "")] for text in texts for line in wrapped(text, max(20, width), indent, more)]


def grid_lines(rows: Sequence[Sequence[Grid]], width: int) -> list[Line]:
    """Grids side by side as far as the width allows, all columns equally wide. What is too wide goes on in parts."""
    grids = [grid for row in rows for grid in row]
    cell = max(len(text) for grid in grids for text in grid.texts)
    heads = [*(grid.row_label for grid in grids), *(grid.framed * " " + head for grid in grids for head in grid.rows)]
    left = max(map(len, heads)) + 1 if any(grid.row_label for grid in grids) else 0
    lines: list[Line] = []
    for row in rows:
        panels = [_text_panel(part, cell, left) for grid in row for part in grid.cut((width - left - 1) // (cell + 3))]
        widest = max(_width(line) for panel in panels for line in panel)
        along = max(1, (width + len(_GAP)) // (widest + len(_GAP)))
        for at in range(0, len(panels), along):
            lines += [[]] if lines else []
            lines += _beside(panels[at : at + along])
    return lines


def _text_panel(grid: Grid, cell: int, left: int) -> list[Line]:
    """One grid, its cells as wide as `cell` and its headers as wide as `left`."""
    bar, place, label = ("│", str.center, str.rjust) if grid.framed else ("", str.rjust, str.ljust)
    start = " " * len(bar) + " "
    lines = [[(grid.title, "")]] if grid.title else []
    if grid.column_label:
        lines.append([(" " * left + start + grid.column_label, "")])
    if any(grid.columns):
        heads = f" {start}".join(place(head, cell) for head in grid.columns)
        lines.append([(grid.row_label.ljust(left) + start + heads, "")])
    for number, (head, cells) in enumerate(zip(grid.rows, grid.cells, strict=True)):
        lines += [_rule(grid, cell, left, "├┼┤" if number else "┌┬┐")] if grid.framed else []
        for at in range(max(1, *(len(one.lines) for one in cells))):
            line: Line = [(label("" if at else head, max(0, left - 1)) + " " * (left > 0), "")]
            for one in cells:
                text = place(one.lines[at] if at < len(one.lines) else "", cell)
                line += [(bar, ""), (f" {text} ", "" if one.colour is None else f"{INK} on {FILLS[one.colour]}")]
            lines.append([*line, (bar, "")])
    return [*lines, _rule(grid, cell, left, "└┴┘")] if grid.framed else lines


def _rule(grid: Grid, cell: int, left: int, corners: str) -> Line:
    first, cross, last = corners
    return [(" " * left + first + cross.join(["─" * (cell + 2)] * len(grid.columns)) + last, "")]


def _beside(panels: Sequence[list[Line]]) -> list[Line]:
    widths = [max(map(_width, panel)) for panel in panels]
    found: list[Line] = []
    for at in range(max(map(len, panels))):
        line: Line = []
        for panel, width in zip(panels, widths, strict=True):
            part = panel[at] if at < len(panel) else []
            line += [*part, (" " * (width - _width(part)) + _GAP, "")]
        found.append(line)
    return found


def _width(line: Line) -> int:
    return sum(len(text) for text, _ in line)


# --- a picture: text where it is printed, colours in a terminal, SVG in a notebook and in a file ----------------------


class Drawing(Protocol):
    """What a picture is drawn from."""

    @property
    def title(self) -> str: ...
    def lines(self, width: int) -> list[Line]: ...
    def svg(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...


class Picture:
    """A picture of which device holds what: text where it is printed, SVG where a notebook shows it.

    `print(picture)` gives plain text, complete without colour; `rich.print(picture)` colours the blocks.

    Example:
      >>> import spmd
      >>> picture = spmd.visualize("b/dp d", (8, 4), {"dp": 2})
      >>> picture.to_dict()["devices"][1]["coordinates"]
      {'dp': 1}
      >>> picture.svg[:4]
      '<svg'
    """

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing

    def text(self, width: int | None = None) -> str:
        """The picture as text, no wider than the terminal if possible.

        Args:
          width: Columns; by default those of the terminal.
        """
        return plain(self._drawing.lines(shown_width(width)))

    @property
    def svg(self) -> str:
        """The picture as an SVG document, readable on dark and on light pages."""
        return self._drawing.svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
          path: The name of the file. It ends with `.svg`, `.html` or `.txt`.

        Raises:
          SpmdError: If the file has another ending.
        """
        name = os.fspath(path)
        page = '<!doctype html><meta charset="utf-8"><title>spmd</title>'
        written = {".svg": lambda: self.svg, ".html": lambda: page + self._repr_html_(), ".txt": self.text}
        make = written.get(os.path.splitext(name)[1].lower())
        if make is None:
            rule = "A picture is saved as .svg, .html or .txt."
            raise SpmdError(rule, call=f'.save("{os.path.basename(name)}")', advice='.save("picture.svg")')
        with open(name, "w", encoding="utf-8") as file:
            file.write(make() + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: each device with its coordinates on the mesh and what it holds."""
        return self._drawing.to_dict()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg}</div>'

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from rich_lines(self._drawing.lines(options.max_width))


# One colour for each device that is drawn. The first eight are tints of Okabe and Ito's colours, which colour-blind
# readers can tell apart (https://jfly.uni-koeln.de/color/). Each further one lies as far as possible, in OKLab, from
# all before it, among those on which dark text reads, and looks different to colour-blind readers too from those
# beside it in rows of 8 and 16.
# fmt: off
FILLS = (
    "#f5cf80", "#abdaf4", "#80cfb9", "#f8f2a1", "#80b9d9", "#eaaf80", "#e6bcd3", "#b0b0b0",
    "#80ffd1", "#c29efa", "#ffe6ff", "#a8b85c", "#fa8fa8", "#b8e685", "#ccf5e6", "#f5adff",
    "#5cc285", "#c7d6b8", "#b2bdfa", "#5cf5ff", "#ffd6c2", "#d19ec7", "#85d68a", "#d1c75c",
    "#5cd6f0", "#c2ffa8", "#85adff", "#bdbd8f", "#5cbdb8", "#ffc7fa", "#94e6b8", "#ff947a",
    "#ffa3d1", "#db9e99", "#e0d6eb", "#ffada8", "#d1a85c", "#b2c7cc", "#8fb894", "#d1ebb2",
    "#d6bdad", "#e699e6", "#faf0d1", "#80c7ff", "#adadd6", "#fac29e", "#d6c7ff", "#e6e070",
    "#99ffff", "#85e0db", "#b8d18f", "#ffb861", "#5cf0d6", "#d1adeb", "#c2ebff", "#5ce0b2",
    "#b8ffd1", "#dbc794", "#b2e6db", "#c7a88a", "#5cb8f5", "#f5e0a8", "#ccb2c7", "#f0995c",
)
# fmt: on
_SHADES = ("#8a5f00", "#1f6d9c", "#00694d", "#8a8000", "#004c77", "#8e3f00", "#8f4a6d", "#595959")
EDGES = (*_SHADES, *(f"#{int(fill[1:], 16) >> 1 & 0x7F7F7F:06x}" for fill in FILLS[len(_SHADES) :]))  # half as light
INK, FAINT, CARD, RIM = "#1f2328", "#57606a", "#ffffff", "#c8ccd1"

WIDTH = 900  # of a drawing, where its parts can be wrapped
_LINE, _CHAR, _SIZE = 17.0, 7.25, 12
_MOST_ROWS = 16  # of a grid, before it goes on beside it
_HALO = 9.0  # how far a margin is drawn into the neighbours, whatever its size
_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


@dataclass(frozen=True, slots=True)
class Box:
    """A piece of SVG that fills a rectangle from (0, 0)."""

    width: float
    height: float
    body: str


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """An element; underscores in attributes are hyphens, numbers are written short."""
    parts = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{parts}>{content}</{name}>" if content else f"<{name}{parts}/>"


def _value(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escaped(str(value)).replace('"', "&quot;")


def escaped(words: str) -> str:
    return escape(words, quote=False)


def text_width(words: str) -> float:
    return len(words) * _CHAR


def text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, weight: str | None = None) -> str:
    """A line of text whose middle is at height `y`. Without words, nothing."""
    if not words:
        return ""
    more = {} if weight is None else {"font_weight": weight}
    return element("text", escaped(words), x=x, y=y + 4, text_anchor=anchor, fill=fill, **more)


def paragraph(words: str, *, fill: str = INK, weight: str | None = None) -> Box:
    """Lines of text, wrapped."""
    lines = textwrap.wrap(words, int(WIDTH / _CHAR), break_on_hyphens=False) or [""]
    body = "".join(text(0, _LINE * (n + 0.5), line, fill=fill, weight=weight) for n, line in enumerate(lines))
    return Box(max(map(text_width, lines)), _LINE * len(lines), body)


def caption(title: str, about: Sequence[str]) -> Box:
    """A title with sentences below it in smaller print. Without a title, only the sentences."""
    head = [paragraph(title, weight="bold")] if title else []
    return below([*head, *(paragraph(words, fill=FAINT) for words in about if words)], 1)


def translated(box: Box, x: float, y: float) -> str:
    return element("g", box.body, transform=f"translate({_value(x)} {_value(y)})") if x or y else box.body


def beside(boxes: Sequence[Box], gap: float = 28) -> Box:
    """Boxes from left to right, their tops level."""
    bodies, x = [], 0.0
    for box in boxes:
        bodies.append(translated(box, x, 0))
        x += box.width + gap
    return Box(max(0.0, x - gap), max((box.height for box in boxes), default=0.0), "".join(bodies))


def below(boxes: Sequence[Box], gap: float = 14) -> Box:
    """Boxes from top to bottom."""
    bodies, y = [], 0.0
    for box in boxes:
        bodies.append(translated(box, 0, y))
        y += box.height + gap
    return Box(max((box.width for box in boxes), default=0.0), max(0.0, y - gap), "".join(bodies))


def flow(boxes: Sequence[Box]) -> Box:
    """Boxes side by side, on as many rows as the width asks for."""
    rows: list[list[Box]] = []
    for box in boxes:
        if rows and beside([*rows[-1], box]).width <= WIDTH:
            rows[-1].append(box)
        else:
            rows.append([box])
    return below([beside(row) for row in rows])


def card(box: Box, title: str) -> str:
    """A whole SVG document: the box on a light card."""
    edge = 16
    width, height = box.width + 2 * edge, box.height + 2 * edge
    ground = element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=8, fill=CARD, stroke=RIM)
    content = element("title", escaped(title)) + ground + translated(box, edge, edge)
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width,
        height=height,
        font_family=_FONT,
        font_size=_SIZE,
    )


# --- grids ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measures:
    """What all grids of a picture share: the width of the headers at the left, and the size of a cell."""

    left: float
    width: float
    height: float
    halo: float

    @classmethod
    def of(cls, grids: Sequence[Grid]) -> _Measures:
        framed = any(grid.framed for grid in grids)
        least_width, least_height, air = (46.0, 32.0, 16) if framed else (34.0, 24.0, 12)
        halo = _HALO if any(any(grid.margins) for grid in grids) else 0.0
        lines = max(len(cell.lines) for grid in grids for row in grid.cells for cell in row)
        heads = [text for grid in grids for text in (grid.row_label, *grid.rows)]
        left = text_width(max(heads, key=len))
        return cls(
            left=(left + 10 if left else 0.0) + halo,
            width=max(least_width, text_width(max((text for grid in grids for text in grid.texts), key=len)) + air)
            + 2 * halo,
            height=max(least_height, _LINE * lines + least_height - 20) + 2 * halo,
            halo=halo,
        )


def grid_box(rows: Sequence[Sequence[Grid]]) -> Box:
    """Grids side by side as far as the page allows, all cells equally large. What is too large goes on in parts."""
    size = _Measures.of([grid for row in rows for grid in row])
    most = int((WIDTH - size.left) / size.width)
    return below(
        [flow([_panel(part, size) for grid in row for part in grid.cut(most, _MOST_ROWS)]) for row in rows], 18
    )


def _panel(grid: Grid, size: _Measures) -> Box:
    """One grid with its title and headers."""
    ink = INK if grid.framed else FAINT
    words, y = [], 0.0
    ends = [size.left + size.width * len(grid.columns) + size.halo]
    if grid.title:
        words.append(text(0, _LINE / 2, grid.title, weight="bold"))
        ends.append(text_width(grid.title) * 1.02)
        y += _LINE + 3
    if grid.column_label:
        words.append(text(size.left, y + _LINE / 2, grid.column_label, fill=FAINT))
        ends.append(size.left + text_width(grid.column_label))
        y += _LINE
    if any(grid.columns):
        words.append(text(0, y + _LINE / 2, grid.row_label, fill=FAINT))
        for at, head in enumerate(grid.columns):
            words.append(text(size.left + size.width * (at + 0.5), y + _LINE / 2, head, anchor="middle", fill=ink))
        y += _LINE + 4
    shapes, halos, y = [], [], y + size.halo
    for head, row in zip(grid.rows, grid.cells, strict=True):
        words.append(text(size.left - size.halo - 8, y + size.height / 2, head, anchor="end", fill=ink))
        for at, cell in enumerate(row):
            place = _Place(size.left + size.width * at, y, size.width, size.height)
            shapes.append(_cell(cell, place, grid.framed))
            halos.append(_margin(cell, place, grid.margins))
            words += _centred(cell.lines, place)
        y += size.height
    return Box(max(ends), y + size.halo, "".join([*shapes, *halos, *words]))


@dataclass(frozen=True, slots=True)
class _Place:
    """The rectangle of a cell."""

    x: float
    y: float
    width: float
    height: float


def _cell(cell: Cell, place: _Place, framed: bool) -> str:
    if cell.colour is None:
        return ""
    fill, devices = FILLS[cell.colour], " ".join(map(str, cell.devices))
    if not framed:
        return _rect(place, fill=fill, stroke=CARD, **({"data_device": devices} if devices else {}))
    rect = _rect(place, fill=fill, stroke=EDGES[cell.colour])
    shown = {"data_devices": devices} if devices else {}
    return element("g", element("title", escaped(cell.tip)) + rect, data_index=cell.index, **shown)


def _margin(cell: Cell, place: _Place, margins: Sequence[bool]) -> str:
    """Return what a cell holds of its neighbours, as a dashed rectangle over them."""
    if cell.colour is None or not any(margins):
        return ""
    left, right, up, down = (_HALO * wide for wide in margins)
    wide = _Place(place.x - left, place.y - up, place.width + left + right, place.height + up + down)
    look = {"fill": FILLS[cell.colour], "stroke": EDGES[cell.colour], "stroke_dasharray": "4 3"}
    return _rect(wide, fill_opacity=0.35, data_margin="yes", **look)


def _rect(place: _Place, **attributes: str | float) -> str:
    return element("rect", "", x=place.x, y=place.y, width=place.width, height=place.height, **attributes)


def _centred(lines: Sequence[str], place: _Place) -> list[str]:
    x, first = place.x + place.width / 2, place.y + place.height / 2 - _LINE * (len(lines) - 1) / 2
    return [text(x, first + _LINE * n, line, anchor="middle") for n, line in enumerate(lines)]
