"""A kernel made ready: on every type of mesh, in every mode, with the keywords and marks that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import LayoutError, MeshError, ReplicationError
from tests.kernels.harness import KINDS, linear_on, mesh_of
from tests.kernels.test_meshes import A, E, W, X
from tests.sampler import share

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
@pytest.mark.parametrize("kinds", share(KINDS))
def test_types_of_axes(kinds, mode):
    """NumPy inputs, values and gradients, with and without an outer jit, with and without set_mesh."""
    mesh = mesh_of(KINDS[kinds])
    linear = linear_on(mesh)
    loss = lambda x, w: (linear(x, w) ** 2).sum()
    wanted = jax.jit(jax.grad(lambda x, w: ((x @ w) ** 2).sum(), (0, 1)))(X, W)
    with spmd.mode(mode):
        np.testing.assert_allclose(linear(X, W), X @ W, rtol=1e-5)
        gradients = [jax.jit(jax.grad(loss, (0, 1)))(X, W)]
        np.testing.assert_allclose(jax.jit(linear).lower(X, W).compile()(X, W), X @ W, rtol=1e-5)
        with jax.set_mesh(mesh):
            gradients.append(jax.grad(loss, (0, 1))(X, W))
            np.testing.assert_allclose(jax.jit(linear)(X, W), X @ W, rtol=1e-5)
    for found in gradients:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)


@pytest.mark.parametrize("sizes", share([(1, 8), (8, 1), (1, 1), (4, 1)]), ids=str)
def test_axes_of_size_one(sizes):
    x, w = np.ones((8, 8), np.float32), W
    for kinds in ((A, A), (E, E)):
        linear = linear_on(mesh_of(kinds, sizes))
        np.testing.assert_allclose(linear(x, w), x @ w, rtol=1e-5)
        gradient = jax.jit(jax.grad(lambda w, f=linear: f(x, w).sum()))(w)
        np.testing.assert_allclose(gradient, np.full_like(w, 8), rtol=1e-5)


@pytest.mark.parametrize("kinds", share([(A, A, A), (E, E, E), (A, E, A)]), ids=str)
def test_axes_that_the_kernel_does_not_use(kinds):
    mesh = mesh_of(kinds, (2, 2, 2), ("pp", "dp", "tp"))
    linear = linear_on(mesh)
    np.testing.assert_allclose(linear(X, W), X @ W, rtol=1e-5)
    np.testing.assert_allclose(linear.auto(X, W), X @ W, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda w: linear(X, w).sum()))(W)
    np.testing.assert_allclose(gradient, np.repeat(X.sum(0)[:, None], 12, 1), rtol=1e-5)


def test_an_abstract_mesh_is_for_tracing():
    linear = linear_on(spmd.make_mesh(dp=2, tp=4, abstract=True))
    shapes = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    assert linear.trace(*shapes).jaxpr.out_avals[0].shape == (4, 12)
    np.testing.assert_allclose(linear.reference(X, W), X @ W, rtol=1e-5)
    with pytest.raises(MeshError, match="no devices"):
        linear(X, W)


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
@pytest.mark.parametrize("name", share(REDUCED))
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
    wanted = jax.jit(jax.grad(lambda *args: (plainly(*args) * weights).sum(), tuple(range(len(args)))))(
        *map(jnp.asarray, args)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, wanted)


def test_a_reduced_argument_that_leaves_whole():
    kernel = spmd.kernel("d f {R:dp} -> d f", mesh=mesh_of((E, E)))(lambda w: w * 2)
    with pytest.raises(ReplicationError, match="result is equal on dp, and typed varying"):
        kernel(W)


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_keywords_that_nothing_uses(mesh, mode):
    """A typo would go unnoticed. The body may use what the signature does not."""
    run = lambda fn, **options: getattr(spmd.kernel("b/dp d -> b/dp d", mesh=mesh, **options)(fn), mode)(X)
    X = np.ones((4, 8), np.float32)
    with pytest.raises(
        LayoutError, match="binds the size of bb, which no string of the kernel names; did you mean 'b'"
    ):
        run(lambda x: x, bb=4)
    with pytest.raises(LayoutError, match="renames the mesh axis ddp, which no string .* did you mean 'dp'"):
        run(lambda x: spmd.annotate(x, "b/dp d"), axes={"ddp": "tp"})
    with pytest.raises(LayoutError, match="the size of hh"):  # a library's own names are none of the kernel's
        run(
            lambda x: spmd.scope(lambda x: spmd.rearrange(x, "b/dp (hh k) -> b/dp hh k", hh=2).reshape(x.shape))(x),
            hh=2,
        )
    np.testing.assert_array_equal(run(lambda x: x, b=4), X)
    np.testing.assert_array_equal(run(lambda x: x * spmd.axis_size("mine"), axes={"mine": "dp"}), 2 * X)
    heads = lambda x: spmd.rearrange(spmd.rearrange(x, "... (h k) -> ... h k"), "... h k -> ... (h k)")
    np.testing.assert_array_equal(run(heads, h=4), X)
    split = jax.jit(lambda x: spmd.annotate(x, "... d/other"))  # traced once, for two kernels
    for _ in range(2):
        np.testing.assert_array_equal(run(lambda x: x + 0 * split(x), axes={"other": None}), X)
