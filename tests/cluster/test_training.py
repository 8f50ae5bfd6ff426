"""A training loop gives the same losses and reads the same samples in any number of processes, also when it is resumed."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.harness import exhaustive, launched

LOOP = "tests/cluster/training.py"
STEPS = 12


def run(folder: Path, count: int, steps: int = STEPS, every: int = 5, kill: int = -1) -> int | None:
    more = {"KILL_AT": str(kill), "HEARTBEAT": "5"}
    return launched(count, LOOP, str(folder), str(steps), str(every), devices=8 // count, more=more).code


def log(folder: Path) -> tuple[list[int], list[float], list[str]]:
    """Steps, losses and samples of a run, in the order in which they were written."""
    rows = [line.split(" ", 2) for line in (folder / "log").read_text().splitlines()]
    return [int(one[0]) for one in rows], [float(one[1]) for one in rows], [one[2] for one in rows]


@functools.cache
def uninterrupted() -> tuple[list[int], list[float], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        assert run(Path(folder), 1, every=0) == 0
        return log(Path(folder))


def check(folder: Path, *, exact: bool = False) -> None:
    """Each step once, with the samples and the losses of the uninterrupted run."""
    steps, losses, samples = log(folder)
    wanted = uninterrupted()
    assert steps == wanted[0] == list(range(STEPS))
    assert samples == wanted[2]
    np.testing.assert_allclose(losses, wanted[1], rtol=0 if exact else 1e-6)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=exhaustive)])
def test_the_number_of_processes_changes_nothing(tmp_path, count):
    assert run(tmp_path, count, every=0) == 0
    check(tmp_path)


@exhaustive
def test_a_resumed_run_is_bitwise_the_same(tmp_path):
    assert run(tmp_path, 1, steps=5) == 0
    assert run(tmp_path, 1) == 0
    check(tmp_path, exact=True)


@exhaustive
def test_another_number_of_processes_goes_on(tmp_path):
    for count, steps in ((1, 3), (2, 6), (4, 9), (1, STEPS)):
        assert run(tmp_path, count, steps=steps, every=3) == 0
    check(tmp_path)


@exhaustive
@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, count):
    assert run(tmp_path, count, kill=7) == 137
    before = (tmp_path / "log").read_text().splitlines(keepends=True)
    (tmp_path / "log").unlink()
    assert run(tmp_path, count) == 0
    first = log(tmp_path)[0][0]  # a save that was not finished when the process was killed does not count
    assert first in (0, 5)
    (tmp_path / "log").write_text("".join(before[:first]) + (tmp_path / "log").read_text())
    check(tmp_path)
