"""Wrong pictures."""

import jax
import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

MESH = {"dp": 2, "tp": 4}


bad(
    picture_of_a_pattern=lambda mesh: spmd.visualize("b/dp d -> b d", (8, 4), mesh),
    picture_without_a_mesh=lambda mesh: spmd.visualize("b/dp d", (8, 4)),
)


@fixed
def picture_without_a_mesh_fixed(mesh):
    assert str(spmd.visualize("b/dp d", (8, 4), mesh=spmd.make_mesh(dp=2, tp=4)))


bad(
    picture_with_an_unknown_axis=lambda mesh: spmd.visualize("b/pd d", (8, 4), mesh),
)


@fixed
def picture_with_an_unknown_axis_fixed(mesh, fix):
    assert str(spmd.visualize(fix(), (8, 4), mesh)) == str(spmd.visualize("b/dp d", (8, 4), mesh))


bad(
    picture_of_sizes_that_do_not_divide=lambda mesh: spmd.visualize("b/dp d/tp", (7, 6), mesh),
    picture_of_margins_that_do_not_divide=lambda mesh: spmd.visualize("1+x/dp+1 y", (7, 6), mesh),
    picture_of_a_known_size_that_does_not_divide=lambda mesh: spmd.visualize("b/dp (h k)/tp", {"h": 6, "k": 2}, mesh),
    picture_with_too_few_sizes=lambda mesh: spmd.visualize("b/dp d", (8,), mesh),
    picture_with_the_size_of_a_stranger=lambda mesh: spmd.visualize("batch/dp d", {"bach": 8, "e": 2}, mesh),
    picture_with_odd_sizes=lambda mesh: spmd.visualize("b/dp d", {"b": 8.0, "d": -1}, mesh),
    picture_with_a_shape_that_is_none=lambda mesh: spmd.visualize("b/dp", 8, mesh),
    picture_of_a_sharding=lambda mesh: spmd.visualize(spmd.Layout("b/dp d").sharding(mesh), (8, 4)),
    picture_with_an_odd_mesh=lambda mesh: spmd.visualize("b/dp d", (8, 4), 8),
    picture_with_an_odd_axis_size=lambda mesh: spmd.visualize("b/dp d", (8, 4), {"dp": 0}),
    picture_of_unknown_rank=lambda mesh: spmd.visualize("... d/tp", {"d": 8}, mesh),
    picture_of_an_array_with_a_mesh=lambda mesh: spmd.visualize(jax.numpy.ones((2, 2)), mesh=mesh),
)


@fixed
def picture_of_an_array_with_a_mesh_fixed(mesh, fix):
    assert "2" in str(fix(x=jax.numpy.ones((2, 2))))


bad(
    picture_of_a_numpy_array=lambda mesh: spmd.visualize(X),
    picture_of_a_tree=(
        lambda mesh: spmd.visualize({"w": X}),
        lambda mesh, fix: fix(tree={"w": jax.numpy.asarray(X)}),
    ),
    picture_while_jit_traces=lambda mesh: jax.jit(lambda x: (spmd.visualize(x), x)[1])(X),
    picture_in_a_kernel_of_another_axis=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: (spmd.visualize("b/dp d/ep"), x)[1], mesh
    ),
    picture_saved_as_something_else=lambda mesh: spmd.visualize("b/dp d", (8, 4), MESH).save("picture.gif"),
)


@fixed
def picture_of_a_numpy_array_fixed(mesh):
    assert str(spmd.visualize("b/dp d", np.shape(X), mesh=mesh))


bad(
    picture_of_a_factor_that_does_not_divide=lambda mesh: spmd.visualize("(h k)/tp", {"h": 3}, MESH),
)
