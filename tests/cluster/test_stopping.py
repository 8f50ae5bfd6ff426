"""A signal to any process ends all of them at the same step, saved, with exit code 0."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from spmd.cluster import stopping
from spmd.cluster._launch import free_port
from spmd.errors import SpmdError
from tests.cluster.harness import Ended, end, exhaustive, start

LOOP = "tests/cluster/training.py"


def processes(folder: Path, count: int):
    """Processes that train; each has printed that it runs."""
    told = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    command = [LOOP, str(folder), "100000", "100000"]
    alone = {"JAX_NUM_CPU_DEVICES": str(8 // count), "PAUSE": "0.01"}
    started = [start(command, {**told, **alone, "RANK": str(r)} if count > 1 else alone) for r in range(count)]
    for one in started:
        while "running" not in (line := one.stdout.readline()):
            assert line, one.communicate()
    return started


def saved(folder: Path, count: int) -> set[int]:
    """After how many steps the processes ended, and how many are saved."""
    steps = {int(Path(folder, f"ended{rank}").read_text()) for rank in range(count)}
    return steps | {int(one.name) for one in Path(folder, "saved", "steps").iterdir() if one.name.isdigit()}


def ends(started, since: float) -> list[Ended]:
    return [end(one, since, timeout=30) for one in started]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_one_process_stops(tmp_path, number):
    started, since = processes(tmp_path, 1), time.monotonic()
    started[0].send_signal(number)
    assert [one.code for one in ends(started, since)] == [0]
    [step] = saved(tmp_path, 1)
    assert 5 <= step < 99999


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGTERM, 0, marks=exhaustive),
        pytest.param(signal.SIGUSR1, 1, marks=exhaustive),
        pytest.param(signal.SIGINT, 0, marks=exhaustive),
    ],
)
def test_all_processes_stop_at_the_same_step(tmp_path, number, rank):
    started, since = processes(tmp_path, 2), time.monotonic()
    started[rank].send_signal(number)
    assert [one.code for one in ends(started, since)] == [0, 0]
    assert len(saved(tmp_path, 2)) == 1


def test_steps_that_cannot_be():
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(SpmdError):
            stopping(wrong)
