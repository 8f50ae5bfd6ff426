"""Any mesh that a user brings, and arguments that lie anywhere."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import MeshError, ReplicationError
from tests.kernels.harness import KINDS, linear_on, mesh_of

A, E = AxisType.Auto, AxisType.Explicit
X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.arange(96, dtype=np.float32).reshape(8, 12) / 7


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
@pytest.mark.parametrize("kinds", KINDS)
def test_types_of_axes(kinds, mode):
    """NumPy inputs, values and gradients, with and without an outer jit, with and without set_mesh."""
    mesh = mesh_of(KINDS[kinds])
    linear = linear_on(mesh)
    loss = lambda x, w: (linear(x, w) ** 2).sum()
    wanted = jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1))(X, W)
    with spmd.mode(mode):
        np.testing.assert_allclose(linear(X, W), X @ W, rtol=1e-5)
        gradients = [jax.jit(jax.grad(loss, (0, 1)))(X, W)]
        np.testing.assert_allclose(jax.jit(linear).lower(X, W).compile()(X, W), X @ W, rtol=1e-5)
        with jax.set_mesh(mesh):
            gradients.append(jax.grad(loss, (0, 1))(X, W))
            np.testing.assert_allclose(jax.jit(linear)(X, W), X @ W, rtol=1e-5)
    for found in gradients:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)


@pytest.mark.parametrize("kinds", KINDS)
def test_results_lie_as_the_signature_says(kinds):
    out = linear_on(mesh_of(KINDS[kinds]))(X, W)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh_of(KINDS[kinds]), P("dp", None)), 2)


@pytest.mark.parametrize("sizes", [(1, 8), (8, 1), (1, 1), (4, 1)], ids=str)
def test_axes_of_size_one(sizes):
    x, w = np.ones((8, 8), np.float32), W
    for kinds in ((A, A), (E, E)):
        linear = linear_on(mesh_of(kinds, sizes))
        np.testing.assert_allclose(linear(x, w), x @ w, rtol=1e-5)
        gradient = jax.jit(jax.grad(lambda w, f=linear: f(x, w).sum()))(w)
        np.testing.assert_allclose(gradient, np.full_like(w, 8), rtol=1e-5)


@pytest.mark.parametrize("kinds", [(A, A, A), (E, E, E), (A, E, A)], ids=str)
def test_axes_that_the_kernel_does_not_use(kinds):
    mesh = mesh_of(kinds, (2, 2, 2), ("pp", "dp", "tp"))
    linear = linear_on(mesh)
    np.testing.assert_allclose(linear(X, W), X @ W, rtol=1e-5)
    np.testing.assert_allclose(linear.auto(X, W), X @ W, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda w: linear(X, w).sum()))(W)
    np.testing.assert_allclose(gradient, np.repeat(X.sum(0)[:, None], 12, 1), rtol=1e-5)


# -------------------- which mesh


def test_the_mesh_of_the_arguments():
    kernel = spmd.kernel("n/x -> n/x")(lambda v: v * spmd.axis_size("x"))
    for count in (4, 2, 8, 4):
        mesh = spmd.make_mesh(x=count)
        v = spmd.shard(np.ones(8, np.float32), "n/x", mesh=mesh)
        out = kernel(v)
        assert out.tolist() == [count] * 8 and out.sharding.mesh == mesh


def test_the_mesh_of_a_with_block():
    """JAX's older way; everything else is asked first."""
    mesh, other = spmd.make_mesh(dp=2, tp=4), spmd.make_mesh(x=4)
    rows = spmd.kernel("b d -> b d", mapping={"b": "dp", "d": "tp"})(lambda x: x + spmd.axis_size("tp"))
    with pytest.warns(DeprecationWarning, match="with mesh"), mesh:
        np.testing.assert_array_equal(rows(X), X + 4)
        np.testing.assert_array_equal(jax.jit(rows)(X), X + 4)
        assert spmd.shard(X, "b/dp d").sharding.mesh == mesh
        assert [s.kind for s in spmd.plan("a/tp b -> a b/tp", a=8, b=8).steps] == ["all_to_all"]
        assert spmd.plan("a/x b -> a b/x", a=8, b=8, mesh=other).mesh == {"x": 4}
        with jax.set_mesh(other):
            assert spmd.shard(X, "b/x d").sharding.mesh == other
    with pytest.raises(MeshError, match="no mesh"):
        rows(X)


def test_the_mesh_of_set_mesh():
    kernel = spmd.kernel("n/x -> n/x")(lambda v: v * spmd.axis_size("x"))
    for kinds, count in ((A, 4), (E, 2), (A, 8)):
        mesh = mesh_of((kinds,), (count,), ("x",))
        with jax.set_mesh(mesh):
            assert kernel(np.ones(8)).tolist() == [count] * 8
            assert jax.jit(kernel)(np.ones(8)).tolist() == [count] * 8


def test_no_mesh():
    with pytest.raises(MeshError, match="no mesh: none was given"):
        spmd.kernel("n/x -> n/x")(lambda v: v)(np.ones(8))


def test_arguments_on_two_meshes():
    kernel = spmd.kernel("n/x, n/x -> n/x")(lambda a, b: a + b)
    a, b = (spmd.shard(np.ones(8), "n/x", mesh=spmd.make_mesh(x=n)) for n in (2, 4))
    with pytest.raises(MeshError, match="live on two meshes"):
        kernel(a, b)
    with_mesh = spmd.kernel("n/x, n/x -> n/x", mesh=spmd.make_mesh(x=4))(lambda a, b: a + b)
    assert with_mesh(a, b).tolist() == [2] * 8


@pytest.mark.parametrize("kinds", [A, E], ids=str)
@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_an_ambient_mesh_of_other_axes(mode, kinds):
    """A kernel has its own mesh, whatever surrounds it."""
    linear = linear_on(mesh_of((A, A)))
    with jax.set_mesh(mesh_of((kinds,), (8,), ("other",))), spmd.mode(mode):
        np.testing.assert_allclose(linear(X, W), X @ W, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(linear)(X, W), X @ W, rtol=1e-5)


@pytest.mark.parametrize("kinds", [A, E], ids=str)
@pytest.mark.parametrize("around", ["its own", "another"])
def test_reference_mode_under_set_mesh(kinds, around):
    """Called eagerly, alone and differentiated, and with arrays that lie on the mesh: what comes out meets them."""
    mesh = mesh_of((kinds, kinds))
    linear = linear_on(mesh)
    x, w = spmd.shard(X, "b/dp d/tp", mesh=mesh), spmd.shard(W, "d/tp f", mesh=mesh)
    ambient = mesh if around == "its own" else mesh_of((kinds,), (8,), ("other",))
    one = jax.device_put(X, jax.devices()[3])
    with jax.set_mesh(ambient):
        np.testing.assert_allclose(linear.reference(x, W) * 2 - 1, X @ W * 2 - 1, rtol=1e-5)
        twice = linear.reference(one, linear.reference(X, W)[:1] * W)  # committed to a device, and what came out before
        np.testing.assert_allclose(twice + 1, X @ ((X @ W)[:1] * W) + 1, rtol=1e-5)
        with spmd.mode("reference"):
            held = spmd.shard(X, "b/dp d/tp", mesh=mesh)
            np.testing.assert_allclose(
                (linear(held + 1, W) + linear(x, w)).sum(), (2 * X @ W + W.sum(0)).sum(), rtol=1e-5
            )
            np.testing.assert_allclose(jax.vmap(linear, (None, 0))(X, W[None]) * 2, (X @ W * 2)[None], rtol=1e-5)
            loss = lambda x, w: ((linear(x, w) * 2) ** 2).sum()
            found = jax.grad(loss, (0, 1))(x, w) if around == "its own" else jax.grad(loss, (0, 1))(X, W)
            hessian = jax.jvp(lambda x: jax.grad(loss)(x, W), (X,), (np.ones_like(X),))[1]
        wanted = (8 * (X @ W) @ W.T, 8 * X.T @ (X @ W))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a * 2, b * 2, rtol=1e-4), found, wanted)
        np.testing.assert_allclose(hessian, 8 * (np.ones_like(X) @ W) @ W.T, rtol=1e-4)


@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_checkify(mode, set_mesh):
    """JAX's functional assertions around a kernel, and inside one."""
    mesh = mesh_of((A, A))

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def logarithm(x):
        def checked(x):
            checkify.check((x > -1).all(), "below -1")
            return jnp.log(x)

        return spmd.local(checked, "b/dp d -> b/dp d")(x)

    run = checkify.checkify(logarithm, errors=checkify.user_checks | checkify.float_checks)
    with spmd.mode(mode), jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        for fn in (run, jax.jit(run)):
            error, out = fn(X + 1)
            assert error.get() is None
            np.testing.assert_allclose(out, np.log(X + 1), rtol=1e-5)
            assert "nan generated by primitive: log" in fn(X - 0.5)[0].get()
            assert "below -1" in fn(X - 2)[0].get()


def test_an_abstract_mesh_is_for_tracing():
    linear = linear_on(spmd.make_mesh(dp=2, tp=4, abstract=True))
    shapes = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    assert linear.trace(*shapes).jaxpr.out_avals[0].shape == (4, 12)
    np.testing.assert_allclose(linear.reference(X, W), X @ W, rtol=1e-5)
    with pytest.raises(MeshError, match="no devices"):
        linear(X, W)


def test_an_axis_that_the_mesh_does_not_have():
    with pytest.raises(MeshError, match="no axis 'dp'"):
        linear_on(spmd.make_mesh(data=2, tp=4))(X, W)


def test_a_kernel_with_renamed_axes():
    """`axes=` renames for the signature and the body."""
    for mesh, axes in (
        (spmd.make_mesh(data=2, model=4), {"dp": "data", "tp": "model"}),
        (spmd.make_mesh(a=2, b=2, c=2), {"dp": ("a", "b"), "tp": "c"}),
        (spmd.make_mesh(data=2), {"dp": "data", "tp": None}),
    ):
        linear = linear_on(mesh, axes=axes)
        np.testing.assert_allclose(linear(X, W), X @ W, rtol=1e-5)
        np.testing.assert_allclose(linear.auto(X, W), X @ W, rtol=1e-5)


# -------------------- {R:} at the boundary of a kernel

REDUCED = {
    "as it is": ("d f {R:dp} -> d f {R:dp}", lambda w: w, lambda w: w),
    "scaled": ("d f {R:dp} -> d f {R:dp}", lambda w: w * 2 - 1, lambda w: w * 2 - 1),
    "nonlinear": ("d f {R:dp,tp} -> d f {R:dp,tp}", jnp.tanh, np.tanh),
    "created here": ("d f -> d f {R:dp}", lambda w: spmd.defer(w, "d f -> d f {R:dp}") * 3, lambda w: w * 3),
    "passed on": (
        "d f/tp {R:dp} -> d f {R:dp}",
        lambda w: spmd.all_gather(w, "d f/tp -> d f", to="invarying"),
        lambda w: w,
    ),
    "summed": (
        "d f {R:dp} -> {U:dp}",
        lambda w: spmd.reduce(w[None] * spmd.iota("b/dp", b=2).astype(w.dtype)[:, None, None], "b/dp d f -> {U:dp}"),
        lambda w: w.sum(),
    ),
    "used by what is divided": (
        "b/dp d, d f {R:dp} -> b/dp f",
        lambda x, w: spmd.einsum(x, w, "b/dp d, d f {R:dp} -> b/dp f") + 1,
        lambda x, w: x @ w + 1,
    ),
}


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_arguments_and_results(name, mode):
    """In the body a reduced value is a copy like any other; its type is JAX's own outside only."""
    pattern, body, plain = REDUCED[name]
    mesh = mesh_of((E, E))
    kernel = spmd.kernel(pattern, mesh=mesh)(body)
    args = (X, W)[2 - len(kernel.signature.params) :]
    weights = np.cos(np.arange(np.size(plain(*args)), dtype=np.float32)).reshape(np.shape(plain(*args)))

    def loss(f):
        return lambda *args: (jax.sharding.reshard(f(*args), P()) * weights).sum()

    with spmd.mode(mode), jax.set_mesh(mesh):
        for run in (kernel, jax.jit(kernel)):
            np.testing.assert_allclose(jax.sharding.reshard(run(*args), P()), plain(*args), rtol=1e-5)
        found = jax.grad(loss(kernel), tuple(range(len(args))))(*map(jnp.asarray, args))
    plainly = {np.tanh: jnp.tanh}.get(plain, plain)
    wanted = jax.grad(lambda *args: (plainly(*args) * weights).sum(), tuple(range(len(args))))(*map(jnp.asarray, args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, wanted)


def test_a_reduced_argument_that_leaves_whole():
    kernel = spmd.kernel("d f {R:dp} -> d f", mesh=mesh_of((E, E)))(lambda w: w * 2)
    with pytest.raises(ReplicationError, match="result is equal on dp, and typed varying"):
        kernel(W)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_an_argument_that_the_compiler_cannot_move(mode) -> None:
    """On axes of 3 and 2 XLA of jax 0.12 ends the process at this change, done at once."""
    mesh = spmd.make_mesh(x=3, y=2, devices=jax.devices()[:6])
    x = np.arange(6.0 * 10 * 4, dtype=np.float32).reshape(6, 10, 4)
    held = spmd.shard(x, "a/y/x b c", mesh=mesh)
    run = getattr(spmd.kernel("a/x b/y c -> a/x b/y c", mesh=mesh)(lambda x: x * x), mode)
    np.testing.assert_array_equal(run(held), x * x)
    np.testing.assert_array_equal(run(held), x * x)  # warm
    gradient = jax.grad(lambda x: run(x).sum())(held)
    np.testing.assert_array_equal(gradient, 2 * x)
    assert gradient.sharding.is_equivalent_to(held.sharding, 3)
