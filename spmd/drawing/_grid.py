"""A picture as a value: grids of cells. Text and SVG are drawn from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of a grid.

    Attributes:
      lines: What stands in it.
      colour: The number of its colour. None: it holds nothing.
      index: The block that it stands for, as a reader names it.
      devices: The devices that hold it; empty in a summary.
      tip: More, for whoever points at it.
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
