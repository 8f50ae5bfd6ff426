"""Between which numbers values lie: what a walk says of each value of a program, held against what it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd._jaxprs.walker import walk
from spmd.checker._numbers import wide
from spmd.checker._reach import _Made, _Reads
from spmd.checker._simulator import simulate
from tests.sampler import seeds

ALONE = {
    "a small number as a flag": lambda x, n: (0.5 * jax.nn.sigmoid(x)).astype(bool),
    "a negative number as a flag": lambda x, n: (-jnp.abs(x)).astype(bool),
    "a quotient of integers": lambda x, n: (1 + jnp.arange(8)) // 16 == 0,
    "a number that is cut": lambda x, n: (0.9 * jax.nn.sigmoid(x)).astype(jnp.int32) == 0,
    "squares of what is no number": lambda x, n: x * x >= 0,
    "what is no number": lambda x, n: jnp.exp(x) != jnp.exp(x),
    "places": lambda x, n: jnp.argmax(x) - 3,
    "a remainder": lambda x, n: jnp.arange(8) % 3 - n % 3,
    "bounds": lambda x, n: jnp.clip(x, -1.0, 2.0) * jnp.maximum(x, 0.5),
    "positions": lambda x, n: jnp.cumsum(jnp.arange(8)) - jnp.arange(8).sum(),
    "a loop": lambda x, n: lax.fori_loop(0, 5, lambda i, y: y + i, n),
    "a branch": lambda x, n: lax.cond(n > 0, lambda: 1.0, lambda: -2.0),
    "padding": lambda x, n: jnp.pad(jnp.abs(x), 1, constant_values=-3.0),
    "largest": lambda x, n: x[jax.lax.top_k(x, 3)[1]] + jnp.stack(jax.lax.top_k(jnp.abs(x), 3)[:1])[0],
    "sorted": lambda x, n: jnp.argsort(x) + jnp.sort(jnp.abs(x)).astype(jnp.int32),
}
DIVIDED = {
    "a shift with an end": lambda x: lax.ppermute(1 + jnp.abs(x), "dp", [(0, 1), (1, 2), (2, 3)]),
    "a sum": lambda x: lax.psum(jnp.tanh(x), "dp") - lax.axis_index("dp").astype(x.dtype),
    "a sum that is scattered": lambda x: lax.psum_scatter(
        jnp.tanh(lax.all_gather(x, "dp", tiled=True)), "dp", tiled=True
    ),
    "a maximum": lambda x: lax.pmax(jnp.abs(lax.stop_gradient(x)), "dp") + x,
}


def outside(jaxpr: Any, args: Any) -> list[str]:
    """The equations that give numbers outside of the range that is said of them."""
    reads = _Reads([], {})
    walk(jaxpr, [_Made(frozenset((i,))) for i in range(len(args))], reads)
    known, wrong = simulate(jaxpr, [wide(x) if x.dtype.kind == "f" else x for x in args], 10**6, keep=0).known, []
    for var, value in known.items():
        made, numbers = reads.known.get(var), np.asarray(value).ravel()
        if made is not None and numbers.dtype.kind in "biuf":
            numbers = numbers[~np.isnan(numbers)] if numbers.dtype.kind == "f" else numbers
            if not ((made.range.low <= numbers) & (numbers <= made.range.high)).all():
                wrong.append(f"{var}: {made.range} and {numbers}")
    return wrong


def arguments(seed: int, odd: float) -> list[np.ndarray]:
    draws = np.random.default_rng(seed)
    x = draws.normal(size=8).astype(np.float32)
    x[draws.integers(8)] = odd
    return [x, draws.integers(-3, 4, ()).astype(np.int32)]


each_odd = pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 0.0])


@pytest.mark.parametrize("seed", seeds())
@each_odd
@pytest.mark.parametrize("name", ALONE)
def test_each_value_is_in_its_range(name: str, odd: float, seed: int) -> None:
    x, n = arguments(seed, odd)
    assert outside(jax.make_jaxpr(ALONE[name])(x, n), [x, n]) == []


@pytest.mark.parametrize("seed", seeds())
@each_odd
@pytest.mark.parametrize("name", DIVIDED)
def test_each_value_on_each_device_is_in_its_range(name: str, odd: float, seed: int) -> None:
    [x, _] = arguments(seed, odd)
    kernel = spmd.kernel("n/dp -> n/dp", mesh=spmd.make_mesh(dp=4), check="off")(DIVIDED[name])
    assert outside(kernel.trace(x).jaxpr, [x]) == []


def test_the_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that is too narrow is noticed."""
    from spmd.checker import _ranges

    monkeypatch.setitem(_ranges._RANGES, "tanh", lambda eqn, x: _ranges.Range(0, 0.1))
    x = np.linspace(-2, 2, 8).astype(np.float32)
    assert outside(jax.make_jaxpr(jnp.tanh)(x), [x])
