"""Where in the user's own code an equation was written."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import einops
import jax.extend.source_info_util as source_info_util

from spmd import _compat
from spmd._notebook import shown_file

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

# JAX skips its own frames when it names a line; ours are skipped in the same way, in JAX's messages too.
source_info_util.register_exclusion(_PACKAGE)
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(einops.__file__)) + os.sep)


def line_of(eqn: Any, callers: Sequence[Any] = ()) -> str:
    """`file:line (function)` of the user's line, or "" if no frame is theirs.

    Bodies of JAX's own cached jits (`jnp.where`) were traced once and name no user line, or a wrong
    one; then the line of the nearest call around them is meant.
    """
    for candidate in (eqn, *reversed(callers)):
        text = source_info_util.summarize(candidate.source_info)
        if text and text != "unknown":
            return _shorten(text)
    return ""


def called_at() -> str:
    """The user's line that runs now, as `line_of` writes it: that of `spmd.check`, or of a kernel's call."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            return _shorten(f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})")
        frame = frame.f_back
    return ""


def _is_users(file: str) -> bool:
    return not file.startswith(_PACKAGE) and not _compat.in_jax(file)


def line_of_error(error: BaseException) -> str:
    """The user's line that an error comes from, as `line_of` writes it."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            found = _shorten(f"{code.co_filename}:{trace.tb_lineno} ({code.co_name})")
        trace = trace.tb_next
    return found


def is_transposed(eqn: Any, callers: Sequence[Any] = ()) -> bool:
    """Whether the equation belongs to a backward pass, which JAX wrote and not the user."""
    return any("transpose(" in str(e.source_info.name_stack) for e in (eqn, *callers))


def _shorten(text: str) -> str:
    """Drop the column and the directory we are in, which only make the line longer."""
    place, _, function = text.partition(" (")
    parts = place.rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        place = ":".join(parts[:2])
    here = os.getcwd() + os.sep
    if place.startswith(here):
        place = place[len(here) :]
    file, colon, line = place.rpartition(":")
    place = shown_file(file) + colon + line
    return f"{place} ({function}" if function else place


def called_in_jax(eqn: Any, function: str) -> bool:
    """Whether JAX's function of this name, called by the user's line, made the equation: `jnp.mean` divides a sum."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not _compat.in_jax(frame.file_name):
            return False
        if frame.function_name == function:
            return True
    return False
