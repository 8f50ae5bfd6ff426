"""The names of a notebook's cells. The file name of a cell is a number that its author has never seen."""

from __future__ import annotations

import linecache
import re
import sys

_HASHED = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")  # Jupyter: a hash of the cell's text
_NUMBERED = re.compile(r"<ipython-input-(\d+)-")  # the IPython shell


def shown_file(name: str) -> str:
    """`In[3]` for the file name of a notebook's cell, other names as they are.

    IPython keeps the text of each cell under its file name in `linecache`, and what it ran in `In`, by number. Of cells
    with the same text, the last one that ran is meant.
    """
    numbered = _NUMBERED.match(name)
    if numbered:
        return f"In[{numbered.group(1)}]"
    if not _HASHED.search(name):
        return name
    text = "".join(linecache.getlines(name)).strip()
    ran = getattr(sys.modules.get("__main__"), "In", None)
    found = [i for i, cell in enumerate(ran) if str(cell).strip() == text] if isinstance(ran, list) and text else []
    return f"In[{found[-1]}]" if found else "a cell"
