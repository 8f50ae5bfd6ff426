"""Values that a `with` block sets for what runs inside it, also where such a block is suspended.

JAX keeps them per thread, and each block puts back what it found. A block that a coroutine or a generator suspends may
end after blocks that began later: it would then put back what is long gone. So each thread keeps its blocks in order,
and the last one that is still open decides, whatever the order in which they end.
"""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import jax

from spmd.errors import ModeError


class _Here(threading.local):
    """What one thread has. The default is an attribute of the class, which a warm call of a kernel reads fastest."""

    blocks: _Thread | None = None


class Ambient:
    """A value per thread, part of the key of every cache of `jax.jit`.

    Args:
      name: How messages call the block: "mode" for `with spmd.mode(...)`.
      default: The value where no block is open.
    """

    def __init__(self, name: str, default: Any):
        self.name = name
        self.default = default
        self.jax = jax.make_user_context(default)
        self.threads = _Here()
        self.innermost: contextvars.ContextVar[_Block | None] = contextvars.ContextVar(name, default=None)

    def __call__(self, value: Any) -> _Block:
        """A context manager that sets the value."""
        return _Block(self, value)

    @property
    def value(self) -> Any:
        """Return what the innermost open block of the caller says.

        Raises:
          ModeError: If a block of another coroutine is open in this thread and says something else. JAX's caches go
            by the thread, so that block would decide for the caller.
        """
        thread = self.threads.blocks
        if thread is not None and thread.open:
            self._check(thread)
        elif thread is not None and thread.shown is not None:
            thread.show()
        return self.jax.value

    def _check(self, thread: _Thread) -> None:
        thread.show()
        mine = _still_open(self.innermost.get())
        while mine is not None and mine.thread is not thread:  # a context copied into another thread
            mine = _still_open(mine.outer)
        if mine is thread.open[-1] or (self.default if mine is None else mine.value) == thread.open[-1].value:
            return
        rule = (
            f"another coroutine is suspended inside `with spmd.{self.name}(...)`. JAX keeps what that block says per "
            "thread, so it would hold here too."
        )
        advice = f"no `await` inside the block: `with spmd.{self.name}(...)` around each call that it is for"
        raise ModeError(rule, call=f"with spmd.{self.name}(...)", advice=advice)


class _Thread:
    """The open blocks of one thread, the innermost last, and the one whose value JAX holds."""

    def __init__(self, ambient: Ambient):
        self.ambient = ambient
        self.open: list[_Block] = []
        self.shown: _Block | None = None
        self.first: Any = None  # JAX's own context manager, which knows what was there before any block

    def show(self) -> None:
        """Let JAX hold the value of the innermost open block. Only the thread itself may call this."""
        last = self.open[-1] if self.open else None
        if last is self.shown:
            return
        if last is None:
            self.first.__exit__(None, None, None)
        else:
            entered = self.ambient.jax(last.value)
            entered.__enter__()
            if self.shown is None:
                self.first = entered
        self.shown = last


class _Block:
    """One `with` block."""

    def __init__(self, ambient: Ambient, value: Any):
        self.ambient, self.value = ambient, value
        self.ended = False

    def __enter__(self) -> None:
        threads = self.ambient.threads
        if threads.blocks is None:
            threads.blocks = _Thread(self.ambient)
        self.thread: _Thread = threads.blocks
        self.outer = _still_open(self.ambient.innermost.get())
        self.ambient.innermost.set(self)
        self.thread.open.append(self)
        self.thread.show()

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.thread.open.remove(self)
        if self.ambient.threads.blocks is self.thread:  # else a generator ended by another thread
            self.thread.show()
        if self.ambient.innermost.get() is self:
            self.ambient.innermost.set(_still_open(self.outer))


def _still_open(block: _Block | None) -> _Block | None:
    """The block itself, or the nearest one around it that has not ended."""
    while block is not None and block.ended:
        block = block.outer
    return block
