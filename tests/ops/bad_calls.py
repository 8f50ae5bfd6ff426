"""Wrong calls of the operations that have no file of their own here."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import psum, reduce
from tests.errors.registry import V, X, bad, body, fixed

WIDE = np.arange(64.0, dtype=np.float32).reshape(8, 8)


SAME = "b/dp d -> b/dp d"


bad(
    reduce_with_an_unknown_operation=lambda mesh: body("b/dp d -> d", lambda x: reduce(x, "b/dp d -> d", "avg"), mesh),
    reduce_to_a_variance=lambda mesh: body("b/dp d -> b/dp 1", lambda x: reduce(x, "b/dp d -> b/dp 1", "var"), mesh),
    maximum_left_partial=lambda mesh: body("b/dp d -> d", lambda x: reduce(x, "b/dp d -> d {U:dp}", "max"), mesh),
)


@bad
def reduce_of_a_different_value(mesh):
    body("b/dp d -> scalar", lambda x: reduce(x[0] * 2, "d -> scalar"), mesh)


bad(
    rearrange_that_would_gather=(
        lambda mesh: body("b/dp d -> (b d)", lambda x: spmd.rearrange(x, "b/dp d -> (b d)"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(
            body("b/dp d -> (b d)", lambda x: fix(x=x), mesh), X.reshape(-1)
        ),
    ),
    rearrange_behind_a_divided_factor=lambda mesh: body(
        "b d/tp -> b d/tp", lambda x: spmd.rearrange(x, "b d/tp -> (b d/tp)"), mesh
    ),
    repeat_without_a_size=lambda mesh: body("b/dp d -> b/dp d e", lambda x: spmd.repeat(x, "b/dp d -> b/dp d e"), mesh),
    softmax_without_a_bracket=lambda mesh: body("b d/tp -> b d/tp", lambda x: spmd.softmax(x, "b d/tp"), mesh),
    take_with_float_ids=lambda mesh: body(
        "v/tp d, b -> b d", lambda e, i: spmd.take(e, i, "[v/tp] d, b -> b d"), mesh, X, V
    ),
)


PLACES = np.arange(16).reshape(8, 2) % 8


@bad
def take_with_a_batch_of_two_placements(mesh):
    wrong = "b/dp [v/tp], b n -> b/dp n"
    body("b/dp v/tp, b n -> b/dp n", lambda e, i: spmd.take(e, i, wrong), mesh, WIDE, PLACES)


@fixed
def take_with_a_batch_of_two_placements_fixed(mesh, fix):
    found = body("b/dp v/tp, b n -> b/dp n", lambda e, i: fix(table=e, ids=i), mesh, WIDE, PLACES)
    np.testing.assert_array_equal(found, np.take_along_axis(WIDE, PLACES, 1))


bad(
    take_with_ids_that_have_the_name_of_the_rows=lambda mesh: body(
        "b v, b v -> b v", lambda e, i: spmd.take(e, i, "b [v], b v -> b v"), mesh, WIDE, WIDE.astype(int)
    ),
)


ADDED = "b/dp d, b/dp -> [v/dp] d"


def added(pattern=ADDED, ids=jnp.int32, left="b/dp d, b/dp", right="v/dp d", **more):
    """scatter_add of X in a kernel."""
    args = {"outside": "drop", **({"v": 4} if "[v" in pattern else {}), **more}
    fn = lambda x, i: spmd.scatter_add(x, i.astype(ids), pattern, **args)
    return spmd.kernel(f"{left} -> {right}", mesh=spmd.make_mesh(dp=2, tp=4))(fn)(X, V[: len(X)] % 4)


bad(
    scatter_add_without_a_bracket=lambda mesh: added("b/dp d, b/dp -> v/dp d"),
)


@bad
def scatter_add_without_a_size(mesh):
    fn = lambda x: spmd.scatter_add(x, jnp.arange(x.shape[0]), ADDED)[0]
    body("b/dp d -> v/dp d", fn, mesh)


bad(
    scatter_add_with_float_ids=lambda mesh: added(ids=jnp.float32),
    scatter_add_of_booleans=lambda mesh: body(
        SAME, lambda x: spmd.scatter_add(x > 0, jnp.arange(x.shape[0]), ADDED, v=4)[0], mesh
    ),
    scatter_add_of_features_that_vanish=lambda mesh: added("b/dp d, b/dp -> [v/dp]", right="v/dp"),
    scatter_add_in_a_batch=lambda mesh: added("b/dp d, b/dp -> [b/dp] d", right="b/dp d"),
    scatter_add_of_rows_without_the_numbers_dimension=lambda mesh: body(
        "b/dp d -> v d", lambda x: spmd.scatter_add(x[0], jnp.zeros(2, int), "d, n/dp -> [v] d", v=4)[0], mesh
    ),
    scatter_add_with_an_unknown_word=lambda mesh: added(outside="clip"),
    scatter_add_that_would_split=lambda mesh: added("b/dp d, b/dp -> [v/dp/tp] d", right="v/dp/tp d", v=8),
)


@fixed
def scatter_add_that_would_split_fixed(mesh, fix):
    ids = V[: len(X)].astype(int) % 8
    run = spmd.kernel("b/dp d, b/dp -> v/dp/tp d", mesh=spmd.make_mesh(dp=2, tp=4))(lambda x, i: fix(rows=x, ids=i))
    np.testing.assert_allclose(run(X, ids), jnp.zeros((8, X.shape[1])).at[ids].add(X), rtol=1e-5)


@bad
def scatter_add_with_partial_numbers(mesh):
    fn = lambda x: spmd.scatter_add(x, psum_of_nothing(x), "b/dp d, b/dp {U:tp} -> [v] d", v=4)[0]
    body("b/dp d -> v d", fn, mesh)


def psum_of_nothing(x):
    return jnp.zeros(x.shape[0], int) + spmd.axis_index("tp")


bad(
    zeros_without_a_size=lambda mesh: body("b/dp d -> b/dp d", lambda x: x + spmd.zeros("b/dp e"), mesh),
)


@bad
def nonlinear_use_of_a_partial_sum(mesh):
    body("b/dp d -> d", lambda x: psum(jnp.exp(reduce(x, "b/dp d -> d {U:dp}")), "d {U:dp} -> d"), mesh)


@fixed
def nonlinear_use_of_a_partial_sum_fixed(mesh, fix):
    out = body("b/dp d -> d", lambda x: jnp.exp(fix(x=x / 100)), mesh)
    np.testing.assert_allclose(out, np.exp(X.sum(0) / 100), rtol=1e-6)


bad(
    size_of_an_unknown_name=lambda mesh: body("b/dp d -> b/dp d", lambda x: x * spmd.size("e"), mesh),
    axis_index_in_auto_mode=lambda mesh: spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(
        lambda x: x * spmd.axis_index("dp")
    ).auto(X),
)


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


bad(
    debug_print_of_an_array_first=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: (spmd.debug_print(x, "b/dp d"), x)[1], mesh
    ),
    debug_print_of_too_few=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: (spmd.debug_print("{} of {}", x.sum()), x)[1], mesh
    ),
    debug_print_of_a_name=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: (spmd.debug_print("{loss}", x.sum(), lost=x), x)[1], mesh
    ),
    top_k_without_brackets=lambda mesh: body("b/dp d -> b/dp k", lambda x: spmd.top_k(x, "b/dp d", 2)[0], mesh),
    top_k_of_more_than_there_are=lambda mesh: body(
        "b/dp e/tp -> b/dp k", lambda x: spmd.top_k(x, "b/dp [e/tp]", 9)[0], mesh, WIDE
    ),
    half_of_a_top_k=lambda mesh: body("b/dp d -> b/dp k", lambda x: spmd.top_k(x, "b/dp [d]", 2.5)[0], mesh),
    top_k_of_a_partial_sum=lambda mesh: body("b/dp d -> k", lambda x: spmd.top_k(x.sum(0), "[d] {U:dp}", 2)[0], mesh),
)


@fixed
def top_k_of_a_partial_sum_fixed(mesh, fix):
    fn = lambda x: spmd.top_k(fix(x=x.sum(0)), fix(1), 2)[0]
    np.testing.assert_array_equal(body("b/dp d -> k", fn, mesh), np.sort(X.sum(0))[:-3:-1])


@fixed
def roll_of_a_composite_fixed(mesh):
    fn = lambda x: spmd.roll(x, "b [hk/tp]", 1)
    np.testing.assert_array_equal(body("b (h k)/tp -> b (h k)/tp", fn, mesh, WIDE, k=2), np.roll(WIDE, 1, 1))


@fixed
def argmax_of_a_composite_fixed(mesh, fix):
    fn = lambda x: spmd.argmax(x, fix())
    np.testing.assert_array_equal(body("(h k)/tp b -> b", fn, mesh, WIDE.T, k=2), WIDE.argmax(1))


bad(
    roll_of_a_composite=lambda mesh: body(
        "b (h k)/tp -> b (h k)/tp", lambda x: spmd.roll(x, "b [(h k)/tp]", 1, k=2), mesh, WIDE, k=2
    ),
    argmax_of_a_composite=lambda mesh: body(
        "(h k)/tp b -> b", lambda x: spmd.argmax(x, "[(h k)/tp] b -> b"), mesh, WIDE.T, k=2
    ),
    roll_by_half_an_element=lambda mesh: body("b/dp d -> b/dp d", lambda x: spmd.roll(x, "[b/dp] d", 0.5), mesh),
    roll_with_too_many_shifts=lambda mesh: body("b/dp d -> b/dp d", lambda x: spmd.roll(x, "[b/dp] d", (1, 2)), mesh),
    a_sort_along_nothing=(
        lambda mesh: body(SAME, lambda x: spmd.sort(x, "b/dp d"), mesh),
        lambda mesh: np.testing.assert_array_equal(
            body(SAME, lambda x: spmd.sort(-x, "b/dp [d]"), mesh), np.sort(-X, 1)
        ),
    ),
    the_least_of_complex_numbers=lambda mesh: body(
        "x/dp -> scalar", lambda x: spmd.argmin(x.astype("complex64"), "[x/dp]"), mesh, V
    ),
    a_roll_by_a_float=lambda mesh: body(SAME, lambda x: spmd.roll(x, "[b/dp] d", jnp.float32(2)), mesh),
    a_roll_by_several_shifts=lambda mesh: body(SAME, lambda x: spmd.roll(x, "[b/dp] d", jnp.arange(2)), mesh),
)


@bad
def a_roll_by_another_shift_on_each_device(mesh):
    body(SAME, lambda x: spmd.roll(x, "[b/dp] d", spmd.axis_index("dp")), mesh)


bad(
    an_argsort_along_nothing=lambda mesh: body(SAME, lambda x: spmd.argsort(x, "b/dp d"), mesh),
    a_payload_of_another_size=lambda mesh: body(SAME, lambda x: spmd.sort(x, "[b/dp] d", payload=x[:, :2])[0], mesh),
    a_payload_without_a_dimension=lambda mesh: body(SAME, lambda x: spmd.sort(x, "[b/dp] d", payload=x[:, 0])[0], mesh),
    a_payload_that_lies_otherwise=lambda mesh: body(
        "b/dp -> b/dp", lambda x: spmd.sort(x, "[b/dp]", payload=spmd.ones("b/tp"))[0], mesh, V
    ),
)


@fixed
def a_payload_that_lies_otherwise_fixed(mesh, fix):
    fn = lambda x: spmd.sort(x, "[b/dp]", payload=fix(x=spmd.ones("b/tp")))[1]
    np.testing.assert_array_equal(body("b/dp -> b/dp", fn, mesh, V), np.ones(len(V)))


bad(
    a_sort_of_a_partial_sum=lambda mesh: body("b/dp d -> d", lambda x: spmd.sort(x.sum(0), "[d] {U:dp}"), mesh),
)


@fixed
def a_sort_of_a_partial_sum_fixed(mesh, fix):
    out = body("b/dp d -> d", lambda x: spmd.sort(fix(x=-x.sum(0)), fix(1)), mesh)
    np.testing.assert_array_equal(out, np.sort(-X.sum(0)))


bad(
    a_flip_along_nothing=lambda mesh: body(SAME, lambda x: spmd.flip(x, "b/dp d"), mesh),
    size_of_nothing=lambda mesh: body(SAME, lambda x: x * spmd.size(), mesh),
    size_of_an_array_without_brackets=lambda mesh: body(SAME, lambda x: x * spmd.size(x, "b/dp d"), mesh),
)


@fixed
def size_of_an_array_without_brackets_fixed(mesh):
    assert (body(SAME, lambda x: x * spmd.size(x, "... [d]"), mesh) == 4 * X).all()


bad(
    operation_given_as_a_function=lambda mesh: body(
        "b/dp d -> b/dp", lambda x: spmd.reduce(x, "b/dp d -> b/dp", jnp.sum), mesh
    ),
    shape_for_a_layout=(
        lambda mesh: body(SAME, lambda x: x + spmd.zeros((4, 4)), mesh),
        lambda mesh: np.testing.assert_array_equal(body(SAME, lambda x: x + spmd.zeros("b/dp d"), mesh), X),
    ),
    layout_before_the_key=lambda mesh: body(SAME, lambda x: x + spmd.random.normal("b/dp d", jax.random.key(0)), mesh),
)


@bad
def per_shard_without_a_reason(mesh):
    with spmd.per_shard("  "):
        pass


@bad
def per_shard_of_a_function(mesh):
    @spmd.per_shard
    def windows(x):
        return x


@bad
def fused_without_a_name(mesh):
    @spmd.fused
    def attention(q, k, v):
        return q


bad(
    meanwhile_without_a_function=lambda mesh: body(SAME, lambda x: spmd.meanwhile(x, x, lambda w: w, x)[0], mesh),
    island_without_a_function=lambda mesh: body(SAME, lambda x: spmd.local(None, SAME)(x), mesh),
    branches_of_two_shapes=lambda mesh: body(
        SAME, lambda x: spmd.cond(x.sum() > 0, lambda x: x[0], lambda x: -x, x), mesh
    ),
    an_operand_of_objects=lambda mesh: body(
        SAME, lambda x: spmd.reduce(np.array([1, None], dtype=object), "b -> scalar"), mesh
    ),
    positions_beyond_int32=lambda mesh: spmd.from_function(lambda i: i, "x/dp", x=2**40, mesh=mesh),
    # A gather before it would send the whole array, and the reduction takes a divided dimension.
    reduce_over_a_dimension_that_is_divided=(
        lambda mesh: body("b/dp d/tp -> b/dp", lambda x: spmd.reduce(x, "b/dp d -> b/dp"), mesh),
        lambda mesh, fix: np.testing.assert_allclose(body("b/dp d/tp -> b/dp", lambda x: fix(x=x), mesh), X.sum(1)),
    ),
)
