"""The main job, `examples/train_lm.py`, which writes down what it reads: `tests/cluster/main_job.py FOLDER FLAGS...`.

The file itself is run unchanged, on a small text. FOLDER/results.json gets its results, and FOLDER/rows-N the windows
that process N has read for training, in order. PAUSE is how many seconds it takes to read one. SIGUSR2 raises an
exception in the job, and SIGALRM lets it exit. LATE=1:9 sends SIGTERM to process 1 right after it has asked, before
step 9, whether to stop.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax

from spmd import cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BATCH, SEQ = 16, 16

FLAGS = ["--d=16", "--layers=1", "--groups=4", "--queries=1", "--head=4", "--hidden=16", f"--seq={SEQ}"]
FLAGS += [f"--batch={BATCH}", f"--heldout={BATCH * SEQ + 1}", "--sample=0", "--no-compare"]


def text(folder: Path, epoch: int) -> Path:
    """A text of which one file is held out, and the others have as many windows as `epoch` steps read."""
    source, size = (EXAMPLES / "train_lm.py").read_bytes(), BATCH * SEQ + 1
    data = folder / "text"
    data.mkdir(exist_ok=True)
    for i in range(epoch + 1):
        (data / f"{i}.txt").write_bytes(source[i * size : (i + 1) * size])
    return data


def fails(folder: Path, error: BaseException) -> None:
    """What goes wrong in one process, and when: Python runs a handler only after what JAX compiles or waits for."""
    (folder / "failed").write_text(repr(time.monotonic()))
    raise error


def asked_late(folder: Path, late: str) -> None:
    """Let a signal come when the job has just asked whether to stop."""
    where, asks = tuple(map(int, late.split(":"))), cluster.stopping

    def stopping(step: int) -> bool:
        found = asks(step)
        if (jax.process_index(), step) == where:
            os.kill(os.getpid(), signal.SIGTERM)
            (folder / "late").touch()
        return found

    cluster.stopping = stopping


def main(folder: Path, flags: list[str]) -> None:
    """Run the main job and write what it has read."""
    sys.path.insert(0, str(EXAMPLES))
    import train_lm

    read: list[int] = []
    one_window = train_lm.Windows.__getitem__

    def noted(self: train_lm.Windows, index: int) -> object:
        if threading.current_thread().name.startswith("batches"):  # not what only tells shapes
            read.append(int(index))
            time.sleep(float(os.environ.get("PAUSE", "0")))
        return one_window(self, index)

    train_lm.Windows.__getitem__ = noted
    if late := os.environ.get("LATE"):
        asked_late(folder, late)
    train_lm.save_curve = lambda path, results: None
    signal.signal(signal.SIGUSR2, lambda *_: fails(folder, ValueError("bad data")))
    signal.signal(signal.SIGALRM, lambda *_: fails(folder, SystemExit(3)))
    print("pid", os.getpid(), flush=True)
    train_lm.main([*FLAGS, f"--data={folder / 'text'}", f"--json={folder / 'results.json'}", *flags])
    (folder / f"rows-{jax.process_index()}").write_text(json.dumps(read))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
