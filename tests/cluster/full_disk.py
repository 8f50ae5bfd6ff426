"""A program whose disk is full for a while: `python tests/cluster/full_disk.py FOLDER limit|late|FILE|never [HOW]`.

With HOW `strict` a save that fails ends it. With `bare` Orbax alone saves.

With `limit` no file may grow beyond a few bytes. With `late` the last process alone has a limit, which only the arrays
reach. FILE takes all that is left of its disk.
"""

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as orbax

import spmd

LATE = 4500  # bytes: a probe is smaller, the arrays of a process are larger
TIMEOUT = 8  # seconds, with `late`


@contextlib.contextmanager
def full(how: str):
    """The disk takes nothing more. The end of the block makes room again."""
    if how == "never":
        yield
        return
    if how in ("limit", "late"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead of the process
        last = jax.process_index() == jax.process_count() - 1
        limit = 64 if how == "limit" else LATE if last else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    with open(how, "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"x" * 4096)
    yield
    os.unlink(how)


def bare(folder: str, how: str, state: Any) -> None:
    """Save by Orbax alone."""
    manager = orbax.CheckpointManager(Path(folder) / "bare")
    with full(how):
        manager.save(1, args=orbax.args.StandardSave(state))
        manager.wait_until_finished()


def main(folder: str, how: str, *more: str) -> None:
    spmd.cluster.initialize()
    mesh = spmd.make_mesh(a=-1)
    layouts = {"w": "x/a y", "n": "scalar"}
    make = spmd.init(lambda key: {"w": jax.random.normal(key, (256, 64)), "n": jnp.int32(0)}, layouts, mesh=mesh)
    update = jax.jit(lambda state: {"w": state["w"] * 2, "n": state["n"] + 1})
    if "bare" in more:
        bare(folder, how, make(jax.random.key(0)))
    saved = spmd.cluster.checkpoints(
        Path(folder) / "run", strict="strict" in more, timeout_seconds=TIMEOUT if how == "late" else 600
    )
    state, first = saved.restore(make, jax.random.key(0))
    print("first", first, flush=True)
    saved.save(first, state)
    saved.wait()
    with full(how):
        for step in (first + 1, first + 2):
            state = update(state)
            since = time.monotonic()
            saved.save(step, state)
            saved.wait()
            print("waited", time.monotonic() - since, flush=True)
    state = update(state)
    saved.save(first + 3, state)
    saved.wait()
    print("steps", sorted(int(one.name) for one in (Path(folder) / "run" / "steps").iterdir() if one.name.isdigit()))
    found = saved.restore(make, jax.random.key(0))
    assert found.step == first + 3 == int(found.state["n"])
    saved.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
