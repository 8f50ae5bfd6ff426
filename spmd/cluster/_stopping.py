"""When to save and end: a signal to one process ends all of them at the same step."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType

import jax
import jax.experimental.multihost_utils as multihost

from spmd.errors import SpmdError, is_int


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
                    signal.signal(number, self._here)

    def joined(self) -> None:
        """Pass on what was noted."""
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGUSR1) == self._here:
                signal.signal(signal.SIGUSR1, self._to_jax)
            if self.signal is not None:
                os.kill(os.getpid(), signal.SIGTERM)

    def watch(self) -> None:
        """Take the signals that ask a program to stop, from now on."""
        if threading.current_thread() is not threading.main_thread():
            raise SpmdError("stopping is called in the main thread, which gets the signals.", call="stopping(step)")
        several = jax.process_count() > 1
        for number in (signal.SIGUSR1, signal.SIGINT) if several else (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._to_jax if several else self._here)
        atexit.register(_hear_nothing_more)
        self.watching = True

    def _here(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt  # who asks twice does not want to wait
        self.signal = number

    def _to_jax(self, number: int, frame: FrameType | None) -> None:
        """JAX hears SIGTERM only, and tells the other processes."""
        self._here(number, frame)
        os.kill(os.getpid(), signal.SIGTERM)


def _hear_nothing_more() -> None:
    """From the exit on, a signal that asks to stop changes nothing: Python takes its handlers away before it ends."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


asked = _Asked()


def stopping(step: int) -> bool:
    """Whether to save and end now: true in all processes at the same step.

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
    if not asked.watching:
        asked.watch()
    if not asked.reached:
        if jax.process_count() == 1:
            asked.reached = asked.signal is not None
        else:
            asked.reached = multihost.reached_preemption_sync_point(int(step))
    return asked.reached
