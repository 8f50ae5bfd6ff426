"""Products of rows with the matrices of their groups, in tiles, against loops. As a layer: `test_dropless.py`."""

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


def loops(x, w, counts):
    """The same in plain JAX; `counts` are numbers."""
    out, start = [], 0
    for matrix, count in zip(w, counts, strict=True):
        out.append(x[start : start + count] @ matrix)
        start += count
    return jnp.concatenate([*out, jnp.zeros((len(x) - start, w.shape[-1]), x.dtype)])


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """Products are made as on GPUs: in tiles."""
    with mock.patch("spmd._compat.runs_on_gpu", return_value=True):
        yield


D, F = 4, 5
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
