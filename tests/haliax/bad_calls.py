"""Placement by named axes that cannot be, and what Haliax passes over in silence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import haliax as hax
from tests.errors.registry import X, bad, fixed

RULES = {"batch": "dp", "embed": None, "mlp": "tp"}


@bad
def sharding_of_a_function_of_paths(mesh):
    spmd.haliax.sharding_for_axis(lambda path: "embed mlp", {"embed": "dp", "mlp": None}, mesh)


@bad
def names_without_a_mapping(mesh):
    hax.shard(X, "batch embed", mesh=mesh)


@fixed
def names_without_a_mapping_fixed(mesh):
    with hax.axis_mapping({"batch": "dp", "embed": None}):
        hax.shard(X, "batch embed", mesh=mesh)


@bad
def a_name_the_mapping_lacks(mesh):
    hax.shard({"w": X, "b": X[0]}, {"w": "batch embd", "b": "embed"}, RULES, mesh)


@bad
def a_rule_with_an_axis_the_mesh_lacks(mesh):
    hax.shard(X, "batch embed", {"batch": "data", "embed": None}, mesh)


@bad
def a_tree_with_an_array_that_has_no_names(mesh):
    hax.shard({"w": X, "b": X[0]}, {"w": "batch embed"}, RULES, mesh)


@bad
def a_name_that_is_asked_for_and_unknown(mesh):
    hax.physical_axis_name("embd", RULES)


@bad
def an_axis_without_a_mesh(mesh):
    hax.physical_axis_size("batch", RULES)


@bad
def an_axis_of_another_mesh(mesh):
    hax.round_axis_for_partitioning("batch", 13, {"batch": "data"}, mesh)


@bad
def an_axis_that_is_no_name(mesh):
    hax.physical_axis_name(0, RULES)


@bad
def specs_of_an_unknown_name(mesh):
    hax.pspec_for({"w": "embed heads"}, RULES)


@bad
def arguments_with_a_mapping_and_no_names(mesh):
    hax.named_jit(jnp.sin, RULES, in_axis_resources=RULES)


@bad
def results_with_names_and_no_mapping(mesh):
    hax.named_jit(jnp.sin, out_names="batch embed")(X)


@fixed
def results_with_names_and_no_mapping_fixed(mesh):
    with jax.set_mesh(mesh), hax.axis_mapping(RULES):
        np.testing.assert_allclose(hax.named_jit(jnp.sin, out_names="batch embed")(X), np.sin(X), atol=1e-6)


@bad
def names_of_arguments_that_are_no_tuple(mesh):
    hax.named_jit(jnp.sin, RULES, in_names="batch embed")


@bad
def names_for_another_number_of_arguments(mesh):
    hax.named_jit(jnp.add, RULES, in_names=("batch embed",))(X, X)


@bad
def names_of_a_parameter_that_is_not_there(mesh):
    hax.named_jit(lambda x, weight: x, RULES, in_names={"x": "batch embed", "weigth": "embed"})(X, X)


@bad
def static_arguments_by_number(mesh):
    hax.named_jit(lambda x, n: x * n, RULES, static_argnums=(1,))


@fixed
def static_arguments_by_number_fixed(mesh):
    np.testing.assert_array_equal(hax.named_jit(lambda x, n: x * n, RULES)(X, 2), 2 * X)


@bad
def a_mapping_where_the_function_belongs(mesh):
    hax.named_jit(RULES)


@bad
def donation_of_what_is_not_there(mesh):
    hax.named_jit(lambda tree: tree["w"], donate_args=({"v": True},))({"w": X})


@bad
def an_argument_without_a_hash(mesh):
    class Table:
        __hash__ = None

    hax.named_jit(lambda x, table: x)(X, Table())


@bad
def fsdp_without_a_mapping_to_compute_by(mesh):
    hax.fsdp(jnp.sin, parameter_mapping=RULES)


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
