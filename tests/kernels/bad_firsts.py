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
