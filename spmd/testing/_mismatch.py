"""The one error of all assertions, and how its tables are laid out."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Mismatch", "Rows", "columns"]

Rows = list[tuple[str, ...]]


class Mismatch(AssertionError):
    """A program is not what a test says of it; the message has both, side by side."""


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines, columns aligned; those in `right` to the right.

    >>> columns([("a", "10"), ("long", "2")], right=(1,))
    ['a     10', 'long   2']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
