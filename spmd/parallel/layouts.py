"""Layouts of parameters, gradients and optimizer state at rest, chosen from shapes; and how parameters get to use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from spmd import AxisMapping, Layout, scope
from spmd._text import Table, shown_width
from spmd._trees.leaves import has_room, is_array, kind_of
from spmd._trees.matching import match_prefix
from spmd.errors import LayoutError, MeshError
from spmd.language import axes_product, axes_tuple, check_axes, mesh_text
from spmd.mesh import sizes_for

Axes = tuple[str, ...]


class ZeroLayouts(NamedTuple):
    """The layouts of one ZeRO stage, each a tree like the parameters."""

    parameters: Any
    gradients: Any
    state: Any


@dataclass(frozen=True)
class _Row:
    """One leaf of the report."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    size: int
    parts: int
    why: str


@dataclass(frozen=True, repr=False)
class FSDPLayouts:
    """The result of `fsdp_layouts`. Printed, it shows each leaf, and why a leaf stays whole.

    Attributes:
      at_rest: The layouts of parameters at rest, a tree like the parameters.
      compute: Their layouts in use: those given as `base`.
      axes: The mesh axes over which parameters are divided at rest.
      rows: The printed facts: path, dtype, shape, layout, bytes of the whole leaf, number of parts, why it stays whole.

    Example:
      >>> import jax
      >>> from spmd import parallel
      >>> params = {"w": jax.ShapeDtypeStruct((256, 128), "float32")}
      >>> plan = parallel.fsdp_layouts(params, {"w": "d f"}, fsdp="dp", mesh={"dp": 4})
      >>> str(plan.at_rest["w"]), str(plan.compute["w"]), plan.whole
      ('d/dp f', 'd f', 0.0)
    """

    at_rest: Any
    compute: Any
    axes: Axes
    rows: tuple[_Row, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the parameters that one device holds at rest."""
        return sum(row.size // row.parts for row in self.rows)

    @property
    def whole(self) -> float:
        """The share of the bytes at rest on a device that could not be divided over `axes`."""
        return sum(row.size // row.parts for row in self.rows if row.why) / max(self.bytes, 1)

    def zero(self, stage: int) -> ZeroLayouts:
        """The layouts of a ZeRO stage: 1 divides the optimizer state, 2 gradients too, 3 parameters too.

        Args:
          stage: 1, 2 or 3.

        Returns:
          The layouts of parameters, gradients and, through `state_layouts`, optimizer state.

        Raises:
          LayoutError: If there is no such stage.

        References:
          Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054
        """
        if stage not in (1, 2, 3):
            rule = f"the stages of ZeRO are 1, 2 and 3, not {stage!r}."
            raise LayoutError(rule, call="FSDPLayouts.zero(stage)", advice="as in .zero(3)")
        return ZeroLayouts(
            self.at_rest if stage > 2 else self.compute, self.at_rest if stage > 1 else self.compute, self.at_rest
        )

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            array = f"{row.dtype}[{','.join(map(str, row.shape))}]"
            rows.append((row.path, array, row.layout, str(row.size // row.parts), row.why))
        table = Table(rows, head=("parameter", "array", "at rest", "bytes/device", ""), right=(3,), below=(4,))
        total = sum(row.size for row in self.rows)
        share = f"{self.whole:.1%} of them not divided over {'/'.join(self.axes)}"
        return f"{table.text(shown_width(None))}\n{self.bytes} bytes per device of {total}; {share}"

    __repr__ = __str__


@scope
def fsdp_layouts(
    tree: Any,
    base: Any = None,
    *,
    fsdp: str | Axes,
    mesh: Any,
    min_size: int = 2**14,
    keep: str | Sequence[str] = (),
) -> FSDPLayouts:
    """Choose from its shape how each parameter is divided over the fsdp axes at rest.

    Each leaf keeps the layout that it has in use, and one of its dimensions is divided over `fsdp` too. This is the
    largest dimension that is whole and divides. If there is none, it is the largest that another axis divides already
    (`"f/tp"` becomes `"f/tp/dp"`). Small leaves, and leaves without a dimension that divides, stay as they are; the
    printed result says which and why. An axis that already divides a leaf, such as one of experts, is not used a second
    time. Nothing communicates.

    For hybrid sharding (HSDP) `fsdp` is the axis within a group. Leave out the axis over groups: parameters are equal
    along it. Pass both to `gather`, `data=("replicas", "shards")`.

    Args:
      tree: The parameters, arrays or `jax.ShapeDtypeStruct`s, in any container.
      base: Their layouts in use, without the fsdp axes: a tree like `tree`, a prefix, one layout for all, or a function
        from the tree. By default whole and unnamed.
      fsdp: The mesh axes that divide parameters at rest, major first.
      mesh: A Mesh, an AbstractMesh or a dict of sizes.
      min_size: Leaves with fewer elements stay whole; the dimensions in `keep` do not count.
      keep: Names of dimensions that are never divided, such as that of stacked layers.

    Returns:
      The layouts at rest and in use, and the report.

    Raises:
      LayoutError: If layouts and tree do not fit, or no parameter is divided.
      MeshError: If the mesh lacks an axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from spmd import parallel
      >>> params = {"w": jnp.ones((6, 8)), "scale": jnp.ones(6), "odd": jnp.ones((5, 7))}
      >>> base = {"w": "d f/tp", "scale": "d", "odd": "a b"}
      >>> found = parallel.fsdp_layouts(params, base, fsdp="dp", mesh={"dp": 2, "tp": 2}, min_size=8)
      >>> print(found)
      parameter  array         at rest    bytes/device
      odd        float32[5,7]  a b                 140  whole: no dimension divides by dp=2
      scale      float32[6]    d                    24  whole: fewer than 8 elements
      w          float32[6,8]  d/dp f/tp            48
      212 bytes per device of 356; 77.4% of them not divided over dp

    References:
      Zhao et al., PyTorch FSDP, https://arxiv.org/abs/2304.11277; Zhang et al., MiCS (HSDP),
      https://arxiv.org/abs/2205.00119
    """
    call = "fsdp_layouts(tree, base, fsdp=...)"
    axes = checked_axes(fsdp, "fsdp", call)
    sizes = sizes_for(mesh, call)
    named = (keep,) if isinstance(keep, str) else tuple(keep)
    declared = laid_out(tree, "..." if base is None else base, call)
    _check_axes(axes, [layout for *_, layout in declared], sizes, call)
    at_rest: list[Layout | None] = []
    compute: list[Layout | None] = []
    rows: list[_Row] = []
    for path, leaf, layout in declared:
        if layout is None:
            at_rest.append(None)
            compute.append(None)
            continue
        layout = _of_rank(layout, leaf, path, call)
        rest, why = _divided(layout, leaf.shape, axes, sizes, min_size, named)
        at_rest.append(rest)
        compute.append(layout)
        parts = axes_product(rest.axes, sizes)
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        rows.append(_Row(path, str(leaf.dtype), tuple(leaf.shape), rest.short, size, parts, why))
    if rows and all(row.why for row in rows):
        rule = f"none of these parameters is divided over {'/'.join(axes)}."
        got = [f"{row.path}: {row.why}" for row in rows]
        raise LayoutError(rule, call=call, got=got, advice="a smaller min_size, or no FSDP")
    build = lambda found: jax.tree.unflatten(jax.tree.structure(tree), found)
    return FSDPLayouts(build(at_rest), build(compute), axes, tuple(rows))


def _check_axes(axes: Axes, layouts: Sequence[Layout | None], sizes: Mapping[str, int], call: str) -> None:
    used = dict.fromkeys([*axes, *(axis for layout in layouts if layout for axis in layout.axes)])
    check_axes(used, sizes, call=call)
    if not axes:
        rule = "fsdp names at least one mesh axis that divides the parameters."
        raise MeshError(rule, call=call, got=[mesh_text(sizes)])


def _ranked(tree: Any, layouts: Any, call: str, what: str = "tree") -> list[Layout | None]:
    """The layout of each leaf, None if it is not an array; every layout has the rank of its array."""
    found = laid_out(tree, layouts, call, what)
    for path, leaf, layout in found:
        if layout is not None:
            _of_rank(layout, leaf, path, call)
    return [layout for *_, layout in found]


def _of_rank(layout: Layout, leaf: Any, path: str, call: str) -> Layout:
    rank = len(leaf.shape)
    if not has_room(layout, rank) or layout.unreduced or layout.reduced:
        rule = "a layout has as many dimensions as the array, and no marks."
        got = [f'{path}: shape {tuple(leaf.shape)}, "{layout.short}"']
        raise LayoutError(rule, call=call, got=got)
    return layout.with_rank(rank)


def _divided(
    layout: Layout, shape: Sequence[int], axes: Axes, sizes: Mapping[str, int], min_size: int, keep: Axes
) -> tuple[Layout, str]:
    """The layout with the axes added to one dimension, or the reason why they are not."""
    new = tuple(axis for axis in axes if axis not in layout.axes)
    names = tuple(_name(dim) for dim in layout.dims)
    free = [i for i, name in enumerate(names) if name not in keep]
    if not new:
        return layout, ""
    if math.prod(shape[i] for i in free) < min_size:
        return layout, f"whole: fewer than {min_size} elements"
    parts = axes_product(new, sizes)
    before = axes_by_dim(layout)
    fitting = [i for i in free if shape[i] % (parts * axes_product(before[i], sizes)) == 0]
    if not fitting:
        text = ", ".join(f"{axis}={sizes[axis]}" for axis in new)
        return layout, f"whole: no dimension divides by {text}"
    best = max(fitting, key=lambda i: (not before[i], shape[i], -i))
    after = tuple((*own, *new) if i == best else own for i, own in enumerate(before))
    return Layout(text_of(names, after)), ""


def _name(dim: Any) -> str:
    """A dimension as it is written, without its axes, with all its factors."""
    return dim.names[0] if len(dim.names) == 1 else f"({' '.join(dim.names)})"


def mapped_layouts(tree: Any, layouts: Any, mapping: AxisMapping | Mapping[str, Any]) -> Any:
    """Layouts of named dimensions, placed by a mapping: one set of names, one mapping at rest, another in use.

    `gather(params, mapped_layouts(params, names, rest), mapped_layouts(params, names, use))` moves from one mapping to
    another. Nothing communicates.

    Args:
      tree: The parameters, arrays or `jax.ShapeDtypeStruct`s.
      layouts: Their layouts with bare names, a tree like `tree`, a prefix, or a function from the tree.
      mapping: The rules, an `AxisMapping` or a dict. Each bare name must have one, None for whole.

    Returns:
      A tree like `tree` with a Layout for each array.

    Raises:
      LayoutError: If a name has no rule, two names of an array are placed on one axis, or a rank does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from spmd import parallel
      >>> parallel.mapped_layouts({"w": jnp.ones((4, 8))}, {"w": "embed mlp"}, {"embed": "dp", "mlp": "tp"})
      {'w': Layout('embed/dp mlp/tp')}
    """
    call = "mapped_layouts(tree, layouts, mapping)"
    rules = AxisMapping.of(mapping)
    found = _ranked(tree, layouts, call)
    rules.need(dict.fromkeys(name for layout in found if layout for name in rules.lacks(layout)), call)
    return jax.tree.unflatten(jax.tree.structure(tree), [layout and layout.resolve(rules) for layout in found])


def state_layouts(state: Any, params: Any, layouts: Any) -> Any:
    """The layouts of an optimizer's state: what is kept for a parameter has the layout of that parameter.

    A leaf of the state belongs to a parameter if it has the parameter's shape and its path ends with the parameter's
    path, as Adam's moments do. Everything else, such as a count of steps, is whole. Nothing communicates.

    Args:
      state: The state, or its shapes: `jax.eval_shape(optimizer.init, params)`.
      params: The parameters, or their shapes.
      layouts: The layouts of the parameters; for a ZeRO stage, those at rest.

    Returns:
      A tree like `state` with a Layout for each array.

    Raises:
      LayoutError: If layouts and parameters do not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from spmd import parallel
      >>> params = {"w": jnp.ones((4, 8))}
      >>> state = {"count": jnp.zeros((), int), "momentum": params}
      >>> parallel.state_layouts(state, params, {"w": "d/dp f"})
      {'count': Layout('scalar'), 'momentum': {'w': Layout('d/dp f')}}
    """
    flat = jax.tree_util.tree_flatten_with_path
    found = _ranked(params, layouts, "state_layouts(state, params, layouts)", "params")
    known = [(path, leaf, layout) for (path, leaf), layout in zip(flat(params)[0], found, strict=True) if layout]
    known.sort(key=lambda entry: -len(entry[0]))

    def of(path: Any, leaf: Any) -> Layout | None:
        if not is_array(leaf):
            return None
        own = (
            layout
            for place, param, layout in known
            if path[len(path) - len(place) :] == place and param.shape == leaf.shape
        )
        return next(own, Layout(text_of(("_",) * len(leaf.shape), ((),) * len(leaf.shape))))

    leaves, structure = flat(state)
    return jax.tree.unflatten(structure, [of(path, leaf) for path, leaf in leaves])


# --- parameters at rest and in use, leaf by leaf: the axes to gather, and the axes over which gradients are summed ----


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


def laid_out(tree: Any, layouts: Any, call: str, what: str = "tree") -> list[tuple[str, Any, Layout | None]]:
    """Each leaf of a tree: its path, itself, and its layout; None if the leaf is not an array.

    Args:
      tree: The arrays.
      layouts: A prefix tree of layouts, as in `spmd.shard`.
      call: The call, for messages.
      what: The name of the tree in messages.
    """
    found = match_prefix(layouts, tree, what, call)
    pairs = zip(paths(tree), found, strict=True)
    return [(path, leaf, layout if is_array(leaf) else None) for path, (_, leaf, layout) in pairs]


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
        """Return whether all-gathers alone move it from rest to use."""
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
    resting, used = (laid_out(tree, layouts, call, what) for layouts in (at_rest, compute))
    found: list[Move | None] = []
    faults: list[str] = []
    for (path, leaf, rest), (_, _, use) in zip(resting, used, strict=True):
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
