"""What a permutation of blocks does."""

from __future__ import annotations

import pytest

from spmd.checker import _permutations as permutations
from spmd.checker._permutations import Moves

PERMUTATIONS: list[tuple[list[tuple[int, int]], int, Moves]] = [
    ([(0, 1), (1, 2), (2, 3), (3, 0)], 4, Moves(1, True, False, ())),
    ([(0, 1), (1, 2), (2, 3)], 4, Moves(1, False, False, (0,))),
    ([(1, 0), (2, 1), (3, 2)], 4, Moves(-1, False, False, (3,))),
    ([(1, 0), (2, 1), (3, 2), (0, 3)], 4, Moves(-1, True, False, ())),
    ([(0, 2), (1, 3), (2, 0), (3, 1)], 4, Moves(2, True, False, ())),
    ([(0, 3), (1, 2), (2, 1), (3, 0)], 4, Moves(None, False, True, ())),
    ([(0, 1), (1, 0), (2, 3), (3, 2)], 4, Moves(None, False, False, ())),
    ([(0, 0), (1, 1)], 2, Moves(0, False, False, ())),
    ([(0, 1), (1, 0)], 2, Moves(1, True, True, ())),
    ([(1, 0)], 2, Moves(-1, False, True, (1,))),
    ([], 2, Moves(None, False, False, (0, 1))),
]


@pytest.mark.parametrize("case", range(len(PERMUTATIONS)))
def test_what_a_permutation_does(case: int) -> None:
    perm, count, expected = PERMUTATIONS[case]
    assert permutations.moves(permutations.sends(perm, count)) == expected
