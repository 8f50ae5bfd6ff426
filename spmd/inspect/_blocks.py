"""Which block of an array each device holds: the facts behind a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from spmd.errors import LayoutError, SizeError, did_you_mean, is_int
from spmd.language import Dim, Layout, Size, as_fault, axes_product, bind, check_axes, mesh_text
from spmd.mesh import crossing, owners_text

Block = tuple[int, ...]


class Piece(NamedTuple):
    """A run of one dimension, or of one factor of a composite. Without a size its ends are not known."""

    name: str
    text: str
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One dimension: how it is written, its size if known, and its blocks.

    A block is one piece. Where several factors of a composite are divided, it is one piece of each.
    """

    label: str
    size: int | None
    blocks: tuple[tuple[Piece, ...], ...]
    margin: tuple[int, int] = (0, 0)

    def text(self, number: int) -> str:
        """What a block covers: `0:4`, or `1+0:4+1` with margins, or `b 0:2, s 0:8` for a composite."""
        first, *more = self.blocks[number]
        if more:
            return ", ".join(f"{piece.name} {piece.text}" for piece in (first, *more))
        low, high = self.margin
        return (f"{low}+" if low else "") + first.text + (f"+{high}" if high else "")

    def to_dict(self, number: int) -> dict[str, Any]:
        first, *more = self.blocks[number]
        if more:
            return {piece.name: [piece.start, piece.stop] for piece in (first, *more)}
        return {"start": first.start, "stop": first.stop, "block": number}


@dataclass(frozen=True, eq=False)
class Holdings:
    """Which block each device holds.

    Attributes:
      title: The layout, as it is written.
      kind: What is known of the array beside it: `float32[8,16]`, or the sizes of names.
      mesh: Mesh axes with their sizes, in mesh order; empty for devices without a mesh.
      devices: The devices' numbers, in mesh order.
      sides: The dimensions.
      held: For each device and dimension the number of its block.
      unreduced: Axes along which devices hold summands.
      reduced: Axes along which equal copies have partial sums as gradients.
      local_shape: The shape of one device's shard, margins included; None where a size is not known.
      itemsize: Bytes per element, if known.
      notes: Sentences to print under the picture.
    """

    title: str
    kind: str
    mesh: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    sides: tuple[Side, ...]
    held: np.ndarray
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    local_shape: tuple[int, ...] | None = None
    itemsize: int | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def cells(self) -> dict[Block, tuple[tuple[int, ...], ...]]:
        """The copies of each block. A copy is the devices that hold it: several where they hold summands."""
        found: dict[Block, dict[tuple[int, ...], list[int]]] = {}
        kept = [place for place, (axis, _) in enumerate(self.mesh) if axis not in self.unreduced]
        for device, block, at in zip(self.devices, self.held.tolist(), self.coordinates, strict=True):
            copy = tuple(at[place] for place in kept) if self.mesh else (device,)
            found.setdefault(tuple(block), {}).setdefault(copy, []).append(device)
        return {block: tuple(map(tuple, copies.values())) for block, copies in found.items()}

    @cached_property
    def block_of(self) -> dict[int, Block]:
        """The block of each device."""
        return dict(zip(self.devices, map(tuple, self.held.tolist()), strict=True))

    @cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Each device's place on the mesh."""
        if not self.mesh:
            return [()] * len(self.devices)
        return list(itertools.product(*(range(size) for _, size in self.mesh)))

    @property
    def mesh_text(self) -> str:
        return mesh_text(dict(self.mesh)) if self.mesh else "no mesh"

    @property
    def nbytes(self) -> int | None:
        """Bytes of one device's shard, if known."""
        if self.local_shape is None or self.itemsize is None:
            return None
        return math.prod(self.local_shape) * self.itemsize

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        axes = [axis for axis, _ in self.mesh]
        return {
            "layout": self.title,
            "mesh": dict(self.mesh),
            "dimensions": [{"label": side.label, "size": side.size, "blocks": len(side.blocks)} for side in self.sides],
            "unreduced": list(self.unreduced),
            "reduced": list(self.reduced),
            "local_shape": None if self.local_shape is None else list(self.local_shape),
            "local_bytes": self.nbytes,
            "devices": [
                {
                    "device": device,
                    "coordinates": dict(zip(axes, at, strict=True)),
                    "index": [side.to_dict(number) for side, number in zip(self.sides, block, strict=True)],
                }
                for device, at, block in zip(self.devices, self.coordinates, self.held.tolist(), strict=True)
            ],
            "notes": list(self.notes),
        }


def of_layout(
    layout: Layout,
    sizes: Mapping[str, int],
    mesh: Mesh | AbstractMesh,
    *,
    dims: Sequence[int | None] | None = None,
    call: str,
    kind: str = "",
    itemsize: int | None = None,
    notes: Sequence[str] = (),
) -> Holdings:
    """What a layout puts on each device.

    Args:
      layout: The layout, its bare names placed already; no `...`.
      sizes: Global sizes of names, as far as they are known.
      mesh: The mesh; an abstract one numbers its devices in mesh order.
      dims: The global size of each dimension, where given by position.
      call: For errors.
      kind: What to say of the array; by default its sizes.
      itemsize: Bytes per element.
      notes: More sentences for the picture.
    """
    source = layout.source if layout.source and f'"{layout.source}"' in call else None
    check_axes(layout.axis_names, mesh.shape, call=call, source=source)
    whole = [_size(dim, sizes) for dim in layout.dims] if dims is None else list(dims)
    shape = dict(mesh.shape)
    given = {name: Size(size, "the sizes") for name, size in sizes.items()}
    bound = bind([("", whole, layout)], shape, known=given, margins=False)
    if bound.faults:
        raise SizeError(as_fault(bound.faults, shape, "The sizes do not fit the layout.", call=call))
    known = {name: bound.sizes[name].size for name in layout.names if name in bound.sizes}
    sides = tuple(_side(dim, size, known, shape) for dim, size in bound.dims[0])
    local = [None if n is None else n // axes_product(dim.axes, shape) + sum(dim.margin) for dim, n in bound.dims[0]]
    ids = tuple(d.id for d in mesh.devices.flat) if isinstance(mesh, Mesh) else tuple(range(mesh.size))
    return Holdings(
        layout.short,
        kind or ", ".join(f"{name}={size}" for name, size in known.items()),
        tuple(shape.items()),
        ids,
        sides,
        _held(layout, shape),
        layout.unreduced,
        layout.reduced,
        None if None in local else tuple(n for n in local if n is not None),
        itemsize,
        (*_layout_notes(layout, known, shape), *_process_notes(mesh), *notes),
    )


def _process_notes(mesh: Mesh | AbstractMesh) -> list[str]:
    """Along which axes one goes from process to process."""
    axes = crossing(mesh)
    return [f"{', '.join(axes)} cross{'es' * (len(axes) == 1)} processes: {owners_text(mesh)}"] if axes else []


def known_sizes(layout: Layout, shape: Any, call: str) -> tuple[dict[str, int], list[int | None] | None]:
    """The sizes that `shape` gives: by name from a mapping, else by position.

    Raises:
      SizeError: Something is not a size, or the layout does not have a name.
    """
    if shape is None:
        return {}, None
    given: dict[Any, Any] = dict(shape) if isinstance(shape, Mapping) else dict(enumerate(shape))
    wrong = [f"{name}={size!r}" for name, size in given.items() if not is_int(size, 0)]
    if wrong:
        rule = "Sizes are global sizes, integers of at least 0."
        raise SizeError(rule, call=call, got=wrong, advice='{"b": 8, "d": 16}, or (8, 16) by position')
    if not isinstance(shape, Mapping):
        return {}, [int(size) for size in given.values()]
    stray = [name for name in given if name not in layout.names]
    if stray:
        hints = [f"'{name}'{did_you_mean(str(name), layout.names) or ' is not among them'}" for name in stray]
        rule = f"Sizes are given for names of the layout: {', '.join(layout.names) or 'it has none'}."
        raise SizeError(rule, call=call, got=hints)
    return {name: int(size) for name, size in given.items()}, None


def of_indices(shape: Sequence[int], indices: Mapping[int, Sequence[slice]], **facts: Any) -> Holdings:
    """The blocks of a table from devices to index ranges, such as JAX's `devices_indices_map`."""
    ranges = {
        device: tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
        for device, index in indices.items()
    }
    sides, numbers = [], []
    for place, size in enumerate(shape):
        found = sorted({one[place] for one in ranges.values()})
        numbers.append({run: number for number, run in enumerate(found)})
        blocks = tuple((Piece("", f"{start}:{stop}", start, stop),) for start, stop in found)
        sides.append(Side(f"dim{place}", size, blocks))
    held = [[numbers[place][run] for place, run in enumerate(one)] for one in ranges.values()]
    shapes = {tuple(stop - start for start, stop in one) for one in ranges.values()}
    return Holdings(
        title=" ".join(side.label for side in sides) or "scalar",
        mesh=(),
        devices=tuple(ranges),
        sides=tuple(sides),
        held=np.array(held, dtype=int).reshape(len(ranges), len(shape)),
        local_shape=shapes.pop() if len(shapes) == 1 else None,
        **facts,
    )


def _size(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    factors = [atom.size if atom.size is not None else sizes.get(atom.name) for atom in dim.atoms]
    return None if None in factors else math.prod(factor for factor in factors if factor is not None)


# --- blocks --------------------------------------------------------------------------------------------------


def _side(dim: Dim, size: int | None, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> Side:
    if _is_scattered(dim, mesh):
        divided = [atom for atom in dim.atoms if atom.axes]
        runs = [_pieces(atom.name, sizes.get(atom.name), axes_product(atom.axes or (), mesh)) for atom in divided]
        return Side(dim.short, size, tuple(itertools.product(*runs)), dim.margin)
    pieces = _pieces(dim.short, size, axes_product(dim.axes, mesh))
    return Side(dim.short, size, tuple((piece,) for piece in pieces), dim.margin)


def _is_scattered(dim: Dim, mesh: Mapping[str, int]) -> bool:
    """Whether a factor after the first is divided. What a device holds is then runs with gaps between them."""
    return any(axes_product(atom.axes or (), mesh) > 1 for atom in dim.atoms[1:])


def _pieces(name: str, size: int | None, count: int) -> list[Piece]:
    if size is None:
        return [Piece(name, f"block {number}" if count > 1 else "all") for number in range(count)]
    step = size // count
    return [Piece(name, f"{at}:{at + step}", at, at + step) for at in (number * step for number in range(count))]


def _held(layout: Layout, mesh: Mapping[str, int]) -> np.ndarray:
    """The block of each device in each dimension: its place on the axes that divide the dimension, major first."""
    at = dict(zip(mesh, np.indices(tuple(mesh.values())).reshape(len(mesh), -1), strict=True))
    held = np.zeros((math.prod(mesh.values()), len(layout.dims)), dtype=int)
    for place, dim in enumerate(layout.dims):
        for axis in dim.axes:
            held[:, place] = held[:, place] * mesh[axis] + at[axis]
    return held


def _layout_notes(layout: Layout, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> list[str]:
    notes = []
    if layout.unreduced:
        axes = ", ".join(layout.unreduced)
        notes.append(f"partial sums over {axes}: the value is the sum of what the devices in sum(...) hold")
    if layout.reduced:
        notes.append(f"reduced over {', '.join(layout.reduced)}: equal copies, whose gradients stay partial sums")
    for dim in layout.dims:
        low, high = dim.margin
        if low or high:
            edges = [f"{n} {side}" for n, side in ((low, "before"), (high, "after")) if n]
            notes.append(f"{dim.short}: each block with a margin of {' and '.join(edges)}, copies of the neighbours")
        if _is_scattered(dim, mesh):
            notes.append(_scattered(dim, sizes, mesh))
    return notes


def _scattered(dim: Dim, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> str:
    """With `(b/dp s/cp)` a device holds rows of its b, and in each row the columns of its s: runs with gaps."""
    local = [
        None if atom.name not in sizes else sizes[atom.name] // axes_product(atom.axes or (), mesh)
        for atom in dim.atoms
    ]
    text = f"{dim.short}: a device holds scattered pieces of the dimension"
    if None in local:
        return text
    last = max(place for place, atom in enumerate(dim.atoms) if atom.axes)
    count, run = math.prod(n or 0 for n in local[:last]), math.prod(n or 0 for n in local[last:])
    return f"{text}, {count} run{'s' * (count != 1)} of {run}"


def no_arrow(text: Any, call: str) -> None:
    """Refuse a pattern: it is not a layout, and its picture is the picture of its plan."""
    if isinstance(text, str) and "->" in text:
        advice = f'spmd.visualize(spmd.plan("{text}", sizes=..., mesh=mesh, dtype=...))'
        rule = "A picture shows one layout. The picture of a pattern is the picture of its plan."
        raise LayoutError(rule, call=call, advice=advice)
