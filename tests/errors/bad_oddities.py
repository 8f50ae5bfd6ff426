"""Arguments of the wrong kind, branches and carries that disagree, raw placement inside: what must not escape as
an error of Python's or JAX's own, or pass in silence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import spmd
from spmd import all_gather, grad, psum, shift
from tests.errors.registry import V, X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


# --- the first program, as everyone writes it ----------------------------------------------------------------


@bad
def the_first_program(mesh):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spmd.kernel("x/i -> x", mesh=mesh)(lambda x: all_gather(x, "x/i -> x"))(V)


@fixed
def the_first_program_fixed(mesh, fix):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    np.testing.assert_array_equal(spmd.kernel("x/i -> x", mesh=mesh)(lambda x: fix(x=x))(V), V)


# --- verbs ---------------------------------------------------------------------------------------------------


@bad
def copy_made_by_relayout_leaves(mesh):
    body("b/dp/tp d -> b/tp d", lambda x: spmd.relayout(x, "b/dp/tp d -> b/tp d"), mesh)


@fixed
def copy_made_by_relayout_leaves_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp/tp d -> b/tp d", lambda x: fix(x=x), mesh), X)


@bad
def partial_sum_out_of_nothing(mesh):
    body(SAME, lambda x: spmd.relayout(x, "b/dp d -> b/dp d {U:tp}"), mesh)


@bad
def block_leaves_without_its_axis(mesh):
    body("b/dp d -> b d", lambda x: 2 * x, mesh)


@bad
def structs_instead_of_arrays(mesh):
    body(SAME, lambda x: x, mesh, jax.ShapeDtypeStruct((8, 4), jnp.float32))


@bad
def unknown_name_of_a_renamed_axis(mesh):
    fn = lambda x: all_gather(x, "b/dat d -> b d", to="invarying")
    body("b/data d -> b d", fn, mesh, axes={"data": "dp"})


@bad
def gather_to_an_unknown_type(mesh):
    body(SAME, lambda x: all_gather(x, "b/dp d -> b d", to="replicated"), mesh)


@bad
def shift_by_a_traced_number(mesh):
    body(SAME, lambda x: shift(x, "[b/dp] d", jnp.int32(1)), mesh)


@bad
def shift_of_a_composite(mesh):
    body(SAME, lambda x: shift(x, "[(n/dp k)] d", k=2), mesh)


@bad
def permutation_that_is_no_list_of_pairs(mesh):
    body(SAME, lambda x: spmd.ppermute(x, "[b/dp] d", [1, 0]), mesh)


@fixed
def permutation_that_is_no_list_of_pairs_fixed(mesh):
    out = body(SAME, lambda x: spmd.ppermute(x, "[b/dp] d", [(0, 1), (1, 0)]), mesh)
    np.testing.assert_array_equal(out, np.roll(X, 4, 0))


@bad
def operand_that_is_no_array(mesh):
    body(SAME, lambda x: spmd.einsum(x, object(), "b/dp d, d -> b/dp d"), mesh)


@bad
def operation_given_as_a_function(mesh):
    body("b/dp d -> b/dp", lambda x: spmd.reduce(x, "b/dp d -> b/dp", jnp.sum), mesh)


@bad
def shape_for_a_layout(mesh):
    body(SAME, lambda x: x + spmd.zeros((4, 4)), mesh)


@fixed
def shape_for_a_layout_fixed(mesh):
    np.testing.assert_array_equal(body(SAME, lambda x: x + spmd.zeros("b/dp d"), mesh), X)


@bad
def layout_before_the_key(mesh):
    body(SAME, lambda x: x + spmd.random.normal("b/dp d", jax.random.key(0)), mesh)


def pallas_call(x, **kind):
    def twice(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(twice, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype, **kind), interpret=True)(x)


@bad
def pallas_call_without_a_type(mesh):
    body(SAME, lambda x: spmd.opaque(pallas_call, SAME)(x), mesh)


@fixed
def pallas_call_without_a_type_fixed(mesh):
    typed = lambda x: pallas_call(x, manual_axis_type=jax.typeof(x).manual_axis_type)
    kernel = spmd.kernel(SAME, mesh=mesh)(lambda x: spmd.opaque(typed, SAME, reference=lambda x: 2 * x)(x))
    for run in (kernel, kernel.auto, kernel.reference):
        np.testing.assert_array_equal(run(X), 2 * X)


@bad
def island_without_a_function(mesh):
    body(SAME, lambda x: spmd.local(None, SAME)(x), mesh)


# --- branches, carries, gradients ----------------------------------------------------------------------------


@bad
def branches_of_two_shapes(mesh):
    body(SAME, lambda x: spmd.cond(x.sum() > 0, lambda x: x[0], lambda x: -x, x), mesh)


@bad
def raw_branches_of_two_types(mesh):
    body(SAME, lambda x: jax.lax.cond(True, lambda: x, lambda: jnp.zeros((4, 4))), mesh)


@fixed
def raw_branches_of_two_types_fixed(mesh, fix):
    other = lambda: jnp.zeros((4, 4))
    out = body(SAME, lambda x: fix(predicate=True, true_fn=lambda: x, false_fn=other, operands=()), mesh)
    np.testing.assert_array_equal(out, X)


@bad
def two_carries_of_another_type(mesh):
    def fn(x):
        step = lambda c, row: ({"sum": c["sum"] + row, "count": c["count"] + row.sum()}, None)
        last, _ = jax.lax.scan(step, {"sum": jnp.zeros(4), "count": jnp.zeros(())}, x)
        return psum(last["sum"], "d {U:dp} -> d")

    body("b/dp d -> d", fn, mesh)


@bad
def gradient_of_a_number(mesh):
    body("d -> d", lambda w: grad(3.0)(w), mesh, V)


@bad
def loss_with_aux_undeclared(mesh):
    body("d -> d", lambda w: grad(lambda w: (w.sum(), w))(w), mesh, V)


@fixed
def loss_with_aux_undeclared_fixed(mesh, fix):
    out = body("d -> d", lambda w: grad(lambda w: (w.sum(), w), **fix())(w)[0], mesh, V)
    np.testing.assert_array_equal(out, np.ones(8))


@bad
def aux_that_is_missing(mesh):
    body("d -> d", lambda w: grad(lambda w: w.sum(), has_aux=True)(w)[0], mesh, V)


@bad
def gradient_over_an_unknown_axis(mesh):
    body("d -> d", lambda w: grad(lambda w: w.sum(), loss="{U:dpp}")(w), mesh, V)


# --- raw JAX that places whole arrays ------------------------------------------------------------------------


@bad
def raw_constraint_in_a_kernel(mesh):
    where = jax.NamedSharding(mesh, jax.P("dp"))
    body(SAME, lambda x: jax.lax.with_sharding_constraint(x, where), mesh)


@bad
def init_in_a_kernel(mesh):
    body(SAME, lambda x: x + spmd.init(lambda: jnp.ones((8, 4)), "b/dp d", mesh=mesh)(), mesh)


# --- placement, meshes, mappings -----------------------------------------------------------------------------


@bad
def layout_before_the_array(mesh):
    spmd.shard("b/dp d", X, mesh=mesh)


@fixed
def layout_before_the_array_fixed(mesh):
    assert spmd.shard(X, "b/dp d", mesh=mesh).addressable_shards[0].data.shape == (4, 4)


@bad
def list_of_numbers_for_an_array(mesh):
    spmd.from_process_local([1, 2, 3, 4], "b/dp", mesh=mesh)


@fixed
def list_of_numbers_for_an_array_fixed(mesh):
    np.testing.assert_array_equal(spmd.from_process_local(np.array([1, 2, 3, 4]), "b/dp", mesh=mesh), [1, 2, 3, 4])


@bad
def number_with_a_dimension(mesh):
    spmd.shard({"step": 3, "w": X}, {"step": "b", "w": "b d"}, mesh=mesh)


@bad
def partial_sum_placed(mesh):
    spmd.shard(X, "b d {U:dp}", mesh=mesh)


@fixed
def partial_sum_placed_fixed(mesh, fix):
    np.testing.assert_array_equal(spmd.shard(X, fix(), mesh=mesh), X)


@bad
def dict_for_a_mesh(mesh):
    spmd.shard(X, "b/dp d", mesh={"dp": 2, "tp": 4})


@bad
def parameters_instead_of_a_function(mesh):
    spmd.init({"w": X}, {"w": "b/dp d"}, mesh=mesh)


@bad
def born_on_an_abstract_mesh(mesh):
    spmd.init(lambda: jnp.ones((8, 4)), "b/dp d", mesh=spmd.make_mesh(dp=2, abstract=True))()


@bad
def auto_axis_before_an_explicit_one(mesh):
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    mixed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=kinds)
    jax.jit(lambda x: spmd.shard(x, "b/dp/tp d", mesh=mixed))(X)


@bad
def numbers_for_devices(mesh):
    spmd.make_mesh(dp=2, devices=[0, 1])


@bad
def list_for_a_mapping(mesh):
    spmd.AxisMapping(["batch"])


@bad
def one_layout_for_rules(mesh):
    spmd.layouts({"w": X}, "b/dp d")


@bad
def string_for_axes(mesh):
    spmd.kernel(SAME, mesh=mesh, axes="dp")(lambda x: x)


@bad
def number_for_static(mesh):
    spmd.kernel(SAME, mesh=mesh, static=1)(lambda x, causal: x)


# --- scopes --------------------------------------------------------------------------------------------------


@bad
def a_scope_with_a_mapping(mesh):
    spmd.scope(mapping={"d": "dp"})(lambda x: x)


@fixed
def a_scope_with_a_mapping_fixed(mesh):
    assert spmd.scope(mapping=None)(lambda x: x)(3) == 3


# --- what is no array for JAX, and no axis for a string ------------------------------------------------------


@bad
def an_array_of_strings(mesh):
    spmd.shard({"x": X, "names": np.array(["a", "b"])}, "b ...", mesh=mesh)


@bad
def an_argument_of_strings(mesh):
    body(SAME, lambda x: x, mesh, np.array([["a", "b"]]))


@bad
def an_operand_of_objects(mesh):
    body(SAME, lambda x: spmd.reduce(np.array([1, None], dtype=object), "b -> scalar"), mesh)


@bad
def an_axis_that_no_layout_can_name(mesh):
    spmd.make_mesh(**{"data axis": 2})


@bad
def a_device_with_two_places(mesh):
    spmd.make_mesh(dp=2, devices=[jax.devices()[0]] * 2)


@bad
def positions_beyond_int32(mesh):
    spmd.from_function(lambda i: i, "x/dp", x=2**40, mesh=mesh)
