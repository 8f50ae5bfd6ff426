"""Point-to-point rounds: which device sends which piece to which, from the digits of their numbers.

Every axis is written in digits, one for each of its prime factors, and so is a block's number in its dimension. Where
the digits of both placements agree in radix, a dimension is cut into pieces by the longer list. The device q needs the
pieces whose shared digits are its own; those digits that only the source has run over all values, one value per round.
The sender p of a round has q's digits where they say which block is meant, and q's other digits, turned by the
round, in its other places. So every round is a permutation: each device sends one piece and receives one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd.comm.planner._problem import Placement, Problem

__all__ = ["Round", "Rounds", "permutation", "primes", "rounds_between", "schedule"]

MOST_ROUNDS = 64
Digit = tuple[int, int]
"""The axis, and which of its digits, major first."""


class _Match(NamedTuple):
    """The digits of two placements, dimension by dimension."""

    radix: dict[Digit, int]
    shared: list[tuple[Digit, Digit]]
    only_source: list[list[Digit]]
    only_target: list[list[Digit]]


class Round(NamedTuple):
    """One permutation, over the devices of all axes of the problem, numbered with the first axis as the major one.

    Attributes:
      sender: From whom each device receives; -1 for from nobody.
      reads: Which piece each device sends: per dimension its place in the source shard, counted in pieces.
      writes: Where in its target shard each device puts what it receives.
    """

    sender: np.ndarray
    reads: np.ndarray
    writes: np.ndarray


class Rounds(NamedTuple):
    """All rounds, and the shape of a piece. Where the first is what every device has itself, it sends nothing."""

    piece: tuple[int, ...]
    rounds: tuple[Round, ...]


def rounds_between(problem: Problem, placement: Placement) -> int:
    """How many rounds bring `placement` to the target; 0 where digits do not match, or there would be too many."""
    match = _match(problem.axes, placement, problem.target)
    if match is None:
        return 0
    count = math.prod(match.radix[d] for digits in match.only_source for d in digits)
    count -= all(a == b for a, b in match.shared)
    return count if count <= MOST_ROUNDS else 0


def schedule(sizes: tuple[int, ...], axes: tuple[int, ...], source: Placement, target: Placement) -> Rounds | None:
    """The rounds themselves, as arrays over all devices; None where digits do not match."""
    match = _match(axes, source, target)
    if match is None:
        return None
    q = _digits_of_all(axes, match.radix)
    turned = _partners(match)
    free = [d for digits in match.only_source for d in digits]
    piece = tuple(
        size // max(math.prod(axes[a] for a in s), math.prod(axes[a] for a in t))
        for size, s, t in zip(sizes, source, target, strict=True)
    )
    rounds = []
    for values in itertools.product(*(range(match.radix[d]) for d in free)):
        p = {a: q[b] for a, b in match.shared} | {a: q[b] for a, b in turned.items()}
        p |= {d: (p[d] + v) % match.radix[d] for d, v in zip(free, values, strict=True)}
        sender = _number(p, axes, match.radix)
        reads = np.empty((len(sender), len(sizes)), np.int32)
        reads[sender] = _places(q, match.only_target, match.radix)
        rounds.append(Round(sender, reads, _places(p, match.only_source, match.radix)))
    return Rounds(piece, tuple(rounds))


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


def _match(axes: Sequence[int], source: Placement, target: Placement) -> _Match | None:
    digits = {axis: [(axis, i) for i in range(len(primes(n)))] for axis, n in enumerate(axes)}
    radix = {digit: prime for axis, n in enumerate(axes) for digit, prime in zip(digits[axis], primes(n), strict=True)}
    found = _Match(radix, [], [], [])
    for have, want in zip(source, target, strict=True):
        a, b = ([d for axis in side for d in digits[axis]] for side in (have, want))
        shared = min(len(a), len(b))
        if any(radix[x] != radix[y] for x, y in zip(a[:shared], b[:shared], strict=True)):
            return None
        found.shared.extend(zip(a[:shared], b[:shared], strict=True))
        found.only_source.append(a[shared:])
        found.only_target.append(b[shared:])
    return found


def _partners(match: _Match) -> dict[Digit, Digit]:
    """For each digit of the sender that no shared place decides, one of the receiver's: the same if it is left."""
    mine = [d for d in match.radix if d not in {a for a, _ in match.shared}]
    theirs = [d for d in match.radix if d not in {b for _, b in match.shared}]
    found = {d: d for d in mine if d in theirs}
    left = [d for d in theirs if d not in found]
    for digit in mine:
        if digit not in found:
            found[digit] = next(d for d in left if match.radix[d] == match.radix[digit])
            left.remove(found[digit])
    return found


def _digits_of_all(axes: Sequence[int], radix: dict[Digit, int]) -> dict[Digit, np.ndarray]:
    """Each digit of every device."""
    rest, found = np.arange(math.prod(axes)), {}
    for digit in reversed(radix):
        rest, found[digit] = np.divmod(rest, radix[digit])
    return found


def _number(digits: dict[Digit, np.ndarray], axes: Sequence[int], radix: dict[Digit, int]) -> np.ndarray:
    """The device that has these digits."""
    number = np.zeros(math.prod(axes), np.int64)
    for digit, n in radix.items():
        number = number * n + digits[digit]
    return number


def _places(digits: dict[Digit, np.ndarray], dims: list[list[Digit]], radix: dict[Digit, int]) -> np.ndarray:
    """Per dimension the number that the given digits make."""
    count = len(next(iter(digits.values())))
    columns = []
    for dim in dims:
        column = np.zeros(count, np.int32)
        for digit in dim:
            column = column * radix[digit] + digits[digit].astype(np.int32)
        columns.append(column)
    return np.stack(columns, axis=1)


@functools.cache
def primes(n: int) -> tuple[int, ...]:
    """The prime factors of n, the small ones first."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return tuple(found)
