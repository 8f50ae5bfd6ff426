"""A program that gets a signal every few milliseconds, until it is gone: `tests/cluster/signalled.py NUMBER WHEN`.

It ends as asked, with exit code 75. With `join` the signals begin while it waits for the others to join, with `loop` in
its loop.
"""

import os
import subprocess
import sys
import time

import spmd

SENDING = """
import os, sys, time
time.sleep(float(sys.argv[3]))
try:
    while True:
        os.kill(int(sys.argv[1]), int(sys.argv[2]))
        time.sleep(0.003)
except ProcessLookupError:
    pass
"""


def sends(number: int, after: float) -> None:
    """Let another process send the signals. It outlives this one by a moment."""
    command = [sys.executable, "-S", "-c", SENDING, str(os.getpid()), str(number), str(after)]
    subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(number: int, when: str) -> None:
    join = spmd.cluster.initialize  # this loads JAX, and a signal before that ends the process
    if when == "join":
        if os.environ["RANK"] == "0":
            sends(number, 0.5)
        else:
            time.sleep(2)
    join()
    step = 0
    while not spmd.cluster.stopping(step):
        step += 1
        if step == 3 and when == "loop":
            sends(number, 0)
        time.sleep(0.01)
    print("stopped", step, flush=True)
    raise SystemExit(75)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
