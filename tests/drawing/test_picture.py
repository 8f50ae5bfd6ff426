"""Pictures: the same in text, in colour, in a notebook and in a file."""

import io
import itertools
import re
import xml.etree.ElementTree as ET

import pytest

import spmd
from spmd._text import plain
from spmd.drawing._picture import (
    EDGES,
    FILLS,
    WIDTH,
    Box,
    Cell,
    Grid,
    below,
    beside,
    card,
    element,
    flow,
    grid_lines,
    heading,
    paragraph,
    sentences,
    text,
)
from tests.inspect.drawings import SVG


def test_the_ways_to_show_it(tmp_path):
    picture = spmd.visualize("a/x b", (4, 6), {"x": 2})
    assert repr(picture) == str(picture)
    assert picture._repr_svg_() == picture.svg
    assert picture.svg in picture._repr_html_()
    picture.save(tmp_path / "p.svg")
    ET.parse(tmp_path / "p.svg")
    picture.save(str(tmp_path / "p.html"))
    assert picture.svg in (tmp_path / "p.html").read_text(encoding="utf-8")
    picture.save(tmp_path / "p.txt")
    assert (tmp_path / "p.txt").read_text(encoding="utf-8") == f"{picture}\n"


def test_a_plan_shows_itself():
    plan = spmd.plan("a/x b -> a b/x", sizes={"a": 8, "b": 8}, mesh={"x": 4})
    assert plan._repr_svg_() == spmd.visualize(plan).svg


def test_svg_stands_alone():
    """No ids, styles, scripts or references, which could clash with or reach out of a notebook."""
    svg = spmd.visualize("a/x b", (4, 6), {"x": 2}).svg
    page = ET.fromstring(svg)
    assert {one.tag.removeprefix(SVG) for one in page.iter()} <= {"svg", "g", "rect", "text", "title"}
    assert not [one for one in page.iter() if one.get("id") or one.get("class") or one.get("style")]
    assert "href" not in svg and "url(" not in svg


def test_rich_colours_the_same_text():
    from rich.console import Console

    picture = spmd.visualize("a/x b", (4, 6), {"x": 2})
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor", width=100).print(picture)
    assert "\x1b[" in out.getvalue()
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert [line.rstrip() for line in bare.splitlines()] == picture.text(100).splitlines()


# -------------------- grids of cells: each cell once, however a grid is cut


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


# -------------------- grids as text: lines that fit the width, cells that line up

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


# -------------------- boxes of SVG: they know their sizes, and lie beside and below each other without overlap


def test_attributes_and_text_are_escaped():
    assert element("g", data_index='a "b"', x=1.50) == '<g data-index="a &quot;b&quot;" x="1.5"/>'
    assert "&lt;b&gt;" in text(0, 0, "<b>") and text(0, 0, "") == ""


def test_boxes_beside_and_below_add_their_sizes():
    boxes = [Box(10, 5, "<a/>"), Box(20, 8, "<b/>")]
    side, pile = beside(boxes, 4), below(boxes, 3)
    assert (side.width, side.height) == (34, 8) and (pile.width, pile.height) == (20, 16)
    assert 'translate(14 0)"' in side.body and 'translate(0 8)"' in pile.body
    assert (beside([]).width, below([]).height) == (0, 0)


def test_a_row_is_never_wider_than_the_page():
    boxes = [Box(WIDTH / 3, 10, "<a/>")] * 5
    assert flow(boxes).width <= WIDTH and flow(boxes).height > 10
    assert flow([Box(2 * WIDTH, 10, "<a/>")]).height == 10


def test_long_text_goes_on_in_the_next_line():
    words = "devices " * 60
    box = paragraph(words)
    lines = re.findall("<text", box.body)
    assert len(lines) > 1 and box.width <= WIDTH and box.height == 17 * len(lines)


def test_a_card_is_a_document_of_its_own():
    root = ET.fromstring(card(Box(100, 50, "<g/>"), "b/dp & more"))
    assert root.attrib["viewBox"] == "0 0 132 82" and root[0].text == "b/dp & more"


def test_each_device_that_is_drawn_has_a_colour():
    assert len(set(FILLS)) == len(FILLS) == len(EDGES) == len(set(EDGES)) == 64
