"""Calls that fail because an argument is something else than the function takes: which one it is, and what it takes.

Nothing is looked at before a call fails, so right calls cost nothing, and what an annotation leaves out is not refused.
"""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from spmd._jaxprs.lines import is_users
from spmd._trees.leaves import kind_of
from spmd.errors import SpmdError, if_possible, is_int

P = ParamSpec("P")
R = TypeVar("R")

_FAILS = (TypeError, ValueError, AttributeError, LookupError, OverflowError)
_ENGLISH: dict[Any, str] = {
    int: "an int",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
    Callable: "a function",
    Mapping: "a dict",
    Sequence: "a sequence",
}
_KNOWN: dict[str, tuple[Callable[[Any], Any], str]] = {  # what JAX alone knows, and what it is
    "dtype": (jnp.dtype, "a type of numbers"),
    "preferred_element_type": (jnp.dtype, "a type of numbers"),
    "precision": (lambda it: jax.eval_shape(lambda x: jnp.dot(x, x, precision=it), 1.0), "a precision of jax.lax"),
}


def explained(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: where it fails and an argument is not what it takes, the error says so.

    What fails in the user's own code, or for another reason, stays as it is.
    """

    @functools.wraps(fn)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except SpmdError:
            raise
        except _FAILS as error:
            if wrong := _wrong(fn, args, kwargs, error):
                [(name, rule), *others] = wrong
                got = [told for _, told in others]
                raise SpmdError(rule, call=f"{fn.__name__}(...)", got=got, advice=_documented(fn, name)) from error
            raise

    return checked_call


@if_possible
def _wrong(fn: Any, args: Any, kwargs: Any, error: Exception) -> list[tuple[str, str]]:
    """The arguments that are not what a function takes, each with a sentence."""
    frames = [one.f_code.co_filename for one, _ in traceback.walk_tb(error.__traceback__)]
    if any(map(is_users, frames)):
        return []
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs).arguments
        hints = get_type_hints(fn)
    except (TypeError, NameError):  # Python says what is missing; a name that only annotations have
        return []
    asked = isinstance(error, AttributeError) and hasattr(jax.Array, error.name or "")  # for what arrays have
    found = []
    for name, value in bound.items():
        hint, given = hints.get(name, Any), _text_of(value)
        if asked and value is error.obj:
            found.append((name, f"{name} is an array, not {given}."))
        elif not _fits(value, hint):
            found.append((name, f"{name} is {_words(hint)}, not {given}."))
        elif name in _KNOWN and value is not None and not _is_known(name, value):
            found.append((name, f"{name} is {_KNOWN[name][1]}, not {given}."))
    return found


def _text_of(value: Any) -> str:
    """A value as a message shows it: never one of an array."""
    parts = value if isinstance(value, list | tuple) else [value]
    plain = all(isinstance(one, str | int | float) for one in parts)
    return reprlib.repr(value) if plain else kind_of(value)


def _is_known(name: str, value: Any) -> bool:
    try:
        return _KNOWN[name][0](value) is not None
    except (TypeError, ValueError):
        return False


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is what an annotation says, as far as it says something."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in parts)
    if origin is Literal:
        return isinstance(value, str | int | None) and value in parts
    number = isinstance(value, np.ndarray | jax.Array) and np.ndim(value) == 0
    if hint is float:
        return number or (isinstance(value, Real) and not isinstance(value, bool))
    if hint is int:
        return number or is_int(value)
    if hint is bool:
        return number or isinstance(value, bool | np.bool_)
    kind = origin or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):  # or a type variable
        return True
    if not isinstance(value, kind) or isinstance(value, str) or not issubclass(kind, Sequence):
        return isinstance(value, kind)
    return _elements_fit(value, kind, parts)


def _elements_fit(value: Any, kind: type, parts: tuple[Any, ...]) -> bool:
    if kind is tuple and parts and parts[-1] is not ...:
        return len(value) == len(parts) and all(map(_fits, value, parts))
    return not parts or all(_fits(one, parts[0]) for one in value)


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, parts)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    kind = origin or hint
    if kind is tuple and parts and parts[-1] is not ...:
        return f"a tuple of {len(parts)}"
    each = f", each {_words(parts[0])}" if kind is Sequence and parts and parts[0] is not Any else ""
    return _ENGLISH.get(kind, f"a {getattr(kind, '__name__', kind)}") + each


def _documented(fn: Any, name: str) -> str | None:
    """What a docstring says of an argument."""
    found = re.search(rf"^ +\*?{name}: (.+?)(?=^ +\*{{0,2}}\w+: |^$|\Z)", inspect.getdoc(fn) or "", re.M | re.S)
    return None if found is None else f"{name}: {' '.join(found[1].split())}"
