"""Parameters at rest and in use, leaf by leaf: the axes to gather, and the axes over which gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from spmd import Layout
from spmd._leaves import has_room, is_array, kind_of
from spmd._trees import match_prefix
from spmd.errors import LayoutError, MeshError
from spmd.language import axes_tuple

Axes = tuple[str, ...]


def checked_axes(axes: str | Iterable[str] | None, what: str, call: str) -> Axes:
    """One mesh axis, several, or None, as a tuple."""
    if axes is not None and not isinstance(axes, (str, tuple, list)):
        rule = f"{what} is a mesh axis, a tuple of them, or None, not {kind_of(axes)}."
        raise MeshError(rule, call=call, advice=f'as in {what}="dp"')
    return axes_tuple(axes)


def paths(tree: Any) -> list[str]:
    """The path of each leaf, keys joined with "/"."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "(the tree itself)" for path, _ in found]


def layout_leaves(tree: Any, layouts: Any, call: str, what: str = "tree") -> list[Layout | None]:
    """The layout of each leaf of a tree; None if the leaf is not an array.

    Args:
      tree: The arrays.
      layouts: A prefix tree of layouts, as in `spmd.shard`.
      call: The call, for messages.
      what: The name of the tree in messages.
    """
    found = match_prefix(layouts, tree, what, call)
    return [layout if is_array(leaf) else None for _, leaf, layout in found]


def axes_by_dim(layout: Layout) -> tuple[Axes, ...]:
    """The mesh axes of each dimension."""
    return tuple(dim.axes for dim in layout.dims)


def text_of(names: tuple[str, ...], axes: tuple[Axes, ...], unreduced: Axes = (), reduced: Axes = ()) -> str:
    """A layout of these parts, as a string."""
    parts = ["/".join((name, *own)) for name, own in zip(names, axes, strict=True)]
    parts += [f"{{{kind}:{','.join(own)}}}" for kind, own in (("U", unreduced), ("R", reduced)) if own]
    return " ".join(parts) or "scalar"


@dataclass(frozen=True)
class Move:
    """How one parameter goes from rest to use.

    Attributes:
      names: Its dimensions.
      rest: The mesh axes of each dimension at rest.
      use: The mesh axes of each dimension in use.
      copies: Axes along which it is equal at rest, and over which its gradient is summed.
    """

    names: tuple[str, ...]
    rest: tuple[Axes, ...]
    use: tuple[Axes, ...]
    copies: Axes

    @property
    def gathered(self) -> Axes:
        """Axes that divide it at rest but not in use."""
        used = {axis for axes in self.use for axis in axes}
        return tuple(axis for axes in self.rest for axis in axes if axis not in used)

    @property
    def tiled(self) -> bool:
        """Whether all-gathers alone move it from rest to use."""
        return all(rest[: len(use)] == use for rest, use in zip(self.rest, self.use, strict=True))

    def inner(self) -> Move:
        """The same for one layer of a stack, without the first dimension."""
        return Move(self.names[1:], self.rest[1:], self.use[1:], self.copies)


def moves(tree: Any, at_rest: Any, compute: Any, data: Any, call: str, what: str = "params") -> list[Move | None]:
    """The move of each leaf; None if it is not an array.

    Args:
      tree: The parameters at rest.
      at_rest: Their layouts at rest.
      compute: Their layouts in use.
      data: The mesh axes that divide the data; None for those that the gathers remove.
      call: The call, for messages.
      what: The name of the tree in messages.
    """
    leaves = jax.tree.leaves(tree)
    resting, used = (layout_leaves(tree, layouts, call, what) for layouts in (at_rest, compute))
    pairs = zip(resting, used, strict=True)
    found: list[Move | None] = []
    faults: list[str] = []
    for path, leaf, (rest, use) in zip(paths(tree), leaves, pairs, strict=True):
        if rest is None or use is None:
            found.append(None)
            continue
        fault = _fault(leaf, rest, use)
        faults += [f"{path}: {fault}"] if fault else []
        if not fault:
            rest, use = rest.with_rank(len(leaf.shape)), use.with_rank(len(leaf.shape))
            found.append(Move(_names(rest), axes_by_dim(rest), axes_by_dim(use), ()))
    if faults:
        rule = "each parameter has the same dimensions at rest and in use, and no marks."
        raise LayoutError(rule, call=call, got=faults)
    gathered = dict.fromkeys(axis for move in found if move for axis in move.gathered)
    wanted = tuple(gathered) if data is None else checked_axes(data, "data", call)
    missing = [axis for axis in gathered if axis not in wanted]
    if missing:
        rule = f"parameters are gathered over {', '.join(missing)}, which must divide the data too."
        raise MeshError(rule, call=call, got=[f"data={data!r}"], fix=f"data={(*wanted, *missing)!r}")
    return [move and _with_copies(move, wanted) for move in found]


def _names(layout: Layout) -> Axes:
    """Names for the dimensions; their own, if each has one."""
    if len(layout.names) == len(layout.dims) == len(layout.atoms):
        return layout.names
    return tuple(f"d{i}" for i in range(len(layout.dims)))


def _fault(leaf: Any, rest: Layout, use: Layout) -> str:
    both = f'"{rest.short}" at rest, "{use.short}" in use'
    if rest.unreduced or rest.reduced or use.unreduced or use.reduced:
        return both
    rank = len(leaf.shape)
    if not has_room(rest, rank) or not has_room(use, rank):
        return f"{both}, rank {rank}"
    same = rest.has_ellipsis or use.has_ellipsis or rest.names == use.names
    return "" if same else both


def _with_copies(move: Move, data: Axes) -> Move:
    own = {axis for axes in (*move.rest, *move.use) for axis in axes}
    return Move(move.names, move.rest, move.use, tuple(axis for axis in data if axis not in own))
