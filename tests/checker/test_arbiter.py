"""A program on its mesh and where nothing is divided, in numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checker import tried
from spmd.checker._arbiter import collecting, first_body

SIZES = {"dp": 2, "tp": 4}
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def kernel(pattern: str, body: Any, **sizes: int) -> Any:
    return spmd.kernel(pattern, mesh=spmd.make_mesh(**(sizes or SIZES)), check="off")(body)


def trial(pattern: str, body: Any, *args: Any) -> Any:
    return tried(kernel(pattern, body), args or (X,), spmd.make_mesh(**SIZES), SIZES)


def test_what_agrees() -> None:
    found = trial("b/dp d/tp -> b/dp", lambda x: jnp.sqrt(lax.psum((x * x).sum(1), "tp")))
    assert found.agrees and found.gradients and not found.wrong


@pytest.mark.parametrize("struct", [False, True])
def test_what_differs_and_by_which_factor(struct: bool) -> None:
    x = jax.ShapeDtypeStruct(X.shape, X.dtype) if struct else X
    found = trial("b/dp d/tp -> b/dp", lambda x: lax.psum(x.mean(1), "tp"), x)
    assert found.wrong and not found.agrees and found.sizes == SIZES
    assert {round(one.factor) for one in found.differences} == {4}
    assert "test_arbiter.py" in found.line


def test_a_gradient_alone_may_differ() -> None:
    """A rule of one's own that averages what it should add."""

    @jax.custom_vjp
    def product(x, w):
        return x * w

    product.defvjp(lambda x, w: (x * w, (x, w)), lambda kept, g: (g * kept[1], lax.pmean(g * kept[0], "tp")))
    found = trial(
        "d/tp, d/tp -> d/tp", lambda x, w: product(x, lax.pcast(lax.pmean(w, "tp"), "tp", to="varying")), X[0], X[1]
    )
    assert found.wrong


def test_a_program_without_a_derivative() -> None:
    found = trial("b/dp d/tp -> b/dp", lambda x: lax.pmax(x.max(1), "tp"))
    assert found.agrees and not found.gradients
    assert trial("b/dp d/tp -> b/dp", lambda x: lax.pmax(x.sum(1), "tp")).wrong


def test_a_branch_that_one_draw_hides() -> None:
    def body(x):
        return jnp.where((jnp.abs(x) < 2.8).all(), x, 0.0)

    assert trial("b/dp d/tp -> b/dp d/tp", body).wrong


def test_what_means_to_depend_on_the_sizes_of_axes() -> None:
    found = trial("b d/tp -> b d/tp", lambda x: spmd.shift(x, "b [d/tp]", 1))
    assert found.meant and found.differences and not found.wrong and not found.agrees


def test_what_fails_where_nothing_is_divided() -> None:
    found = trial("b/dp d/tp -> b/dp d/tp", lambda x: x.reshape(4, 4) * 2.0 if x.shape == (4, 4) else 1 / 0)
    assert found.fails and "fails on mesh dp=1, tp=1 at " in found.why and "ZeroDivisionError" in found.why
    why = trial("b/dp -> b/dp", lambda x: 1 / 0, X[:, 0]).why
    assert why.startswith("it fails on mesh dp=2, tp=4 at tests/checker/test_arbiter.py:"), why
    assert why.endswith("ZeroDivisionError: division by zero")


def test_stages_of_a_pipeline_are_compared_on_whole_arrays() -> None:
    found = trial("t/tp d -> t/tp d", lambda x: spmd.shift(jnp.tanh(x), "[t/tp] d", 1)[: x.shape[0]], X)
    assert not found.wrong


def test_what_has_a_mesh_of_its_own() -> None:
    own = jax.shard_map(lambda x: x * 2, mesh=spmd.make_mesh(**SIZES), in_specs=P("dp"), out_specs=P("dp"))
    found = tried(own, (X,), spmd.make_mesh(**SIZES), SIZES)
    assert found.why == "a jax.shard_map has a mesh of its own: reference= or build= tells what it means"


def test_one_device_has_nothing_to_be_compared_with() -> None:
    assert "one device" in tried(jnp.sin, (X,), spmd.make_mesh(dp=1), {"dp": 1}).why


def test_what_is_meant_per_shard_may_differ() -> None:
    def body(x):
        with spmd.per_shard("runs of their own"):
            return jnp.sort(x)

    assert trial("d/tp -> d/tp", body, X[0]).why == "a part of it is meant per shard"
    same = lambda x: spmd.per_shard("each element alone")(jnp.tanh)(x)
    assert trial("d/tp -> d/tp", same, X[0]).agrees


def test_devices_that_part() -> None:
    def body(x):
        return lax.pmean(
            lax.cond(lax.axis_index("tp") > 0, lambda: varied(lax.psum(varied(x), "tp")), lambda: varied(x)), "tp"
        )

    found = trial("d -> d", body, X[0])
    assert [one.kind for one in found.faults] == ["divergent"] and found.wrong


def varied(x: Any) -> Any:
    return lax.pcast(x, "tp", to="varying")


def test_a_program_that_is_asked_about_while_it_is_traced() -> None:
    def outer(x):
        assert tried(
            kernel("b/dp d/tp -> b/dp", lambda x: lax.psum(x.sum(1), "tp")), (x,), spmd.make_mesh(**SIZES), SIZES
        ).agrees
        return x

    jax.jit(outer)(X)


def test_integers_and_keys_are_those_that_are_given() -> None:
    body = lambda x, ids, key: (jnp.take(x, ids, axis=1), spmd.random.normal(key, "b/dp d"))
    args = (X, np.array([0, 15, 3], np.int32), jax.random.key(0))
    found = tried(
        kernel("b/dp d, n, scalar -> b/dp n, b/dp d", lambda x, i, k: body(x, i, k)),
        args,
        spmd.make_mesh(**SIZES),
        SIZES,
    )
    assert found.agrees


def test_nothing_is_checked_on_the_way() -> None:
    """The traces of a trial are not those of a first call."""
    seen = []
    run = spmd.kernel("b/dp -> b/dp", mesh=spmd.make_mesh(**SIZES))(lambda x: seen.append(collecting.value) or x)
    assert tried(run, (X[:, 0],), spmd.make_mesh(**SIZES), SIZES).agrees and seen == [True, True]


def test_the_first_body() -> None:
    jaxpr = jax.make_jaxpr(jax.jit(kernel("b/dp -> b/dp", jnp.sin)))(X[:, 0])
    assert dict(first_body(jaxpr).params["mesh"].shape) == SIZES
    assert first_body(jax.make_jaxpr(jnp.sin)(1.0)) is None


def test_too_many_numbers_are_not_drawn() -> None:
    large = jax.ShapeDtypeStruct((2**13, 2**13), "float32")
    found = tried(kernel("b/dp d -> b/dp d", jnp.sin), (large,), spmd.make_mesh(**SIZES), SIZES)
    assert found.why == "there are too many numbers: smaller structs can be compared"


@pytest.mark.parametrize("factor", [1.0, 1.0001])
def test_bits_that_are_moved_are_not_rounded(factor: float) -> None:
    """A gather of bits, as weights travel in. On one device nothing is gathered, and nothing is rounded."""

    def weights(w):
        if lax.axis_size("dp") == 1:
            return w
        bits = lax.bitcast_convert_type(w.astype(jnp.bfloat16), "uint16")
        whole = lax.bitcast_convert_type(lax.all_gather(bits, "dp", tiled=True), jnp.bfloat16)
        return factor * whole.astype(w.dtype)

    found = trial("d/dp -> d/dp", lambda w: w * weights(lax.stop_gradient(w)).sum(), X[0])
    assert not found.why and found.wrong == (factor != 1), found.why


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_bits_that_are_computed_with_are_rounded(factor: float) -> None:
    """Each device sends its bits beside zeros, and the devices are summed."""

    def weights(w):
        if lax.axis_size("dp") == 1:
            return w
        bits = lax.bitcast_convert_type(w.astype(jnp.bfloat16), "uint16").astype("int32")
        rows = jnp.zeros((2, *bits.shape), "int32").at[lax.axis_index("dp")].set(bits)
        whole = lax.psum(rows, "dp").reshape(-1).astype("uint16")
        return factor * lax.bitcast_convert_type(whole, jnp.bfloat16).astype(w.dtype)

    found = trial("d/dp -> d/dp", lambda w: w * weights(lax.stop_gradient(w)).sum(), X[0])
    assert not found.why and found.wrong == (factor != 1), found.why


def test_bits_meet_others_where_nothing_is_computed() -> None:
    """Zeros of integers are the bits of zeros: around a block, in a choice, and in the first carry of a loop."""

    def body(x):
        bits = lax.bitcast_convert_type(x.astype(jnp.float16), "int16")
        padded = lax.pad(bits, jnp.int16(0), ((1, 1, 0),))[1:-1]
        chosen = jnp.where(x > 0, padded, 0)
        last, rows = lax.scan(lambda before, one: (one, before), jnp.zeros_like(chosen[0]), chosen)
        back = lax.bitcast_convert_type(jnp.concatenate([rows[1:], last[None]]), jnp.float16)
        return back.astype(x.dtype)

    assert trial("d/dp -> d/dp", body, X[0]).agrees
    assert trial("d/dp -> d/dp", lambda x: body(x) * lax.axis_size("dp"), X[0]).wrong


@pytest.mark.parametrize(("reduce", "why"), [("pmin", ""), ("pmax", "and not for others")])
def test_integers_that_are_given_come_in_another_order_too(reduce: str, why: str) -> None:
    """The first place of the largest number: where each device has one place alone, the last one is as right."""

    def place(x):
        largest = lax.pmax(x.max(), tuple(SIZES))
        here = jnp.argmax(x) + spmd.offset("n/dp/tp")
        return getattr(lax, reduce)(jnp.where(x.max() == largest, here, {"pmin": 99, "pmax": -1}[reduce]), tuple(SIZES))

    found = trial("n/dp/tp -> scalar", place, jnp.arange(16) // 2)
    assert why in found.why and not found.wrong, found.why


def test_an_array_without_elements() -> None:
    assert trial("b/dp d -> b/dp d", lambda x: 2 * x, jnp.zeros((0, 4))).agrees
