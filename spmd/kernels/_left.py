"""Mesh axes that a kernel leaves to the compiler: `kernel(..., auto="dp")`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd.errors import LayoutError, MeshError, ModeError, did_you_mean
from spmd.kernels._signature import Signature
from spmd.language import Layout, axes_tuple, mesh_text


def check_left(signature: Signature, mesh: Any, layouts: Iterable[Layout]) -> None:
    """Check that the axes are on the mesh, that no layout names them, and that a compiler may divide them.

    Raises:
      MeshError: The mesh lacks one of them, or has no others.
      LayoutError: A layout names one of them.
      ModeError: One of them is `AxisType.Explicit`.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    got = [mesh_text(mesh.shape)]
    for axis in signature.auto:
        if axis not in kinds:
            near = did_you_mean(axis, kinds) or "."
            rule = f"auto= leaves {axis} to the compiler, and the mesh has no such axis{near}"
            signature.fail(rule, got=got, error=MeshError)
        if kinds[axis] is AxisType.Explicit:
            rule = f"auto= leaves {axis} to the compiler, which is AxisType.Explicit: types say how arrays lie."
            advice = f"a mesh with {axis} as AxisType.Auto, or a kernel whose strings name {axis}"
            signature.fail(rule, got=got, advice=advice, error=ModeError)
    if set(kinds) <= set(signature.auto):
        rule = "auto= leaves every axis of the mesh to the compiler, and no axis is left for the strings."
        signature.fail(rule, got=got, advice="jax.jit, or kernel.auto(...)", error=MeshError)
    for layout in layouts:
        named = [axis for axis in signature.auto if axis in layout.axis_names]
        if named:
            rule = f'auto= leaves {named[0]} to the compiler, and "{layout.short}" names it.'
            advice = f"{named[0]} in the strings, or in auto=, not in both"
            signature.fail(rule, advice=advice, error=LayoutError)


def without(spec: Any, rank: int, axes: Iterable[str]) -> P:
    """A spec without the axes that are left to the compiler: how an array lies along the others."""
    gone = set(axes)
    kept = [tuple(a for a in axes_tuple(entry) if a not in gone) for entry in _compat.partitions(spec, rank)]
    return P(*(entry or None for entry in kept))
