"""The one error of all assertions."""

from __future__ import annotations


class Mismatch(AssertionError):
    """A program is not what a test says of it. The message has both, side by side."""
