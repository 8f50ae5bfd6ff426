"""A program that saves into a folder, and then lives on: `tests/cluster/tenant.py FOLDER`."""

import sys
import time

import jax

import spmd


def main(folder: str) -> None:
    spmd.use_cpu_devices(1)
    make = spmd.init(lambda key: jax.random.normal(key, (8,)), "x/a", mesh=spmd.make_mesh(a=1))
    saved = spmd.cluster.checkpoints(folder)
    state, step = saved.restore(make, jax.random.key(0))
    if step:
        print("restored", step, flush=True)
    saved.save(step + 1 - (step > 0), state)
    saved.wait()
    print("saved", flush=True)
    time.sleep(100)


if __name__ == "__main__":
    main(sys.argv[1])
