"""From a JAX sharding to a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spmd.errors import LayoutError

if TYPE_CHECKING:
    from spmd.language._layout import Layout


def read(array: Any, names: Layout) -> Layout:
    """The layout of an array, in given names; see Layout.of."""
    from jax.sharding import NamedSharding

    call = f'Layout.of(x, "{names}")'
    shape = tuple(getattr(array, "shape", ()))
    dims = names.with_rank(len(shape)) if names.has_ellipsis and len(shape) + 1 >= len(names.dims) else names
    if len(dims.dims) != len(shape):
        rule = f"The names are of {len(dims.dims)} dimensions, the array has {len(shape)}."
        raise LayoutError(rule, call=call, got=[f"shape {shape}"])
    if names.axis_names:
        fix = f'"{names.without(*names.axis_names).short}"'
        raise LayoutError("Layout.of reads the mesh axes; give it names only.", call=call, fix=fix)
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        sharding = getattr(_type(array, call), "sharding", None)
    if not isinstance(sharding, NamedSharding):
        if sharding is None or sharding.is_fully_replicated:
            return dims
        rule = "Only an array with a NamedSharding has a layout; this one is divided otherwise."
        raise LayoutError(rule, call=call, got=[f"a {type(sharding).__name__}"])
    spec = sharding.spec
    entries = [_axes(entry, call) for entry in spec.partitions] + [()] * (len(shape) - len(spec))
    placed = [
        replace(dim, atoms=(replace(dim.atoms[0], axes=axes), *dim.atoms[1:])) if axes else dim
        for dim, axes in zip(dims.dims, entries, strict=True)
    ]
    return type(names).from_dims(placed, spec.unreduced, spec.reduced)


def _type(array: Any, call: str) -> Any:
    import jax

    try:
        return jax.typeof(array)
    except TypeError:
        kind = f"one of dtype {array.dtype}" if hasattr(array, "dtype") else f"of type {type(array).__name__}"
        raise LayoutError(f"Layout.of reads an array, and this is {kind}.", call=call) from None


def _axes(entry: Any, call: str) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple):
        return entry
    raise LayoutError("A dimension that JAX left unconstrained has no layout.", call=call)
