"""Where a thread stands: its line, and whether it waits for devices."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from spmd.cluster._stacks import Stack

_here = threading.Event()


@jax.jit
def slow(x: jax.Array, n: jax.Array | int) -> jax.Array:
    """Waits on the device."""
    return jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x) + i, x)


@functools.cache
def rounds() -> int:
    """Rounds of `slow` that take about half a second."""
    jax.block_until_ready(slow(jnp.zeros(()), 1))
    since = time.monotonic()
    jax.block_until_ready(slow(jnp.zeros(()), 100_000))
    return int(50_000 / (time.monotonic() - since))


class Model:
    """A jitted method."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, x: jax.Array) -> jax.Array:
        return slow(x, 3) + 1


def fetched(x: jax.Array) -> None:
    n = rounds()
    _here.set()
    float(slow(x, n))


def ready(x: jax.Array) -> None:
    n = rounds()
    _here.set()
    slow(x, n).block_until_ready()


def asleep(x: jax.Array) -> None:
    _here.set()
    time.sleep(0.5)


def locked(x: jax.Array) -> None:
    lock = threading.Lock()
    with lock:
        _here.set()
        lock.acquire(timeout=0.5)


def seen(work: Callable[[jax.Array], None]) -> tuple[bool, str]:
    """What a stack says of a thread while it works."""
    x = jnp.zeros(())
    _here.clear()
    thread = threading.Thread(target=work, args=(x,))
    thread.start()
    assert _here.wait(10)
    time.sleep(0.1)
    stack = Stack(thread.ident)
    found = stack.waits_for_devices(), stack.place()
    assert not stack.compiles()
    thread.join()
    return found


@pytest.mark.parametrize(
    ("work", "waits", "text"),
    [
        (fetched, True, "slow(x, n)"),
        (ready, True, "slow(x, n)"),  # and block_until_ready, if the call returns at once
        (asleep, False, "time.sleep(0.5)"),
        (locked, False, "lock.acquire(timeout=0.5)"),
    ],
)
def test_a_thread_that_stands_still(work: Callable[[jax.Array], None], waits: bool, text: str) -> None:
    rounds()  # compiled
    found, place = seen(work)
    assert found == waits
    assert text in place and "(test_stacks.py:" in place


def test_jitted_functions_are_known_behind_partials_and_methods() -> None:
    """Their calls are C++, which leaves no frame."""
    from spmd.cluster._stacks import _is_jitted

    model, half = Model(), functools.partial(slow, jnp.ones(()), 2)
    frame = next(iter(Stack(threading.get_ident()).frames[1:]))
    assert frame.f_locals["model"] is model and half is not None
    for text, jitted in {
        "slow(x, 1)": True,
        "half()": True,
        "model.step(x)": True,
        "x.block_until_ready()": True,
        "len(x)": False,
        "nobody(x)": False,
        "(yield)": False,
        "": False,
    }.items():
        assert _is_jitted(frame, text) == jitted, text


def test_a_trace_is_told_from_a_wait() -> None:
    found = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        found.append(Stack(threading.get_ident()).compiles())
        return x

    traced(jnp.zeros(()))
    assert found == [True]


def test_a_thread_that_has_ended_has_no_place() -> None:
    stack = Stack(None)
    assert stack.place() == "" and not stack.waits_for_devices() and stack.mark() == []
