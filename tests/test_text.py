"""Tables as text, in colours and as HTML: what is aligned, left out, wrapped, and put below."""

import linecache
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd._text import Row, Table, bytes_text, html_page, plain, seconds_text, shown_file, si_text, wrapped

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


# --- units -------------------------------------------------------------------------------------------------------

# Quantities for people: each unit, and the places where one unit follows the other.


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (2**52, "4096 TiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1e-10, "0.1 ns"), (9.994e-7, "999 ns"), (9.996e-7, "1 µs"), (0.9996, "1 s"), (12_345, "12,345 s")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_decimal_prefixes():
    assert [si_text(10.0**power, "B") for power in (0, 3, 6, 9, 12, 15, 18, 21)] == [
        *("1 B", "1 kB", "1 MB", "1 GB", "1 TB", "1 PB", "1 EB"),
        "1e+03 EB",
    ]


# --- notebook ----------------------------------------------------------------------------------------------------

# Lines of notebook cells, whose files have hashes for names: IPython's own bookkeeping, played by hand. And a notebook
# that runs.

CELL = """import spmd, jax
@spmd.kernel("b/dp -> b", mesh=mesh)
def gathered(x):
    return spmd.all_gather(x, "b/dp -> b", to="invarying")

@spmd.kernel("b/dp -> scalar", mesh=mesh)
def wrong(x):
    return spmd.annotate(x.sum(), "scalar")

@spmd.kernel("b/dp -> b/dp", mesh=mesh)
def unbound(x):
    return jax.lax.psum(x, "pd")
"""


@pytest.fixture(params=["/tmp/ipykernel_1234/1858968365.py", "<ipython-input-2-0123456789ab>"])
def cell(request, monkeypatch):
    """The names that a cell leaves, run as IPython runs it."""
    name = request.param
    monkeypatch.setitem(linecache.cache, name, (len(CELL), None, CELL.splitlines(keepends=True), name))
    monkeypatch.setattr(sys.modules["__main__"], "In", ["", "x = 1", CELL.strip(), "gathered(x)"], raising=False)
    names = {"mesh": spmd.make_mesh(dp=2)}
    exec(compile(CELL, name, "exec"), names)
    return names


def test_lines_of_a_cell(cell):
    x = np.ones(4, np.float32)
    seen = spmd.explain(cell["gathered"], x)
    assert [one.where for one in seen.written.collectives] == ["In[2]:4"]
    assert [one.where for one in seen.compiled] == ["In[2]:4"]
    assert "In[2]:4" in str(seen) and "1858968365" not in str(seen)
    with pytest.raises(spmd.errors.SpmdError, match=r"at In\[2\]:8 \(wrong\)"):
        cell["wrong"](x)
    with pytest.raises(spmd.errors.SpmdError, match=r"at In\[2\]:12"):
        cell["unbound"](x)


def test_names_of_cells(monkeypatch):
    hashed = "/tmp/ipykernel_1/7.py"
    assert shown_file(hashed) == "a cell"  # nobody remembers it
    monkeypatch.setitem(linecache.cache, hashed, (3, None, ["x = 1\n"], hashed))
    monkeypatch.setattr(sys.modules["__main__"], "In", ["", "x = 1", "y", "x = 1\n"], raising=False)
    assert shown_file(hashed) == "In[3]"  # the last that ran
    assert shown_file("/srv/ipykernel_1.py") == "/srv/ipykernel_1.py"
    assert shown_file(__file__) == __file__


NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


def test_the_notebook_runs_and_shows_pictures_and_tables():
    """Each cell that ends with one of our values shows SVG or HTML; a picture of 64 devices has 64 colours."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    shown = [cell.outputs[-1].data for cell in book.cells if cell.cell_type == "code"]
    assert len(shown) == 10
    kinds = ["svg" if "image/svg+xml" in one else "html" if "text/html" in one else "text" for one in shown]
    assert kinds == ["svg", "html", "svg", "html", "html", "html", "html", "svg", "svg", "text"]
    assert "tp" in shown[3]["text/html"] and "psum" in shown[6]["text/html"]
    fills = set(re.findall(r'<rect[^>]* fill="(#[0-9a-f]{6})"', shown[8]["image/svg+xml"]))
    assert len(fills) == 1 + 64, "a card, and a colour for each device"
    assert "16." in shown[9]["text/plain"]
