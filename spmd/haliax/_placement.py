"""Trees of arrays placed by the names of their dimensions."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

import spmd
from spmd import AxisMapping, Layout
from spmd.errors import LayoutError, MeshError, compose
from spmd.mesh import ambient_mesh
from spmd.mode import ambient_mapping

__all__ = ["WholeArrayWarning", "auto_sharded", "mapping_of", "mesh_of", "shard", "shard_with_axis_mapping"]

T = TypeVar("T")
BIG = 2**20


class WholeArrayWarning(UserWarning):
    """A big array lies whole on every device, although the mesh has several."""


def shard(tree: T, names: Any, mapping: Any = None, mesh: Any = None, *, big: int = BIG) -> T:
    """Place a tree of arrays by the names of their dimensions, inside `jit` and outside alike.

    `spmd.shard` with a mapping that must be there, and a warning where it does nothing for a big array.

    Communication: whatever moving the arrays takes; none where they lie so already.

    Args:
      tree: An array or a pytree, modules of Equinox and Flax NNX included; leaves that are no arrays stay.
      names: The layouts, see above.
      mapping: Where names live; absent, the surrounding `axis_mapping`.
      mesh: The mesh; absent, that of the arrays' shardings, else that of `jax.set_mesh`.
      big: How many bytes an array may have and lie whole without a warning.

    Returns:
      The tree, placed.

    Raises:
      LayoutError: Without a mapping, or if it lacks a name; if names do not fit the tree.
      MeshError: Without a mesh, or if it lacks an axis.
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
    found = mapping_of("shard", mapping)
    placed = spmd.shard(tree, _layouts(names), mesh=mesh, mapping=found)
    _warn_of_whole(placed, _layouts(names), found, mesh, big)
    return placed


def auto_sharded(tree: T, names: Any, mesh: Any = None) -> T:
    """`shard` by the surrounding `axis_mapping` where there is one; without one nothing happens.

    For library code that may or may not run under a mapping. Communication: as `shard`.

    Args:
      tree: An array or a pytree.
      names: The layouts, see above.
      mesh: As in `shard`.

    Returns:
      The tree, placed, or as it was.

    Raises:
      SpmdError: As `shard`, under a mapping.

    Example:
      >>> import jax.numpy as jnp
      >>> from spmd import haliax as hax
      >>> hax.auto_sharded(jnp.zeros(4), "batch").shape
      (4,)
    """
    return tree if ambient_mapping() is None else shard(tree, names, mesh=mesh)


def shard_with_axis_mapping(tree: T, names: Any, mapping: Any, mesh: Any = None) -> T:
    """`shard`, under its older name.

    Communication: as `shard`.

    Args:
      tree: An array or a pytree.
      names: The layouts, see above.
      mapping: Where names live.
      mesh: As in `shard`.

    Returns:
      The tree, placed.

    Raises:
      SpmdError: As `shard`.

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
        rule = "no mapping: none was given, and no axis_mapping surrounds the call."
        fix = 'mapping={"batch": "data"}, or with axismapping_of({"batch": "data"}):'
        raise LayoutError(compose(rule, call=f"{who}(...)", fix=fix))
    return found


def mesh_of(who: str, mesh: Any) -> Any:
    found = ambient_mesh() if mesh is None else mesh
    if found is None:
        rule = "no mesh: none was given, and no jax.set_mesh surrounds the call."
        raise MeshError(compose(rule, call=f"{who}(...)", fix="mesh=spmd.make_mesh(data=8)"))
    return found


def _layouts(names: Any) -> Any:
    """What `spmd.shard` takes; a function of a key path becomes one of the tree."""
    if not callable(names) or inspect.isclass(names) or isinstance(names, Layout):
        return names
    path_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")

    def of_tree(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, x: names(path_of(path)) if _has_shape(x) else None, tree)

    return of_tree


def _warn_of_whole(tree: Any, layouts: Any, mapping: AxisMapping, mesh: Any, big: int) -> None:
    """Name the big arrays that every device of a mesh holds whole."""
    whole = []
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _has_shape(x) else x, tree)
    for path, x in jax.tree_util.tree_leaves_with_path(spmd.shard(shapes, layouts, mesh=mesh, mapping=mapping)):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and sharding.is_fully_replicated:
            nbytes = math.prod(x.shape) * x.dtype.itemsize
            if nbytes > big:
                whole.append(f"{jax.tree_util.keystr(path) or 'the array'} of shape {x.shape}, {nbytes} bytes")
    if whole:
        rule = "a big array lies whole on every device: nothing that its names say divides it."
        got = [*whole, f"mapping: {mapping!r}"]
        warnings.warn(
            compose(rule, call="shard(tree, names)", got=got, fix="big=... to allow it"), WholeArrayWarning, 3
        )


def _has_shape(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
