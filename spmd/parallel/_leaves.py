"""Parameters at rest and in use, leaf by leaf: which axes leave, which come, where the gradient is a sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from spmd import Layout
from spmd.errors import LayoutError, MeshError, compose, did_you_mean

__all__ = ["Axes", "Move", "axes_by_dim", "axes_tuple", "is_array", "layout_leaves", "moves", "paths", "text_of"]

Axes = tuple[str, ...]


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or says its shape and dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def axes_tuple(axes: str | Iterable[str] | None, what: str, call: str) -> Axes:
    """One mesh axis, several, or None, as a tuple."""
    if axes is not None and not isinstance(axes, (str, tuple, list)):
        rule = f"{what} is a mesh axis, a tuple of them, or None, not {type(axes).__name__}."
        raise MeshError(compose(rule, call=call, fix=f'{what}="dp"'))
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def paths(tree: Any) -> list[str]:
    """Where each leaf stands, keys joined with "/"."""
    return ["/".join(parts) or "(the tree itself)" for parts, _ in _by_path(tree)]


def _by_path(tree: Any, is_leaf: Any = None) -> list[tuple[Axes, Any]]:
    """Each leaf with the keys that lead to it, as texts: a list, a tuple, a dict and a class may name alike."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in found]


def layout_leaves(tree: Any, layouts: Any, call: str) -> list[Layout | None]:
    """The layout of each leaf of a tree; None where the leaf is no array.

    Args:
      tree: The arrays.
      layouts: A layout for all of them, layouts in containers with the keys of `tree` or of its upper part, or a
        function from the tree to one of these.
      call: The call, for messages.
    """
    if callable(layouts) and not isinstance(layouts, type) and jax.tree_util.all_leaves([layouts]):  # no module
        layouts = layouts(tree)
    specs = dict(_by_path(layouts, lambda one: one is None or isinstance(one, (str, Layout))))
    for spec in specs.values():
        if spec is not None and not isinstance(spec, (str, Layout)):
            rule = f"layouts are strings or Layouts in containers with the keys of the tree, not {_kind(spec)}."
            raise LayoutError(compose(rule, call=call, fix="spmd.layouts(tree, rules)"))
    used: set[Axes] = set()
    out: list[Layout | None] = []
    faults: list[str] = []
    for parts, leaf in _by_path(tree):
        above = [parts[:n] for n in range(len(parts), -1, -1) if parts[:n] in specs]
        used.update(above)
        spec = specs[above[0]] if above else None
        out.append(Layout(spec) if spec is not None and is_array(leaf) else None)
        if spec is None and is_array(leaf):
            faults.append(f"no layout for {'/'.join(parts) or 'the array'}")
    for parts, spec in specs.items():
        if spec is not None and parts not in used:
            hint = did_you_mean("/".join(parts), paths(tree))
            faults.append(f"a layout for {'/'.join(parts)}, which the tree does not have{hint}")
    if faults:
        raise LayoutError(compose("layouts have the keys of their tree, each array one.", call=call, got=faults))
    return out


def _kind(spec: Any) -> str:
    return f"the class {spec.__name__}" if isinstance(spec, type) else f"values of type {type(spec).__name__}"


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
      copies: Axes on which it is equal at rest, and over which its gradient is summed.
    """

    names: tuple[str, ...]
    rest: tuple[Axes, ...]
    use: tuple[Axes, ...]
    copies: Axes

    @property
    def gathered(self) -> Axes:
        """Axes that divide it at rest and not in use."""
        used = {axis for axes in self.use for axis in axes}
        return tuple(axis for axes in self.rest for axis in axes if axis not in used)

    @property
    def tiled(self) -> bool:
        """Whether all-gathers alone take it from rest to use."""
        return all(rest[: len(use)] == use for rest, use in zip(self.rest, self.use, strict=True))

    def inner(self) -> Move:
        """The same for one layer of a stack: the first dimension taken away."""
        return Move(self.names[1:], self.rest[1:], self.use[1:], self.copies)


def moves(tree: Any, at_rest: Any, compute: Any, data: Any, call: str) -> list[Move | None]:
    """The move of each leaf, None where it is no array.

    Args:
      tree: The parameters at rest.
      at_rest: Their layouts at rest.
      compute: Their layouts in use.
      data: The mesh axes that divide the data; None for those that the gathers remove.
      call: The call, for messages.
    """
    leaves = jax.tree.leaves(tree)
    pairs = zip(layout_leaves(tree, at_rest, call), layout_leaves(tree, compute, call), strict=True)
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
        raise LayoutError(compose(rule, call=call, got=faults))
    gathered = dict.fromkeys(axis for move in found if move for axis in move.gathered)
    wanted = tuple(gathered) if data is None else axes_tuple(data, "data", call)
    missing = [axis for axis in gathered if axis not in wanted]
    if missing:
        rule = f"parameters are gathered over {', '.join(missing)}, which then divides the data too."
        raise MeshError(compose(rule, call=call, got=[f"data={data!r}"], fix=f"data={(*wanted, *missing)!r}"))
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
    for layout in (rest, use):
        named = len(layout.dims) - layout.has_ellipsis
        if rank < named or (rank > named and not layout.has_ellipsis):
            return f"{both}, rank {rank}"
    same = rest.has_ellipsis or use.has_ellipsis or rest.names == use.names
    return "" if same else both


def _with_copies(move: Move, data: Axes) -> Move:
    own = {axis for axes in (*move.rest, *move.use) for axis in axes}
    return Move(move.names, move.rest, move.use, tuple(axis for axis in data if axis not in own))
