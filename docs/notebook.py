"""Make a notebook of a Markdown page: text and Python as cells, without the outputs, which the notebook makes itself.

    python -m docs.notebook docs/pages/quickstart.md examples/quickstart.ipynb

A picture of the page is the last line of its cell. Colab has no `spmd`, so the first cell installs it there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

INSTALL = """import importlib.util

if importlib.util.find_spec("spmd") is None:
    %pip install --quiet spmd"""
_PART = re.compile(
    r"^<!-- output -->\n```text\n.*?\n```\n|^```(?P<kind>\w+)\n(?P<code>.*?)\n```\n"
    r"|^<!-- picture: (?P<picture>\w+) -->\n!\[[^\]]*\]\([^)]*\)\n",
    re.MULTILINE | re.DOTALL,
)


def notebook(page: str, folder: Path) -> dict[str, object]:
    """The notebook of a page that lies in this folder, seen from the notebook's."""
    cells = [("markdown", "Run this cell first."), ("code", INSTALL)]
    text = 0
    for part in _PART.finditer(page):
        cells.append(("markdown", page[text : part.start()]))
        text = part.end()
        if part["kind"] == "python":
            cells.append(("code", part["code"]))
        elif part["picture"]:
            cells.append(("code", part["picture"]))
    cells.append(("markdown", page[text:]))
    shown = [(kind, _without_marks(source, folder) if kind == "markdown" else source) for kind, source in cells]
    return {
        "cells": [_cell(i, *cell) for i, cell in enumerate(cell for cell in shown if cell[1].strip())],
        "metadata": {
            "accelerator": "GPU",
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _without_marks(text: str, folder: Path) -> str:
    """Markdown without its comments, with links to the pages where they lie."""
    text = re.sub(r"<!--.*?-->", "", text)
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", lambda link: f"]({(folder / link[1]).as_posix()})", text).strip()


def _cell(number: int, kind: str, source: str) -> dict[str, object]:
    cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    cell["source"] = source.splitlines(keepends=True)
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def written(page: Path, target: Path) -> str:
    """The text of the notebook file."""
    folder = Path(os.path.relpath(page.parent, target.parent))
    return json.dumps(notebook(page.read_text(), folder), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    source, destination = map(Path, sys.argv[1:])
    destination.write_text(written(source, destination))
