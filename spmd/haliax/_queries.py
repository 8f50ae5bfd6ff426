"""The mesh axes of named dimensions, their numbers of devices, and the resulting shardings."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd import AxisMapping, Layout
from spmd._annotations import Each, Unknown, annotated
from spmd._leaves import kind_of, not_int
from spmd.errors import LayoutError, SizeError
from spmd.haliax._placement import mapping_of
from spmd.language import axes_product
from spmd.mesh import mesh_for, sizes_for


def round_axis_for_partitioning(name: str, size: int, mapping: Any = None, mesh: Any = None) -> int:
    """The next size of a dimension that divides evenly over its mesh axes.

    Communication: none.

    Args:
      name: The dimension.
      size: Its size.
      mapping: As in `shard`.
      mesh: A mesh; by default that of `jax.set_mesh`.

    Returns:
      The smallest multiple of the number of devices along its axes that is not below `size`.

    Raises:
      SpmdError: As in `physical_axis_size`.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.round_axis_for_partitioning("vocab", 50257, {"vocab": "tp"}, spmd.make_mesh(tp=8))
      50264
    """
    if fault := not_int("the size of a dimension", size, 0):
        raise SizeError(fault, call=f"round_axis_for_partitioning({name!r}, size)")
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
      LayoutError: If there is no mapping, or it lacks this name.

    Example:
      >>> from spmd import haliax as hax
      >>> hax.physical_axis_name("batch", {"batch": ("data", "fsdp")})
      ('data', 'fsdp')
    """
    axes = _axes("physical_axis_name", name, mapping)
    return axes[0] if len(axes) == 1 else axes or None


def physical_axis_size(name: str, mapping: Any = None, mesh: Any = None) -> int | None:
    """The number of devices over which a named dimension is divided; None if it is whole.

    Communication: none.

    Args:
      name: The dimension.
      mapping: As in `shard`.
      mesh: A mesh; by default that of `jax.set_mesh`.

    Returns:
      The product of the sizes of its mesh axes.

    Raises:
      LayoutError: If there is no mapping, or it lacks this name.
      MeshError: If there is no mesh, or it lacks an axis.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.physical_axis_size("batch", {"batch": ("data", "tp")}, spmd.make_mesh(data=2, tp=4))
      8
    """
    axes = _axes("physical_axis_size", name, mapping)
    sizes = sizes_for(mesh, "physical_axis_size(...)")
    AxisMapping({name: axes}).check(sizes)
    return axes_product(axes, sizes) if axes else None


def sharding_for_axis(names: Any, mapping: Any = None, mesh: Any = None) -> Any:
    """The sharding of an array with dimensions of these names: `sharding_for_axis("batch embed")`.

    Communication: none.

    Args:
      names: One or more names, a layout; or a tree of layouts, or a class with layouts as annotations.
      mapping: As in `shard`.
      mesh: A mesh; by default that of `jax.set_mesh`.

    Returns:
      The `NamedSharding`, or a tree of them.

    Raises:
      LayoutError: If there is no mapping, or it lacks a name.
      MeshError: If there is no mesh, or it lacks an axis.

    Example:
      >>> import spmd
      >>> from spmd import haliax as hax
      >>> hax.sharding_for_axis("batch", {"batch": "data"}, spmd.make_mesh(data=8)).spec
      P('data',)
    """
    found = mesh_for(mesh, [], "sharding_for_axis(...)")
    mapping_of("sharding_for_axis", mapping).check(found.axis_names)
    specs = _specs("sharding_for_axis", names, mapping)
    is_spec = lambda one: isinstance(one, PartitionSpec)
    return jax.tree.map(lambda spec: NamedSharding(found, spec), specs, is_leaf=is_spec)


def pspec_for(names: Any, mapping: Any = None) -> Any:
    """The `PartitionSpec` of named dimensions, or a tree of them for a tree of names.

    Communication: none.

    Args:
      names: A layout, a tree of layouts, or a class with layouts as annotations.
      mapping: As in `shard`.

    Returns:
      The specs; for a class, a dict by attribute name.

    Raises:
      LayoutError: If there is no mapping, or it lacks a name.

    Example:
      >>> from spmd import haliax as hax
      >>> hax.pspec_for({"w": "embed mlp"}, {"embed": None, "mlp": "tp"})
      {'w': P(None, 'tp')}
    """
    return _specs("pspec_for", names, mapping)


def _specs(who: str, names: Any, mapping: Any) -> Any:
    rules = mapping_of(who, mapping)

    def spec(one: Any) -> Any:
        if isinstance(one, type):
            return {name: tree(below) for name, below in annotated(one).items()}
        if not isinstance(one, (str, Layout)):
            what = kind_of(one)
            if isinstance(one, (Each, Unknown)):
                what = "a container in an annotation, which needs a tree for its length"
            rule = f"{who} is given no arrays, so names are layouts, a tree of them, or a class of them, not {what}."
            raise LayoutError(rule, call=f"{who}(names)", advice=f'as in {who}("batch embed")')
        layout = Layout(one)
        rules.need(rules.lacks(layout), f'{who}("{one}")')
        return rules.resolve(layout).spec

    def tree(below: Any) -> Any:
        return jax.tree.map(spec, below, is_leaf=lambda one: isinstance(one, (str, Layout, type, Each, Unknown)))

    return tree(names)


def _axes(who: str, name: Any, mapping: Any) -> tuple[str, ...]:
    rules = mapping_of(who, mapping)
    if not isinstance(name, str):
        rule = f"a dimension is named by a str, not by {kind_of(name)}."
        raise LayoutError(rule, call=f"{who}(name)", advice=f'as in {who}("batch")')
    rules.need([name], f'{who}("{name}")')
    return rules[name]
