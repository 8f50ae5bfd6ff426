"""Grids as text: frames of box characters, and colours where the terminal has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spmd._table import Line, wrapped
from spmd.drawing._grid import Cell, Grid
from spmd.drawing._svg import FILLS, INK

_GAP = "   "  # between grids


def heading(parts: Sequence[str], width: int) -> list[Line]:
    """What is drawn, on one line if it fits."""
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
        panels = [_panel(part, cell, left) for grid in row for part in grid.cut((width - left - 1) // (cell + 3))]
        widest = max(_width(line) for panel in panels for line in panel)
        along = max(1, (width + len(_GAP)) // (widest + len(_GAP)))
        for at in range(0, len(panels), along):
            lines += [[]] if lines else []
            lines += _beside(panels[at : at + along])
    return lines


def _panel(grid: Grid, cell: int, left: int) -> list[Line]:
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
                line += [(bar, ""), (f" {text} ", _style(one))]
            lines.append([*line, (bar, "")])
    return [*lines, _rule(grid, cell, left, "└┴┘")] if grid.framed else lines


def _rule(grid: Grid, cell: int, left: int, corners: str) -> Line:
    first, cross, last = corners
    return [(" " * left + first + cross.join(["─" * (cell + 2)] * len(grid.columns)) + last, "")]


def _style(cell: Cell) -> str:
    return "" if cell.colour is None else f"{INK} on {FILLS[cell.colour]}"


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
