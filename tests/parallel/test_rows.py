"""Rows that move one to one, and products of rows with the matrices of their groups, against loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.parallel._rows import grouped

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
    return jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=(G, D, F)), dtype), counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_loops(dtype) -> None:
    x, w, counts = example(2, dtype)
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    found, pull = jax.vjp(lambda x, w: grouped(x, w, jnp.asarray(counts)), x, w)
    expected, its_pull = jax.vjp(lambda x, w: loops(x, w, counts), x, w)
    assert found.dtype == expected.dtype
    for a, b in zip((found, *pull(expected)), (expected, *its_pull(expected)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, 0), (0, None, None), (None, 0, None), (0, 0, None)])
def test_any_operand_may_be_mapped(mapped) -> None:
    many = [example(seed) for seed in (3, 6)]  # all rows have a group, so counts may be exchanged
    args = [
        jnp.stack([one[i] for one in many]) if dim == 0 else jnp.asarray(many[0][i]) for i, dim in enumerate(mapped)
    ]
    x, w, counts = args
    pick = lambda i: [np.asarray(a[i]) if dim == 0 else np.asarray(a) for a, dim in zip(args, mapped, strict=True)]
    loss = lambda x, w: (jax.vmap(grouped, mapped)(x, w, counts) ** 2).sum()
    found, gradients = jax.vmap(grouped, mapped)(*args), jax.grad(loss, (0, 1))(x, w)
    for i in range(2):
        np.testing.assert_allclose(found[i], loops(*pick(i)), rtol=1e-5, atol=1e-5)
    plain = lambda x, w: sum(
        (loops(*(a[i] if dim == 0 else a for a, dim in zip((x, w), mapped[:2], strict=True)), pick(i)[2]) ** 2).sum()
        for i in range(2)
    )
    for a, b in zip(gradients, jax.grad(plain, (0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_map_of_a_map_and_a_second_derivative() -> None:
    many = [[example(seed) for seed in row] for row in ((3, 4, 5), (6, 7, 8))]
    x, counts = (jnp.stack([jnp.stack([one[i] for one in row]) for row in many]) for i in (0, 2))
    w = many[0][0][1]
    found = jax.vmap(jax.vmap(grouped, (0, None, 0)), (0, None, 0))(x, w, counts)
    for i, row in enumerate(many):
        for j, (one, _, its_counts) in enumerate(row):
            np.testing.assert_allclose(found[i, j], loops(one, w, its_counts), rtol=1e-5, atol=1e-5)
    x, w, counts = example(2)
    second = lambda fn: jax.grad(lambda w: (jax.grad(lambda x: (fn(x, w) ** 3).sum())(x) ** 2).sum())(w)
    ours, plain = second(lambda x, w: grouped(x, w, jnp.asarray(counts))), second(lambda x, w: loops(x, w, counts))
    np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-3 * np.abs(plain).max())
