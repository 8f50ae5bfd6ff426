"""Pictures as SVG: the same grids as in the text, a colour per block, margins as dashed overlaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from spmd.inspect import _svg
from spmd.inspect._arrange import (
    Arrangement,
    Panel,
    arrange,
    cell_parts,
    even,
    facts,
    is_summary,
    mesh_rows,
    panel_rows,
    panel_title,
    tints,
    wrapped,
)
from spmd.inspect._blocks import Block, Holdings
from spmd.inspect._svg import Box, text

__all__ = ["grid_box", "holdings_svg"]

_CELL = 24  # characters before a list of devices is wrapped
_MOST_ROWS = 16  # of a grid, before it is continued beside it
_LINE = 17.0
_HALO = 9.0  # how far a margin is drawn into the neighbours, whatever its size


def holdings_svg(holdings: Holdings) -> str:
    """The whole picture as a document."""
    colours = tints(holdings)
    head = [_svg.paragraph(holdings.title, weight="bold")]
    about = "; ".join(part for part in (holdings.kind, holdings.mesh_text if holdings.mesh else "") if part)
    head += [_svg.paragraph(about, fill=_svg.FAINT)] if about else []
    boxes = [grid_box(holdings, colours)]
    if holdings.mesh and not is_summary(holdings):
        boxes.append(_mesh_box(holdings, colours))
    notes = [_svg.paragraph(fact, fill=_svg.FAINT) for fact in facts(holdings, arrange(holdings))]
    whole = _svg.below([_svg.below(head, 2), _svg.flow(boxes), *([_svg.below(notes, 1)] if notes else [])], 16)
    return _svg.card(whole, f"{holdings.title}: which device holds what")


def grid_box(holdings: Holdings, colours: Mapping[int, int]) -> Box:
    """The panels of a picture."""
    grid = _Grid(holdings, arrange(holdings), colours)
    rows = panel_rows(holdings, grid.arrangement, grid.most_columns, _MOST_ROWS)
    return _svg.below([_svg.flow([grid.panel(panel) for panel in row]) for row in rows], 18)


@dataclass(frozen=True, slots=True)
class _Place:
    """A cell's rectangle."""

    x: float
    y: float
    width: float
    height: float


class _Grid:
    """The measures of one picture's cells, all equally large."""

    def __init__(self, holdings: Holdings, arrangement: Arrangement, colours: Mapping[int, int]) -> None:
        self.holdings, self.arrangement, self.colours = holdings, arrangement, colours
        short = is_summary(holdings)
        self._texts = {
            block: wrapped(cell_parts(copies, short=short), _CELL) for block, copies in holdings.cells.items()
        }
        lines = [line for found in self._texts.values() for line in found]
        widest = max(map(len, [*lines, *self._headers(arrangement.column)]))
        rows = [self._label(arrangement.row), *self._headers(arrangement.row)]
        self._halo = _HALO if any(any(side.margin) for side in holdings.sides) else 0.0
        self._width = max(46.0, _svg.text_width("x" * widest) + 16 + 2 * self._halo)
        self._height = max(32.0, _LINE * max(map(len, self._texts.values())) + 12) + 2 * self._halo
        self._left = (_svg.text_width(max(rows, key=len)) + 10 if arrangement.row is not None else 0.0) + self._halo
        self.most_columns = max(1, int((_svg.WIDTH - self._left) / self._width))

    def panel(self, panel: Panel) -> Box:
        """One grid with its title and headers."""
        title = panel_title(self.holdings, panel)
        parts, y = [], 0.0
        widths = [self._left + self._width * len(panel.columns) + self._halo]
        if title:
            parts.append(text(0, _LINE / 2, title, weight="bold"))
            widths.append(_svg.text_width(title) * 1.02)
            y += _LINE + 3
        if self.arrangement.column is not None:
            label = self._label(self.arrangement.column)
            parts.append(text(self._left, y + _LINE / 2, label, fill=_svg.FAINT))
            parts.append(text(0, y + _LINE * 1.5, self._label(self.arrangement.row), fill=_svg.FAINT))
            widths.append(self._left + _svg.text_width(label))
            for at, number in enumerate(panel.columns):
                middle = self._left + self._width * (at + 0.5)
                header = self._header(self.arrangement.column, number)
                parts.append(text(middle, y + _LINE * 1.5, header, anchor="middle"))
            y += 2 * _LINE + 4
        y += self._halo
        parts += self._cells(panel, y)
        return Box(max(widths), y + self._height * len(panel.rows) + self._halo, "".join(parts))

    def _cells(self, panel: Panel, top: float) -> list[str]:
        parts, halos, words = [], [], []
        for i, row in enumerate(panel.rows):
            y = top + self._height * i
            if self.arrangement.row is not None:
                header = self._header(self.arrangement.row, row)
                words.append(text(self._left - self._halo - 8, y + self._height / 2, header, anchor="end"))
            for j, column in enumerate(panel.columns):
                place = _Place(self._left + self._width * j, y, self._width, self._height)
                if row is None or column is None:
                    words.append(text(place.x + place.width / 2, y + place.height / 2, "...", anchor="middle"))
                    continue
                block = panel.block(self.holdings, self.arrangement, row, column)
                if block in self._texts:
                    parts.append(self._cell(place, block))
                    halos.append(self._margins(place, block))
                    words += _centred(place, self._texts[block])
        return [*parts, *halos, *words]

    def _cell(self, place: _Place, block: Block) -> str:
        copies = self.holdings.cells[block]
        colour = self.colours[copies[0][0]]
        sides = zip(self.holdings.sides, block, strict=True)
        index = "; ".join(f"{side.label} {side.text(number)}" for side, number in sides)
        devices = [device for copy in copies for device in copy]
        tip = [f"holds {index or 'the scalar'}"]
        if not is_summary(self.holdings):
            tip += [self._who(device) for device in devices]
        rect = _rect(place, fill=_svg.FILLS[colour], stroke=_svg.EDGES[colour])
        shown = {} if is_summary(self.holdings) else {"data_devices": " ".join(map(str, devices))}
        return _svg.element("g", _svg.element("title", escape("\n".join(tip))) + rect, data_index=index, **shown)

    def _who(self, device: int) -> str:
        at = self.holdings.coordinates[self.holdings.devices.index(device)]
        place = " ".join(f"{axis}={n}" for (axis, _), n in zip(self.holdings.mesh, at, strict=False))
        return f"device {device}" + (f": {place}" if place else "")

    def _margins(self, place: _Place, block: Block) -> str:
        """What a block holds of its neighbours, as a dashed rectangle over them."""
        grow = []
        for at in (self.arrangement.column, self.arrangement.row):
            low, high = (0, 0) if at is None else self.holdings.sides[at].margin
            grow.append((_HALO if low else 0.0, _HALO if high else 0.0))
        (left, right), (up, down) = grow
        if not any((left, right, up, down)):
            return ""
        colour = self.colours[self.holdings.cells[block][0][0]]
        wide = _Place(place.x - left, place.y - up, place.width + left + right, place.height + up + down)
        look = {"fill": _svg.FILLS[colour], "stroke": _svg.EDGES[colour], "stroke_dasharray": "4 3"}
        return _rect(wide, fill_opacity=0.35, data_margin="yes", **look)

    def _label(self, place: int | None) -> str:
        return "" if place is None else self.holdings.sides[place].label

    def _header(self, place: int, number: int | None) -> str:
        return "..." if number is None else self.holdings.sides[place].text(number)

    def _headers(self, place: int | None) -> list[str]:
        if place is None:
            return [""]
        return [self._header(place, number) for number in range(len(self.holdings.sides[place].blocks))]


def _rect(place: _Place, **attributes: str | float) -> str:
    return _svg.element("rect", "", x=place.x, y=place.y, width=place.width, height=place.height, **attributes)


def _centred(place: _Place, lines: Sequence[str]) -> list[str]:
    first = place.y + place.height / 2 - _LINE * (len(lines) - 1) / 2
    return [text(place.x + place.width / 2, first + _LINE * n, line, anchor="middle") for n, line in enumerate(lines)]


def _mesh_box(holdings: Holdings, colours: Mapping[int, int]) -> Box:
    """Which device is where on the mesh, in the colour of its block."""
    axis, size = holdings.mesh[-1]
    rows = mesh_rows(holdings)
    width = max(34.0, _svg.text_width(f"{axis}={size - 1}") + 12, _svg.text_width(str(max(holdings.devices))) + 12)
    height, left = 24.0, max(_svg.text_width(label) for label, _ in rows) + 8
    most = max(1, int((_svg.WIDTH - left) / width))
    boxes = []
    for columns in even(range(size), most):
        at = columns[0]
        parts = [
            text(left + width * (n - at + 0.5), _LINE / 2, f"{axis}={n}", anchor="middle", fill=_svg.FAINT)
            for n in columns
        ]
        for row, (label, devices) in enumerate(rows):
            y = _LINE + 3 + height * row
            parts.append(text(left - 8, y + height / 2, label, anchor="end", fill=_svg.FAINT))
            for n, device in enumerate(devices[at : at + len(columns)]):
                place = _Place(left + width * n, y, width, height)
                colour = colours[holdings.cells[holdings.block_of[device]][0][0]]
                rect = _rect(place, fill=_svg.FILLS[colour], stroke=_svg.CARD, data_device=device)
                parts += [rect, *_centred(place, [str(device)])]
        boxes.append(Box(left + width * len(columns), _LINE + 3 + height * len(rows), "".join(parts)))
    return _svg.below([_svg.paragraph("devices on the mesh", fill=_svg.FAINT), _svg.below(boxes)], 4)
