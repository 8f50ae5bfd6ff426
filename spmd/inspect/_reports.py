"""What reports have in common: they print as lines, in colours with `rich`, and are plain values for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from spmd._text import Line, plain, rich_lines, shown_width


class Report:
    """A value that prints as lines."""

    def _lines(self, width: int) -> list[Line]:
        raise NotImplementedError

    def _text(self, width: int | None = None) -> str:
        """The lines as text, by default as wide as the terminal."""
        return plain(self._lines(shown_width(width)))

    def __str__(self) -> str:
        return self._text()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from rich_lines(self._lines(options.max_width))


def fields_of(value: Any, *names: str) -> dict[str, Any]:
    """Attributes as plain values, for JSON; of a dataclass those that it shows, unless some are named."""
    shown = names or [one.name for one in dataclasses.fields(value) if one.repr]
    return {name: plain_value(getattr(value, name)) for name in shown}


def plain_value(value: Any) -> Any:
    """A value as JSON has it: a mapping, a list, or what it says itself by `to_dict`."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    if isinstance(value, Mapping):
        return {name: plain_value(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain_value(one) for one in value]
    return value
