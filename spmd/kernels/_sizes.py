"""Binds the names of a signature to global sizes, and reports all that does not fit at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmd.errors import LayoutError, SizeError
from spmd.language import Layout, Size, Unequal, WrongRank, another_name, as_fault, bind


def bind_sizes(
    text: str,
    source: str | None,
    leaves: Sequence[tuple[str, tuple[int, ...], Layout]],
    mesh_sizes: Mapping[str, int],
    *,
    local: bool = False,
    known: Mapping[str, Size] | None = None,
) -> dict[str, Size]:
    """Global sizes of all names, each with the argument that bound it.

    Args:
      text: The kernel, for messages.
      source: Its pattern, into which the spans of the layouts point; None where there is none.
      leaves: `(path, shape, layout)` of each array.
      mesh_sizes: Sizes of the mesh axes.
      local: Whether the shapes are those of shards.
      known: Names bound before.

    Raises:
      SizeError: With all contradictions and all indivisible dimensions.
      LayoutError: If a rank does not fit.
    """
    what = "results" if local else "arguments"
    bound = bind(leaves, mesh_sizes, known=known, local=local)
    if not bound.faults:
        return bound.sizes
    fault = as_fault(bound.faults, mesh_sizes, f"the {what} do not fit the signature.", call=text, source=source)
    start, end = fault.span or (0, 0)
    span = (start, end) if 0 <= start < end <= len(source or "") else None
    twice = [one.name for one in bound.faults if isinstance(one, Unequal) and not one.blocks]
    error = LayoutError if any(isinstance(one, WrongRank) for one in bound.faults) else SizeError
    raise error(replace(fault, span=span, advice=fault.advice or another_name(twice)))
