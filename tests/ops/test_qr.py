"""`linalg.qr` of tall matrices, against LAPACK on the whole matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.linalg import qr
from spmd.modes import MODES
from tests.ops.harness import close, make_mesh, pulled, run, wide
from tests.sampler import Sampler, rare, seeds

MESH = {"a": 4, "b": 2}
DTYPES = {"float32": 2e-4, "float64": 1e-10, "complex64": 2e-4, "complex128": 1e-10}


def lapack(x: Any) -> tuple[Any, Any]:
    """NumPy's factors, with a diagonal that is not negative."""
    q, r = np.linalg.qr(np.asarray(x))
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    sign = diagonal / abs(diagonal)
    return q * sign[..., None, :], r * sign.conj()[..., None]


def plain(x: Any) -> tuple[Any, Any]:
    """The same in JAX, which can be differentiated."""
    q, r = jnp.linalg.qr(x)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    sign = diagonal / abs(diagonal).astype(r.dtype)
    return q * jax.lax.stop_gradient(sign)[..., None, :], r * jax.lax.stop_gradient(sign).conj()[..., None]


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    parts = np.random.default_rng(seed).normal(size=(2, *shape))
    return jnp.asarray(parts[0] + 1j * parts[1] if "complex" in dtype else parts[0], dtype)


def weighed(fn: Any, x: Any) -> Any:
    """A number that all of q and r go into, with its gradient."""
    q, r = jax.eval_shape(plain, x)
    of_q, of_r = drawn(q.shape, x.dtype.name, 1), drawn(r.shape, x.dtype.name, 2)

    def total(x: Any) -> Any:
        q, r = fn(x)
        return jnp.sum(q * of_q).real + jnp.sum(r * of_r).real

    return pulled(total, x)


@pytest.mark.parametrize("seed", seeds(3))
def test_values_and_gradients_in_every_mode(seed: int) -> None:
    """Blocks with more rows than columns and with fewer, axes in either order, batches, and axes of size 1."""
    sampler = Sampler(seed)
    mesh = sampler.choice([MESH, {"a": 2, "b": 3}, {"a": 1, "b": 4}])
    rows, batch = sampler.choice([("m/a", "g/b"), ("m/b/a", "g"), ("m/a/b", "g"), ("m/b", "g/a"), ("m", "g/a/b")])
    parts = int(np.prod([mesh[axis] for axis in rows.split("/")[1:]]))
    many = int(np.prod([mesh[axis] for axis in batch.split("/")[1:]]))
    n = int(sampler.choice([1, 2, 5]))
    each = int(sampler.choice([-(-n // parts), n + 2, 7]))
    body = lambda x: qr(x, f"{batch} [{rows}] [n]")
    dtype = list(DTYPES)[seed % 4]
    with wide(dtype):
        x = drawn((many, parts * each, n), dtype, seed)
        against_lapack(body, mesh, batch, rows, x, MODES if seed % 3 == 0 else ("explicit", "reference"))


def against_lapack(body: Any, mesh: Any, batch: str, rows: str, x: Any, modes: Any) -> None:
    tolerance = DTYPES[x.dtype.name]
    wanted, gradient = lapack(x), weighed(plain, x)
    for mode in modes:
        fn = run(body, mesh, [f"{batch} {rows} n"], [f"{batch} {rows} n", f"{batch} k n"], mode)
        for one, other in zip(fn(x), wanted, strict=True):
            close(one, other, tolerance)
        found = weighed(fn, x)
        scale = max(1, float(abs(gradient[1][0]).max()))  # small pivots have large gradients
        close(found[1][0] / scale, gradient[1][0] / scale, 25 * tolerance)


def test_the_comparison_can_fail() -> None:
    x = drawn((6, 2), "float32")
    with pytest.raises(AssertionError):
        close(qr_of(x)[0], -lapack(x)[0])


def qr_of(x: Any) -> tuple[Any, Any]:
    return spmd.kernel("m/a n -> m/a n, k n", mesh=make_mesh({"a": 2}))(lambda x: qr(x, "[m/a] [n]"))(x)


@pytest.mark.parametrize(("m", "sent"), [(32, 3 * 4 * 4 * 4), (8, 3 * 2 * 4 * 4)])
def test_bytes_are_those_of_triangles_or_of_short_blocks(m: int, sent: int) -> None:
    """Over four devices: three triangles of 4 x 4 arrive, or three blocks of 2 x 4; backward one psum of 4 x 4."""
    kernel = spmd.kernel("m/a n -> m/a n, k n", mesh=make_mesh(MESH))(lambda x: qr(x, "[m/a] [n]"))
    x = spmd.shard(drawn((m, 4), "float32"), "m/a n", mesh=make_mesh(MESH))
    forward = spmd.inspect.collectives(kernel, x)
    assert (forward.counts, forward.total_bytes) == ({"all_gather": 1}, sent)
    both = jax.jit(lambda x, q, r: jax.vjp(kernel, x)[1]((q, r)))
    backward = spmd.inspect.collectives(both, x, *kernel(x))
    assert (backward.counts, backward.total_bytes) == ({"all_gather": 1, "psum": 1}, sent + 2 * 64 * 3 // 4)


def test_a_block_whose_columns_depend_on_each_other_has_a_gradient() -> None:
    x = drawn((8, 2), "float32").at[:4].set(1.0)
    close(weighed(qr_of, x)[1][0], weighed(plain, x)[1][0], 1e-3)


@rare
def test_under_vmap_scan_and_remat() -> None:
    one = jax.checkpoint(lambda x: qr(x, "[m/a] [n]"))

    def body(x):  # x: g m n
        q, r = jax.vmap(one)(x)
        _, (scanned, _) = jax.lax.scan(lambda c, x: (c, one(x)), 0, x)
        return q + scanned, r

    x = drawn((3, 8, 2), "float32")
    fn = run(body, MESH, ["g m/a n"], ["g m/a n", "g k n"])
    twice = lambda x: (2 * plain(x)[0], plain(x)[1])
    close(weighed(fn, x)[1][0], weighed(twice, x)[1][0], 1e-3)
