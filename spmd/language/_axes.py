"""Mesh axes: how they are given, into how many blocks they divide, and what is said where the mesh lacks one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from spmd.errors import MeshError, did_you_mean, nearest


def axes_tuple(axes: str | Iterable[str] | None) -> tuple[str, ...]:
    """Mesh axes as a tuple, as an argument or an entry of a PartitionSpec gives them: one name, several, or None."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def axes_product(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Into how many blocks the axes divide."""
    total = 1
    for axis in axes:
        total *= sizes[axis]
    return total


def mesh_text(sizes: Mapping[str, int]) -> str:
    """A mesh in a message.

    >>> mesh_text({"dp": 2, "tp": 4})
    'mesh dp=2, tp=4'
    """
    return "mesh " + ", ".join(f"{axis}={size}" for axis, size in sizes.items()) if sizes else "a mesh without axes"


def axis_span(source: str, axis: str) -> tuple[int, int] | None:
    """Where a mesh axis stands in a string: behind a slash, or in a mark."""
    found = re.search(rf"(?:/|[:,]\s*)({re.escape(axis)})\b", source)
    return None if found is None else found.span(1)


def with_axis(source: str, axis: str, known: Iterable[str]) -> str | None:
    """A string with a known axis in place of an unknown one that is surely meant for it, in quotes; None if none is.

    >>> with_axis("b/pd d", "pd", ["dp", "tp"]), with_axis("e/ep", "ep", ["dp", "tp"])
    ('"b/dp d"', None)
    """
    near = nearest(axis, known)
    sure = near and (sorted(near) == sorted(axis) or difflib.SequenceMatcher(None, axis, near).ratio() > 0.7)
    text = sure and near and re.sub(rf"((?:/|[:,]\s*)){re.escape(axis)}\b", rf"\g<1>{near}", source)
    return None if not text or text == source or "\n" in text else f'"{text}"'


def check_axes(
    axes: Iterable[str], sizes: Mapping[str, int], *, call: str | None = None, source: str | None = None
) -> None:
    """Complain about a mesh axis that the mesh does not have.

    Args:
      axes: The axes that are asked for.
      sizes: Those of the mesh, with their sizes.
      call: The call, for the message.
      source: The string in it that names the axes.

    Raises:
      MeshError: With the axes of the mesh, in mesh order, and the nearest name.
    """
    for axis in axes:
        if axis not in sizes:
            rule = f"the mesh has no axis {axis!r}{did_you_mean(axis, sizes) or '.'}"
            span = None if source is None else axis_span(source, axis)
            fix = None if source is None else with_axis(source, axis, sizes)
            raise MeshError(rule, call=call, source=source, span=span, got=[mesh_text(sizes)], fix=fix)
