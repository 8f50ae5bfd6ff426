"""How blocks are laid out on paper: which dimension goes along rows and columns, what is left out, device lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from spmd._units import bytes_text
from spmd.inspect._blocks import Block, Holdings

__all__ = [
    "MOST_DEVICES",
    "Arrangement",
    "Panel",
    "arrange",
    "cell_parts",
    "even",
    "facts",
    "is_summary",
    "mesh_rows",
    "panel_rows",
    "panel_title",
    "tints",
    "wrapped",
]

MOST_DEVICES = 64
_SHOWN = 2  # of a dimension with more blocks than fit, how many are drawn at the front; and one at the end

TINTS = MOST_DEVICES  # colours: one for each block that is drawn
T = TypeVar("T")
Numbers = Sequence[int | None]
"""Numbers of blocks; None stands for those left out."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Dimensions by their part in the picture, as places in the layout.

    `outer` dimensions are walked in slices, `row` and `column` span each slice's grid, and `whole` ones, which every
    device holds entirely, are only written.
    """

    outer: tuple[int, ...]
    row: int | None
    column: int | None
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One grid: the blocks of the outer dimensions that it shows, then those along rows and columns."""

    fixed: tuple[tuple[int, int], ...]
    rows: Numbers
    columns: Numbers

    def block(self, holdings: Holdings, arrangement: Arrangement, row: int, column: int) -> Block:
        """The block at a place of the grid."""
        block = [0] * len(holdings.sides)
        for place, number in self.fixed:
            block[place] = number
        for place, number in ((arrangement.row, row), (arrangement.column, column)):
            if place is not None:
                block[place] = number
        return tuple(block)


def arrange(holdings: Holdings) -> Arrangement:
    """The last two divided dimensions span the grid, those before are slices; whole ones fill up to two."""
    sides = holdings.sides
    drawn = [place for place, side in enumerate(sides) if len(side.blocks) > 1 or any(side.margin)]
    spare = [place for place in range(len(sides)) if place not in drawn]
    while spare and len(drawn) < 2:
        drawn.append(spare.pop())
    drawn.sort()
    row, column = (drawn[-2], drawn[-1]) if len(drawn) > 1 else (None, drawn[0] if drawn else None)
    return Arrangement(tuple(drawn[:-2]), row, column, tuple(spare))


def panel_rows(
    holdings: Holdings, arrangement: Arrangement, most_columns: int, most_rows: int | None = None
) -> Iterator[list[Panel]]:
    """The panels: a list stands side by side, the last outer dimension along it; too many columns or rows are
    continued in panels of their own."""
    rows = _numbers(holdings, arrangement.row)
    columns = _numbers(holdings, arrangement.column)
    chunks = list(itertools.product(even(rows, most_rows or len(rows)), even(columns, most_columns)))
    runs = [[n for n in _numbers(holdings, place) if n is not None] for place in arrangement.outer]
    for front in itertools.product(*runs[:-1]):
        panels = []
        for last in runs[-1] if runs else [None]:
            numbers = front if last is None else (*front, last)
            fixed = tuple(zip(arrangement.outer, numbers, strict=True))
            panels += [Panel(fixed, *chunk) for chunk in chunks]
        yield panels


def even(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """The items in as few parts as `most` allows, none much shorter than the others."""
    parts = max(1, -(-len(items) // most))
    size = max(1, -(-len(items) // parts))
    return [items[at : at + size] for at in range(0, len(items), size)]


def _numbers(holdings: Holdings, place: int | None) -> Numbers:
    count = 1 if place is None else len(holdings.sides[place].blocks)
    if is_summary(holdings) and count > _SHOWN + 2:
        return (*range(_SHOWN), None, count - 1)
    return tuple(range(count))


def is_summary(holdings: Holdings) -> bool:
    """Whether there are too many devices to draw all of them."""
    return len(holdings.devices) > MOST_DEVICES


def panel_title(holdings: Holdings, panel: Panel) -> str:
    """Which slice a panel is: `a/x 0:4, b/y 2:4`."""
    sides = holdings.sides
    return ", ".join(f"{sides[place].label} {sides[place].text(number)}" for place, number in panel.fixed)


def facts(holdings: Holdings, arrangement: Arrangement) -> list[str]:
    """The sentences under a picture."""
    found = [f"whole on each device: {_dims(holdings, arrangement.whole)}"] if arrangement.whole else []
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


def _dims(holdings: Holdings, places: Sequence[int]) -> str:
    return ", ".join(
        side.label if side.size is None else f"{side.label} {side.text(0)}"
        for side in (holdings.sides[place] for place in places)
    )


def _used(holdings: Holdings) -> set[str]:
    """The axes along which devices hold different blocks or summands."""
    used = set(holdings.unreduced)
    sizes = [size for _, size in holdings.mesh]
    held = holdings.held.reshape(*sizes, -1)
    for place, (axis, _) in enumerate(holdings.mesh):
        if (held != held.take([0], axis=place)).any():
            used.add(axis)
    return used


def tints(*pictures: Holdings) -> dict[int, int]:
    """A colour number for the first device of each block, those that are drawn before the others; the same device has
    one colour in all the pictures."""
    places = {device: at for holdings in pictures for at, device in enumerate(holdings.devices)}
    cells = [(block, copies[0][0], holdings) for holdings in pictures for block, copies in holdings.cells.items()]
    hidden = {device for _, device, _ in cells} - {d for block, d, holdings in cells if _drawn(holdings, block)}
    order = sorted({device for _, device, _ in cells}, key=lambda device: (device in hidden, places[device]))
    return {device: rank % TINTS for rank, device in enumerate(order)}


def _drawn(holdings: Holdings, block: Block) -> bool:
    return not is_summary(holdings) or all(n in _numbers(holdings, place) for place, n in enumerate(block))


# --- devices in a cell ---------------------------------------------------------------------------------------


def cell_parts(copies: Sequence[Sequence[int]], *, short: bool) -> list[str]:
    """What a cell says: the devices of each copy, runs as `0-3`, summands as `sum(0-3)`; parts may be on lines of
    their own. `short` keeps the first few and counts the rest."""
    if all(len(copy) == 1 for copy in copies):
        parts = _runs([copy[0] for copy in copies])
    else:
        parts = [f"sum({','.join(_few(_runs(copy), len(copy), short))})" for copy in copies]
    return _few(parts, sum(map(len, copies)), short)


def _few(parts: list[str], total: int, short: bool) -> list[str]:
    return [*parts[:_SHOWN], f"... ({total})"] if short and len(parts) > _SHOWN else parts


def wrapped(parts: Sequence[str], width: int) -> list[str]:
    """The parts with commas, on lines of at most `width` where that is possible."""
    lines: list[str] = []
    for number, part in enumerate(parts):
        text = part + ("," if number + 1 < len(parts) else "")
        if lines and len(lines[-1]) + 1 + len(text) <= width:
            lines[-1] += " " + text
        else:
            lines.append(text)
    return lines


def _runs(devices: Sequence[int]) -> list[str]:
    """`0 1 2 3 8` as `0-3`, `8`; two neighbours stay two numbers."""
    found: list[list[int]] = []
    for device in devices:
        if found and device == found[-1][-1] + 1:
            found[-1].append(device)
        else:
            found.append([device])
    texts: list[str] = []
    for run in found:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return texts


# --- the mesh ------------------------------------------------------------------------------------------------


def mesh_rows(holdings: Holdings) -> list[tuple[str, list[int]]]:
    """The mesh as a table: a row per place on all axes but the last, with its devices along the last."""
    axes = [axis for axis, _ in holdings.mesh]
    last = holdings.mesh[-1][1]
    rows = []
    for at in range(0, len(holdings.devices), last):
        place = holdings.coordinates[at][:-1]
        label = " ".join(f"{axis}={n}" for axis, n in zip(axes, place, strict=False))
        rows.append((label, list(holdings.devices[at : at + last])))
    return rows
