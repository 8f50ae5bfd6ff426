"""What the assertions of `spmd.testing` cannot work with."""

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


bad(
    budget_of_an_unknown_kind=(
        lambda mesh: assert_collectives(gather(mesh), (X,), {"allgather": {"dp": 1}}),
        lambda mesh: assert_collectives(gather(mesh), (lying(mesh),), {"all_gather": {"dp": 1}}),
    ),
    budget_of_bytes_that_are_text=lambda mesh: assert_collectives(
        gather(mesh), (X,), {"all_gather": {"dp": 1}}, bytes="96"
    ),
    budget_of_a_compiled_program_as_written=(
        lambda mesh: assert_collectives(gather(mesh).lower(X), (), {"all_gather": {"dp": 1}}, view="written"),
        lambda mesh: assert_collectives(gather(mesh).lower(lying(mesh)), (), {"all_gather": {"dp": 1}}),
    ),
    budget_of_an_unknown_axis=lambda mesh: assert_collectives(
        gather(mesh), (X,), {"all_gather": {"data": 1}}, view="written"
    ),
    budget_of_an_unknown_view=lambda mesh: assert_collectives(
        gather(mesh), (X,), {"all_gather": {"dp": 1}}, view="compile"
    ),
    budget_that_is_no_dict=lambda mesh: assert_collectives(gather(mesh), (X,), [("all_gather", 1)]),
    budget_of_axes_as_a_tuple=lambda mesh: assert_collectives(gather(mesh), (X,), {"all_gather": {("dp", "tp"): 1}}),
    budget_of_half_a_collective=lambda mesh: assert_collectives(gather(mesh), (X,), {"all_gather": {"dp": 1.5}}),
    budget_compiled_without_devices=lambda mesh: assert_collectives(
        gather(spmd.make_mesh(dp=2, tp=4, abstract=True)), (X,), {"all_gather": {"dp": 1}}
    ),
)


@fixed
def budget_compiled_without_devices_fixed(mesh, fix):
    abstract = gather(spmd.make_mesh(dp=2, tp=4, abstract=True))
    assert_collectives(abstract, (X,), {"all_gather": {"dp": 1}}, **fix())


bad(
    unwritten_without_devices=lambda mesh: assert_no_unwritten_collectives(
        gather(spmd.make_mesh(dp=2, tp=4, abstract=True)), (X,)
    ),
    budget_of_loose_arguments=(
        lambda mesh: assert_no_unwritten_collectives(gather(mesh), lying(mesh)),
        lambda mesh: assert_no_unwritten_collectives(gather(mesh), (lying(mesh),)),
    ),
    sharded_tree_of_plain_arrays=lambda mesh: assert_sharded({"w": np.ones((8, 4))}),
)


@fixed
def sharded_tree_of_plain_arrays_fixed(mesh):
    tree = {"w": np.ones((8, 4))}
    assert_sharded(spmd.shard(tree, "d/dp f/tp", mesh=mesh))


bad(
    sharded_over_an_unknown_axis=lambda mesh: assert_sharded({"w": lying(mesh)}, axes=("dq",)),
    sharded_as_a_layout_with_an_unknown_axis=lambda mesh: assert_sharded({"w": lying(mesh)}, layouts={"w": "b/data d"}),
    sharded_as_a_layout_of_another_rank=(
        lambda mesh: assert_sharded({"b": {"w": lying(mesh)}}, layouts={"b": "d/dp"}),
        lambda mesh, fix: assert_sharded({"b": {"w": lying(mesh, "_ d/dp")}}, layouts={"b": fix()}),
    ),
    sharded_as_a_layout_of_more_dimensions=lambda mesh: assert_sharded({"w": lying(mesh)}, layouts="... l b/dp d"),
    sharded_on_two_meshes=lambda mesh: assert_sharded({"w": lying(mesh), "v": lying(spmd.make_mesh(dp=4, tp=2))}),
    sharded_with_a_leaf_without_layout=lambda mesh: assert_sharded({"w": lying(mesh)}, layouts={"w": None}),
    sharded_with_a_layout_for_the_tolerance=lambda mesh: assert_sharded({"w": lying(mesh)}, "b/dp d"),
    sharded_with_less_than_no_tolerance=lambda mesh: assert_sharded({"w": lying(mesh)}, tolerance=-0.1),
    agreement_of_one_mode=(
        lambda mesh: assert_modes_agree(gather(mesh), X, modes=("auto",)),
        lambda mesh, fix: assert_modes_agree(gather(mesh), X, **fix()),
    ),
    agreement_of_an_unknown_mode=lambda mesh: assert_modes_agree(gather(mesh), X, modes=("manual", "reference")),
    agreement_without_values=lambda mesh: assert_modes_agree(gather(mesh), jax.ShapeDtypeStruct((8, 4), jnp.float32)),
    any_mesh_without_a_mesh=(
        lambda mesh: assert_same_on_any_mesh(gather(None), X),
        lambda mesh: assert_same_on_any_mesh(gather(None), X, mesh=mesh),
    ),
    any_mesh_of_one_device=lambda mesh: assert_same_on_any_mesh(gather(spmd.make_mesh(dp=1)), X),
    any_mesh_with_other_axes=lambda mesh: assert_same_on_any_mesh(gather(mesh), X, meshes=[{"data": 2}]),
    any_mesh_with_a_number=lambda mesh: assert_same_on_any_mesh(gather(mesh), X, meshes=[4]),
)


@bad
def any_mesh_without_all_arguments(mesh):
    assert_same_on_any_mesh(lambda x, w: gather(mesh)(x @ w), X, mesh=mesh)


@fixed
def any_mesh_without_all_arguments_fixed(mesh):
    assert_same_on_any_mesh(lambda x, w: gather(mesh)(x @ w), X, X.T, mesh=mesh)


bad(
    any_mesh_with_a_build_of_nothing=lambda mesh: assert_same_on_any_mesh(lambda mesh: None, X, X, mesh=mesh),
    any_mesh_of_a_function_without_results=lambda mesh: assert_same_on_any_mesh(lambda x: None, X, mesh=mesh),
    any_mesh_of_nothing_but_nan=lambda mesh: assert_same_on_any_mesh(
        spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: jnp.log(x)), -1 - X
    ),
    an_array_in_place_of_a_kernel=(
        lambda mesh: assert_same_on_any_mesh(jnp.ones((8, 4)), X),
        lambda mesh: assert_same_on_any_mesh(gather(mesh), X),
    ),
    # JAX has no derivative of a pmax.
    any_mesh_of_what_has_no_gradient=lambda mesh: assert_same_on_any_mesh(
        spmd.kernel("b/dp d -> d", mesh=mesh)(lambda x: jax.lax.pmax(x.max(0), "dp")), X
    ),
)


@fixed
def any_mesh_of_what_has_no_gradient_fixed(mesh, fix):
    kernel = spmd.kernel("b/dp d -> d", mesh=mesh)(lambda x: jax.lax.pmax(x.max(0), "dp"))
    assert_same_on_any_mesh(kernel, X, **fix())
