"""annotate, assert_equal, debug_print, per_shard, typeof: what a body says about its values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd import check, explain
from spmd.comm import all_gather, psum
from spmd.errors import ReplicationError
from spmd.kernels import kernel
from spmd.language import Layout
from spmd.mesh import make_mesh
from spmd.modes import MODES, mode
from spmd.ops import annotate, assert_equal, debug_print, per_shard, typeof
from tests.checker.harness import suspicions

X = np.arange(48, dtype=np.float32).reshape(8, 6)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(dp=2, tp=3)


def wrap(mesh, fn):
    return kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)(fn)


def message(body, kind, name="explicit"):
    with pytest.raises(kind) as caught:
        getattr(body, name)(X)
    return str(caught.value).strip("\n")


# --- annotate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODES)
def test_annotate_changes_nothing(mesh, name):
    def body(x):
        tree = annotate({"a": x * 2, "b": (x,)}, "b/dp d/tp")
        flat = annotate(x.reshape(-1), "(b/dp d/tp)")
        return tree["a"] + flat.reshape(x.shape) - tree["b"][0]

    np.testing.assert_array_equal(getattr(wrap(mesh, body), name)(X), 2 * X)


def test_annotate_is_the_constraint_of_auto_mode(mesh):
    body = kernel("b d -> b d", mesh=mesh)(lambda x: annotate(x * 2, "b/dp d/tp") + 1)
    with mode("auto"):
        assert "dp" in body.lower(X).as_text()


def test_annotate_gradient(mesh):
    body = wrap(mesh, lambda x: annotate(x * x, "b/dp d/tp"))
    for name in MODES:
        got = jax.grad(lambda x, n=name: getattr(body, n)(x).sum())(X)
        np.testing.assert_array_equal(got, 2 * X)


def test_annotate_declares_a_partial_sum(mesh):
    def body(x):
        part = annotate(x.sum(1), "b/dp {U:tp}")
        return x + psum(part, "b/dp {U:tp} -> b/dp")[:, None]

    np.testing.assert_allclose(wrap(mesh, body)(X), X + X.sum(1, keepdims=True))


def test_error_annotate_where_it_differs(mesh):
    text = message(wrap(mesh, lambda x: x + annotate(x.sum(1, keepdims=True), "b/dp one")), ReplicationError)
    assert 'annotate(x, "b/dp one")' in text
    assert "tp" in text


def test_error_annotate_where_it_is_equal(mesh):
    text = message(wrap(mesh, lambda x: x + annotate(jnp.arange(2.0), "d/tp")[None]), ReplicationError)
    assert 'annotate(x, "d/tp")' in text
    assert "iota" in text


# --- assert_equal --------------------------------------------------------------------------------------------


def ring_sum(x, vouch):
    total = x
    for _ in range(2):
        x = lax.ppermute(x, "tp", [(i, (i + 1) % 3) for i in range(3)])
        total = total + x
    return vouch(total)


def test_assert_equal_is_believed(mesh):
    def body(x):
        total = ring_sum(x.sum(1, keepdims=True), lambda y: assert_equal(y, "tp", why="all add the same three numbers"))
        return x + annotate(total, "b/dp one")

    np.testing.assert_allclose(wrap(mesh, body)(X), X + X.sum(1, keepdims=True))
    without = wrap(mesh, lambda x: x + annotate(ring_sum(x.sum(1, keepdims=True), lambda y: y), "b/dp one"))
    assert "annotate(" in message(without, ReplicationError)


@pytest.mark.parametrize("name", MODES)
def test_assert_equal_is_the_identity(mesh, name):
    body = wrap(mesh, lambda x: assert_equal({"x": x}, ("dp", "tp"), why="a test")["x"])
    if name != "explicit":
        np.testing.assert_array_equal(getattr(body, name)(X), X)
    else:  # here it is a lie, and believed: equal values cannot be divided
        assert "tp" in str(suspicions(body, X)[0])


# --- debug_print ---------------------------------------------------------------------------------------------


def test_each_device_prints_its_place(mesh, capfd):
    def body(x):
        debug_print("first {} {last:.1f}", x[0, 0], last=x[-1, -1])
        return x

    jax.block_until_ready(wrap(mesh, body)(X))
    jax.effects_barrier()
    lines = sorted(capfd.readouterr().out.splitlines())
    want = [
        f"[dp={i} tp={j}] first {X[4 * i, 2 * j]} {X[4 * i + 3, 2 * j + 1]:.1f}" for i in range(2) for j in range(3)
    ]
    assert lines == want


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_whole_arrays_are_printed_once(mesh, name, capfd):
    def body(x):
        debug_print("sum {}", x.sum())
        return x

    jax.block_until_ready(getattr(wrap(mesh, body), name)(X))
    jax.effects_barrier()
    assert capfd.readouterr().out == f"sum {X.sum()}\n"


# --- typeof --------------------------------------------------------------------------------------------------


def test_typeof(mesh):
    seen = []

    def body(x):
        whole = all_gather(x, "b/dp d/tp -> b/dp d")
        part = annotate(x.sum(1), "b/dp {U:tp}")
        total = psum(part, "b/dp {U:tp} -> b/dp")
        seen.extend(str(typeof(v)) for v in (x, whole, part, total, x + 1, jnp.int32(3)))
        seen.append(typeof(total))
        return x

    wrap(mesh, body)(X)
    assert seen[:6] == [
        'float32[4,2] "b/dp d/tp" {V:dp,tp}',
        'float32[4,6] "b/dp d" {V:dp,tp}',
        'float32[4] "b/dp {U:tp}" {V:dp,tp}',
        'float32[4] "b/dp" {V:dp}',
        "float32[4,2] {V:dp,tp}",
        "int32[]",
    ]
    total = dataclasses.replace(seen[6], layout=Layout("b/dp").resolve(None), varying=("dp",))
    assert seen[6] == total
    assert hash(seen[6]) == hash(total)


def test_typeof_of_whole_arrays(mesh):
    seen = []

    def body(x):
        seen.append(str(typeof(x)))
        return x

    wrap(mesh, body).auto(X)
    assert seen[-1] == 'float32[8,6] "b/dp d/tp"'
    assert str(typeof(jnp.ones(3))) == "float32[3]"
    kinds = dataclasses.replace(typeof(jnp.int8([1, 2])), varying=("a",), unreduced=("b", "c"), reduced=("d",))
    assert str(kinds) == "int8[2] {V:a, U:b,c, R:d}"


# --- per_shard -----------------------------------------------------------------------------------------------

WHY = "runs, merged by the host"


def squared_inside(x):
    with per_shard(WHY):
        y = jnp.tanh(x)
    return jax.nn.sigmoid(y)


FOLLOWED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda i, c: f(c), x),
}


@pytest.mark.parametrize("name", FOLLOWED)
@pytest.mark.parametrize("outside", [True, False])
def test_per_shard_is_followed_through_transformations(mesh, name, outside):
    """The reason is given for the line that sorts, forward and backward, around a transformation and inside of it."""
    around, meant = FOLLOWED[name], per_shard(WHY)

    def body(x):
        return jnp.sin((meant(around(jnp.sort)) if outside else around(meant(jnp.sort)))(x))

    run = wrap(mesh, body)
    for fn in (run, run.auto, run.reference, jax.grad(lambda x: run(x).sum())):
        assert WHY in {one.why for one in explain(fn, X, compiled=False).written.per_shard}
    assert not check(run, X)


def test_the_innermost_reason_is_the_one_given(mesh):
    def both(x):
        with per_shard("outer"):
            y = per_shard("inner,\n  in two lines")(jnp.sort)(x)
            return jnp.sort(-y)

    found = explain(wrap(mesh, both), X, compiled=False).written.per_shard
    assert {one.why for one in found} == {"inner, in two lines", "outer"}


@pytest.mark.parametrize("name", MODES)
def test_per_shard_changes_nothing(mesh, name):
    body = wrap(mesh, squared_inside)
    np.testing.assert_allclose(getattr(body, name)(X), 1 / (1 + np.exp(-np.tanh(X))), rtol=1e-6)


def test_per_shard_ends_with_its_block(mesh):
    with pytest.raises(ZeroDivisionError), per_shard(WHY):
        raise ZeroDivisionError
    with pytest.raises(ReplicationError, match=r"spmd\.per_shard"):
        wrap(mesh, jnp.sort)(-X)
