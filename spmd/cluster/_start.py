"""The start of a program of several processes: who is who, whether all run the same program, how each ends."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.experimental.multihost_utils as multihost

from spmd._compat import installed
from spmd._jaxprs import errors as jax_errors
from spmd._jaxprs.lines import is_of_library
from spmd._processes import facts
from spmd._processes.agreement import disagreements, first_difference
from spmd._processes.environment import Task, agreed, tasks
from spmd.cluster._recorder import GATHER, PATIENCE, end_now, leave, patiences, recorder, watch
from spmd.errors import MeshError, SpmdError, is_int
from spmd.mesh import use_cpu_devices

# --- when to save and end: a signal to one process ends all of them at the same step ----------------------------------


class _Asked:
    """Whether the program was asked to stop. Handlers of signals set it."""

    def __init__(self) -> None:
        self.watching = False
        self.signal: int | None = None
        self.reached = False

    def watch_early(self) -> None:
        """Take note of signals while this process joins the others, for JAX takes SIGTERM only from then on."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, self._note)

    def watch(self) -> None:
        """Take the signals that ask a program to stop, from now on."""
        if threading.current_thread() is not threading.main_thread():
            raise SpmdError("stopping is called in the main thread, which gets the signals.", call="stopping(step)")
        alone = () if jax.process_count() > 1 else (signal.SIGTERM,)  # JAX has a handler of its own
        for number in (*alone, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        atexit.register(_hear_nothing_more)
        self.watching = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt  # who asks twice does not want to wait
        self.signal = number
        if number != signal.SIGTERM and jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # JAX hears SIGTERM only, and tells the other processes


def _hear_nothing_more() -> None:
    """From the exit on, a signal that asks to stop changes nothing: Python takes its handlers away before it ends."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


asked = _Asked()


def stopping(step: int) -> bool:
    """Return whether to save and end now: true in all processes at the same step.

    SIGTERM, SIGUSR1 or Ctrl-C to any process asks for it. A scheduler sends such a signal before it takes a machine
    away. A second Ctrl-C interrupts; other signals that come again change nothing, until the process has ended. Without
    this call JAX takes SIGTERM, and training goes on until SIGKILL. Once true, it stays true. Call it at every step,
    and once right after `initialize`, with step 0: before that a signal ends a program that is alone. A loop that ends
    before the agreed step saves at its end as always.

    Communication: none on the devices; a look at JAX's coordination service.

    Args:
      step: The number of the step, which grows, the same in all processes.

    Returns:
      A bool.

    Raises:
      SpmdError: The step is not an integer, or it is not called in the main thread.

    Example:
      >>> import spmd
      >>> for step in range(3):
      ...     if spmd.cluster.stopping(step):
      ...         break  # save, then end with exit code 0
    """
    if not is_int(step, 0):
        raise SpmdError(f"step is an integer that is not negative, not {step!r}.", call="stopping(step)")
    recorder.at(int(step))
    if not asked.watching:
        asked.watch()
    if not asked.reached:
        several = jax.process_count() > 1
        asked.reached = multihost.reached_preemption_sync_point(int(step)) if several else asked.signal is not None
    return asked.reached


_CONSEQUENCE = 0.3  # seconds: an error of JAX may come of another process's end, which the launcher has to see first
_GONE = re.compile("Gloo .*failed|NCCL")  # what an error of JAX says, of whatever class, where another process is gone
_PLACE = re.compile(r"rank|host|hostname|port|node|nodeid|process|processid|pid|addr|address|coordinator|master")


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    cpu_devices: int | None = None,
    compare: bool = True,
    ignore: Sequence[str | int] = (),
    patience: float | Mapping[str, float] | None = PATIENCE,
    on_hang: Callable[[str], int | None] | None = None,
    **options: Any,
) -> None:
    """Join the processes of this program, and check that all of them run the same one.

    It calls `jax.distributed.initialize`, once, before anything that asks JAX for devices. Who is who comes from the
    arguments, else from `python -m spmd launch`, else from what JAX finds itself (TPU, SLURM, Open MPI, Kubernetes),
    else from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where none of them says that there are several processes,
    it does nothing, so the same program runs alone.

    From then on an exception that nobody catches ends its process at once, with its rank. Without that, a process
    waits minutes for the others, and they for it. SIGTERM and SIGUSR1 that come while it joins them are kept for
    `stopping`. If all processes are on this machine, at `localhost`, no other one can connect to them.

    Communication: an all-gather of one hash over the processes: the versions of Python, JAX and spmd, the arguments of
    the command, and the program's own files. It starts JAX's devices.

    Args:
      coordinator_address: `host:port` of process 0, for all processes.
      num_processes: How many processes there are.
      process_id: Which of them this is, from 0.
      cpu_devices: How many virtual CPU devices each process has, as by `use_cpu_devices`, which has to come before
        JAX's devices start. Where JAX_NUM_CPU_DEVICES is set, as by `launch --devices`, that number counts.
      compare: Whether the processes compare by themselves, from now on, what has to be equal: in the background the
        traced program of each kernel, at its first call, and the arguments of `init` with JAX's settings; and the
        copies of a state before `save` writes it. Only hashes are sent. A run in which they differ ends with exit code
        1, and says which rank differs. What a `jax.jit` of your own adds to kernels, `same_program` compares.
      ignore: Flags of the command whose values may differ between processes, or positions in `sys.argv`. Those that
        name a rank, a host or a port are never compared.
      patience: After how many seconds beyond the longest step so far a run in which nothing goes on ends. It says
        which process stopped it, and at which line: one that sleeps, waits for a lock, for data or for a disk, has
        taken another branch, or does not answer. A loop that calls neither `stopping` nor `next(batches)` is told of
        after three times as long, and ends then. While a process compiles, nobody is in a hurry. Where the process
        that the others wait for works on, or all wait for devices other than CPUs, it is ten times as long. A start,
        before any loop, is told of too, and may take sixty times as long. A process that does not answer at all is
        named after half of it. A mapping sets them apart: `{"step": 60, "start": 3600, "compile": 3600, "save": 600,
        "restore": 600}`.
        None watches nothing, as for a debugger.
      on_hang: What to do then, in each process that answers: a function of the message. It returns the exit code, or
        None to go on. By default the exit code is 75. `cluster.remake` starts again with the processes that are left.
      **options: Further arguments of `jax.distributed.initialize`: `initialization_timeout` and
        `shutdown_timeout_seconds`, for how many seconds (300) processes wait for others to start and to end, or
        `heartbeat_timeout_seconds`, after how many seconds of silence JAX ends a process whose coordinator is gone, or
        all where one is. The latter is `patience` by default, and at least 30.

    Raises:
      MeshError: Two sources disagree on the processes; one is not complete; JAX runs already; the port of process 0 is
        in use; or the processes do not run the same program, with the ranks that differ.

    Example:
      >>> import spmd
      >>> spmd.cluster.initialize()  # alone: nothing happens
    """
    given, limits = _given(coordinator_address, num_processes, process_id), patiences(patience)
    if jax.distributed.is_initialized():
        found = Task("jax.distributed", jax.process_index(), jax.process_count())
    else:
        found = agreed(given, tasks())
        if found is None:
            _choose_devices(cpu_devices)
            return
        where = {} if found.detected else _address(found)
        options = {**where, "heartbeat_timeout_seconds": max(int(limits["step"]), 30), **options}
        asked.watch_early()
        _join(found, options, cpu_devices)
        if asked.signal is not None:
            os.kill(os.getpid(), signal.SIGTERM)
    if jax.process_count() > 1:
        _end_at_once(jax.process_index(), jax.process_count())
        _compare(ignore)
        facts.compare(compare)
        if patience is not None:
            host = _coordinator(found).rpartition(":")[0] or socket.getfqdn()  # nobody has to say it to process 0
            watch(limits, on_hang, host)


def same_program(lowered: Any) -> None:
    """Check that all processes have lowered the same program: a step, before it runs for the first time.

    What differs, a constant, a shape, a mesh, would otherwise show as a hang or as wrong numbers. A lowered program has
    the sizes of its mesh and not the order of the devices, which `batches` compares. Communication: an all-gather of
    one hash over the processes. Where the hashes differ, some twenty more find the first line that does, and no process
    gets the program of another.

    Args:
      lowered: `jax.jit(step).lower(*args)`, or `kernel.lower(*args)`.

    Raises:
      MeshError: With the ranks whose program differs, and the first line that does.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> spmd.cluster.same_program(jax.jit(jnp.sin).lower(1.0))
    """
    if not hasattr(lowered, "as_text"):
        rule = f"same_program takes what `.lower(...)` gives, not {type(lowered).__name__}."
        raise MeshError(rule, advice="as in same_program(jax.jit(step).lower(state, batch))")
    if found := first_difference(lowered.as_text().splitlines()):
        rule = "the processes have not lowered the same program."
        where = "from what is equal in all processes, not from the rank, the time or a file"
        advice = f"compute shapes, meshes and constants {where}"
        raise MeshError(rule, call="same_program(...)", got=[found], advice=advice)


def _given(address: str | None, count: int | None, rank: int | None) -> Task | None:
    """Return what the arguments say."""
    if address is None and count is None and rank is None:
        return None
    if count is None or rank is None or not is_int(count, 1) or not is_int(rank, 0) or rank >= count:
        rule = "process_id is one of 0, 1, ..., num_processes - 1, and both are given together."
        call = f"initialize({address!r}, {count!r}, {rank!r})"
        raise MeshError(rule, call=call, advice='as in initialize("host:1234", num_processes=2, process_id=0)')
    return Task("the arguments", int(rank), int(count), address)


def _address(task: Task) -> dict[str, Any]:
    where = _coordinator(task)
    if not where:
        rule = "nothing says where process 0 listens."
        advice = 'initialize("host:port", ...), or MASTER_ADDR and MASTER_PORT beside RANK and WORLD_SIZE'
        raise MeshError(rule, call="initialize(...)", got=[str(task)], advice=advice)
    found = {"coordinator_address": where, "num_processes": task.count, "process_id": task.rank}
    host, _, port = where.rpartition(":")
    local = host in ("localhost", "127.0.0.1", "[::1]")
    if local and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        found["coordinator_bind_address"] = f"{host}:{port}"  # else it listens on every address of this machine
    if task.rank == 0 and port.isdecimal() and _in_use(int(port), local):
        rule = f"port {port} of this host is in use, so process 0 cannot listen there."
        advice = "another port: coordinator_address, MASTER_PORT, or --coordinator of launch"
        raise MeshError(rule, call="initialize(...)", got=[str(task)], advice=advice)
    return found


def _coordinator(task: Task) -> str:
    """`host:port` of process 0; empty where nobody has said it."""
    return task.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")


def _in_use(port: int, local: bool) -> bool:
    """Return whether another program listens on a port; some versions of JAX crash there."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            socket.create_server((host if local else "", port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
    return False


def _join(found: Task, options: dict[str, Any], cpu_devices: int | None) -> None:
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        rule = "JAX could not join the processes."
        advice = "call it once, before anything that makes an array or asks for devices"
        got = [str(found), jax_errors.first_line(error)]
        raise MeshError(rule, call="initialize(...)", got=got, advice=advice) from error
    _choose_devices(cpu_devices)
    here = jax.process_count()
    if found.count is not None and here != found.count:
        rule = f"JAX joined {here} process{'es' * (here > 1)}, and {found.source} says {found.count}."
        raise MeshError(rule, call="initialize(...)")


def _choose_devices(cpu_devices: int | None) -> None:
    """CPU devices, if the program asks for them; who starts it may say another number."""
    if cpu_devices is not None:
        use_cpu_devices(jax.config.jax_num_cpu_devices if "JAX_NUM_CPU_DEVICES" in os.environ else cpu_devices)


def _end_at_once(rank: int, count: int) -> None:
    """From here on an exception that nobody catches prints the rank and ends the process, whoever waits for it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        before(kind, value, trace)
        text = value.fault.rule if isinstance(value, SpmdError) else str(value)
        first = next(iter(text.strip().splitlines()), "")
        print(f"rank {rank} of {count} ends: {kind.__name__}: {first}", file=sys.stderr, flush=True)
        if isinstance(value, jax.errors.JaxRuntimeError) or _GONE.search(first):
            time.sleep(_CONSEQUENCE)
            leave("failed", seconds=2 * GATHER)
        else:
            leave("ended", f"{kind.__name__}: {first}", 2.0)
        end_now(recorder.code or (130 if issubclass(kind, KeyboardInterrupt) else 1))

    sys.excepthook = hook


def _compare(ignore: Sequence[str | int]) -> None:
    found = disagreements({
        "Python": platform.python_version(),
        **{name: installed(name) for name in ("jax", "jaxlib", "numpy", "spmd")},
        "arguments": " ".join(compared(sys.argv[1:], ignore)),
        "files": _files(),
    })  # fmt: skip
    if found:
        rule = "the processes do not run the same program."
        advice = 'the same command, files and versions everywhere; initialize(ignore=["--flag"]) leaves a flag out'
        raise MeshError(rule, call="initialize(...)", got=found, advice=advice)


def compared(arguments: Sequence[str], ignore: Sequence[str | int] = ()) -> list[str]:
    """The arguments of a command that all processes have alike: without those that name a rank, a host or a port.

    >>> compared(["--lr", "0.1", "--node-rank", "3", "--port=80", "data"], ["--lr"])
    ['data']
    """
    kept, skip = [], False
    for position, text in enumerate(arguments, start=1):
        flag, equals, _ = text.partition("=")
        if text.startswith("-"):
            words = re.split(r"[-_]+", flag.lower())
            left_out = flag in ignore or any(_PLACE.fullmatch(word) for word in words)
            skip = left_out and not equals
        else:
            left_out, skip = skip, False
        if not left_out and position not in ignore:
            kept.append(text)
    return kept


def _files() -> dict[str, str]:
    """Hashes of the program's own files that are loaded, and of ours: not of Python's or of other packages."""
    paths = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    top = os.path.dirname(os.path.abspath(main)) if main else os.getcwd()
    found = {}
    for path in {os.path.abspath(one) for one in paths if one.endswith(".py") and not is_of_library(one)}:
        with contextlib.suppress(FileNotFoundError):
            found[os.path.relpath(path, top)] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found
