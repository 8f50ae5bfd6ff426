"""Global and local shapes of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spmd.errors import SizeError
from spmd.language._syntax import Dim, axes_product, divided

if TYPE_CHECKING:
    from spmd.language._layout import Layout


def local_shape(
    layout: Layout, shape: tuple[int, ...], mesh: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of a shard; see Layout.local_shape."""
    _need_fit(layout, shape)
    failures: list[str] = []
    local: list[int] = []
    for dim, size in zip(layout.dims, shape, strict=True):
        failures.extend(_literal(dim, size))
        failures.extend(_indivisible(dim, size, mesh, sizes))
        local.append(size // axes_product(dim.axes, mesh) + sum(dim.margin))
    _raise(layout, shape, failures, "A divided dimension is a multiple of the number of its parts.")
    return tuple(local)


def global_shape(layout: Layout, shape: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the whole; see Layout.global_shape."""
    _need_fit(layout, shape)
    failures: list[str] = []
    whole: list[int] = []
    for dim, size in zip(layout.dims, shape, strict=True):
        inner = size - sum(dim.margin)
        if inner < 0:
            failures.append(f"'{dim.short}': local size {size} is smaller than its margins")
        whole.append(inner * axes_product(dim.axes, mesh))
        failures.extend(_literal(dim, whole[-1]))
    _raise(layout, shape, failures, "A local size holds its margins, and a literal size is the global one.")
    return tuple(whole)


def _need_fit(layout: Layout, shape: tuple[int, ...]) -> None:
    if len(shape) != len(layout.dims):
        count = len(layout.dims)
        said = spaced(layout, len(shape))
        hint = f'; names are separated by spaces: "{said}"' if said else ""
        rule = f"The layout has {count} dimension{'s' * (count != 1)}, the array has {len(shape)}{hint}."
        raise SizeError(rule, call=repr(layout), got=[f"shape {shape}"])


def spaced(layout: Layout, rank: int) -> str | None:
    """The layout with a space between its letters, where it is written as NumPy's are: `bd` of a matrix."""
    short = layout.short
    return " ".join(short) if len(layout.dims) == 1 and short.isalpha() and len(short) == rank > 1 else None


def _literal(dim: Dim, size: int) -> list[str]:
    atom = dim.atoms[0]
    if atom.size is None or atom.size == size:
        return []
    return [f"'{dim.short}': the layout says size {atom.size}, the array has {size}"]


def _indivisible(dim: Dim, size: int, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> list[str]:
    """What does not divide: the factors whose sizes are known, else the dimension."""
    found: list[str] = []
    if dim.composite:
        for atom in dim.atoms:
            if atom.axes and atom.name in sizes:
                found.extend(_one(divided(atom), atom.name, sizes[atom.name], atom.axes, mesh))
    name = dim.short.split("/")[0] if dim.composite else dim.atoms[0].name
    return found or _one(dim.short, name, size, dim.axes, mesh)


def _one(text: str, name: str, size: int, axes: tuple[str, ...], mesh: Mapping[str, int]) -> list[str]:
    parts = axes_product(axes, mesh)
    if size % parts == 0:
        return []
    product = " * ".join(f"{axis}={mesh[axis]}" for axis in axes)
    total = f" = {parts}" if len(axes) > 1 else ""
    padded = -(-size // parts) * parts
    return [f"'{text}': size {size} is not divisible by {product}{total}; pad {name} to {padded}"]


def _raise(layout: Layout, shape: tuple[int, ...], failures: list[str], rule: str) -> None:
    if failures:
        raise SizeError(rule, call=f"{layout.short!r} with shape {shape}", got=failures)
