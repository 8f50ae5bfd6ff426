"""Programs that are wrong, one per message: `BAD` maps a name to a function that runs one on a 2 x 4 mesh; `FIXED`
runs some of them as the message says. The first is the first program anyone writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd

BAD: dict[str, Callable[[Any], Any]] = {}
FIXED: dict[str, Callable[[Any], Any]] = {}

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)
V = np.arange(8.0, dtype=np.float32)


def bad(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    BAD[fn.__name__] = fn
    return fn


def fixed(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    FIXED[fn.__name__.removesuffix("_fixed")] = fn
    return fn


def body(pattern: str, fn: Callable[..., Any], mesh: Any, *args: Any, **options: Any) -> Any:
    """Run `fn` as a kernel on X or on other arguments."""
    return spmd.kernel(pattern, mesh=mesh, **options)(fn)(*(args or (X,)))
