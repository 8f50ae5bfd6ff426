"""Arguments that lie elsewhere are brought where the plan can use them."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import MeshError
from tests.kernels.harness import linear_on, mesh_of
from tests.kernels.test_meshes import A, W, X


def test_arguments_on_two_meshes():
    kernel = spmd.kernel("n/x, n/x -> n/x")(lambda a, b: a + b)
    a, b = (spmd.shard(np.ones(8), "n/x", mesh=spmd.make_mesh(x=n)) for n in (2, 4))
    with pytest.raises(MeshError, match="live on two meshes"):
        kernel(a, b)
    with_mesh = spmd.kernel("n/x, n/x -> n/x", mesh=spmd.make_mesh(x=4))(lambda a, b: a + b)
    assert with_mesh(a, b).tolist() == [2] * 8


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


def test_arrays_of_fewer_devices():
    """Some of the mesh's devices, or others."""
    small = spmd.make_mesh(dp=2, tp=2)
    x = jax.device_put(X, NamedSharding(mesh_of((A, A)), P("dp")))
    np.testing.assert_allclose(linear_on(small)(x, W), X @ W, rtol=1e-5)
    rest = spmd.make_mesh(devices=jax.devices()[4:], dp=2, tp=2)
    np.testing.assert_allclose(linear_on(rest)(linear_on(small)(X, W)[:, :8], W), (X @ W)[:, :8] @ W, rtol=1e-5)
