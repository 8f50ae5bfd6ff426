"""A program of two processes, as on two nodes of a cluster: they join, and each holds and checks its part."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import CHECKS, UNAVAILABLE

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def run(count: int) -> list[tuple[int, str]]:
    """The exit status and the output of each of `count` processes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes", str(rank), str(count), port],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, outputs, strict=True)]


def test_two_processes():
    found = run(2)
    if any(status == UNAVAILABLE for status, _ in found):
        pytest.skip(f"this JAX has no collectives between processes on CPU: {found[0][1]}")
    for status, text in found:
        assert status == 0, text
        assert [line for line in text.splitlines() if line in {c.__name__ for c in CHECKS}] == [
            c.__name__ for c in CHECKS
        ]
