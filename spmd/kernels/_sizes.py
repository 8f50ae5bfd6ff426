"""Binding the names of a signature to global sizes, and every complaint about shapes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spmd.errors import LayoutError, SizeError, SpmdError
from spmd.language import Dim, Layout, spaced

__all__ = ["bind_sizes"]

Bound = dict[str, tuple[int, str]]


def bind_sizes(
    text: str,
    source: str | None,
    leaves: Sequence[tuple[str, tuple[int, ...], Layout]],
    mesh_sizes: dict[str, int],
    *,
    local: bool = False,
    known: Bound | None = None,
) -> Bound:
    """Global sizes of all names, each with the argument that bound it.

    Args:
      text: The kernel, for messages.
      source: Its pattern, into which the spans of the layouts point; None where there is none.
      leaves: `(path, shape, layout)` of each array.
      mesh_sizes: Sizes of the mesh axes.
      local: Whether the shapes are those of shards.
      known: Names bound before; extended in place.

    Raises:
      SizeError: With all contradictions and all indivisible dimensions.
      LayoutError: If a rank does not fit.
    """
    bound: Bound = {} if known is None else known
    faults: list[tuple[type[SpmdError], Dim | None, str]] = []
    spread = {a: n if local else 1 for a, n in mesh_sizes.items()}
    composites: list[tuple[str, int, Dim]] = []
    twice: list[str] = []
    for path, shape, layout in leaves:
        for i, (dim, size) in enumerate(zip(_dims(path, shape, layout, faults), shape, strict=True)):
            if dim is None:
                continue
            whole = (size - sum(dim.margin)) * math.prod(spread[a] for a in dim.axes)
            where = f"{path}, dimension {i}"
            _divisible(where, dim, whole, mesh_sizes, faults)
            if len(dim.atoms) != 1:
                composites.append((where, whole, dim))
            else:
                fits = _bind(bound, dim.atoms[0], whole, where, dim, faults, mesh_sizes if local else {})
                twice += [] if fits else [dim.atoms[0].name]
    for where, whole, dim in composites:
        _bind_composite(bound, dim, whole, where, mesh_sizes, faults)
    if faults:
        _raise(text, source, faults, mesh_sizes, twice)
    return bound


def _dims(path: str, shape: tuple[int, ...], layout: Layout, faults: list[Any]) -> list[Dim | None]:
    """One entry per dimension of the array, None where `...` stands for it; all None where the rank is wrong."""
    fixed = sum(not d.ellipsis for d in layout.dims)
    extra = len(shape) - fixed
    if extra < 0 or (extra and not layout.has_ellipsis):
        least = "at least " if layout.has_ellipsis else ""
        said = spaced(layout, len(shape))
        hint = f'; names are separated by spaces: "{said}"' if said else ""
        rank = f'"{layout.short}" has {least}{fixed} dimension{"s" * (fixed != 1)}{hint}'
        faults.append((LayoutError, layout.dims[0] if layout.dims else None, f"{path} of shape {shape}: {rank}"))
        return [None] * len(shape)
    dims: list[Dim | None] = []
    for dim in layout.dims:
        dims += [None] * extra if dim.ellipsis else [dim]
    return dims


def _divisible(where: str, dim: Dim, whole: int, mesh_sizes: dict[str, int], faults: list[Any]) -> None:
    parts = math.prod(mesh_sizes[a] for a in dim.axes)
    if whole % parts:
        name = Layout.from_dims((dim,)).short
        rule = (
            f"{where}: {name} has size {whole}, which {'/'.join(dim.axes)} = {parts} does not divide; "
            f"pad it by {-whole % parts} to {whole + -whole % parts}"
        )
        faults.append((SizeError, dim, rule))


def _bind(
    bound: Bound, atom: Any, whole: int, where: str, dim: Dim, faults: list[Any], mesh_sizes: dict[str, int]
) -> bool:
    """Whether the name has no other size."""
    if atom.size is not None:
        if atom.size != whole:
            faults.append((SizeError, dim, f"{where}: the layout says {atom.size}, and the size is {whole}"))
        return True
    if not atom.named:
        return True
    first = bound.setdefault(atom.name, (whole, where))
    if first[0] != whole:
        block = next((a for a, n in mesh_sizes.items() if whole * n == first[0] and a not in dim.axes), None)
        hint = f"; as a block, {'/'.join([atom.name, *dim.axes, block])}, it would be {first[0]}" if block else ""
        faults.append((SizeError, dim, f"{atom.name} is {whole} in {where}, but {first[0]} in {first[1]}{hint}"))
        return bool(block)
    return True


def _bind_composite(
    bound: Bound, dim: Dim, whole: int, where: str, mesh_sizes: dict[str, int], faults: list[Any]
) -> None:
    """A composite binds its last unknown factor; with more unknown ones, none."""
    sizes = [a.size if a.size is not None else bound.get(a.name, (None,))[0] for a in dim.atoms]
    unknown = [i for i, n in enumerate(sizes) if n is None]
    rest = math.prod(n for n in sizes if n is not None)
    if len(unknown) > 1:
        return
    if (unknown and whole % rest) or (not unknown and whole != rest):
        shown = " * ".join(f"{a.name}={'?' if n is None else n}" for a, n in zip(dim.atoms, sizes, strict=True))
        faults.append((SizeError, dim, f"{where}: the size {whole} is not {shown}"))
    elif unknown:
        bound[dim.atoms[unknown[0]].name] = (whole // rest, where)
        sizes[unknown[0]] = whole // rest
    for atom, size in zip(dim.atoms, sizes, strict=True):
        parts = math.prod(mesh_sizes[a] for a in atom.axes or ())
        if size is not None and size % parts:
            rule = f"{where}: {atom.name} has size {size}, which {'/'.join(atom.axes or ())} = {parts} does not divide"
            faults.append((SizeError, dim, rule))


def _raise(
    text: str,
    source: str | None,
    faults: list[tuple[type[SpmdError], Dim | None, str]],
    mesh_sizes: dict[str, int],
    twice: Sequence[str],
) -> None:
    kind = next((k for k, _, _ in faults if k is LayoutError), SizeError)
    mesh = "mesh " + ", ".join(f"{a}={n}" for a, n in mesh_sizes.items())
    span = faults[0][1].span if faults[0][1] is not None else None
    if span is not None and not (0 <= span[0] < span[1] <= len(source or "")):
        span = None
    what = "the arguments do not fit the signature." if len(faults) > 1 else f"{faults[0][2]}."
    got = [*(f for _, _, f in faults), mesh] if len(faults) > 1 else [mesh]
    shown = " and ".join(dict.fromkeys(twice))
    advice = (
        f"for another dimension another name, or _: the signature binds {shown} for the whole body" if twice else None
    )
    raise kind(what, call=text, source=source, span=span, got=got, advice=advice)
