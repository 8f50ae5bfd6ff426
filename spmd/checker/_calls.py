"""The user's call that made an equation: nobody can write a collective into a function that is not theirs."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from spmd import _compat
from spmd._jaxprs.lines import is_of_library
from spmd._jaxprs.walker import Equation, Variable, opened

_ROOMS = ("spmd.fft", "spmd.stencil", "spmd.linalg", "spmd", "spmd.parallel", "spmd.nn")
# Functions of JAX whose like has another name here.
_OTHERWISE = {
    "pad": "spmd.stencil.halo",
    "logsumexp": 'spmd.reduce(..., "logsumexp")',
    "tree_norm": "spmd.parallel.global_norm",
}


class Call(NamedTuple):
    """One expression of the user's, and the function of a library that it calls.

    Attributes:
      expression: What was running, and where the expression begins and ends there; None where nobody knows.
      body: The jaxpr of the function, if JAX traced it alone. It may have been traced at another call.
      names: The functions that were running inside of it, outermost first.
    """

    expression: Any
    body: Any
    names: tuple[str, ...]

    def is_of(self, other: Call) -> bool:
        """Tell whether both are the same call."""
        same = self.expression is not None and self.expression == other.expression
        return same or (self.body is not None and self.body is other.body)

    @property
    def namesake(self) -> str | None:
        """The public function of this package with the name of one that was running, or that is like the call."""
        like = (f"{room}.{name}" for name, room in itertools.product(self.names, _ROOMS) if name in _public(room))
        return next((_OTHERWISE[name] for name in self.names[:1] if name in _OTHERWISE), next(like, None))

    @property
    def operand(self) -> str | None:
        """The array that it is called on, as the user wrote it: `x**2` of `jnp.sum(x**2, 1)` and of `(x**2).sum(1)`."""
        if self.expression is None:
            return None
        code, (first, start, last, end) = self.expression
        lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
        if len(lines) != 1:
            return None
        text = lines[0][start:end].decode()
        try:
            called = ast.parse(text, mode="eval").body
        except SyntaxError:
            return None
        if not isinstance(called, ast.Call):
            return None
        of = called.func.value if isinstance(called.func, ast.Attribute) else None
        owner = of
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        function = of is None or (_is_module(owner.id, code) if isinstance(owner, ast.Name) else False)
        node = (called.args or [None])[0] if function else None if function is None else of
        return None if node is None else ast.get_source_segment(text, node)


@functools.cache
def _public(room: str) -> Sequence[str]:
    """The public names of a room. The package loads a room when it is asked for."""
    return functools.reduce(getattr, room.split(".")[1:], sys.modules["spmd"]).__all__


def _is_module(name: str, code: Any) -> bool | None:
    """Return whether a name is a module and not an array where this code runs; None where nobody knows. A cell of a
    notebook has its imports in another one."""
    if name in _imported(code.co_filename):
        return True
    if name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return False
    return True if isinstance(vars(sys.modules["__main__"]).get(name), types.ModuleType) else None


@functools.lru_cache(maxsize=64)
def _imported(file: str) -> frozenset[str]:
    """The names that a file imports."""
    found = (node for node in ast.walk(ast.parse("".join(linecache.getlines(file)))) if hasattr(node, "names"))
    names = (one for node in found if not isinstance(node, ast.Global | ast.Nonlocal) for one in node.names)
    return frozenset(one.asname or one.name.partition(".")[0] for one in names)


def call_around(eqn: Equation, callers: Sequence[Equation]) -> Call:
    """Return the user's call that an equation is a part of."""
    inside = list(itertools.takewhile(lambda one: one.primitive.name != "shard_map", reversed(callers)))
    library = next(filter(_runs_library, reversed(inside)), None)
    stack = _compat.call_stack(eqn if library is None else library)
    running = itertools.takewhile(lambda one: is_of_library(one[0].co_filename), stack)
    names = [code.co_qualname.partition(".")[0] for code, _ in running]
    expression = stack[len(names)] if len(names) < len(stack) else None
    if library is None:
        return Call(expression, None, tuple(names[::-1]))
    return Call(expression, opened(library.params["jaxpr"])[0], (*names[::-1], library.params.get("name", "")))


def given_to(walk: Any, atom: Variable, call: Call) -> Iterator[Any]:
    """The variables that a call was given, of those that a value of it is made of."""
    outside = lambda *where: not call.is_of(call_around(*where))
    for var in walk.history.behind(atom, outside):
        made = walk.history.producer(var)
        if not walk.history.operands(var) if made is None else outside(*made):
            yield var


def _runs_library(eqn: Equation) -> bool:
    """Return whether an equation calls a function of a library that was traced alone."""
    jaxpr = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
    file = None if jaxpr is None else getattr(opened(jaxpr)[0].debug_info, "func_filename", None)
    return file is not None and is_of_library(file)
