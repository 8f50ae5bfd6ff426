"""The start of several processes: who is who, what has to be equal, and how a process ends that has failed."""

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.harness import ROOT, Ended, end, exhaustive, join, joined, launched
from tests.sampler import rare, share

FAULTY = "tests/cluster/faulty.py"


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


@rare  # without JAX: test_launch.py; without a launcher: test_faults.py
def test_an_exception_in_a_process_ends_all():
    check_launched("raise", 1, "rank 1 of 2 ends: ValueError: bad data")


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
    found = joined([[FAULTY, "stop"]] * 2, [{"HEARTBEAT": "3"}] * 2, timeout=25)
    assert found[0].code not in (0, None) and "stopped sending heartbeats" in found[0].err
    assert found[1].code is None  # it is stopped, and cannot end


@exhaustive
def test_before_the_loop_a_process_that_sleeps_is_waited_for():
    """A long start is no hang. In the loop: `test_recorder.py`."""
    found = joined([[FAULTY, "sleep"]] * 2, [{"HEARTBEAT": "3"}] * 2)
    assert [one.code for one in found] == [0, 0] and all("done" in one.out for one in found)
    assert after_the_fault(found[1], time.time()) > 11


@exhaustive
def test_a_rank_that_is_never_started_is_waited_for_so_long():
    [found] = joined([[FAULTY, "none"]], [{"WORLD_SIZE": "2", "INITIALIZATION": "5"}])
    assert found.code not in (0, None) and 5 <= found.seconds < 25
    assert "initialize(...)" in found.err or "DEADLINE_EXCEEDED" in found.err


# With the guards off, the tests above would not pass.

LATE = 6  # seconds after a fault; with the guards on, all have ended by then, and one has said why

BARE = {"GUARD": "off", "HEARTBEAT": "100"}  # JAX's own default
UNGUARDED = {  # which process waits for another; of those that are killed, nobody says which one it was
    "raise": (1, BARE),  # it waits in JAX's shutdown
    "exit": (1, {"HEARTBEAT": "100"}),  # so does this, without the launcher
    "stop": (0, BARE),
    "kill": (None, BARE),  # process 0 waits too, but sometimes hears at once
    "kill-of-0": (None, BARE),
    "mesh": (0, BARE),  # for half a minute
}


def wait_for_the_fault(kind: str, processes: list[subprocess.Popen[str]]) -> None:
    out = processes[0 if kind.endswith("-of-0") else 1].stdout
    while not (line := out.readline()).startswith("fault"):
        assert line, kind


@exhaustive
def test_with_the_guards_off_no_fault_ends_all_and_says_why():
    since = time.monotonic()
    [waiting] = join([[FAULTY, "none"]], [{"WORLD_SIZE": "2", "GUARD": "off"}])  # for a rank that is never started
    jobs = {kind: join([[FAULTY, kind]] * 2, [more] * 2) for kind, (_, more) in UNGUARDED.items()}
    for kind, processes in jobs.items():
        wait_for_the_fault(kind, processes)
    time.sleep(LATE)
    assert waiting.poll() is None
    for kind, processes in jobs.items():
        rank, _ = UNGUARDED[kind]
        assert rank is None or processes[rank].poll() is None, kind
    for processes in ([waiting], *jobs.values()):
        for one in processes:
            one.kill()
    for kind, processes in jobs.items():
        said = [end(one, since).err for one in processes]
        assert not any("SIGKILL" in err or re.search(r"rank \d of 2 ends", err) for err in said), (kind, said)
    end(waiting, since)


@exhaustive
def test_with_the_guard_off_a_signal_to_stop_is_not_heard():
    """JAX takes SIGTERM, and the program goes on to its end if it does not ask `stopping`."""
    found = joined([[FAULTY, "term"]] * 2, [{"GUARD": "off"}] * 2)
    assert [one.code for one in found] == [0, 0] and all("done" in one.out for one in found)


# --- what has to be equal ----------------------------------------------------------------------------------------------


def programs(folder: Path) -> list[str]:
    """Two copies of a program; the second one has another file, and another version of a package."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        shutil.copy(ROOT / FAULTY, folder / name)
        (folder / name / "part.py").write_text(f"rate = '{name}'\n")
        (folder / name / "task.py").write_text("import sys, faulty, part\nfaulty.main(sys.argv[1])\n")
    package = folder / "b" / "numpy-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: numpy\nVersion: 0.1\n")
    return [str(folder / name / "task.py") for name in ("a", "b")]


@rare  # what is compared: above, and how: test_agreement.py
def test_another_argument_file_or_version_in_one_process_is_found_before_the_first_step(tmp_path):
    same, other = programs(tmp_path)
    place = lambda rank: ["--rank", rank, f"--node_rank={rank}", "--master-port", rank]  # are not compared
    found = joined([[path, "none", "--lr", lr, *place(lr)] for path, lr in ((same, "1"), (other, "2"), (same, "1"))])
    for one in found:
        assert one.code == 1
        assert 'arguments: rank 1: "none --lr 2"; ranks 0, 2: "none --lr 1"' in one.err
        assert 'numpy: rank 1: "0.1"; ranks 0, 2: ' in one.err
        assert "files: part.py (rank 1) differ" in one.err
        assert "ends: MeshError: the processes do not run the same program." in one.err
        assert "done" not in one.out


@exhaustive
@pytest.mark.parametrize("kind", ["shape", "constant", "mesh"])
def test_another_program_in_one_process_is_found_before_the_first_step(kind):
    for one in joined([[FAULTY, kind]] * 2):
        assert one.code == 1
        assert "the processes have not lowered the same program" in one.err
        assert not re.findall("fault", one.out) or after_the_fault(one, time.time()) < 5


@exhaustive
def test_with_the_guard_off_another_program_in_one_process_is_not_found(tmp_path):
    """Arguments, a file, a version, the shape of a batch and a constant differ, and JAX finds none of it."""
    commands = [[path, "shape-constant", "--lr", str(i)] for i, path in enumerate(programs(tmp_path))]
    found = joined(commands, [{"GUARD": "off"}] * 2)
    assert [one.code for one in found] == [0, 0] and all("done" in one.out for one in found)


# --- hosts that are not alike ----------------------------------------------------------------------------------------


@rare  # with equal numbers each call runs in test_faults.py, and on one host in test_data.py and test_fields.py
def test_hosts_with_unequal_numbers_of_devices(tmp_path):
    """Six devices as four and two: JAX's own all-gather of the processes reshapes them to two rows."""
    counts = [{"JAX_NUM_CPU_DEVICES": "4"}, {"JAX_NUM_CPU_DEVICES": "2"}]
    found = joined([["tests/cluster/unequal.py", str(tmp_path)]] * 2, counts)
    assert [one.code for one in found] == [0, 0], found
    assert all("done" in one.out for one in found)


# --- the coordinator -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux says who listens where")
@rare  # every test under the launcher starts this coordinator
def test_the_coordinator_of_a_local_launch_listens_on_this_machine_only():
    found = launched(2, "tests/cluster/listening.py")
    [said] = re.findall(r"\[0\] listens (.*)", found.out)
    here = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}  # 127.0.0.1, ::1
    assert said and set(said.split()) <= here, (said, found.err)


@pytest.mark.parametrize("family", share([socket.AF_INET, socket.AF_INET6]))
def test_a_port_in_use_is_named_at_once(family):
    """Process 0 died of SIGSEGV, or said that an RPC server failed to start."""
    with socket.socket(family) as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        told = {"WORLD_SIZE": "2", "MASTER_PORT": str(port), "INITIALIZATION": "5"}
        [found] = joined([[FAULTY, "none"]], [told])
    assert found.code == 1 and found.seconds < 30
    assert f"port {port} of this host is in use" in found.err and "MASTER_PORT" in found.err
