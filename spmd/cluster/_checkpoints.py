"""Checkpoints that are verified: Orbax writes and reads them, and what lies beside them says what they are."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import errno
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spmd._compat import installed
from spmd._jaxprs import errors as jax_errors
from spmd._processes.agreement import anywhere, everyone, in_all
from spmd._processes.copies import Look, checksums
from spmd._processes.facts import comparing
from spmd._python.rooms import nearest
from spmd._trees.arguments import explained
from spmd._trees.leaves import kind_of
from spmd.cluster._data import Batches
from spmd.cluster._fields import entries, in_a_bucket, is_mapping, is_text, library
from spmd.cluster._recorder import recorder
from spmd.errors import PlacementError, SpmdError, is_int
from spmd.mesh import check_alive

# --- a lease of a folder: of several programs that would save into it, one does ---------------------------------------


BEAT = 5.0  # seconds after which who holds a lease says so again
PATIENCE = 30.0  # seconds of silence after which who held it counts as dead
_BEGINS = b'{"holder": "'  # the file
_ME = uuid.uuid4().hex  # this process: others may have its number, and the name of its host


class Lease:
    """The lease of a folder, a file there. One process of a program takes it; objects of one process share it.

    Args:
      folder: A path of `etils.epath`.
    """

    def __init__(self, folder: Any) -> None:
        self._file, self._reached = folder / "lease.json", folder / "reached.json"
        self._heard: tuple[Any, float] = (None, 0.0)  # the last word of another holder, and when we first heard it
        self.held = False  # whether this object has taken it
        self._ended = threading.Event()

    def holder(self) -> dict[str, str] | None:
        """The other program that holds it; None where nobody does, or one that is known to have ended.

        Raises:
          OSError: The file is something else.
        """
        try:
            text = self._file.read_bytes()
            word = text, self._file.stat().mtime
        except FileNotFoundError:
            return None
        if _BEGINS.startswith(text.strip(b"\0")) or (text.startswith(_BEGINS) and not text.endswith(b"}")):
            # the disk was full when it was written
            found, word = {"holder": "", "host": "another host", "process": "", "system": ""}, (b"", 0)
        else:
            found = entries(text, self._file, holder=is_text, host=is_text, process=is_text, system=is_text)
        if found["holder"] == _ME or (found["system"] == _system() != "" and not _lives(found["process"])):
            return None
        if word != self._heard[0]:
            self._heard = word, time.monotonic()
        return dict(found)

    def take(self) -> str:
        """Hold it from now on. Where another program holds it, wait for its next word: the program, or nothing if there
        is none in `PATIENCE` seconds, for then it has ended."""
        if not self.held:
            while other := self.holder():
                word, since = self._heard
                if time.monotonic() - since > PATIENCE:
                    break
                time.sleep(BEAT / 5)
                if self.holder() and self._heard[0] != word:
                    return _lease_named(other)
            self._say()
            time.sleep(BEAT / 50)
            if self.holder() is None:  # nobody took it in the same moment
                self.held, self._ended = True, threading.Event()
                threading.Thread(target=self._go_on, args=(self._ended,), daemon=True).start()
        return _lease_named(self.holder())  # of a process that stood still, it may have been taken

    def release(self) -> None:
        """Let others take it."""
        if self.held:
            self._ended.set()
            self.held = False
            with contextlib.suppress(OSError):
                if self.holder() is None:
                    self._file.unlink(missing_ok=True)

    def _go_on(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT):
            with contextlib.suppress(OSError):  # a disk that does not answer for a while
                if self.holder() is None:
                    self._say()
                    self._reached.write_text(json.dumps(recorder.step))

    def reached(self) -> int:
        """The step that who held it last had reached."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return int(json.loads(self._reached.read_text()))
        return 0

    def _say(self) -> None:
        """Say that this process holds it: by the time of the file, on a disk that is full too."""
        if self.held:
            with contextlib.suppress(OSError):  # the file is gone, or in the cloud, where files have no times
                os.utime(self._file)
                return
        content = {"holder": _ME, "host": socket.gethostname(), "process": str(os.getpid()), "system": _system()}
        content["time"] = f"{time.time()}"  # another word each time
        self._file.write_text(json.dumps(content))


def _lease_named(holder: dict[str, str] | None) -> str:
    return f"process {holder['process']} on {holder['host']}" if holder else ""


def _system() -> str:
    """The running system and its numbering of processes, so that a number says whether its process lives."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return int(process) != os.getpid()


T = TypeVar("T")

_LATE = 0.6  # seconds in which a thread of a save that failed may make its folder anew
_PROBE = 4096  # bytes that are written to see whether a disk takes any
_ABOUT, _STATE = "about", "state"
_BESIDE = "0.json"  # what is beside the arrays


class Restored(NamedTuple):
    """What `restore` gives.

    Attributes:
      state: The state, placed as the program wants it.
      step: How many steps were done when it was saved; 0 for a new one.
    """

    state: Any
    step: int


@explained
def checkpoints(
    path: str | Path, *, keep: Any = 3, finite: bool = True, strict: bool = False, timeout_seconds: int = 600
) -> Checkpoints:
    """The checkpoints of a program in a folder: saved and restored by one line each.

    Orbax saves them, asynchronously and atomically (`pip install "spmd[cluster]"`). Beside the arrays of a step lie
    their layouts, the mesh, versions, where the data are, and a checksum of each array, which is the same however the
    array is cut. So a restore onto another mesh or another number of processes verifies what it reads, and reads
    nothing more for that. A step is one folder, which can be copied.

    Where a disk is full, training goes on: all processes report the save, with the path and the free bytes, and the
    next one is tried. If the first save of a run fails, or its last one, it is an error: `close` raises it.

    One program at a time saves into a folder. A second one gets an error at its first save, and may read before. If the
    first one was killed on another host, this takes half a minute to notice.

    Args:
      path: A folder that all processes reach, or `gs://bucket/folder` (`pip install gcsfs`).
      keep: How many of the last checkpoints stay; None keeps all. One that is known to be damaged does not count, and
        is deleted when a later one is saved. Or a preservation policy of Orbax, such as `BestN` by the `metrics` of
        `save`, `EveryNSteps`, or several in `AnyPreservationPolicy`. The last checkpoint stays in any case.
      finite: Whether the numbers of a state have to be finite to be saved: no run ends with checkpoints of NaN only.
      strict: Whether a save that failed ends the program; otherwise it is reported, and the next one is tried.
      timeout_seconds: For how many seconds a process that has written its part waits for the others to write theirs.
        If a disk is full before the end of a save, the other processes report it after this time.

    Returns:
      The `Checkpoints`, with `save`, `restore`, `wait` and `close`. `with checkpoints(...) as saved:` closes them.

    Raises:
      SpmdError: Orbax is not installed, an argument is wrong, or the folder cannot be made.

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
    if not (keep is None or is_int(keep, 1) or hasattr(keep, "should_preserve")):
        rule = f"keep is a positive integer, None, or a preservation policy of Orbax, not {keep!r}."
        raise SpmdError(rule, call="checkpoints(path)")
    if not is_int(timeout_seconds, 1):
        raise SpmdError(f"timeout_seconds is a positive integer, not {timeout_seconds!r}.", call="checkpoints(path)")
    return Checkpoints(path, keep, finite, strict, timeout_seconds)


class Checkpoints:
    """The checkpoints in a folder. `checkpoints` makes it."""

    def __init__(self, path: str | Path, keep: Any, finite: bool, strict: bool, timeout_seconds: int) -> None:
        rule = "checkpoints are saved by Orbax, which is not installed."
        orbax, epath = (library(name, rule) for name in ("orbax.checkpoint", "etils.epath"))
        self._local = not in_a_bucket(path, ("gs",), "checkpoints(path)")
        recorder.remote = not self._local
        self.path: Any = Path(path).absolute() if self._local else epath.Path(path)
        self._orbax, self._keep, self._strict, self._timeout = orbax, keep, strict, timeout_seconds
        self._finite = finite
        try:
            (self.path / "steps").mkdir(parents=True, exist_ok=True)
        except (OSError, ImportError, RuntimeError) as error:
            got = [f"path: {self.path}", jax_errors.first_line(error)]
            advice = None if self._local else "pip install gcsfs"
            raise SpmdError("this folder cannot be made.", call="checkpoints(path)", got=got, advice=advice) from error
        self._writer = self._new_writer()
        self._lease = Lease(epath.Path(self.path))
        self._steps: set[int] | None = None  # that are there, the same in all processes
        self._damaged: set[int] = set()  # of them, those that could not be restored; they are saved again
        self._writing: tuple[int, BaseException | None] | None = None  # the step that is being saved, or was not begun
        self._failure: SpmdError | None = None  # of the last save
        self._any, self._closed = False, False  # whether a save of this run succeeded
        self._deleter = ThreadPoolExecutor(1, "retention")

    @recorder.inside("save")
    def save(
        self, step: int, state: Any, *, data: Batches | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Save a state after `step` steps. It returns as soon as the arrays are copied; a thread writes them.

        A step that is saved already stays as it is, unless `restore` has found it damaged.

        Copies that are equal by their layout are compared before, bit for bit: a state in which they differ is not
        saved.

        Communication: in several processes an all-gather of 32 bytes, whether the last one is written and the disk
        takes this one, and one of 8 bytes for each array and device. The devices compute the checksums, of which they
        add up 4 bytes for each array.

        Args:
          step: How many steps were done.
          state: A pytree of arrays.
          data: The batches, whose place is saved too.
          metrics: Numbers by which a policy of `keep` chooses, the same in all processes.

        Raises:
          SpmdError: A leaf is not an array; copies differ, or a number is not finite, with ranks and arrays; another
            program saves into the folder; the save before this one failed, and was the first, or `strict` is set.
        """
        self._check_open(f"save({step!r}, state)")
        if not is_int(step, 0):
            raise SpmdError(f"step is an integer that is not negative, not {step!r}.", call="save(step, state)")
        call = f"save({step}, state)"
        step, leaves = int(step), checked(named(state, call), call)
        refused = self._settle(sum(x.nbytes for x in leaves.values()), step)
        more = "; checkpoints(path, finite=False) saves such numbers"
        check_sound(leaves, call, finite=self._finite, copies=comparing(), more=more)
        if step in self._known() - self._damaged:
            self._any, self._failure = True, None
            return
        if refused:
            self._failed(step, refused)
            return
        full = {path: x for path, x in leaves.items() if x.size}  # Orbax does not write what is empty
        about = {
            "step": step,
            "sums": {path: int(found) for path, found in jax.device_get(checksums(full)).items()},
            "leaves": {path: _described(x) for path, x in leaves.items()},
            "versions": {name: installed(name) for name in ("jax", "orbax-checkpoint", "spmd")},
            "data": None if data is None else data.state,
            "time": time.time(),
            "metrics": None if metrics is None else {name: float(x) for name, x in metrics.items()},
        }
        # the arrays first: the error of what is beside them would come while their threads still write
        items = {_STATE: self._orbax.args.StandardSave(full)} if full else {}
        items[_ABOUT] = self._orbax.args.JsonSave({"digest": _digest(about), "content": about})
        failure = None
        try:
            composite = self._orbax.args.Composite(**items)
            self._writer.save(self._folder(step), args=composite, force=step in self._damaged)
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            failure = error  # the others may be writing; all report it when they wait
        self._writing = step, failure

    @recorder.inside("restore")
    def restore(self, init: Any, *args: Any, data: Batches | None = None, cast: bool = False) -> Restored:
        """The last state that was saved whole, placed as `init` places it; a new one if none was saved.

        All processes restore the same step. Where the listing of one host is old, it reads what the others list. A step
        that is damaged or was not finished is named, and the one before it is taken. Each process reads what its
        devices hold. Communication: the numbers of the steps, and the sums of the checksums.

        Args:
          init: What `spmd.init(...)` gives: it makes the state, and its `abstract` says shapes and layouts.
          *args: Its arguments.
          data: The batches, which go on where they were.
          cast: Whether arrays that were saved in another dtype are cast.

        Returns:
          The state, and how many steps were done.

        Raises:
          PlacementError: The saved arrays are not those of `init`, with all differences; or every step is damaged.
          SpmdError: `init` is not what `spmd.init` gives.
        """
        self._check_open("restore(init, ...)")
        if not hasattr(init, "abstract"):
            rule, advice = f"restore takes what spmd.init(...) gives, not {kind_of(init)}.", "spmd.init(fn, layouts)"
            raise SpmdError(rule, call="restore(init, ...)", advice=advice)
        self.wait()
        wanted = init.abstract(*args)
        self._steps, failures = None, []
        reached = 0
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                self._lease.holder()  # who is silent from here to the first save has ended
            reached = self._lease.reached()
        for step in sorted(self._known(), reverse=True):
            try:
                found = Restored(self._read(step, wanted, data, cast), step)
                recorder.repeated = max(everyone(reached)[0] - step, 0)
                self._damaged.discard(step)
                return found
            except _Damaged as damage:
                self._damaged.add(step)
                failures.append(f"step {step}: {damage}")
                if jax.process_index() == 0:
                    _say(f"checkpoint {self.path}, step {step} is damaged: {damage}")
        if failures:
            rule = "no checkpoint can be restored."
            raise PlacementError(rule, call="restore(init, ...)", got=[str(self.path), *failures])
        return Restored(init(*args), 0)

    @recorder.inside("save")
    def wait(self) -> None:
        """Wait until what was saved is written; all processes call it.

        A save that failed in one of them is reported in all. It is an error where it was the first of the run, or
        `strict` is set.

        Communication: in several processes an all-gather of 32 bytes.
        """
        if self._writing is not None:
            self._settle()
        self._deleter.submit(int).result()  # after what it still deletes

    @recorder.inside("save")
    def close(self) -> None:
        """Wait, then release Orbax's threads, and the folder for other programs. Once closed, it stays closed.

        Raises:
          SpmdError: The last save failed.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._deleter.shutdown()
            self._writer.close()
            self._lease.release()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif jax.process_count() == 1:  # else the others do not wait for a process that has failed
            try:
                self.close()
            except SpmdError as failure:
                _say(failure)  # what ended the block is raised

    # --- inside ---

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise SpmdError("these checkpoints are closed.", call=call, advice="checkpoints(path) opens them again")

    def _new_writer(self) -> Any:
        orbax, all_of_them = self._orbax, set(range(jax.process_count()))
        # by name, the processes meet at JAX's coordinator; else on devices, of which each must have the same number
        processes = orbax.options.MultiprocessingOptions(active_processes=all_of_them)
        parts = orbax.CompositeOptions(multiprocessing_options=processes)
        about = orbax.JsonCheckpointHandler(_BESIDE, multiprocessing_options=processes)
        arrays = orbax.StandardCheckpointHandler(multiprocessing_options=processes)
        handler = orbax.CompositeCheckpointHandler(composite_options=parts, **{_STATE: arrays, _ABOUT: about})
        how = orbax.AsyncOptions(timeout_secs=self._timeout)
        return orbax.AsyncCheckpointer(handler, async_options=how, multiprocessing_options=processes)

    def _folder(self, step: int) -> Any:
        return self.path / "steps" / str(step)

    def _is_ours(self, step: int) -> bool:
        """Return whether the folder of a step holds one: others may have folders whose names are numbers."""
        return any((self._folder(step) / name).exists() for name in (_ABOUT, _STATE))

    def _known(self) -> set[int]:
        """The steps that are there, as any process sees them."""
        if self._steps is None:
            rule = "the checkpoints cannot be listed."
            fault = lambda told: PlacementError(rule, got=[f"path: {self.path}", told])
            listed = lambda: list(filter(self._is_ours, self._orbax.utils.checkpoint_steps(self.path / "steps")))
            here = list(map(int, in_all(listed, fault, OSError)))
            self._steps = {int(step) for one in everyone(here) for step in one}
        return self._steps

    def _settle(self, size: int = 0, step: int | None = None) -> str:
        """Wait until what was saved is written, and report it if it is not. Why the disk would not take `size` more
        bytes, the same in all processes: where Orbax fails in one of them, the others wait for it."""
        (saved, failure), self._writing = self._writing or (None, None), None
        try:
            self._writer.wait_until_finished()
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            failure = failure or error
        refused_by = jax_errors.refused_by_the_system(failure)
        if failure is not None and refused_by is None:
            raise failure
        other, refused, news = ("", "", "") if step is None else self._admitted(size, step)
        told = "" if refused_by is None else jax_errors.first_line(refused_by)
        told, refused, other, news = anywhere(told, refused, other, news)
        if news:
            self._steps = None
        if other:
            advice = "give each program a folder of its own, or wait until that one has ended"
            got = [f"path: {self.path}", other]
            rule = "another program saves into this folder."
            raise SpmdError(rule, call=f"save({step}, state)", got=got, advice=advice)
        if told:
            self._writer = self._new_writer()  # half of Orbax's threads may still wait for the others
            self._remove_parts()
            self._failed(saved, told, refused_by)
        elif saved is not None:
            self._any, self._failure = True, None
            self._known().add(saved)
            self._damaged.discard(saved)
            self._retain()
        return refused

    def _admitted(self, size: int, step: int) -> tuple[str, str, str]:
        """Return which other program saves into the folder; why the disk would not take so many bytes from this
        process, while one that is alone hears it from Orbax; and whether others may have saved since the steps were
        listed."""
        other = news = ""
        try:
            if jax.process_index() == 0:
                first, other = not self._lease.held, self._lease.take()
                if first and not other:
                    self._remove_parts()
                there = not other and self._folder(step).exists()
                if there and not self._is_ours(step):
                    raise OSError(f"{self._folder(step)} is there, and is no checkpoint")
                news = "list again" if there or (first and not other) else ""
            if self._local and jax.process_count() > 1:
                with tempfile.TemporaryFile(dir=self.path) as probe:
                    probe.write(bytes(_PROBE))
                if shutil.disk_usage(self.path).free < size:
                    raise OSError(os.strerror(errno.ENOSPC))
        except OSError as error:
            return other, f"{error}", news
        return other, "", news

    def _remove_parts(self) -> None:
        """Remove what saves that failed have left, of this run or of one that was killed."""
        steps = self.path / "steps"  # which is no folder of a bucket before something is in it
        parts = lambda: [one for one in steps.iterdir() if self._orbax.utils.is_tmp_checkpoint(one)]
        if jax.process_index() == 0 and steps.exists() and parts():
            self._remove(parts())
            time.sleep(_LATE)
            self._remove(parts())

    def _remove(self, folders: Sequence[Any]) -> None:
        for folder in folders:
            for wait in (0.0, 0.1, 0.5):  # a thread of a save that failed may still write there
                time.sleep(wait)
                with contextlib.suppress(OSError):  # what is still there is removed with the next ones
                    shutil.rmtree(folder) if self._local else folder.rmtree()
                    break

    def _retain(self) -> None:
        """Let the last good steps stay, and the damaged ones that nothing better has followed."""
        good = sorted(self._known() - self._damaged)
        if self._keep is None or not good:
            return
        kept = good[-self._keep :] if isinstance(self._keep, int) else self._chosen(good)
        old = {step for step in self._known() if step < good[-1]} - set(kept)
        self._steps = self._known() - old
        self._damaged -= old
        if jax.process_index() == 0 and old:
            self._deleter.submit(self._remove, [self._folder(step) for step in sorted(old)])

    def _chosen(self, good: Sequence[int]) -> list[int]:
        """The steps that Orbax's policy preserves: process 0 asks it."""
        kept: list[int] = []
        if jax.process_index() == 0:
            policies = self._orbax.checkpoint_managers.preservation_policy
            infos = []
            for step in good:
                about: dict[str, Any] = {}
                with contextlib.suppress(_Damaged):
                    about = self._about(step)
                when = datetime.datetime.fromtimestamp(about.get("time", 0), datetime.UTC)
                infos.append(types.SimpleNamespace(step=step, time=when, metrics=about.get("metrics")))
            stays = self._keep.should_preserve(infos, context=policies.PreservationContext())
            kept = [step for step, yes in zip(good, stays, strict=True) if yes]
        return [*everyone(kept)[0], good[-1]]

    def _failed(self, step: int | None, told: str, error: BaseException | None = None) -> None:
        """Report that the disk refused a save, and go on if there is one to go back to."""
        free = f", {shutil.disk_usage(self.path).free} bytes free" if self._local and self.path.exists() else ""
        rule = "a checkpoint could not be saved."
        self._failure = SpmdError(rule, call=f"save({step}, state)", got=[f"path: {self.path}{free}", told])
        self._failure.__cause__ = error
        if self._strict or not self._any:
            raise self._failure
        _say(self._failure)

    def _read(self, step: int, wanted: Any, data: Batches | None, cast: bool) -> Any:
        about, asked_for = in_all(lambda: self._about(step), _Damaged, _Damaged), named(wanted, "restore(init, ...)")
        _check_same(about["leaves"], asked_for, cast)
        asked = {}
        for path, x in asked_for.items():
            dtype = about["leaves"][path]["dtype"]
            dtype = x.dtype if x.dtype.name == dtype else jnp.dtype(dtype)  # that of random keys has no name
            asked[path] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
        full = {path: x for path, x in asked.items() if x.size}
        leaves = in_all(lambda: self._arrays(step, full), _Damaged, _Damaged) if full else {}
        sums = jax.device_get(checksums(leaves))
        in_all(lambda: _check_sums(sums, about["sums"]), _Damaged, _Damaged)  # each process has read its own file
        if data is not None:
            if about.get("data") is None:
                raise PlacementError(
                    "the checkpoint does not say where the data were.", call="restore(init, ..., data=data)"
                )
            try:
                data.state = about["data"]
            except SpmdError as error:
                got = [f"path: {self._folder(step)}", *error.fault.got]
                raise SpmdError(dataclasses.replace(error.fault, got=got)) from error
        leaves |= {path: _empty(x) for path, x in asked.items() if not x.size}
        cast_to = lambda x, dtype: x if x.dtype == dtype else x.astype(dtype)  # random keys have no astype
        placed = [cast_to(leaves[path], x.dtype) for path, x in asked_for.items()]
        return jax.tree.unflatten(jax.tree.structure(wanted), placed)

    def _about(self, step: int) -> Any:
        """Return what was written beside the arrays."""
        try:
            path = self._folder(step) / _ABOUT / _BESIDE
            whole = lambda told: is_mapping(told) and is_mapping(told.get("leaves")) and is_mapping(told.get("sums"))
            found = entries(path.read_bytes(), path, content=whole)
            about = found["content"]
            if found.get("digest") == _digest(about) and about.get("step") == step:
                return about
        except (OSError, RecursionError) as error:
            raise _Damaged("its checksums were not written") from error
        raise _Damaged("what lies beside the arrays is not what was saved")

    def _arrays(self, step: int, asked: Mapping[str, Any]) -> Any:
        """The arrays of a step. Each process reads for itself: where one cannot, Orbax's own restore lets the others
        wait for it for minutes."""
        rank = jax.process_index()
        options = self._orbax.options.MultiprocessingOptions(
            primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"read{rank}"
        )
        handler, how = self._orbax.StandardCheckpointHandler(), self._orbax.args.StandardRestore(asked)
        try:
            reading = self._orbax.Checkpointer(handler, multiprocessing_options=options)
            with reading as reader:
                return reader.restore(self._folder(step) / _STATE, how)
        except Exception as error:  # a file is missing, cut off, or does not decode; Orbax has many words for it
            raise _Damaged(f"{_STATE}: {type(error).__name__}: {jax_errors.first_line(error)}") from error


def _check_sums(here: Mapping[str, Any], saved: Mapping[str, int]) -> None:
    if wrong := [path for path, found in here.items() if int(found) != saved.get(path)]:
        raise _Damaged(f"the numbers of {', '.join(wrong[:5])} are not those that were saved")


def _say(text: object) -> None:
    with contextlib.suppress(OSError):  # the log may be a file on the disk that is full
        print(text, file=sys.stderr, flush=True)


class _Damaged(Exception):
    """A step cannot be restored."""


# --- numbers that are not finite, and copies that differ --------------------------------------------------------------


def check_sound(leaves: Mapping[str, jax.Array], call: str, *, finite: bool, copies: bool, more: str = "") -> None:
    """Complain about copies that differ, and about numbers that are not finite, in all processes.

    Communication: that of `Look`.
    """
    look = Look(leaves) if leaves and (finite or copies) else None
    if look is not None and copies and (wrong := look.different_copies()):
        rule = (
            "copies that are equal by their layout differ: a bit has flipped, or the devices computed different things."
        )
        advice = "restore the last checkpoint, without that host if it happens again"
        raise SpmdError(rule, call=call, got=wrong, advice=advice)
    if look is not None and finite and (unsound := look.not_finite()):
        rule, advice = "numbers of the state are not finite.", f"restore(...) goes back{more}"
        read = enumerate(everyone([*recorder.unsound]))
        told = [f"rank {rank} has read samples with such numbers, the last: {those}" for rank, those in read if those]
        raise SpmdError(rule, call=call, got=[*unsound[:5], *told], advice=advice)


@explained
def guard(step: int, state: Any, *, every: int = 100) -> None:
    """Look after the numbers of a state: copies that are equal by its layouts are equal in every bit, and all numbers
    are finite.

    A bit that has flipped in the memory of one device otherwise stays unseen: copies drift apart, and each process
    trains on with its own. Call it at each step; it looks at every hundredth.

    Communication: at these steps an all-gather of 8 bytes for each array and device.

    Args:
      step: The number of the step, the same in all processes.
      state: A pytree of arrays, gradients and losses among them.
      every: At which multiples of steps it looks.

    Raises:
      SpmdError: Copies differ, with host, device and array, and whether most of them agree; or numbers are not finite,
        with the ranks and arrays.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> w = spmd.shard(jnp.ones(8), "d", mesh=spmd.make_mesh(dp=8))
      >>> spmd.cluster.guard(100, {"w": w})
    """
    call = f"guard({step!r}, state)"
    if not is_int(step, 0) or not is_int(every, 1):
        raise SpmdError(f"step and every are integers, not {step!r} and {every!r}.", call=call)
    if step % every:
        return
    check_sound(checked(named(state, call), call), call, finite=True, copies=True)


# --- what is beside the arrays ---------------------------------------------------------------------------------------


def _digest(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def named(tree: Any, call: str) -> dict[str, Any]:
    """The leaves by their paths."""
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]
    found = dict(leaves)
    if len(found) < len(leaves):
        twice = sorted(path for path, n in collections.Counter(path for path, _ in leaves).items() if n > 1)
        rule = "two leaves of the state have the same name: a key is known by its repr."
        raise SpmdError(rule, call=call, got=twice, advice="make the keys strings or numbers")
    return found


def checked(leaves: dict[str, Any], call: str) -> dict[str, jax.Array]:
    """The leaves, if all are arrays that are there."""
    if any(isinstance(x, jax.core.Tracer) for x in leaves.values()):
        raise SpmdError(
            f"{call.partition('(')[0]} runs outside jit.", call=call, advice="return the state, and give it the result"
        )
    if wrong := [f"{path}: {type(x).__name__}" for path, x in leaves.items() if not isinstance(x, jax.Array)]:
        raise SpmdError("a state consists of arrays.", call=call, got=wrong)
    check_alive(leaves.items(), call)
    if jax.process_count() > 1 and (own := [path for path, x in leaves.items() if x.is_fully_addressable]):
        rule = "arrays of the state belong to one process alone."
        raise SpmdError(rule, call=call, got=own, advice='spmd.shard(x, "a b") gives all processes one array')
    return leaves


def _empty(x: Any) -> jax.Array:
    """An array without elements."""
    return cast(jax.Array, jax.jit(lambda: jax.lax.full(x.shape, 0, x.dtype), out_shardings=x.sharding)())


def _described(x: Any) -> dict[str, Any]:
    sharding = getattr(x, "sharding", None)
    named = isinstance(sharding, NamedSharding)
    return {
        "shape": list(x.shape),
        "dtype": x.dtype.name,
        "spec": str(sharding.spec) if named else "",
        "mesh": dict(sharding.mesh.shape) if named else {},
    }


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
        advice = "restore with the init of the program that saved it; or with cast=True, where only dtypes differ"
        raise PlacementError("the checkpoint holds another state.", call="restore(init, ...)", got=told, advice=advice)
