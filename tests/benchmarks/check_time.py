"""What `spmd.check` costs, in traces of the program: `python -m tests.benchmarks.check_time`.

A trace is `jax.jit(fn).trace(...)` of the same program with its gradient, where there is one. Both are seconds of CPU,
and of each the least of two, after a first one that fills JAX's caches.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import tests.conftest  # noqa: F401  eight devices, strict JAX
from spmd import check, kernel, make_mesh, shift
from spmd._text import Table

_FLOAT = jnp.float32


def _heat(steps: int) -> tuple[Any, list[Any]]:
    """A field of one dimension whose ends are exchanged in each step."""

    @kernel("x/dp -> x/dp", mesh=make_mesh(dp=8))
    def heat(u: Any) -> Any:
        def step(u: Any, _: Any) -> tuple[Any, None]:
            left, right = (shift(u[-1:], "[k/dp]", 1), shift(u[:1], "[k/dp]", -1))
            wide = jnp.concatenate([left, u, right])
            return u + 0.1 * (wide[2:] - 2 * u + wide[:-2]), None

        return jax.lax.scan(step, u, None, length=steps)[0]

    return heat, [jax.ShapeDtypeStruct((32,), _FLOAT)]


def _recurrence(layers: int, tokens: int) -> tuple[Any, list[Any]]:
    """Layers of a state that decays from token to token, over a batch that is divided and a width that is."""

    @kernel("l d/tp, l d/tp f, b/dp t d/tp -> b/dp t d/tp", mesh=make_mesh(dp=2, tp=4))
    def recurrence(decays: Any, weights: Any, x: Any) -> Any:
        def layer(x: Any, parts: Any) -> tuple[Any, None]:
            decay, weight = parts

            def token(state: Any, row: Any) -> tuple[Any, Any]:
                state = jax.nn.sigmoid(decay)[None] * state + row
                return state, state * jax.nn.silu(weight.sum(-1))[None]

            _, out = jax.lax.scan(token, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
            return x + out.swapaxes(0, 1), None

        return jax.lax.scan(layer, x, (decays, weights))[0]

    return recurrence, [jax.ShapeDtypeStruct(s, _FLOAT) for s in ((layers, 8), (layers, 8, 2), (4, tokens, 8))]


def _unrolled(layers: int) -> tuple[Any, list[Any]]:
    """Layers of products, written out, with the sum of each."""

    @kernel("l d f/tp, l f/tp d, b/dp d -> b/dp d", mesh=make_mesh(dp=2, tp=4))
    def unrolled(up: Any, down: Any, x: Any) -> Any:
        for i in range(layers):
            h = jax.nn.gelu(x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ up[i])
            x = x + jax.lax.psum(h @ down[i], "tp")
        return x

    return unrolled, [jax.ShapeDtypeStruct(s, _FLOAT) for s in ((layers, 4, 8), (layers, 8, 4), (4, 4))]


def _solver(steps: int) -> tuple[Any, list[Any]]:
    """A loop that ends when a norm is small."""

    @kernel("x/dp -> x/dp", mesh=make_mesh(dp=8))
    def relaxed(b: Any) -> Any:
        def step(state: Any) -> Any:
            u, i = state
            return u + 0.01 * (b - u), i + 1

        def goes_on(state: Any) -> Any:
            u, i = state
            return (jax.lax.psum(((b - u) ** 2).sum(), "dp") > 1e-12) & (i < steps)

        return jax.lax.while_loop(goes_on, step, (jnp.zeros_like(b), 0))[0]

    return relaxed, [jax.ShapeDtypeStruct((32,), _FLOAT)]


CASES: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "heat equation, 500 steps in a scan": lambda: _heat(500),
    "24 layers of a scan over 256 tokens": lambda: _recurrence(24, 256),
    "48 layers, written out": lambda: _unrolled(48),
    "4 layers, written out": lambda: _unrolled(4),
    "a loop of 500 rounds that asks a norm": lambda: _solver(500),
}


def _seconds(make: Callable[[], tuple[Any, list[Any]]], fn: Callable[..., Any]) -> float:
    """Seconds of CPU of the second and third time, each time with functions that JAX has not seen."""
    found = []
    for _ in range(3):
        program, given = make()
        began = time.process_time()
        fn(program, given)
        found.append(time.process_time() - began)
    return min(found[1:])


def _trace(program: Any, given: list[Any]) -> Any:
    before, os.environ["SPMD_CHECK"] = os.environ.get("SPMD_CHECK", "quick"), "off"
    pull = lambda *xs: jax.vjp(program, *xs)[1](jnp.ones_like(xs[-1]))
    try:
        return jax.jit(pull).trace(*given)
    except ValueError:  # a while loop has no gradient
        return jax.jit(program).trace(*given)
    finally:
        os.environ["SPMD_CHECK"] = before


def rows() -> list[tuple[str, str, str, str, str]]:
    """Program, seconds of a trace with its gradient, and of a check, their ratio, and the verdict."""
    found = []
    for name, make in CASES.items():
        one, whole = _seconds(make, _trace), _seconds(make, lambda program, given: check(program, *given))
        program, given = make()
        verdict = check(program, *given).verdict
        found.append((name, f"{one:.2f}", f"{whole:.2f}", f"{whole / one:.1f}", str(verdict)))
    return found


def main() -> None:
    print(Table(rows(), ("program", "trace, s", "check, s", "traces", "verdict")).text())


if __name__ == "__main__":
    main()
