"""Grids of cells: each cell once, however a grid is cut."""

import itertools

import pytest

from spmd.drawing._picture import Cell, Grid


def numbered(rows: int, columns: int) -> Grid:
    cells = tuple(tuple(Cell((f"{r},{c}",)) for c in range(columns)) for r in range(rows))
    return Grid(tuple(f"r{r}" for r in range(rows)), tuple(f"c{c}" for c in range(columns)), cells)


@pytest.mark.parametrize(("most_columns", "most_rows"), list(itertools.product([1, 2, 3, 7, 9], [None, 1, 2, 5])))
def test_a_grid_is_cut_into_parts_of_like_size(most_columns, most_rows):
    """Each cell stands in one part, beside its own row and under its own column."""
    whole, found, sizes = numbered(5, 7), [], []
    for part in whole.cut(most_columns, most_rows):
        assert len(part.columns) <= most_columns and len(part.rows) <= (most_rows or 5)
        sizes.append(len(part.columns))
        for row, cells in zip(part.rows, part.cells, strict=True):
            for column, cell in zip(part.columns, cells, strict=True):
                assert cell.lines == (f"{row[1:]},{column[1:]}",)
                found.append(cell.lines)
    assert sorted(found) == sorted(cell.lines for row in whole.cells for cell in row)
    assert max(sizes) - min(sizes) < max(sizes), "none much smaller than the others"
