"""Any mesh that a user brings, and arguments that lie anywhere."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import MeshError
from tests.kernels.harness import KINDS, linear_on, mesh_of
from tests.sampler import share

A, E = AxisType.Auto, AxisType.Explicit
X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.arange(96, dtype=np.float32).reshape(8, 12) / 7


@pytest.mark.parametrize("kinds", KINDS)
def test_results_lie_as_the_signature_says(kinds):
    out = linear_on(mesh_of(KINDS[kinds]))(X, W)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh_of(KINDS[kinds]), P("dp", None)), 2)


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


@pytest.mark.parametrize("kinds", [A, E], ids=str)
@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_an_ambient_mesh_of_other_axes(mode, kinds):
    """A kernel has its own mesh, whatever surrounds it."""
    linear = linear_on(mesh_of((A, A)))
    with jax.set_mesh(mesh_of((kinds,), (8,), ("other",))), spmd.mode(mode):
        np.testing.assert_allclose(linear(X, W), X @ W, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(linear)(X, W), X @ W, rtol=1e-5)


@pytest.mark.parametrize("kinds", share([A, E]), ids=str)
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


@pytest.mark.parametrize("set_mesh", share([False, True]))
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
