"""Two processes that differ silently: `tests/cluster/differing.py KIND FOLDER`, with COMPARE=off as JAX does it.

KIND is what differs in the last one: a `constant` of a kernel, the `same` constants in all, a `closed` array, the `key` of
`init`, a `setting` of JAX, or a bit that flips in a copy before the state is saved (`flip`).
"""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from tests.cluster.disturbed import flipped


def main(kind: str, folder: str) -> None:
    """Train a little, and save."""
    spmd.cluster.initialize(compare=os.environ.get("COMPARE") != "off", ignore=[1, 2])
    odd = jax.process_index() == jax.process_count() - 1
    if odd and kind == "setting":
        jax.config.update("jax_default_matmul_precision", "highest")
    mesh = spmd.make_mesh(a=-1)
    make = spmd.init(
        lambda key: {"x": jax.random.normal(key, (8,)), "n": jnp.float32(0)}, {"x": "x/a", "n": ""}, mesh=mesh
    )
    state = make(jax.random.key(odd and kind == "key"))
    factors, closed = [0.5, 0.25 if odd and kind == "constant" else 0.75], np.arange(4.0) + (odd and kind == "closed")
    for factor in factors:  # two kernels of one name
        step = spmd.kernel("x/a -> x/a", mesh=mesh)(lambda x, factor=factor: x * factor + closed.astype("f").sum())
        state["x"] = jax.jit(lambda x, step=step: step(x) * 2)(state["x"])
    if odd and kind == "flip":
        state["n"] = flipped(state["n"])
    since = time.perf_counter()
    with spmd.cluster.checkpoints(folder) as saved:
        saved.save(1, state)
    print("done", time.perf_counter() - since, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
