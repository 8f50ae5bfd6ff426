"""For mkdocstrings: turns the `>>>` examples of docstrings into fenced blocks.

Google style handles them only in a section named "Examples:". Elsewhere Markdown takes `>>>` for quotations and
`[0 1]` for links.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent) .*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The docstring with a fence around each run of example lines, in which `<BLANKLINE>` is an empty line."""
    shown = lambda match: match.group().replace("<BLANKLINE>", "")
    return _EXAMPLE.sub(lambda m: f"{m['indent']}```pycon\n{shown(m)}\n{m['indent']}```", text)


class Doctests(griffe.Extension):
    """Rewrites each docstring as it is collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
