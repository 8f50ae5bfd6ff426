"""The notebook of the quickstart is made from the page, and runs."""

from pathlib import Path

import pytest

from docs.notebook import INSTALL, notebook, written
from tests.sampler import rare

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "pages" / "quickstart.md", ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_is_that_of_the_page():
    assert NOTEBOOK.read_text() == written(PAGE, NOTEBOOK), f"python -m docs.notebook {PAGE} {NOTEBOOK}"


@rare
def test_the_notebook_runs_and_draws():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    printed = "\n".join(out.get("text", "") for cell in code for out in cell.outputs)
    assert "fix: spmd.reduce(x**2" in printed and "step 2: loss 1.043" in printed
    assert sum("image/svg+xml" in out.get("data", {}) for cell in code for out in cell.outputs) == 2
    assert "one = spmd.make_mesh(dp=1, tp=1, devices=device)" in code[-2].source  # what holds on one GPU
    assert "abstract=True" in code[-1].source


def test_a_page_becomes_cells():
    page = "# A\n\n```python\nx = 1\n```\n\n<!-- output -->\n```text\n1\n```\n\n[b](c.md)\n\n<!-- picture: x -->\n![d](e.svg)\n"
    cells = notebook(page, Path("../docs"))["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found[1:] == [
        ("code", INSTALL),
        ("markdown", "# A"),
        ("code", "x = 1"),
        ("markdown", "[b](../docs/c.md)"),
        ("code", "x"),
    ]
