"""Rearranging the axes of an array on the device that has it: einops, for names that are not strings."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import einops

Groups = Sequence[Sequence[Hashable]]


def rearranged(x: Any, have: Groups, want: Groups, sizes: Mapping[Hashable, int] | None = None) -> Any:
    """`einops.rearrange` where names are anything hashable, such as factors and mesh axes.

    Args:
      x: An array.
      have: For each of its axes the names that it is composed of, the major one first. No names for an axis of size 1.
      want: The same for the result, with the same names.
      sizes: The sizes of names. In each composed axis one may be unknown.
    """
    have, want = tuple(map(tuple, have)), tuple(map(tuple, want))
    pattern, known = _pattern(have, want)
    return einops.rearrange(x, pattern, **{known[name]: size for name, size in (sizes or {}).items()})


@functools.lru_cache(maxsize=4096)
def _pattern(have: tuple[Any, ...], want: tuple[Any, ...]) -> tuple[str, dict[Hashable, str]]:
    """The pattern in names of its own, because einops takes Python names without underscores at their ends."""
    fresh = {name: f"a{i}" for i, name in enumerate(name for group in have for name in group)}
    sides = (" ".join(_axis([fresh[name] for name in group]) for group in side) for side in (have, want))
    return " -> ".join(sides), fresh


def _axis(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"
