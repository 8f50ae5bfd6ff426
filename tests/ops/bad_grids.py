"""Grids and functions of positions that cannot be."""

import jax.numpy as jnp
import numpy as np

import spmd
from tests.errors.registry import V, bad, body, fixed

SAME = "b/dp d -> b/dp d"


bad(
    a_linspace_of_integers=lambda mesh: body(SAME, lambda x: x + spmd.linspace(0, 8, "b/dp", dtype=int)[:, None], mesh),
    a_linspace_between_arrays=lambda mesh: body(SAME, lambda x: x + spmd.linspace(x[0], x[1], "b/dp")[:, None], mesh),
    a_linspace_of_a_grid=lambda mesh: body(SAME, lambda x: x + spmd.linspace(0, 1, "b/dp d"), mesh),
    a_grid_that_lacks_a_side=lambda mesh: body(
        "x/dp -> x/dp", lambda x: spmd.meshgrid(x, jnp.ones(3), "x/dp, y -> x/dp")[0], mesh, V
    ),
    a_grid_that_moves=lambda mesh: body(
        "x -> x/dp", lambda x: spmd.meshgrid(x, jnp.ones(3), "x, y -> x/dp y")[0][:, 0], mesh, V
    ),
)


@fixed
def a_grid_that_moves_fixed(mesh):
    def fn(x):
        x = spmd.relayout(x, "x -> x/dp")
        return spmd.meshgrid(x, jnp.ones(3), "x/dp, y -> x/dp y")[0][:, 0]

    np.testing.assert_array_equal(body("x -> x/dp", fn, mesh, V), V)


bad(
    a_grid_of_tables=lambda mesh: body(SAME, lambda x: spmd.meshgrid(x, "b/dp d -> b/dp d")[0], mesh),
    a_function_of_positions_of_another_shape=lambda mesh: spmd.from_function(
        lambda i, j: i + jnp.ones((1, 3), int), "x/dp y", x=4, y=5, mesh=mesh
    ),
    a_function_of_positions_in_the_second_place=lambda mesh: spmd.from_function("x/dp", lambda i: i, x=4, mesh=mesh),
    a_function_of_positions_that_is_none=lambda mesh: body(SAME, lambda x: x + spmd.from_function(1.0, "b/dp d"), mesh),
    a_function_of_positions_as_a_partial_sum=lambda mesh: body(
        SAME, lambda x: x + spmd.from_function(lambda i: i, "d {U:dp}")[None], mesh
    ),
    positions_without_sizes=lambda mesh: spmd.from_function(lambda i: i, "x/dp", mesh=mesh),
    a_second_mesh_inside_a_kernel=lambda mesh: body(
        SAME, lambda x: x + spmd.from_function(lambda i, j: i + j, "b/dp d", mesh=mesh), mesh
    ),
    a_function_of_too_few_positions=lambda mesh: spmd.from_function(lambda i: i, "x/dp y", x=8, y=3, mesh=mesh),
)


@fixed
def a_function_of_too_few_positions_fixed(mesh):
    assert spmd.from_function(lambda i, j: i, "x/dp y", x=8, y=3, mesh=mesh).shape == (8, 3)
