"""What `spmd.cluster` costs beside JAX and Orbax alone: `python -m spmd launch -n 2 --devices 2 tests/benchmarks/processes.py`.

All ratios are of medians of runs that take turns, in one process group. It prints a line for each figure.
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax
from jax.experimental import multihost_utils as multihost
from jax.sharding import PartitionSpec as P

import spmd

MIB = 64


def seconds(run: Callable[[], Any]) -> float:
    since = time.perf_counter()
    run()
    return time.perf_counter() - since


def take_turns(rounds: int, *runs: Callable[[], Any]) -> list[float]:
    """The median of each; all processes start each round together."""
    found: list[list[float]] = [[] for _ in runs]
    for i in range(rounds):
        for place in range(len(runs)):
            which = (place + i) % len(runs)
            multihost.sync_global_devices("round")
            found[which].append(seconds(runs[which]))
    return [statistics.median(times) for times in found]


def say(name: str, text: str) -> None:
    if jax.process_index() == 0:
        print(f"{name:34} {text}", flush=True)


def started() -> None:
    """`initialize` beside the call of JAX in it, and what JAX's devices take to start."""
    inside = []
    real = jax.distributed.initialize

    def timed(**options: Any) -> None:
        inside.append(seconds(lambda: real(**options)))

    jax.distributed.initialize = timed
    whole = seconds(spmd.cluster.initialize)
    jax.distributed.initialize = real
    if not inside:
        return  # alone
    rest = whole - inside[0]
    say("initialize", f"{whole:.2f} s, of which JAX's own {inside[0]:.2f}, hashing and all-gather {rest:.2f}")


def kernel_call(mesh: Any) -> None:
    def body(x, w):
        return jax.lax.psum(x @ jax.lax.all_gather(w, "a", axis=1, tiled=True), "b")

    specs = (P("a", "b"), P("b", "a"))
    by_hand = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("a", None)))

    @spmd.kernel("x/a y/b, y/b z/a -> x/a z", mesh=mesh)
    def ours(x, w):
        w = spmd.all_gather(w, "y/b z/a -> y/b z")
        return spmd.einsum(x, w, "x/a y/b, y/b z -> x/a z")

    x = spmd.shard(np.ones((64, 64), np.float32), "x/a y/b", mesh=mesh)
    w = spmd.shard(np.ones((64, 64), np.float32), "y/b z/a", mesh=mesh)
    counts = [spmd.inspect.collectives(fn, x, w, mesh=mesh).counts for fn in (by_hand, ours)]
    runs = [lambda fn=fn: jax.block_until_ready([fn(x, w) for _ in range(20)]) for fn in (by_hand, ours)]
    for run in runs:
        run()
    hand, own = take_turns(40, *runs)
    say("warm call, 20 in a row", f"{own / hand:.3f} of by hand ({hand / 20 * 1e6:.0f} us); collectives {counts}")


def stopping() -> None:
    steps = 2000
    spmd.cluster.stopping(0)
    took = seconds(lambda: [spmd.cluster.stopping(step) for step in range(1, steps + 1)])
    say("stopping", f"{took / steps * 1e6:.1f} us per step")


def ready_batch(mesh: Any) -> None:
    data = spmd.cluster.batches(np.zeros((4096, 1024), np.int32), "b/a s", batch=64, mesh=mesh, prefetch=4)
    times = []
    for _ in range(30):
        next(data)
        time.sleep(0.05)  # the step, in which the thread reads
        times.append(seconds(lambda: next(data)))
        time.sleep(0.05)
    say("a ready batch", f"{statistics.median(times) * 1e3:.2f} ms")


def checkpoints(mesh: Any, folder: Path) -> None:
    size = MIB * 2**20 // 4 // 4
    make = spmd.init(
        lambda key: {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (size // 1024, 1024)) for i in range(4)},
        "x/a y/b",
        mesh=mesh,
    )
    state = make(jax.random.key(0))
    jax.block_until_ready(state)
    ours = spmd.cluster.checkpoints(folder / "ours", keep=2)
    theirs = orbax.CheckpointManager(folder / "theirs", options=orbax.CheckpointManagerOptions(max_to_keep=2))
    blocks: dict[str, list[float]] = {"ours": [], "theirs": []}
    args = orbax.args.StandardSave(state)
    saves = {
        "ours": (functools.partial(ours.save, state=state), ours.wait),
        "theirs": (functools.partial(theirs.save, args=args, force=True), theirs.wait_until_finished),
    }
    for step in range(16):
        for name, (save, wait) in list(saves.items())[:: 1 if step % 2 else -1]:
            multihost.sync_global_devices("save")
            blocks[name].append(seconds(functools.partial(save, step)))
            wait()
    own, other = (statistics.median(blocks[name][1:]) for name in ("ours", "theirs"))
    say(f"save of {MIB} MiB blocks", f"{own / other:.2f} of Orbax's own ({other * 1e3:.0f} ms)")
    jax.block_until_ready(ours.restore(make, jax.random.key(1)).state)  # compiles the sums
    before = read_bytes()
    took = seconds(lambda: jax.block_until_ready(ours.restore(make, jax.random.key(1)).state))
    share = MIB * 2**20 / jax.process_count()
    say("restore", f"{took * 1e3:.0f} ms; reads {(read_bytes() - before) / share:.2f} of this process's share")
    ours.close()
    theirs.close()


def read_bytes() -> int:
    """Bytes that this process has read, from disk or from the cache."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def main() -> None:
    started()
    mesh = spmd.make_mesh(a=jax.process_count(), b=-1)
    kernel_call(mesh)
    ready_batch(mesh)
    stopping()
    base = Path(tempfile.gettempdir())
    folder = base / f"spmd-processes-{multihost.broadcast_one_to_all(np.int32(time.time()))}"
    checkpoints(mesh, folder)
    say("load of the machine", Path("/proc/loadavg").read_text().strip())


if __name__ == "__main__":
    main()
