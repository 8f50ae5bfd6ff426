"""What a permutation of blocks does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Moves:
    """What a permutation of blocks does.

    Attributes:
      shift: By how many places each block moves up, if all do alike; at most half of them in either direction.
      wraps: Whether a block that leaves at one end comes in at the other.
      reverses: Whether the blocks that move come in the opposite order, as a whole.
      missing: The places that get no block, and hold zeros.
    """

    shift: int | None
    wraps: bool
    reverses: bool
    missing: tuple[int, ...]


def sends(perm: Sequence[tuple[int, int]], count: int) -> list[int | None]:
    """For each of `count` places, from where the pairs of a ppermute send something to it."""
    source: list[int | None] = [None] * count
    for i, j in perm:
        source[j] = i
    return source


def moves(source: Sequence[int | None]) -> Moves:
    """What a permutation does, from the block that each place gets: `sends`, or a table of block indices."""
    count = len(source)
    pairs = [(i, j) for j, i in enumerate(source) if i is not None]
    by = {j - i for i, j in pairs}
    around = {d % count for d in by}
    shift = None
    if len(by) == 1:
        [shift] = by
    elif len(around) == 1:
        [up] = around
        shift = up if 2 * up <= count else up - count
    reverses = bool(pairs) and all(i + j == count - 1 for i, j in pairs)
    missing = tuple(j for j, i in enumerate(source) if i is None)
    return Moves(shift, shift is not None and len(by) > 1, reverses, missing)
