"""A loop that calls neither `stopping` nor `batches`: `tests/cluster/plain.py CALL WHERE KIND`.

CALL is what a turn calls: `kernel`, `jit` or `table`, a function that no name holds. In turn 8, or before the loop, or
after it, as WHERE says, the last process sleeps (KIND `sleep`), or all of them do for a while (`all`). With KIND `works` each
turn takes long, and nothing is wrong.
"""

import os
import sys
import time

import jax
import jax.numpy as jnp

import spmd

PATIENCE = float(os.environ["PATIENCE"])


def happens(kind: str) -> None:
    """Say when it happens, in those in which it does."""
    if kind == "all" or (kind == "sleep" and jax.process_index() == jax.process_count() - 1):
        print("fault", time.time(), flush=True)
        time.sleep(1000 if kind == "sleep" else 6 * PATIENCE)


def main(call: str, where: str, kind: str) -> None:
    """Join the others, and go round a loop."""
    spmd.cluster.initialize(patience=PATIENCE, ignore=[1, 2, 3])
    mesh = spmd.make_mesh(a=-1)
    x = spmd.init(lambda key: jnp.ones(8), "x/a", mesh=mesh)(jax.random.key(0))
    total = spmd.kernel("x/a -> x/a", mesh=mesh)(lambda x: x + spmd.reduce(x, "x/a -> ", "mean"))
    functions = {"kernel": total, "jit": jax.jit(lambda x: total(x) * 0.5)}
    functions["table"] = functions["jit"]
    step = functions[call]
    if where == "start":
        happens(kind)
    for turn in range(16):
        if where == "loop" and turn == 8:
            happens(kind)
        if kind == "works":
            time.sleep(0.4 * PATIENCE)
        x = functions["table"](x) if call == "table" else step(x)
        float(x.addressable_shards[0].data[0])
        time.sleep(0.2 * PATIENCE)
    if where == "end":
        happens(kind)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
