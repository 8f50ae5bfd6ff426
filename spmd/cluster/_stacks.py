"""Where a thread stands: the line of the user's program that it runs, and whether it waits for devices there."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import sys
import sysconfig
from types import FrameType
from typing import Any

import jax

from spmd._compat import compiles, in_jax

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OTHERS = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_JITTED = type(jax.jit(abs))


class Stack:
    """The frames of a thread, the innermost first.

    Args:
      thread: The number of a thread that runs.
    """

    def __init__(self, thread: int | None):
        self.frames: list[FrameType] = []
        frame = sys._current_frames().get(thread or 0)
        while frame is not None:
            self.frames.append(frame)
            frame = frame.f_back

    def mark(self) -> Any:
        """What is equal for as long as the thread stands where it does."""
        return [(frame.f_code, frame.f_lasti) for frame in self.frames]

    def compiles(self) -> bool:
        """Whether JAX traces or compiles a program."""
        return any(compiles(frame.f_code.co_filename) for frame in self.frames)

    def waits_for_devices(self) -> bool:
        """Whether it waits for what devices compute: in JAX, in a kernel, or in a call of a jitted function."""
        if not self.frames:
            return False
        inner = self.frames[0]
        name = inner.f_code.co_filename
        return in_jax(name) or name.startswith(f"{_HERE}kernels{os.sep}") or _is_jitted(inner, _expression(inner))

    def place(self) -> str:
        """The user's line, `float(loss) (train.py:88)`; empty where no line is the user's."""
        for frame in self.frames:
            name = frame.f_code.co_filename
            if not (in_jax(name) or name.startswith((_HERE, *_OTHERS, "<"))):
                text = " ".join((_expression(frame) or linecache.getline(name, frame.f_lineno)).split())
                shown = text if len(text) <= 80 else f"{text[:77]}..."
                return f"`{shown}` ({os.path.basename(name)}:{frame.f_lineno})"
        return ""


def _expression(frame: FrameType) -> str:
    """The source of what a frame computes right now; empty where it is not known."""
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, start, end = next(positions, (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # positions count bytes
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace")


def _is_jitted(frame: FrameType, text: str) -> bool:
    """Whether an expression calls a jitted function: its C++ leaves no frame."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if not isinstance(call, ast.Call):
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr == "block_until_ready":
        return True
    found = _named(frame, call.func)
    for _ in range(4):
        found = getattr(found, "func", None) or getattr(found, "__func__", None) or found  # partial, method
    return isinstance(found, _JITTED)


def _named(frame: FrameType, node: ast.expr) -> Any:
    """What a name or an attribute stands for in a frame; None for anything else."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_named(frame, node.value), node.attr, None)
    return None
