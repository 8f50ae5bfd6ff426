"""An assertion that no device holds much more of a tree than its share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from spmd import _compat
from spmd._text.table import Table
from spmd._text.units import bytes_text
from spmd._trees.matching import match_prefix
from spmd.errors import MeshError, SizeError, SpmdError
from spmd.language import AxisMapping, Layout, axes_product, axes_tuple, check_axes, mesh_text
from spmd.testing._mismatch import Mismatch

_CALL = "assert_sharded(tree, ...)"
_SHOWN = 20


def assert_sharded(
    tree: Any,
    tolerance: float = 0.02,
    *,
    layouts: Any = None,
    mapping: Any = None,
    axes: str | Sequence[str] | None = None,
) -> None:
    """Assert that no parameter is left more replicated than intended.

    With `layouts`: every mesh axis that a leaf's layout names divides the leaf, in whatever dimension. Without: one
    device holds at most `1 + tolerance` times its share, the bytes of the whole tree over the number of devices.
    Reads shardings only. Communication: none.

    Args:
      tree: Arrays, or `jax.ShapeDtypeStruct`s with shardings, such as `spmd.init(...).abstract`. Single numbers, such
        as the step count of an optimizer's state, may lie anywhere.
      tolerance: How much more than its share a device may hold, as a part of it: small vectors are rarely divided.
        With `layouts` it is a part of the intended bytes.
      layouts: The intended layouts, a prefix tree as kernels take it: a string for all leaves below.
      mapping: The `AxisMapping` that places bare names of `layouts`.
      axes: The mesh axes that are meant to divide parameters, all by default: `("fsdp", "tp")` where `dp` replicates
        them on purpose.

    Raises:
      Mismatch: A device holds too much. The message has each leaf that is too large, how it lies and how it should.
      SpmdError: A leaf does not say where it lies, or the tolerance is not a number.
      MeshError: The mesh lacks an axis, or leaves lie on different meshes.
      SizeError: A layout has another rank than its leaf.

    Example:
      >>> import jax, spmd
      >>> mesh = spmd.make_mesh(fsdp=4, tp=2)
      >>> def at(layout, *shape):
      ...     return jax.ShapeDtypeStruct(shape, "float32", sharding=spmd.Layout(layout).sharding(mesh))
      >>> params = {"w": at("d/fsdp f/tp", 512, 256), "norm": at("d", 512)}
      >>> spmd.testing.assert_sharded(params, layouts={"w": "d/fsdp f/tp", "norm": "d"})
      >>> spmd.testing.assert_sharded(params, tolerance=0.05)

    References:
      `assert_params_sufficiently_sharded` of https://github.com/AI-Hypercomputer/maxtext, for the tolerance.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
        rule = f"tolerance, how much more than its share a device may hold, is at least 0, not {tolerance!r}."
        raise SpmdError(rule, call=_CALL, advice="tolerance=0.02, or layouts=...")
    axes = (axes,) if isinstance(axes, str) else axes
    leaves = _leaves(tree)
    mesh = _mesh(leaves)
    if layouts is None:
        _check_share(leaves, mesh, tolerance, axes)
    else:
        _check_intended(leaves, mesh, _pairs(layouts, tree), tolerance, mapping, axes)


@dataclass(frozen=True)
class _Leaf:
    """One array: its path, its sharding, its bytes in all and on one device."""

    path: str
    sharding: NamedSharding
    shape: tuple[int, ...]
    whole: int
    held: int

    @property
    def used(self) -> frozenset[str]:
        return frozenset(axis for entry in _compat.partitions(self.sharding.spec) for axis in axes_tuple(entry))

    @property
    def lies(self) -> str:
        entries = _compat.partitions(self.sharding.spec, len(self.shape))
        return " ".join("/".join(("_", *axes_tuple(entry))) for entry in entries) or "scalar"


def _leaves(tree: Any) -> list[_Leaf]:
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        shown = f"tree{jax.tree_util.keystr(path)}"
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            if _anywhere(leaf):
                continue
            got = f"{shown}: {type(sharding).__name__ if sharding is not None else type(leaf).__name__}"
            rule = "every leaf is an array, or a jax.ShapeDtypeStruct, that lies on a mesh."
            raise SpmdError(rule, call=_CALL, got=[got], advice='as in spmd.shard(tree, "d/fsdp f/tp", mesh=mesh)')
        size = leaf.dtype.itemsize
        local = math.prod(sharding.shard_shape(leaf.shape)) * size
        found.append(_Leaf(shown, sharding, tuple(leaf.shape), math.prod(leaf.shape) * size, local))
    return found


def _anywhere(leaf: Any) -> bool:
    """Return whether it is a single number, which cannot be divided, and does not lie on a mesh."""
    return not np.shape(leaf) and not isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _pairs(layouts: Any, tree: Any) -> list[Any]:
    return [pair for pair in match_prefix(layouts, tree, "tree", _CALL) if not _anywhere(pair[1])]


def _mesh(leaves: Sequence[_Leaf]) -> Mapping[str, int]:
    shapes = {tuple(leaf.sharding.mesh.shape.items()) for leaf in leaves}
    if len(shapes) > 1:
        got = [mesh_text(dict(shape)) for shape in sorted(shapes)]
        raise MeshError("all leaves lie on one mesh.", call=_CALL, got=got)
    return dict(shapes.pop()) if shapes else {}


def _divided(mesh: Mapping[str, int], axes: Sequence[str] | None) -> list[str]:
    """The axes that are meant to divide parameters."""
    check_axes(axes or (), mesh, call=_CALL)
    return [a for a in mesh if axes is None or a in axes]


def _check_share(leaves: Sequence[_Leaf], mesh: Mapping[str, int], tolerance: float, axes: Any) -> None:
    wanted = _divided(mesh, axes)
    parts = axes_product(wanted, mesh)
    held, share = sum(leaf.held for leaf in leaves), sum(leaf.whole for leaf in leaves) / parts
    if held <= (1 + tolerance) * share:
        return
    over = sorted((leaf for leaf in leaves if leaf.held * parts > leaf.whole), key=lambda leaf: -leaf.held)
    rows = []
    for leaf in over:
        missing = ", ".join(a for a in wanted if a not in leaf.used and mesh[a] > 1) or "-"
        shape = "x".join(map(str, leaf.shape))
        rows.append(
            (leaf.path, shape, leaf.lies, missing, bytes_text(round(leaf.whole / parts)), bytes_text(leaf.held))
        )
    rule = (
        f"One device holds {bytes_text(held)} of parameters, {held / share - 1:.1%} more than its share of "
        f"{bytes_text(round(share))} over {', '.join(wanted)}; {tolerance:.1%} are allowed."
    )
    head = ("leaf", "shape", "lies as", "not over", "its share", "held")
    raise Mismatch(f"{rule}\n{_table(rows, head)}")


def _check_intended(
    leaves: Sequence[_Leaf], mesh: Mapping[str, int], pairs: Any, tolerance: float, mapping: Any, axes: Any
) -> None:
    wanted = _divided(mesh, axes)
    rules = None if mapping is None else AxisMapping.of(mapping)
    rows = []
    meant = too_much = 0
    for leaf, (_, _, layout) in zip(leaves, pairs, strict=True):
        resolved: Layout = _of_rank(layout, leaf).resolve(rules)
        check_axes(resolved.axes, mesh, call=f'{_CALL}, {leaf.path} as "{resolved.short}"', source=resolved.short)
        intended = [a for a in resolved.axes if a in wanted]
        missing = [a for a in intended if a not in leaf.used and mesh[a] > 1]
        aim = leaf.whole // axes_product(intended, mesh)
        meant += aim
        if missing:
            too_much += leaf.held - min(aim, leaf.held)
            sizes = (bytes_text(aim), bytes_text(leaf.held))
            rows.append(
                (leaf.path, "x".join(map(str, leaf.shape)), resolved.short, leaf.lies, ", ".join(missing), *sizes)
            )
    if too_much > tolerance * meant:
        rule = f"{len(rows)} of {len(leaves)} leaves are not divided over an axis of their layout, "
        rule += f"and one device holds {bytes_text(too_much)} more than the intended {bytes_text(meant)}."
        head = ("leaf", "shape", "expected", "lies as", "not over", "expected", "held")
        raise Mismatch(f"{rule}\n{_table(rows, head)}")


def _of_rank(layout: Layout, leaf: _Leaf) -> Layout:
    """The layout with as many dimensions as the leaf has."""
    try:
        return layout.with_rank(len(leaf.shape))
    except SizeError:
        named = sum(not dim.ellipsis for dim in layout.dims)
        count = f"{'at least ' * layout.has_ellipsis}{named} dimension{'s' * (named != 1)}"
        rule = f'the layout "{layout.short}" has {count}, and {leaf.path} has {len(leaf.shape)}.'
        fix = " ".join(("...", *(dim.short for dim in layout.dims if not dim.ellipsis)))
        wide = len(leaf.shape) > named
        got = [f"{leaf.path}: shape {leaf.shape}"]
        raise SizeError(rule, call=_CALL, got=got, fix=f'"{fix}"' if wide else None) from None


def _table(rows: list[tuple[str, ...]], head: tuple[str, ...]) -> str:
    more = [(f"and {len(rows) - _SHOWN} more",)] if len(rows) > _SHOWN else []
    return Table([*rows[:_SHOWN], *more], head, right=(len(head) - 2, len(head) - 1)).text()
