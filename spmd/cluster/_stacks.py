"""Where a thread stands: the line of the user's program that it runs, and whether it waits for devices there."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import jax

from spmd._compat import BACKWARD, compiled_programs, compiles, coordination, in_jax
from spmd._jaxprs.lines import is_users
from spmd.inspect._collectives import KINDS, place_of
from spmd.inspect._hlo import HloModule, names_of_parts, parse_module

_JITTED = type(jax.jit(abs))


class Stack:
    """The frames of a thread, the innermost first.

    Args:
      thread: The number of a thread that runs.
    """

    def __init__(self, thread: int | None):
        inner = sys._current_frames().get(thread or 0)
        self.frames = [frame for frame, _ in traceback.walk_stack(inner)] if inner is not None else []

    def mark(self) -> Any:
        """Return what is equal for as long as the thread stands where it does."""
        return [(frame.f_code, frame.f_lasti) for frame in self.frames]

    def compiles(self) -> bool:
        """Return whether JAX traces or compiles a program."""
        return any(compiles(frame.f_code.co_filename) for frame in self.frames)

    def waits_for_devices(self) -> bool:
        """Return whether it waits for what devices compute: in JAX, in a call of a jitted function, or in one that is
        given an array which is not there yet, for C++ leaves no frame."""
        inner = ((one, _expression(one)) for one in self.frames[:1])
        return any(in_jax(one.f_code.co_filename) or _is_jitted(one, text) or _awaits(one, text) for one, text in inner)

    def waits_for_others(self) -> bool:
        """Return whether it asks JAX's coordination service, which answers when the others have come."""
        service = type(coordination())
        calls = ((one, _function(_expression(one))) for one in self.frames[:1])
        asked = (_named(one, call.value) for one, call in calls if isinstance(call, ast.Attribute))
        return any(isinstance(one, service) for one in asked)

    def place(self) -> str:
        """The user's line, `float(loss) (train.py:88)`; empty where no line is the user's."""
        return next(map(_line, self._users), "")

    def inner_place(self) -> str:
        """The line of a library in which it stands, where that is a call of the system and no wait for a thread."""
        if any(os.path.basename(one.f_code.co_filename) in _RESTS for one in self.frames[:1]):
            return ""
        return next((_line(one) for one in self.frames if not one.f_code.co_filename.startswith("<")), "")

    def sends(self, exact: bool = False) -> list[str]:
        """The collectives of the program for which it waits, each with its string and line; empty where none is known.

        A compiled program says through which lines it was called, and which collectives it has. It is the one that was
        called at the line where the thread stands; else, if it need not be `exact`, one of those that the same
        function has called so far.
        """
        texts = (text for text in compiled_programs() if len(text) < _LONGEST and _SENDS in text)
        modules = [parse_module(text, having=_SENDS) for text in texts if not _OWN.search(text)]
        for frame in self._users:
            here, called = (frame.f_code.co_filename, frame.f_code.co_qualname), {}
            for at, module in enumerate(modules):
                stacks = itertools.chain.from_iterable(module.frames.values())
                if lines := {one.line for one in stacks if (one.file, one.function) == here}:
                    called[at] = lines
            if called:
                at_line = [at for at, lines in called.items() if frame.f_lineno in lines]
                chosen = at_line or ([] if exact else sorted(called, key=lambda at: min(called[at])))
                return list(dict.fromkeys(text for at in chosen for text in _collectives(modules[at])))
        return []

    @property
    def _users(self) -> list[FrameType]:
        """The frames of the user's own functions."""
        return [frame for frame in self.frames if is_users(frame.f_code.co_filename)]


_OWN = re.compile(r"jit\((_itself|checksums)\)")  # who asks for what these compute waits for it there
_LONGEST = 2**24  # characters of a program, which takes seconds to read
_SENDS = "channel_id="  # what a compiled program says of each collective
_CALL = re.compile(r'\w+\([^"()]*"[^"]*"(?:[^"()]|"[^"]*")*\)')


def _collectives(module: HloModule) -> Iterator[str]:
    """The collectives of a program, `psum(x, "b {U:tp} -> b") (train.py:88)`; each part of what XLA made one of."""
    for one in itertools.chain.from_iterable(module.computations.values()):
        kind, where = KINDS.get(one.opcode.removesuffix("-start")), place_of(module.stack(one))
        for name in names_of_parts(one.op_name) if kind else ():
            calls = _CALL.findall(name)
            text = calls[-1] if calls else name.rpartition("/")[2].removesuffix("_invariant")
            if BACKWARD in name:
                text = f"the gradient of {text}"
            yield f"{text if text.partition('(')[0] == kind else f'{kind} of {text}'} ({where})"


_RESTS = ("threading.py", "thread.py", "selectors.py", "queue.py", "socket.py")  # where threads wait for work


def _line(frame: FrameType) -> str:
    """What a frame does right now, and where."""
    name = frame.f_code.co_filename
    text = " ".join((_expression(frame) or linecache.getline(name, frame.f_lineno)).split())
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"`{shown}` ({os.path.basename(name)}:{frame.f_lineno})"


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
    """Return whether an expression calls a jitted function: its C++ leaves no frame."""
    function = _function(text)
    if isinstance(function, ast.Attribute) and function.attr == "block_until_ready":
        return True
    found = _named(frame, function)
    for _ in range(4):
        found = getattr(found, "func", None) or getattr(found, "__func__", None) or found  # partial, method
    return isinstance(found, _JITTED)


def _awaits(frame: FrameType, text: str) -> bool:
    """Return whether an expression names an array that no device has computed yet."""
    try:
        named = (_named(frame, node) for node in ast.walk(ast.parse(text.strip(), mode="eval")))
        arrays = [cast(Any, x) for x in named if isinstance(x, jax.Array)]
        return any(not x.is_deleted() and not x.is_ready() for x in arrays)
    except (SyntaxError, ValueError):
        return False


def _function(text: str) -> ast.expr | None:
    """What an expression calls; None where it is no call."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return call.func if isinstance(call, ast.Call) else None


def _named(frame: FrameType, node: ast.AST | None) -> Any:
    """Return what a name or an attribute stands for in a frame; None for anything else."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_named(frame, node.value), node.attr, None)
    return None
