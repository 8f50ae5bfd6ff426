"""A program of several processes in which something goes wrong: `python tests/cluster/faulty.py FAULT`.

It prints when that happens, so that a test measures the time from the fault to the end. Where the fault is another
program in the last process, its name says what differs there: `mesh`, `shape` and `constant`, together too.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp

import spmd


def happens() -> None:
    """Say when it happens."""
    print("fault", time.time(), flush=True)


def fault(kind: str, rank: int) -> None:
    """Something that happens in one process only."""
    who = 0 if kind.endswith("-of-0") else 1
    if rank != who:
        return
    happens()
    match kind.removesuffix("-of-0"):
        case "raise":
            raise ValueError("bad data")
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(3 * int(os.environ["HEARTBEAT"]) + 3)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)


def main(kind: str) -> None:
    """Join the others and compute some steps, with the guards of `spmd.cluster` or, with GUARD=off, as JAX does it."""
    seconds = int(os.environ.get("HEARTBEAT", "30"))
    guarded = os.environ.get("GUARD") != "off"
    if not guarded:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, count, rank, heartbeat_timeout_seconds=seconds)
    else:
        patience = int(os.environ.get("INITIALIZATION", "300"))
        spmd.cluster.initialize(heartbeat_timeout_seconds=seconds, initialization_timeout=patience)
    rank = jax.process_index()
    odd = kind if rank == jax.process_count() - 1 else ""
    mesh = spmd.make_mesh(a=2, b=-1) if "mesh" in odd else spmd.make_mesh(a=-1)
    rows = 16 if "shape" in odd else 8
    x = spmd.init(lambda key: jax.random.normal(key, (rows,)), "x/a", mesh=mesh)(jax.random.key(0))
    factor = rank if "constant" in odd else 0
    step = jax.jit(lambda x: x + factor + jnp.sum(x))
    if "mesh" in odd:
        happens()
    if guarded:
        spmd.cluster.same_program(step.lower(x))
    x = step(x)
    fault(kind, rank)
    for _ in range(3):
        x = step(x)
    print("done", float(x.addressable_shards[0].data[0]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "none")
