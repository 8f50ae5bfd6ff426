"""Cosine and sine transforms: against scipy, as matrices and on divided arrays; the collectives by formula."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

import spmd
from spmd import fft
from spmd.modes import MODES
from tests.ops.harness import make_mesh, pulled
from tests.ops.test_fft import FORMULAS, close, kernel, numbers, sample
from tests.sampler import dice, rare, seeds, share

KINDS = ("dct", "idct", "dst", "idst")
NORMS = ("backward", "ortho", "forward")


@functools.cache
def matrix(kind: str, number: int, norm: str, n: int) -> np.ndarray:
    """scipy's transform of n numbers, written out."""
    return np.asarray(getattr(scipy.fft, kind)(np.eye(n), number, norm=norm, axis=0))


def by_matrices(kind: str, number: int, norm: str, x: Any, dims: tuple[int, ...]) -> Any:
    """The transform of whole arrays, by products with scipy's matrices. JAX can differentiate it."""
    for dim in dims:
        by = jnp.asarray(matrix(kind, number, norm, x.shape[dim]), x.real.dtype).astype(x.dtype)
        x = jnp.moveaxis(jnp.tensordot(by, x, axes=(1, dim), precision="highest"), 0, dim)
    return x


@pytest.mark.parametrize("number", share([1, 2, 3, 4]))
@pytest.mark.parametrize("kind", KINDS)
def test_scipy_numbers_the_types(kind: str, number: int) -> None:
    """Every norm, of odd and even sizes, down to the smallest."""
    least = 2 if kind.endswith("dct") and number == 1 else 1
    cases = list(itertools.product(NORMS, (least, 2, 5, 8)))
    whole = {n: np.eye(n, dtype=np.float32) for _, n in cases}
    along = {norm: kernel(kind, "x y -> x ky", make_mesh({"a": 1}), type=number, norm=norm) for norm in NORMS}
    found = jax.jit(lambda whole: [along[norm](whole[n]) for norm, n in cases])(whole)
    for (norm, n), got in zip(cases, found, strict=True):
        np.testing.assert_allclose(got, matrix(kind, number, norm, n).T, rtol=0, atol=4e-6 * n)


@pytest.mark.parametrize("seed", seeds())
def test_sampled(seed: int) -> None:
    mesh, _, pattern, shape, moved, _ = sample(seed)
    draw = dice(seed)
    kind, number, norm = draw.choice(KINDS), draw.choice([1, 2, 3, 4]), draw.choice(NORMS)
    run = kernel(kind, pattern, make_mesh(mesh), type=number, norm=norm)
    rng = np.random.default_rng(seed)
    x, by = (numbers(rng, shape, real=True) for _ in range(2))
    whole = functools.partial(by_matrices, kind, number, norm, dims=moved)
    want, (want_gradient,) = pulled(whole, x, by=by)
    for mode in MODES:
        out, (gradient,) = pulled(getattr(run, mode), x, by=by)
        assert out.dtype == np.float32
        close(out, want)
        close(gradient, want_gradient)


@pytest.mark.parametrize(
    ("mesh", "pattern", "count", "shards"),
    share([f[1:] for f in FORMULAS[::2]]),
    ids=share([f[0] for f in FORMULAS[::2]]),
)
def test_bytes_are_the_formula_in_real_numbers(mesh, pattern: str, count: int, shards: float) -> None:
    mesh = make_mesh(mesh)
    x = jnp.zeros((8, 16, 24, 32)[: len(spmd.Pattern(pattern).inputs[0].dims)])
    run = kernel("dct", pattern, mesh, type=4)
    found = spmd.inspect.collectives(run, x, mesh=mesh)
    shard = x.size * 4 // mesh.size
    assert found.counts == ({"all_to_all": count} if count else {})
    assert found.total_bytes == round(shards * shard)
    back = spmd.inspect.collectives(lambda x, by: jax.vjp(run, x)[1](by), x, run(x), mesh=mesh)
    assert (back.counts, back.total_bytes) == (found.counts, found.total_bytes), "the forward pass is not needed again"


@pytest.mark.parametrize("dtype", share(["bfloat16", "float16", "int32", "bool", "complex64"]))
def test_types_of_elements(dtype: str) -> None:
    mesh = make_mesh({"a": 4})
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (8, 4)), dtype)
    x = x * (1 + 2j) if dtype == "complex64" else x
    out = kernel("dct", "x/a y -> kx y/a", mesh)(x)
    assert out.dtype == (jnp.complex64 if dtype == "complex64" else jnp.float32)
    close(out, matrix("dct", 2, "backward", 8) @ np.asarray(x, np.complex64 if dtype == "complex64" else np.float32))


@rare
def test_inside_transformations_of_jax() -> None:
    mesh = make_mesh({"a": 4})
    x = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
    want = scipy.fft.dst(x, 3, axis=1)

    def one(x):
        return fft.dst(x, "x/a y -> kx y/a", type=3)

    for many in (
        jax.vmap(one),
        lambda x: jax.lax.scan(lambda c, x: (c, one(x)), 0, x)[1],
        jax.checkpoint(jax.vmap(one)),
    ):
        run = spmd.kernel("n x/a y -> n kx y/a", mesh=mesh)(many)
        close(jax.jit(run)(x), want)
        gradient = jax.grad(lambda x, run=run: (run(x) * x).sum())(x)
        close(gradient, want + scipy.fft.dst(np.eye(8, dtype=np.float32), 3, axis=0).T @ x)


def test_walls_and_periods_mix() -> None:
    mesh = make_mesh({"a": 2, "b": 4})
    x = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)

    @spmd.kernel("x/a y/b z -> kx ky/a kz/b", mesh=mesh)
    def channel(u):
        return fft.fft(fft.dct(u, "x/a y/b z -> x/a y/b kz"), "x/a y/b kz -> kx ky/a kz/b")

    close(channel(x), np.fft.fftn(x @ matrix("dct", 2, "backward", 8).T, axes=(0, 1)))
