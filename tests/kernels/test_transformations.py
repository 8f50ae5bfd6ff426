"""Kernels under JAX's transformations, over closures, and with donated buffers."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import spmd
from spmd.modes import MODES
from tests.kernels.harness import W, X, close, plain

# -------------------- transformations


@pytest.mark.parametrize("mode", MODES)
def test_transformations(layer, mode):
    loss = lambda f: lambda x, w: (f(x, w) ** 2).sum()
    stack = np.stack([W, 2 * W, -W])

    def scanned(f, x, stack):
        return jax.lax.scan(lambda x, w: (f(x, w), None), x, stack)[0]

    def cases(f):
        return {
            "grad": jax.grad(loss(f), (0, 1))(X, W),
            "jit of value_and_grad": jax.jit(jax.value_and_grad(loss(f), (0, 1)))(X, W),
            "jit of vmap": jax.jit(jax.vmap(f, (None, 0), 1))(X, stack),
            "grad of vmap": jax.grad(lambda s: jax.vmap(f, (None, 0))(X, s).sum())(stack),
            "grad of scan of remat": jax.jit(jax.grad(lambda s: scanned(jax.checkpoint(f), X, s).sum()))(stack),
            "jvp": jax.jvp(f, (X, W), (X, W)),
            "eval_shape": jax.tree.map(lambda s: np.zeros(s.shape), jax.eval_shape(f, X, W)),
        }

    wanted = jax.jit(lambda: cases(plain))()
    with spmd.mode(mode):
        found = cases(layer)
    for name in wanted:
        close(found[name], wanted[name], 1e-4)


def test_a_hessian_vector_product(layer):
    """Forward over reverse."""
    product = lambda f: jax.jvp(jax.grad(lambda w: (f(X, w) ** 2).sum()), (W,), (W,))[1]
    close(product(layer), jax.jit(lambda: product(plain))(), 1e-4)


def test_a_kernel_is_traced_once(mesh):
    traced = []

    @spmd.kernel("n/tp -> n/tp", mesh=mesh)
    def body(x):
        traced.append(x.shape)
        return 2 * x

    for _ in range(3):
        body(np.ones(8))
    assert len(traced) == 1
    step = jax.jit(lambda x: body(body(body(x))))
    step(np.ones(8)), step(np.ones(8))
    assert len(traced) <= 3  # once more for a tracer, and for one that knows the mesh
    body(np.ones(16))
    assert len(traced) <= 4


# -------------------- closures


def test_closures_over_tracers(mesh):
    def loss(w, x):
        @spmd.kernel("b/dp d -> b/dp f", mesh=mesh)
        def body(x):
            return jnp.tanh(spmd.einsum(x, w, "b/dp d, d f -> b/dp f"))

        return (body(x) ** 2).sum()

    wanted = jax.jit(jax.grad(lambda w: (plain(X, w) ** 2).sum()))(W)
    for mode in MODES:
        with spmd.mode(mode):
            close(jax.grad(loss)(W, X), wanted, 1e-4)
            close(jax.jit(jax.grad(loss))(W, X), wanted, 1e-4)
            close(jax.jit(jax.vmap(jax.grad(loss), (0, None)))(W[None], X)[0], wanted, 1e-4)


def test_a_closure_that_changes(mesh):
    """One kernel whose cell is another tracer in each call."""
    weight = None

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def body(x):
        return x * weight

    def loss(w):
        nonlocal weight
        weight = w
        return body(X).sum()

    for w in (2.0, 3.0):
        close(jax.grad(loss)(w), X.sum())
        close(jax.jit(jax.value_and_grad(loss))(w), (w * X.sum(), X.sum()))


def test_closures_over_arrays(mesh):
    table = jnp.arange(8.0)
    body = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x + table[None])
    for mode in MODES:
        with spmd.mode(mode):
            close(body(X), X + np.arange(8))


def test_a_kernel_that_is_dropped_is_collected(mesh):
    def make():
        big = jnp.ones(8)
        kernel = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x + big[None])
        kernel(X)
        return weakref.ref(kernel)

    dropped = make()
    jax.clear_caches()
    gc.collect()
    assert dropped() is None


# -------------------- donation


@pytest.mark.parametrize("kinds", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_donated_buffers_are_gone(kinds):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kinds,) * 2)
    body = spmd.kernel("b/dp d, b/dp d -> b/dp d", mesh=mesh, donate="x")(lambda x, y: x + y)
    place = lambda: spmd.shard(X, "b/dp d", mesh=mesh)
    for _ in range(2):
        x, y = place(), place()
        close(body(x, y), 2 * X)
        assert x.is_deleted() and not y.is_deleted()


def test_donation_under_jit_and_grad_keeps_the_buffers(mesh):
    body = spmd.kernel("b/dp d, b/dp d -> b/dp d", mesh=mesh, donate=("x", "y"))(lambda x, y: x * y)
    x, y = (spmd.shard(X, "b/dp d", mesh=mesh) for _ in range(2))
    close(jax.jit(body)(x, y), X * X)
    close(jax.grad(lambda x, y: body(x, y).sum())(x, y), X)
    close(jax.vmap(body)(x[None], y[None])[0], X * X)
    close(body.reference(x, y), X * X)
    assert not x.is_deleted() and not y.is_deleted()
    with spmd.mode("auto"):
        close(body(x, y), X * X)


def test_donation_of_a_tree_in_a_train_step(mesh):
    layouts = {"w": "d/dp f/tp", "bias": "f/tp"}

    @spmd.kernel(in_layouts=(layouts, "scalar"), out_layouts=layouts, mesh=mesh, donate="params")
    def step(params, rate):
        return jax.tree.map(lambda p: p - rate * p, params)

    params = spmd.shard({"w": W, "bias": W[0]}, layouts, mesh=mesh)
    for _ in range(3):
        old, params = params, step(params, 0.5)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    close(params["w"], W / 8)
