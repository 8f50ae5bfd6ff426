"""Point-to-point rounds where digits do not match, such as from halves to thirds: cell by cell.

Each dimension is cut into cells that both placements' blocks are made of. Every device lacks some cells of its target,
each of which several devices hold. Nobody needs to send more cells than the neediest device receives, so senders can be
chosen, and by Koenig's theorem (a bipartite graph has as many matchings as its largest degree) ordered into that many
rounds in which every device sends at most one cell and receives at most one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from spmd.comm.planner._problem import Placement, Problem, State
from spmd.comm.planner._sends_by_digit import MOST_ROUNDS, Round, Rounds

__all__ = ["cell_rounds", "schedule_cells"]

MOST_DEVICES = 64

Cell = tuple[int, ...]
Wants = list[tuple[int, Cell]]


def cell_rounds(problem: Problem, state: State) -> int:
    """How many rounds of cells bring `state` to the target; 0 where they, or the devices, are too many."""
    cell = problem.whole // math.prod(_cells(problem.axes, state.placement, problem.target))
    rounds = problem.bound(state) // cell if cell else 0  # an array of no elements
    return rounds if rounds <= MOST_ROUNDS and math.prod(problem.axes) <= MOST_DEVICES else 0


def _cells(axes: Sequence[int], source: Placement, target: Placement) -> tuple[int, ...]:
    """Into how many cells each dimension is cut."""
    sides = ([math.prod(axes[a] for a in run) for run in side] for side in (source, target))
    return tuple(math.lcm(a, b) for a, b in zip(*sides, strict=True))


def schedule_cells(sizes: tuple[int, ...], axes: tuple[int, ...], source: Placement, target: Placement) -> Rounds:
    """The rounds: first what each device has itself, then what it is sent."""
    cells = _cells(axes, source, target)
    have, want = (_boxes(axes, cells, side) for side in (source, target))
    piece = tuple(size // n for size, n in zip(sizes, cells, strict=True))
    own = [[c for c in mine if c in set(held)] for mine, held in zip(want, have, strict=True)]
    lacks: Wants = [(q, c) for q, mine in enumerate(want) for c in mine if c not in set(have[q])]
    most = max(sum(q == device for q, _ in lacks) for device in range(len(want)))
    rounds = []
    for i in range(max(map(len, own))):
        # a device with fewer cells of its own copies one again, or one that it is sent later
        copied = [mine[min(i, len(mine) - 1)] if mine else want[q][0] for q, mine in enumerate(own)]
        read = [c if c in held else held[0] for c, held in zip(copied, have, strict=True)]
        rounds.append(_round(list(range(len(want))), read, copied, have, want))
    for matching in _matchings(lacks, _senders(lacks, have, most), most):
        sender, read, write = [-1] * len(want), [held[0] for held in have], [mine[0] for mine in want]
        for p, (q, cell) in matching:
            sender[q], read[p], write[q] = p, cell, cell
        rounds.append(_round(sender, read, write, have, want))
    return Rounds(piece, tuple(rounds))


def _boxes(axes: Sequence[int], cells: tuple[int, ...], placement: Placement) -> list[list[Cell]]:
    """The cells of each device's block, in order."""
    found = []
    for device in itertools.product(*map(range, axes)):
        spans = []
        for n, run in zip(cells, placement, strict=True):
            block = 0
            for axis in run:
                block = block * axes[axis] + device[axis]
            width = n // math.prod(axes[a] for a in run)
            spans.append(range(block * width, (block + 1) * width))
        found.append(list(itertools.product(*spans)))
    return found


def _senders(lacks: Wants, have: list[list[Cell]], most: int) -> list[int]:
    """Who sends each cell that is lacked, nobody more than `most`: by augmenting paths."""
    holders: dict[Cell, list[int]] = {}
    for device, held in enumerate(have):
        for cell in held:
            holders.setdefault(cell, []).append(device)
    chosen = [-1] * len(lacks)
    load: list[list[int]] = [[] for _ in have]

    def place(item: int, tried: set[int]) -> bool:
        for device in sorted(holders[lacks[item][1]], key=lambda d: len(load[d])):
            if device in tried:
                continue
            tried.add(device)
            if len(load[device]) < most or any(place(other, tried) for other in list(load[device])):
                if chosen[item] >= 0:
                    load[chosen[item]].remove(item)
                chosen[item] = device
                load[device].append(item)
                return True
        return False

    for item in range(len(lacks)):
        if not place(item, set()):
            raise AssertionError("the holders of each cell can share its sends")
    return chosen


def _matchings(lacks: Wants, senders: list[int], most: int) -> list[list[tuple[int, tuple[int, Cell]]]]:
    """The sends in rounds: an edge colouring, two colours exchanged along a path where an edge finds none in common."""
    at: dict[tuple[str, int], dict[int, int]] = {}

    def ends(item: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("from", senders[item]), ("to", lacks[item][0])

    for item in range(len(lacks)):
        one, other = ends(item)
        a, b = (next(c for c in range(most) if c not in at.setdefault(end, {})) for end in (one, other))
        path, here, color = [], other, a
        while a != b and color in at[here]:
            edge = at[here][color]
            path.append((edge, color))
            here = next(end for end in ends(edge) if end != here)
            color = b if color == a else a
        for edge, old in path:
            for end in ends(edge):
                at[end].pop(old, None)
        for edge, old in path:
            for end in ends(edge):
                at[end][b if old == a else a] = edge
        for end in (one, other):
            at[end][a] = item
    rounds: list[list[tuple[int, tuple[int, Cell]]]] = [[] for _ in range(most)]
    for (side, device), colors in at.items():
        for color, item in colors.items() if side == "from" else ():
            rounds[color].append((device, lacks[item]))
    return rounds


def _round(
    sender: list[int], read: list[Cell], write: list[Cell], have: list[list[Cell]], want: list[list[Cell]]
) -> Round:
    """Cells by their places in the shards."""
    reads, writes = (
        np.array([np.subtract(cell, box[0]) for cell, box in zip(cells, boxes, strict=True)], np.int32)
        for cells, boxes in ((read, have), (write, want))
    )
    return Round(np.array(sender), reads, writes)
