"""Opaque code is traced apart: calls of libraries have their gradients, and `spmd.check` takes their reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import spmd
from spmd.errors import LayoutError
from spmd.testing import Mismatch, assert_same_on_any_mesh
from tests.ops.test_local import agree

X = np.asarray(jax.random.normal(jax.random.key(0), (8, 8)))
W = np.asarray(jax.random.normal(jax.random.key(1), (8, 3)))
SAME = "b/dp d/tp -> b/dp d/tp"


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(dp=2, tp=4)


def call(fn, x):
    """As the calls of a library: its result does not say along which mesh axes it varies."""

    def code(ref, out):
        out[...] = fn(ref[...])

    return pl.pallas_call(code, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@jax.custom_vjp
def sine(x):
    return call(jnp.sin, x)


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (call(jnp.cos, x) * g,))


def wrapped(mesh, fn, reference, pattern=SAME):
    return spmd.kernel(pattern, mesh=mesh)(lambda *args: spmd.opaque(fn, pattern, reference=reference)(*args))


# -------------------- gradients


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_a_call_with_its_own_derivative(mesh, around):
    agree(wrapped(mesh, around(sine), jnp.sin), np.sin(X), X)


def test_it_stands_in_loops_and_branches(mesh):
    def deep(turned, x, w):
        y, _ = lax.scan(lambda c, _: (turned(c) + 0.5 * c, None), x, None, length=3)
        y = lax.cond(jnp.sum(w) > 100, turned, lambda y: y * 2, y)
        return lax.fori_loop(0, 2, lambda i, y: y + turned(y), y) @ w

    @spmd.kernel("b/dp d, d f -> b/dp f", mesh=mesh)
    def body(x, w):
        own = lambda x, w: deep(sine, x, w)
        return spmd.opaque(own, "b/dp d, d f -> b/dp f", reference=lambda x, w: deep(jnp.sin, x, w))(x, w)

    agree(body, deep(jnp.sin, X, W), X, W)


def test_under_vmap_and_twice(mesh):
    body = wrapped(mesh, sine, jnp.sin)
    scored = lambda x: jnp.sum(body(x) ** 2)
    many = np.stack([X, 2 * X])
    np.testing.assert_allclose(jax.vmap(jax.grad(scored))(many), np.sin(2 * many), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [False, True], ids=["of JAX", "of its own"])
def test_the_gradient_of_what_it_closes_over(mesh, own):
    """Each device has a part of the gradient of a value that is equal on all."""
    turned = sine if own else jnp.sin

    def body_of(turned):
        def body(x, scale):
            fn = lambda x: turned(x * scale)
            return spmd.opaque(fn, SAME, reference=lambda x: jnp.sin(x * scale))(x)

        return spmd.kernel("b/dp d/tp, scalar -> b/dp d/tp", mesh=mesh)(body)

    scale = jnp.float32(1.5)
    agree(body_of(turned), np.sin(X * 1.5), X, scale)


def test_integers_go_in_and_out(mesh):
    @jax.custom_vjp
    def picked(x, rows, w):
        return x[rows] * w, rows + 1

    def backward(kept, gs):
        x, rows, w = kept
        return jnp.zeros_like(x).at[rows].add(gs[0] * w), None, jnp.sum(gs[0] * x[rows], keepdims=True)

    picked.defvjp(lambda *args: (picked(*args), args), backward)
    rows = np.array([3, 0, 1])
    pattern = "n d/tp, r, one two -> r d/tp, r"

    @spmd.kernel("n d/tp, r, one two -> r d/tp", mesh=mesh)
    def body(x, rows, w):
        return spmd.opaque(picked, pattern, reference=picked)(x, rows, w)[0]

    run = lambda x, w: body(x, rows, w)
    w = jnp.full((1, 1), 2.0)
    want = jax.grad(lambda x, w: jnp.sum(jnp.sin(x[rows] * w)), (0, 1))(X, w)
    for one, two in zip(jax.grad(lambda x, w: jnp.sum(jnp.sin(run(x, w))), (0, 1))(X, w), want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)


def test_settings_of_jax_hold_there(mesh):
    body = wrapped(mesh, lambda x: x @ jnp.eye(x.shape[1], dtype=x.dtype), None)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in str(jax.make_jaxpr(body)(X))
    with jax.numpy_rank_promotion("allow"):
        wrapped(mesh, lambda x: x + jnp.arange(x.shape[1], dtype=x.dtype), None)(X)


def test_it_may_ask_for_sizes(mesh):
    body = wrapped(mesh, lambda x: x * (spmd.size("b") * spmd.local_size("b/dp")), None)
    np.testing.assert_allclose(body(X), X * 32, rtol=1e-6)


# -------------------- what spmd.check says


def program(mesh, wrong):
    @spmd.kernel("b/dp d/tp, d/tp f -> f", mesh=mesh)
    def body(x, w):
        y = spmd.opaque(sine, SAME, reference=jnp.sin)(x) @ w
        y = spmd.psum(y, "b/dp f {U:tp} -> b/dp f")
        return spmd.reduce(y, "b/dp f -> f", "mean") * (x.shape[0] if wrong else 1)

    return body


def test_its_reference_stands_in(mesh):
    verdict = spmd.check(program(mesh, wrong=False), X, W).verdict
    assert verdict.kind == "tested" and "results and gradients are those of one device" in str(verdict)
    assert "The reference stands in for the opaque code at " in str(verdict) and "Types lose" not in str(verdict)
    assert_same_on_any_mesh(program(mesh, wrong=False), X, W)


def test_a_mistake_beside_it_is_found(mesh):
    [one] = spmd.check(program(mesh, wrong=True), X, W)
    assert one.kind == "numbers" and "times too small: the size of dp" in str(one)
    with pytest.raises(Mismatch):
        assert_same_on_any_mesh(program(mesh, wrong=True), X, W)


def test_copies_that_differ_do_not_become_equal(mesh):
    """What is right on the first device only is wrong."""

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh, check="off")
    def body(x):
        x = jnp.where(spmd.axis_index("tp") == 0, x, 0 * x)
        return spmd.opaque(sine, "b/dp d -> b/dp d", reference=jnp.sin)(x)

    with pytest.raises(spmd.errors.SpmdError):  # JAX's own types refuse what differs there
        body.trace(X)
    raw = jax.shard_map(
        lambda x: spmd.opaque(sine, "b/dp d -> b/dp d", reference=jnp.sin)(
            jnp.where(lax.axis_index("tp") == 0, x, 0 * x)
        ),
        mesh=mesh,
        in_specs=jax.P("dp"),
        out_specs=jax.P("dp", "tp"),
    )
    assert spmd.check(raw, X, reference=lambda x: jnp.tile(jnp.sin(x), (1, 4))).verdict.kind == "wrong"


def test_without_a_reference_it_is_not_tested(mesh):
    verdict = spmd.check(wrapped(mesh, sine, None), X).verdict
    assert verdict.kind == "not tested" and "pallas_call" in str(verdict)


def test_sums_factors_and_copies_stand_in(mesh):
    pattern = "b/dp (h k)/tp, one c -> b/dp (h k)/tp, b/dp {U:tp}"
    both = lambda sine: lambda x, c: (sine(x) * jnp.sum(c), jnp.sum(sine(x), 1))

    @spmd.kernel("b/dp (h k)/tp, one c -> b/dp (h k)/tp, b/dp", mesh=mesh, h=4)
    def body(x, c):
        y, total = spmd.opaque(both(sine), pattern, reference=both(jnp.sin))(x, c)
        return y, spmd.psum(total, "b/dp {U:tp} -> b/dp")

    verdict = spmd.check(body, X, np.ones((1, 2), np.float32)).verdict
    assert verdict.kind == "tested", verdict


@pytest.mark.parametrize("reference", [lambda x: jnp.sin(x)[:, :, None], lambda x: jnp.sin(x).astype(jnp.bfloat16)])
def test_a_reference_of_another_shape_is_refused(mesh, reference):
    with pytest.raises(LayoutError):
        spmd.check(wrapped(mesh, sine, reference), X)
