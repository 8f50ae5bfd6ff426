"""A lease of a folder: of several programs that would save into it, one does."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from typing import Any

BEAT = 5.0  # seconds after which who holds a lease says so again
PATIENCE = 30.0  # seconds of silence after which who held it counts as dead
_ME = uuid.uuid4().hex  # this process: others may have its number, and the name of its host


class Lease:
    """The lease of a folder, a file there. One process of a program takes it; objects of one process share it.

    Args:
      folder: A path of `etils.epath`.
    """

    def __init__(self, folder: Any) -> None:
        self._file = folder / "lease.json"
        self._heard: tuple[Any, float] = (None, 0.0)  # the last word of another holder, and when we first heard it
        self._ended: threading.Event | None = None  # while it is held: when that ends

    def holder(self) -> dict[str, str] | None:
        """The other program that holds it; None where nobody does, or one that is known to have ended."""
        try:
            text = self._file.read_text()
            found, word = json.loads(text), (text, self._file.stat().mtime)
        except FileNotFoundError:
            return None
        except ValueError:  # the disk was full when it was written
            found, word = {"holder": "", "host": "another host", "process": "", "system": ""}, ("", 0)
        if found["holder"] == _ME or (found["system"] == _system() != "" and not _lives(found["process"])):
            return None
        if word != self._heard[0]:
            self._heard = word, time.monotonic()
        return dict(found)

    @property
    def held(self) -> bool:
        """Whether this object has taken it."""
        return self._ended is not None

    def take(self) -> str:
        """Hold it from now on. Where another program holds it, wait for its next word: the program, or nothing if there
        is none in `PATIENCE` seconds, for then it has ended."""
        if self._ended is not None:
            other = self.holder()  # of a process that stood still, it may have been taken
            return _named(other) if other else ""
        while other := self.holder():
            word, since = self._heard
            if time.monotonic() - since > PATIENCE:
                break
            time.sleep(BEAT / 5)
            if self.holder() and self._heard[0] != word:
                return _named(other)
        self._say()
        time.sleep(BEAT / 50)
        if other := self.holder():  # which took it in the same moment
            return _named(other)
        self._ended = threading.Event()
        threading.Thread(target=self._go_on, args=(self._ended,), daemon=True).start()
        return ""

    def release(self) -> None:
        """Let others take it."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None
            if self.holder() is None:
                self._file.unlink(missing_ok=True)

    def _go_on(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT):
            try:
                if self.holder() is None:
                    self._say()
            except OSError:  # a disk that does not answer for a while
                continue

    def _say(self) -> None:
        """Say that this process holds it: on a disk that is full, too."""
        try:
            os.utime(self._file)
            if json.loads(self._file.read_text())["holder"] == _ME:
                return
        except (OSError, ValueError, KeyError):  # it is not there, is another's, or is in the cloud
            pass
        content = {"holder": _ME, "host": socket.gethostname(), "process": str(os.getpid()), "system": _system()}
        content["time"] = f"{time.time()}"  # another word each time, where files have no times
        self._file.write_text(json.dumps(content))


def _named(holder: dict[str, str]) -> str:
    return f"process {holder['process']} on {holder['host']}"


def _system() -> str:
    """The running system and its numbering of processes, so that a number says whether its process lives."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return int(process) != os.getpid()
