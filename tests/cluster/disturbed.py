"""A training loop of several processes in which something goes wrong: `tests/cluster/disturbed.py FAULT RANK STEP STEPS`.

FOLDER is where it saves, after EVERY steps (2), if it is set. It prints the loss and the first sample of each step, so that
runs can be compared bit for bit.
"""

# ruff: noqa: E402

import contextlib
import ctypes
import errno
import functools
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from unittest import mock

PLACE = os.environ.get("PLACE", "step")


def happens_at(place: str, kind: str, who: str) -> None:
    """In one process a fault happens at a place of the program that is no step."""
    if place == PLACE and os.environ.get("RANK", "0") in who.split(",") and "SPMD_REMADE" not in os.environ:
        plainly(kind)


def plainly(kind: str) -> None:
    """A fault that needs nothing of the program."""
    print("fault", time.time(), flush=True)
    match kind:
        case "sleep":
            time.sleep(1000)
        case "raise":
            raise ValueError("bad data")
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    happens_at("import", *(*sys.argv[1:], "none", "1")[:2])

import jax
import jax.numpy as jnp
import numpy as np

import spmd

PATIENCE = float(os.environ.get("PATIENCE", "3"))
EVERY = int(os.environ.get("EVERY", "2"))  # steps


class Source:
    """Samples, of which none is read any more once `stuck` is set."""

    stuck = ""
    happens: tuple[str, str] = ("none", "1")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray:
        if self.stuck == "place":
            happens_at("data", *self.happens)
        if self.stuck == "blocks":
            os.read(os.pipe()[0], 1)  # a reader that blocks
        if self.stuck == "slow":
            time.sleep(0.02)
        if self.stuck == "nan":
            return np.full(2, np.nan, np.float32)
        if self.stuck == "fails":
            raise OSError("the disk is gone")
        return np.full(2, index, np.float32)


def flipped(x: jax.Array) -> jax.Array:
    """The array with another bit on the first device of this process."""
    blocks = []
    for number, part in enumerate(x.addressable_shards):
        block = np.array(part.data)
        block.reshape(-1).view(np.uint8)[1] ^= number == 0  # the lowest one may go when 1 is added
        blocks.append(jax.device_put(block, part.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


def close_network() -> None:
    """Close every connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            one.shutdown(socket.SHUT_RDWR)


LIBC = ctypes.CDLL(None, use_errno=True)


def own_mounts() -> None:
    """From now on this process alone sees the disks that it mounts; before it has threads."""
    alone, private = 0x20000, 0x44000
    if LIBC.unshare(alone) == 0:
        LIBC.mount(b"none", b"/", None, private, None)


def silent_disk(folder: str) -> None:
    """From now on a disk lies over a folder that answers no call: a file system of which nobody serves the requests.
    A user who may not mount one has calls that do not return."""
    with contextlib.suppress(OSError):
        there = os.open("/dev/fuse", os.O_RDWR)
        how = f"fd={there},rootmode=40000,user_id=0,group_id=0".encode()
        if "NO_MOUNT" not in os.environ and LIBC.mount(b"silent", folder.encode(), b"fuse", 0, how) == 0:
            return
    import tensorstore

    blocks = lambda *_, **__: os.read(os.pipe()[0], 1)
    if not folder.endswith("/steps"):
        mock.patch("tempfile.TemporaryFile", blocks).start()
    mock.patch.object(tensorstore, "open", blocks).start()


def full_disk() -> None:
    """From now on no file of a checkpoint can be written here."""
    full = OSError(os.strerror(errno.ENOSPC))
    mock.patch("shutil.disk_usage", return_value=mock.Mock(free=0)).start()
    mock.patch.object(Path, "write_bytes", side_effect=full).start()


def disturb(kind: str, state: dict[str, jax.Array], source: Source) -> dict[str, jax.Array]:
    """What happens in one process at one step."""
    plainly(kind)
    match kind:
        case "nap":
            time.sleep(6)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "reader":
            source.stuck = "blocks"
        case "slow":
            source.stuck = "slow"
        case "batch":
            source.stuck = "nan"
        case "error":
            source.stuck = "fails"
        case "loop":
            while True:
                pass
        case "branch":
            other_step = jax.jit(lambda x: x[::-1])  # sends to the other, where that sums
            print(float(other_step(state["x"]).addressable_shards[0].data[0]))
        case "exit":
            sys.exit(3)
        case "flip":
            return {**state, "count": flipped(state["count"])}
        case "network":
            close_network()
        case "disk":
            full_disk()
        case "silent":
            silent_disk(os.environ["FOLDER"])
        case "writer":
            silent_disk(os.environ["FOLDER"] + "/steps")
    return state


def asked(text: str) -> int | None:
    """What becomes of a run that stands still, as ON_HANG says."""
    print("asked:", text, flush=True)
    return None if os.environ["ON_HANG"] == "none" else int(os.environ["ON_HANG"])


def main(kind: str = "none", who: str = "1", when: str = "4", steps: str = "12") -> None:
    """Train, with a fault in one process at one step."""
    again = functools.partial(spmd.cluster.remake, replaced=True)
    known = {"remake": spmd.cluster.remake, "replaced": again, None: None}
    if kind in ("silent", "writer"):
        own_mounts()
    on_hang = known.get(os.environ.get("ON_HANG"), asked)
    happens_at("init", kind, who)
    patience = {"step": PATIENCE, "start": 4 * PATIENCE, "compile": 4 * PATIENCE}
    wait = int(os.environ.get("INITIALIZATION", "300"))
    spmd.cluster.initialize(patience=patience, on_hang=on_hang, ignore=[1, 2, 3], initialization_timeout=wait)
    spmd.cluster.stopping(0)
    rank, mesh = jax.process_index(), spmd.make_mesh(a=-1)
    width = int(os.environ.get("WIDTH", mesh.size))  # of the arrays, which is that of the mesh or its multiple
    source, size = Source(), width * 2
    data = spmd.cluster.batches(source, "b/a d", batch=size, mesh=mesh, prefetch=int(os.environ.get("PREFETCH", "0")))
    layouts = {"x": "n/a", "count": "scalar"}
    make = spmd.init(lambda key: {"x": jnp.ones(8 * width), "count": jnp.float32(0)}, layouts, mesh=mesh)
    first = True
    saved = spmd.cluster.checkpoints(os.environ["FOLDER"]) if "FOLDER" in os.environ else None
    happens_at("restore", kind, who)
    state, step = (make(jax.random.key(0)), 0) if saved is None else saved.restore(make, jax.random.key(0), data=data)

    @jax.jit
    def train_step(state: dict[str, jax.Array], batch: jax.Array, bad: float) -> tuple[dict[str, jax.Array], jax.Array]:
        happens_at("compile", kind, who)
        x = state["x"] * 0.99 + jnp.sin(jnp.sum(batch)) * bad
        return {"x": x, "count": state["count"] + 1}, jnp.sum(x)

    fewer = kind in ("fewer", "less") and f"{rank}" in who.split(",")
    while step < int(when if fewer else steps) and not spmd.cluster.stopping(step):
        here = step == int(when) and "SPMD_REMADE" not in os.environ
        if step == int(when) and PLACE == "data":
            source.stuck, source.happens = "place", (kind, who)
        if here and PLACE == "step" and f"{rank}" in who.split(","):
            state = disturb(kind, state, source)
        batch = next(data)
        bad = np.nan if here and kind == "nan" else 1.0
        state, loss = train_step(state, batch, bad)
        time.sleep(float(os.environ.get("BUSY", "0")))
        number = float(loss.addressable_shards[0].data)
        step += 1
        if rank == 0:
            if "SPMD_REMADE" in os.environ and first:
                print("remade", time.time(), jax.device_count(), flush=True)
            first = False
            print("step", step, number.hex(), int(batch.addressable_shards[0].data[0, 0]), flush=True)
        spmd.cluster.guard(step, state, every=EVERY)
        if saved is not None and step % EVERY == 0:
            saved.save(step, state, data=data)
            if step >= int(when):
                happens_at("save", kind, who)
    happens_at("end", kind, who)
    if fewer:
        print("fault", time.time(), flush=True)
    if saved is not None and not (fewer and kind == "less"):
        saved.save(step, state, data=data)
        saved.close()
    if kind == "slow":
        print(spmd.cluster.stragglers(), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
