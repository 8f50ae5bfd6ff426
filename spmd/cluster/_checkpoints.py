"""Checkpoints that are verified: Orbax writes and reads them, and what lies beside them says what they are."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from spmd import _jax_errors
from spmd._agreement import disagreements
from spmd._compat import installed
from spmd.cluster._data import Batches
from spmd.errors import PlacementError, SpmdError, is_int, nearest

T = TypeVar("T")

_PROBE = 4096  # bytes that are written to see whether a disk takes any
_ABOUT, _STATE, _SUMS = "about", "state", "checksums"


class Restored(NamedTuple):
    """What `restore` gives.

    Attributes:
      state: The state, placed as the program wants it.
      step: How many steps were done when it was saved; 0 for a new one.
    """

    state: Any
    step: int


def checkpoints(path: str | Path, *, keep: int | None = 3, strict: bool = False) -> Checkpoints:
    """The checkpoints of a program in a folder: saved and restored by one line each.

    Orbax saves them, asynchronously and atomically (`pip install "spmd[cluster]"`). Beside the arrays lie their
    layouts, the mesh, versions, where the data are, and a checksum of each array. It is a sum over the elements, which
    does not depend on how they are cut into chunks and devices: each device sums what it has read, so a restore onto
    another mesh or another number of processes verifies all of it, and reads nothing more for that.

    Where a disk is full, training goes on: the save is reported with the path and the free bytes, and the next one is
    tried.

    Args:
      path: A folder that all processes reach.
      keep: How many of the last checkpoints stay; None keeps all.
      strict: Whether a save that failed ends the program; otherwise it is reported, and the next one is tried.

    Raises:
      SpmdError: Orbax is not installed, or an argument is wrong.

    Example:
      >>> import jax, jax.numpy as jnp, spmd, tempfile
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> make = spmd.init(lambda key: {"w": jax.random.normal(key, (4, 8))}, {"w": "d/dp f/tp"}, mesh=mesh)
      >>> saved = spmd.cluster.checkpoints(tempfile.mkdtemp())
      >>> state, step = saved.restore(make, jax.random.key(0))  # nothing is saved yet: a new state
      >>> saved.save(step + 1, state)
      >>> saved.restore(make, jax.random.key(1)).step
      1
      >>> saved.close()
    """
    if keep is not None and not is_int(keep, 1):
        raise SpmdError(f"keep is a positive integer or None, not {keep!r}.", call="checkpoints(path)")
    return Checkpoints(Path(path).absolute(), keep, strict)


class Checkpoints:
    """The checkpoints in a folder, as `checkpoints` gives them."""

    def __init__(self, path: Path, keep: int | None, strict: bool) -> None:
        try:
            import orbax.checkpoint as orbax
        except ImportError as error:
            advice = 'pip install "spmd[cluster]"'
            raise SpmdError("checkpoints are saved by Orbax, which is not installed.", advice=advice) from error
        self.path, self._strict, self._orbax = path, strict, orbax
        options = orbax.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = orbax.CheckpointManager(path / "steps", options=options)
        self._damaged: set[int] = set()  # steps that could not be restored, and are saved again
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._writing: tuple[int, Future[None]] | None = None  # the step that is being saved, and its checksums

    def save(self, step: int, state: Any, *, data: Batches | None = None) -> None:
        """Save a state after `step` steps. It returns as soon as the arrays are copied; a thread writes them.

        A step that is saved already stays as it is, unless `restore` has found it damaged.

        Communication: the sums of the checksums, 4 bytes for each array; in several processes an all-gather of 32
        bytes, whether the disk takes it.

        Args:
          step: How many steps were done.
          state: A pytree of arrays.
          data: The batches, whose place is saved too.

        Raises:
          SpmdError: A leaf is not an array; or, where `strict`, the save before this one failed.
        """
        if not is_int(step, 0):
            raise SpmdError(f"step is an integer that is not negative, not {step!r}.", call="save(step, state)")
        self.wait()
        leaves = _named(state)
        wrong = [f"{path}: {type(x).__name__}" for path, x in leaves.items() if not isinstance(x, jax.Array)]
        if wrong:
            raise SpmdError("a state consists of arrays.", call="save(step, state)", got=wrong)
        if int(step) in self._damaged:
            self._manager.delete(int(step))
            self._damaged.discard(int(step))
        if int(step) in self._manager.all_steps():
            return
        if refusal := self._refusal(sum(x.nbytes for x in leaves.values())):
            self._failed(step, refusal)
            return
        sums = _checksums(leaves)
        about = {
            "leaves": {path: _described(x) for path, x in leaves.items()},
            "versions": {name: installed(name) for name in ("jax", "orbax-checkpoint", "spmd")},
            "processes": jax.process_count(),
            "data": None if data is None else data.state,
        }
        args = self._orbax.args
        content = args.Composite(**{_STATE: args.StandardSave(leaves), _ABOUT: args.JsonSave(about)})
        try:
            self._manager.save(int(step), args=content, force=True)
        except (OSError, ValueError) as error:
            self._failed(step, error)
            return
        self._writing = int(step), self._thread.submit(self._write_sums, int(step), sums, _digest(about))

    def restore(self, init: Any, *args: Any, data: Batches | None = None, cast: bool = False) -> Restored:
        """The last state that was saved whole, placed as `init` places it; a new one if none was saved.

        A step that is damaged or was not finished is named, and the one before it is taken. Each process reads what its
        devices hold. Communication: the sums of the checksums.

        Args:
          init: What `spmd.init(...)` gives: it makes the state, and its `abstract` says shapes and layouts.
          *args: Its arguments.
          data: The batches, which go on where they were.
          cast: Whether arrays that were saved in another dtype are cast.

        Returns:
          The state, and how many steps were done.

        Raises:
          PlacementError: The saved arrays are not those of `init`, with all differences; or every step is damaged.
        """
        self.wait()
        wanted = init.abstract(*args)
        failures = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return Restored(self._read(step, wanted, data, cast), step)
            except _Damaged as damage:
                self._damaged.add(step)
                failures.append(f"step {step}: {damage}")
                if jax.process_index() == 0:
                    print(f"checkpoint {self.path}, step {step} is damaged: {damage}", file=sys.stderr)
        if failures:
            rule = "no checkpoint can be restored."
            raise PlacementError(rule, call="restore(init, ...)", got=[str(self.path), *failures])
        return Restored(init(*args), 0)

    def wait(self) -> None:
        """Wait until what was saved is written. A save that failed is reported; where `strict`, it is an error."""
        step, writing = self._writing or (None, None)
        self._writing = None
        try:
            self._manager.wait_until_finished()
            if writing is not None:
                writing.result()
        except (OSError, ValueError) as error:
            self._failed(step, error)

    def close(self) -> None:
        """Wait, then release Orbax's threads."""
        self.wait()
        self._thread.shutdown()
        self._manager.close()

    # --- inside ---

    def _refusal(self, size: int) -> OSError | None:
        """Why the disk would not take so many bytes, the same in all processes: where Orbax fails in one of them while
        it saves, the others wait for it for minutes."""
        if jax.process_count() == 1:
            return None
        told = ""
        try:
            probe = self.path / f"probe{jax.process_index()}"
            probe.write_bytes(bytes(_PROBE))
            probe.unlink()
            if shutil.disk_usage(self.path).free < size:
                raise OSError(os.strerror(errno.ENOSPC))
        except OSError as error:
            told = f"{error}"
        told = _anywhere(told)
        return OSError(told) if told else None

    def _failed(self, step: int | None, error: OSError | ValueError) -> None:
        """Report that the disk refused a save, and go on. Python says it by an OSError, tensorstore by a ValueError;
        any other ValueError is a fault of the program."""
        if not isinstance(error, OSError) and not _jax_errors.refused_by_the_system(error):
            raise error
        free = shutil.disk_usage(self.path if self.path.exists() else self.path.parent).free
        rule = "a checkpoint could not be saved."
        got = [f"path: {self.path}, {free} bytes free", f"{type(error).__name__}: {_jax_errors.first_line(error)}"]
        found = SpmdError(rule, call="save(...)" if step is None else f"save({step}, state)", got=got)
        if self._strict:
            raise found from error
        print(found, file=sys.stderr)

    def _write_sums(self, step: int, sums: Mapping[str, Any], about: str) -> None:
        found = {**_numbers(sums), _ABOUT: about}
        if jax.process_index() == 0:
            folder = self.path / _SUMS
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{step}.part"
            part.write_text(json.dumps(found))
            part.rename(folder / f"{step}.json")
            kept = {str(one) for one in self._manager.all_steps()} | {str(step)}
            for old in folder.glob("*.json"):
                if old.stem not in kept:
                    old.unlink(missing_ok=True)

    def _read(self, step: int, wanted: Any, data: Batches | None, cast: bool) -> Any:
        args = self._orbax.args
        about, sums = self._together(lambda: self._about(step))
        _check_same(about["leaves"], _named(wanted), cast)
        asked = {path: _stored(x, about["leaves"][path]["dtype"]) for path, x in _named(wanted).items()}
        read = lambda: self._item(step, _STATE, self._orbax.StandardCheckpointHandler, args.StandardRestore(asked))
        leaves = self._together(read)
        wrong = [path for path, found in _numbers(_checksums(leaves)).items() if found != sums.get(path)]
        if wrong:
            raise _Damaged(f"the numbers of {', '.join(wrong[:5])} are not those that were saved")
        if data is not None:
            if about["data"] is None:
                raise PlacementError("the checkpoint has no place in the data.", call="restore(init, ..., data=data)")
            data.state = about["data"]
        placed = [leaves[path].astype(x.dtype) for path, x in _named(wanted).items()]
        return jax.tree.unflatten(jax.tree.structure(wanted), placed)

    def _about(self, step: int) -> tuple[Any, Any]:
        """What lies beside the arrays, and the checksums."""
        try:
            sums = json.loads((self.path / _SUMS / f"{step}.json").read_text())
        except (OSError, ValueError) as error:
            raise _Damaged("its checksums were not written") from error
        about = self._item(step, _ABOUT, self._orbax.JsonCheckpointHandler, self._orbax.args.JsonRestore())
        if _digest(about) != sums.get(_ABOUT):
            raise _Damaged("what lies beside the arrays is not what was saved")
        return about, sums

    def _item(self, step: int, name: str, handler: Any, how: Any) -> Any:
        """Read one item of a step. Each process reads for itself: where one cannot, Orbax's own restore lets the
        others wait for it for minutes."""
        rank = jax.process_index()
        alone = {"primary_host": rank, "active_processes": {rank}, "barrier_sync_key_prefix": f"read{rank}"}
        options = self._orbax.options.MultiprocessingOptions(**alone if jax.process_count() > 1 else {})
        try:
            with self._orbax.Checkpointer(handler(), multiprocessing_options=options) as reader:
                return reader.restore(self.path / "steps" / str(step) / name, how)
        except Exception as error:  # a file is missing, cut off, or does not decode; Orbax has many words for it
            raise _Damaged(f"{name}: {type(error).__name__}: {_jax_errors.first_line(error)}") from error

    def _together(self, read: Callable[[], T]) -> T:
        """What `read` gives, if it succeeds in all processes; else all of them raise."""
        found: list[T] = []
        told = ""
        try:
            found.append(read())
        except _Damaged as damage:
            told = f"{damage}"
        if told := _anywhere(told):
            raise _Damaged(told)
        return found[0]


def _anywhere(fault: str) -> str:
    """What is wrong in this process, else in another one; empty where all is well in all of them."""
    elsewhere = disagreements({"fault": fault})  # all processes take part
    return fault or "".join(elsewhere[:1])


class _Damaged(Exception):
    """A step cannot be restored."""


# --- checksums -------------------------------------------------------------------------------------------------------


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """A sum of 32 bits over all elements, each mixed with its position, so that it does not depend on the mesh.

    Every device sums over what it holds. A change of one bit changes the sum; of others one in four billion does not.
    """
    bits = _bits(x)
    place = jnp.uint32(0)
    for dim, size in enumerate(bits.shape):
        steps = _scrambled(jnp.arange(size, dtype=jnp.uint32) * np.uint32(0x9E3779B1) + np.uint32(dim + 1))
        # mixed once for each position along a dimension, which XLA would do again for each element
        place += jax.lax.broadcast_in_dim(jax.lax.optimization_barrier(_scrambled(steps)), bits.shape, (dim,))
    return jnp.sum(_scrambled(bits ^ place), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    width = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo(x.dtype).bits
    if width < 8:
        return x.astype(jnp.int8).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(width, 32)}")).astype(jnp.uint32)


def _scrambled(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3. Appleby, 2011."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@jax.jit
def _all_checksums(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    return {path: checksum(x) for path, x in leaves.items()}


def _checksums(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The checksums of all arrays, which the devices may still compute.

    CPU devices share a few threads. Programs that run beside each other there take them, and each waits in its sums
    for a device that gets none. So it is one program, and on CPU the next one starts after it.
    """
    found = _all_checksums(leaves)
    return jax.block_until_ready(found) if jax.default_backend() == "cpu" else found


def _numbers(sums: Mapping[str, Any]) -> dict[str, int]:
    """Checksums as whole numbers, when the devices have them."""
    return {path: int(one) for path, one in jax.device_get(dict(sums)).items()}


# --- what is beside the arrays ---------------------------------------------------------------------------------------


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _named(tree: Any) -> dict[str, Any]:
    """The leaves by their paths."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _described(x: Any) -> dict[str, Any]:
    sharding = getattr(x, "sharding", None)
    named = isinstance(sharding, NamedSharding)
    return {
        "shape": list(x.shape),
        "dtype": x.dtype.name,
        "spec": str(sharding.spec) if named else "",
        "mesh": dict(sharding.mesh.shape) if named else {},
    }


def _stored(x: Any, dtype: str) -> Any:
    """What is read for a leaf: in the dtype in which it was saved."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype if x.dtype.name == dtype else jnp.dtype(dtype), sharding=x.sharding)


def _check_same(saved: Mapping[str, Any], wanted: Mapping[str, Any], cast: bool) -> None:
    """All differences between what was saved and what is wanted, in one error."""
    told = []
    for path, x in wanted.items():
        here = _described(x)
        if path not in saved:
            near = nearest(path, [one for one in saved if one not in wanted])
            told.append(f"{path}: not in the checkpoint" + (f"; it has {near}" if near else ""))
        elif saved[path]["shape"] != here["shape"]:
            one = saved[path]
            told.append(f"{path}: saved {one['shape']} {one['spec']}, here {here['shape']} {here['spec']}")
        elif saved[path]["dtype"] != here["dtype"] and not cast:
            told.append(f"{path}: saved {saved[path]['dtype']}, here {here['dtype']}")
    told += [f"{path}: in the checkpoint only" for path in saved if path not in wanted]
    if told:
        advice = "the init of the program that saved it; cast=True where only dtypes differ"
        raise PlacementError("the checkpoint is of another state.", call="restore(init, ...)", got=told, advice=advice)
