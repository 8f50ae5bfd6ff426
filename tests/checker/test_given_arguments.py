"""What numbers say of arguments that have a property: sorted ones, masks, matrices; and where they are not numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.errors import ReplicationError

MESH = spmd.make_mesh(dp=4)
SORTED = np.sort(np.random.default_rng(0).normal(size=32)).astype(np.float32)


def kernel(pattern: str) -> Any:
    return spmd.kernel(pattern, mesh=MESH)


@kernel("n/dp -> scalar")
def least(x: Any) -> Any:
    return lax.pmin(x[0], "dp")


def test_what_is_right_for_sorted_numbers_is_no_error() -> None:
    """The first of each block is its least number, if the numbers are sorted."""
    with pytest.warns(UserWarning, match="agrees for arguments like these, which may be sorted"):
        found = least(SORTED)
    np.testing.assert_array_equal(found, SORTED.min())
    verdict = spmd.check(least, SORTED).verdict
    assert verdict.kind == "not tested" and "and not for others" in str(verdict)
    assert spmd.check(least, SORTED, reference=lambda x: x[0]).verdict.kind in ("proved", "tested")
    with pytest.raises(ReplicationError):  # of a struct nobody says that it is sorted
        kernel("n/dp -> scalar")(least.__wrapped__).trace(jax.ShapeDtypeStruct(SORTED.shape, "float32"))


def test_a_mask_stays_a_mask() -> None:
    @kernel("n/dp, n/dp -> scalar")
    def chosen(x: Any, mask: Any) -> Any:
        return lax.psum(jnp.where(mask == 1, x, 0).sum(), "dp")

    mask = (np.arange(32) % 3 > 0).astype(np.float32)
    reference = lambda x, mask: jnp.where(mask > 0.5, x, 0).sum()
    assert spmd.check(chosen, SORTED, mask, reference=reference).verdict.kind in ("proved", "tested")


def test_a_mistake_shows_in_numbers_that_begin_alike() -> None:
    @kernel("n/dp -> n/dp")
    def centred(x: Any) -> Any:
        return x - lax.psum(x.mean(), "dp")

    for x in (np.ones(8, np.float32), np.arange(8, dtype=np.float32), SORTED):
        assert spmd.check(centred, x).verdict.kind == "wrong"


@kernel("n/dp -> n/dp")
def first_block(x: Any) -> Any:
    whole = jnp.sqrt(lax.all_gather(x, "dp", tiled=True) - 100)
    return whole[: x.shape[0]]


def test_what_is_nan_is_not_compared() -> None:
    """No number that is drawn is above 100. Then each result is NaN, with one device and with four."""
    verdict = spmd.check(first_block, jax.ShapeDtypeStruct((8,), "float32")).verdict
    assert "all numbers of result are NaN, or rounding, for the arguments" in str(verdict)
    assert verdict.kind in ("wrong", "not tested")
    given = 200 + np.arange(8, dtype=np.float32) ** 2
    assert "differ" in str(spmd.check(first_block, given).verdict)
    with pytest.raises(ReplicationError):
        first_block(given)


def test_logarithms_have_a_draw() -> None:
    @kernel("n/dp -> scalar")
    def entropy(x: Any) -> Any:
        return lax.psum(jnp.log(x).mean(), "dp")

    assert spmd.check(entropy, jax.ShapeDtypeStruct((8,), "float32")).verdict.kind == "wrong"


@pytest.mark.parametrize("call", [lambda k, x: jax.jit(k).lower(x), lambda k, x: jax.make_jaxpr(k)(x)])
def test_the_first_call_after_a_check_looks_too(call: Any) -> None:
    @kernel("n/dp -> n/dp")
    def ordered(x: Any) -> Any:
        return jnp.sort(x)

    assert spmd.check(ordered, jax.ShapeDtypeStruct((8,), "float32"))
    with pytest.raises(ReplicationError):
        call(ordered, np.arange(8.0, dtype=np.float32))


def test_sums_of_integers_keep_their_dtype() -> None:
    @kernel("n/dp -> n")
    def inverse(order: Any) -> Any:
        start = lax.axis_index("dp") * order.size
        own = jnp.zeros(spmd.size("n"), order.dtype).at[order].set(start + jnp.arange(order.size, dtype=order.dtype))
        return lax.psum(own, "dp")

    order = np.random.default_rng(1).permutation(16).astype(np.int32)
    plain = lambda order: jnp.argsort(order).astype(jnp.int32)
    assert spmd.check(inverse, order, reference=plain).verdict.kind == "tested"


@pytest.mark.parametrize("wrong", [False, True])
def test_each_kind_of_struct_has_a_draw(wrong: bool) -> None:
    """Keys, numbers with an imaginary part, masks and counts."""

    @kernel("k, n/dp, n/dp, n/dp -> n/dp, scalar")
    def mixed(keys: Any, mask: Any, c: Any, i: Any) -> Any:
        noise = jax.random.normal(keys[0], ())
        total = jnp.where(mask, (c * jnp.conj(c)).real, noise) + i.astype(jnp.float32)
        return total, lax.psum(total.sum(), "dp") / (lax.axis_size("dp") if wrong else 1)

    structs = [jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))]
    structs += [jax.ShapeDtypeStruct((32,), dtype) for dtype in ("bool", "complex64", "int32")]
    assert spmd.check(mixed, *structs).verdict.kind in (("wrong",) if wrong else ("proved", "tested"))


@pytest.mark.filterwarnings("error")
def test_arrays_of_numpy_have_the_dtype_that_jax_gives_them() -> None:
    double = kernel("b/dp d -> b/dp d")(lambda x: 2 * x)
    for dtype in (np.float64, np.int64, np.complex128):
        assert spmd.check(double, np.ones((4, 6), dtype)).verdict.kind == "proved"


@pytest.mark.parametrize("counts", [np.full(8, 7), np.array([6, 3, 4, 5, 1, 8, 2, 7]), np.ones(8, bool)])
def test_counts_that_are_alike_on_all_devices_hide_nothing(counts: Any) -> None:
    """A mean of the means of devices is right where their counts are equal. Placeholders are, and luck may do it."""

    @kernel("n/dp, n/dp -> scalar")
    def mean_of_means(x: Any, counts: Any) -> Any:
        return lax.pmean(jnp.where(counts.astype(bool), x, 0).sum() / counts.sum().astype(x.dtype), "dp")

    @kernel("n/dp, n/dp -> scalar")
    def right(x: Any, counts: Any) -> Any:
        return lax.psum(jnp.where(counts.astype(bool), x, 0).sum(), "dp") / lax.psum(counts.sum(), "dp").astype(x.dtype)

    x = np.ones(8, np.float32)
    found = spmd.check(mean_of_means, x, counts).verdict
    assert found.kind == "not tested"
    assert "agrees for arguments like these" in str(found)
    assert spmd.check(right, x, counts).verdict.kind in ("proved", "tested")


def _settling(product: Any, dot: Any) -> Any:
    """BiCGSTAB, which settles in as many steps as there are numbers, or never: then the last digits decide."""

    def solve(b: Any, c: Any) -> Any:
        def step(carry: Any) -> Any:
            x, r, p, rho, k = carry
            v = product(p, c)
            alpha = rho / dot(b, v)
            s = r - alpha * v
            t = product(s, c)
            omega = dot(t, s) / (dot(t, t) + 1e-30)
            x, r = x + alpha * p + omega * s, s - omega * t
            new = dot(b, r)
            return x, r, r + new / rho * alpha / (omega + 1e-30) * (p - omega * v), new, k + 1

        going = lambda carry: (dot(carry[1], carry[1]) > 1e-9) & (carry[4] < 30)
        return lax.while_loop(going, step, (jnp.zeros_like(b), b, b, dot(b, b), 0))[0]

    return solve


def test_what_rounding_makes_is_no_mistake() -> None:
    """Given numbers that are positive may be drawn with any sign, and then the matrix is almost singular."""

    def product(u: Any, c: Any) -> Any:
        pairs = [(k, k + 1) for k in range(lax.axis_size("dp") - 1)]
        left = lax.ppermute(u[-1:], "dp", pairs)
        right = lax.ppermute(u[:1], "dp", [pair[::-1] for pair in pairs])
        near = jnp.concatenate([left, u, right])
        return (2 + c) * u - 1.3 * near[:-2] - 0.7 * near[2:]

    total = lambda a, b: lax.psum(a @ b, "dp")
    b, c = (np.asarray(jax.random.normal(jax.random.key(i), (16,)), np.float32) / 2 for i in (0, 1))
    given = b, np.abs(c) + np.float32(0.5)
    assert spmd.check(kernel("n/dp, n/dp -> n/dp")(_settling(product, total)), *given).verdict.kind == "tested"
    right = _settling(product, total)
    wrong = kernel("n/dp, n/dp -> n/dp")(lambda b, c: right(b, c) / lax.pmean(b @ b, "dp"))
    assert spmd.check(wrong, *given).verdict.kind == "wrong"


def test_numbers_that_are_zero_but_for_rounding_are_no_mistake() -> None:
    """The sum of a softmax is one, whatever it is given. Its gradient is what rounding leaves."""
    right = kernel("b d/dp -> b d/dp")(lambda x: spmd.softmax(x, "b [d/dp]"))
    x = jax.ShapeDtypeStruct((4, 16), "float32")
    verdict = spmd.check(jax.grad(lambda x: right(x).sum()), x).verdict
    assert verdict.kind == "not tested" and "rounding" in str(verdict)
