"""Rows of a search as points, drawn with the pieces of the drawing room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd._table import Line, Table
from spmd._units import bytes_text, seconds_text
from spmd.drawing._svg import EDGES, FAINT, FILLS, RIM, Box, below, caption, card, element, text
from spmd.searcher._rows import Row

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TICKS = 640.0, 320.0, 84.0, 40.0, 5


class Scatter:
    """A drawing of time and memory."""

    def __init__(self, title: str, rows: Sequence[Row]) -> None:
        self.title, self._rows = title, rows
        self._far = max(row.seconds for row in rows) * 1.05
        self._high = max(row.peak for row in rows) * 1.05

    def lines(self, width: int) -> list[Line]:
        texts = [(row.name, seconds_text(row.seconds), bytes_text(row.peak)) for row in self._rows]
        return Table(texts, ("mesh", "time", "memory"), right=(1, 2)).lines(width)

    def svg(self) -> str:
        marks = [self._point(row) for row in reversed(self._rows)]
        names = [self._name(row) for row in self._rows if row.pareto]
        area = element("rect", x=_LEFT, y=0, width=_WIDTH, height=_HEIGHT, fill="none", stroke=RIM)
        plot = Box(_LEFT + _WIDTH + 200, _HEIGHT + _BOTTOM, "".join([area, *self._scales(), *marks, *names]))
        about = "Time to the right, memory upwards. Filled: no other mesh is quicker and smaller."
        return card(below([caption(self.title, [about]), plot]), self.title)

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [{"name": row.name, "seconds": row.seconds, "bytes": row.peak} for row in self._rows]}

    def _place(self, row: Row) -> tuple[float, float]:
        return _LEFT + _WIDTH * row.seconds / self._far, _HEIGHT * (1 - row.peak / self._high)

    def _point(self, row: Row) -> str:
        x, y = self._place(row)
        fill = FILLS[4] if row.pareto else "none"
        title = element("title", f"{row.name}: {seconds_text(row.seconds)}, {bytes_text(row.peak)}")
        return element("circle", title, cx=x, cy=y, r=5, fill=fill, stroke=EDGES[4])

    def _name(self, row: Row) -> str:
        x, y = self._place(row)
        return text(x + 9, y, row.name)

    def _scales(self) -> list[str]:
        words = []
        for tick in range(_TICKS + 1):
            share = tick / _TICKS
            x, y = _LEFT + _WIDTH * share, _HEIGHT * (1 - share)
            words.append(text(x, _HEIGHT + 14, seconds_text(self._far * share), anchor="middle", fill=FAINT))
            words.append(text(_LEFT - 8, y, bytes_text(int(self._high * share)), anchor="end", fill=FAINT))
        return words
