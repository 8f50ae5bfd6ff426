"""The main job, `examples/train_lm.py`, on a disk that is full when it is asked to stop: `tests/cluster/unsaved.py FOLDER`."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax

from spmd import cluster
from tests.cluster import main_job


def main(folder: Path) -> None:
    """After its third step, when the second is saved, it gets SIGTERM, and from then on no file takes more than a few bytes."""
    asks = cluster.stopping

    def stopping(step: int) -> bool:
        if step == 3:
            while not (folder / "saved" / "steps" / "2").exists():
                time.sleep(0.01)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
            if jax.process_index() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return asks(step)

    cluster.stopping = stopping
    main_job.text(folder, 5)
    main_job.main(folder, [f"--checkpoint={folder / 'saved'}", "--every=2", "--steps=30", "--stopped=75", "--json="])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
