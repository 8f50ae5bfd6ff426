"""Where a named dimension lies, over how many devices, and the shardings that follow."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd import AxisMapping, Layout
from spmd.errors import LayoutError, compose, did_you_mean
from spmd.haliax._placement import mapping_of, mesh_of
from spmd.language import axis_sizes

__all__ = [
    "physical_axis_name",
    "physical_axis_size",
    "pspec_for",
    "round_axis_for_partitioning",
    "sharding_for_axis",
]


def round_axis_for_partitioning(name: str, size: int, mapping: Any = None, mesh: Any = None) -> int:
    """The next size of a dimension that divides evenly over its mesh axes.

    Communication: none.

    Args:
      name: The dimension.
      size: Its size.
      mapping: As in `shard`.
      mesh: A mesh; absent, that of `jax.set_mesh`.

    Returns:
      The smallest multiple of the number of devices along its axes that is not below `size`.

    Raises:
      SpmdError: As `physical_axis_size`.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.round_axis_for_partitioning("vocab", 50257, {"vocab": "tp"}, spmd.make_mesh(tp=8))
      50264
    """
    parts = physical_axis_size(name, mapping, mesh) or 1
    return -(-size // parts) * parts


def physical_axis_name(name: str, mapping: Any = None) -> str | tuple[str, ...] | None:
    """The mesh axes of a named dimension: one, a tuple of several, or None for a dimension that is whole.

    Communication: none.

    Args:
      name: The dimension.
      mapping: As in `shard`.

    Returns:
      The axes.

    Raises:
      LayoutError: Without a mapping, or if it says nothing of this name.

    Example:
      >>> from spmd import haliax as hax
      >>> hax.physical_axis_name("batch", {"batch": ("data", "fsdp")})
      ('data', 'fsdp')
    """
    axes = _axes("physical_axis_name", name, mapping)
    return axes[0] if len(axes) == 1 else axes or None


def physical_axis_size(name: str, mapping: Any = None, mesh: Any = None) -> int | None:
    """How many devices a named dimension is divided over; None where it is whole.

    Communication: none.

    Args:
      name: The dimension.
      mapping: As in `shard`.
      mesh: A mesh; absent, that of `jax.set_mesh`.

    Returns:
      The product of the sizes of its mesh axes.

    Raises:
      LayoutError: Without a mapping, or if it says nothing of this name.
      MeshError: Without a mesh, or if it lacks an axis.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.physical_axis_size("batch", {"batch": ("data", "tp")}, spmd.make_mesh(data=2, tp=4))
      8
    """
    axes = _axes("physical_axis_size", name, mapping)
    sizes = axis_sizes(mesh_of("physical_axis_size", mesh))
    AxisMapping({name: axes}).check(sizes)
    return math.prod(sizes[axis] for axis in axes) if axes else None


def sharding_for_axis(names: str, mapping: Any = None, mesh: Any = None) -> NamedSharding:
    """The sharding of an array whose dimensions have these names: `sharding_for_axis("batch embed")`.

    Communication: none.

    Args:
      names: One name or several, a layout.
      mapping: As in `shard`.
      mesh: A mesh; absent, that of `jax.set_mesh`.

    Returns:
      The `NamedSharding`.

    Raises:
      LayoutError: Without a mapping, or if it lacks a name.
      MeshError: Without a mesh, or if it lacks an axis.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.sharding_for_axis("batch", {"batch": "data"}, spmd.make_mesh(data=8)).spec
      P('data',)
    """
    found = mesh_of("sharding_for_axis", mesh)
    mapping_of("sharding_for_axis", mapping).check(axis_sizes(found))
    return NamedSharding(found, pspec_for(names, mapping))


def pspec_for(names: Any, mapping: Any = None) -> Any:
    """The `PartitionSpec` of named dimensions, or a tree of them for a tree of names.

    Communication: none.

    Args:
      names: A layout, or a tree of layouts.
      mapping: As in `shard`.

    Returns:
      The specs.

    Raises:
      LayoutError: Without a mapping, or if it lacks a name.

    Example:
      >>> from spmd import haliax as hax
      >>> hax.pspec_for({"w": "embed mlp"}, {"embed": None, "mlp": "tp"})
      {'w': P(None, 'tp')}
    """
    rules = mapping_of("pspec_for", mapping)

    def spec(text: Any) -> PartitionSpec:
        layout = Layout(text)
        for name in layout.bare:
            _known("pspec_for", name, rules, str(text))
        return rules.resolve(layout).spec

    return jax.tree.map(spec, names, is_leaf=lambda one: isinstance(one, (str, Layout)))


def _axes(who: str, name: Any, mapping: Any) -> tuple[str, ...]:
    rules = mapping_of(who, mapping)
    if not isinstance(name, str):
        rule = f"a dimension is named by a str, not by {type(name).__name__}."
        raise LayoutError(compose(rule, call=f"{who}(name)", fix=f'{who}("batch")'))
    _known(who, name, rules, name)
    return rules[name]


def _known(who: str, name: str, rules: AxisMapping, text: str) -> None:
    if name not in rules:
        rule = f"the mapping says nothing of {name}{did_you_mean(name, rules) or '.'}"
        got = [f"mapping: {', '.join(rules) or '(empty)'}"]
        raise LayoutError(compose(rule, call=f'{who}("{text}")', got=got, fix=f'"{name}": None for a whole dimension'))
