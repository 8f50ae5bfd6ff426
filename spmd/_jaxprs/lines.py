"""Where in the user's own code an equation was written."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import einops
import jax.extend.source_info_util as source_info_util

from spmd import _compat
from spmd._jaxprs.facts import DecisionName
from spmd._jaxprs.walker import held, opened
from spmd._text import shown_file

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_EINOPS = os.path.dirname(os.path.abspath(einops.__file__)) + os.sep
_CHECK = os.path.join(_PACKAGE, "checker", "_api.py")

# JAX skips its own frames when it names a line; ours are skipped in the same way, in JAX's messages too.
source_info_util.register_exclusion(_PACKAGE)
source_info_util.register_exclusion(_EINOPS)

# Nobody looks for their own lines in the standard library, or in packages that were installed.
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))

_CALLED = ", called at "


class LineName(str):
    """A line as people read it, `file:line (function)`.

    Attributes:
      file: The file as Python knows it; "" where there is none.
      number: The number of the line, from 1.
    """

    file: str
    number: int

    def __new__(cls, text: str = "", file: str = "", number: int = 0) -> Self:
        self = super().__new__(cls, text)
        self.file, self.number = file, number
        return self


@dataclass(frozen=True)
class Frame:
    """One call of the user's among those that made an equation.

    Attributes:
      code: What was running.
      span: The line and the column where the expression begins, and where it ends.
      differentiates: Whether it made JAX take a gradient, inside of which the equation is.
    """

    code: Any
    span: tuple[int, int, int, int]
    differentiates: bool = field(default=False, compare=False)


def frames_of(eqn: Any) -> list[Frame]:
    """The calls of the user's that made an equation, innermost first, as far as `spmd.check`."""
    found = []
    gradient = False
    for code, span in _compat.call_stack(eqn):
        if code.co_filename == _CHECK:
            break
        gradient = gradient or _compat.differentiates(code)
        if is_users(code.co_filename):
            found.append(Frame(code, span, gradient))
            gradient = False
    return found


def line_of_body(eqn: Any) -> LineName:
    """The line where the function begins that a `shard_map` maps, as `line_of` writes it."""
    made_of = getattr(eqn.params["jaxpr"], "debug_info", None)
    file = getattr(made_of, "func_filename", None)  # None too for what Python has no source of (`functools.partial`)
    if made_of is None or not file or not is_users(file):
        return line_of(eqn)
    number = made_of.func_lineno
    return LineName(f"{short_file(file)}:{number} ({made_of.func_name})", file, number)


def is_ours(eqn: Any) -> bool:
    """Return whether this package called the function of JAX's or einops' that made an equation, and not the user.
    What `spmd.check` calls is what the user gave to it."""
    files = (code.co_filename for code, _ in _compat.call_stack(eqn))
    own = (file for file in files if not (_compat.in_jax(file) or file.startswith(_EINOPS)))
    return next((file.startswith(_PACKAGE) and file != _CHECK for file in own), False)


def call_site(eqn: Any, callers: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """The equation of the user's call that an equation is a part of, and those around it; None inside of a call of this
    package.

    A function of JAX's such as `jnp.where` is traced once and kept, so its equations do not know who called it. Its
    call does. What the functions of a user do that this package calls is the user's, and so is what `spmd.cond` decides
    by.
    """
    at, around = outside_jax(eqn, callers)
    decides = any(isinstance(name, DecisionName) for _, name in _compat.name_stack(at))
    return (at, around) if decides or not is_ours(at) else None


def outside_jax(eqn: Any, callers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The equation of the call that an equation inside a function of JAX's is a part of, and those around it."""
    at, around = eqn, callers
    while around and all(_compat.in_jax(_file_of(one.jaxpr)) for one in held(around[-1])):
        at, around = around[-1], around[:-1]
    return at, around


def _file_of(jaxpr: Any) -> str:
    """The file of the function that a jaxpr is the trace of."""
    return getattr(opened(jaxpr)[0].debug_info, "func_filename", None) or ""


def gradient_line(eqn: Any) -> LineName:
    """The user's line that took the gradient which made an equation; its own line where nobody knows."""
    for frame in frames_of(eqn):
        if frame.differentiates:
            file, number = frame.code.co_filename, frame.span[0]
            return LineName(f"{short_file(file)}:{number} ({frame.code.co_qualname})", file, number)
    return line_of(eqn)


@functools.cache
def is_users(file: str) -> bool:
    """Return whether the user wrote a file: not we, nor JAX, and it was not installed as a package."""
    installed = file.startswith((*_INSTALLED, "<frozen ")) or "site-packages" in file or "dist-packages" in file
    return is_outside(file) and not installed


def is_of_library(file: str) -> bool:
    """Return whether a file is part of JAX, or of another package that was installed; not of this one."""
    return not is_users(file) and not file.startswith(_PACKAGE)


def line_of(eqn: Any, callers: Sequence[Any] = ()) -> LineName:
    """`file:line (function)` of the user's line, or "" if no frame is theirs.

    Bodies of JAX's own cached jits (`jnp.where`) were traced once and name no user line, or a wrong
    one; then the line of the nearest call around them is meant.
    """
    for candidate in (eqn, *reversed(callers)):
        text = source_info_util.summarize(candidate.source_info)
        if text and text != "unknown":
            return _with_the_users(_shorten(text), candidate)
    return LineName()


def _with_the_users(line: LineName, eqn: Any) -> LineName:
    """A line of a package that was installed, such as optax, and that of the user's which called it."""
    own = None if is_users(line.file) else next(iter(frames_of(eqn)), None)
    if own is None:
        return line
    file, number = own.code.co_filename, own.span[0]
    return LineName(f"{line}{_CALLED}{short_file(file)}:{number} ({own.code.co_qualname})", file, number)


def called_at() -> LineName:
    """The user's line that runs now, as `line_of` writes it: that of `spmd.check`, or of a kernel's call."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_outside(code.co_filename):
            return _shorten(f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})")
        frame = frame.f_back
    return LineName()


def is_outside(file: str) -> bool:
    """Return whether a file is neither ours nor JAX's."""
    return not file.startswith(_PACKAGE) and not _compat.in_jax(file)


def line_of_error(error: BaseException) -> LineName:
    """The user's line that an error comes from, or the error behind it, as `line_of` writes it."""
    found, outside, trace = LineName(), LineName(), error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_outside(code.co_filename):
            outside = _shorten(f"{code.co_filename}:{trace.tb_lineno} ({code.co_name})")
            found = outside if is_users(code.co_filename) else found
        trace = trace.tb_next
    behind = error.__cause__ or error.__context__
    return found or (line_of_error(behind) if behind else found) or outside


def is_transposed(eqn: Any, callers: Sequence[Any] = ()) -> bool:
    """Return whether the equation belongs to a backward pass, which JAX wrote and not the user."""
    return any(_compat.is_backward(_compat.name_stack(e)) for e in (eqn, *callers))


def is_differentiated(eqn: Any) -> bool:
    """Return whether the equation belongs to the forward pass of a derivative."""
    return "jvp(" in str(eqn.source_info.name_stack)


def _shorten(text: str) -> LineName:
    """Drop the column and the current directory, which only make the line longer."""
    place, _, function = text.partition(" (")
    parts = place.rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        place = ":".join(parts[:2])
    file, colon, line = place.rpartition(":")
    place = short_file(file) + colon + line
    return LineName(f"{place} ({function}" if function else place, file, int(line) if line.isdigit() else 0)


def short_file(file: str) -> str:
    """The name of a file as people read it: without the current directory or that of installed packages, and `In[3]`
    for a cell of a notebook."""
    for folder in (*_INSTALLED[::-1], os.getcwd() + os.sep):  # the standard library lies around the packages
        file = file.removeprefix(folder)
    return shown_file(file)


def short_line(line: str) -> str:
    """`file.py:12` of a line as `line_of` gives it: the user's own, where a package was called there."""
    return os.path.basename(line.rpartition(_CALLED)[2].partition(" (")[0])
