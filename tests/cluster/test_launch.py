"""The launcher: what it prints, how it ends, and that nothing outlives it. The programs here do without JAX."""

import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.harness import end, exhaustive, free_port, start
from tests.conftest import main
from tests.sampler import share


def program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['SPMD_RANK'])\n{text}\n")
    return str(path)


GRACE = 2.0  # seconds between SIGTERM and SIGKILL for the others, when one has failed


def run(path: str, *more: str, count: int = 2, devices: int = 0, restarts: int = 0) -> int:
    told = ["--devices", str(devices)] if devices else []
    told += ["--max-restarts", str(restarts)] if restarts else []
    return main(["launch", "-n", str(count), *told, path, *more])


def test_each_line_has_its_rank(tmp_path, capfd):
    text = "print('hello', *sys.argv[1:], os.environ['SPMD_PROCESSES'], os.environ['JAX_NUM_CPU_DEVICES'])"
    assert run(program(tmp_path, text), "--lr", "1", count=3, devices=4) == 0
    out = capfd.readouterr().out.splitlines()
    assert sorted(out) == [f"[{rank}] hello --lr 1 3 4" for rank in range(3)]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise ValueError('bad data')", 1, "ValueError: bad data"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, ""),
        ("os.abort()", 134, ""),
    ],
)
def test_the_first_failure_ends_all_and_is_said_first_and_last(tmp_path, capfd, text, code, said):
    others = "print('late', file=sys.stderr) or time.sleep(60)"
    path = program(tmp_path, f"if rank == 1:\n    time.sleep(.3)\n    {text}\n{others}")
    since = time.monotonic()
    assert run(path, count=3) == code
    assert time.monotonic() - since < 5
    err = capfd.readouterr().err.splitlines()
    [head] = [i for i, line in enumerate(err) if "failed first" in line]
    assert err[head].startswith("rank 1 of 3 failed first")
    if said:
        assert any(line.startswith("[1] ") and said in line for line in err[:head])
        assert said in err[-1]
        assert not any("_rank.py" in line for line in err)  # the launcher's own frames are not shown


def test_what_the_others_say_waits_until_the_failed_one_has_spoken(tmp_path, capfd):
    chatter = "[print('noise', file=sys.stderr, flush=True) or time.sleep(.001) for _ in range(10**6)]"
    failing = "time.sleep(.3); sys.stderr.write('line\\n' * 200); sys.exit(1)"
    run(program(tmp_path, f"if rank == 1:\n    {failing}\n{chatter}"))
    err = capfd.readouterr().err.splitlines()
    head = next(i for i, line in enumerate(err) if "failed first" in line)
    assert err[:head].count("[1] line") == 200
    assert err[head + 1 :] == ["  line"] * 40  # the last lines again, and nothing after them


def test_a_screen_that_takes_nothing_does_not_hold_up_the_end(tmp_path):
    """As a log on a disk that does not answer: the launcher still notices who fails, and ends the others."""
    text = f"""
open({str(tmp_path / "pid")!r} + str(rank), "w").write(str(os.getpid()))
if rank == 1:
    time.sleep(1); sys.exit(3)
while True:
    print("x" * 1000)
"""
    process = start(["-m", "spmd", "launch", "-n", "2", program(tmp_path, text)])
    pid = tmp_path / "pid0"
    while not pid.exists() or not pid.read_text():
        time.sleep(0.1)
    assert _gone(int(pid.read_text()), seconds=20)  # nobody has read a line
    process.stdout.read()
    assert end(process, time.monotonic()).code == 3


def test_who_ignores_sigterm_is_killed(tmp_path):
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    since = time.monotonic()
    assert run(program(tmp_path, f"if rank == 1:\n    time.sleep(.3); sys.exit(4)\n{ignoring}")) == 4
    assert 2 < time.monotonic() - since < 6


@pytest.mark.parametrize("number", share([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_to_the_launcher_reaches_all_and_lets_them_save(tmp_path, number):
    saving = (
        f"def save(*_):\n    time.sleep({GRACE + 0.3})\n    open(sys.argv[1] + str(rank), 'w').close()\n    sys.exit(0)\n"
        f"signal.signal({int(number)}, save)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    path, since = program(tmp_path, saving), time.monotonic()
    process = start(["-m", "spmd", "launch", "-n", "2", path, str(tmp_path / "saved")])
    ready = [process.stdout.readline() for _ in range(2)]
    assert sorted(ready) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    assert end(process, since).code == 0
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    text = "open(sys.argv[1] + str(rank), 'w').write(str(os.getpid())); print('up', flush=True); time.sleep(60)"
    process = start(["-m", "spmd", "launch", "-n", "2", program(tmp_path, text), str(tmp_path / "pid")])
    for _ in range(2):
        process.stdout.readline()
    process.kill()
    process.communicate()
    for rank in range(2):
        assert _gone(int((tmp_path / f"pid{rank}").read_text()))


def test_what_a_process_left_behind_ends_with_it(tmp_path):
    text = (
        "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(sys.argv[1] + str(rank), 'w').write(str(child.pid))"
    )
    assert run(program(tmp_path, text), str(tmp_path / "pid")) == 0
    for rank in range(2):
        assert _gone(int((tmp_path / f"pid{rank}").read_text()))


def _gone(pid: int, seconds: float = 5) -> bool:
    for _ in range(int(20 * seconds)):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_a_module_is_run_with_m(tmp_path, capfd, monkeypatch):
    (tmp_path / "task.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "-n", "1", "-m", "task", "x"]) == 0
    assert capfd.readouterr().out == "[0] __main__ ['x']\n"


def test_one_command_for_each_host(tmp_path, capfd, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    told = ["--coordinator", "one:8476", "--hosts", "one,two"]
    assert main(["launch", "-n", "4", *told, "train.py", "--name", "a b"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"{host}: python -m spmd launch -n 4 --coordinator one:8476 --hosts one,two --host {i} train.py --name 'a b'"
        for i, host in enumerate(["one", "two"])
    ]


@exhaustive
def test_the_commands_for_two_hosts_start_one_program():
    told = ["launch", "-n", "1", "--devices", "2", "--coordinator", f"localhost:{free_port()}", "--hosts", "one,two"]
    found = end(start(["-m", "spmd", *told, "tests/cluster/faulty.py", "none"]), time.monotonic())
    lines = [line.partition(": python ") for line in found.out.splitlines()]
    assert [host for host, _, _ in lines] == ["one", "two"]
    since = time.monotonic()
    processes = [start(shlex.split(command)) for _, _, command in lines]
    ended = [end(one, since) for one in processes]
    assert [one.code for one in ended] == [0, 0], ended
    results = [one.out.splitlines()[-1].partition("] done ") for one in ended]
    assert [rank for rank, _, _ in results] == ["[0", "[1"] and all(float(value) for _, _, value in results)


def test_what_gloo_says_of_its_connections_is_left_out(tmp_path, capfd):
    said = "is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
    text = f"print('[Gloo] Rank 0 {said}'); print('[Gloo] Rank 0 is connected to[Gloo] Rank 0 {said}'); "
    assert (
        run(program(tmp_path, f"{text}print(' 3 {said[16:]}'); print(); print('step'); print(); print(1)"), count=1)
        == 0
    )
    assert capfd.readouterr().out.splitlines() == ["[0] step", "[0] ", "[0] 1"]


def test_what_gloo_writes_into_a_line_of_the_program_loses_none_of_it(tmp_path, capfd):
    gloo = b"[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    lines = f"for text in (b'lo', {gloo!r}, {gloo!r}, b'ss 1', {gloo!r}, b'\\n', b'\\n', {gloo!r}, b'end', {gloo!r}): "
    assert run(program(tmp_path, f"{lines}os.write(1, text)"), count=1) == 0
    assert capfd.readouterr().out.splitlines() == ["[0] loss 1", "[0] ", "[0] end"]
    lines = f"for text in ({gloo[:-1]!r}, b'ok\\n', b'\\n', b'be', {gloo[:-1]!r}, b'tween\\n', b'\\n', b'end\\n'): "
    assert run(program(tmp_path, f"{lines}os.write(1, text)"), count=1) == 0
    assert capfd.readouterr().out.splitlines() == ["[0] ok", "[0] between", "[0] end"]


def test_a_line_is_written_in_one_piece(tmp_path, capfd):
    text = "print('a', end=''); os.write(1, b'b\\n'); print('c'); print('d', 'e', end='', file=sys.stderr)"
    assert run(program(tmp_path, text), count=1) == 0
    said = capfd.readouterr()
    assert said.out.splitlines() == ["[0] b", "[0] ac"]
    assert "[0] d e" in said.err.splitlines()


def test_all_are_started_again_as_often_as_one_may_fail(tmp_path, capfd):
    """With a port of their own, and with what was compiled."""
    lines = (
        "import spmd; rank = int(os.environ['SPMD_RANK']); "
        f"mine = open({str(tmp_path / 'turns')!r}, 'a') if rank == 1 else open(os.devnull, 'a'); "
        "mine.write('turn '); mine.close(); print(os.environ['JAX_COMPILATION_CACHE_DIR']); "
        f"sys.exit(7 if rank == 1 and open({str(tmp_path / 'turns')!r}).read().count('turn') < 3 else 0)"
    )
    path = program(tmp_path, lines)
    for restarts, code in ((1, 7), (2, 0)):
        (tmp_path / "turns").unlink(missing_ok=True)
        assert run(path, restarts=restarts) == code
        assert (tmp_path / "turns").read_text() == "turn " * (restarts + 1)
    said = capfd.readouterr()
    assert "all are started again; 0 restarts are left" in said.err
    assert os.path.isabs(said.out.splitlines()[0].removeprefix("[0] ").removeprefix("[1] "))
