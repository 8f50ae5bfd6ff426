"""Pictures as text: grids of box characters, their cells coloured where the terminal can."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

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
from spmd.inspect._blocks import Holdings

__all__ = ["Line", "Segment", "grid_lines", "heading_lines", "holdings_lines", "plain", "text_lines"]

Segment = tuple[str, int | None]
"""A piece of a line and its colour number."""
Line = list[Segment]

_GAP = "   "  # between panels
_CELL = 24  # the widest that a list of devices gets before it is wrapped


def holdings_lines(holdings: Holdings, width: int) -> list[Line]:
    """The whole picture: what it is, the grids, the facts, and which device is where on the mesh."""
    parts = [holdings.title, holdings.kind, holdings.mesh_text if holdings.mesh else ""]
    lines = [*heading_lines([part for part in parts if part], width), []]
    lines += grid_lines(holdings, width, tints(holdings))
    found = facts(holdings, arrange(holdings))
    lines += [[], *(line for fact in found for line in text_lines(fact, width))] if found else []
    if holdings.mesh and not is_summary(holdings):
        lines += [[], *_mesh_lines(holdings, width)]
    return lines


def plain(lines: Sequence[Line]) -> str:
    """The lines without colour."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def grid_lines(holdings: Holdings, width: int, colours: Mapping[int, int]) -> list[Line]:
    """The panels, side by side as far as the width allows; outer slices stand below each other."""
    table = _Table(holdings, arrange(holdings), colours)
    lines: list[Line] = []
    for row in panel_rows(holdings, table.arrangement, table.most_columns(width)):
        panels = [table.panel(panel) for panel in row]
        widest = max(_width(line) for panel in panels for line in panel)
        along = max(1, (width + len(_GAP)) // (widest + len(_GAP)))
        for at in range(0, len(panels), along):
            lines += [[]] if lines else []
            lines += _beside(panels[at : at + along])
    return lines


def heading_lines(parts: Sequence[str], width: int) -> list[Line]:
    """What is drawn, on one line if it fits."""
    whole = "   ".join(parts)
    return (
        text_lines(whole, width)
        if len(whole) <= width
        else [line for part in parts for line in text_lines(part, width)]
    )


def text_lines(text: str, width: int) -> list[Line]:
    """A sentence on as many lines as it takes."""
    if len(text) <= width:
        return [[(text, None)]]
    wrapped = textwrap.wrap(text, max(20, width), subsequent_indent="  ", break_on_hyphens=False)
    return [[(line, None)] for line in wrapped]


class _Table:
    """The texts of one picture's cells and headers, all columns equally wide."""

    def __init__(self, holdings: Holdings, arrangement: Arrangement, colours: Mapping[int, int]) -> None:
        self.holdings, self.arrangement = holdings, arrangement
        short = is_summary(holdings)
        self._colours = {block: colours[copies[0][0]] for block, copies in holdings.cells.items()}
        self._cells = {
            block: wrapped(cell_parts(copies, short=short), _CELL) for block, copies in holdings.cells.items()
        }
        texts = [line for lines in self._cells.values() for line in lines]
        self._cell = max(map(len, [*texts, *self._headers(arrangement.column)]))
        rows = [self._label(arrangement.row), *(f" {header}" for header in self._headers(arrangement.row))]
        self._row = max(map(len, rows))

    def most_columns(self, width: int) -> int:
        """How many columns a panel may have."""
        return max(1, (width - self._row - 2) // (self._cell + 3))

    def panel(self, panel: Panel) -> list[Line]:
        holdings, arrangement = self.holdings, self.arrangement
        indent = " " * (self._row + 1 if arrangement.row is not None else 0)
        lines: list[str | Line] = [panel_title(holdings, panel)] if panel.fixed else []
        if arrangement.column is not None:
            lines.append(f"{indent}  {self._label(arrangement.column)}")
            heads = [self._header(arrangement.column, number).center(self._cell) for number in panel.columns]
            start = self._label(arrangement.row).ljust(len(indent))
            lines.append(f"{start}  {'   '.join(heads)}")
        rules = ["─" * (self._cell + 2)] * len(panel.columns)
        lines.append(f"{indent}┌{'┬'.join(rules)}┐")
        for at, number in enumerate(panel.rows):
            if at:
                lines.append(f"{indent}├{'┼'.join(rules)}┤")
            label = self._header(arrangement.row, number) if arrangement.row is not None else ""
            lines += self._row_lines(panel, number, label.rjust(len(indent) - 1) + " " if indent else "")
        lines.append(f"{indent}└{'┴'.join(rules)}┘")
        return [[(line, None)] if isinstance(line, str) else line for line in lines]

    def _row_lines(self, panel: Panel, row: int | None, label: str) -> list[Line]:
        cells, colours = [], []
        for column in panel.columns:
            if row is None or column is None:
                cells.append(["..."])
                colours.append(None)
            else:
                block = panel.block(self.holdings, self.arrangement, row, column)
                cells.append(self._cells.get(block, []))
                colours.append(self._colours.get(block))
        found = []
        for at in range(max(1, *map(len, cells))):
            line: Line = [(label if at == 0 else " " * len(label), None)]
            for cell, colour in zip(cells, colours, strict=True):
                text = cell[at] if at < len(cell) else ""
                line += [("│", None), (f" {text.center(self._cell)} ", colour)]
            found.append([*line, ("│", None)])
        return found

    def _label(self, place: int | None) -> str:
        return "" if place is None else self.holdings.sides[place].label

    def _header(self, place: int, number: int | None) -> str:
        return "..." if number is None else self.holdings.sides[place].text(number)

    def _headers(self, place: int | None) -> list[str]:
        if place is None:
            return [""]
        return [self._header(place, number) for number in range(len(self.holdings.sides[place].blocks))]


def _beside(panels: Sequence[list[Line]]) -> list[Line]:
    found: list[Line] = []
    widths = [max(map(_width, panel)) for panel in panels]
    for at in range(max(map(len, panels))):
        line: Line = []
        for panel, width in zip(panels, widths, strict=True):
            part = panel[at] if at < len(panel) else []
            line += [*part, (" " * (width - _width(part)) + _GAP, None)]
        found.append(line)
    return found


def _width(line: Line) -> int:
    return sum(len(text) for text, _ in line)


def _mesh_lines(holdings: Holdings, width: int) -> list[Line]:
    """Which device is where: a table with the last mesh axis along columns."""
    colours = tints(holdings)
    colour = {device: colours[holdings.cells[block][0][0]] for device, block in holdings.block_of.items()}
    axis, size = holdings.mesh[-1]
    rows = mesh_rows(holdings)
    cell = max(len(str(max(holdings.devices))), len(f"{axis}={size - 1}"))
    start = max(len("devices"), *(len(label) for label, _ in rows)) + 2
    most = max(1, (width - start) // (cell + 2))
    lines: list[Line] = []
    for chunk in even(range(size), most):
        heads = "  ".join(f"{axis}={n}".rjust(cell) for n in chunk)
        lines.append([("devices".ljust(start) + heads, None)])
        for label, devices in rows:
            line: Line = [(label.ljust(start - 1), None)]
            for device in devices[chunk[0] : chunk[-1] + 1]:
                line.append((f" {str(device).rjust(cell)} ", colour[device]))
            lines.append(line)
    return lines
