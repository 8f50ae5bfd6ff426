"""Wrong calls of verbs: gathers, scatters, sums, shifts and permutations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import all_gather, all_to_all, psum, psum_scatter, reduce, shift
from tests.errors.registry import X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


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
def names_an_axis_as_lax_does(mesh):
    body("b/dp d/tp -> b/dp d/tp", lambda x: psum(x, "tp"), mesh)


@bad
def forgets_the_mark_of_a_psum(mesh):
    body("b/dp d/tp -> b/dp 1", lambda x: psum(x.sum(axis=1, keepdims=True), "b/dp 1 -> b/dp 1"), mesh)


@bad
def divides_a_one(mesh):
    body("b/dp d/tp -> b/dp d/tp", lambda x: x - reduce(x, "b/dp d/tp -> b/dp 1/tp", "mean"), mesh)


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
def psum_of_a_block(mesh):
    body("b/dp d -> b d", lambda x: psum(x, "b d {U:dp} -> b d"), mesh)


@bad
def psum_of_a_block_behind_dots(mesh):
    body("b/dp d -> _ d", lambda x: psum(x, "... {U:dp} -> ..."), mesh)


@bad
def reduction_of_a_block_as_a_partial_sum(mesh):
    body("b/dp d -> b", lambda x: spmd.reduce(x, "b d {U:dp} -> b"), mesh)


@bad
def block_read_as_deferred(mesh):
    body("b/dp d -> b/dp d", lambda x: spmd.annotate(x, "b d {R:dp}"), mesh)


@fixed
def block_read_as_deferred_fixed(mesh, fix):
    whole = lambda x: spmd.split(spmd.annotate(fix(x=x), "b d {R:dp}") * 2, "b d -> b/dp d")
    np.testing.assert_array_equal(body(SAME, whole, mesh), 2 * X)


@bad
def gather_of_a_deferred_array(mesh):
    body("b d -> b d", lambda x: all_gather(spmd.defer(x, "b d -> b d {R:dp}"), "b/dp d -> b d"), mesh)


@bad
def psum_of_a_copy(mesh):
    def fn(x):
        whole = all_gather(x, "b/dp d -> b d")
        return psum(whole, "b d {U:dp} -> b d")

    body("b/dp d -> b d", fn, mesh)


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


@fixed
def unknown_axis_in_a_verb_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> b d", lambda x: all_gather(x, fix(), to="invarying"), mesh), X)


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


@bad
def partial_sum_out_of_nothing(mesh):
    body(SAME, lambda x: spmd.relayout(x, "b/dp d -> b/dp d {U:tp}"), mesh)


@bad
def unknown_name_of_a_renamed_axis(mesh):
    fn = lambda x: all_gather(x, "b/dat d -> b d", to="invarying")
    body("b/data d -> b d", fn, mesh, axes={"data": "dp"})


@fixed
def unknown_name_of_a_renamed_axis_fixed(mesh, fix):
    fn = lambda x: all_gather(x, fix(), to="invarying")
    np.testing.assert_array_equal(body("b/data d -> b d", fn, mesh, axes={"data": "dp"}), X)


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


def einsum_of_blocks(x):
    return spmd.einsum(x, x, "b/dp d/tp, b/dp d/tp -> b/dp {U:tp}")


@bad
def psum_of_rows_without_a_name(mesh):
    """Their axis is another one than the sum's, and `_` is whole."""
    body("b/dp d/tp -> b/dp", lambda x: psum(einsum_of_blocks(x), "_ {U:tp} -> _"), mesh)


@fixed
def psum_of_rows_without_a_name_fixed(mesh, fix):
    np.testing.assert_allclose(body("b/dp d/tp -> b/dp", lambda x: fix(x=einsum_of_blocks(x)), mesh), (X * X).sum(1))


@bad
def result_without_a_name(mesh):
    body("b/dp d/tp -> b/dp", lambda x: psum((x * x).sum(1), "_ {U:tp} -> _"), mesh)


@fixed
def result_without_a_name_fixed(mesh):
    found = body("b/dp d/tp -> b/dp", lambda x: psum((x * x).sum(1), "... {U:tp} -> ..."), mesh)
    np.testing.assert_allclose(found, (X * X).sum(1))


@bad
def gather_that_does_not_say_what_it_gathers(mesh):
    body("b/dp d/tp -> b/dp d", lambda x: all_gather(x, "b/dp d -> b/dp d"), mesh)


@fixed
def gather_that_does_not_say_what_it_gathers_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d/tp -> b/dp d", lambda x: fix(x=x), mesh), X)


@bad
def spaces_before_slashes(mesh):
    body("b/dp d -> b d", lambda x: all_gather(x, "b /dp d -> b /1 d"), mesh)


@fixed
def spaces_before_slashes_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> b d", lambda x: all_gather(x, fix(), to="invarying"), mesh), X)


def sent_in_a_byte(total):
    scale = jax.lax.pmax(jnp.abs(total).max(), "dp") / 127
    summed = jax.lax.psum(jnp.round(total / scale).astype(jnp.int8).astype(jnp.int32), "dp")
    return summed.astype(total.dtype) * scale


@bad
def sum_that_is_sent_in_a_byte(mesh):
    """To sum before the rounding would send all bytes, which the rounding spares."""
    body("b/dp d -> d", lambda x: sent_in_a_byte(x.sum(0)), mesh)


@fixed
def sum_that_is_sent_in_a_byte_fixed(mesh):
    def meant(total):
        with spmd.per_shard("each device rounds its own term"):
            return sent_in_a_byte(total)

    found = body("b/dp d -> d", lambda x: meant(x.sum(0)), mesh)
    np.testing.assert_allclose(found, X.sum(0), rtol=0.02)


@bad
def one_name_for_two_dimensions_in_a_helper(mesh):
    def total(x):
        return reduce(x, "h d -> d")

    body("h d, n d -> d", lambda x, y: total(x) + total(y), mesh, X, X[:4])


@fixed
def one_name_for_two_dimensions_in_a_helper_fixed(mesh):
    @spmd.scope
    def total(x):
        return reduce(x, "h d -> d")

    found = body("h d, n d -> d", lambda x, y: total(x) + total(y), mesh, X, X[:4])
    np.testing.assert_array_equal(found, X.sum(0) + X[:4].sum(0))
