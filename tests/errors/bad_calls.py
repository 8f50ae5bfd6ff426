"""Wrong calls in a body: verbs and operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import all_gather, all_to_all, einsum, psum, psum_scatter, reduce
from tests.errors.registry import V, X, bad, body, fixed

# --- verbs ---------------------------------------------------------------------------------------------------


@bad
def outside_a_kernel(mesh):
    all_gather(X, "b/dp d -> b d")


@bad
def string_first(mesh):
    body("b/dp d -> b d", lambda x: all_gather("b/dp d -> b d", x, to="invarying"), mesh)


@fixed
def string_first_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> b d", lambda x: fix(x=x), mesh), X)


@bad
def gathers_the_major_axis(mesh):
    body("b/dp/tp d -> b/tp d", lambda x: all_gather(x, "b/dp/tp d -> b/tp d"), mesh)


@fixed
def gathers_the_major_axis_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp/tp d -> b/tp d", lambda x: fix(x=x), mesh), X)


@bad
def gather_that_is_a_slice(mesh):
    body("b d -> b/dp d", lambda x: all_gather(x, "b d -> b/dp d"), mesh)


@fixed
def gather_that_is_a_slice_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b d -> b/dp d", lambda x: fix(x=x), mesh), X)


@bad
def gather_that_is_an_all_to_all(mesh):
    body("b/tp d -> b d/tp", lambda x: all_gather(x, "b/tp d -> b d/tp"), mesh)


@fixed
def gather_that_is_an_all_to_all_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/tp d -> b d/tp", lambda x: fix(x=x), mesh), X)


@bad
def gather_of_a_partial_sum(mesh):
    body("b/dp d -> d", lambda x: all_gather(reduce(x, "b/dp d -> d {U:dp}"), "d {U:dp} -> d"), mesh)


@fixed
def gather_of_a_partial_sum_fixed(mesh, fix):
    out = body("b/dp d -> d", lambda x: fix(x=reduce(x, "b/dp d -> d {U:dp}")), mesh)
    np.testing.assert_allclose(out, X.sum(0))


@bad
def verb_that_moves_nothing(mesh):
    body("b/dp d -> b/dp d", lambda x: all_gather(x, "b/dp d -> b/dp d"), mesh)


@bad
def other_dimensions_on_the_right(mesh):
    body("b/dp d -> b/dp d", lambda x: all_gather(x, "b/dp d -> d b"), mesh)


@fixed
def other_dimensions_on_the_right_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> d b", lambda x: fix(x=x), mesh), X.T)


@bad
def psum_of_equal_values(mesh):
    body("b d -> b d", lambda x: psum(x, "b d {U:dp} -> b d"), mesh)


@bad
def psum_of_a_copy(mesh):
    def fn(x):
        whole = all_gather(x, "b/dp d -> b d")
        return psum(whole, "b d {U:dp} -> b d")

    body("b/dp d -> b d", fn, mesh)


@bad
def product_of_what_lies_as_the_result(mesh):
    """The gather goes before the call: in place of it the product would be gone."""
    body("b/dp d, d e -> b/dp e", lambda x, w: einsum(x, w, "b d, d e -> b/dp e"), mesh, X, X.T)


@fixed
def product_of_what_lies_as_the_result_fixed(mesh, fix):
    fn = lambda x, w: spmd.split(einsum(fix(x=x), w, "b d, d e -> b e"), "b e -> b/dp e")
    np.testing.assert_allclose(body("b/dp d, d e -> b/dp e", fn, mesh, X, X.T), X @ X.T)


@bad
def read_with_another_layout(mesh):
    body("b/dp d -> b d/dp", lambda x: all_to_all(x, "b d/dp -> b/dp d"), mesh)


@fixed
def read_with_another_layout_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> b d/dp", lambda x: fix(x=x), mesh), X)


@bad
def scatter_onto_an_indivisible_dimension(mesh):
    body("b/dp/tp d -> d/tp", lambda x: psum_scatter(x.sum(0)[:3], "e {U:tp} -> e/tp"), mesh)


@bad
def unknown_axis_in_a_verb(mesh):
    body("b/dp d -> b d", lambda x: all_gather(x, "b/dpp d -> b d"), mesh)


@bad
def keyword_that_is_not_in_the_pattern(mesh):
    body("b/dp d -> b d", lambda x: all_gather(x, "b/dp d -> b d", tq="tp"), mesh)


@bad
def keyword_of_a_wrong_type(mesh):
    body("b/dp d -> b d", lambda x: all_gather(x, "b/dp d -> b d", dp=1.5), mesh)


@bad
def rank_in_a_verb(mesh):
    body("b/dp d -> b d", lambda x: all_gather(x, "b/dp s d -> b s d"), mesh)


@bad
def size_in_a_verb(mesh):
    body("b/dp d -> b d", lambda x: all_gather(x[:, :3], "b/dp d -> b d"), mesh)


@bad
def shift_without_a_bracket(mesh):
    body("b/dp d -> b/dp d", lambda x: spmd.shift(x, "b/dp d"), mesh)


@fixed
def shift_without_a_bracket_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> b/dp d", lambda x: fix(x=x), mesh), np.roll(X, 4, 0))


@bad
def permutation_out_of_range(mesh):
    body("b/dp d -> b/dp d", lambda x: spmd.ppermute(x, "[b/dp] d", [(0, 2)]), mesh)


# --- operations ----------------------------------------------------------------------------------------------


@bad
def einsum_of_two_placements(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, d/tp f -> b/dp f")
    body("b/dp d, d/tp f -> b/dp f", fn, mesh, X, np.ones((4, 6), np.float32))


@fixed
def einsum_of_two_placements_fixed(mesh, fix):
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    out = body("b/dp d, d/tp f -> b/dp f", lambda x, w: fix(x=x, y=w), mesh, X, w)
    np.testing.assert_allclose(out, X @ w)


@bad
def einsum_that_would_gather(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, d f -> b f")
    body("b/dp d, d f -> b f", fn, mesh, X, np.ones((4, 6), np.float32))


@fixed
def einsum_that_would_gather_fixed(mesh, fix):
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_allclose(body("b/dp d, d f -> b f", lambda x, w: fix(x=x, y=w), mesh, X, w), X @ w)


@bad
def einsum_with_nothing_to_scatter(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, d f -> b/dp f/tp")
    body("b/dp d, d f -> b/dp f/tp", fn, mesh, X, np.ones((4, 8), np.float32))


@fixed
def einsum_with_nothing_to_scatter_fixed(mesh, fix):
    out = body("b/dp d, d f -> b/dp f/tp", lambda x, w: fix(x=x, y=w), mesh, X, X.T)
    np.testing.assert_allclose(out, X @ X.T)


@bad
def einsum_with_one_axis_on_two_names(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, e/dp d -> b/dp e")
    body("b/dp d, e/dp d -> b/dp e", fn, mesh, X, X)


@bad
def einsum_with_an_unknown_name(mesh):
    body("b/dp d -> b/dp", lambda x: einsum(x, "b/dp d -> b/dp e"), mesh)


@bad
def einsum_without_spaces(mesh):
    body("b/dp d, d f -> b/dp f", lambda x, w: einsum(x, w, "bd,df->bf"), mesh, X, X.T)


@fixed
def einsum_without_spaces_fixed(mesh, fix):
    out = body("b d, d f -> b f", lambda x, w: fix(x=x, y=w), mesh, X, X.T)
    np.testing.assert_allclose(out, X @ X.T)


@bad
def name_of_the_signature_for_another_dimension(mesh):
    body("b/dp d -> b/dp d", lambda x: x + einsum(x[:, :2], x[:, :2], "n d, m d -> n m").sum(), mesh)


@bad
def reduce_with_an_unknown_operation(mesh):
    body("b/dp d -> d", lambda x: reduce(x, "b/dp d -> d", "avg"), mesh)


@bad
def maximum_left_partial(mesh):
    body("b/dp d -> d", lambda x: reduce(x, "b/dp d -> d {U:dp}", "max"), mesh)


@bad
def reduce_of_a_different_value(mesh):
    body("b/dp d -> scalar", lambda x: reduce(x[0] * 2, "d -> scalar"), mesh)


@bad
def rearrange_that_would_gather(mesh):
    body("b/dp d -> (b d)", lambda x: spmd.rearrange(x, "b/dp d -> (b d)"), mesh)


@fixed
def rearrange_that_would_gather_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> (b d)", lambda x: fix(x=x), mesh), X.reshape(-1))


@bad
def rearrange_behind_a_divided_factor(mesh):
    body("b d/tp -> b d/tp", lambda x: spmd.rearrange(x, "b d/tp -> (b d/tp)"), mesh)


@bad
def repeat_without_a_size(mesh):
    body("b/dp d -> b/dp d e", lambda x: spmd.repeat(x, "b/dp d -> b/dp d e"), mesh)


@bad
def softmax_without_a_bracket(mesh):
    body("b d/tp -> b d/tp", lambda x: spmd.softmax(x, "b d/tp"), mesh)


@bad
def take_with_float_ids(mesh):
    body("v/tp d, b -> b d", lambda e, i: spmd.take(e, i, "[v/tp] d, b -> b d"), mesh, X, V)


@bad
def zeros_without_a_size(mesh):
    body("b/dp d -> b/dp d", lambda x: x + spmd.zeros("b/dp e"), mesh)


@bad
def nonlinear_use_of_a_partial_sum(mesh):
    body("b/dp d -> d", lambda x: psum(jnp.exp(reduce(x, "b/dp d -> d {U:dp}")), "d {U:dp} -> d"), mesh)


@bad
def size_of_an_unknown_name(mesh):
    body("b/dp d -> b/dp d", lambda x: x * spmd.size("e"), mesh)


@bad
def axis_index_in_auto_mode(mesh):
    spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x * spmd.axis_index("dp")).auto(X)


@bad
def shard_in_a_kernel(mesh):
    body("b/dp d -> b/dp d", lambda x: spmd.shard(x, "b/dp d"), mesh)


@bad
def annotation_that_is_wrong(mesh):
    body("b/dp d -> b/dp d", lambda x: x + spmd.annotate(jnp.sum(x), "scalar"), mesh)


@fixed
def annotation_that_is_wrong_fixed(mesh, fix):
    out = body("b/dp d -> b/dp d", lambda x: x + spmd.annotate(fix(x=jnp.sum(x)), "scalar"), mesh)
    np.testing.assert_allclose(out, X + X.sum())


@bad
def random_with_an_rbg_key(mesh):
    key = jax.random.key(0, impl="rbg")
    body("b/dp d -> b/dp d", lambda x: x + spmd.random.normal(key, "b/dp d"), mesh)


@fixed
def random_with_an_rbg_key_fixed(mesh, fix):
    key = fix(seed=0)
    out = body("b/dp d -> b/dp d", lambda x: x * 0 + spmd.random.normal(key, "b/dp d"), mesh)
    np.testing.assert_array_equal(out, jax.random.normal(key, (8, 4)))


@bad
def debug_print_of_an_array_first(mesh):
    body("b/dp d -> b/dp d", lambda x: (spmd.debug_print(x, "b/dp d"), x)[1], mesh)


@bad
def debug_print_of_too_few(mesh):
    body("b/dp d -> b/dp d", lambda x: (spmd.debug_print("{} of {}", x.sum()), x)[1], mesh)


@bad
def debug_print_of_a_name(mesh):
    body("b/dp d -> b/dp d", lambda x: (spmd.debug_print("{loss}", x.sum(), lost=x), x)[1], mesh)
