"""The main job, `examples/train_lm.py`, computes the same in any number of processes, stopped, killed and resumed."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd.cluster._data import Order
from tests.cluster.harness import Ended, end, exhaustive, launched, start
from tests.cluster.main_job import BATCH, EPOCH, STEPS, text

JOB = "tests/cluster/main_job.py"


@dataclass(frozen=True)
class Part:
    """What one run did, from step `first` on: losses, the bytes of a step, and who has read what.

    Attributes:
      rows: For each process, the windows that it has read for each of these steps.
    """

    first: int
    losses: list[float]
    collectives: Any
    rows: list[list[list[int]]]

    @property
    def steps(self) -> list[int]:
        return [self.first + i for i in range(len(self.losses))]

    def read(self, step: int) -> list[int]:
        """The windows of one step, as all processes have read them."""
        return sorted(itertools.chain(*(one[step - self.first] for one in self.rows)))


def part(folder: Path, count: int, copies: int = 1) -> Part:
    """What the last run left; each window is read by `copies` processes."""
    found = json.loads((folder / "results.json").read_text())
    share, steps = BATCH * copies // count, len(found["losses"])
    rows = []
    for rank in range(count):
        read = json.loads((folder / f"rows-{rank}").read_text())
        rows.append([read[i * share : (i + 1) * share] for i in range(steps)])
    collectives = found["collectives"]["explicit"]
    return Part(found["first"], found["losses"], collectives, rows)


def run(folder: Path, count: int, *flags: str, copies: int = 1) -> Part:
    """The job until its end."""
    text(folder)
    found = launched(count, JOB, str(folder), *flags, devices=8 // count)
    assert found.code == 0, found.err
    return part(folder, count, copies)


def interrupted(folder: Path, count: int, number: int, rank: int, *flags: str) -> Ended:
    """The job, of which one process gets a signal after it has saved for the second time."""
    text(folder)
    flags = (f"--checkpoint={folder / 'saved'}", *flags)
    command = ["-m", "spmd", "launch", "-n", str(count), "--devices", str(8 // count), JOB, str(folder), *flags]
    process, since, said, saved = start(command, {"PAUSE": "0.02"}), time.monotonic(), "", 0
    while saved < 2:
        line = process.stdout.readline()
        assert line, (said, process.communicate())
        said, saved = said + line, saved + (", saving" in line)
    [pid] = re.findall(rf"^\[{rank}\] pid (\d+)$", said, re.MULTILINE)
    os.kill(int(pid), number)
    found = end(process, since)
    return Ended(found.code, said + found.out, found.err, found.seconds)


def stopped(folder: Path, count: int, rank: int, number: int = signal.SIGTERM, *flags: str) -> Part:
    """The job, of which one process is asked to stop: all save and end."""
    found = interrupted(folder, count, number, rank, "--every=1", *flags)
    assert found.code == 0, found.err
    one = part(folder, count)
    assert f"stopped after step {one.steps[-1] + 1} of {STEPS}, which is saved" in found.out
    return one


@functools.cache
def uninterrupted() -> Part:
    """The whole run in one process; at its first use, its steps are looked at."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), 1)
    assert found.steps == list(range(STEPS)) and found.losses[-1] < found.losses[0]
    order = Order(EPOCH * BATCH, seed=0)
    for step in found.steps:
        assert found.read(step) == sorted(order.samples(step * BATCH, BATCH))
    for epoch in range(2):
        windows = itertools.chain(*(found.read(step) for step in range(epoch * EPOCH, (epoch + 1) * EPOCH)))
        assert sorted(windows) == list(range(EPOCH * BATCH))  # each once
    return found


def check(*parts: Part, exact: bool = False, same_mesh: bool = True) -> None:
    """The parts together are the whole run: no step is lost or done twice, and each reads, sends and gives the same."""
    whole = uninterrupted()
    assert [step for one in parts for step in one.steps] == whole.steps[parts[0].first :]
    losses = [loss for one in parts for loss in one.losses]
    np.testing.assert_allclose(losses, whole.losses[parts[0].first :], rtol=0 if exact else 1e-6)
    for one in parts:
        for step in one.steps:
            assert one.read(step) == whole.read(step)
        if same_mesh:
            assert one.collectives == whole.collectives


def test_two_processes_that_are_stopped_go_on_in_one(tmp_path):
    first = stopped(tmp_path, 2, rank=1)
    assert 2 <= len(first.losses) < STEPS
    check(first, run(tmp_path, 1, f"--checkpoint={tmp_path / 'saved'}"))


@exhaustive
@pytest.mark.parametrize("count", [2, 4])
def test_the_number_of_processes_changes_nothing(tmp_path, count):
    check(run(tmp_path, count))


@exhaustive
def test_rows_that_several_processes_need_are_read_by_each(tmp_path):
    """tp crosses processes: four devices in two processes have the same rows."""
    found = run(tmp_path, 4, "--dp=2", "--tp=4", copies=2)
    whole = uninterrupted()
    np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-6)
    for step in found.steps:
        assert found.rows[0][step] == found.rows[1][step] and found.rows[2][step] == found.rows[3][step]
        assert sorted(found.rows[0][step] + found.rows[2][step]) == whole.read(step)


@exhaustive
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_other_signals_to_any_process(tmp_path, number):
    first = stopped(tmp_path, 2, 0, number)
    check(first, run(tmp_path, 2, f"--checkpoint={tmp_path / 'saved'}"))


@exhaustive
@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, count):
    (tmp_path / "whole").mkdir()
    whole = run(tmp_path / "whole", count)
    first = stopped(tmp_path, count, rank=0)
    then = run(tmp_path, count, f"--checkpoint={tmp_path / 'saved'}")
    assert first.losses + then.losses == whole.losses
    check(first, then, exact=count == 1)


@exhaustive
def test_other_numbers_of_processes_go_on(tmp_path):
    parts = [stopped(tmp_path, count, rank=count - 1) for count in (1, 2, 4)]
    check(*parts, run(tmp_path, 1, f"--checkpoint={tmp_path / 'saved'}"))


@exhaustive
def test_another_mesh_goes_on(tmp_path):
    first = stopped(tmp_path, 1, rank=0)
    then = run(tmp_path, 2, f"--checkpoint={tmp_path / 'saved'}", "--dp=2", "--tp=4")
    check(first, then, same_mesh=False)


KILLED = (137, "ended by SIGKILL")
RAISED = (1, "ends: ValueError: bad data")


@exhaustive
@pytest.mark.parametrize(
    ("count", "number", "rank", "code", "said"),
    [
        (1, signal.SIGKILL, 0, *KILLED),
        (2, signal.SIGKILL, 0, *KILLED),
        (2, signal.SIGKILL, 1, *KILLED),
        (2, signal.SIGUSR2, 0, *RAISED),
        (2, signal.SIGUSR2, 1, *RAISED),
        (2, signal.SIGALRM, 1, 3, "with exit code 3"),
        (2, signal.SIGSTOP, 1, None, "stopped sending heartbeats"),
    ],
)
def test_after_a_fault_the_job_goes_on_from_its_last_checkpoint(tmp_path, count, number, rank, code, said):
    found = interrupted(tmp_path, count, number, rank, "--every=5")
    assert found.code == code or (code is None and found.code not in (None, 0))
    assert said in found.err, found.err
    if code is not None:
        assert f"rank {rank} of {count} failed first" in found.err
    then = run(tmp_path, count, f"--checkpoint={tmp_path / 'saved'}")
    assert then.first in (5, 10)  # a save that was not finished does not count
    check(then)


@exhaustive
def test_after_damage_the_job_goes_on_from_the_checkpoint_before_it(tmp_path):
    last = stopped(tmp_path, 2, rank=0).steps[-1] + 1
    for one in (tmp_path / "saved" / "steps" / str(last) / "state").rglob("d/*"):
        one.write_bytes(one.read_bytes()[:-8])
    then = run(tmp_path, 2, f"--checkpoint={tmp_path / 'saved'}")
    assert then.first == last - 1
    check(then)
