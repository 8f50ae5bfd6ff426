"""Differences of two sets of numbers, as a check with a reference tells them: which differ, and what they look like."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd

MESH = spmd.make_mesh(dp=2)
X = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
COUNTS = np.arange(8, dtype=np.int32) + 2**30  # one more is within what rounding allows numbers of this size
ROWS = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: x * 1.0)
NUMBERS = spmd.kernel("b/dp -> b/dp", mesh=MESH)(lambda i: i)

TOLD = {
    "twice": (ROWS, X, lambda x: x / 2, "result: 2 times too large: the size of dp, 20 of 20 numbers"),
    "a third": (ROWS, X, lambda x: x * 3, "result: 3 times too small, 20 of 20"),
    "turned round": (ROWS, X, lambda x: -x, "result: the sign is wrong"),
    "rows in another order": (ROWS, X, lambda x: x[::-1], "result: the same numbers in another order"),
    "two of them": (ROWS, X, lambda x: x.at[1, 2].add(0.5).at[3, 3].add(0.25), "2 of 20 numbers differ, by up to 0.5"),
    "a NaN in place of a number": (ROWS, X, lambda x: x.at[0, 0].set(jnp.nan), "result: 1 of 20 numbers differ"),
    "one more": (NUMBERS, COUNTS, lambda i: i.at[-1].add(1), "result: 1 of 8 numbers differ, by up to 1"),
    "another type": (ROWS, X, lambda x: x.astype("int32"), "result: float64[4, 5], not int32[4, 5]"),
    "a gradient alone": (ROWS, X, jax.lax.stop_gradient, "gradient of args[0]: 20 of 20"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_a_difference_looks_like(name: str) -> None:
    fn, x, reference, text = TOLD[name]
    [finding] = spmd.check(fn, x, reference=reference)
    assert finding.kind == "numbers" and text in finding.got[0]


SAME = {
    "rounded": (ROWS, lambda x: x * (1 + 1e-7)),
    "infinite": (lambda x: jnp.where(ROWS(x) > 0, jnp.inf, x), lambda x: jnp.where(x > 0, jnp.inf, x)),
    "not a number": (lambda x: jnp.where(ROWS(x) > 0, jnp.nan, x), lambda x: jnp.where(x > 0, jnp.nan, x)),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_numbers_do_not_differ(name: str) -> None:
    fn, reference = SAME[name]
    assert not spmd.check(fn, X, reference=reference)


def test_the_gradient_of_a_keyword_is_named() -> None:
    @spmd.kernel("b/dp d, scalar -> b/dp d", mesh=MESH)
    def still(x: Any, scale: Any) -> Any:
        return x * (scale if spmd.axis_size("dp") == 1 else jax.lax.stop_gradient(scale))

    with pytest.raises(spmd.testing.Mismatch, match="gradient of scale "):
        spmd.testing.assert_same_on_any_mesh(still, X, scale=np.float32(2))
