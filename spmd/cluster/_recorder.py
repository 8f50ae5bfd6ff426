"""A flight recorder: each process knows where it stands, and a run that stands still says which process stopped it."""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import hashlib
import io
import json
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd._compat import coordination
from spmd._processes import facts
from spmd._processes.agreement import differences, everyone, ranks
from spmd._processes.environment import REMADE
from spmd._text import Table
from spmd.cluster._launch import free_port
from spmd.cluster._stacks import Stack
from spmd.errors import MeshError

STORING = ("save", "restore")
PATIENCE = 60.0  # seconds
HUNG = 75  # the exit code of a run that stands still, which schedulers queue again
_LAPS = 3  # steps and batches after which a program is in its loop, and a long silence is none of its start
_SEVERAL = 3  # times the patience, after which a program is looked at that tells of no laps
_PATIENT = 10  # times the patience, where a process works on, or a device may
_LONGEST = {"start": 60, "compile": 60, "save": _PATIENT, "restore": _PATIENT}  # times the patience, of what is long
_MOVED = 2**16  # bytes that are read and written between two looks where a disk answers
_WORK = 0.05  # of the time of one core, below which a process rests
_KEPT = 1000  # of the last steps, how long each took
GATHER = 4.0  # seconds in which a process that runs says where it is
_NAME = "flight recorder"
_DIFFER = "the processes do not compute the same"
_DOING = {"data": "reads a batch", "save": "saves", "restore": "restores", "compiles": "compiles"}
_SHOWN = 4  # collectives of a program in a message


class _Recorder:
    """What this process does. Only the main thread tells it."""

    def __init__(self) -> None:
        self.laps = 0  # steps and batches so far
        self.step, self.began = -1, 0.0
        self.doing = ""
        self.programs, self.compiled = 0, 0.0  # that were compiled, and in how many seconds
        self.born, self.start = time.monotonic(), -1.0  # when this was loaded; seconds from there to the first step
        self.spent: dict[str, float] = collections.defaultdict(float)  # seconds by what it was inside
        self.repeated = 0  # steps that a run before had done, and had not saved
        self.remote = False  # whether it saves where nobody here sees how many bytes arrive
        self.code = 0  # with which this process ends, if that is decided
        self.end, self.why = "", ""  # "ended", and by what; or "failed": JAX's error may come of another one's end
        self.told = threading.Event()  # it ends
        self.listener: threading.Thread | None = None
        self.left: list[int] = []  # where the run ends because it stands still: the processes that may go on
        self.meet = ""  # and where their process 0 will listen
        self.looks = self.waits = 0  # how often the main thread was looked at in its loop, and waited for devices
        self.unsound: collections.deque[int] = collections.deque(maxlen=3)  # the last samples that are not finite
        self.steps: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self.reads: collections.deque[float] = collections.deque(maxlen=_KEPT)

    def at(self, step: int) -> None:
        """A step begins, and the one before it has ended."""
        now = time.monotonic()
        if 0 <= self.step < step:
            self.steps.append((now - self.began) / (step - self.step))
        self.step, self.began = step, now
        self._lap()

    def read(self, seconds: float) -> None:
        """A batch was read."""
        self.reads.append(seconds)
        self._lap()

    def _lap(self) -> None:
        if self.start < 0:
            self.start = self._rest()
        self.laps += 1

    def _rest(self) -> float:
        """The seconds in none of those that are counted apart."""
        return time.monotonic() - self.born - self.compiled - sum(self.spent.values())

    def goodput(self) -> dict[str, float]:
        """Where the seconds of this process went."""
        start = self.start if self.start >= 0 else self._rest()
        apart = {"start": start, "compile": self.compiled, **{name: self.spent[name] for name in ("data", *STORING)}}
        again = self.repeated * float(np.median(self.steps or [0.0]))
        steps = max(self._rest() - start - again, 0.0)
        whole = sum(apart.values()) + again + steps
        return {"seconds": whole, "steps": steps, **apart, "again": again, "steps again": self.repeated}

    def hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        """JAX says what took how long."""
        if event.endswith(
            ("backend_compile_duration", "jaxpr_to_mlir_module_duration")
        ):  # others lie within each other
            self.programs, self.compiled = self.programs + 1, self.compiled + duration_secs

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Inside a call that may take long: "data", "save" or "restore"."""
        before, self.doing = self.doing, what
        since, compiled = time.monotonic(), self.compiled
        try:
            yield
        finally:
            self.doing = before
            if not before:
                self.spent[what] += time.monotonic() - since - (self.compiled - compiled)


recorder = _Recorder()


def stragglers() -> str:
    """Return how long the steps and batches of each process take, and which process holds the others up.

    Steps are as long in all of them, because each waits for the slowest. What tells is how much of its time a process
    waits for devices: the slowest one waits least. The last thousand steps count, as `stopping` and `batches` see
    them. All processes call it.

    Communication: an all-gather of a few numbers.

    Returns:
      A table in seconds, and a sentence that names the slowest.

    Example:
      >>> import spmd
      >>> print(spmd.cluster.stragglers().splitlines()[0].split())
      ['rank', 'host', 'step', 'p50', 'p95', 'batch', 'p50', 'p95', 'waits']
    """
    both, shares = (recorder.steps, recorder.reads), (0.5, 0.95)
    timed = [float(np.quantile(times or [0.0], share)) for times in both for share in shares]
    rows = everyone([socket.gethostname(), *timed, recorder.waits / recorder.looks if recorder.looks else None])
    told: list[tuple[str, ...]] = []
    for rank, (host, *times, waits) in enumerate(rows):
        told.append((f"{rank}", host, *(f"{x:.4g}" for x in times), "-" if waits is None else f"{waits:.0%}"))
    if len(rows) > 1 and None not in [waits for *_, waits in rows]:
        slowest = min(range(len(rows)), key=lambda rank: rows[rank][-1])
        usual = float(np.median([waits for *_, waits in rows]))
        least = f"slowest: rank {slowest} on {rows[slowest][0]} waits {rows[slowest][-1]:.0%} of its time"
        told.append((f"{least}, half of all {usual:.0%} or more",))
    head = ("rank", "host", "step p50", "p95", "batch p50", "p95", "waits")
    return f"{Table(told, head, right=(2, 3, 4, 5, 6)).text()}\n{_where_time_went()}"


def goodput() -> dict[str, float]:
    """Return where the seconds of this process went, since `spmd` was loaded.

    They add up to `seconds`: `start` until the first step that `stopping` or `batches` sees, `compile`, waiting for
    `data`, `save`, `restore`, steps that a run before had done and not saved (`again`), and new `steps`. `steps again`
    is how many of them there were at least: what a run has reached is noted every five seconds. Process 0 of several
    prints them as one line at the end.

    No communication.

    Returns:
      A dict of numbers, as JSON takes it.

    Example:
      >>> import spmd
      >>> sorted(spmd.cluster.goodput())
      ['again', 'compile', 'data', 'restore', 'save', 'seconds', 'start', 'steps', 'steps again']
    """
    return recorder.goodput()


def _where_time_went() -> str:
    found = recorder.goodput()
    seconds, count = found.pop("seconds"), found.pop("steps again")
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in found.items() if name not in ("steps", "again"))
    again = f", {count:.0f} steps again {found['again']:.1f} s" if count else ""
    return f"goodput: {found['steps'] / max(seconds, 1e-9):.0%} of {seconds:.1f} s in new steps; {parts}{again}"


def leave(end: str = "ended", why: str = "", seconds: float | None = None) -> None:
    """Say how and why this process ends, and wait for the listener: in a call of JAX's service a thread does not
    survive the end. One that has "failed" hears whether another process is gone; one that has "ended" without a reason
    listens until the others have, for where one hangs, all end with one code."""
    if not recorder.end:
        recorder.end, recorder.why = end, why
        if recorder.laps >= _LAPS and jax.process_index() == 0:
            print(_where_time_went(), file=sys.stderr, flush=True)
        recorder.told.set()
        if recorder.listener is not None:
            recorder.listener.join(seconds)


def end_now(code: int) -> None:
    """End this process with what it has printed, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def patiences(given: float | Mapping[str, float] | None) -> dict[str, float]:
    """After how many seconds without progress a run ends: in a step, a start, a compilation, a save and a restore.

    Raises:
      MeshError: Something else is given.
    """
    told = given if isinstance(given, Mapping) else {"step": given or 0.0}
    step = told.get("step", PATIENCE)
    found = {"step": step, **{name: times * step for name, times in _LONGEST.items()}, **told}
    if len(found) > 1 + len(_LONGEST) or not all(isinstance(one, int | float) for one in found.values()):
        advice = f'as in patience=120, or patience={{"step": 60, "start": 7200}}; names: step, {", ".join(_LONGEST)}'
        raise MeshError(f"patience is seconds, not {given!r}.", call="initialize(...)", advice=advice)
    return found


def watch(patience: Mapping[str, float], on_hang: Callable[[str], int | None] | None, host: str = "") -> None:
    """Watch this process from now on, beside the others; `host` is that of the coordinator."""
    client = coordination()
    if client is not None:
        one = Watch(patience, on_hang, client, host)
        threads = [threading.Thread(target=run, name=_NAME, daemon=True) for run in (one.listen, one.guard)]
        recorder.listener = threads[0]
        jax.monitoring.register_event_duration_secs_listener(recorder.hear)
        atexit.register(leave)  # called before JAX waits for them, where its errors abort a process
        for thread in threads:
            thread.start()


class Watch:
    """Watches the main thread of one process, and asks the others where they are when nothing goes on.

    Keys of JAX's coordination service carry what they say: a sign of life of each, and when one of them sees no
    progress, the places of all. Its lowest rank that answers tells the verdict.
    """

    def __init__(
        self, limits: Mapping[str, float], on_hang: Callable[[str], int | None] | None, client: Any, host: str
    ) -> None:
        self.rank, self.count = jax.process_index(), jax.process_count()
        self.patience, self._limits, self.on_hang = limits["step"], limits, on_hang
        self.client, self._host = client, host
        self._on_cpu = jax.default_backend() == "cpu"
        self._used, self._looked, self._worked = 0.0, 0.0, time.monotonic()
        self._tick = min(max(1.0, self.count / 500), self.patience / 20)
        self._main = threading.main_thread().ident
        self._progress = self._still = self._quiet = self._again = self._beat = time.monotonic()
        self._longest, self._laps, self._mark, self._bytes = 0.0, 0, None, 0
        self._arrays = self._programs = self._turns = 0
        self._round, self._beats = 0, 0
        self._lives: dict[str, tuple[str, float]] = {}
        self._calling = float("inf")  # since when the service has not answered

    def listen(self) -> None:
        """Look at the main thread, and listen to the others, for ever."""
        try:
            while not recorder.told.wait(self._tick):
                self._watch()
            if recorder.end == "failed":
                return self._settle()
            if not recorder.why and (different := self._compare()):
                self._settle(different)
            self._call("key_value_set", f"spmd/ended/0/{self.rank}", json.dumps(self._place(Stack(self._main))))
            while not recorder.why and len(self._said("ended")) < self.count:
                time.sleep(self._tick)
                self._watch()
        except jax.errors.JaxRuntimeError:  # JAX ends this process soon, if it has not ended the service itself
            if self.rank > 0 and recorder.end != "ended" and coordination() is self.client:
                self._end_without_coordinator()

    def _watch(self) -> None:
        self._look()
        now = time.monotonic()
        late = now > max(self._progress + self._limit, self._quiet, self._again)
        different = self._compare()
        if different or self._silent() or late or self._said("places"):
            self._settle(different)

    def guard(self) -> None:
        """End where the service does not answer: process 0, which has it, is stopped or gone."""
        while time.monotonic() - self._calling < self.patience / 2:
            time.sleep(self._tick)
        self._end_without_coordinator()

    # --- inside ---

    @property
    def _limit(self) -> float:
        """After how many seconds without progress the others are asked."""
        return (1 if recorder.laps >= _LAPS else _SEVERAL) * self.patience + self._longest

    def _compare(self) -> str:
        """Say what has to be equal in all processes, and return what is not."""
        for name, which, found in facts.noted():
            key = f"spmd/facts/{hashlib.sha256(f'{name} {which}'.encode()).hexdigest()[:16]}/"
            self._call("key_value_set", f"{key}{self.rank}", json.dumps(found), allow_overwrite=True)
            told = {int(at.rsplit("/", 1)[1]): json.loads(text) for at, text in self._call("key_value_dir_get", key)}
            if wrong := differences(told):
                advice = "make both from what is equal in all processes; same_program shows the line that differs"
                return f"{_DIFFER}: {name}: {'; '.join(wrong)}\nadvice: {advice}"
        return ""

    def _end_without_coordinator(self) -> None:
        recorder.left = []
        self._end(f"{_head([recorder.step])}rank 0, which has the coordinator of all, does not answer.")

    def _call(self, name: str, *args: Any, **how: Any) -> Any:
        self._calling = time.monotonic()
        try:
            return getattr(self.client, name)(*args, **how)
        finally:
            self._calling = float("inf")

    def _look(self) -> Stack:
        stack, now = Stack(self._main), time.monotonic()
        if (mark := stack.mark()) != self._mark or self._disk_moves():
            self._mark, self._still = mark, now
        if now - self._looked > self._tick / 2:
            used = time.process_time()
            if not self._on_cpu or used - self._used > _WORK * (now - self._looked):
                self._worked = now
            self._used, self._looked = used, now
        compiles = stack.compiles()
        if recorder.laps >= _LAPS and not compiles:
            recorder.looks += 1
            recorder.waits += stack.waits_for_devices()
        arrays = hash(tuple(map(id, jax.live_arrays())))  # a program that was called has made others
        if recorder.programs != self._programs:  # at a line that it has not passed before
            self._programs, self._turns = recorder.programs, 0
        self._turns += arrays != self._arrays
        if (recorder.laps, arrays) != (self._laps, self._arrays) or compiles:
            if self._laps < _LAPS <= recorder.laps:  # what was long before was no step
                self._longest = 0.0
            elif not compiles and (recorder.laps > _LAPS or (recorder.laps < _LAPS and self._turns > 1)):
                self._longest = max(self._longest, now - self._progress)
            self._laps, self._arrays, self._progress = recorder.laps, arrays, now
        return stack

    def _disk_moves(self) -> bool:
        """Return whether a process that saves or restores has read or written since the last look."""
        if recorder.doing not in STORING:
            return False
        if recorder.remote:
            return True
        try:
            lines = Path("/proc/self/io").read_text().splitlines()
        except OSError:
            return True
        before, self._bytes = self._bytes, sum(int(line.split()[1]) for line in lines if line[1:5] == "char")
        return self._bytes - before > _MOVED

    def _silent(self) -> bool:
        """Say that this process lives; whether another one has been silent while nothing went on."""
        now = time.monotonic()
        if now - self._beat < self.patience / 12:
            return False
        self._beat, self._beats = now, self._beats + 1
        self._call("key_value_set", f"spmd/lives/{self.rank}", f"{self._beats}", allow_overwrite=True)
        if self.rank > 1:  # two of them look
            return False
        for key, beats in self._call("key_value_dir_get", "spmd/lives/"):
            if self._lives.get(key, ("", 0))[0] != beats:
                self._lives[key] = beats, now
        since = min((since for _, since in self._lives.values()), default=now)
        return now - max(since, self._quiet, self._progress) > self.patience / 2

    def _say(self, place: Mapping[str, Any]) -> None:
        key = f"spmd/places/{self._round}/{self.rank}"
        self._call("key_value_set", key, json.dumps(place), allow_overwrite=True)

    def _said(self, what: str) -> dict[int, Any]:
        """Return what the processes have said, by rank."""
        found = self._call("key_value_dir_get", f"spmd/{what}/{self._round if what == 'places' else 0}/")
        return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found}

    def _settle(self, different: str = "") -> None:
        """Say where this process is, hear where the others are, and end if the run stands still."""
        stack = self._look()
        place = self._place(stack)
        if different:
            place |= {"kind": "differs", "where": different}
        self._say(place)
        if place["kind"] == "waits":
            with contextlib.suppress(Exception):  # a backend may write its programs in other words
                place["sends"] = (found := stack.sends())[:_SHOWN], len(found)
            self._say({"sends": ([], 0), **place})
        until = time.monotonic() + GATHER
        while True:
            places = self._said("ended") | self._said("places")
            said = all("sends" in one for one in places.values() if one["kind"] == "waits")
            if (said and len(places) == self.count) or time.monotonic() > until:
                break
            time.sleep(min(self._tick, 0.2))
        verdict = f"spmd/verdict/{self._round}"
        text, ends = judge(places, self.count, self.patience)
        if min(self._said("places")) == self.rank:
            if ends and self.rank == 0:
                stay = text.startswith(_DIFFER)  # those that have ended, too, for they say so with this code
                recorder.left = sorted(rank for rank, place in places.items() if stay or place["kind"] != "ended")
                recorder.meet = f"{self._host}:{free_port()}"
            told = json.dumps([text, ends, recorder.left, recorder.meet])
            self._call("key_value_set", verdict, told, allow_overwrite=True)
            if text and not ends:
                longest = min(one["limit"] for one in places.values())
                later = f" If nothing goes on, it ends after {longest:.0f} s." * _goes_round(places)
                print(f"{text}{later}", file=sys.stderr, flush=True)
        else:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it has stopped meanwhile: then by oneself
                told = self._call("blocking_key_value_get", verdict, int(2000 * GATHER))
                text, ends, recorder.left, recorder.meet = json.loads(told)
        self._round += 1
        now = time.monotonic()
        again, last = now + max(self.patience, now - self._progress), self._progress + place["limit"] + self._tick
        self._again = min(again, last) if last > now else again  # a start is told of less and less often
        self._quiet = now + self.patience
        if ends:
            self._end(text)

    def _place(self, stack: Stack) -> dict[str, Any]:
        """Return where this process is: `kind` is what it does, "waits" where that is up to others."""
        kind = recorder.end or ("compiles" if stack.compiles() else recorder.doing or "runs")
        where, inside, now = stack.place(), "", time.monotonic()
        if kind in ("runs", *STORING):
            others = self._writers() if kind in STORING else []
            waits = stack.waits_for_devices() or any(one.waits_for_others() for one in (stack, *others))
            if waits or (kind == "runs" and now - self._still > self.patience and stack.sends(exact=True)):
                kind = "waits"
            elif kind in STORING:
                inside = next((line for one in (stack, *others) if (line := one.inner_place())), "")
                where = f"{where}, {inside}" if inside else where
        if kind == "data":  # a thread reads ahead
            readers = [one.ident for one in threading.enumerate() if one.name.startswith("batches_")]
            inside = next((found for one in readers if (found := Stack(one).place())), "")
            where = ", ".join(dict.fromkeys(one for one in (where, inside) if one))
        loop = recorder.laps >= _LAPS or (kind == "waits" and self._turns >= _LAPS)
        usual = _PATIENT * self.patience if loop else self._limits["start"]
        return {
            "kind": kind,
            "busy": bool(inside),
            "where": recorder.why if recorder.end == "ended" else where,
            "step": recorder.step,
            "loop": loop,
            "limit": self._limits.get(kind.removesuffix("s"), usual) + self._longest,
            "idle": now - self._progress,
            "still": now - self._still,
            "rests": now - self._worked,
            "host": socket.gethostname(),
        }

    def _writers(self) -> list[Stack]:
        """The threads that were started for a save or a restore: all but those that are ours."""
        ours = ("batches", _NAME)
        found = [one for one in threading.enumerate() if one.ident != self._main and not one.name.startswith(ours)]
        return [Stack(one.ident) for one in found]

    def _end(self, text: str) -> None:
        """Print where the threads of this process are, and the verdict; then end, if the program does not say no."""
        print(f"rank {self.rank} of {self.count} on {socket.gethostname()}:", file=sys.stderr, flush=True)
        with contextlib.suppress(io.UnsupportedOperation, AttributeError):
            faulthandler.dump_traceback(sys.stderr)
        print(text, file=sys.stderr, flush=True)
        if recorder.left:  # else process 0 does not answer
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.client.wait_at_barrier(f"spmd/ends/{self._round}", int(1000 * GATHER), recorder.left)
        if self.rank == 0:  # it has JAX's service, without which JAX aborts the others
            time.sleep(0.5)
        code = HUNG if self.on_hang is None else self.on_hang(text)
        code = 1 if text.startswith(_DIFFER) else code  # it would come again
        if code is not None:
            recorder.code = code
            end_now(code)


# --- the verdict -----------------------------------------------------------------------------------------------------


def judge(places: Mapping[int, Mapping[str, Any]], count: int, patience: float) -> tuple[str, bool]:
    """Return what is told of a run in which nothing goes on, and whether it ends; nothing where nobody waits for
    another.

    A run that may go on by itself is told of, and ends later: where the process that others wait for works on, writes,
    or waits for devices as they do. For who is in another branch looks as who has run ahead of a long program.

    Args:
      places: Of each rank that answers, where it is.
      count: How many processes there are.
      patience: In seconds.
    """
    if wrong := [place["where"] for place in places.values() if place["kind"] == "differs"]:
        return wrong[0], True
    silent = [rank for rank in range(count) if rank not in places]
    of = {rank: place["kind"] for rank, place in places.items()}
    if "failed" in of.values():
        late = [rank for rank, kind in of.items() if kind == "runs" and places[rank]["still"] > patience]
        gone = silent + [rank for rank, kind in of.items() if kind == "ended"] + late
        return (_told(gone, places), True) if gone else ("", False)
    compiling = [rank for rank, kind in of.items() if kind == "compiles"]
    if compiling and not silent:
        slow = [rank for rank in compiling if places[rank]["still"] > places[rank]["limit"]]
        return (_told(slow, places), True) if slow else ("", False)
    waits = {rank for rank, kind in of.items() if kind == "waits"}
    lines = {places[rank]["where"] for rank in waits}
    waits |= {rank for rank, kind in of.items() if kind == "runs" and places[rank]["where"] in lines - {""}}
    storing = [rank for rank, kind in of.items() if kind in STORING]
    own = [rank for rank in of if rank not in waits and rank not in storing]
    storing = [rank for rank in storing if places[rank].get("busy")] or storing  # who rests there waits for them
    guilty = silent + (own if waits or storing else [rank for rank in own if of[rank] == "data"])
    patient = any(one["idle"] > one["limit"] for one in places.values())
    loop = any(one["loop"] for one in places.values())
    rest = min((one["rests"] for one in places.values()), default=0) > patience / 2  # then nobody computes
    if guilty:
        never = bool(silent) or any(of[rank] == "ended" for rank in guilty)
        moves = all(of[rank] == "runs" and places[rank]["still"] < patience / 2 for rank in guilty if rank in of)
        return _told(guilty, places), patient or never or (loop and not moves)
    if storing:
        return _told(storing, places), patient or all(places[rank]["still"] > patience for rank in storing)
    if waits:
        return _all_wait(waits, places), patient or rest
    if of and all(kind == "runs" and places[rank]["still"] > _SEVERAL * patience for rank, kind in of.items()):
        return _all_wait(set(of), places), patient and rest and _goes_round(places)
    return "", False


def _goes_round(places: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether somebody waits for another, or all have said that they are in a loop: a server that nobody asks,
    or a prompt, waits for ever."""
    return all(one["loop"] for one in places.values()) or any(one["kind"] != "runs" for one in places.values())


def _all_wait(waits: set[int], places: Mapping[int, Any]) -> str:
    """All wait: those at another line than most others may have taken another way."""
    by_line: dict[str, list[int]] = collections.defaultdict(list)
    for rank in sorted(waits):
        by_line[places[rank]["where"]].append(rank)
    groups = sorted(by_line.values(), key=len)
    if len(groups) > 1 and len(groups[0]) < len(groups[-1]):
        return _told([rank for group in groups[:-1] for rank in group], places)
    last = max(one["step"] for one in places.values())
    left = [rank for rank in sorted(waits) if 0 <= places[rank]["step"] < last]  # their loop, and wait after it
    if len(groups) > 1 and left:
        return _told(left, places)
    told = "; ".join(f"{ranks(group)} in {line}{_sent(places, line, ',')}" for line, group in by_line.items())
    head = _head(one["step"] for one in places.values())
    if len(groups) > 1:
        return f"{head}the processes wait for each other at different lines: {told}."
    if any(places[rank]["kind"] == "runs" for rank in waits):
        return f"{head}no process goes on: {told}."
    return f"{head}all wait, {told}: a device or the network between them does not answer."


def _told(guilty: list[int], places: Mapping[int, Any]) -> str:
    """A paragraph: who did not come, where they are, and where the others wait."""
    rest = [rank for rank in places if rank not in guilty]
    lines = collections.Counter(places[rank]["where"] for rank in rest if places[rank]["kind"] != "ended")
    line = max(lines, key=lambda line: lines[line], default="")
    waiting = f"did not reach {line}, where the others wait{_sent(places, line)}. "
    beside = any(places[rank]["where"].startswith(line) for rank in guilty if rank in places)  # in one call of ours
    first = f"{ranks(sorted(guilty))} {waiting}" if line and not beside else ""
    each, last = [], max((one["step"] for one in places.values()), default=-1)
    for rank in sorted(guilty)[:8]:
        place = places.get(rank)
        left = f", after step {place['step']:,}" if place and 0 <= place["step"] < last else ""  # so it left the loop
        if place is None:
            each.append(f"rank {rank} does not answer: it is stopped, or its host is gone")
        elif place["kind"] == "ended":
            each.append(f"rank {rank} on {place['host']} has ended{left}{': ' * bool(place['where'])}{place['where']}")
        else:
            doing = _DOING.get(place["kind"], "is")
            each.append(f"rank {rank} on {place['host']} {doing} in {place['where']}, for {place['still']:.0f} s{left}")
    return f"{_head(one['step'] for one in places.values())}{first}{'; '.join(each)}{'; ...' * (len(guilty) > 8)}."


def _sent(places: Mapping[int, Any], line: str, comma: str = "") -> str:
    """Return what those who wait at a line wait in. No backend says in which collective of a program."""
    here = (one["sends"] for one in places.values() if one["where"] == line and one.get("sends"))
    texts, count = next(here, ([], 0))
    more = [f"{count - len(texts)} more"] if count > len(texts) else []
    return f"{comma} in {'one of ' * (count > 1)}{'; '.join([*texts, *more])}" if texts else ""


def _head(steps: Iterable[int]) -> str:
    step = max(steps, default=-1)
    return f"the run stands still{f' at step {step:,}' if step >= 0 else ''}: "


# --- what is left goes on ---------------------------------------------------------------------------------------------

_FOLDER = os.getcwd()  # from which the command was given


def remake(message: str, *, replaced: bool = False, times: int = 10) -> int | None:
    """Start the program anew with the processes that are left, in their places: `initialize(on_hang=cluster.remake)`.

    Where a run stands still, or processes are gone, those that answer number themselves anew, meet at process 0, and
    run the same command again: a process that slept or waited for a lock as well. Nothing is queued and no host is
    asked for. A mesh with an axis of -1 is made from the devices that are left, and `checkpoints` and `batches` go on
    from the last step on any mesh. What has ended by itself is not started again.

    If process 0 is gone, nobody tells who is left, and the processes end with 75, as without it. So they do where a
    launcher or scheduler ends all when one has ended: `python -m spmd launch`, `srun --kill-on-bad-exit`.

    Communication: none; what the flight recorder has gathered says who is left.

    Args:
      message: What is said of the run.
      replaced: Whether somebody else starts those that are gone again. Then all keep their numbers, and wait for them
        as long as `initialization_timeout` says. Who comes before the others have noticed, after half the patience and
        5 seconds, lets JAX abort process 0.
      times: How often. After that, the processes end.

    Returns:
      The exit code 75 where it cannot; else it does not return.

    Example:
      >>> import spmd
      >>> spmd.cluster.initialize(on_hang=spmd.cluster.remake)  # alone: nothing happens
    """
    before = json.loads(os.environ.get(REMADE, "{}"))
    turn = before.get("turn", 0) + 1
    rank, left = jax.process_index(), recorder.left
    if turn > times or not (replaced or (rank in left and 0 in left)):
        return HUNG
    if replaced:
        told = {**before, "turn": turn}
    else:
        told = {"rank": left.index(rank), "count": len(left), "coordinator": recorder.meet, "turn": turn}
    print(f"starting anew: {json.dumps(told)}", file=sys.stderr, flush=True)
    for number in Path("/proc/self/fd").glob("[0-9]*"):  # connections of JAX would stay open
        with contextlib.suppress(OSError):
            if int(number.name) > 2 and stat.S_ISSOCK(os.fstat(int(number.name)).st_mode):
                os.set_inheritable(int(number.name), False)
    os.chdir(_FOLDER)
    return os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, REMADE: json.dumps(told)})
