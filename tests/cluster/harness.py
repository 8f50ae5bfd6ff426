"""Real processes for tests: under the launcher, or started one by one as a cluster does."""

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import FULL_CASES, case_count

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 150  # seconds after which a test gives up
exhaustive = pytest.mark.skipif(case_count() <= FULL_CASES, reason="one of the exhaustive tests")


HUNG = 75  # the exit code of a run that stands still, which schedulers queue again


def free_port() -> int:
    """A port on this host that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (None where it had to be killed), what it wrote, and after how many seconds."""

    code: int | None
    out: str
    err: str
    seconds: float


@functools.cache
def compiled() -> dict[str, str]:
    """The variables that let a process find what one before it has compiled, which takes most of its time."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    least = "JAX_PERSISTENT_CACHE_MIN"
    return {"JAX_COMPILATION_CACHE_DIR": folder, f"{least}_COMPILE_TIME_SECS": "0", f"{least}_ENTRY_SIZE_BYTES": "-1"}


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process that is not told anything yet."""
    told = ("SPMD_RANK", "SPMD_PROCESSES", "SPMD_COORDINATOR", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in told}
    flags = [one for one in kept.get("XLA_FLAGS", "").split() if "device_count" not in one]
    return {
        **kept,
        **compiled(),
        "XLA_FLAGS": " ".join(flags),  # those with which tests compile
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **(more or {}),
    }


def start(command: Sequence[str], more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a process whose output is read at its end."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment(more), text=True, **pipes)


def end(process: subprocess.Popen[str], since: float, timeout: float = TIMEOUT) -> Ended:
    """Wait for a process, until it has run for `timeout` seconds."""
    try:
        out, err = process.communicate(timeout=max(timeout - (time.monotonic() - since), 0.1))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        (out, err), code = process.communicate(), None
    return Ended(code, out, err, time.monotonic() - since)


def alone(*program: str) -> Ended:
    """A program in a process that has no others."""
    since = time.monotonic()
    return end(start(program), since)


def launched(
    count: int,
    *program: str,
    devices: int | None = 2,
    more: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Ended:
    """A program under `python -m spmd launch`."""
    since = time.monotonic()
    told = ["--devices", str(devices)] if devices else []
    return end(start(["-m", "spmd", "launch", "-n", str(count), *told, *program], more), since, timeout)


def join(
    commands: Sequence[Sequence[str]], more: Sequence[Mapping[str, str]] | None = None
) -> list[subprocess.Popen[str]]:
    """Start processes of one program, each with a command of its own, that find each other by RANK and WORLD_SIZE."""
    port, started = str(free_port()), []
    for rank, command in enumerate(commands):
        told = {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        told |= {"JAX_NUM_CPU_DEVICES": "2", **(more[rank] if more else {})}
        started.append(start(command, told))
    return started


def joined(
    commands: Sequence[Sequence[str]], more: Sequence[Mapping[str, str]] | None = None, timeout: float = TIMEOUT
) -> list[Ended]:
    """The same, until they end."""
    since = time.monotonic()
    return [end(one, since, timeout) for one in join(commands, more)]
