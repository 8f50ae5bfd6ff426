"""Operations, layers and placements in several processes equal NumPy."""

from __future__ import annotations

import pytest

from tests.cluster.harness import exhaustive, launched
from tests.cluster.programs import CHECKS


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=exhaustive)])
def test_every_process_computes_what_numpy_does(count):
    found = launched(count, "-m", "tests.cluster.programs", devices=None)
    assert found.code == 0, found.err
    names = [one.__name__ for one in CHECKS]
    for rank in range(count):
        mine = [line.removeprefix(f"[{rank}] ") for line in found.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert [line for line in mine if line in names] == names
