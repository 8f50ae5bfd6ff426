"""Trees of arrays placed by the names of their dimensions."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd import AxisMapping, Layout
from spmd._text.units import bytes_text
from spmd._trees.annotations import Each, Unknown, annotated
from spmd._trees.leaves import by_path, is_array, kind_of, not_int
from spmd.errors import Fault, LayoutError, SizeError, warn
from spmd.language import axes_product
from spmd.mesh import mesh_for, sizes_for
from spmd.modes import ambient_mapping, ambient_mode

T = TypeVar("T")
BIG = 2**20


class WholeArrayWarning(UserWarning):
    """A big array is whole on every device, although the mesh has several."""


def shard(tree: T, names: Any, mapping: Any = None, mesh: Any = None, *, big: int = BIG) -> T:
    """Place a tree of arrays by the names of their dimensions, inside and outside `jit`.

    This is `spmd.shard` with a required mapping, and with a warning if the mapping leaves a big array whole.

    Communication: that of moving the arrays; none for arrays that are in place already.

    Args:
      tree: An array or a pytree, including modules of Equinox and Flax NNX. Leaves that are not arrays stay as they
        are.
      names: The layouts, see above.
      mapping: The mapping of the names; by default the surrounding `axis_mapping`.
      mesh: The mesh; by default that of the arrays' shardings, or else that of `jax.set_mesh`.
      big: The largest number of bytes of an array that may be whole without a warning.

    Returns:
      The tree, placed.

    Raises:
      LayoutError: If there is no mapping, the mapping lacks a name, or names do not fit the tree.
      MeshError: If there is no mesh, or the mesh lacks an axis.
      SizeError: If dimensions do not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=8)
      >>> with hax.axis_mapping({"batch": "data", "embed": None}):
      ...     batch = hax.shard(jnp.zeros((32, 512)), "batch embed", mesh=mesh)
      >>> batch.sharding.spec
      P('data', None)
    """
    found, layouts = mapping_of("shard", mapping), _layouts(names)
    placed = spmd.shard(tree, layouts, mesh=mesh, mapping=found)
    if ambient_mode()[0] != "reference":
        _warn_of_whole(tree, layouts, found, mesh, big)
    return placed


def auto_sharded(tree: T, names: Any, mesh: Any = None) -> T:
    """`shard` by the surrounding `axis_mapping`. Without one it does nothing.

    For library code that may or may not run under a mapping. Communication: that of `shard`.

    Args:
      tree: An array or a pytree.
      names: The layouts, see above.
      mesh: As in `shard`.

    Returns:
      The tree, placed, or as it was.

    Raises:
      SpmdError: Under a mapping, as in `shard`.

    Example:
      >>> import jax.numpy as jnp
      >>> from spmd import haliax as hax
      >>> hax.auto_sharded(jnp.zeros(4), "batch").shape
      (4,)
    """
    return tree if ambient_mapping() is None else shard(tree, names, mesh=mesh)


def shard_with_axis_mapping(tree: T, names: Any, mapping: Any, mesh: Any = None) -> T:
    """`shard`, under its older name.

    Communication: that of `shard`.

    Args:
      tree: An array or a pytree.
      names: The layouts, see above.
      mapping: The mapping of the names.
      mesh: As in `shard`.

    Returns:
      The tree, placed.

    Raises:
      SpmdError: As in `shard`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import haliax as hax
      >>> mesh = spmd.make_mesh(data=4)
      >>> hax.shard_with_axis_mapping(jnp.zeros(8), "batch", {"batch": "data"}, mesh).sharding.spec
      P('data',)
    """
    return shard(tree, names, mapping, mesh)


def mapping_of(who: str, mapping: Any) -> AxisMapping:
    found = ambient_mapping() if mapping is None else AxisMapping.of(mapping)
    if found is None:
        rule = "the call has no mapping: none was given, and axis_mapping does not surround it."
        advice = 'mapping={"batch": "data"}, or with axis_mapping({"batch": "data"}): around the call'
        raise LayoutError(rule, call=f"{who}(...)", advice=advice)
    return found


def _layouts(names: Any) -> Any:
    """Layouts for `spmd.shard`: functions of a key path become functions of the tree below them."""

    def of_tree(one: Any) -> Any:
        plain = not callable(one) or inspect.isclass(one)
        return one if plain else functools.partial(by_path, one)

    return jax.tree.map(of_tree, names)


def _warn_of_whole(tree: Any, layouts: Any, mapping: AxisMapping, mesh: Any, big: int) -> None:
    """Warn about the big arrays that every device of a mesh would hold whole."""
    wanted = spmd.shard(jax.tree.map(_abstract, tree), layouts, mesh=mesh, mapping=mapping)
    whole = []
    for path, x in jax.tree_util.tree_leaves_with_path(wanted):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and sharding.is_fully_replicated:
            nbytes = math.prod(x.shape) * x.dtype.itemsize
            if nbytes > big:
                whole.append(f"tree{jax.tree_util.keystr(path)}: {x.dtype.name}{list(x.shape)}, {bytes_text(nbytes)}")
    if whole:
        rule = "a big array is whole on every device: none of its names divides it."
        got = [*whole, f"mapping: {_rules_text(mapping)}"]
        advice = '"embed": "data" in the mapping for one of its names, or big=... to allow it'
        warn(str(Fault(rule, call="shard(tree, names)", got=got, advice=advice)), WholeArrayWarning)


def _abstract(x: Any) -> Any:
    """An array without its elements; its mesh stays."""
    if not is_array(x):
        return x
    sharding = getattr(jax.typeof(x) if isinstance(x, jax.core.Tracer) else x, "sharding", None)
    known = isinstance(sharding, NamedSharding) and not sharding.mesh.empty
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if known else None)


def _rules_text(mapping: AxisMapping) -> str:
    return ", ".join(f"{name} -> {'/'.join(axes) or 'whole'}" for name, axes in mapping.items()) or "(empty)"


# --- the mesh axes of named dimensions, their numbers of devices, and the resulting shardings -------------------------


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
