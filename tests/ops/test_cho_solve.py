"""`linalg.cho_solve` of matrices whose rows are divided, against LAPACK on the whole matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.linalg import cho_solve, cholesky
from spmd.modes import MODES
from tests.ops.harness import blocks, close, make_mesh, pulled, run, wide
from tests.ops.test_cholesky import DTYPES, drawn, positive
from tests.sampler import Sampler, rare, seeds


def plain(lower: Any, b: Any) -> Any:
    """Two triangles, one after the other, in JAX."""
    lower = jnp.tril(lower)
    y = jax.scipy.linalg.solve_triangular(lower, b, lower=True)
    return jax.scipy.linalg.solve_triangular(lower, y, lower=True, trans="C")


@pytest.mark.parametrize("seed", seeds())
def test_values_and_gradients_in_every_mode(seed: int) -> None:
    """Right sides whole, divided and alone; axes in either order and of size 1; the upper triangle is not read."""
    sampler = Sampler(seed)
    mesh = sampler.choice([{"a": 4, "b": 2}, {"a": 2, "b": 3}, {"a": 1, "b": 4}])
    rows, sides = sampler.choice([("n/a", "k/b"), ("n/b/a", "k"), ("n/a/b", "k"), ("n/b", "k/a"), ("n", "k/a")])
    parts = blocks(mesh, rows)
    many = blocks(mesh, sides) * int(sampler.choice([1, 3]))
    dtype = list(DTYPES)[(seed + 1) % 4]
    n = parts * int(sampler.choice([1, 2, 3]))
    x = positive((n,), dtype, seed)
    first = sampler.choice([True, False])  # where the right sides stand
    turned = (lambda b: b) if first else (lambda b: b.T)
    b = turned(drawn((n, many), dtype, seed + 1))
    wanted = turned(np.linalg.solve(x, turned(b)))
    with wide(dtype):
        lower = jnp.asarray(np.linalg.cholesky(x) + np.triu(drawn((n, n), dtype, seed), 1))
        by = drawn(b.shape, dtype, seed + 2)
        expected = pulled(lambda lower, b: turned(plain(lower, turned(b))), lower, b, by=by)
        layout, marked = (f"{rows} {sides}", f"[{rows}] {sides}") if first else (f"{sides} {rows}", f"{sides} [{rows}]")
        body = lambda lower, b: cho_solve(lower, b, f"[{rows}] [m], {marked}")
        for mode in MODES if seed % 3 == 0 else ("explicit", "reference"):
            found = pulled(run(body, mesh, [f"{rows} m", layout], layout, mode), lower, b, by=by)
            close(found[0], jnp.asarray(wanted), 10 * DTYPES[dtype])
            jax.tree.map(lambda x, y: close(x, y, 30 * DTYPES[dtype]), found, expected)


def solve(x: Any, b: Any) -> Any:
    """A whole solution, in a body."""
    return cho_solve(cholesky(x, "[n/a] [m]"), b, "[n/a] [m], [n/a]")


def test_the_comparison_can_fail() -> None:
    x, b = positive((6,), "float32"), drawn((6,), "float32")
    found = run(solve, {"a": 3}, ["n/a m", "n/a"], "n/a")(x, b)
    close(found, np.linalg.solve(x, b), 1e-4)
    with pytest.raises(AssertionError):
        close(found, np.linalg.solve(x.T + np.eye(6, dtype="float32") / 100, b), 1e-4)


def test_bytes_are_those_of_the_docstring() -> None:
    """Over four devices: six psums of 3 x 2 numbers; backward again, and for l two moves of each kind."""
    mesh = make_mesh({"a": 4, "b": 2})
    kernel = spmd.kernel("n/a m, n/a k -> n/a k", mesh=mesh)(lambda x, b: cho_solve(x, b, "[n/a] [m], [n/a] k"))
    lower = spmd.shard(np.linalg.cholesky(positive((12,), "float32")), "n/a m", mesh=mesh)
    b = spmd.shard(drawn((12, 2), "float32"), "n/a k", mesh=mesh)
    size = 4 * 3 * 2
    forward = spmd.inspect.collectives(kernel, lower, b)
    assert (forward.counts, forward.total_bytes) == ({"psum": 6}, 6 * 2 * size * 3 // 4)
    both = jax.jit(lambda lower, b, by: jax.vjp(kernel, lower, b)[1](by))
    backward = spmd.inspect.collectives(both, lower, b, b)
    assert backward.counts == {"psum": 12, "psum_scatter": 2, "all_gather": 2}
    assert backward.total_bytes == 12 * (2 * size * 3 // 4) + 4 * 3 * size
    of_b = jax.jit(lambda lower, b, by: jax.vjp(lambda b: kernel(lower, b), b)[1](by))
    alone = spmd.inspect.collectives(of_b, lower, b, b)  # XLA leaves out the solution, which nobody asked for
    assert (alone.counts, alone.total_bytes) == ({"psum": 6}, forward.total_bytes)


@rare
def test_under_vmap_scan_remat_and_forward() -> None:
    one = jax.checkpoint(lambda lower, b: cho_solve(lower, b, "[n/a] [m], [n/a]"))

    def body(lower: Any, b: Any) -> Any:  # lower: g n m, b: g n
        scanned = jax.lax.scan(lambda c, x: (c, one(*x)), 0, (lower, b))[1]
        return jax.vmap(one)(lower, b) + scanned

    lower = jnp.asarray(np.linalg.cholesky(positive((3, 8), "float32")))
    b = jnp.asarray(drawn((3, 8), "float32"))
    twice = jax.vmap(lambda lower, b: 2 * plain(lower, b))
    fn = run(body, {"a": 4}, ["g n/a m", "g n/a"], "g n/a")
    jax.tree.map(lambda x, y: close(x, y, 1e-3), pulled(fn, lower, b), pulled(twice, lower, b))
    moved = lambda fn: jax.jit(lambda *xs: jax.jvp(fn, xs, xs))(lower, b)[1]
    close(moved(fn), moved(twice), 1e-3)
