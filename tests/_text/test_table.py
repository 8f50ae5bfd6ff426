"""Tables as text, in colours and as HTML: what is aligned, left out, wrapped, and put below."""

import xml.etree.ElementTree as ET

import pytest

from spmd._text.table import Row, Table, html_page, plain, wrapped

HEAD = ("kind", "bytes", "time", "where", "call")
ROWS = [
    Row(("forward",), "title"),
    ("psum", "8 B", "", "m.py:3", '"b/dp s/tp d -> b/dp s d"'),
    Row(("all_gather", "16 KiB", "", "m.py:12", '"d/dp f/tp -> d f/tp"'), "loud", ("the compiler removed it",)),
    Row(("total", "16 KiB", "", "", ""), "total"),
    Row(("a sentence over all columns of the table",)),
]
TABLE = Table(ROWS, HEAD, right=(1, 2), below=(3, 4), indent=2)


def test_columns_are_aligned_and_empty_ones_left_out():
    assert TABLE.text().splitlines() == [
        "  kind         bytes  where    call",
        "",
        "forward",
        '  psum           8 B  m.py:3   "b/dp s/tp d -> b/dp s d"',
        '! all_gather  16 KiB  m.py:12  "d/dp f/tp -> d f/tp"',
        f"{' ' * 31}^ the compiler removed it",
        "  total       16 KiB",
        "  a sentence over all columns of the table",
    ]


def test_what_does_not_fit_stands_below():
    assert TABLE.text(40).splitlines() == [
        "  kind         bytes",
        "",
        "forward",
        "  psum           8 B",
        '      m.py:3  "b/dp s/tp d -> b/dp s d"',
        "! all_gather  16 KiB",
        '      m.py:12  "d/dp f/tp -> d f/tp"',
        "      ^ the compiler removed it",
        "  total       16 KiB",
        "  a sentence over all columns of the",
        "    table",
    ]


@pytest.mark.parametrize("width", range(24, 90))
def test_no_word_is_lost_at_any_width(width):
    text = TABLE.text(width)
    assert max(map(len, text.splitlines())) <= width
    assert set(TABLE.text().split()) - set(text.split()) <= {"where", "call"}  # heads of columns that stand below


def test_html_says_the_same():
    page = ET.fromstring(TABLE.html().replace("<br>", " "))
    assert set(TABLE.text().split()) - {"!", "^"} <= set(" ".join(page.itertext()).split())
    assert [row.get("class") for row in page.iter("tr")] == [None, "title", None, "loud", "total", None]


def test_html_leaves_empty_columns_out():
    page = ET.fromstring(TABLE.html().replace("<br>", " "))
    assert [one.text for one in page.iter("th") if not one.get("colspan")] == ["kind", "bytes", "where", "call"]
    assert {one.get("colspan") for one in page.iter() if one.get("colspan")} == {"4"}


def test_notebooks_do_not_move_text_to_the_right():
    """JupyterLab aligns cells to the right by a rule that is stronger: carets then pointed at another word."""
    page = html_page("heading", [TABLE])
    assert "td {text-align: left !important" in page and ".number {text-align: right !important" in page


def test_lines_carry_their_styles():
    styles = {text.strip(): style for line in TABLE.lines() for text, style in line}
    assert styles["forward"] == "bold cyan" and styles["^ the compiler removed it"] == "italic"
    assert plain(TABLE.lines()) == TABLE.text()


def test_strings_are_broken_between_layouts():
    assert wrapped('x from "b s/dp d" to "b/dp s/tp d", 2 MiB', 26) == [
        'x from "b s/dp d" to',
        '  "b/dp s/tp d", 2 MiB',
    ]
