"""Numbers of a program that are sizes of its mesh: they are read so, where the program then agrees on all meshes."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd

FOUR = spmd.make_mesh(dp=4)
BOTH = spmd.make_mesh(dp=2, tp=4)
N = FOUR.shape["dp"]
COUNT = jnp.array(4.0)


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def verdict(pattern: str, body: Any, *args: Any, mesh: Any = FOUR) -> Any:
    """Of a kernel whose first call raises nothing. It may warn that a number may be a size."""
    kernel = spmd.kernel(pattern, mesh=mesh)(body)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s)meant per shard.*Numbers do not tell: it agrees if", UserWarning)
        kernel.trace(*args)
    return spmd.check(kernel, *args).verdict


def shifted(last: int) -> Any:
    """The next row minus each row, and zero behind the last one."""

    def body(x):
        ends = lax.all_gather(x[:1], "dp", tiled=True)
        after = lax.dynamic_slice_in_dim(ends, (lax.axis_index("dp") + 1) % N, 1, 0)
        return jnp.concatenate([x[1:], jnp.where(lax.axis_index("dp") == last, 0.0, after)], 0) - x

    return body


def cross_entropy(block: int) -> Any:
    """With labels that each device compares with the numbers of its own block of the vocabulary."""

    def body(x, w, labels):
        z, low = x @ w.T, lax.axis_index("tp") * block
        own = (labels >= low) & (labels < low + block)
        at = jnp.take_along_axis(z, jnp.where(own, labels - low, 0)[:, None], 1)[:, 0]
        largest = lax.pmax(lax.stop_gradient(z.max(-1)), "tp")
        total = lax.psum(jnp.exp(z - largest[:, None]).sum(-1), "tp")
        return jnp.log(total) + largest - lax.psum(jnp.where(own, at, 0), "tp")

    return body


def rows_of_a_table(t, i):
    """A table that is divided by rows, whose block of eight ends at seven."""
    low = i - lax.axis_index("dp") * 8
    own = (low >= 0) & (low <= 7)
    return lax.psum(jnp.where(own[:, None], t[jnp.clip(low, 0, 7)], 0), "dp")


def normalised(x):
    mean = lax.psum(x.mean(0, keepdims=True), "dp") / N
    variance = lax.psum(((x - mean) ** 2).mean(0, keepdims=True), "dp") / N
    return (x - mean) * lax.rsqrt(variance + 1e-5)


ROWS, WIDE, MANY = struct(8, 5), struct(8, 16), struct(16, 3)
TOKENS = struct(8, 3), struct(16, 3), struct(8, dtype="int32")
LOSS = "b/dp d, v/tp d, b/dp -> b/dp"

RIGHT = {
    "an array": (
        "b/dp c -> c",
        lambda x: lax.psum(x.mean(0), "dp") / COUNT,
        (ROWS,),
        FOUR,
        "4 at a constant",
        "the size",
    ),
    "the size": ("b/dp c -> c", lambda x: lax.psum(x.mean(0), "dp") / N, (ROWS,), FOUR, "4 at", "the size of dp"),
    "at two lines": ("b/dp c -> b/dp c", normalised, (ROWS,), FOUR, "4 at several lines", "the size of dp"),
    "one over it": ("b/dp c -> c", lambda x: lax.psum(x.mean(0) * (1 / N), "dp"), (ROWS,), FOUR, "0.25 at", "one over"),
    "one less": ("b/dp c -> b/dp c", shifted(N - 1), (ROWS,), FOUR, "3 at", "one less than the size of dp"),
    "a block": (LOSS, cross_entropy(4), TOKENS, BOTH, "4 at", "the size of a block along tp"),
    "the end of a block": (
        "v/dp d, s -> s d",
        rows_of_a_table,
        (struct(32, 5), struct(6, dtype="int32")),
        FOUR,
        "7 at",
        "one less than the size of a block along dp",
    ),
    "of one axis of two": (
        "b/dp d/tp -> b/dp",
        lambda x: lax.rsqrt(lax.psum((x * x).mean(-1), "tp") / 4 + 1e-6),
        (WIDE,),
        BOTH,
        "4 at",
        "the size of tp",
    ),
    "of two axes": (
        "b/dp/tp d -> d",
        lambda x: lax.psum(x.mean(0), ("dp", "tp")) / 8,
        (MANY,),
        BOTH,
        "8 at",
        "the size of dp, tp",
    ),
    "two sizes": (
        "b/dp/tp d -> d",
        lambda x: lax.psum(lax.psum(x.mean(0), "tp") / 4, "dp") / 2,
        (MANY,),
        BOTH,
        "2 at",
        "the size of dp and 4 at",
    ),
    "of a mean": (
        "b/dp c -> c",
        lambda x: lax.psum(x.sum(0), "dp") / (N * x.shape[0]),
        (ROWS,),
        FOUR,
        "8 at",
        "the size of dp times that of a block",
    ),
    "of a mean of all": (
        "b/dp d/tp -> scalar",
        lambda x: lax.psum((x * x).sum(), ("dp", "tp")) * (1 / (8 * x.size)),
        (WIDE,),
        BOTH,
        "0.0078125 at",
        "one over the size of dp, tp times that of a block",
    ),
    "a sum of what is equal": (
        "b/dp c, c -> b/dp c",
        lambda x, w: x * w[None] + lax.psum((w * w).sum() / N + 0 * x.sum(), "dp"),
        (ROWS, struct(5)),
        FOUR,
        "4 at",
        "the size of dp",
    ),
}


RING = [(i, (i + 1) % N) for i in range(N)]
CHAIN = [(i + 1, i) for i in range(N - 1)]


def difference(x, ahead: Any, behind: Any) -> Any:
    """The row behind each minus the row ahead of it, as permutations by numbers bring them."""
    above, below = lax.ppermute(x[-1:], "dp", ahead), lax.ppermute(x[:1], "dp", behind)
    wide = jnp.concatenate([above, x, below], 0)
    return wide[2:] - wide[:-2]


@pytest.mark.parametrize("behind", [[(t, s) for s, t in RING], CHAIN], ids=["ring", "chain"])
def test_a_permutation_by_numbers_is_a_shift(behind: Any) -> None:
    found = verdict("b/dp c -> b/dp c", lambda x: difference(x, RING, behind), ROWS)
    assert found.kind == "tested" and "is read as a shift" in str(found), found


@pytest.mark.parametrize(
    "body",
    [
        lambda x: difference(x, [(t, s) for s, t in RING], RING),
        lambda x: x + lax.ppermute(x, "dp", [(0, 3), (1, 2), (2, 0), (3, 1)]),
        lambda x: x + sum(lax.ppermute(x, "dp", [(i, (i + k) % N) for i in range(N)]) for k in range(1, N)),
    ],
    ids=["the other way", "no shift", "a loop over the devices"],
)
def test_what_may_be_meant_for_one_number_of_devices_is_not_tested(body: Any) -> None:
    assert verdict("b/dp c -> b/dp c", body, ROWS).kind == "not tested"


def test_an_index_that_leaves_its_array_on_one_device_proves_nothing() -> None:
    """There JAX takes the last row four times. Types suspect nothing, and reference= tells."""

    def body(x):
        sums = lax.all_gather(x.sum(0), "dp")
        return x / sum(sums[i] for i in range(N))[None]

    kernel = spmd.kernel("b/dp c -> b/dp c", mesh=FOUR)(body)
    found = spmd.check(kernel, ROWS).verdict
    assert found.kind == "not tested" and "an index leaves its array on mesh dp=1" in str(found), found
    assert spmd.check(kernel, ROWS, reference=lambda x: x / x.sum(0)[None]).verdict.kind == "tested"
    assert spmd.check(kernel, ROWS, reference=lambda x: x / x.mean(0)[None]).verdict.kind == "wrong"


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_agrees_if_the_number_is_a_size(name: str) -> None:
    pattern, body, args, mesh, number, what = RIGHT[name]
    found = verdict(pattern, body, *args, mesh=mesh)
    assert found.kind == "not tested", found
    assert f"it agrees if {number}" in str(found) and f"is read as {what}" in str(found), found


WRONG = {
    "half of it": ("b/dp d/tp -> b/dp", lambda x: lax.psum((x * x).mean(-1), "tp") / 2, (WIDE,), BOTH),
    "of another axis": ("b/dp d/tp -> d/tp", lambda x: lax.psum((x * x).mean(0), "dp") / 4, (WIDE,), BOTH),
    "two less": ("b/dp c -> b/dp c", shifted(N - 2), (ROWS,), FOUR),
    "another block": (LOSS, cross_entropy(3), TOKENS, BOTH),
    "a mean of half of it": ("b/dp c -> c", lambda x: lax.psum(x.sum(0), "dp") / (2 * x.shape[0]), (ROWS,), FOUR),
    "a mean of one axis": (
        "b/dp d/tp -> scalar",
        lambda x: lax.psum(x.sum(), ("dp", "tp")) / (4 * x.size),
        (WIDE,),
        BOTH,
    ),
    "a factor beside a forgotten one": ("b/dp c -> c", lambda x: lax.psum(x.mean(0) * 4.0, "dp"), (ROWS,), FOUR),
    "one of two": (
        "b/dp/tp d -> d",
        lambda x: lax.psum(x.mean(0), ("dp", "tp")) / 4,
        (MANY,),
        BOTH,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_wrong(name: str) -> None:
    pattern, body, args, mesh = WRONG[name]
    assert spmd.check(spmd.kernel(pattern, mesh=mesh)(body), *args).verdict.kind == "wrong"


def test_the_factor_of_a_derivative_is_no_size_of_a_block() -> None:
    """Of a square it is 2, which is as many rows as each device has; the gradient is twice too large."""

    @spmd.kernel("f, b/dp f -> f", mesh=spmd.make_mesh(dp=2))
    def gradient(w, x):
        return jax.grad(lambda w: (jnp.sin(x @ w) ** 2).mean())(w)

    assert spmd.check(gradient, struct(3), struct(4, 3)).verdict.kind == "wrong"


def test_a_number_that_equals_a_size_may_hide_a_mistake() -> None:
    """The loss has 0.5, which is one over the size of dp too, and divides by the rows of a block. It is not accepted."""
    body = lambda x: 0.5 * (x * x).sum(1) / x.shape[0]
    kernel = spmd.kernel("b/dp c -> b/dp", mesh=spmd.make_mesh(dp=2))(body)
    found = spmd.check(kernel, ROWS).verdict
    assert found.kind == "not tested" and "it agrees if 0.5 at" in str(found), found


def test_a_size_on_a_mesh_of_ones_is_that_size() -> None:
    """The first call asks numbers on two devices, and the program was written for one."""
    one = spmd.make_mesh(dp=1)

    @spmd.kernel("b/dp c, c -> b/dp c", mesh=one)
    def body(x, w):
        return x * w[None] + lax.psum((w * w).sum() / one.shape["dp"] + 0 * x.sum(), "dp")

    body.trace(ROWS, struct(5))


def test_a_factor_that_a_derivative_makes_is_no_size() -> None:
    """The square's slope is twice its operand: as many times as dp has devices. The gradient is divided once too often."""

    def step(divided: bool) -> Any:
        def body(w, x, y):
            loss = lambda w: spmd.reduce((x @ w - y) ** 2, "b/dp -> scalar", "mean")
            return w - 0.1 * spmd.grad(loss)(w) / (lax.axis_size("dp") if divided else 1)

        return spmd.kernel("d, b/dp d, b/dp -> d", mesh=BOTH)(body)

    structs = struct(6), struct(8, 6), struct(8)
    assert spmd.check(step(True), *structs).verdict.kind == "wrong"
    assert spmd.check(step(False), *structs).verdict.kind == "proved"


@pytest.mark.parametrize("factor", [0.3, 0.5])
def test_a_loop_that_does_not_end_with_another_number(factor: float) -> None:
    """If the half is read as one over dp, the loop does not end on one device. Such a reading does not count."""

    def halved(x):
        start = lax.pcast(jnp.float32(1), ("dp", "tp"), to="varying")
        once = lambda carry: (carry[0] * factor, jnp.abs(carry[0]).max())
        return lax.while_loop(lambda carry: carry[1] > 1e-2, once, (x, start))[0]

    with pytest.raises(spmd.errors.ReplicationError, match="a maximum was done on each"):
        spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=BOTH)(halved).trace(struct(8, 16))
