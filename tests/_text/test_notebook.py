"""Lines of notebook cells, whose files have hashes for names: IPython's own bookkeeping, played by hand. And a notebook
that runs."""

import linecache
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd._text.notebook import shown_file
from spmd.drawing._picture import FILLS

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


NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


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
    fills = set(re.findall(r'fill="(#[0-9a-f]{6})"', shown[8]["image/svg+xml"]))
    assert len(fills & set(FILLS)) == 64
    assert "16." in shown[9]["text/plain"]
