"""What the assertions of `spmd.testing` cannot work with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.testing import (
    assert_collectives,
    assert_modes_agree,
    assert_no_unwritten_collectives,
    assert_same_on_any_mesh,
    assert_sharded,
)
from tests.errors.registry import X, bad, fixed


def gather(mesh):
    return spmd.kernel("b/dp d -> b d", mesh=mesh)(lambda x: spmd.all_gather(x, "b/dp d -> b d", to="invarying"))


def lying(mesh, layout="b/dp d"):
    return jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=spmd.Layout(layout).sharding(mesh))


@bad
def budget_of_an_unknown_kind(mesh):
    assert_collectives(gather(mesh), (X,), {"allgather": {"dp": 1}})


@fixed
def budget_of_an_unknown_kind_fixed(mesh):
    assert_collectives(gather(mesh), (lying(mesh),), {"all_gather": {"dp": 1}})


@bad
def budget_of_bytes_that_are_text(mesh):
    assert_collectives(gather(mesh), (X,), {"all_gather": {"dp": 1}}, bytes="96")


@bad
def budget_of_a_compiled_program_as_written(mesh):
    assert_collectives(gather(mesh).lower(X), (), {"all_gather": {"dp": 1}}, view="written")


@fixed
def budget_of_a_compiled_program_as_written_fixed(mesh):
    assert_collectives(gather(mesh).lower(lying(mesh)), (), {"all_gather": {"dp": 1}})


@bad
def budget_of_an_unknown_axis(mesh):
    assert_collectives(gather(mesh), (X,), {"all_gather": {"data": 1}}, view="written")


@bad
def budget_of_an_unknown_view(mesh):
    assert_collectives(gather(mesh), (X,), {"all_gather": {"dp": 1}}, view="compile")


@bad
def budget_that_is_no_dict(mesh):
    assert_collectives(gather(mesh), (X,), [("all_gather", 1)])


@bad
def budget_of_axes_as_a_tuple(mesh):
    assert_collectives(gather(mesh), (X,), {"all_gather": {("dp", "tp"): 1}})


@bad
def budget_of_half_a_collective(mesh):
    assert_collectives(gather(mesh), (X,), {"all_gather": {"dp": 1.5}})


@bad
def budget_compiled_without_devices(mesh):
    assert_collectives(gather(spmd.make_mesh(dp=2, tp=4, abstract=True)), (X,), {"all_gather": {"dp": 1}})


@fixed
def budget_compiled_without_devices_fixed(mesh, fix):
    abstract = gather(spmd.make_mesh(dp=2, tp=4, abstract=True))
    assert_collectives(abstract, (X,), {"all_gather": {"dp": 1}}, **fix())


@bad
def unwritten_without_devices(mesh):
    assert_no_unwritten_collectives(gather(spmd.make_mesh(dp=2, tp=4, abstract=True)), (X,))


@bad
def budget_of_loose_arguments(mesh):
    assert_no_unwritten_collectives(gather(mesh), lying(mesh))


@fixed
def budget_of_loose_arguments_fixed(mesh):
    assert_no_unwritten_collectives(gather(mesh), (lying(mesh),))


@bad
def sharded_tree_of_plain_arrays(mesh):
    assert_sharded({"w": np.ones((8, 4))})


@fixed
def sharded_tree_of_plain_arrays_fixed(mesh):
    tree = {"w": np.ones((8, 4))}
    assert_sharded(spmd.shard(tree, "d/dp f/tp", mesh=mesh))


@bad
def sharded_over_an_unknown_axis(mesh):
    assert_sharded({"w": lying(mesh)}, axes=("dq",))


@bad
def sharded_as_a_layout_with_an_unknown_axis(mesh):
    assert_sharded({"w": lying(mesh)}, layouts={"w": "b/data d"})


@bad
def sharded_as_a_layout_of_another_rank(mesh):
    assert_sharded({"b": {"w": lying(mesh)}}, layouts={"b": "d/dp"})


@fixed
def sharded_as_a_layout_of_another_rank_fixed(mesh, fix):
    assert_sharded({"b": {"w": lying(mesh, "_ d/dp")}}, layouts={"b": fix()})


@bad
def sharded_as_a_layout_of_more_dimensions(mesh):
    assert_sharded({"w": lying(mesh)}, layouts="... l b/dp d")


@bad
def sharded_on_two_meshes(mesh):
    assert_sharded({"w": lying(mesh), "v": lying(spmd.make_mesh(dp=4, tp=2))})


@bad
def sharded_with_a_leaf_without_layout(mesh):
    assert_sharded({"w": lying(mesh)}, layouts={"w": None})


@bad
def sharded_with_a_layout_for_the_tolerance(mesh):
    assert_sharded({"w": lying(mesh)}, "b/dp d")


@bad
def sharded_with_less_than_no_tolerance(mesh):
    assert_sharded({"w": lying(mesh)}, tolerance=-0.1)


@bad
def agreement_of_one_mode(mesh):
    assert_modes_agree(gather(mesh), X, modes=("auto",))


@fixed
def agreement_of_one_mode_fixed(mesh, fix):
    assert_modes_agree(gather(mesh), X, **fix())


@bad
def agreement_of_an_unknown_mode(mesh):
    assert_modes_agree(gather(mesh), X, modes=("manual", "reference"))


@bad
def agreement_without_values(mesh):
    assert_modes_agree(gather(mesh), jax.ShapeDtypeStruct((8, 4), jnp.float32))


@bad
def any_mesh_without_a_mesh(mesh):
    assert_same_on_any_mesh(gather(None), X)


@fixed
def any_mesh_without_a_mesh_fixed(mesh):
    assert_same_on_any_mesh(gather(None), X, mesh=mesh)


@bad
def any_mesh_of_one_device(mesh):
    assert_same_on_any_mesh(gather(spmd.make_mesh(dp=1)), X)


@bad
def any_mesh_with_other_axes(mesh):
    assert_same_on_any_mesh(gather(mesh), X, meshes=[{"data": 2}])


@bad
def any_mesh_with_a_number(mesh):
    assert_same_on_any_mesh(gather(mesh), X, meshes=[4])


@bad
def any_mesh_without_all_arguments(mesh):
    assert_same_on_any_mesh(lambda x, w: gather(mesh)(x @ w), X, mesh=mesh)


@fixed
def any_mesh_without_all_arguments_fixed(mesh):
    assert_same_on_any_mesh(lambda x, w: gather(mesh)(x @ w), X, X.T, mesh=mesh)


@bad
def any_mesh_with_a_build_of_nothing(mesh):
    assert_same_on_any_mesh(lambda mesh: None, X, X, mesh=mesh)


@bad
def any_mesh_of_a_function_without_results(mesh):
    assert_same_on_any_mesh(lambda x: None, X, mesh=mesh)


@bad
def any_mesh_of_nothing_but_nan(mesh):
    assert_same_on_any_mesh(spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: jnp.log(x)), -1 - X)


@bad
def an_array_in_place_of_a_kernel(mesh):
    assert_same_on_any_mesh(jnp.ones((8, 4)), X)


@fixed
def an_array_in_place_of_a_kernel_fixed(mesh):
    assert_same_on_any_mesh(gather(mesh), X)


@bad
def any_mesh_of_what_has_no_gradient(mesh):
    """JAX has no derivative of a pmax."""
    assert_same_on_any_mesh(spmd.kernel("b/dp d -> d", mesh=mesh)(lambda x: jax.lax.pmax(x.max(0), "dp")), X)


@fixed
def any_mesh_of_what_has_no_gradient_fixed(mesh, fix):
    kernel = spmd.kernel("b/dp d -> d", mesh=mesh)(lambda x: jax.lax.pmax(x.max(0), "dp"))
    assert_same_on_any_mesh(kernel, X, **fix())
