"""Binds the names of a signature to global sizes, and reports all that does not fit at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmd.errors import LayoutError, SizeError
from spmd.language import Layout, NotProduct, Size, Unequal, WrongRank, another_name, as_fault, bind


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
    unspaced = [isinstance(one, WrongRank) and one.advice for one in bound.faults]
    fix, advice = spaced(source) if all(unspaced) else None, fault.advice or another_name(twice)
    if advice is None and local and any(isinstance(one, NotProduct) for one in bound.faults):
        advice = "what the body reshapes is each device's own block: gather what is divided first"
    if advice is None and any(layout.is_scalar and shape == (2,) for _, shape, layout in leaves):
        advice = "a key of jax.random.PRNGKey has shape (2,), and that of jax.random.key(seed) is a scalar"
    raise error(replace(fault, span=span, fix=fix, advice=advice))


def spaced(source: str | None) -> str | None:
    """A string in NumPy's manner, `bd,df->bf`, with a space between its names, in quotes; None for another one.

    >>> spaced("bd,df->bf")
    '"b d,d f->b f"'
    """
    if source is None or not re.fullmatch(r"[A-Za-z\s,]+->[A-Za-z\s,]+", source):
        return None
    return f'"{re.sub("[A-Za-z]+", lambda name: " ".join(name[0]), source)}"'
