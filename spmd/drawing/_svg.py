"""Grids as SVG: boxes, pieces of drawing that know their sizes, are put beside and below each other.

Text is monospaced, so that widths are known. There are no ids, styles or references, which could clash in a notebook. A
light card lies under the drawing, so that it reads the same on dark and light pages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from spmd.drawing._grid import Cell, Grid

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


def moved(box: Box, x: float, y: float) -> str:
    return element("g", box.body, transform=f"translate({_value(x)} {_value(y)})") if x or y else box.body


def beside(boxes: Sequence[Box], gap: float = 28) -> Box:
    """Boxes from left to right, their tops level."""
    bodies, x = [], 0.0
    for box in boxes:
        bodies.append(moved(box, x, 0))
        x += box.width + gap
    return Box(max(0.0, x - gap), max((box.height for box in boxes), default=0.0), "".join(bodies))


def below(boxes: Sequence[Box], gap: float = 14) -> Box:
    """Boxes from top to bottom."""
    bodies, y = [], 0.0
    for box in boxes:
        bodies.append(moved(box, 0, y))
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
    content = element("title", escaped(title)) + ground + moved(box, edge, edge)
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
    """What a cell holds of its neighbours, as a dashed rectangle over them."""
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
