"""The main job, `examples/train_lm.py`, computes the same in any number of processes, stopped, killed and resumed."""

import functools
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spmd
from tests.cluster.harness import Ended, alone, end, exhaustive, launched, start
from tests.cluster.main_job import BATCH, text
from tests.conftest import FULL_CASES, case_count
from tests.sampler import rare

JOB = "tests/cluster/main_job.py"
EPOCH = 10 if case_count() > FULL_CASES else 5  # steps
STEPS = 2 * EPOCH
PAUSE = 0.4 / STEPS  # seconds to read a window, so that a signal comes before the end


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
    """The job until its end, by itself or under the launcher."""
    text(folder, EPOCH)
    program = (JOB, str(folder), f"--steps={STEPS}", *flags)
    found = alone(*program) if count == 1 else launched(count, *program, devices=8 // count)
    assert found.code == 0, found.err
    return part(folder, count, copies)


def interrupted(folder: Path, count: int, number: int, rank: int, *flags: str) -> Ended:
    """The job, of which one process gets a signal after it has saved for the second time, and its seconds from then, or
    from when the process itself failed."""
    text(folder, EPOCH)
    flags = (f"--steps={STEPS}", saved(folder), *flags)
    command = ["-m", "spmd", "launch", "-n", str(count), "--devices", str(8 // count), JOB, str(folder), *flags]
    process, said, saves = start(command, {"PAUSE": str(PAUSE)}), "", 0
    while saves < 2:
        line = process.stdout.readline()
        assert line, (said, process.communicate())
        said, saves = said + line, saves + (", saving" in line)
    [pid] = re.findall(rf"^\[{rank}\] pid (\d+)$", said, re.MULTILINE)
    os.kill(int(pid), number)
    killed = time.monotonic()
    found = end(process, killed)
    failed = folder / "failed"
    late = float(failed.read_text()) - killed if failed.exists() else 0.0
    return Ended(found.code, said + found.out, found.err, found.seconds - late)


def stopped(folder: Path, count: int, rank: int, number: int = signal.SIGTERM) -> Part:
    """The job, of which one process is asked to stop: all save and end."""
    found = interrupted(folder, count, number, rank, "--every=1")
    assert found.code == 0 and found.seconds < 30, found.err
    one = part(folder, count)
    assert 2 <= len(one.losses) < STEPS
    assert f"stopped after step {one.steps[-1] + 1} of {STEPS}, which is saved" in found.out
    return one


def saved(folder: Path) -> str:
    """The flag that says where the job saves, and goes on."""
    return f"--checkpoint={folder / 'saved'}"


@functools.cache
def _stopped(count: int) -> tuple[tempfile.TemporaryDirectory[str], Part]:
    folder = tempfile.TemporaryDirectory()
    return folder, stopped(Path(folder.name), count, rank=count - 1)


def stopped_once(folder: Path, count: int) -> Part:
    """What was stopped once in so many processes, and is saved in this folder for each test that goes on from it."""
    kept, found = _stopped(count)
    shutil.copytree(Path(kept.name) / "saved", folder / "saved")
    return found


@functools.cache
def uninterrupted(count: int = 1) -> Part:
    """The whole run; where it is that of one process, its steps are looked at."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), count)
    assert found.steps == list(range(STEPS)) and found.losses[-1] < found.losses[0]
    if count > 1:
        return found
    order = spmd.cluster.batches(np.arange(EPOCH * BATCH), "b", batch=BATCH, seed=0, mesh=spmd.make_mesh(a=1))
    for step in found.steps:
        assert found.read(step) == sorted(order[step].tolist())
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


@rare  # a stop and its save: test_launch.py; another mesh and count: test_checkpoints.py
def test_two_processes_that_are_stopped_go_on_in_one(tmp_path):
    first = stopped_once(tmp_path, 2)
    check(first, run(tmp_path, 1, saved(tmp_path)))


@exhaustive
@pytest.mark.parametrize("count", [2, 4])
def test_the_number_of_processes_changes_nothing(count):
    check(uninterrupted(count))


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
    check(first, run(tmp_path, 1, saved(tmp_path)))


@exhaustive
@pytest.mark.parametrize(("count", "left"), [(1, 1), (2, 1), (2, 2)])
def test_a_signal_just_before_the_last_step(tmp_path, monkeypatch, count, left):
    """The steps may end before the processes have agreed on one: the job then ends as always, and saves."""
    monkeypatch.setenv("LATE", f"{count - 1}:{STEPS - left}")
    first = run(tmp_path, count, saved(tmp_path))
    assert (tmp_path / "late").exists() and len(first.losses) > STEPS - left
    monkeypatch.delenv("LATE")
    then = run(tmp_path, 1, saved(tmp_path))
    assert then.first == len(first.losses)
    check(first, then)


@exhaustive
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_before_the_first_step(tmp_path, monkeypatch, count):
    """The step compiles when the signal comes. In one process no step runs; two agree on the next that they can."""
    monkeypatch.setenv("LATE", f"{count - 1}:0")
    first = run(tmp_path, count, saved(tmp_path))
    assert (tmp_path / "late").exists() and len(first.losses) < 2 * count - 1
    monkeypatch.delenv("LATE")
    check(first, run(tmp_path, 1, saved(tmp_path)))


@exhaustive
@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, count):
    first = stopped_once(tmp_path, count)
    then = run(tmp_path, count, saved(tmp_path))
    assert first.losses + then.losses == uninterrupted(count).losses
    check(first, then, exact=count == 1)


@exhaustive
def test_other_numbers_of_processes_go_on(tmp_path):
    parts = [stopped_once(tmp_path, 1), *(stopped(tmp_path, count, rank=count - 1) for count in (2, 4))]
    check(*parts, run(tmp_path, 1, saved(tmp_path)))


@exhaustive
def test_another_mesh_goes_on(tmp_path):
    first = stopped_once(tmp_path, 2)
    check(first, run(tmp_path, 1, saved(tmp_path), "--dp=2", "--tp=4"), same_mesh=False)


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
        (2, signal.SIGSTOP, 1, None, "rank 1 does not answer"),
    ],
)
def test_after_a_fault_the_job_goes_on_from_its_last_checkpoint(tmp_path, count, number, rank, code, said):
    found = interrupted(tmp_path, count, number, rank, "--every=5")
    assert found.code == code or (code is None and found.code not in (None, 0))
    assert found.seconds < (5 if code else 60)
    assert said in found.err, found.err
    if code is not None:
        assert f"rank {rank} of {count} failed first" in found.err
    then = run(tmp_path, 1, saved(tmp_path))
    assert then.first in (5, 10)  # a save that was not finished does not count
    check(then)


@exhaustive
def test_after_damage_the_job_goes_on_from_the_checkpoint_before_it(tmp_path):
    last = stopped_once(tmp_path, 2).steps[-1] + 1
    for one in (tmp_path / "saved" / "steps" / str(last) / "state").rglob("d/*"):
        one.write_bytes(one.read_bytes()[:-8])
    then = run(tmp_path, 2, saved(tmp_path))
    assert then.first == last - 1
    check(then)
