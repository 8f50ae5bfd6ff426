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

from spmd._text import bytes_text, fields_of
from spmd.drawing._picture import Cell, Grid
from spmd.errors import SizeError, did_you_mean, is_int
from spmd.language import Dim, Layout, Size, as_fault, axes_product, bind, check_axes, mesh_text
from spmd.mesh import crossing, crossing_text, owners_text

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
        """Return what a block covers: `0:4`, or `1+0:4+1` with margins, or `b 0:2, s 0:8` for a composite."""
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

    @property
    def placed(self) -> list[dict[str, Any]]:
        """Each device with its place, as plain values."""
        axes = [axis for axis, _ in self.mesh]
        places = (dict(zip(axes, at, strict=True)) for at in self.coordinates)
        return [{"device": device, "coordinates": at} for device, at in zip(self.devices, places, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        numbers = [
            [side.to_dict(number) for side, number in zip(self.sides, block, strict=True)]
            for block in self.held.tolist()
        ]
        return {
            "layout": self.title,
            "mesh": dict(self.mesh),
            "dimensions": [{"label": side.label, "size": side.size, "blocks": len(side.blocks)} for side in self.sides],
            "local_bytes": self.nbytes,
            "devices": [{**one, "index": index} for one, index in zip(self.placed, numbers, strict=True)],
            **fields_of(self, "unreduced", "reduced", "local_shape", "notes"),
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
    """Return what a layout puts on each device.

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
    crosses = [f"{crossing_text(axes)}: {owners_text(mesh)}"] if (axes := crossing(mesh)) else []
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
        (*_layout_notes(layout, known, shape), *crosses, *notes),
    )


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
    factors = [(dim.short, size, dim.axes)]
    if _is_scattered(dim, mesh):
        factors = [(atom.name, sizes.get(atom.name), atom.axes) for atom in dim.atoms if atom.axes]
    runs = [_pieces(name, n, axes_product(axes, mesh)) for name, n, axes in factors]
    return Side(dim.short, size, tuple(itertools.product(*runs)), dim.margin)


def _is_scattered(dim: Dim, mesh: Mapping[str, int]) -> bool:
    """Return whether a factor after the first is divided. What a device holds is then runs with gaps between them."""
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
    text = f"{dim.short}: a device holds scattered pieces of the dimension"
    if any(atom.name not in sizes for atom in dim.atoms):
        return text
    local = [sizes[atom.name] // axes_product(atom.axes or (), mesh) for atom in dim.atoms]
    last = max(place for place, atom in enumerate(dim.atoms) if atom.axes)
    count, run = math.prod(local[:last]), math.prod(local[last:])
    return f"{text}, {count} run{'s' * (count != 1)} of {run}"


# --- the blocks of an array as grids of cells, each with the devices that hold it -------------------------------------


MOST_DEVICES = 64  # up to here each is drawn, in its own colour; more are a summary
_SHOWN = 2  # how many blocks or devices of too many are drawn at the front; one block is drawn at the end
_WIDEST = 24  # characters of a list of devices, before it goes on in the next line


def block_grids(holdings: Holdings, colours: Mapping[int, int]) -> list[list[Grid]]:
    """The blocks as grids. Those of one list stand side by side: they differ in the last outer dimension."""
    outer, row, column, _ = _spread(holdings)
    runs = [[number for number in _numbers(holdings, place) if number is not None] for place in outer]
    found = []
    for front in itertools.product(*runs[:-1]):
        fixed = [dict(zip(outer, (*front, *last), strict=True)) for last in itertools.product(*runs[-1:])]
        found.append([_grid(holdings, one, row, column, colours) for one in fixed])
    return found


def is_summary(holdings: Holdings) -> bool:
    """Return whether there are too many devices to draw all of them."""
    return len(holdings.devices) > MOST_DEVICES


def _spread(holdings: Holdings) -> tuple[list[int], int | None, int | None, list[int]]:
    """The places of the dimensions by their part in the picture: outer ones, that of the rows, that of the columns, and
    those that are only written, because every device holds them whole.

    The last two divided dimensions span the grid, and those before them are outer. Whole ones fill up to two.
    """
    sides = holdings.sides
    drawn = [place for place, side in enumerate(sides) if len(side.blocks) > 1 or any(side.margin)]
    spare = [place for place in range(len(sides)) if place not in drawn]
    while spare and len(drawn) < 2:
        drawn.append(spare.pop())
    *outer, row, column = [None, None, *sorted(drawn)]
    return [place for place in outer if place is not None], row, column, spare


def _numbers(holdings: Holdings, place: int | None) -> Sequence[int | None]:
    """The numbers of the blocks that are drawn along a dimension. None stands for those left out."""
    count = 1 if place is None else len(holdings.sides[place].blocks)
    if is_summary(holdings) and count > _SHOWN + 2:
        return (*range(_SHOWN), None, count - 1)
    return range(count)


def _grid(
    holdings: Holdings, fixed: dict[int, int], row: int | None, column: int | None, colours: Mapping[int, int]
) -> Grid:
    """The blocks along two dimensions, where the outer ones are `fixed`."""
    sides = holdings.sides

    def heads(place: int | None) -> tuple[str, ...]:
        numbers = _numbers(holdings, place)
        return tuple("" if place is None else "..." if n is None else sides[place].text(n) for n in numbers)

    def cell(at_row: int | None, at_column: int | None) -> Cell:
        if at_row is None or at_column is None:
            return Cell(("...",))
        at = {**fixed, row: at_row, column: at_column}
        return _cell(holdings, tuple(at.get(place, 0) for place in range(len(sides))), colours)

    (left, right), (up, down) = ((0, 0) if place is None else sides[place].margin for place in (column, row))
    return Grid(
        rows=heads(row),
        columns=heads(column),
        cells=tuple(tuple(cell(n, m) for m in _numbers(holdings, column)) for n in _numbers(holdings, row)),
        title=", ".join(f"{sides[place].label} {sides[place].text(number)}" for place, number in fixed.items()),
        row_label="" if row is None else sides[row].label,
        column_label="" if column is None else sides[column].label,
        margins=(bool(left), bool(right), bool(up), bool(down)),
    )


def _cell(holdings: Holdings, block: Block, colours: Mapping[int, int]) -> Cell:
    copies = holdings.cells.get(block)
    if copies is None:
        return Cell()
    short = is_summary(holdings)
    index = "; ".join(f"{side.label} {side.text(number)}" for side, number in zip(holdings.sides, block, strict=True))
    devices = () if short else tuple(device for copy in copies for device in copy)
    tip = [f"holds {index or 'the scalar'}", *(f"device {_who(holdings, device)}" for device in devices)]
    return Cell(_listed(copies, short), colours[copies[0][0]], index, devices, "\n".join(tip))


def _who(holdings: Holdings, device: int) -> str:
    at = holdings.coordinates[holdings.devices.index(device)]
    place = " ".join(f"{axis}={n}" for (axis, _), n in zip(holdings.mesh, at, strict=False))
    return f"{device}: {place}" if place else str(device)


# --- lists of devices ----------------------------------------------------------------------------------------


def _listed(copies: Sequence[Sequence[int]], short: bool) -> tuple[str, ...]:
    """The devices of each copy, summands as `sum(0-3)`, on lines that fit into a cell."""
    if all(len(copy) == 1 for copy in copies):
        parts = device_runs([copy[0] for copy in copies])
    else:
        parts = [f"sum({','.join(_few(device_runs(copy), len(copy), short))})" for copy in copies]
    parts = _few(parts, sum(map(len, copies)), short)
    lines: list[str] = []
    for part in [*(f"{part}," for part in parts[:-1]), parts[-1]]:
        if lines and len(lines[-1]) + 1 + len(part) <= _WIDEST:
            lines[-1] += " " + part
        else:
            lines.append(part)
    return tuple(lines)


def _few(parts: list[str], total: int, short: bool) -> list[str]:
    return [*parts[:_SHOWN], f"... ({total})"] if short and len(parts) > _SHOWN else parts


def device_runs(devices: Sequence[int]) -> list[str]:
    """`0 1 2 3 8` as `0-3`, `8`; two neighbours stay two numbers."""
    texts: list[str] = []
    for _, run in itertools.groupby(enumerate(devices), key=lambda one: one[1] - one[0]):
        numbers = [device for _, device in run]
        texts += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    return texts


# --- the mesh, colours, sentences ----------------------------------------------------------------------------


def device_grid(holdings: Holdings, colours: Mapping[int, int]) -> Grid:
    """Return which device is where on the mesh, each in a colour: the last axis lies along the columns."""
    *front, (last, size) = holdings.mesh
    places = holdings.coordinates[::size]
    cells = [Cell((str(device),), colours[device], devices=(device,)) for device in holdings.devices]
    return Grid(
        rows=tuple(" ".join(f"{axis}={n}" for (axis, _), n in zip(front, at, strict=False)) for at in places),
        columns=tuple(f"{last}={n}" for n in range(size)),
        cells=tuple(tuple(cells[at : at + size]) for at in range(0, len(cells), size)),
        row_label="devices",
        framed=False,
    )


def tints(*pictures: Holdings) -> dict[int, int]:
    """The number of a colour for the first device of each block. Those that are drawn come before the others, and a
    device has one colour in all the pictures."""
    places = {device: at for holdings in pictures for at, device in enumerate(holdings.devices)}
    cells = [(block, copies[0][0], holdings) for holdings in pictures for block, copies in holdings.cells.items()]
    shown = {device for block, device, holdings in cells if _is_drawn(holdings, block)}
    order = sorted({device for _, device, _ in cells}, key=lambda device: (device not in shown, places[device]))
    return {device: rank % MOST_DEVICES for rank, device in enumerate(order)}


def _is_drawn(holdings: Holdings, block: Block) -> bool:
    return not is_summary(holdings) or all(n in _numbers(holdings, place) for place, n in enumerate(block))


def facts(holdings: Holdings) -> list[str]:
    """The sentences under a picture."""
    *_, whole = _spread(holdings)
    sides = [holdings.sides[place] for place in whole]
    texts = (side.label if side.size is None else f"{side.label} {side.text(0)}" for side in sides)
    found = [f"whole on each device: {', '.join(texts)}"] if whole else []
    if holdings.local_shape is not None:
        shape = " x ".join(map(str, holdings.local_shape))
        shape = f"a shard of {shape}" if shape else "one number"
        size = "" if holdings.nbytes is None else f", {bytes_text(holdings.nbytes)}"
        found.append(f"each device holds {shape}{size}")
    if any(len(copies) > 1 for copies in holdings.cells.values()):
        equal = [axis for axis, size in holdings.mesh if size > 1 and axis not in _used(holdings)]
        along = f" (along {', '.join(equal)})" if equal else ""
        found.append(f"devices in one cell hold equal copies{along}")
    found += holdings.notes
    if is_summary(holdings):
        count, cells = len(holdings.devices), len(holdings.cells)
        found.append(f"a summary: {count} devices hold {cells} different blocks; up to {MOST_DEVICES} are drawn")
        found.append("devices are numbered in mesh order, the last axis fastest")
    return found


def _used(holdings: Holdings) -> set[str]:
    """The axes along which devices hold different blocks or summands."""
    held = holdings.held.reshape(*(size for _, size in holdings.mesh), -1)
    different = (held != held.take([0], axis=place) for place in range(len(holdings.mesh)))
    axes = zip(holdings.mesh, different, strict=True)
    return {*holdings.unreduced, *(axis for (axis, _), apart in axes if apart.any())}
