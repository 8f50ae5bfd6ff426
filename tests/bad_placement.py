"""Wrong calls of `shard`, `init` and their relatives, and trees of layouts that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from tests.errors.registry import V, X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


bad(
    shard_in_a_kernel=lambda mesh: body("b/dp d -> b/dp d", lambda x: spmd.shard(x, "b/dp d"), mesh),
    init_in_a_kernel=lambda mesh: body(
        SAME, lambda x: x + spmd.init(lambda: jnp.ones((8, 4)), "b/dp d", mesh=mesh)(), mesh
    ),
    layout_before_the_array=lambda mesh: spmd.shard("b/dp d", X, mesh=mesh),
)


@fixed
def layout_before_the_array_fixed(mesh):
    assert spmd.shard(X, "b/dp d", mesh=mesh).addressable_shards[0].data.shape == (4, 4)


bad(
    a_part_that_is_not_what_the_devices_hold=lambda mesh: spmd.from_process_local(
        {"x": X, "v": V}, {"x": "b/dp d", "v": "b"}, shape={"x": (16, 4), "v": (9,)}, mesh=mesh
    ),
)


@fixed
def a_part_that_is_not_what_the_devices_hold_fixed(mesh):
    rows = spmd.cluster.my_rows("b/dp d", (8, 4), mesh=mesh)
    assert spmd.from_process_local(X[rows], "b/dp d", shape=(8, 4), mesh=mesh).shape == (8, 4)


bad(
    a_global_shape_that_does_not_divide=lambda mesh: spmd.from_process_local(X[:7], "b/dp d", shape=[7, 4], mesh=mesh),
    a_global_shape_that_is_not_one=lambda mesh: spmd.from_process_local(X, "b/dp d", shape="8, 4", mesh=mesh),
    list_of_numbers_for_an_array=(
        lambda mesh: spmd.from_process_local([1, 2, 3, 4], "b/dp", mesh=mesh),
        lambda mesh: np.testing.assert_array_equal(
            spmd.from_process_local(np.array([1, 2, 3, 4]), "b/dp", mesh=mesh), [1, 2, 3, 4]
        ),
    ),
    number_with_a_dimension=lambda mesh: spmd.shard({"step": 3, "w": X}, {"step": "b", "w": "b d"}, mesh=mesh),
    partial_sum_placed=(
        lambda mesh: spmd.shard(X, "b d {U:dp}", mesh=mesh),
        lambda mesh, fix: np.testing.assert_array_equal(spmd.shard(X, fix(), mesh=mesh), X),
    ),
    dict_for_a_mesh=lambda mesh: spmd.shard(X, "b/dp d", mesh={"dp": 2, "tp": 4}),
    parameters_instead_of_a_function=lambda mesh: spmd.init({"w": X}, {"w": "b/dp d"}, mesh=mesh),
    created_on_an_abstract_mesh=lambda mesh: spmd.init(
        lambda: jnp.ones((8, 4)), "b/dp d", mesh=spmd.make_mesh(dp=2, abstract=True)
    )(),
)


@bad
def auto_axis_before_an_explicit_one(mesh):
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    mixed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=kinds)
    jax.jit(lambda x: spmd.shard(x, "b/dp/tp d", mesh=mixed))(X)


bad(
    one_layout_for_rules=lambda mesh: spmd.match_layouts({"w": X}, "b/dp d"),
    an_array_of_strings=lambda mesh: spmd.shard({"x": X, "names": np.array(["a", "b"])}, "b ...", mesh=mesh),
    shard_without_a_mesh=lambda mesh: spmd.shard(X, "b/dp d"),
    shard_of_indivisible_arrays=lambda mesh: spmd.shard(
        {"w": X[:6], "b": V[:7]}, {"w": "b/tp d", "b": "d/dp"}, mesh=mesh
    ),
    shard_of_another_structure=lambda mesh: spmd.shard({"w": X}, {"v": "b/dp d"}, mesh=mesh),
)


@bad
def shard_under_a_mapping_without_the_name(mesh):
    with spmd.axis_mapping({"batch": "dp"}):
        spmd.shard(X, "bacth d", mesh=mesh)


bad(
    rule_that_matches_nothing=lambda mesh: spmd.match_layouts({"mlp": {"w_in": X}}, {"**/w_inn": "d/dp f/tp"}),
    leaf_without_a_layout=lambda mesh: spmd.match_layouts({"w": X, "b": V}, {"w": "d/dp f/tp"}),
    parameters_of_another_rank=lambda mesh: spmd.init(lambda: {"w": jnp.ones(8)}, {"w": "d/dp f/tp"}, mesh=mesh)(),
)
