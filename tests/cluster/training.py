"""A loop that stops when it is asked to: `python tests/cluster/training.py FOLDER STEPS`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax

import spmd


def main(folder: str, steps: str) -> None:
    spmd.cluster.initialize(heartbeat_timeout_seconds=5)
    rank = jax.process_index()
    mesh = spmd.make_mesh(a=-1)
    x = spmd.init(lambda key: jax.random.normal(key, (8,)), "x/a", mesh=mesh)(jax.random.key(0))
    update = jax.jit(lambda x: x + x.sum() / 8)
    spent = 0.0
    for step in range(int(steps)):
        begin = time.perf_counter()
        stop = spmd.cluster.stopping(step)
        spent += time.perf_counter() - begin
        if stop:
            break
        x = jax.block_until_ready(update(x))
        if step == 5:
            print("running", flush=True)
        time.sleep(0.01)
    Path(folder, f"saved{rank}").write_text(f"{step} {spent / (step + 1)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
