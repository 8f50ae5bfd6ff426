"""A command that takes long says on a terminal what it does; in a pipe it prints its lines as they come, and no more."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from spmd._cli import programs as _progress
from spmd._cli.programs import shown_if_slow

SLOW = """
import time
print("loaded", flush=False)

def build(mesh):
    time.sleep(60)
"""


class Terminal:
    """Standard error as a terminal, while the test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours, self.theirs = pty.openpty()
        self.stream = open(self.theirs, "w")  # noqa: SIM115 - `read` closes it
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(_progress, "SECONDS", 0.01)
        monkeypatch.setattr(sys, "stderr", self.stream)

    def read(self) -> str:
        """What was written there."""
        print("\0", end="", file=self.stream, flush=True)
        written = b""
        while not written.endswith(b"\0"):  # a terminal gives what it has, in pieces
            written += os.read(self.ours, 100_000)
        self.stream.close()
        os.close(self.ours)
        return written.decode().removesuffix("\0")


def test_a_slow_step_is_shown_and_removed(monkeypatch):
    terminal = Terminal(monkeypatch)
    with shown_if_slow("reading [bold] train.py:step"):
        time.sleep(0.3)
    written = terminal.read()
    assert "reading [bold] train.py:step" in written and "0:00:0" in written
    assert written.endswith("\x1b[2K")  # the line is empty again


def test_an_error_of_the_program_is_alone_where_rich_is_missing(monkeypatch):
    """It once came with "No module named 'rich'", as if that were the reason."""
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(_progress, "find_spec", lambda name: None)
    with pytest.raises(ZeroDivisionError) as found, shown_if_slow("loading train.py:step"):
        raise ZeroDivisionError
    assert found.value.__context__ is None and terminal.read() == ""


def test_a_step_that_counts_fills_a_bar(monkeypatch):
    terminal = Terminal(monkeypatch)
    with shown_if_slow("searching step.py:build") as progress:
        progress(1, 16)
        time.sleep(0.3)
    end_of_bar = "\N{BOX DRAWINGS HEAVY LEFT}"  # a bar without an end moves to and fro
    assert end_of_bar in terminal.read()


def test_a_quick_step_is_not_shown(monkeypatch):
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(_progress, "SECONDS", 60)
    with shown_if_slow("reading train.py:step"):
        pass
    assert terminal.read() == ""


def test_an_interrupted_step_is_removed_too(monkeypatch):
    terminal = Terminal(monkeypatch)

    @shown_if_slow("reading train.py:step")
    def interrupted():
        time.sleep(0.2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.read().endswith("\x1b[2K")


def test_nothing_is_shown_in_a_pipe(capfd, monkeypatch):
    monkeypatch.setattr(_progress, "SECONDS", 0.01)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown_if_slow("reading train.py:step"):
        time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


def test_lines_come_at_once_and_an_interrupt_ends_with_a_word(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    command = [sys.executable, "-m", "spmd", "explain", f"{file}:build", "--mesh", "dp=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background begins without
    with subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, preexec_fn=heard, **pipes) as process:
        assert process.stdout.readline() == "loaded\n"  # while the program still runs
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
