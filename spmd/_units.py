"""Quantities for people."""

from __future__ import annotations

__all__ = ["bytes_text"]


def bytes_text(count: int) -> str:
    """A number of bytes.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**20)
    ('512 B', '1.5 KiB', '3 MiB')
    """
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            return f"{amount:.4g} {unit}"
    raise AssertionError("unreachable: the last unit returns")
