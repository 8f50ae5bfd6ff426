"""Placement by named axes that cannot be, and what Haliax passes over in silence."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import haliax as hax
from tests.errors.registry import X, bad, fixed

RULES = {"batch": "dp", "embed": None, "mlp": "tp"}


bad(
    sharding_of_a_function_of_paths=lambda mesh: spmd.haliax.sharding_for_axis(
        lambda path: "embed mlp", {"embed": "dp", "mlp": None}, mesh
    ),
    names_without_a_mapping=lambda mesh: hax.shard(X, "batch embed", mesh=mesh),
)


@fixed
def names_without_a_mapping_fixed(mesh):
    with hax.axis_mapping({"batch": "dp", "embed": None}):
        hax.shard(X, "batch embed", mesh=mesh)


bad(
    a_name_the_mapping_lacks=lambda mesh: hax.shard(
        {"w": X, "b": X[0]}, {"w": "batch embd", "b": "embed"}, RULES, mesh
    ),
    a_rule_with_an_axis_the_mesh_lacks=lambda mesh: hax.shard(X, "batch embed", {"batch": "data", "embed": None}, mesh),
    a_tree_with_an_array_that_has_no_names=lambda mesh: hax.shard(
        {"w": X, "b": X[0]}, {"w": "batch embed"}, RULES, mesh
    ),
    a_name_that_is_asked_for_and_unknown=lambda mesh: hax.physical_axis_name("embd", RULES),
    an_axis_without_a_mesh=lambda mesh: hax.physical_axis_size("batch", RULES),
    an_axis_of_another_mesh=lambda mesh: hax.round_axis_for_partitioning("batch", 13, {"batch": "data"}, mesh),
    an_axis_that_is_no_name=lambda mesh: hax.physical_axis_name(0, RULES),
    specs_of_an_unknown_name=lambda mesh: hax.pspec_for({"w": "embed heads"}, RULES),
    arguments_with_a_mapping_and_no_names=lambda mesh: hax.named_jit(jnp.sin, RULES, in_axis_resources=RULES),
    results_with_names_and_no_mapping=lambda mesh: hax.named_jit(jnp.sin, out_names="batch embed")(X),
)


@fixed
def results_with_names_and_no_mapping_fixed(mesh):
    with jax.set_mesh(mesh), hax.axis_mapping(RULES):
        np.testing.assert_allclose(hax.named_jit(jnp.sin, out_names="batch embed")(X), np.sin(X), atol=1e-6)


bad(
    names_of_arguments_that_are_no_tuple=lambda mesh: hax.named_jit(jnp.sin, RULES, in_names="batch embed"),
    names_for_another_number_of_arguments=lambda mesh: hax.named_jit(jnp.add, RULES, in_names=("batch embed",))(X, X),
    names_of_a_parameter_that_is_not_there=lambda mesh: hax.named_jit(
        lambda x, weight: x, RULES, in_names={"x": "batch embed", "weigth": "embed"}
    )(X, X),
    static_arguments_by_number=(
        lambda mesh: hax.named_jit(lambda x, n: x * n, RULES, static_argnums=(1,)),
        lambda mesh: np.testing.assert_array_equal(hax.named_jit(lambda x, n: x * n, RULES)(X, 2), 2 * X),
    ),
    a_mapping_where_the_function_belongs=lambda mesh: hax.named_jit(RULES),
    donation_of_what_is_not_there=lambda mesh: hax.named_jit(lambda tree: tree["w"], donate_args=({"v": True},))(
        {"w": X}
    ),
)


@bad
def an_argument_without_a_hash(mesh):
    class Table:
        __hash__ = None

    hax.named_jit(lambda x, table: x)(X, Table())


bad(
    fsdp_without_a_mapping_to_compute_by=lambda mesh: hax.fsdp(jnp.sin, parameter_mapping=RULES),
)


@bad
def arguments_on_two_meshes(mesh):
    devices = jax.devices()
    halves = [spmd.make_mesh(dp=2, devices=devices[i : i + 2]) for i in (0, 2)]
    x, y = (spmd.shard(X, "b/dp d", mesh=half) for half in halves)
    spmd.kernel("b/dp d, b/dp d -> b/dp d")(lambda x, y: x + y)(x, y)


@fixed
def arguments_on_two_meshes_fixed(mesh):
    devices = jax.devices()
    halves = [spmd.make_mesh(dp=2, devices=devices[i : i + 2]) for i in (0, 2)]
    x, y = (spmd.shard(X, "b/dp d", mesh=half) for half in halves)
    out = spmd.kernel("b/dp d, b/dp d -> b/dp d", mesh=halves[1])(lambda x, y: x + y)(x, y)
    np.testing.assert_array_equal(out, 2 * X)
    assert out.sharding.mesh == halves[1]
