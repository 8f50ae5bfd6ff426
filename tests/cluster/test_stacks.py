"""Where a thread stands: its line, and whether it waits for devices."""

import functools
import re
import threading
import time
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd._processes.agreement import in_all
from spmd.cluster._stacks import Stack
from spmd.errors import SpmdError

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

    inner: types.SimpleNamespace

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
    model.inner = types.SimpleNamespace(jitted=slow)
    frame = next(iter(Stack(threading.get_ident()).frames[1:]))
    assert frame.f_locals["model"] is model and half is not None
    for text, jitted in {
        "slow(x, 1)": True,
        "half()": True,
        "model.step(x)": True,
        "model.inner.jitted(*[x])": True,  # as a kernel calls what it has compiled
        "x.block_until_ready()": True,
        "len(x)": False,
        "nobody(x)": False,
        "(yield)": False,
        "": False,
    }.items():
        assert _is_jitted(frame, text) == jitted, text


def test_functions_of_this_package_are_not_the_users() -> None:
    """Those of another room, too: a call of a kernel was shown as `plan.jitted(*leaves)`."""

    def inside() -> tuple[str, str]:
        stack = Stack(threading.get_ident())
        del stack.frames[:2]  # its own, and this one, which is the user's
        return stack.frames[0].f_code.co_name, stack.place()

    name, place = in_all(inside, SpmdError)
    assert name == "in_all" and place.startswith("`in_all(inside, SpmdError)` (test_stacks.py:")


def test_a_trace_is_told_from_a_wait() -> None:
    found = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        found.append(Stack(threading.get_ident()).compiles())
        return x

    traced(jnp.zeros(()))
    assert found == [True]


def sent_here() -> list[str]:
    """What the programs send that the functions on the stack have called; lines are those of this file."""
    return Stack(threading.get_ident()).sends()


def test_the_collectives_of_what_was_called_are_named() -> None:
    mesh = spmd.make_mesh(dp=2, tp=4)

    @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
    def total(x: jax.Array) -> jax.Array:
        return spmd.psum(jnp.sum(x, 1), "b/dp {U:tp} -> b/dp")

    @spmd.kernel("b/dp d/tp, d f/tp -> b/dp f/tp", mesh=mesh)
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(spmd.all_gather(x, "b/dp d/tp -> b/dp d") @ w)

    @jax.jit
    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x: jnp.sum(layer(x, w)))(x), total(x)

    @jax.jit
    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum(x)

    x = spmd.shard(jnp.ones((4, 8)), "b/dp d/tp", mesh=mesh)

    def one() -> list[str]:
        total(x)
        return sent_here()

    def several() -> list[str]:
        step(x, jnp.ones((8, 12)))
        return sent_here()

    def of_jax() -> list[str]:
        plain(x)
        return sent_here()

    line = r" \(test_stacks\.py:\d+\)"
    [found] = one()
    assert re.fullmatch(r'psum\(\w+, "b/dp \{U:tp\} -> b/dp"\)' + line, found)
    found, gather = several(), r'all_gather\(\w+, "b/dp d/tp -> b/dp d"\)' + line
    for text in (gather, f"psum_scatter of the gradient of {gather}", r"psum\(.*"):
        assert any(re.fullmatch(text, one) for one in found), found
    [found] = of_jax()
    assert re.fullmatch("psum of reduce_sum" + line, found)
    assert len(sent_here()) == 4  # this function has called them all, through others
    nobody: list[str] = []
    thread = threading.Thread(target=lambda: nobody.extend(sent_here()))
    thread.start()
    thread.join()
    assert nobody == []


def test_a_thread_that_has_ended_has_no_place() -> None:
    stack = Stack(None)
    assert stack.place() == "" and not stack.waits_for_devices() and stack.mark() == []
