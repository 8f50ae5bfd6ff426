"""`python -m spmd launch`: the processes of a program on this machine, which end together."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from spmd.errors import MeshError

GRACE = 2.0  # seconds between SIGTERM and SIGKILL for the others, when one has failed
SAVING = 30.0  # seconds that a signal to the launcher leaves them, so that they can save
COORDINATOR_PORT = 8476  # of the coordinator, where hosts have to agree on one; JAX's own default on TPUs
# A line for each connection that JAX's collectives on CPU make; two threads may write theirs into each other, and into
# a line of the program that is not ended yet.
_CHATTER = re.compile(r"\[Gloo\] Rank |peer ranks\. Expected number of connected")
_CHATTER_ENDS = re.compile(r".*Expected number of connected peer ranks is : \d+")
_HELD = 1000  # lines that wait to be printed, after which who writes more waits too
_LAST = 40  # lines of a failed process that are printed again at the end


@dataclass
class Process:
    """One process of the program.

    Attributes:
      rank: Its rank.
      child: The process of the operating system, the leader of a group of its own.
      readers: The threads that read what it writes.
      last: The lines that it wrote last to its error stream.
    """

    rank: int
    child: subprocess.Popen[str]
    readers: list[threading.Thread] = field(default_factory=list)
    last: list[str] = field(default_factory=list)

    def send(self, number: int) -> None:
        """Send a signal to the process and to those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)


@dataclass(frozen=True)
class Launch:
    """What is started: a program, how often, and which part of all processes this is.

    Attributes:
      command: The program with its arguments: `train.py --lr 0.1`, or `-m package.train`.
      count: How many processes on this host.
      devices: Virtual CPU devices of each process; 0 leaves JAX its own devices.
      first: The rank of the first of them.
      total: How many processes there are on all hosts.
      coordinator: `host:port` of process 0.
    """

    command: Sequence[str]
    count: int
    devices: int
    first: int
    total: int
    coordinator: str

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of one process."""
        found = {**os.environ, "SPMD_RANK": str(rank), "SPMD_PROCESSES": str(self.total)}
        found |= {"SPMD_COORDINATOR": self.coordinator, "PYTHONUNBUFFERED": "1"}
        if os.path.isabs(home := os.path.expanduser("~")):  # the next start compiles nothing
            found.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(home, ".cache", "spmd"))
        if self.devices:
            found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.devices)}
        return found


def launch(plan: Launch, restarts: int = 0) -> int:
    """Start the processes and wait for them.

    Each line that they write is printed with its rank. When one fails, its error is printed before anything that the
    others still say, and again at the end. The others get SIGTERM, and SIGKILL two seconds later. Then all are started
    again, at most `restarts` times, if no signal has come to the launcher.

    Returns:
      0, or the exit code of the process that failed first; 128 and the signal if a signal ended it.
    """
    code, stopped = _once(plan)
    while code and not stopped and restarts:
        restarts -= 1
        print(f"all are started again; {restarts} restarts are left", file=sys.stderr, flush=True)
        local = plan.coordinator.startswith("localhost:") and plan.count == plan.total
        code, stopped = _once(replace(plan, coordinator=f"localhost:{free_port()}") if local else plan)
    return code


def _once(plan: Launch) -> tuple[int, bool]:
    """The exit code of all together, and whether a signal to the launcher has ended them."""
    asked = list[int]()
    note = lambda number, _: asked.append(number)
    with contextlib.ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            undo.callback(signal.signal, number, signal.signal(number, note))
        pipe = os.pipe()  # no process outlives the launcher: all watch the end of this pipe
        for end in pipe:
            undo.callback(os.close, end)
        watch = _Watch(plan, pipe[0])
        watch.wait(asked)
    if (failed := watch.failed) is None:
        return 0, watch.stopping
    code = failed.child.returncode
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    head = f"rank {failed.rank} of {plan.total} failed first, {how}{':' if failed.last else '.'}"
    print(head, *failed.last, sep="\n  ", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code, watch.stopping


def per_host(plan: Launch, hosts: Sequence[str]) -> list[str]:
    """The command for each host, for a program on several."""
    words = ["python", "-m", "spmd", "launch", "-n", str(plan.count), "--coordinator", plan.coordinator]
    words += ["--devices", str(plan.devices)] if plan.devices else []
    found = []
    for index, host in enumerate(hosts):
        mine = [*words, "--hosts", ",".join(hosts), "--host", str(index), *plan.command]
        found.append(f"{host}: {shlex.join(mine)}")
    return found


def free_port() -> int:
    """A port on this host that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def checked_command(command: Sequence[str]) -> list[str]:
    """The command without a leading `--`, if it can be run.

    Raises:
      MeshError: It names no program, or a file that does not exist.
    """
    found = list(command[1:] if command[:1] == ["--"] else command)
    call = "python -m spmd launch"
    if not found or found == ["-m"]:
        raise MeshError("launch needs the program to run.", call=call, advice="python -m spmd launch -n 2 train.py")
    if found[0] != "-m" and not Path(found[0]).is_file():
        rule = f"there is no file {found[0]!r} to run."
        raise MeshError(rule, call=call, advice="options of launch come before the program; a module: -m NAME")
    return found


def _without_chatter(source: Iterable[str]) -> Iterator[str]:
    """The program's own lines. Of a line that chatter cuts in two, the first part is put before the second; a line may
    also follow chatter whose own line is not ended yet."""
    begun, chatter = "", False
    for line in source:
        before, found = chatter, _CHATTER.search(line)
        chatter = found is not None
        if found:
            begun += line[: found.start()] if found[0].startswith("[") else ""
            end = _CHATTER_ENDS.match(line)
            if end and (rest := line[end.end() :].rstrip("\n")):
                yield begun + rest
                begun = ""
        elif begun or not (before and line == "\n"):
            yield begun + line.rstrip("\n")
            begun = ""
    if begun:
        yield begun


class _Watch:
    """Starts the processes, prints what they say, passes signals on, and ends the others when one fails."""

    def __init__(self, plan: Launch, pipe: int) -> None:
        self.failed: Process | None = None
        self.said: queue.Queue[tuple[Process, str, IO[str]] | None] = queue.Queue(_HELD)
        self.printer = threading.Thread(target=self._print, daemon=True)  # a full pipe stops it, and not who watches
        self.printer.start()
        self.running = [self._start(plan, rank, pipe) for rank in range(plan.first, plan.first + plan.count)]
        self.stopping = False  # a signal to the launcher ends them all, and gives them time to save
        self.deadline = float("inf")

    def wait(self, asked: list[int]) -> None:
        """Wait until all have ended, and what they said is printed. `failed` is the first that failed."""
        while self.running:
            while asked:
                self._pass_on(asked.pop(0))
            # Of several that ended in the same moment, an abort is what another one's end brought about.
            ended = [one for one in self.running if one.child.poll() is not None]
            for one in sorted(ended, key=lambda one: one.child.returncode == -signal.SIGABRT):
                self._ended(one)
            if time.monotonic() > self.deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.02)
        self.said.put(None)
        self.printer.join()

    def _start(self, plan: Launch, rank: int, pipe: int) -> Process:
        runner = str(Path(__file__).with_name("_rank.py"))
        child = subprocess.Popen(
            [sys.executable, runner, str(pipe), *plan.command],
            env=plan.environment(rank),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(pipe,),
            start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone, which passes it on
        )
        process = Process(rank, child)
        for pair in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            process.readers.append(threading.Thread(target=self._read, args=(process, *pair), daemon=True))
            process.readers[-1].start()
        return process

    def _read(self, process: Process, source: IO[str], sink: IO[str]) -> None:
        with source:
            for line in _without_chatter(source):
                self.said.put((process, line, sink))

    def _print(self) -> None:
        """Print what they say until all have ended, of one that failed before the others."""
        going = True
        while going:
            lines = [self.said.get() for _ in range(self.said.qsize() or 1)]
            first, going = self.failed, None not in lines
            for process, text, sink in sorted(filter(None, lines), key=lambda line: line[0] is not first):
                if sink is sys.stderr:
                    process.last = [*process.last, text][-_LAST:]
                print(f"[{process.rank}] {text}", file=sink, flush=True)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._send(number)
            return
        self._send(signal.SIGKILL if self.stopping else number)  # who asks twice does not want to wait
        self.stopping, self.deadline = True, min(self.deadline, time.monotonic() + SAVING)

    def _ended(self, process: Process) -> None:
        self.running.remove(process)
        process.send(signal.SIGKILL)  # what it started and left behind
        for reader in process.readers:
            reader.join(timeout=1)  # a child of its own may still hold the pipe open
        if process.child.returncode and self.failed is None:
            self.failed = process  # it has said all, and that is printed before the others go on
            if not self.stopping:
                self._send(signal.SIGTERM)
                self.deadline = time.monotonic() + GRACE

    def _send(self, number: int) -> None:
        for one in self.running:
            one.send(number)
