"""A program of several processes in which something goes wrong: `python tests/cluster/faulty.py FAULT`.

It prints when it starts, so that a test measures the time from the fault to the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp

import spmd


def fault(kind: str, rank: int) -> None:
    """Something that happens in one process only."""
    who = 0 if kind.endswith("-of-0") else 1
    if rank != who:
        return
    print("fault", time.time(), flush=True)
    match kind.removesuffix("-of-0"):
        case "raise":
            raise ValueError("bad data")
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)


def main(kind: str) -> None:
    seconds = int(os.environ.get("HEARTBEAT", "30"))
    guarded = os.environ.get("GUARD") != "off"
    if not guarded:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, count, rank, heartbeat_timeout_seconds=seconds)
    else:
        patience = int(os.environ.get("INITIALIZATION", "300"))
        spmd.cluster.initialize(heartbeat_timeout_seconds=seconds, initialization_timeout=patience)
    mesh = spmd.make_mesh(a=-1)
    rows = 16 if kind == "shape" and jax.process_index() == 1 else 8
    x = spmd.init(lambda key: jax.random.normal(key, (rows,)), "x/a", mesh=mesh)(jax.random.key(0))
    factor = jax.process_index() if kind == "constant" else 0
    step = jax.jit(lambda x: x + factor + jnp.sum(x))
    if guarded:
        spmd.cluster.same_program(step.lower(x))
    x = step(x)
    fault(kind, jax.process_index())
    for _ in range(3):
        x = step(x)
    print("done", float(x.addressable_shards[0].data[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "none")
