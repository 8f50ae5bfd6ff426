"""Point to point: which device sends which piece to which.

For a change of any two placements each dimension is cut into cells, of which the blocks of both are made. Every
device copies the cells of its target that it has from the start. Each other cell comes from a device that has it,
perhaps from itself. Every device wants as many cells as every other, and none needs to send more cells than one wants,
so senders can be chosen.
By Koenig's theorem (a bipartite graph has as many matchings as its largest degree) the sends then form rounds in which
every device sends one cell and receives one: each round is a permutation of the devices.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd.comm.planner._problem import Placement, Problem, State

MOST_ROUNDS = 64
MOST_DEVICES = 1024

Cell = tuple[int, ...]
Wants = list[tuple[int, Cell]]


class Round(NamedTuple):
    """One permutation, over the devices of all axes of the problem, numbered with the first axis as the major one.

    Attributes:
      sender: From whom each device receives.
      reads: Which piece each device sends: per dimension its place in the source shard, counted in pieces.
      writes: Where in its target shard each device puts what it receives.
    """

    sender: np.ndarray
    reads: np.ndarray
    writes: np.ndarray


class Rounds(NamedTuple):
    """All rounds, and the shape of a piece. What each device has itself comes first, and sends nothing."""

    piece: tuple[int, ...]
    rounds: tuple[Round, ...]


# --- rounds of cells --------------------------------------------------------------------------------------------


def rounds_between(problem: Problem, state: State) -> int:
    """How many rounds of cells bring `state` to the target; 0 where the rounds or the devices are too many."""
    cell = problem.whole // math.prod(_cells(problem.axes, state.placement, problem.target))
    rounds = problem.bound(state) // cell if cell else 0  # an array of no elements
    return rounds if rounds <= MOST_ROUNDS and math.prod(problem.axes) <= MOST_DEVICES else 0


def schedule(sizes: tuple[int, ...], axes: tuple[int, ...], source: Placement, target: Placement) -> Rounds:
    """The rounds of cells, as arrays over all devices."""
    cells = _cells(axes, source, target)
    have, want = (_boxes(axes, cells, side) for side in (source, target))
    own = [sorted(set(mine) & set(held)) for mine, held in zip(want, have, strict=True)]
    kept = min(map(len, own))
    rounds = [_round([(q, mine[i]) for q, mine in enumerate(own)], range(len(own)), have, want) for i in range(kept)]
    wants = [(q, cell) for q, mine in enumerate(want) for cell in mine if cell not in own[q][:kept]]
    most = len(want[0]) - kept
    senders = _senders(wants, have, most)
    for matching in _matchings([(sender, q) for sender, (q, _) in zip(senders, wants, strict=True)], most):
        rounds.append(_round([wants[i] for i in matching], [senders[i] for i in matching], have, want))
    return Rounds(tuple(size // n for size, n in zip(sizes, cells, strict=True)), tuple(rounds))


def _cells(axes: Sequence[int], source: Placement, target: Placement) -> tuple[int, ...]:
    """Into how many cells each dimension is cut."""
    sides = ([math.prod(axes[a] for a in run) for run in side] for side in (source, target))
    return tuple(math.lcm(a, b) for a, b in zip(*sides, strict=True))


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


def _senders(wants: Wants, have: list[list[Cell]], most: int) -> list[int]:
    """Who sends each cell, nobody more than `most`: by augmenting paths, the shortest first."""
    holders: dict[Cell, list[int]] = {}
    for device, held in enumerate(have):
        for cell in held:
            holders.setdefault(cell, []).append(device)
    chosen = [-1] * len(wants)
    load: list[list[int]] = [[] for _ in have]
    for item in range(len(wants)):
        asked: dict[int, int] = {}  # each device with the item that it would take over
        waiting, free = deque([item]), -1
        while free < 0:
            one = waiting.popleft()
            receiver, cell = wants[one]
            for device in sorted(holders[cell], key=lambda d: (d != receiver, len(load[d]))):
                if device not in asked:
                    asked[device] = one
                    waiting.extend(load[device])
                    free = device if free < 0 and len(load[device]) < most else free
        while free >= 0:
            one = asked[free]
            load[free].append(one)
            chosen[one], free = free, chosen[one]
            if free >= 0:
                load[free].remove(one)
    return chosen


def _matchings(edges: list[tuple[int, int]], most: int) -> list[list[int]]:
    """The edges from senders to receivers in `most` rounds, in none of them a device twice on one side: an edge
    colouring, two colours exchanged along a path where an edge finds none in common."""
    at: dict[tuple[str, int], dict[int, int]] = {}

    def ends(edge: int) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("from", edges[edge][0]), ("to", edges[edge][1])

    for new in range(len(edges)):
        one, other = ends(new)
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
            at[end][a] = new
    rounds: list[list[int]] = [[] for _ in range(most)]
    for (side, _), colors in at.items():
        for color, edge in colors.items() if side == "to" else ():
            rounds[color].append(edge)
    return rounds


def _round(received: Wants, senders: Sequence[int], have: list[list[Cell]], want: list[list[Cell]]) -> Round:
    """Each device receives one cell; cells by their places in the shards."""
    sender = np.empty(len(have), np.int64)
    reads, writes = (np.empty((len(have), len(have[0][0])), np.int32) for _ in range(2))
    for (receiver, cell), p in zip(received, senders, strict=True):
        sender[receiver] = p
        reads[p] = np.subtract(cell, have[p][0])
        writes[receiver] = np.subtract(cell, want[receiver][0])
    return Round(sender, reads, writes)


# --- whole target shards ----------------------------------------------------------------------------------------


def permutation(sizes: tuple[int, ...], axes: tuple[int, ...], source: Placement, target: Placement) -> Rounds:
    """The one round in which each device receives its whole target shard, where every source block is so many target
    blocks in each dimension: those that hold the same block send different parts of it."""
    have, want = ([math.prod(axes[a] for a in run) for run in side] for side in (source, target))
    finer = [b // a for a, b in zip(have, want, strict=True)]
    alike = math.prod(axes) // math.prod(want)
    devices = np.unravel_index(np.arange(math.prod(axes)), axes)
    part, turn = np.divmod(_mixed(devices, axes, _others(axes, source)), alike)
    parts = np.stack(np.unravel_index(part, finer), axis=1).astype(np.int32)
    sent, got = np.zeros_like(part), np.zeros_like(part)
    for dim, (a, b) in enumerate(zip(source, target, strict=True)):
        sent = sent * want[dim] + _mixed(devices, axes, a) * finer[dim] + parts[:, dim]
        got = got * want[dim] + _mixed(devices, axes, b)
    holder = np.empty_like(part)
    holder[sent * alike + turn] = np.arange(len(part))
    sender = holder[got * alike + _mixed(devices, axes, _others(axes, target))]
    piece = tuple(size // n for size, n in zip(sizes, want, strict=True))
    return Rounds(piece, (Round(sender, parts, np.zeros_like(parts)),))


def _others(axes: Sequence[int], placement: Placement) -> list[int]:
    return [a for a in range(len(axes)) if not any(a in run for run in placement)]


def _mixed(devices: Sequence[np.ndarray], axes: Sequence[int], run: Sequence[int]) -> np.ndarray:
    """Each device's number along the axes of `run`, the first being the major one."""
    number = np.zeros_like(devices[0])
    for axis in run:
        number = number * axes[axis] + devices[axis]
    return number
