"""The start of several processes: who is who, what has to be equal, and how a process ends that has failed."""

from __future__ import annotations

import re
import time

import pytest

from spmd._processes import Task, tasks
from spmd.cluster._start import _agreed, _given, compared
from spmd.errors import MeshError
from tests.cluster.harness import Ended, exhaustive, joined, launched

FAULTY = "tests/cluster/faulty.py"


# --- who is who ----------------------------------------------------------------------------------------------------

LAUNCHED = Task("python -m spmd launch", 1, 2, "h:1")
SLURM = Task("SLURM (SLURM_PROCID, SLURM_STEP_NUM_TASKS)", 1, 2, detected=True)


def test_alone_is_alone():
    assert _agreed(None, []) is None
    assert _agreed(_given(None, 1, 0), [SLURM]) is None
    assert _agreed(None, tasks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})) is None  # a shell inside an allocation


def test_the_arguments_come_first_then_the_launcher():
    given = _given("a:2", 2, 1)
    assert _agreed(given, [LAUNCHED, SLURM]) is given
    assert _agreed(None, [LAUNCHED, SLURM]) is LAUNCHED
    assert _agreed(None, [LAUNCHED, SLURM._replace(rank=0, count=1)]) is LAUNCHED  # one task starts several processes
    assert _agreed(None, [SLURM._replace(count=None), LAUNCHED]) == SLURM._replace(count=None)


@pytest.mark.parametrize("other", [SLURM._replace(rank=0), SLURM._replace(count=4), SLURM._replace(rank=0, count=None)])
def test_sources_that_disagree_are_both_named(other):
    with pytest.raises(MeshError) as caught:
        _agreed(None, [LAUNCHED, other])
    assert "python -m spmd launch: rank 1 of 2" in str(caught.value)
    assert f"{other.source}: rank {other.rank}" in str(caught.value)


@pytest.mark.parametrize(("count", "rank"), [(2, None), (None, 0), (2, 2), (0, 0), (2, -1), (2, "0")])
def test_arguments_that_cannot_be(count, rank):
    with pytest.raises(MeshError):
        _given("h:1", count, rank)


def test_flags_that_name_a_place_are_not_compared():
    words = ["--lr", "0.1", "--rank", "3", "--node_rank=3", "--master-port", "80", "-v", "data", "--ranking", "5"]
    assert compared(words) == ["--lr", "0.1", "-v", "data", "--ranking", "5"]
    assert compared(words, ["--lr", words.index("data") + 1]) == ["-v", "--ranking", "5"]


# --- what ends a program ---------------------------------------------------------------------------------------------


def after_the_fault(one: Ended, ended_at: float) -> float:
    [when] = re.findall(r"fault ([0-9.]+)", one.out)
    return ended_at - float(when)


def check_launched(kind: str, code: int, said: str, seconds: float = 5) -> None:
    found = launched(2, FAULTY, kind, more={"HEARTBEAT": "5"})
    assert after_the_fault(found, time.time()) < seconds
    assert found.code == code
    assert "rank 1 of 2 failed first" in found.err.replace("rank 0", "rank 1" if kind.endswith("-of-0") else "rank 0")
    assert said in found.err
    assert "done" not in found.out


def test_an_exception_in_a_process_ends_all():
    check_launched("raise", 1, "rank 1 of 2 ends: ValueError: bad data")


@exhaustive
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("raise-of-0", 1, "rank 0 of 2 ends: ValueError: bad data"),
        ("exit", 3, "with exit code 3"),
        ("exit-of-0", 3, "with exit code 3"),
        ("kill", 137, "ended by SIGKILL"),
        ("kill-of-0", 137, "ended by SIGKILL"),
    ],
)
def test_other_ends_under_the_launcher(kind, code, said):
    check_launched(kind, code, said)


@exhaustive
def test_a_stopped_process_ends_under_the_launcher():
    found = launched(2, FAULTY, "stop", more={"HEARTBEAT": "5"})
    assert found.code not in (0, None)
    assert after_the_fault(found, time.time()) < 60


@exhaustive
@pytest.mark.parametrize("kind", ["raise", "raise-of-0", "kill", "kill-of-0"])
def test_without_a_launcher_the_others_end_too(kind):
    """When the time for heartbeats is over; process 0 does not notice earlier that the connection is closed."""
    found = joined([[FAULTY, kind]] * 2, [{"HEARTBEAT": "3"}] * 2)
    now = time.time()
    assert None not in [one.code for one in found] and all(one.code for one in found)
    assert max(after_the_fault(one, now) for one in found if "fault" in one.out) < 5
    assert not any("done" in one.out for one in found)


@exhaustive
def test_without_a_launcher_the_others_of_a_stopped_process_end():
    found = joined([[FAULTY, "stop"]] * 2, [{"HEARTBEAT": "3"}] * 2, timeout=BOUND)
    assert found[0].code not in (0, None) and "stopped sending heartbeats" in found[0].err
    assert found[1].code is None  # it is stopped, and cannot end


@exhaustive
def test_a_rank_that_is_never_started_is_waited_for_so_long():
    [found] = joined([[FAULTY, "none"]], [{"WORLD_SIZE": "2", "INITIALIZATION": "5"}])
    assert found.code not in (0, None) and 5 <= found.seconds < 25
    assert "initialize(...)" in found.err or "DEADLINE_EXCEEDED" in found.err


# With the guards off, the tests above would not pass: after each of these faults a process goes on for longer.

BOUND = 25  # seconds after the start


@exhaustive
@pytest.mark.parametrize(
    ("kind", "waiting", "more"),
    [
        ("raise", 1, {"GUARD": "off", "HEARTBEAT": "5"}),  # it waits for the others in JAX's shutdown
        ("exit", 1, {"HEARTBEAT": "5"}),  # so does this, without the launcher
        ("stop", 0, {"HEARTBEAT": "100"}),  # JAX's own default; of "kill" process 0 sometimes hears at once
    ],
)
def test_with_the_guard_off_a_process_waits_for_another(kind, waiting, more):
    began = time.time()
    found = joined([[FAULTY, kind]] * 2, [more] * 2, timeout=BOUND)
    ended = began + found[waiting].seconds  # by the bound at the latest
    assert after_the_fault(found[1], ended) > 5, "with the guards on, all have ended by then"


@exhaustive
def test_with_the_guard_off_a_signal_to_stop_is_not_heard():
    """JAX takes SIGTERM, and the program goes on to its end if it does not ask `stopping`."""
    found = joined([[FAULTY, "term"]] * 2, [{"GUARD": "off"}] * 2)
    assert [one.code for one in found] == [0, 0] and all("done" in one.out for one in found)


@exhaustive
def test_with_the_guard_off_other_arguments_and_constants_pass():
    for command in (["none", "--lr"], ["constant", "--lr"]):
        found = joined([[FAULTY, *command, str(rank)] for rank in range(2)], [{"GUARD": "off"}] * 2)
        assert [one.code for one in found] == [0, 0] and all("done" in one.out for one in found)


# --- what has to be equal ----------------------------------------------------------------------------------------------


def test_another_argument_in_one_process_is_found_before_the_first_step():
    found = joined([[FAULTY, "none", "--lr", lr, "--rank", lr] for lr in ("0.1", "0.2", "0.1")])
    for one in found:
        assert one.code == 1
        assert 'rank 1: "none --lr 0.2"; ranks 0, 2: "none --lr 0.1"' in one.err
        assert "ends: MeshError: the processes do not run the same program." in one.err
        assert "done" not in one.out


@exhaustive
@pytest.mark.parametrize("kind", ["shape", "constant"])
def test_another_program_in_one_process_is_found_before_the_first_step(kind):
    found = joined([[FAULTY, kind]] * 2)
    for one in found:
        assert one.code == 1
        assert "the processes have not lowered the same program" in one.err


@exhaustive
def test_another_file_in_one_process_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.py").write_text("import spmd\nimport part\nspmd.cluster.initialize()\n# same\n")
        (tmp_path / name / "part.py").write_text(f"rate = '{name}'\n")
    found = joined([[str(tmp_path / name / "task.py")] for name in ("a", "b")])
    for one in found:
        assert one.code == 1
        assert "files: part.py (rank 1) differ" in one.err
