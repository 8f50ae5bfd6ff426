"""Wrong calls of verbs: gathers, scatters, sums, shifts and permutations."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import all_gather, all_to_all, psum, psum_scatter, reduce, shift
from tests.errors.registry import X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


def untyped(mesh, fn):
    """A body in a raw `shard_map` in which JAX types nothing."""
    made = {"mesh": mesh, "in_specs": jax.P("dp"), "out_specs": jax.P(), "check_" + "vma": False}
    return jax.shard_map(fn, **made)(X)


bad(
    a_psum_without_types=(
        lambda mesh: untyped(mesh, lambda x: psum(x.sum(0), "d {U:dp} -> d")),
        lambda mesh: np.testing.assert_array_equal(
            body("b/dp d -> d", lambda x: psum(x.sum(0), "d {U:dp} -> d"), mesh), X.sum(0)
        ),
    ),
    outside_a_kernel=lambda mesh: all_gather(X, "b/dp d -> b d"),
    string_first=(
        lambda mesh: body("b/dp d -> b d", lambda x: all_gather("b/dp d -> b d", x, to="invarying"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d -> b d", lambda x: fix(x=x), mesh), X),
    ),
    names_an_axis_as_lax_does=lambda mesh: body("b/dp d/tp -> b/dp d/tp", lambda x: psum(x, "tp"), mesh),
    forgets_the_mark_of_a_psum=lambda mesh: body(
        "b/dp d/tp -> b/dp 1", lambda x: psum(x.sum(axis=1, keepdims=True), "b/dp 1 -> b/dp 1"), mesh
    ),
    an_axis_as_a_dimension=(
        lambda mesh: body("b/dp d -> b d", lambda x: all_gather(x, "b dp d -> b d", to="invarying"), mesh),
        lambda mesh: np.testing.assert_array_equal(
            body("b/dp d -> b d", lambda x: all_gather(x, "b/dp d -> b d", to="invarying"), mesh), X
        ),
    ),
    divides_a_one=lambda mesh: body(
        "b/dp d/tp -> b/dp d/tp", lambda x: x - reduce(x, "b/dp d/tp -> b/dp 1/tp", "mean"), mesh
    ),
    gathers_the_major_axis=(
        lambda mesh: body("b/dp/tp d -> b/tp d", lambda x: all_gather(x, "b/dp/tp d -> b/tp d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp/tp d -> b/tp d", lambda x: fix(x=x), mesh), X),
    ),
    gather_that_is_a_slice=(
        lambda mesh: body("b d -> b/dp d", lambda x: all_gather(x, "b d -> b/dp d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b d -> b/dp d", lambda x: fix(x=x), mesh), X),
    ),
    gather_that_is_an_all_to_all=(
        lambda mesh: body("b/tp d -> b d/tp", lambda x: all_gather(x, "b/tp d -> b d/tp"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/tp d -> b d/tp", lambda x: fix(x=x), mesh), X),
    ),
    gather_of_a_partial_sum=lambda mesh: body(
        "b/dp d -> d", lambda x: all_gather(reduce(x, "b/dp d -> d {U:dp}"), "d {U:dp} -> d"), mesh
    ),
)


@fixed
def gather_of_a_partial_sum_fixed(mesh, fix):
    out = body("b/dp d -> d", lambda x: fix(x=reduce(x, "b/dp d -> d {U:dp}")), mesh)
    np.testing.assert_allclose(out, X.sum(0))


bad(
    verb_that_moves_nothing=lambda mesh: body("b/dp d -> b/dp d", lambda x: all_gather(x, "b/dp d -> b/dp d"), mesh),
    other_dimensions_on_the_right=(
        lambda mesh: body("b/dp d -> b/dp d", lambda x: all_gather(x, "b/dp d -> d b"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d -> d b", lambda x: fix(x=x), mesh), X.T),
    ),
    psum_of_equal_values=lambda mesh: body("b d -> b d", lambda x: psum(x, "b d {U:dp} -> b d"), mesh),
    psum_of_a_block=lambda mesh: body("b/dp d -> b d", lambda x: psum(x, "b d {U:dp} -> b d"), mesh),
    psum_of_a_block_behind_dots=lambda mesh: body("b/dp d -> _ d", lambda x: psum(x, "... {U:dp} -> ..."), mesh),
    reduction_of_a_block_as_a_partial_sum=lambda mesh: body(
        "b/dp d -> b", lambda x: spmd.reduce(x, "b d {U:dp} -> b"), mesh
    ),
    block_read_as_deferred=lambda mesh: body("b/dp d -> b/dp d", lambda x: spmd.annotate(x, "b d {R:dp}"), mesh),
)


@fixed
def block_read_as_deferred_fixed(mesh, fix):
    whole = lambda x: spmd.split(spmd.annotate(fix(x=x), "b d {R:dp}") * 2, "b d -> b/dp d")
    np.testing.assert_array_equal(body(SAME, whole, mesh), 2 * X)


bad(
    gather_of_a_deferred_array=lambda mesh: body(
        "b d -> b d", lambda x: all_gather(spmd.defer(x, "b d -> b d {R:dp}"), "b/dp d -> b d"), mesh
    ),
)


@bad
def psum_of_a_copy(mesh):
    def fn(x):
        whole = all_gather(x, "b/dp d -> b d")
        return psum(whole, "b d {U:dp} -> b d")

    body("b/dp d -> b d", fn, mesh)


bad(
    read_with_another_layout=(
        lambda mesh: body("b/dp d -> b d/dp", lambda x: all_to_all(x, "b d/dp -> b/dp d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d -> b d/dp", lambda x: fix(x=x), mesh), X),
    ),
    scatter_onto_an_indivisible_dimension=lambda mesh: body(
        "b/dp/tp d -> d/tp", lambda x: psum_scatter(x.sum(0)[:3], "e {U:tp} -> e/tp"), mesh
    ),
    unknown_axis_in_a_verb=(
        lambda mesh: body("b/dp d -> b d", lambda x: all_gather(x, "b/dpp d -> b d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(
            body("b/dp d -> b d", lambda x: all_gather(x, fix(), to="invarying"), mesh), X
        ),
    ),
    keyword_that_is_not_in_the_pattern=lambda mesh: body(
        "b/dp d -> b d", lambda x: all_gather(x, "b/dp d -> b d", tq="tp"), mesh
    ),
    keyword_of_a_wrong_type=lambda mesh: body("b/dp d -> b d", lambda x: all_gather(x, "b/dp d -> b d", dp=1.5), mesh),
    rank_in_a_verb=lambda mesh: body("b/dp d -> b d", lambda x: all_gather(x, "b/dp s d -> b s d"), mesh),
    size_in_a_verb=lambda mesh: body("b/dp d -> b d", lambda x: all_gather(x[:, :3], "b/dp d -> b d"), mesh),
    shift_without_a_bracket=(
        lambda mesh: body("b/dp d -> b/dp d", lambda x: spmd.shift(x, "b/dp d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(
            body("b/dp d -> b/dp d", lambda x: fix(x=x), mesh), np.roll(X, 4, 0)
        ),
    ),
    permutation_out_of_range=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: spmd.ppermute(x, "[b/dp] d", [(0, 2)]), mesh
    ),
    partial_sum_out_of_nothing=lambda mesh: body(SAME, lambda x: spmd.relayout(x, "b/dp d -> b/dp d {U:tp}"), mesh),
)


@bad
def unknown_name_of_a_renamed_axis(mesh):
    fn = lambda x: all_gather(x, "b/dat d -> b d", to="invarying")
    body("b/data d -> b d", fn, mesh, axes={"data": "dp"})


@fixed
def unknown_name_of_a_renamed_axis_fixed(mesh, fix):
    fn = lambda x: all_gather(x, fix(), to="invarying")
    np.testing.assert_array_equal(body("b/data d -> b d", fn, mesh, axes={"data": "dp"}), X)


bad(
    gather_to_an_unknown_type=lambda mesh: body(SAME, lambda x: all_gather(x, "b/dp d -> b d", to="replicated"), mesh),
    shift_by_a_traced_number=lambda mesh: body(SAME, lambda x: shift(x, "[b/dp] d", jnp.int32(1)), mesh),
    shift_of_a_composite=lambda mesh: body(SAME, lambda x: shift(x, "[(n/dp k)] d", k=2), mesh),
    permutation_that_is_no_list_of_pairs=lambda mesh: body(SAME, lambda x: spmd.ppermute(x, "[b/dp] d", [1, 0]), mesh),
)


@fixed
def permutation_that_is_no_list_of_pairs_fixed(mesh):
    out = body(SAME, lambda x: spmd.ppermute(x, "[b/dp] d", [(0, 1), (1, 0)]), mesh)
    np.testing.assert_array_equal(out, np.roll(X, 4, 0))


def einsum_of_blocks(x):
    return spmd.einsum(x, x, "b/dp d/tp, b/dp d/tp -> b/dp {U:tp}")


bad(
    # Their axis is another one than the sum's, and `_` is whole.
    psum_of_rows_without_a_name=(
        lambda mesh: body("b/dp d/tp -> b/dp", lambda x: psum(einsum_of_blocks(x), "_ {U:tp} -> _"), mesh),
        lambda mesh, fix: np.testing.assert_allclose(
            body("b/dp d/tp -> b/dp", lambda x: fix(x=einsum_of_blocks(x)), mesh), (X * X).sum(1)
        ),
    ),
    result_without_a_name=lambda mesh: body("b/dp d/tp -> b/dp", lambda x: psum((x * x).sum(1), "_ {U:tp} -> _"), mesh),
)


@fixed
def result_without_a_name_fixed(mesh):
    found = body("b/dp d/tp -> b/dp", lambda x: psum((x * x).sum(1), "... {U:tp} -> ..."), mesh)
    np.testing.assert_allclose(found, (X * X).sum(1))


bad(
    gather_that_does_not_say_what_it_gathers=(
        lambda mesh: body("b/dp d/tp -> b/dp d", lambda x: all_gather(x, "b/dp d -> b/dp d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d/tp -> b/dp d", lambda x: fix(x=x), mesh), X),
    ),
    spaces_before_slashes=(
        lambda mesh: body("b/dp d -> b d", lambda x: all_gather(x, "b /dp d -> b /1 d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(
            body("b/dp d -> b d", lambda x: all_gather(x, fix(), to="invarying"), mesh), X
        ),
    ),
)


def sent_in_a_byte(total):
    scale = jax.lax.pmax(jnp.abs(total).max(), "dp") / 127
    summed = jax.lax.psum(jnp.round(total / scale).astype(jnp.int8).astype(jnp.int32), "dp")
    return summed.astype(total.dtype) * scale


bad(sum_that_is_sent_in_a_byte=lambda mesh: body("b/dp d -> d", lambda x: sent_in_a_byte(x.sum(0)), mesh))


@fixed
def sum_that_is_sent_in_a_byte_fixed(mesh, fix):
    """The scale is that of the whole sum, and each device is meant to round its own term."""

    def meant(x):
        scale = jnp.abs(fix(x=x)).max() / 127
        with spmd.per_shard("each device rounds its own term"):
            summed = jax.lax.psum(jnp.round(x.sum(0) / scale).astype(jnp.int8).astype(jnp.int32), "dp")
        return summed.astype(x.dtype) * scale

    np.testing.assert_allclose(body("b/dp d -> d", meant, mesh), X.sum(0), atol=0.02 * abs(X.sum(0)).max())


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
