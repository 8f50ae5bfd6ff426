"""The steps of a relayout, and what each sends."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

# --- point to point: which device sends which piece to which ----------------------------------------------------------
#
# For a change of any two placements each dimension is cut into cells, of which the blocks of both are made. Every
# device copies the cells of its target that it has from the start. Each other cell comes from a device that has it,
# perhaps from itself. Every device wants as many cells as every other, and none needs to send more cells than one
# wants, so senders can be chosen. By Koenig's theorem (a bipartite graph has as many matchings as its largest degree)
# the sends then form rounds in which every device sends one cell and receives one: each round is a permutation of the
# devices.


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
    """Return how many rounds of cells bring `state` to the target; 0 where the rounds or the devices are too many."""
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
    for matching in matchings([(sender, q) for sender, (q, _) in zip(senders, wants, strict=True)]):
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
    """Return who sends each cell, nobody more than `most`: by augmenting paths, the shortest first."""
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


def matchings(edges: list[tuple[int, int]]) -> list[list[int]]:
    """The edges from senders to receivers in the fewest rounds, in none of them a device twice on one side: an edge
    colouring, two colours exchanged along a path where an edge finds none in common."""
    most = max((n for side in zip(*edges, strict=True) for n in Counter(side).values()), default=0)
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


# --- the problem in numbers alone: sizes, axes as numbers, and the bound on what must travel --------------------------


Placement = tuple[tuple[int, ...], ...]
"""For each dimension the axes that divide it, major first."""


class State(NamedTuple):
    """How an array lies on the mesh on the way: its placement, and the axes on which it is still a partial sum."""

    placement: Placement
    summed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """From one placement to another.

    Mesh axes are numbers, and `axes` are their sizes. An axis of size 1 is not part of the problem, and neither is an
    axis that stands at the front of a dimension on both sides.

    Attributes:
      sizes: The sizes of the dimensions, divided by the axes that stay in front.
      axes: The size of each axis.
      source: Where the array lies.
      target: Where it is to lie.
      summed: Axes on which the source is a partial sum and the target is complete.
      copies: How many devices beside those of the axes hold each term of a sum, and may help to add it up.
      parts: Whether each axis is a part of one.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    source: Placement
    target: Placement
    summed: tuple[int, ...] = ()
    copies: int = 1
    parts: tuple[bool, ...] = ()

    @cached_property
    def whole(self) -> int:
        """Elements of the array that the devices with one setting of the axes in front hold together."""
        return math.prod(self.sizes)

    @cached_property
    def limit(self) -> int:
        """The larger of the two ends, per device, which an intermediate should not exceed."""
        return max(self.local(self.source), self.local(self.target))

    def count(self, axes: Sequence[int]) -> int:
        """Return how many blocks the axes make."""
        total = 1
        for axis in axes:
            total *= self.axes[axis]
        return total

    def blocks(self, placement: Placement) -> tuple[int, ...]:
        """Into how many blocks each dimension is divided."""
        return tuple(self.count(axes) for axes in placement)

    def local(self, placement: Placement) -> int:
        """Elements per device."""
        return self.whole // math.prod(self.blocks(placement))

    def psum(self, state: State, axes: tuple[int, ...]) -> Move:
        """A sum that stays where it is. JAX has no psum within groups: there the terms are gathered."""
        local, n = self.local(state.placement), self.count(axes)
        elements = local * (n - 1) if any(self.parts[a] for a in axes) else -(-2 * local * (n - 1) // n)
        return Move("psum", axes, State(state.placement, tuple(a for a in state.summed if a not in axes)), elements)

    def fits(self, placement: Placement) -> bool:
        """Return whether every dimension divides."""
        return all(not axes or size % self.count(axes) == 0 for size, axes in zip(self.sizes, placement, strict=True))

    def free(self, state: State) -> tuple[int, ...]:
        """The axes on which the array is equal."""
        used = {axis for axes in state.placement for axis in axes}.union(state.summed)
        return tuple(axis for axis in range(len(self.axes)) if axis not in used)

    def bound(self, state: State) -> int:
        """Elements that some device must receive to come from `state` to the target, whatever the method.

        For a complete source it is what the target shard needs and the source shard lacks, on the device where that is
        most. Two blocks of a dimension lie in each other on every device if one list of axes is the front of the other.
        Otherwise the first axes that differ are set independently, and there are devices where the blocks do not meet.
        So no device needs to be looked at.

        For a partial sum of u parts no element of the target is there before something came in, so it is at least the
        target shard. Bringing u parts together takes u - 1 transfers. Giving the sum to q devices takes q - 1 more,
        which come later. Some device has at least the average of these: S(n-1)/n for a reduce-scatter, 2S(n-1)/n for an
        all-reduce.
        """
        wanted = self.local(self.target)
        if state.summed:
            devices = self.copies * self.count(range(len(self.axes)))
            holders = devices // math.prod(self.blocks(self.target))
            transfers = self.whole * (self.count(state.summed) - 1 + holders - 1)
            return max(wanted, -(-transfers // devices))
        kept = 1
        for size, have, want in zip(self.sizes, state.placement, self.target, strict=True):
            shared = min(len(have), len(want))
            if have[:shared] != want[:shared]:
                return wanted
            kept *= size // self.count(have if len(have) > len(want) else want)
        return wanted - kept

    @cached_property
    def finer(self) -> tuple[tuple[Placement, tuple[int, ...]], ...]:
        """The target, and each placement from which one gather leads to it, with their blocks."""
        free = self.free(State(self.target))
        found = []
        for used in ordered(free):
            for runs in cuts(used, len(self.sizes)):
                placement = tuple(axes + run for axes, run in zip(self.target, runs, strict=True))
                if self.fits(placement):
                    found.append((placement, self.blocks(placement)))
        return tuple(found)


MOST = 4
"""With more axes than these, not every order is tried."""


def ordered(axes: Sequence[int], least: int = 0) -> Iterator[tuple[int, ...]]:
    """Every choice of the axes in every order, or, if they are many, in the order given."""
    for count in range(least, len(axes) + 1):
        yield from itertools.permutations(axes, count) if len(axes) <= MOST else itertools.combinations(axes, count)


def cuts(run: tuple[int, ...], parts: int) -> Iterator[Placement]:
    """Every way to cut a run into consecutive parts, which may be empty."""
    if not parts:
        if not run:
            yield ()
        return
    for inner in itertools.combinations_with_replacement(range(len(run) + 1), parts - 1):
        yield tuple(run[a:b] for a, b in itertools.pairwise((0, *inner, len(run))))


class Move(NamedTuple):
    """One step.

    Attributes:
      kind: What it is.
      axes: The axes whose devices talk to each other. None for a split.
      after: How the array lies then.
      elements: How many elements a device sends, rounded up for a psum.
      collectives: How many collectives it takes: none for a split, and for sends their rounds.
      steps: What it counts for if all else is equal: a ppermute of cut shards more than a split and a ppermute.
    """

    kind: str
    axes: tuple[int, ...]
    after: State
    elements: int
    collectives: int = 1
    steps: int = 1


def moves(problem: Problem, state: State, *, sends: bool, limit: int) -> Iterator[Move]:
    """Every step from `state`.

    Args:
      problem: The problem.
      state: Where the array lies.
      sends: Whether point-to-point rounds may be used.
      limit: Elements per device that no step may exceed.
    """
    yield from _landings(problem, state, limit)
    if not state.summed:
        yield from _permutes(problem, state)
    yield from _sums(problem, state)
    yield from _gathers(problem, state, limit)
    if sends and not state.summed and state.placement != problem.target and (rounds := rounds_between(problem, state)):
        # Last: of two steps that cost the same, the first is taken, and one gather is simpler than its sends.
        everyone = tuple(range(len(problem.axes)))
        yield Move("sends", everyone, State(problem.target), problem.bound(state), rounds)


def _landings(problem: Problem, state: State, limit: int) -> Iterator[Move]:
    """split and all_to_all: some dimensions lose the axes at their end, which land at the end of others, in any order.
    Axes on which the array is equal may stand between them, and each device keeps its own block of those. Some of the
    axes lost may land nowhere. Along these every device gets the same, as from an all_gather."""
    placement, local = state.placement, problem.local(state.placement)
    free = problem.free(state)
    for keep in itertools.product(*(range(len(axes) + 1) for axes in placement)):
        lost = tuple(axis for axes, k in zip(placement, keep, strict=True) for axis in axes[k:])
        gains = [i for i, k in enumerate(keep) if k == len(placement[i])]
        if not gains:
            continue
        kept = tuple(axes[:k] for axes, k in zip(placement, keep, strict=True))
        if not lost:
            for after, _ in _landed(problem, kept, gains, (), free):
                yield Move("split", (), State(after, state.summed), 0, 0)
        group = problem.count(lost)
        for landing in _choices(lost):
            if not landing or (state.summed and len(landing) < len(lost)):
                continue
            for after, run in _landed(problem, kept, gains, landing, free):
                shard = local * group // problem.count(run)
                if shard <= limit:
                    yield Move("all_to_all", lost, State(after, state.summed), shard - shard // group)


def _landed(
    problem: Problem, kept: Placement, gains: list[int], must: tuple[int, ...], may: tuple[int, ...]
) -> Iterator[tuple[Placement, tuple[int, ...]]]:
    """Placements in which the axes `must` and any of the axes `may` have landed behind `kept` in the dimensions
    `gains`."""
    for extra in _choices(may):
        axes = must + extra
        if not axes:
            continue
        for run in ordered(axes, len(axes)):
            for runs in cuts(run, len(gains)):
                after = list(kept)
                for i, more in zip(gains, runs, strict=True):
                    after[i] += more
                if problem.fits(tuple(after)):
                    yield tuple(after), run


def _choices(axes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _permutes(problem: Problem, state: State) -> Iterator[Move]:
    """ppermute: whole shards change places. Afterwards the target is reached or one gather away, or the axes of a
    dimension stand in another order. Equal shards may be cut first, so that every device sends another part."""
    blocks = problem.blocks(state.placement)
    yield from _reordered(problem, state)
    for after, there in problem.finer:
        if after == state.placement or any(n % m for n, m in zip(there, blocks, strict=True)):
            continue
        axes = {a for x, y in zip(state.placement, after, strict=True) for a in _differing(x, y)}
        if there == blocks:
            yield Move("ppermute", tuple(sorted(axes)), State(after), problem.local(after))
        elif any(a != b[: len(a)] for a, b in zip(state.placement, after, strict=True)):
            axes = tuple(sorted(axes.union(problem.free(state))))
            yield Move("ppermute", axes, State(after), problem.local(after), steps=3)


def _reordered(problem: Problem, state: State) -> Iterator[Move]:
    """Axes of different sizes in another order within their dimensions. Among axes of equal size, another one could
    have been moved in the first place, at no greater cost."""
    choices = []
    for axes in state.placement:
        mixed = len({problem.axes[a] for a in axes}) > 1 and len(axes) <= MOST
        choices.append(list(itertools.permutations(axes)) if mixed else [axes])
    for after in itertools.product(*choices):
        axes = {a for x, y in zip(state.placement, after, strict=True) for a in _differing(x, y)}
        if axes:
            yield Move("ppermute", tuple(sorted(axes)), State(after), problem.local(after))


def common_front(x: Sequence[object], y: Sequence[object]) -> int:
    """Return how many axes both begin with."""
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def _differing(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    """The axes behind the common front of both."""
    front = common_front(x, y)
    return x[front:] + y[front:]


def _gathers(problem: Problem, state: State, limit: int) -> Iterator[Move]:
    """all_gather: dimensions lose the axes at their end."""
    placement, local = state.placement, problem.local(state.placement)
    for keep in itertools.product(*(range(len(axes) + 1) for axes in placement)):
        lost = tuple(axis for axes, k in zip(placement, keep, strict=True) for axis in axes[k:])
        larger = local * problem.count(lost)
        if lost and larger <= limit:
            after = tuple(axes[:k] for axes, k in zip(placement, keep, strict=True))
            yield Move("all_gather", lost, State(after, state.summed), larger - local)


def _sums(problem: Problem, state: State) -> Iterator[Move]:
    """psum and psum_scatter: the sum is completed on some axes. If it is scattered, they land as in an all_to_all."""
    local, every = problem.local(state.placement), list(range(len(state.placement)))
    for done in _choices(state.summed):
        if not done:
            continue
        rest, parts = tuple(a for a in state.summed if a not in done), problem.count(done)
        yield problem.psum(state, done)
        for after, run in _landed(problem, state.placement, every, done, problem.free(state)):
            shard = local * parts // problem.count(run)
            yield Move("psum_scatter", done, State(after, rest), shard - shard // parts)
