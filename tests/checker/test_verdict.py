"""What `spmd.check` ends in, and what is left of suspicions when numbers have spoken."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checker import Verdict
from spmd.errors import ReplicationError

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
SIZES = {"dp": 2, "tp": 4}


def kernel(pattern: str, body: Any, **how: Any) -> Any:
    return spmd.kernel(pattern, mesh=spmd.make_mesh(**SIZES), **how)(body)


def norms(x: Any) -> Any:
    return jnp.sqrt(lax.psum((x * x).sum(1), "tp"))


PROGRAMS = {
    "proved": kernel("b/dp d/tp -> b/dp", norms),
    "tested": kernel("d/tp -> d/tp", lambda x: jnp.sort(x)[jnp.argsort(jnp.argsort(x))]),  # each element is back
    "wrong": kernel("b/dp d/tp -> b/dp", lambda x: lax.psum(jnp.sqrt((x * x).sum(1)), "tp")),
    "not tested": jax.shard_map(norms, mesh=None, in_specs=P("dp", "tp"), out_specs=P("dp")),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_each_verdict(kind: str) -> None:
    with jax.set_mesh(spmd.make_mesh(**SIZES)):
        found = spmd.check(PROGRAMS[kind], X[0] if kind == "tested" else X)
    assert found.verdict.kind == kind
    told = {"reasons": list(found.verdict.reasons), "unreached": list(found.verdict.unreached)}
    assert found.to_dict()["verdict"] == {"kind": kind, **told}
    assert bool(found) == (kind == "wrong")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_without_devices_is_followed_as_well(kind: AxisType) -> None:
    mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"), axis_types=(kind, kind))
    assert spmd.check(spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(norms), X).verdict.kind == "proved"


def test_what_each_says() -> None:
    said = lambda kind, *args: str(spmd.check(PROGRAMS[kind], *args).verdict)
    assert said("proved", X) == (
        "no findings: proved. On dp=2, tp=4 the results and gradients are those of one device; "
        "on dp=3, tp=2, b=6 (given 8), d=4 (given 16) the results are, too"
    )
    assert said("wrong", X) == "wrong. On dp=2, tp=4 the results differ from those of one device"
    assert "Types suspect" in said("tested", X[0])
    assert str(Verdict("")) == "no findings"
    turned = kernel("b d/tp -> b d/tp", lambda x: spmd.shift(x, "b [d/tp]", 1))
    assert str(spmd.check(turned, X).verdict) == (
        "no findings: not tested. On dp=2, tp=4 the results and gradients are those of whole arrays, which depend "
        "on the sizes of axes too: reference= tells what is meant"
    )


def test_a_program_that_may_mean_the_sizes_of_axes_is_told_by_which_it_differs() -> None:
    """The gradient of a loss over all rows is complete: divided once more, it is that of DistributedDataParallel."""

    def step(x: Any, w: Any) -> Any:
        loss = lambda w: spmd.reduce((jnp.tanh(x @ w) ** 2).mean(1), "b/dp -> ", "mean")
        value, gradient = spmd.value_and_grad(loss)(w)
        return value, gradient / spmd.axis_size("dp")

    x, w = X, jax.ShapeDtypeStruct((X.shape[1], 4), X.dtype)
    told = spmd.check(kernel("b/dp d, d f -> scalar, d f", step), x, w).verdict
    assert told.kind == "not tested"
    assert told.reasons[1] == "Compared with one device, result[1] is 2 times too small: the size of dp"
    raw = lambda mesh: jax.shard_map(
        lambda x: jax.lax.pmean(x.sum(0), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )
    told = spmd.check(raw(spmd.make_mesh(**SIZES)), x, build=raw).verdict
    assert told.kind == "not tested" and "result is 2 times too small: the size of dp" in str(told)


def test_a_size_of_a_shard_names_spmd_size() -> None:
    for body, result in ((lambda x: x / x.shape[0], "b/dp d"), (lambda x: x.shape[0], "scalar")):
        [one] = spmd.check(kernel(f"b/dp d -> {result}", body), X)
        assert one.kind == "numbers" and "spmd.size" in str(one) and "the size of dp" in str(one)
    whole = kernel("b/dp d -> b/dp d", lambda x: x / spmd.size("b"))
    assert spmd.check(whole, X).verdict.kind == "proved"


def test_the_message_of_numbers() -> None:
    def local(x):
        return x - x.shape[0]

    [one] = spmd.check(kernel("b/dp d -> b/dp d", local), X)
    assert str(one).splitlines()[:3] == [
        "local computes something else on several devices than on one.",
        "got:",
        "- result: 128 of 128 numbers differ, by up to 4",
    ]
    assert f":{local.__code__.co_firstlineno + 1} " in one.line and one.line.endswith("local)")


def test_what_types_do_not_follow_is_near_the_mistake() -> None:
    """A halo of the wrong side is not a mistake of types. Numbers fit no layout where it comes to lie beside the block."""

    def shifted(x):
        n = lax.axis_size("tp")
        beside = lax.ppermute(x[:, -1:], "tp", [(i, (i - 1) % n) for i in range(n)])
        return x - jnp.concatenate([beside, x[:, :-1]], 1)

    [one] = spmd.check(kernel("b/dp d/tp -> b/dp d/tp", shifted), X)
    [row] = [line for line in str(one).splitlines() if "no layout" in line]
    first = shifted.__code__.co_firstlineno
    assert row.startswith("- from ") and row.endswith("shifted) on, values fit no layout of those on one device")
    assert all(int(line) in range(first + 2, first + 4) for line in re.findall(r":(\d+) ", row)), row


def test_the_axis_to_blame() -> None:
    def sums(x):
        return lax.psum(x.sum(1), "tp") * x.shape[0]

    mesh = spmd.make_mesh(dp=2, tp=2)  # of one size, so that one mesh alone does not tell
    [one] = spmd.check(spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)(sums), X)
    assert "- it differs where dp has several devices, and nowhere else" in str(one).splitlines()
    assert "2 times too small: the size of dp" in str(one)


def test_copies_that_differ_are_told() -> None:
    own = jnp.array([0, 1, 1, 0])

    def loss(x):
        order = jnp.argsort(jnp.where(own == lax.axis_index("dp"), 0, 1))
        return lax.psum(jnp.where(own[order] == lax.axis_index("dp"), x[order] ** 2, 0.0).sum(), "dp")

    program = kernel("n -> scalar", loss, check="off")
    [one] = spmd.check(program, jnp.arange(1.0, 5.0))
    assert one.kind == "type" and 'jax.lax.pcast(<the result>, "dp", to="varying")' in one.advice
    with pytest.raises(spmd.errors.ReplicationError, match="gradients follow JAX's type"):
        kernel("n -> scalar", loss)(jnp.arange(1.0, 5.0))

    def mended(x):
        order = lax.pcast(jnp.argsort(jnp.where(own == lax.axis_index("dp"), 0, 1)), "dp", to="varying")
        return lax.psum(jnp.where(own[order] == lax.axis_index("dp"), x[order] ** 2, 0.0).sum(), "dp")

    np.testing.assert_allclose(jax.grad(kernel("n -> scalar", mended))(jnp.arange(1.0, 5.0)), [2, 4, 6, 8])


def test_what_a_first_call_cannot_test_is_a_warning() -> None:
    def body(x):
        y = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.psum(jnp.sqrt((x * x).sum(1)), "tp") + 0 * lax.psum(lax.pcast(y, (), to="varying").sum(1), "tp")

    with pytest.warns(UserWarning, match="(?s)^meant per shard.*Numbers do not tell: pure_callback"):
        kernel("b/dp d/tp -> b/dp", body).trace(X)


def test_a_raw_body_may_mean_the_size_of_a_block() -> None:
    """A block times an array of a block's size: on one device the shapes do not fit, which proves nothing."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    weights = jnp.arange(8.0).reshape(2, 4)

    def program(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda part: (weights * part).sum(-1), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)

    found = spmd.check(program, jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("x"))))
    assert not any(one.certain for one in found) and found.verdict.kind == "not tested"


def test_what_nobody_holds_is_not_an_error_of_ours() -> None:
    """The terms of a sum that each device has, and a reference inside of a body."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))

    def summed(x: jax.Array) -> jax.Array:
        body = lambda x: lax.psum_scatter(x, "x", tiled=True)
        return jax.shard_map(body, in_specs=P(unreduced={"x"}), out_specs=P("x"))(x)

    def kept(x: jax.Array) -> jax.Array:
        body = jax.jit(lambda x: jax.freeze(jax.new_ref(x)))
        return jax.shard_map(body, out_specs=P("x"))(x)

    with jax.set_mesh(mesh):
        terms = jax.reshard(jnp.arange(8.0), P(unreduced={"x"}))
        found = [spmd.check(summed, terms), spmd.check(kept, jax.device_put(jnp.arange(8), P("x")))]
    assert [(list(one), one.verdict.kind) for one in found] == [([], "not tested")] * 2


def test_a_line_is_innocent_if_only_right_results_depend_on_it() -> None:
    """A mean of equal copies is a suspicion, which numbers dismiss where nothing is wrong. Here something else is."""

    def body(x, square):
        mean = spmd.reduce(x, "b/dp e -> e", "mean")
        return lax.pmean(mean.sum(), "dp"), square(x)

    late = lambda x: lax.psum(jnp.square(x.sum(0)), "dp")
    right = lambda x: jnp.square(lax.psum(x.sum(0), "dp"))
    hidden = lambda x: lax.pmax(jnp.square(x.sum(0)), "dp")
    x = jax.ShapeDtypeStruct((8, 3), "float32")
    kernel = lambda square: spmd.kernel("b/dp e -> scalar, e", mesh=spmd.make_mesh(dp=4))(partial(body, square=square))
    with pytest.raises(ReplicationError) as caught:
        kernel(late).trace(x)
    for findings in (caught.value.findings, spmd.check(kernel(late), x)):
        assert [one.kind for one in findings] == ["nonlinear"]
    cleared = spmd.check(kernel(right), x).verdict
    assert cleared.kind == "tested" and "Types suspect" in str(cleared)
    assert spmd.check(kernel(hidden), x).verdict.kind == "wrong"


def test_a_bound_is_driven_at() -> None:
    """Beyond the bound each device would scale by its own norm. No ordinary number comes to it."""
    clipped = kernel("n/dp -> n/dp", lambda g: g * jnp.minimum(1.0, 1e3 / jnp.linalg.norm(g)))
    assert spmd.check(clipped, X[0]).verdict.kind == "wrong"


def test_gradients_that_cannot_be_taken_are_named() -> None:
    """A maximum over the devices has no derivative in JAX: the results alone are compared, and that is said."""
    largest = spmd.kernel("b/dp -> scalar", mesh=spmd.make_mesh(dp=2))(lambda x: jax.lax.pmax(x.max(), "dp"))
    verdict = spmd.check(largest, jax.ShapeDtypeStruct((8,), "float32")).verdict
    assert verdict.kind == "tested"
    assert "are, too. Gradients are not compared: it fails on mesh dp=2" in str(verdict), verdict


# -------------------- what a call of the library says of its result is known after it

ROWS, IDS = jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((4,), "int32")
CALLS: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "softmax": ("b/dp v/tp -> b/dp v/tp", lambda x: spmd.softmax(x, "b/dp [v/tp]"), (ROWS,)),
    "logsumexp": ("b/dp v/tp -> b/dp", lambda x: spmd.reduce(x, "b/dp v/tp -> b/dp", "logsumexp"), (ROWS,)),
    "argmax": ("b/dp v/tp -> b/dp", lambda x: spmd.argmax(x, "b/dp [v/tp]"), (ROWS,)),
    "cumsum": ("b/dp v/tp -> b/dp v/tp", lambda x: spmd.cumsum(x, "b/dp [v/tp]"), (ROWS,)),
    "sort": ("b/dp v/tp -> b/dp v/tp", lambda x: spmd.sort(x, "b/dp [v/tp]"), (ROWS,)),
    "roll": ("b/dp v/tp -> b/dp v/tp", lambda x: spmd.roll(x, "b/dp [v/tp]", 1), (ROWS,)),
    "diff": ("b/dp v/tp -> b/dp v/tp", lambda x: spmd.stencil.diff(x, "b/dp [v/tp]", edge="periodic"), (ROWS,)),
    "take": ("v/tp d, b -> b d", lambda x, at: spmd.take(x, at, "[v/tp] d, b -> b d"), (ROWS, IDS)),
    "embedding": ("v/tp d, b/dp -> b/dp d", lambda x, at: spmd.nn.embedding(at, x, tp="tp"), (ROWS, IDS)),
    "cross_entropy": (
        "b/dp v/tp, b/dp -> scalar",
        lambda x, at: spmd.nn.cross_entropy(x, at, tp="tp", dp="dp"),
        (ROWS, IDS),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_call_is_proved(name: str) -> None:
    """Types lose values between the call's own equations, and know its result."""
    pattern, body, args = CALLS[name]
    made = spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=2))(body)
    assert str(spmd.check(made, *args).verdict).startswith("no findings: proved. On dp=2, tp=2 the results and grad")


def test_what_a_call_loses_for_good_is_named() -> None:
    """The result of a layer that types do not know, and what a function does that a call is given."""
    mesh = spmd.make_mesh(dp=2, tp=2)
    project = lambda x, w: spmd.nn.qkv_linear(x, w, tp="tp")[0]
    made = spmd.kernel("b s d, d g/tp j k -> b s h/tp k", mesh=mesh)(project)
    verdict = spmd.check(made, jnp.ones((1, 3, 5)), jnp.ones((5, 2, 4 + 2, 7))).verdict
    assert verdict.kind == "tested" and "Types lose a value at tests/checker/test_verdict.py:" in str(verdict)

    def within(x: Any) -> Any:
        return spmd.local(lambda x: x[jnp.argsort(jnp.argsort(x[:, 0]))], "b/dp v/tp -> b/dp v/tp")(jnp.sort(x, 0))

    lost = spmd.check(spmd.kernel("b/dp v/tp -> b/dp v/tp", mesh=mesh)(lambda x: within(x) * 0 + x), ROWS)
    assert lost.verdict.kind != "proved" and "test_verdict.py" in str(lost)
