"""A picture: text where it is printed, colours in a terminal, SVG in a notebook and in a file."""

from __future__ import annotations

import os
from typing import Any, Protocol

from spmd._table import Line, plain, rich_lines, shown_width
from spmd.errors import SpmdError


class Drawing(Protocol):
    """What a picture is drawn from."""

    @property
    def title(self) -> str: ...
    def lines(self, width: int) -> list[Line]: ...
    def svg(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...


class Picture:
    """A picture of which device holds what: text where it is printed, SVG where a notebook shows it.

    `print(picture)` gives plain text, complete without colour; `rich.print(picture)` colours the blocks.

    Example:
      >>> import spmd
      >>> picture = spmd.visualize("b/dp d", (8, 4), {"dp": 2})
      >>> picture.to_dict()["devices"][1]["coordinates"]
      {'dp': 1}
      >>> picture.svg[:4]
      '<svg'
    """

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing

    def text(self, width: int | None = None) -> str:
        """The picture as text, no wider than the terminal if possible.

        Args:
          width: Columns; by default those of the terminal.
        """
        return plain(self._drawing.lines(shown_width(width)))

    @property
    def svg(self) -> str:
        """The picture as an SVG document, readable on dark and on light pages."""
        return self._drawing.svg()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
          path: The name of the file. It ends with `.svg`, `.html` or `.txt`.

        Raises:
          SpmdError: If the file has another ending.
        """
        name = os.fspath(path)
        page = '<!doctype html><meta charset="utf-8"><title>spmd</title>'
        written = {".svg": lambda: self.svg, ".html": lambda: page + self._repr_html_(), ".txt": self.text}
        make = written.get(os.path.splitext(name)[1].lower())
        if make is None:
            rule = "A picture is saved as .svg, .html or .txt."
            raise SpmdError(rule, call=f'.save("{os.path.basename(name)}")', advice='.save("picture.svg")')
        with open(name, "w", encoding="utf-8") as file:
            file.write(make() + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: each device with its coordinates on the mesh and what it holds."""
        return self._drawing.to_dict()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg}</div>'

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from rich_lines(self._drawing.lines(options.max_width))
