"""What a call says: its resolved pattern and its keywords. An int is a size; a str, tuple or None is a mesh axis."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from spmd._jaxprs.facts import CallName
from spmd._trees.leaves import foreign_kind, kind_of, not_int
from spmd.errors import LayoutError, SizeError, did_you_mean, is_int
from spmd.language import AxisMapping, Dim, Pattern, axes_code


def _axis_keyword(value: Any) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, tuple) and all(isinstance(v, str) for v in value))
    )


def split_keywords(text: str, pattern: Pattern, binds: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """The sizes and the mesh axes among the keywords of a call. Anything else is an error."""
    sizes: dict[str, int] = {}
    axes: dict[str, Any] = {}
    for key, value in binds.items():
        if is_int(value):
            known, what = pattern.names, "dimension"
            sizes[key] = int(value)
        elif _axis_keyword(value):
            known, what = pattern.axis_names, "mesh axis"
            axes[key] = value
        else:
            rule = (
                f"the keyword {key} binds a size (an int) or a mesh axis (a str, a tuple of str, or None), "
                f"not {kind_of(value)}."
            )
            raise LayoutError(rule, call=text, source=pattern.source)
        if key not in known:
            rule = (
                f"the keyword {key}={value!r} binds a {what} that the pattern does not "
                f"have{did_you_mean(key, known) or '.'}"
            )
            got = [f"{what} names in the pattern: {', '.join(known) or 'none'}"]
            raise LayoutError(rule, call=text, source=pattern.source, got=got)
        if key in sizes and (fault := not_int(f"the size of {key}", value, 1)):
            raise SizeError(fault, call=text, source=pattern.source)
    return sizes, axes


def keyword_for(text: str, said: Collection[str], read: Sequence[str], have: Sequence[str]) -> str | None:
    """The keyword of a dimension whose array is divided otherwise than the keyword says.

    Args:
      text: The dimension as the string has it.
      said: The axes of the string that keywords bind.
      read: The axes that divide it by these keywords.
      have: Those that divide the array.

    >>> keyword_for("f/tp", ("tp",), (), ("model",))
    'tp="model"'
    """
    names = [name for name in axes_in(text) if name in said]
    if not names or not have or tuple(read) == tuple(have):
        return None
    [first, *others] = names
    axes = axes_code(have)
    return f"{first}={axes}" if not others else " and ".join(f"{name}=" for name in names)


def works_along(dim: Dim, kept: AbstractSet[str] | None) -> bool:
    """Return whether an operation works along a dimension, divided or not: one in brackets, or one that its result
    lacks.

    Args:
      dim: The dimension.
      kept: The names on the right side, if the pattern has an arrow.
    """
    return dim.bracket or (kept is not None and bool(dim.names) and kept.isdisjoint(dim.names))


def axes_in(text: str) -> list[str]:
    """The axes that a dimension, or a mark, names in a string: not the 1 of `d/1`."""
    return re.findall(r"[/:,]\s*([A-Za-z_]\w*)", text)


def as_array(value: Any, label: str, fail: Callable[[str], NoReturn]) -> jax.Array:
    """A value as an array. If JAX cannot hold it, `fail` says so.

    Args:
      value: What the user gave.
      label: How messages call it.
      fail: Raises an error with the rule that it is given.
    """
    if isinstance(value, jax.Array):
        return value
    if foreign := foreign_kind(value):
        return fail(f"{label} is {foreign}.")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        return fail(f"{label} is {kind_of(value)}, not an array.")


def check_array(value: Any, label: str, fail: Callable[[str], NoReturn], dtype: Any = None) -> None:
    """Check a value as `as_array` does, where other code makes it an array, of this dtype if one is given."""
    if isinstance(value, jax.Array) or (isinstance(value, int) and dtype is not None):
        return
    if foreign := foreign_kind(value):
        fail(f"{label} is {foreign}.")
    try:
        jax.typeof(value)
    except TypeError:
        fail(f"{label} is {kind_of(value)}, not an array.")
    except ValueError:
        fail(f"{label} is masked, and JAX does not take a mask.")


def misfit(call: str) -> Callable[[str], NoReturn]:
    """The `fail` for `as_array` if the caller has no pattern."""

    def fail(rule: str) -> NoReturn:
        raise LayoutError(rule, call=call)

    return fail


def operand_names(name: str, arrays: int) -> tuple[str, ...]:
    """Return how messages call the arrays of a call."""
    return ("key",) if name.startswith("random.") else tuple("xyzuvw"[i % 6] * (1 + i // 6) for i in range(arrays))


def call_text(name: str, pattern: Any, arrays: int = 1) -> CallName:
    """Return how a call is shown in messages and in `explain`."""
    shown = {0: "", 1: "x, ", 2: "x, y, "}.get(arrays, "x, ..., ")
    if name.startswith("random."):
        shown = "key, "
    return CallName(f'{name}({shown}"{pattern}")', name, str(pattern))


@functools.lru_cache(maxsize=4096)
def resolve(
    pattern: Pattern, source: str, renames: tuple[tuple[str, Any], ...], mapping: AxisMapping | None
) -> Pattern:
    """The pattern of a call with its axes renamed and its bare names placed."""
    del source  # in the key, because equal patterns may be written differently, and carets point into the text
    return (pattern.bind(**dict(renames)) if renames else pattern).resolve(mapping)
