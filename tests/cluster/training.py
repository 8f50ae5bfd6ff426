"""A training loop that is fed, saved, stopped and resumed: `python tests/cluster/training.py FOLDER STEPS [EVERY]`.

It writes one line for each step to FOLDER/log: the step, the loss, the samples. With EVERY it saves after so many steps,
and when it is asked to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

import spmd


class Samples:
    """Rows of numbers; the first tells which row it is."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> np.ndarray:
        rest = np.random.default_rng(index).normal(size=7)
        return np.array([index / 50, *rest], np.float32)


def train(folder: Path, steps: int, every: int) -> None:
    spmd.cluster.initialize(heartbeat_timeout_seconds=5, ignore=[1, 2])
    mesh = spmd.make_mesh(a=2, b=4)
    make = spmd.init(lambda key: {"w": jax.random.normal(key, (8,)) / 8}, {"w": "k/b"}, mesh=mesh)
    data = spmd.cluster.batches(Samples(), "n/a k/b", batch=8, seed=1, mesh=mesh)
    saved = spmd.cluster.checkpoints(folder / "saved")
    state, first = saved.restore(make, jax.random.key(0), data=data)

    @spmd.kernel("n/a k/b, k/b -> scalar", mesh=mesh)
    def loss(x, w):
        return spmd.reduce(spmd.einsum(x, w, "n/a k/b, k/b -> n/a") ** 2, "n/a -> scalar", "mean")

    @jax.jit
    def update(state, x):
        value, gradient = jax.value_and_grad(lambda w: loss(x, w))(state["w"])
        return {"w": state["w"] - 0.1 * gradient}, value

    lowered = update.lower(state, data[0])
    spmd.cluster.same_program(lowered)
    everyone = spmd.kernel("n/a k/b -> n k", mesh=mesh)(lambda x: spmd.all_gather(x, "n/a k/b -> n k", to="invarying"))
    for step in range(first, steps):
        if spmd.cluster.stopping(step):
            break
        x = next(data)
        ids = [round(50 * float(i)) for i in np.asarray(everyone(x))[:, 0]]
        state, value = update(state, x)
        if jax.process_index() == 0:
            with open(folder / "log", "a") as log:
                log.write(f"{step} {float(value)!r} {ids}\n")
        if every and (step + 1) % every == 0:
            saved.save(step + 1, state, data=data)
        if step == int(os.environ.get("KILL_AT", "-1")) and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 5:
            print("running", flush=True)
        time.sleep(float(os.environ.get("PAUSE", "0")))
    else:
        step = steps
    if every:
        saved.save(step, state, data=data)
        saved.close()
    (folder / f"ended{jax.process_index()}").write_text(str(step))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
