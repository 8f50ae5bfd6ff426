"""What the tests of kernels share: numbers, one layer as a kernel and in plain JAX, and how results are compared."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import spmd

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-2, 1, 64, dtype=np.float32).reshape(8, 8)

_AUTO, _EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "auto": (_AUTO, _AUTO),
    "explicit": (_EXPLICIT, _EXPLICIT),
    "auto explicit": (_AUTO, _EXPLICIT),
    "explicit auto": (_EXPLICIT, _AUTO),
}


def layer_on(mesh):
    @spmd.kernel("b/dp d, d f/tp -> b/dp f", mesh=mesh)
    def layer(x, w):
        h = jnp.tanh(spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp"))
        return spmd.all_gather(h, "b/dp f/tp -> b/dp f", to="invarying")

    return layer


def plain(x, w):
    return jnp.tanh(x @ w)


def close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def mesh_of(kinds, shape=(2, 4), names=("dp", "tp")):
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:count])


def linear_on(mesh, **options):
    @spmd.kernel("b/dp d/tp, d/tp f -> b/dp f", mesh=mesh, **options)
    def linear(x, w):
        return spmd.einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f")

    return linear
