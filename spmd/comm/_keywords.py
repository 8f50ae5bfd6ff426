"""Keywords of a call: an int is a size, a str, tuple or None is a mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd.errors import LayoutError, SizeError, compose, did_you_mean
from spmd.language import Pattern

__all__ = ["call_text", "split_keywords"]


def _axis_keyword(value: Any) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, tuple) and all(isinstance(v, str) for v in value))
    )


def split_keywords(text: str, pattern: Pattern, binds: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes and mesh axes among the keywords of a call; an error for anything else."""
    sizes: dict[str, int] = {}
    axes: dict[str, Any] = {}
    for key, value in binds.items():
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            known, what = pattern.names, "dimension"
            sizes[key] = int(value)
        elif _axis_keyword(value):
            known, what = pattern.axis_names, "mesh axis"
            axes[key] = value
        else:
            rule = (
                f"the keyword {key} binds a size (an int) or a mesh axis (a str, a tuple of str, or None), "
                f"not {type(value).__name__}."
            )
            raise LayoutError(compose(rule, call=text, source=pattern.source))
        if key not in known:
            rule = (
                f"the keyword {key}={value!r} binds a {what} that the pattern does not "
                f"have{did_you_mean(key, known) or '.'}"
            )
            got = [f"{what} names in the pattern: {', '.join(known) or 'none'}"]
            raise LayoutError(compose(rule, call=text, source=pattern.source, got=got))
        if key in sizes and sizes[key] < 1:
            raise SizeError(compose(f"the size of {key} is positive, not {value}.", call=text, source=pattern.source))
    return sizes, axes


def call_text(name: str, pattern: Any, arrays: int = 1) -> str:
    """How a call is shown in messages and in `explain`."""
    shown = {0: "", 1: "x, ", 2: "x, y, "}.get(arrays, "x, ..., ")
    return f'{name}({shown}"{pattern}")'
