"""What is left of a program goes on: each process starts anew in its place, with the number that it then has."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from pathlib import Path

import jax

from spmd._processes.environment import REMADE
from spmd.cluster._recorder import HUNG, recorder

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
