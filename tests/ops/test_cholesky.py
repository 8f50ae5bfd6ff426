"""`linalg.cholesky` of matrices whose rows are divided, against LAPACK on the whole matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.linalg import cho_solve, cholesky
from spmd.modes import MODES
from tests.ops.harness import blocks, close, make_mesh, pulled, run, wide
from tests.sampler import Sampler, rare, seeds

DTYPES = {"float32": 1e-4, "float64": 1e-11, "complex64": 1e-4, "complex128": 1e-11}


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    parts = np.random.default_rng(seed).normal(size=(2, *shape))
    return (parts[0] + 1j * parts[1] if "complex" in dtype else parts[0]).astype(dtype)


def positive(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    x = drawn((*shape, shape[-1]), dtype, seed)
    return (x @ x.conj().swapaxes(-1, -2) / shape[-1] + np.eye(shape[-1])).astype(dtype)


def plain(x: Any) -> Any:
    """JAX's own of the matrix that the lower triangle means."""
    lower = jnp.tril(x, -1)
    diagonal = jnp.tril(jnp.triu(x)).real.astype(x.dtype)
    return jnp.linalg.cholesky(lower + jnp.swapaxes(lower, -1, -2).conj() + diagonal)


@pytest.mark.parametrize("seed", seeds(3))
def test_values_and_gradients_in_every_mode(seed: int) -> None:
    """Blocks of one row and more, batches, axes in either order and of size 1; the upper triangle is not read."""
    sampler = Sampler(seed)
    mesh = sampler.choice([{"a": 4, "b": 2}, {"a": 2, "b": 3}, {"a": 1, "b": 4}])
    rows, batch = sampler.choice([("n/a", "g/b"), ("n/b/a", "g"), ("n/a/b", "g"), ("n/b", "g/a"), ("n", "g/a/b")])
    parts = blocks(mesh, rows)
    many = blocks(mesh, batch)
    dtype = list(DTYPES)[seed % 4]
    n = parts * int(sampler.choice([1, 2, 3]))
    exact = positive((many, n), dtype, seed)
    wanted = np.linalg.cholesky(exact)
    with wide(dtype):
        weights = drawn(exact.shape, dtype, seed + 1)
        x = jnp.asarray(exact + np.triu(drawn(exact.shape, dtype, seed), 1))
        expected = pulled(plain, x, by=weights)
        for mode in MODES if seed % 3 == 0 else ("explicit", "reference"):
            layout = f"{batch} {rows} m"
            fn = run(lambda x: cholesky(x, f"{batch} [{rows}] [m]"), mesh, [layout], layout, mode)
            found = pulled(fn, x, by=weights)
            close(found[0], jnp.asarray(wanted), DTYPES[dtype])
            jax.tree.map(lambda x, y: close(x, y, 10 * DTYPES[dtype]), found, expected)


def test_the_comparison_can_fail() -> None:
    x = positive((6,), "float32")
    found = run(lambda x: cholesky(x, "[n/a] [m]"), {"a": 3}, ["n/a m"], "n/a m")(x)
    with pytest.raises(AssertionError):
        close(found, np.linalg.cholesky(x + np.eye(6, dtype="float32") / 100), 1e-4)


def test_the_gradient_by_finite_differences() -> None:
    """With float64: of log det x, of which l has half, in the lower triangle."""
    with jax.enable_x64(True):
        x, step = positive((6,), "float64"), 1e-6
        fn = run(lambda x: cholesky(x, "[n/a] [m]"), {"a": 3}, ["n/a m"], "n/a m")
        total = jax.jit(lambda x: jnp.sum(jnp.log(jnp.diagonal(fn(x)))))
        gradient = jax.jit(jax.grad(total))(x)
        for at in ((0, 0), (4, 1), (5, 4), (1, 4)):
            moved = np.zeros_like(x)
            moved[at] = step
            np.testing.assert_allclose((total(x + moved) - total(x - moved)) / (2 * step), gradient[at], atol=1e-8)


def test_bytes_are_those_of_the_docstring() -> None:
    """Over four devices, three times: a psum of a square of 3 x 3, and the squares of three others. Backward these
    again, summed there, and a psum."""
    mesh = make_mesh({"a": 4})
    kernel = spmd.kernel("n/a m -> n/a m", mesh=mesh)(lambda x: cholesky(x, "[n/a] [m]"))
    x = spmd.shard(positive((12,), "float32"), "n/a m", mesh=mesh)
    square = 4 * 9
    summed = 2 * square * 3 // 4
    forward = spmd.inspect.collectives(kernel, x)
    assert forward.counts == {"all_gather": 3, "psum": 3}
    assert forward.total_bytes == 3 * (summed + 3 * square)
    both = jax.jit(lambda x, by: jax.vjp(kernel, x)[1](by))
    backward = spmd.inspect.collectives(both, x, x)
    assert backward.counts == {"all_gather": 6, "psum_scatter": 3, "psum": 6}
    assert backward.total_bytes == 3 * square * (3 + 3 + 3) + 6 * summed


@rare
def test_the_program_grows_with_the_logarithm_of_the_devices() -> None:
    """Of the triangle, its solve and the gradients of both: one loop more for twice the devices."""
    lines: dict[int, int] = {}
    for n in (4, 8):
        kernel = spmd.kernel("n/a m, n/a -> n/a", mesh=make_mesh({"a": n}))
        solve = kernel(lambda x, b: cho_solve(cholesky(x, "[n/a] [m]"), b, "[n/a] [m], [n/a]"))
        both = lambda x, b, solve=solve: jax.vjp(solve, x, b)[1](b)
        lines[n] = len(jax.jit(both).lower(np.eye(2 * n), np.ones(2 * n)).as_text().splitlines())
    assert lines[8] < 1.5 * lines[4]  # a program of its own for each step: 1.8 times


def test_a_matrix_that_is_not_positive_has_nan() -> None:
    x = positive((8,), "float32") - 5 * np.diag(np.arange(8) == 5).astype("float32")
    found = np.asarray(run(lambda x: cholesky(x, "[n/a] [m]"), {"a": 4}, ["n/a m"], "n/a m")(x))
    assert np.isnan(found[5, 5]) and np.isnan(found[7]).any()
    np.testing.assert_allclose(found[:4, :4], np.linalg.cholesky(x[:4, :4]), rtol=1e-5)


@rare
def test_under_vmap_scan_and_remat() -> None:
    one = jax.checkpoint(lambda x: cholesky(x, "[n/a] [m]"))

    def body(x: Any) -> Any:  # x: g n m
        return jax.vmap(one)(x) + jax.lax.scan(lambda c, x: (c, one(x)), 0, x)[1]

    x = jnp.asarray(positive((3, 8), "float32"))
    found = pulled(run(body, {"a": 4}, ["g n/a m"], "g n/a m"), x)
    jax.tree.map(lambda x, y: close(x, y, 1e-4), found, pulled(lambda x: 2 * plain(x), x))


@rare
def test_derivatives_forward_and_second() -> None:
    """Along a direction; the gradient of that; and of the gradient, both ways. Of complex numbers and a batch."""
    x = jnp.asarray(positive((2, 6), "complex64"))
    along, by = (jnp.asarray(drawn(x.shape, "complex64", seed)) for seed in (1, 2))

    def every(fn: Any) -> Any:
        slope = lambda x: jax.jvp(fn, (x,), (along,))[1]
        gradient = jax.grad(lambda x: jnp.sum((fn(x) * by).real ** 3))
        of_slope = jax.grad(lambda x: jnp.sum((slope(x) * by).real))
        of_gradient = jax.grad(lambda x: jnp.sum((gradient(x) * along).real))
        return jax.jit(lambda x: (slope(x), of_slope(x), jax.jvp(gradient, (x,), (along,))[1], of_gradient(x)))(x)

    fn = run(lambda x: cholesky(x, "g [n/a] [m]"), {"a": 3}, ["g n/a m"], "g n/a m")
    jax.tree.map(lambda found, wanted: close(found, wanted, 1e-3), every(fn), every(plain))


@rare
def test_a_derivative_forward_sends_three_times_as_much() -> None:
    kernel = spmd.kernel("n/a m -> n/a m", mesh=make_mesh({"a": 4}))(lambda x: cholesky(x, "[n/a] [m]"))
    x = positive((8,), "float32")
    both = spmd.inspect.collectives(jax.jit(lambda x, along: jax.jvp(kernel, (x,), (along,))), x, x)
    kinds = both.by_kind()
    assert (both.counts["all_gather"], kinds["all_gather"].total_bytes) == (9, 9 * 3 * 16)
    assert 8 * 24 <= kinds["psum"].total_bytes <= 9 * 24  # XLA leaves out what is there twice
