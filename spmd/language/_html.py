"""Layouts, patterns and mappings as notebooks show them: tables that say in words what strings say in signs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from spmd._table import Row, Table, html_page
from spmd.language._syntax import Dim

_HEAD = ("dimension", "lies")


class Layout(Protocol):
    """What a table shows of a `Layout`."""

    @property
    def dims(self) -> Sequence[Dim]: ...
    @property
    def unreduced(self) -> Sequence[str]: ...
    @property
    def reduced(self) -> Sequence[str]: ...


def of_layout(layout: Layout) -> str:
    """One layout."""
    return html_page(str(layout), [Table(_rows(layout), _HEAD)])


def of_sides(text: str, sides: Iterable[tuple[str, Iterable[Layout]]]) -> str:
    """A pattern: what goes in, and what comes out."""
    rows: list[Row | tuple[str, ...]] = []
    for side, layouts in sides:
        for layout in layouts:
            rows += [Row((f"{side}: {layout}",), "title"), *_rows(layout)]
    return html_page(text, [Table(rows, _HEAD)])


def of_mapping(rules: Mapping[str, tuple[str, ...]]) -> str:
    """A mapping."""
    rows = [(name, _over(axes) if axes else "whole") for name, axes in rules.items()]
    return html_page("AxisMapping", [Table(rows, _HEAD)] if rows else [], empty="" if rows else "no rules")


def _rows(layout: Layout) -> list[tuple[str, str]]:
    rows = [(dim.text, _lies(dim)) for dim in layout.dims]
    rows += [("scalar", "one number")] if not rows else []
    marks = {"U": ("a term of a sum", layout.unreduced), "R": ("its gradient is a term of a sum", layout.reduced)}
    for mark, (what, axes) in marks.items():
        rows += [(f"{{{mark}:{','.join(axes)}}}", f"{what} along {', '.join(axes)}")] if axes else []
    return rows


def _lies(dim: Dim) -> str:
    if dim.ellipsis:
        return "any number of dimensions"
    low, high = dim.margin
    margin = f", and {low} more from the block before, {high} from the block after" if low or high else ""
    if all(atom.axes is None for atom in dim.atoms if atom.named):
        return "whole, unless a mapping divides it" + margin
    return (_over(dim.axes) if dim.axes else "whole") + margin


def _over(axes: Iterable[str]) -> str:
    return f"divided over {' and '.join(axes)}"
