"""Where a program communicates, and how one of these places is changed while JAX traces it.

A place is a call in the program's own text: of a collective of `jax.lax`, or of one of our verbs and operations. What
a verb sends is found by the names in `jax.lax` that it calls. If a place is changed, all collectives of one kind that
this call makes are changed, each time that the program comes by. A changed verb is taken apart: it leaves no marker,
no name and no primitive of its own, because the user would have written its work by hand. The gradient is then JAX's.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.extend.source_info_util as source_info_util
from jax import lax

import spmd
from spmd import _compat
from spmd.comm import _call, _lax, _marks
from spmd.comm.planner import _run
from tests.mutants.changes import CHANGES, COLLECTIVES, Call, possible, telling

__all__ = ["Mutant", "Place", "changed", "mutants_of"]

MACHINERY = [str(Path(__file__).with_name(name)) for name in ("changes.py", "sites.py")]
for path in MACHINERY:  # no line of theirs is a line of the program
    source_info_util.register_exclusion(path)

ROOT = str(Path(__file__).parents[2])
CORE = str(Path(spmd.__file__).parent)
LAYERS = (f"{CORE}/nn/", f"{CORE}/parallel/")  # written as a user would write them
# What these send is the library's own work: gradients of custom rules, a kernel's boundary.
OWN_WORK = (f"{CORE}/kernels/", f"{CORE}/ops/_gradients.py")
PROGRAMS = (f"{ROOT}/tests/", f"{ROOT}/examples/", *LAYERS)


@dataclass(frozen=True, order=True)
class Place:
    """A call in the text of a program: the file, the line, the function, and which of the line's calls it is."""

    file: str
    line: int
    function: str
    instruction: int

    def __str__(self) -> str:
        return f"{Path(self.file).relative_to(ROOT)}:{self.line} ({self.function})"


@dataclass(frozen=True, order=True)
class Mutant:
    """One collective of one place, and how it is changed."""

    place: Place
    collective: str
    change: str

    def __str__(self) -> str:
        return f"{self.place} {self.collective}: {self.change}"

    @property
    def name(self) -> str:
        """The same without the line, which moves."""
        at = f"{Path(self.place.file).relative_to(ROOT)} ({self.place.function})"
        return f"{at} {self.collective}: {self.change}"

    @classmethod
    def named(cls, name: str) -> Mutant:
        """A mutant of this name, at no line."""
        at, _, rest = name.rpartition(") ")
        file, _, function = at.partition(" (")
        collective, _, change = rest.partition(": ")
        return cls(Place(f"{ROOT}/{file}", 0, function, 0), collective, change)


# jax's caches of traces go by this, so that no change is seen by a program that was traced before
_current: Any = jax.make_user_context(None)


def place() -> Place | None:
    """The innermost call in the program's own text that leads here. None for the library's own work."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(CORE) and not file.startswith(LAYERS):
            if file.startswith(OWN_WORK) or "transpose" in code.co_name:
                return None
        elif file.startswith(PROGRAMS) and file not in MACHINERY:
            name = re.sub("^<lambda>", "_", code.co_qualname)  # in the tables a function without a name is _
            return Place(file, frame.f_lineno, name, frame.f_lasti)
        frame = frame.f_back
    return None


@contextlib.contextmanager
def _replaced(instead: Callable[[Place, Call], Any]) -> Iterator[None]:
    """Collectives of known places go through `instead`."""

    def replacement(name: str) -> Callable[..., Any]:
        @functools.wraps(COLLECTIVES[name])
        def collective(*args: Any, **keywords: Any) -> Any:
            at = place()
            if at is None:
                return COLLECTIVES[name](*args, **keywords)
            return instead(at, Call.of(name, args, keywords))

        return collective

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(lax, name, replacement(name)))
        for module, name, fn in traced_once():
            stack.enter_context(mock.patch.object(module, name, fn))
        yield


def traced_once() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The library's functions under `_lax.once`, without it: JAX keeps their traces, whoever calls them next."""
    modules = [module for name, module in sys.modules.items() if name.startswith("spmd.")]
    named = [(module, name, value) for module in modules for name, value in vars(module).items()]
    return [(module, name, value.__wrapped__) for module, name, value in named if _code(value) is _code(_lax.psum)]


def _code(value: Any) -> Any:
    """The code of a function; functions under one decorator share that of its closure."""
    return getattr(value, "__code__", None)


def mutants_of(trace: Callable[[], Any]) -> list[Mutant]:
    """All changes that a program has places for; `trace` traces it."""
    found: dict[Mutant, None] = {}

    def note(at: Place, call: Call) -> Any:
        found.update(dict.fromkeys(Mutant(at, call.name, change) for change in telling(call)))
        return call.again()

    with _current(object()), _replaced(note):
        trace()
    return list(found)


@contextlib.contextmanager
def changed(mutant: Mutant) -> Iterator[list[Call]]:
    """What is traced inside has this change. The list that it gives holds the calls that were changed."""
    met: list[Call] = []
    make, _ = CHANGES[mutant.collective][mutant.change]

    def instead(at: Place, call: Call) -> Any:
        if at == mutant.place and call.name in ("pmax", "pmin") and call.name != mutant.collective:
            return call.again(x=lax.stop_gradient(call.given["x"]))  # as by hand: it has no derivative
        if at != mutant.place or call.name != mutant.collective or mutant.change not in possible(call):
            return call.again()
        met.append(call)
        return make(call)

    with _current(object()), _replaced(instead), _opened(mutant):
        yield met


# --- a verb taken apart ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(mutant: Mutant) -> Iterator[None]:
    """The mutant's verb leaves nothing behind that says what it is."""
    by_hand = lambda: place() == mutant.place

    def unless(original: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **keywords: (plain if by_hand() else original)(*args, **keywords)

    first = lambda x, *_, **__: x
    with contextlib.ExitStack() as stack:
        enter = lambda where, name, fn: stack.enter_context(mock.patch.object(where, name, fn))
        for module in [m for name, m in sys.modules.items() if name.startswith("spmd.")]:
            if getattr(module, "mark", None) is _marks.mark:
                enter(module, "mark", unless(_marks.mark, first))
        enter(_marks.layout_p, "bind", unless(_marks.layout_p.bind, first))
        enter(_call.Call, "scope", unless(_call.Call.scope, lambda self: contextlib.nullcontext()))
        enter(_lax, "slice_block", unless(_lax.slice_block, _plain_block))
        enter(_run, "_bound", unless(_run._bound, _run._plain))
        enter(jax.custom_jvp, "__call__", unless(jax.custom_jvp.__call__, lambda self, *args: self.fun(*args)))
        enter(_compat, "of_one", unless(_compat.of_one, lambda axes: False))  # as raw code, whatever the sizes of axes
        if mutant.change == "dropped":  # what was made equal is so no longer
            enter(_lax, "to_invarying", unless(_lax.to_invarying, first))
        yield


def _plain_block(x: Any, axis: str, dim: int, parts: int) -> Any:
    """`_lax.slice_block` as a user would write it."""
    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(_compat.pvary(x, (axis,)), lax.axis_index(axis) * size, size, dim)
