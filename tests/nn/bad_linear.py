"""Linear layers, embeddings and norms that are given what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

I, KEY = np.arange(8), jax.random.key(0)


W = np.arange(64, dtype=np.float32).reshape(4, 16)


bad(
    column_linear_of_a_vector=lambda mesh: body(
        "b/dp d, d -> b/dp d", lambda x, w: spmd.nn.column_linear(x, w, tp="tp"), mesh, X, X[0]
    ),
    # A weight that lies whole, said to be divided.
    column_linear_of_a_whole_weight=lambda mesh: body(
        "b/dp d, d f -> b/dp f/tp", lambda x, w: spmd.nn.column_linear(x, w, tp="tp"), mesh, X, X.T
    ),
)


@fixed
def column_linear_of_a_whole_weight_fixed(mesh, fix):
    out = body("b/dp d, d f -> b/dp f/tp", lambda x, w: spmd.nn.column_linear(x, fix(w=w), tp="tp"), mesh, X, X.T)
    np.testing.assert_allclose(out, X @ X.T)


bad(
    row_linear_of_too_few_dimensions=lambda mesh: body(
        "d, h k d -> d", lambda x, w: spmd.nn.row_linear(x, w), mesh, X[0], X.reshape(2, 4, 4)
    ),
)


@bad
def column_linear_of_a_whole_bias(mesh):
    """The outputs are divided over tp, and the bias is not."""
    column = lambda x, w, b: spmd.nn.column_linear(x, w, b, tp="tp")
    body("b/dp d, d f/tp, f -> b/dp f/tp", column, mesh, X, X.T, X[:, 0])


@fixed
def column_linear_of_a_whole_bias_fixed(mesh, fix):
    column = lambda x, w, b: spmd.nn.column_linear(x, w, fix(b=b), tp="tp")
    out = body("b/dp d, d f/tp, f -> b/dp f/tp", column, mesh, X, X.T, X[:, 0])
    np.testing.assert_allclose(out, X @ X.T + X[:, 0])


bad(
    # A bias for other outputs.
    row_linear_of_half_a_bias=lambda mesh: body(
        "b f/tp, f/tp d, e -> b d", lambda x, w, b: spmd.nn.row_linear(x, w, b, tp="tp"), mesh, X, X.T, X[:2, 0]
    ),
)


@bad
def attention_with_the_first_biases(mesh):
    """Each device adds the biases of the first heads to its own."""

    def attend(q, bias):
        return spmd.nn.dot_product_attention(q, q, q, bias=bias[: q.shape[1]], tp="tp")

    body("s h/tp k, h s t -> s h/tp k", attend, mesh, np.ones((2, 8, 4), "f4"), np.ones((8, 2, 2), "f4"))


@bad
def attention_layer_at_positions_of_a_shard(mesh):
    """Positions that start at zero on each device of the divided sequence."""

    def layer(x, wq, wo):
        turn, at = spmd.nn.rotary_frequencies(4), jax.numpy.arange(x.shape[0])
        ring = lambda q, k, v: spmd.parallel.ring_attention(q, k, v, cp="tp")
        return spmd.nn.multi_head_attention(x, wq, wq, wq, wo, attend=ring, frequencies=turn, positions=at, cp="tp")

    body("s/tp d, d h k, h k d -> s/tp d", layer, mesh, X, np.ones((4, 2, 4), "f4"), np.ones((2, 4, 4), "f4"))


bad(
    qkv_linear_of_a_matrix=lambda mesh: body(
        "b/dp d, d f -> b/dp f", lambda x, w: spmd.nn.qkv_linear(x, w)[0], mesh, X, X.T
    ),
    gated_mlp_of_one_matrix=lambda mesh: body("b/dp d, d f, f d -> b/dp d", spmd.nn.gated_mlp, mesh, X, X.T, X),
)


@fixed
def gated_mlp_of_one_matrix_fixed(mesh):
    gated = lambda x, w, v: spmd.nn.gated_mlp(x, jnp.stack((w, w), 1), v)
    body("b/dp d, d f, f d -> b/dp d", gated, mesh, X, X.T, X)


bad(
    embedding_over_rows=lambda mesh: body(
        "s, v/tp d -> s d", lambda i, e: spmd.nn.embedding(i, e, over="rows", tp="tp"), mesh, I, X
    ),
    # Ids divided over the axis of the vocabulary.
    embedding_of_divided_ids=lambda mesh: body(
        "s/tp, v/tp d -> s/tp d", lambda i, e: spmd.nn.embedding(i, e, tp="tp", sp="tp"), mesh, I, X
    ),
)


@fixed
def embedding_of_divided_ids_fixed(mesh, fix):
    fn = lambda i, e: spmd.nn.embedding(fix(i=i), e, tp="tp", sp="tp")
    np.testing.assert_array_equal(body("s/tp, v/tp d -> s/tp d", fn, mesh, I, X), X[I])


bad(
    norm_of_a_scale_that_rests_divided=lambda mesh: body(
        "b/dp d, d/dp -> b/dp d", lambda x, scale: spmd.nn.rms_norm(x, scale), mesh, X, X[0]
    ),
)


@fixed
def norm_of_a_scale_that_rests_divided_fixed(mesh):
    whole = lambda scale: spmd.all_gather(scale, "d/dp -> d")
    out = body("b/dp d, d/dp -> b/dp d", lambda x, scale: spmd.nn.rms_norm(x, whole(scale), eps=0), mesh, X, X[0])
    np.testing.assert_allclose(out, X / np.sqrt((X**2).mean(1, keepdims=True)) * X[0], rtol=1e-5)


bad(
    # A gather of the weight would be accepted, and would send more than the layer, which sends nothing.
    column_linear_without_its_keyword=lambda mesh: body(
        "b/dp d, d f/tp -> b/dp f/tp", lambda x, w: spmd.nn.column_linear(x, w), mesh, X, W
    ),
)


@fixed
def column_linear_without_its_keyword_fixed(mesh):
    out = body("b/dp d, d f/tp -> b/dp f/tp", lambda x, w: spmd.nn.column_linear(x, w, tp="tp"), mesh, X, W)
    np.testing.assert_allclose(out, X @ W, rtol=1e-5)


@bad
def column_linear_of_computed_weights_without_its_keyword(mesh):
    body("b/dp d, d f/tp -> b/dp", lambda x, w: spmd.nn.column_linear(x, 2 * w).sum(1), mesh, X, W)


@bad
def column_linear_with_the_keyword_of_another_axis(mesh):
    fn = lambda x, w: spmd.nn.column_linear(x, w, tp="dp")
    body("b/dp d, d f/tp -> b/dp f/tp", fn, mesh, X, W)


@bad
def column_linear_of_a_weight_at_rest(mesh):
    """Nobody knows of a weight alone whether it rests so, or whether a keyword is missing."""
    fn = lambda x, w: spmd.nn.column_linear(x, w, tp="tp")
    body("b/dp d, d/dp f/tp -> b/dp f/tp", fn, mesh, X, W)


bad(
    norm_of_half_a_scale=lambda mesh: body(
        "b/dp d, d/dp -> b/dp d", lambda x, scale: spmd.nn.layer_norm(x, scale * 2), mesh, X, X[0]
    ),
)
