"""Two processes of which the last has an old listing of the checkpoints: `tests/cluster/stale.py FOLDER HOW`.

With `save` they save steps 10 and 15. With `listing` the last process lists step 10 only, as a cache of a network file
system does, and with `hidden` it cannot read step 15 either. Each prints the step and the numbers that it restores, then
they go on to step 20.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

import spmd

NEWEST = "15"


def is_last() -> bool:
    return jax.process_index() == jax.process_count() - 1


def forget_in_listings() -> None:
    """Let this process list no folder of the newest step."""
    listed, scanned = os.listdir, os.scandir

    class Scanned:
        def __init__(self, entries: Any) -> None:
            self.entries = entries

        def __enter__(self) -> Any:
            return (one for one in self.entries.__enter__() if one.name != NEWEST)

        def __exit__(self, *error: object) -> None:
            self.entries.__exit__(*error)

        def __iter__(self) -> Any:
            return (one for one in self.entries if one.name != NEWEST)

        def __next__(self) -> Any:
            return next(iter(self))

        def close(self) -> None:
            self.entries.close()

    os.listdir = lambda *at: [one for one in listed(*at) if one != NEWEST]
    os.scandir = lambda *at: Scanned(scanned(*at))


def seen(folder: Path, how: str) -> Path:
    """The folder as this process sees it."""
    if how == "save" or not is_last():
        return folder
    if how == "listing":
        forget_in_listings()
        return folder
    other = folder.with_name("seen")
    (other / "steps").mkdir(parents=True)
    for one in [*folder.iterdir(), *(folder / "steps").iterdir()]:
        if one.name not in ("steps", NEWEST):
            (other / one.relative_to(folder)).symlink_to(one)
    return other


def main(folder: Path, how: str) -> None:
    spmd.cluster.initialize(ignore=[1])
    mesh = spmd.make_mesh(a=-1)
    make = spmd.init(lambda key: jax.random.normal(key, (8,)), "x/a", mesh=mesh)
    saved = spmd.cluster.checkpoints(seen(folder, how), timeout_seconds=20)
    if how == "save":
        for step in (10, int(NEWEST)):
            saved.save(step, make(jax.random.key(step)))
        saved.close()
        return
    state, step = saved.restore(make, jax.random.key(0))
    print("restored", step, [float(x) for one in state.addressable_shards for x in one.data], flush=True)
    if how == "listing":
        saved.save(20, state)
        saved.close()
        print("done", flush=True)
    multihost_utils.sync_global_devices("the end")  # the other one may still read what this one sends
    if jax.process_index() == 0:
        time.sleep(2)  # the others end with an error where the process that they found each other by is gone
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
