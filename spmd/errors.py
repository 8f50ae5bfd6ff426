"""The one family of errors, and the one way their texts are built.

A message has up to five parts, always in this order: the call with carets under the fault, the rule
that was broken (one sentence), what was got, the fix and advice. A line `fix:` is code to paste: a test pastes it
and compares the numbers. `advice:` is what cannot be pasted, or what only the author can choose. A message never
shows values of arrays.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from spmd._python.rooms import nearest, open_room

__all__ = [
    "CommunicationError",
    "Impossible",
    "LayoutError",
    "MeshError",
    "ModeError",
    "PlacementError",
    "ReplicationError",
    "SizeError",
    "SpmdError",
    "VmapWarning",
]
open_room(globals())

P = ParamSpec("P")
T = TypeVar("T")

_PASTED = 1000  # characters of a line, and of a fix: no longer one is shown
_WIDTH = 120  # a longer line wraps in a terminal, and its carets then point nowhere


class SpmdError(ValueError):
    """Base of all errors that `spmd` raises on purpose: a `Fault`, given whole or in its parts, and its text."""

    def __init__(
        self,
        rule: str | Fault,
        *,
        call: str | None = None,
        source: str | None = None,
        span: tuple[int, int] | None = None,
        got: Sequence[str] = (),
        fix: Fixes = None,
        advice: str | None = None,
    ) -> None:
        self.findings: Sequence[Fault] = ()  # all that a check of the whole program found
        self.fault = rule if isinstance(rule, Fault) else Fault(rule, call, source, span, got, fix, advice)
        super().__init__(str(self.fault))

    def __str__(self) -> str:
        # A traceback puts "spmd.errors.LayoutError: " before the first line, which would move it
        # away from its carets; such texts start on a line of their own.
        text = str(self.fault)
        return f"\n{text}" if self.fault.pointed else text


class LayoutError(SpmdError):
    """A layout string, a pattern, a mapping or a tree of layouts is wrong."""


class SizeError(SpmdError):
    """A dimension has a size that the layout does not allow, or two places disagree on one."""


class MeshError(SpmdError):
    """A mesh is missing, or it lacks an axis that a layout names."""


class CommunicationError(SpmdError):
    """The communication that a pattern asks for is not the one the function does."""


class ModeError(SpmdError):
    """Something cannot be done in this mode, or outside a kernel."""


class ReplicationError(SpmdError):
    """A value is different where its layout says equal, or equal where it says different.

    Attributes:
      program: The jaxpr that was checked, where the trace came so far: `spmd.check(...).source()` shows it.
    """

    program: Any = None

    def __reduce__(self) -> Any:
        """Another process gets the error without the program: a jaxpr cannot be pickled."""
        return type(self), self.args, {**self.__dict__, "program": None}


class Impossible(SpmdError):
    """A program does not run on a mesh, or with a choice: `build` raises it, and `spmd.search` counts it."""


class PlacementError(SpmdError):
    """An array does not lie where the layout says, and may not be moved."""


class VmapWarning(UserWarning):
    """`jax.vmap` of a kernel gathers the dimension that it maps, which was divided."""


@dataclass(frozen=True, slots=True)
class Fix:
    """A call that mends the fault, as a value: each verb makes it in its own shape, and it is text only in a message.

    Args:
      verb: What is called: a name in `spmd`.
      operands: The arrays as the message names them; one may be a call of its own.
      pattern: The pattern or the layout.
      keywords: Keywords by name, with their values.

    >>> print(Fix("all_gather", ("w",), "d/dp -> d", {"to": "invarying"}))
    spmd.all_gather(w, "d/dp -> d", to="invarying")
    >>> print(Fix("stencil.halo", (Fix("psum", pattern="d {U:dp} -> d"),), "d -> 1+d+1"))
    spmd.stencil.halo(spmd.psum(x, "d {U:dp} -> d"), "d -> 1+d+1")
    """

    verb: str
    operands: tuple[str | Fix, ...] = ("x",)
    pattern: str | None = None
    keywords: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        shown = [str(one) for one in self.operands]
        shown += [] if self.pattern is None else [f'"{self.pattern}"']
        shown += [f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in self.keywords.items()]
        return f"spmd.{self.verb}({', '.join(shown)})"


Fixes = str | Fix | Sequence[str | Fix] | None  # of several, each mends another fault


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, as facts: an error carries it, and its text is the message.

    Attributes:
      rule: The rule that was broken, one sentence.
      call: The call as the user wrote it, with `source` somewhere in it.
      source: The layout or pattern string; of several lines only the offending one is shown.
      span: Where in `source` the fault lies, as (start, end).
      got: What was got; several become bullets.
      fix: A call or code to paste; of several, each mends another fault.
      advice: What to do where no line can be pasted, or where only the author knows which.
      layers: The library's functions that made the call, innermost first, where the user's own line calls those.

    >>> print(Fault("An axis divides one dimension.", call='psum(x, "b/dp d/dp -> b")',
    ...             source="b/dp d/dp -> b", span=(7, 9), got=["x: f32[2,4]"], fix='"b/dp d -> b"'))
    psum(x, "b/dp d/dp -> b")
                    ^^
    An axis divides one dimension.
    got: x: f32[2,4]
    fix: "b/dp d -> b"
    """

    rule: str
    call: str | None = None
    source: str | None = None
    span: tuple[int, int] | None = None
    got: Sequence[str] = ()
    fix: Fixes = None
    advice: str | None = None
    layers: Sequence[str] = ()

    @property
    def pointed(self) -> bool:
        """Return whether carets stand below the first line."""
        inside = self.call is None or _position(self.call, self.source or "") is not None
        return self.source is not None and self.span is not None and inside

    @property
    def fixes(self) -> Sequence[str | Fix]:
        """Every fix, however many were given."""
        return (self.fix,) if isinstance(self.fix, str | Fix) else self.fix or ()

    def __str__(self) -> str:
        lines = [_cut(line) for line in (*_shown(self.call, self.source, self.span), self.rule)]
        got = [*map(_cut, self.got), *([f"called by {', called by '.join(self.layers)}"] if self.layers else [])]
        if len(got) == 1:
            lines.append(f"got: {got[0]}")
        elif got:
            lines += ["got:", *(f"- {line}" for line in got)]
        fixes = [str(one) for one in self.fixes]
        lines += ["fix: " + one.replace("\n", "\n     ") for one in fixes if len(one) <= _PASTED]
        if self.advice is not None:
            lines.append("advice: " + _cut(self.advice).replace("\n", "\n        "))
        return "\n".join(lines)


def if_possible(make: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate what makes a fix or an advice: if it fails, it gives None, and the message is told without it."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return _make(make, *args, **kwargs)
        except Exception:
            return None

    return made


def _make(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return make(*args, **kwargs)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'tp'?"` for the nearest known name, or an empty string.

    >>> did_you_mean("modl", ["data", "model"])
    "; did you mean 'model'?"
    >>> did_you_mean("x", ["data", "model"])
    ''
    """
    near = nearest(name, known)
    return f"; did you mean '{near}'?" if near is not None else ""


def not_one_of(what: str, value: object, known: Iterable[str], more: str = "") -> str:
    """The rule for a keyword that has none of its values; an array is never shown.

    Args:
      what: The keyword.
      value: What was given.
      known: The values that it can have.
      more: What else it can be.

    >>> not_one_of("to", "varing", ("varying", "invarying"))
    "to is 'varying' or 'invarying', not 'varing'; did you mean 'varying'?"
    >>> not_one_of("over", 3, ("rows", "columns", "both"), "a number")
    "over is 'rows', 'columns', 'both' or a number, not 3."
    """
    *rest, last = [*map(repr, known), *([more] if more else [])]
    plain = value is None or isinstance(value, str | int | float)
    given = repr(value) if plain else f"of type {type(value).__name__}"
    hint = did_you_mean(value, known) if isinstance(value, str) else ""
    return f"{what} is {', '.join(rest)} or {last}, not {given}{hint or '.'}"


def check_one_of(
    what: str,
    value: object,
    known: Collection[str],
    call: str | None = None,
    error: type[SpmdError] = LayoutError,
    fix: str | None = None,
) -> None:
    """Refuse a keyword that has none of its values."""
    if value not in known:
        raise error(not_one_of(what, value, known), call=call, fix=fix)


def is_int(value: Any, least: int | None = None) -> bool:
    """Return whether an argument is an integer, of Python or of NumPy, and at least `least`. True and False are not
    numbers.

    >>> is_int(3), is_int(0, 1), is_int(True), is_int(2.0)
    (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and (least is None or int(value) >= least)


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line that called this package, which is neither ours nor JAX's."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("spmd", "jax"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level + 1)


def _shown(call: str | None, source: str | None, span: tuple[int, int] | None) -> list[str]:
    """The call, and a line of carets under `span` of the source in it."""
    if source is None:
        return [_clean(call)] if call else []
    lines: list[str] = []
    at = _position(call, source) if call is not None else None
    if call is None or at is None:
        if call is not None:
            lines.append(_clean(call))
        call, at = f'"{source}"', 1
    if span is None:
        return [*lines, _clean(" ".join(call.split()) if "\n" in call else call)]
    start = min(max(span[0], 0), len(source))
    end = min(max(span[1], start), len(source))
    if "\n" in source:
        text, start, end = _one_line(call, at, source, start, end)
    else:
        text, start, end = call, start + at, end + at
    text, start, end = _window(text, start, end)
    return [*lines, _clean(text), " " * start + "^" * max(1, end - start)]


def _position(call: str, source: str) -> int | None:
    """Return where `source` stands in `call`; in quotes if possible (a short source is also in the call's name)."""
    for text in (f'"{source}"', f"'{source}'"):
        if text in call:
            return call.index(text) + 1
    return call.rindex(source) if source in call else None


def _one_line(call: str, at: int, source: str, start: int, end: int) -> tuple[str, int, int]:
    """The offending line of a source of several lines, and where the span lies on it."""
    first = source.rfind("\n", 0, start) + 1
    last = source.find("\n", start)
    last = len(source) if last < 0 else last
    line = source[first:last].rstrip()
    indent = len(line) - len(line.lstrip())
    head = f"{call[:at]}...{call[at + len(source) :]}, line {source.count(chr(10), 0, start) + 1}: "
    head = " ".join(head.split()) + " "
    shift = len(head) - first - indent
    return head + line.lstrip(), max(start + shift, len(head)), min(end, first + len(line)) + shift


def _window(text: str, start: int, end: int) -> tuple[str, int, int]:
    """Cut a line that is too long down to the part around the span."""
    if len(text) <= _WIDTH:
        return text, start, end
    end = min(end, start + _WIDTH // 2)
    left = max(0, start - _WIDTH // 3)
    right = min(len(text), left + _WIDTH)
    head, tail = "..." if left else "", "..." if right < len(text) else ""
    return head + text[left:right] + tail, start - left + len(head), end - left + len(head)


_LONG = re.compile(r"\S{201,}|\"[^\"\n]{201,}\"|(?<!\w)'[^'\n]{201,}'(?!\w)")


def _cut(text: str) -> str:
    """Sentences in which nothing is quoted that is longer than 200 characters, and none of them is endless."""
    lines = _LONG.sub(lambda found: f"{found[0][:100]}...{found[0][-30:]}", text).split("\n")
    return "\n".join(line if len(line) <= _PASTED else f"{line[:_PASTED]}..." for line in lines)


def _clean(text: str) -> str:
    """Replace what a terminal cannot show, one character for one, so that carets stay in place."""
    return "".join(one if one.isprintable() else " " if one.isspace() else "?" for one in text)
