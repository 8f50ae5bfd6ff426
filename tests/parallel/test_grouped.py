"""Rows that move one to one, and products of rows with the matrices of their groups, against loops."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.parallel._dropless import contracted, grouped
from tests.ops.harness import pulled
from tests.sampler import mixed, share

R, G, D, F = 9, 3, 4, 5


def loops(x, w, counts):
    """The same in plain JAX; `counts` are numbers."""
    out, start = [], 0
    for matrix, count in zip(w, counts, strict=True):
        out.append(x[start : start + count] @ matrix)
        start += count
    return jnp.concatenate([*out, jnp.zeros((len(x) - start, w.shape[-1]), x.dtype)])


def example(seed: int, dtype: str = "float32"):
    """Rows behind all groups are zeros."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(R - seed % 3, np.ones(G) / G).astype(np.int32)
    x = rng.normal(size=(R, D)) * (np.arange(R) < counts.sum())[:, None]
    return x.astype(dtype), rng.normal(size=(G, D, F)).astype(dtype), counts


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """Products are made as on GPUs: in tiles."""
    with mock.patch("spmd._compat.runs_on_gpu", return_value=True):
        yield


COUNTS = [[300, 0, 1, 699], [0, 0, 0, 0], [1000, 0, 0, 0], [17, 400, 33, 511], [0, 3, 0, 0]]


@pytest.mark.parametrize(("counts", "dtype"), share(mixed(COUNTS, ["float32", "bfloat16"])))
def test_tiles_have_rows_of_one_group(on_gpu, counts, dtype) -> None:
    """Groups that are empty, that end within a tile and that fill many: forward, backward, and the backward of that."""
    rng, n = np.random.default_rng(7), sum(counts)
    draw = lambda *shape: jnp.asarray(rng.integers(-3, 4, size=shape), dtype)  # whole numbers: sums are exact
    x, y, w = draw(1000, D), draw(1000, F), draw(4, D, F)
    x = jnp.where(jnp.arange(1000)[:, None] < n, x, jnp.zeros((), dtype))
    numbers = jnp.asarray(counts, jnp.int32)
    text = str(jax.make_jaxpr(grouped)(x, w, numbers))
    assert "scan[" in text and "ragged_dot" not in text
    np.testing.assert_array_equal(grouped(x, w, numbers)[:n], loops(x, w, counts)[:n])
    ends = np.cumsum(counts)
    blocks = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    wide = lambda x: np.asarray(x, np.float64)
    sums = np.stack([wide(x[one]).T @ wide(y[one]) for one in blocks])
    np.testing.assert_array_equal(wide(contracted(x, y, numbers)), wide(jnp.asarray(sums, dtype)))
    for a, b in zip(
        pulled(lambda x, w: grouped(x, w, numbers)[:n], x, w)[1],
        pulled(lambda x, w: loops(x, w, counts)[:n], x, w)[1],
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", share(["float32", "bfloat16"]))
def test_values_and_gradients_are_those_of_loops(dtype) -> None:
    x, w, counts = example(2, jnp.dtype(dtype))
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    expected = pulled(lambda x, w: loops(x, w, counts), x, w)
    found = pulled(lambda x, w: grouped(x, w, jnp.asarray(counts)), x, w, by=expected[0])
    assert found[0].dtype == expected[0].dtype
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mapped", share([(0, 0, 0), (0, None, 0), (0, None, None), (None, 0, None), (0, 0, None)]))
def test_any_operand_may_be_mapped(mapped) -> None:
    many = [example(seed) for seed in (3, 6)]  # all rows have a group, so counts may be exchanged
    args = [np.stack([one[i] for one in many]) if dim == 0 else many[0][i] for i, dim in enumerate(mapped)]
    x, w, counts = args
    pick = lambda i, x, w: (x[i] if mapped[0] == 0 else x, w[i] if mapped[1] == 0 else w)
    plain = lambda x, w: jnp.stack([loops(*pick(i, x, w), counts[i] if mapped[2] == 0 else counts) for i in range(2)])
    ours = lambda x, w: jax.vmap(grouped, mapped)(x, w, jnp.asarray(counts))
    (wanted, slopes), (found, gradients) = pulled(plain, x, w), pulled(ours, x, w)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5)


def test_a_map_of_a_map_and_a_second_derivative() -> None:
    many = [[example(seed) for seed in row] for row in ((3, 4, 5), (6, 7, 8))]
    x, counts = (np.stack([np.stack([one[i] for one in row]) for row in many]) for i in (0, 2))
    w = many[0][0][1]
    found = jax.jit(jax.vmap(jax.vmap(grouped, (0, None, 0)), (0, None, 0)))(x, w, counts)
    each = lambda w: jnp.stack([jnp.stack([loops(one, w, its) for one, _, its in row]) for row in many])
    np.testing.assert_allclose(found, jax.jit(each)(w), rtol=1e-5, atol=1e-5)
    x, w, counts = example(2)
    second = lambda fn: jax.jit(jax.grad(lambda w: (jax.grad(lambda x: (fn(x, w) ** 3).sum())(x) ** 2).sum()))(w)
    ours, plain = second(lambda x, w: grouped(x, w, jnp.asarray(counts))), second(lambda x, w: loops(x, w, counts))
    np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-3 * np.abs(plain).max())
