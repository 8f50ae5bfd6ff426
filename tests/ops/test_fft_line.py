"""A transform in two factors over divided blocks, against NumPy on the whole dimension."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from spmd.ops._fft_walls import factors, in_two_factors, transformed
from tests.ops.harness import counts, run


def test_factors_are_as_the_exchanges_need_them():
    """The first is a multiple of the devices. The second is one if it can be, and then the two are as equal as can be."""
    for parts in range(1, 9):
        for n in range(parts, 40 * parts, parts):
            first, second = factors(n, parts)
            assert first * second == n and first % parts == 0
            pairs = [(m, n // m) for m in range(1, n + 1) if n % m == 0 and m % parts == 0 and n // m % parts == 0]
            if pairs:
                assert second % parts == 0
                assert max(first, second) == min(max(pair) for pair in pairs)
            else:
                assert first == parts


@pytest.mark.parametrize("dims", [[2], [0], [1, 0], [0, 2, 1]], ids=str)
def test_any_dimensions_in_any_order(dims):
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.complex64)
    np.testing.assert_allclose(transformed(jnp.fft.fftn, jnp.asarray(x), dims), np.fft.fftn(x, axes=dims), atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "axes", "n", "inverse"),
    [
        ({"a": 4}, "a", 64, False),  # both factors are divided
        ({"a": 2, "b": 3}, "a/b", 72, True),
        ({"a": 4}, "a", 12, False),  # one row on each device, and the second factor does not divide: 4 * 3
        ({"a": 3}, "a", 15, True),
        ({"a": 4}, "a", 4, True),  # one number on each device
        ({"a": 4}, "a", 28, False),  # more rows in a block than others
    ],
)
def test_a_line_is_transformed_in_place(sizes, axes, n, inverse):
    names = tuple(axes.split("/"))
    rng = np.random.default_rng(n)
    x = (rng.normal(size=(2, n)) + 1j * rng.normal(size=(2, n))).astype(np.complex64)
    parts = math.prod(sizes.values())

    def body(x):
        return in_two_factors(x, factors(n, parts), names, inverse=inverse, norm="ortho")

    layout = f"p n/{axes}"
    want = (np.fft.ifft if inverse else np.fft.fft)(x, norm="ortho")
    np.testing.assert_allclose(run(body, sizes, [layout], layout)(x), want, atol=1e-5)
    if n == 64:
        assert counts(body, sizes, [layout], layout, x) == {"all_to_all a": 3 * 4}, "three exchanges of four pieces"
