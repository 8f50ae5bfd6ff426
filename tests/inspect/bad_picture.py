"""Wrong pictures."""

from __future__ import annotations

import jax
import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

MESH = {"dp": 2, "tp": 4}


@bad
def picture_of_a_pattern(mesh):
    spmd.visualize("b/dp d -> b d", (8, 4), mesh)


@bad
def picture_without_a_mesh(mesh):
    spmd.visualize("b/dp d", (8, 4))


@fixed
def picture_without_a_mesh_fixed(mesh):
    assert str(spmd.visualize("b/dp d", (8, 4), mesh=spmd.make_mesh(dp=2, tp=4)))


@bad
def picture_with_an_unknown_axis(mesh):
    spmd.visualize("b/pd d", (8, 4), mesh)


@fixed
def picture_with_an_unknown_axis_fixed(mesh, fix):
    assert str(spmd.visualize(fix(), (8, 4), mesh)) == str(spmd.visualize("b/dp d", (8, 4), mesh))


@bad
def picture_of_sizes_that_do_not_divide(mesh):
    spmd.visualize("b/dp d/tp", (7, 6), mesh)


@bad
def picture_of_margins_that_do_not_divide(mesh):
    spmd.visualize("1+x/dp+1 y", (7, 6), mesh)


@bad
def picture_of_a_known_size_that_does_not_divide(mesh):
    spmd.visualize("b/dp (h k)/tp", {"h": 6, "k": 2}, mesh)


@bad
def picture_with_too_few_sizes(mesh):
    spmd.visualize("b/dp d", (8,), mesh)


@bad
def picture_with_the_size_of_a_stranger(mesh):
    spmd.visualize("batch/dp d", {"bach": 8, "e": 2}, mesh)


@bad
def picture_with_odd_sizes(mesh):
    spmd.visualize("b/dp d", {"b": 8.0, "d": -1}, mesh)


@bad
def picture_with_a_shape_that_is_none(mesh):
    spmd.visualize("b/dp", 8, mesh)


@bad
def picture_of_a_sharding(mesh):
    spmd.visualize(spmd.Layout("b/dp d").sharding(mesh), (8, 4))


@bad
def picture_with_an_odd_mesh(mesh):
    spmd.visualize("b/dp d", (8, 4), 8)


@bad
def picture_with_an_odd_axis_size(mesh):
    spmd.visualize("b/dp d", (8, 4), {"dp": 0})


@bad
def picture_of_unknown_rank(mesh):
    spmd.visualize("... d/tp", {"d": 8}, mesh)


@bad
def picture_of_an_array_with_a_mesh(mesh):
    spmd.visualize(jax.numpy.ones((2, 2)), mesh=mesh)


@fixed
def picture_of_an_array_with_a_mesh_fixed(mesh, fix):
    assert "2" in str(fix(x=jax.numpy.ones((2, 2))))


@bad
def picture_of_a_numpy_array(mesh):
    spmd.visualize(X)


@bad
def picture_of_a_tree(mesh):
    spmd.visualize({"w": X})


@fixed
def picture_of_a_tree_fixed(mesh, fix):
    fix(tree={"w": jax.numpy.asarray(X)})


@bad
def picture_while_jit_traces(mesh):
    jax.jit(lambda x: (spmd.visualize(x), x)[1])(X)


@bad
def picture_in_a_kernel_of_another_axis(mesh):
    body("b/dp d -> b/dp d", lambda x: (spmd.visualize("b/dp d/ep"), x)[1], mesh)


@bad
def picture_saved_as_something_else(mesh):
    spmd.visualize("b/dp d", (8, 4), MESH).save("picture.gif")


@fixed
def picture_of_a_numpy_array_fixed(mesh):
    assert str(spmd.visualize("b/dp d", np.shape(X), mesh=mesh))


@bad
def picture_of_a_factor_that_does_not_divide(mesh):
    spmd.visualize("(h k)/tp", {"h": 3}, MESH)
