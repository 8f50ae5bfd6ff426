"""Lines of notebook cells, whose files have hashes for names: IPython's own bookkeeping, played by hand."""

from __future__ import annotations

import linecache
import sys

import numpy as np
import pytest

import spmd
from spmd._notebook import shown_file

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
    with pytest.raises(spmd.SpmdError, match=r"at In\[2\]:8 \(wrong\)"):
        cell["wrong"](x)
    with pytest.raises(spmd.SpmdError, match=r"at In\[2\]:12"):
        cell["unbound"](x)


def test_names_of_cells(monkeypatch):
    hashed = "/tmp/ipykernel_1/7.py"
    assert shown_file(hashed) == "a cell"  # nobody remembers it
    monkeypatch.setitem(linecache.cache, hashed, (3, None, ["x = 1\n"], hashed))
    monkeypatch.setattr(sys.modules["__main__"], "In", ["", "x = 1", "y", "x = 1\n"], raising=False)
    assert shown_file(hashed) == "In[3]"  # the last that ran
    assert shown_file("/srv/ipykernel_1.py") == "/srv/ipykernel_1.py"
    assert shown_file(__file__) == __file__
