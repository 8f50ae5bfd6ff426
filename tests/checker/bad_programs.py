"""Programs that are wrong though each call is right: what leaves a kernel is not what its pattern says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd import all_gather, reduce, split
from tests.errors.registry import V, X, bad, body, fixed


@bad
def gathered_copy_leaves(mesh):
    spmd.kernel("x/dp -> x", mesh=mesh)(lambda x: all_gather(x, "x/dp -> x", to="varying"))(V)


@fixed
def gathered_copy_leaves_fixed(mesh, fix):
    np.testing.assert_array_equal(spmd.kernel("x/dp -> x", mesh=mesh)(lambda x: fix(x=x))(V), V)


bad(
    block_leaves_as_whole=(
        lambda mesh: body("x/dp -> x", lambda x: x, mesh, V),
        lambda mesh, fix: np.testing.assert_array_equal(body("x/dp -> x", lambda x: fix(x=x), mesh, V), V),
    ),
    partial_sum_leaves=(
        lambda mesh: body("b/dp d -> d", lambda x: x.sum(0), mesh),
        lambda mesh, fix: np.testing.assert_allclose(
            body("b/dp d -> d", lambda x: fix(result=x.sum(0)), mesh), X.sum(0)
        ),
    ),
    marked_partial_sum_leaves=lambda mesh: body("b/dp d -> d", lambda x: reduce(x, "b/dp d -> d {U:dp}"), mesh),
)


@fixed
def marked_partial_sum_leaves_fixed(mesh, fix):
    out = body("b/dp d -> d", lambda x: fix(result=reduce(x, "b/dp d -> d {U:dp}")), mesh)
    np.testing.assert_allclose(out, X.sum(0))


bad(
    arange_of_local_length=(
        lambda mesh: body("b/dp d -> b/dp", lambda x: jnp.arange(x.shape[0]), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("b/dp d -> b/dp", lambda x: fix(), mesh), np.arange(8)),
    ),
    copy_claimed_divided=(
        lambda mesh: body("d -> d/dp", lambda x: x[:4], mesh, V),
        lambda mesh: np.testing.assert_array_equal(body("d -> d/dp", lambda x: split(x, "d -> d/dp"), mesh, V), V),
    ),
    local_mean_leaves=(
        lambda mesh: body("b/dp d -> scalar", jnp.mean, mesh),
        lambda mesh, fix: np.testing.assert_allclose(body("b/dp d -> scalar", lambda x: fix(a=x), mesh), X.mean()),
    ),
    local_sum_over_a_number_leaves=lambda mesh: body("b/dp d -> d", lambda x: x.sum(0) / 4, mesh),
)

SQUARE = np.arange(64.0, dtype=np.float32).reshape(8, 8)
bad(
    square_array_leaves_turned=(
        lambda mesh: body("b d -> b d", lambda x: x.T, mesh, SQUARE),
        lambda mesh, fix: np.testing.assert_array_equal(
            body("b d -> b d", lambda x: fix(result=x.T), mesh, SQUARE), SQUARE
        ),
    ),
    square_array_called_otherwise=(
        lambda mesh: body("b/dp d -> d/dp", lambda x: reduce(jnp.tanh(x), "d/dp b -> d/dp"), mesh, SQUARE),
        lambda mesh: np.testing.assert_allclose(
            body("b/dp d -> d/dp", lambda x: reduce(jnp.tanh(x), "b/dp d -> d/dp"), mesh, SQUARE),
            np.tanh(SQUARE).sum(0),
            rtol=1e-6,
        ),
    ),
)


@bad
def local_maximum_leaves(mesh):
    body("b/dp d -> d", lambda x: x.max(0), mesh)


@fixed
def local_maximum_leaves_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp d -> d", lambda x: fix(x=x), mesh), X.max(0))


bad(
    product_over_a_divided_dimension_leaves=lambda mesh: body(
        "b/tp d, b/tp f -> d f", lambda x, y: x.T @ y, mesh, X, X
    ),
)


@fixed
def product_over_a_divided_dimension_leaves_fixed(mesh, fix):
    out = body("b/tp d, b/tp f -> d f", lambda x, y: fix(result=x.T @ y), mesh, X, X)
    np.testing.assert_allclose(out, X.T @ X)


@bad
def copy_of_a_planned_gather_leaves(mesh):
    """The plan is an all_to_all, not a gather, and its result is equal on tp all the same."""
    body("x/dp/tp y -> x y/dp", lambda x: spmd.relayout(x, "x/dp/tp y -> x y/dp", to="varying"), mesh)


@fixed
def copy_of_a_planned_gather_leaves_fixed(mesh, fix):
    np.testing.assert_array_equal(body("x/dp/tp y -> x y/dp", lambda x: fix(x=x), mesh), X)


@bad
def copy_of_a_transform_leaves(mesh):
    transform = lambda u: spmd.fft.fft(u, "x/dp y/tp z -> kx ky/dp kz", to="varying")
    body("x/dp y/tp z -> kx ky/dp kz", transform, mesh, X.reshape(2, 4, 4))


@fixed
def copy_of_a_transform_leaves_fixed(mesh, fix):
    out = body("x/dp y/tp z -> kx ky/dp kz", lambda u: fix(x=u), mesh, X.reshape(2, 4, 4))
    np.testing.assert_allclose(out, np.fft.fftn(X.reshape(2, 4, 4), axes=(0, 1, 2)), atol=1e-4)


@bad
def weight_gathered_over_the_wrong_axis(mesh):
    def fn(w):
        w = spmd.annotate(jnp.tanh(all_gather(w, "d/dp f/tp -> d/dp f")), "m n/tp")
        return reduce(w, "m n/tp -> scalar")

    body("d/dp f/tp -> scalar", fn, mesh, X.T)


@bad
def weight_gathered_over_the_wrong_axis_and_used(mesh):
    def fn(x, w):
        w = jnp.tanh(all_gather(w, "d/dp f/tp -> d/dp f"))
        return spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")

    body("b/dp d, d/dp f/tp -> b/dp f/tp", fn, mesh, X, X.T)


@fixed
def weight_gathered_over_the_wrong_axis_fixed(mesh, fix):
    def fn(w):
        w = spmd.annotate(fix(x=jnp.tanh(all_gather(w, "d/dp f/tp -> d/dp f"))), "m n/tp")
        return reduce(w, "m n/tp -> scalar")

    np.testing.assert_allclose(body("d/dp f/tp -> scalar", fn, mesh, X.T), np.tanh(X).sum(), rtol=1e-5)


@bad
def noise_of_a_local_shape(mesh):
    noise = lambda x: x + spmd.annotate(jax.random.normal(jax.random.key(0), x.shape), "b/dp d")
    body("b/dp d -> b/dp d", noise, mesh)


bad(
    # What was done to the mean is not in a line that makes the mean of the argument.
    negative_mean_leaves=lambda mesh: body("b/dp d -> scalar", lambda x: -jnp.mean(x), mesh),
)


@bad
def transposed_maximum_leaves(mesh):
    body("b/dp d e -> e d", lambda x: x.max(0).T, mesh, X.reshape(-1, 2, 2))


@bad
def rounded_sum_leaves(mesh):
    """A psum of it would be a sum of rounded parts."""
    body("b/dp d -> d", lambda x: x.sum(0).astype(jnp.int32), mesh)


@fixed
def rounded_sum_leaves_fixed(mesh, fix):
    out = body("b/dp d -> d", lambda x: fix(x=x / 3).astype(jnp.int32), mesh)
    np.testing.assert_array_equal(out, (X / 3).sum(0).astype(np.int32))


@bad
def copy_made_by_relayout_leaves(mesh):
    body("b/dp/tp d -> b/tp d", lambda x: spmd.relayout(x, "b/dp/tp d -> b/tp d", to="varying"), mesh)


@fixed
def copy_made_by_relayout_leaves_fixed(mesh, fix):
    np.testing.assert_array_equal(body("b/dp/tp d -> b/tp d", lambda x: fix(x=x), mesh), X)


bad(
    block_leaves_without_its_axis=(
        lambda mesh: body("b/dp d -> b d", lambda x: 2 * x, mesh),
        lambda mesh: np.testing.assert_allclose(
            body("b/dp d -> b d", lambda x: all_gather(2 * x, "b/dp d -> b d"), mesh), 2 * X
        ),
    ),
)


@bad
def variance_of_blocks(mesh):
    body("b/dp d/tp -> b/dp", lambda x: x.var(-1), mesh)


@fixed
def variance_of_blocks_fixed(mesh):
    out = body("b/dp d/tp -> b/dp", lambda x: all_gather(x, "b/dp d/tp -> b/dp d").var(-1), mesh)
    np.testing.assert_allclose(out, X.var(-1), rtol=1e-6)


@bad
def deviation_of_blocks(mesh):
    body("b/dp d/tp -> b/dp 1", lambda x: jnp.std(x, axis=1, ddof=1, keepdims=True), mesh)


@fixed
def deviation_of_blocks_fixed(mesh):
    out = body(
        "b/dp d/tp -> b/dp 1",
        lambda x: jnp.std(all_gather(x, "b/dp d/tp -> b/dp d"), axis=1, ddof=1, keepdims=True),
        mesh,
    )
    np.testing.assert_allclose(out, X.std(1, ddof=1, keepdims=True), rtol=1e-6)


@bad
def deviation_of_all(mesh):
    body("b/dp d/tp -> scalar", lambda x: x.std(), mesh)


@fixed
def deviation_of_all_fixed(mesh):
    np.testing.assert_allclose(
        body("b/dp d/tp -> scalar", lambda x: all_gather(x, "b/dp d/tp -> b d").std(), mesh), X.std(), rtol=1e-6
    )


@bad
def variance_of_what_was_made(mesh):
    """It has the layout of the argument, and no name."""
    body("b/dp d/tp -> b/dp", lambda x: (x + 1).var(-1), mesh)


bad(
    norm_of_blocks=lambda mesh: body("b/dp d/tp -> scalar", jnp.linalg.norm, mesh),
)


@fixed
def norm_of_blocks_fixed(mesh):
    out = body("b/dp d/tp -> scalar", lambda x: jnp.linalg.norm(all_gather(x, "b/dp d/tp -> b d")), mesh)
    np.testing.assert_allclose(out, np.linalg.norm(X), rtol=1e-6)


@bad
def norm_of_order_three(mesh):
    body("b/dp d/tp -> b/dp", lambda x: jnp.linalg.norm(x, ord=3, axis=-1), mesh)


@fixed
def norm_of_order_three_fixed(mesh):
    out = body(
        "b/dp d/tp -> b/dp", lambda x: jnp.linalg.norm(all_gather(x, "b/dp d/tp -> b/dp d"), ord=3, axis=-1), mesh
    )
    np.testing.assert_allclose(out, np.linalg.norm(X, ord=3, axis=-1), rtol=1e-6)


@bad
def mean_of_blocks_is_subtracted(mesh):
    body("b/dp d/tp -> b/dp d/tp", lambda x: x - x.mean(-1, keepdims=True), mesh)


@fixed
def mean_of_blocks_is_subtracted_fixed(mesh, fix):
    out = body("b/dp d/tp -> b/dp d/tp", lambda x: x - fix(x=x), mesh)
    np.testing.assert_allclose(out, X - X.mean(-1, keepdims=True))


@bad
def root_of_the_sum_of_squares(mesh):
    body("b/dp d/tp -> b/dp", lambda x: jnp.sqrt((x**2).sum(1)), mesh)


@fixed
def root_of_the_sum_of_squares_fixed(mesh, fix):
    out = body("b/dp d/tp -> b/dp", lambda x: jnp.sqrt(fix(x=x)), mesh)
    np.testing.assert_allclose(out, np.sqrt((X**2).sum(1)), rtol=1e-6)


bad(
    softmax_of_blocks=lambda mesh: body("b/dp d/tp -> b/dp d/tp", jax.nn.softmax, mesh),
)


@fixed
def softmax_of_blocks_fixed(mesh):
    out = body("b/dp d/tp -> b/dp d/tp", lambda x: spmd.softmax(x, "b/dp [d/tp]"), mesh)
    np.testing.assert_allclose(out, jax.nn.softmax(X), rtol=1e-6)


bad(
    log_softmax_of_blocks=lambda mesh: body("b/dp d/tp -> b/dp d/tp", jax.nn.log_softmax, mesh),
)


@fixed
def log_softmax_of_blocks_fixed(mesh):
    whole = lambda x: spmd.split(jax.nn.log_softmax(all_gather(x, "b/dp d/tp -> b/dp d")), "b/dp d -> b/dp d/tp")
    out = body("b/dp d/tp -> b/dp d/tp", whole, mesh)
    np.testing.assert_allclose(out, jax.nn.log_softmax(X), rtol=1e-5)


@bad
def logsumexp_of_blocks(mesh):
    body("b/dp d/tp -> b/dp", lambda x: jax.nn.logsumexp(x, axis=-1), mesh)


@fixed
def logsumexp_of_blocks_fixed(mesh):
    out = body("b/dp d/tp -> b/dp", lambda x: jax.nn.logsumexp(all_gather(x, "b/dp d/tp -> b/dp d"), axis=-1), mesh)
    np.testing.assert_allclose(out, jax.nn.logsumexp(X, axis=-1), rtol=1e-6)


@bad
def mean_without_its_dimension(mesh):
    """Of rank 1 it is taken for a row: on whole arrays the shapes do not fit, and those of the shards do."""
    with jax.numpy_rank_promotion("allow"):
        fn = lambda x: x - reduce(x, "b/dp d/tp -> b/dp", "mean")
        body("b/dp d/tp -> b/dp d/tp", fn, mesh, np.ones((8, 16), np.float32))


@fixed
def mean_without_its_dimension_fixed(mesh):
    fn = lambda x: x - reduce(x, "b/dp d/tp -> b/dp 1", "mean")
    np.testing.assert_allclose(body("b/dp d/tp -> b/dp d/tp", fn, mesh), X - X.mean(1, keepdims=True))


@bad
def optax_clip_of_a_divided_tree(mesh):
    tree = {"w": "d/tp", "b": "d"}
    clip = optax.clip_by_global_norm(1.0)
    fn = lambda gradients: clip.update(gradients, clip.init(gradients))[0]
    spmd.kernel(in_layouts=(tree,), out_layouts=tree, mesh=mesh)(fn)({"w": V, "b": V})


@fixed
def optax_clip_of_a_divided_tree_fixed(mesh):
    tree = {"w": "d/tp", "b": "d"}
    clip, whole = spmd.parallel.clip_by_global_norm(1.0, tree), optax.clip_by_global_norm(1.0)
    fn = lambda gradients: clip.update(gradients, clip.init(gradients))[0]
    gradients = {"w": V, "b": 2 * V}
    out = spmd.kernel(in_layouts=(tree,), out_layouts=tree, mesh=mesh)(fn)(gradients)
    wanted = whole.update(gradients, whole.init(gradients))[0]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), out, wanted)


@bad
def optax_norm_of_a_divided_array(mesh):
    spmd.kernel("d/tp -> scalar", mesh=mesh)(lambda gradient: optax.tree.norm({"w": gradient}))(V)


@fixed
def optax_norm_of_a_divided_array_fixed(mesh):
    norm = spmd.kernel("d/tp -> scalar", mesh=mesh)(
        lambda gradient: optax.tree.norm({"w": all_gather(gradient, "d/tp -> d")})
    )
    np.testing.assert_allclose(norm(V), np.linalg.norm(V), rtol=1e-6)


@bad
def optax_loss_of_a_divided_vocabulary(mesh):
    fn = lambda scores, y: optax.softmax_cross_entropy_with_integer_labels(scores, y).sum()
    body("b/dp v/tp, b/dp -> scalar", fn, mesh, X, np.zeros(8, int))


@fixed
def optax_loss_of_a_divided_vocabulary_fixed(mesh):
    y = np.arange(8) % 4
    loss = optax.softmax_cross_entropy_with_integer_labels
    fn = lambda scores, y: spmd.psum(loss(all_gather(scores, "b/dp v/tp -> b/dp v"), y).sum(), "{U:dp} -> scalar")
    np.testing.assert_allclose(body("b/dp v/tp, b/dp -> scalar", fn, mesh, X, y), loss(X, y).sum(), rtol=1e-6)


@bad
def one_hot_of_blocks(mesh):
    """A device has a part of the classes, and a one-hot begins at the first class on each."""
    fn = lambda scores, y: reduce(scores * jax.nn.one_hot(y, scores.shape[1]), "b/dp v/tp -> b/dp")
    body("b/dp v/tp, b/dp -> b/dp", fn, mesh, np.ones((8, 16), np.float32), np.zeros(8, int))


@fixed
def one_hot_of_blocks_fixed(mesh):
    y, scores = np.arange(8) * 2, np.arange(128, dtype=np.float32).reshape(8, 16)
    fn = lambda scores, y: reduce(jnp.where(y[:, None] == spmd.iota("v/tp")[None], scores, 0), "b/dp v/tp -> b/dp")
    found = body("b/dp v/tp, b/dp -> b/dp", fn, mesh, scores, y)
    np.testing.assert_array_equal(found, np.take_along_axis(scores, y[:, None], 1)[:, 0])


bad(
    # `x.shape` is that of the shard: a psum of this would be as many times too large as there are devices.
    product_divided_by_the_rows_of_a_block=lambda mesh: body("b/dp d -> d e", lambda x: x.T @ x / x.shape[0], mesh),
)


@fixed
def product_divided_by_the_rows_of_a_block_fixed(mesh):
    """A sum that is divided by a number of all devices."""
    fn = lambda x: spmd.psum(x.T @ x / spmd.size("b"), "d e {U:dp} -> d e")
    np.testing.assert_allclose(body("b/dp d -> d e", fn, mesh), X.T @ X / 8, rtol=1e-6)
