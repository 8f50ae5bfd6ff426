"""A program whose lines the golden tables name: keep them where they are."""

from __future__ import annotations

import jax

import spmd
from spmd import all_gather, einsum

MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)


def make_mlp(mesh=MESH):
    @spmd.kernel("b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d", mesh=mesh)
    def mlp(x, w_in, w_out):
        x = all_gather(x, "b/dp s/tp d -> b/dp s d")
        w_in = all_gather(w_in, "d/dp f/tp -> d f/tp")
        h = jax.nn.gelu(einsum(x, w_in, "b/dp s d, d f/tp -> b/dp s f/tp"))
        w_out = all_gather(w_out, "f/tp d/dp -> f/tp d")
        return einsum(h, w_out, "b/dp s f/tp, f/tp d -> b/dp s/tp d")

    return mlp


def make_loss(mesh=MESH, layers=6):
    mlp = make_mlp(mesh)

    @spmd.kernel("b/dp s/tp d -> scalar", mesh=mesh)
    def norm(y):
        return einsum(y, y, "b/dp s/tp d, b/dp s/tp d -> scalar")

    def loss(x, w_in, w_out):
        step = lambda x, _: (jax.checkpoint(mlp)(x, w_in, w_out), None)
        return norm(jax.lax.scan(step, x, None, length=layers)[0])

    return jax.grad(loss, argnums=(1, 2))


def arguments(mesh=None, dtype="bfloat16"):
    """Shapes of x, w_in and w_out; with shardings where a mesh is given, x not as the kernel wants it."""
    layouts, shapes = ("b s/dp d", "d/dp f/tp", "f/tp d/dp"), ((16, 1024, 512), (512, 3072), (3072, 512))
    return [
        jax.ShapeDtypeStruct(shape, dtype, **({} if mesh is None else {"sharding": spmd.Layout(layout).sharding(mesh)}))
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
