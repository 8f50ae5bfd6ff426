"""What a beginner writes: NumPy's and JAX's habits in a body that holds blocks."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


W = np.arange(64, dtype=np.float32).reshape(4, 16)


bad(
    rows_that_are_sliced=lambda mesh: body("b/dp d -> b d", lambda x: x[0:2], mesh),
)


@bad
def rows_that_are_sliced_and_have_a_name_of_their_own(mesh):
    body("b/dp d -> n d", lambda x: x[0:2], mesh)


@fixed
def rows_that_are_sliced_and_have_a_name_of_their_own_fixed(mesh):
    rows = lambda x: spmd.take(x, jnp.arange(2), "[b/dp] d, n -> n d")
    np.testing.assert_array_equal(body("b/dp d -> n d", rows, mesh), X[:2])


bad(
    a_block_that_is_flattened=lambda mesh: body("b/dp d/tp -> n", lambda x: x.reshape(-1), mesh, W),
)


@fixed
def a_block_that_is_flattened_fixed(mesh):
    def flat(x):
        x = spmd.all_gather(x, "b/dp d/tp -> b/dp d")
        return spmd.rearrange(x, "b/dp d -> (b d)/dp")

    np.testing.assert_array_equal(body("b/dp d/tp -> n/dp", flat, mesh, W), W.ravel())


bad(
    a_block_that_is_flattened_and_said_to_be_divided=(
        lambda mesh: body("b d/tp -> n/tp", lambda x: x.reshape(-1), mesh, W),
        lambda mesh: body("b d/tp -> (b d)", lambda x: spmd.all_gather(x, "b d/tp -> b d").reshape(-1), mesh, W),
    ),
    a_block_that_is_flattened_into_a_composite=lambda mesh: body(
        "b/dp d/tp -> (b d)", lambda x: x.reshape(-1), mesh, W
    ),
)


@bad
def blocks_that_are_concatenated(mesh):
    body("b/dp d -> n d", lambda x: jnp.concatenate([x, x]), mesh)


@fixed
def blocks_that_are_concatenated_fixed(mesh):
    twice = lambda x: jnp.concatenate([spmd.all_gather(x, "b/dp d -> b d", to="invarying")] * 2)
    np.testing.assert_array_equal(body("b/dp d -> n d", twice, mesh), np.concatenate([X, X]))


NOISE = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


@bad
def noise_of_numpy(mesh):
    """Of the shape of a block, and the same on every device."""
    body(SAME, lambda x: x + NOISE, mesh)


@bad
def noise_of_numpy_that_is_annotated(mesh):
    body(SAME, lambda x: x * spmd.annotate(jnp.asarray(NOISE), "b/dp d"), mesh)


@fixed
def noise_of_numpy_fixed(mesh):
    key = jax.random.key(0)
    out = body(SAME, lambda x: x + spmd.random.normal(key, "b/dp d"), mesh)
    np.testing.assert_allclose(out, X + jax.random.normal(key, X.shape), rtol=1e-6)


bad(
    a_list_in_place_of_an_array=lambda mesh: body(SAME, lambda x: x, mesh, X.tolist()),
    layouts_between_semicolons=(
        lambda mesh: body("b/dp d; d f -> b/dp f", lambda x, w: x @ w, mesh, X, X.T),
        lambda mesh, fix: np.testing.assert_allclose(body(fix(), lambda x, w: x @ w, mesh, X, X.T), X @ X.T, rtol=1e-5),
    ),
    an_old_key_as_a_scalar=lambda mesh: body(
        "b/dp d, scalar -> b/dp d", lambda x, key: x, mesh, X, jax.random.PRNGKey(0)
    ),
    reduce_with_its_operation_first=(
        lambda mesh: body("b/dp d -> b/dp", lambda x: spmd.reduce(x, "mean", "b/dp d -> b/dp"), mesh),
        lambda mesh, fix: np.testing.assert_allclose(body("b/dp d -> b/dp", lambda x: fix(x=x), mesh), X.mean(1)),
    ),
    an_if_on_a_value=lambda mesh: body(SAME, lambda x: x if spmd.reduce(x, "b/dp d -> scalar") > 0 else -x, mesh),
)


@fixed
def an_if_on_a_value_fixed(mesh):
    def fn(x):
        return spmd.cond(spmd.reduce(x, "b/dp d -> scalar") > 0, lambda x: x, lambda x: -x, x)

    np.testing.assert_array_equal(body(SAME, fn, mesh), X)


@bad
def a_softmax_with_the_number_of_its_axis(mesh):
    body(SAME, lambda x: spmd.softmax(x, axis=-1), mesh)  # pyright: ignore[reportCallIssue]


@fixed
def a_softmax_with_the_number_of_its_axis_fixed(mesh):
    out = body(SAME, lambda x: spmd.softmax(x, "b/dp [d]"), mesh)
    np.testing.assert_allclose(out, jax.nn.softmax(X, axis=-1), rtol=1e-6)


@bad
def an_argmax_with_the_number_of_its_axis(mesh):
    body("b/dp d -> b/dp", lambda x: spmd.argmax(x, axis=-1), mesh)  # pyright: ignore[reportCallIssue]


# --- what is pasted runs, and is right ---------------------------------------------------------------------------------


SQUARE = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)  # in which a wrong order has the right shape
TURNED = "b/dp d -> d b/dp"
PRODUCT = "b/dp d, d f -> b/dp f"


bad(
    a_dot_in_place_of_a_slash=(
        lambda mesh: body("b.dp d -> b.dp d", lambda x: x, mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body(fix(), lambda x: x, mesh), X),
    ),
    a_result_that_does_not_divide=lambda mesh: body(
        "b/dp k -> k/tp", lambda x: spmd.reduce(x, "b/dp k -> k"), mesh, X[:, :3]
    ),
    an_exchange_that_does_not_divide=lambda mesh: body("b/tp k -> b k/tp", lambda x: x, mesh, X[:, :3]),
    a_block_that_is_read_as_one_that_does_not_divide=lambda mesh: body(
        "b k -> b", lambda x: spmd.reduce(x, "b k/tp -> b"), mesh, X[:, :3]
    ),
    a_result_that_is_not_transposed=(
        lambda mesh: body(TURNED, lambda x: x, mesh, SQUARE),
        lambda mesh, fix: np.testing.assert_array_equal(body(TURNED, lambda x: fix(x=x), mesh, SQUARE), SQUARE.T),
    ),
    a_result_that_is_not_transposed_and_lies_otherwise=(
        lambda mesh: body("b/dp d -> d/dp b", lambda x: x, mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d -> d/dp b", lambda x: fix(x=x), mesh), X.T),
    ),
    a_computed_result_that_is_not_transposed=(
        lambda mesh: body(TURNED, jnp.sin, mesh),
        lambda mesh, fix: np.testing.assert_allclose(
            body(TURNED, lambda x: fix(result=jnp.sin(x)), mesh), np.sin(X.T), rtol=1e-6
        ),
    ),
    a_string_before_its_arrays=(
        lambda mesh: body(PRODUCT, lambda x, w: spmd.einsum("bd,df->bf", x, w), mesh, X, W),
        lambda mesh, fix: np.testing.assert_allclose(
            body(PRODUCT, lambda x, w: fix(x=x, y=w), mesh, X, W), X @ W, rtol=1e-6
        ),
    ),
    a_gather_with_its_string_first=(
        lambda mesh: body("b/dp d -> b d", lambda x: spmd.all_gather("b d -> b d", x), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d -> b d", lambda x: fix(x=x), mesh), X),
    ),
    a_psum_with_the_name_of_its_axis=lambda mesh: body(
        "b/dp d -> d", lambda x: spmd.psum(x.sum(0), axis_name="dp"), mesh
    ),
    a_leaf_of_another_rank=lambda mesh: body(
        "b/dp d -> b d", lambda x: spmd.all_gather((x, x.sum()), "b/dp d -> b d"), mesh
    ),
    a_list_that_is_one_array=lambda mesh: body("b/dp d -> b/dp", lambda x: spmd.reduce([x, x], "b/dp d -> b/dp"), mesh),
    a_list_in_place_of_arrays=lambda mesh: body(PRODUCT, lambda x, w: spmd.einsum([x, w], PRODUCT), mesh, X, W),
    an_axis_without_its_slash=lambda mesh: body("b dp d -> b dp d", lambda x: x, mesh),
)


@bad
def an_untiled_gather(mesh):
    body("b/dp d -> b d", lambda x: jax.lax.all_gather(x, "dp"), mesh)


@fixed
def an_untiled_gather_fixed(mesh):
    gathered = body("b/dp d -> b/dp", lambda x: jax.lax.all_gather(x, "dp", tiled=True).sum() + x.sum(1), mesh)
    np.testing.assert_allclose(gathered, X.sum() + X.sum(1), rtol=1e-6)


def a_row_that_is_set(at):
    """One row of the whole, where each device sets one of its own; and what sets it."""
    recipe = lambda x: jnp.where(spmd.iota("b/dp")[:, None] == 3, 0, x)
    want = np.where(np.arange(8)[:, None] == 3, 0, X)
    return (
        lambda mesh: body(SAME, at, mesh),
        lambda mesh: np.testing.assert_array_equal(body(SAME, recipe, mesh), want),
    )


bad(
    a_row_that_is_set=a_row_that_is_set(lambda x: x.at[3].set(0)),
    a_row_that_is_updated=a_row_that_is_set(lambda x: jax.lax.dynamic_update_index_in_dim(x, jnp.zeros(4), 3, 0)),
)


def gradient_of_a_mean(differentiate, mean):
    return lambda w, x: differentiate(lambda w: mean((x @ w) ** 2))(w)


@bad
def gradient_of_a_mean_of_blocks(mesh):
    body("d, b/dp d -> d", gradient_of_a_mean(jax.grad, jnp.mean), mesh, X[0], X)


@fixed
def gradient_of_a_mean_of_blocks_fixed(mesh):
    mean = lambda y: spmd.reduce(y, "b/dp -> scalar", "mean")
    out = body("d, b/dp d -> d", gradient_of_a_mean(spmd.grad, mean), mesh, X[0], X)
    np.testing.assert_allclose(out, gradient_of_a_mean(jax.grad, jnp.mean)(X[0], X), rtol=1e-5)


@bad
def a_carry_that_begins_with_zeros(mesh):
    body(SAME, lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + x, jnp.zeros(x.shape)), mesh)


@fixed
def a_carry_that_begins_with_zeros_fixed(mesh):
    summed = lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + x, spmd.zeros("b/dp d"))
    np.testing.assert_array_equal(body(SAME, summed, mesh), 3 * X)
