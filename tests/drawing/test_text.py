"""Grids as text: lines that fit the width, cells that line up."""

import pytest

from spmd._text.table import plain
from spmd.drawing._picture import Cell, Grid, grid_lines, heading, sentences

GRID = Grid(
    rows=("0:2", "2:4"),
    columns=("0:8", "8:16"),
    cells=((Cell(("0",), 0), Cell(("1",), 1)), (Cell(("2", "3"), 2), Cell())),
    row_label="b",
    column_label="d",
)


def test_a_grid_has_a_frame_and_headers():
    assert [line.rstrip() for line in plain(grid_lines([[GRID]], 80)).splitlines()] == [
        "       d",
        "b      0:8    8:16",
        "     ┌──────┬──────┐",
        " 0:2 │  0   │  1   │",
        "     ├──────┼──────┤",
        " 2:4 │  2   │      │",
        "     │  3   │      │",
        "     └──────┴──────┘",
    ]


@pytest.mark.parametrize("width", [24, 40, 60])
def test_grids_stand_side_by_side_as_far_as_they_fit(width):
    lines = plain(grid_lines([[GRID, GRID, GRID]], width)).splitlines()
    assert max(map(len, (line.rstrip() for line in lines))) <= width
    assert sum(line.count("┌") for line in lines) == 3


def test_a_heading_is_one_line_if_it_fits():
    assert plain(heading(["b/dp d", "", "mesh dp=2"], 80)).splitlines() == ["b/dp d   mesh dp=2"]
    assert plain(heading(["b/dp d", "mesh dp=2"], 12)).splitlines() == ["b/dp d", "mesh dp=2"]
    assert all(len(line) <= 20 for line in plain(sentences(["word " * 12], 20)).splitlines())
