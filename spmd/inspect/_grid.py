"""The blocks of an array as grids of cells, each with the devices that hold it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from spmd._units import bytes_text
from spmd.drawing._grid import Cell, Grid
from spmd.inspect._blocks import Block, Holdings

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
    """Whether there are too many devices to draw all of them."""
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


def mesh_grid(holdings: Holdings, colours: Mapping[int, int]) -> Grid:
    """Which device is where on the mesh, in the colour of its block."""
    return device_grid(holdings, {d: colours[holdings.cells[block][0][0]] for d, block in holdings.block_of.items()})


def device_grid(holdings: Holdings, colours: Mapping[int, int]) -> Grid:
    """Which device is where on the mesh, each in a colour: the last axis lies along the columns."""
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
    found = [f"whole on each device: {_sides_text(holdings, whole)}"] if whole else []
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


def _sides_text(holdings: Holdings, places: Sequence[int]) -> str:
    sides = [holdings.sides[place] for place in places]
    return ", ".join(side.label if side.size is None else f"{side.label} {side.text(0)}" for side in sides)


def _used(holdings: Holdings) -> set[str]:
    """The axes along which devices hold different blocks or summands."""
    held = holdings.held.reshape(*(size for _, size in holdings.mesh), -1)
    different = (held != held.take([0], axis=place) for place in range(len(holdings.mesh)))
    axes = zip(holdings.mesh, different, strict=True)
    return {*holdings.unreduced, *(axis for (axis, _), apart in axes if apart.any())}
