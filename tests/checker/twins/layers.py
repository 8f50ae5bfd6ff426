"""Ready-made layers on a stream whose division they are not told of."""

import jax
import jax.numpy as jnp

import spmd
from spmd import all_gather, einsum, nn, parallel, split
from tests.checker.twins.registry import wrong

CP = {"dp": 2, "cp": 2, "tp": 2}


@wrong("b/dp s/tp d, d f/tp, f/tp d -> b/dp s/tp d")
def mlp_without_sp(x, a, b):
    """The psum over tp adds up different tokens."""
    return x + nn.mlp(x, a, b, tp="tp")  # wrong: hidden


mlp_without_sp.right(lambda x, a, b: x + nn.mlp(x, a, b, tp="tp", sp="tp"))
mlp_without_sp.whole(lambda x, a, b: x + jax.nn.gelu(x @ a) @ b)


@wrong("b/dp s/tp d, d 2 f/tp, f/tp d -> b/dp s/tp d")
def gated_mlp_without_sp(x, a, b):
    return x + nn.gated_mlp(x, a, b, tp="tp")  # wrong: hidden


gated_mlp_without_sp.right(lambda x, a, b: x + nn.gated_mlp(x, a, b, tp="tp", sp="tp"))


@wrong("b/dp s/tp d, d h/tp k, d h/tp k, d h/tp k, h/tp k d -> b/dp s/tp d")
def attention_layer_without_sp(x, wq, wk, wv, wo):
    return x + nn.multi_head_attention(x, wq, wk, wv, wo, tp="tp")  # wrong: hidden


attention_layer_without_sp.right(
    lambda x, wq, wk, wv, wo: x + nn.multi_head_attention(x, wq, wk, wv, wo, tp="tp", sp="tp")
)


@wrong("b/dp s/cp d, d h/tp k, d h/tp k, d h/tp k, h/tp k d -> b/dp s/cp d", mesh=CP)
def attention_layer_without_cp(x, wq, wk, wv, wo):
    """Each block of the sequence looks at itself only."""
    return x + nn.multi_head_attention(x, wq, wk, wv, wo, tp="tp")  # wrong: hidden or layout


@attention_layer_without_cp.right
def _(x, wq, wk, wv, wo):
    ring = lambda q, k, v: parallel.ring_attention(q, k, v, cp="cp", tp="tp")
    return x + nn.multi_head_attention(x, wq, wk, wv, wo, attend=ring, tp="tp", cp="cp")


@wrong("b/dp s/tp h k, b/dp s/tp h k, b/dp s/tp h k -> b/dp s/tp h k")
def attention_on_a_block(q, k, v):
    return nn.dot_product_attention(q, k, v)  # wrong: hidden or pending


attention_on_a_block.right(lambda q, k, v: parallel.ring_attention(q, k, v, cp="tp"))


@wrong("b/dp s/tp d, d f/tp, f/tp d -> b/dp s/tp d")
def column_linear_without_sp(x, a, b):
    h = nn.column_linear(x, a, tp="tp")  # wrong: hidden
    return x + einsum(h, b, "... f/tp, f/tp d -> ... d")


@column_linear_without_sp.right
def _(x, a, b):
    h = nn.column_linear(x, a, tp="tp", sp="tp")
    return x + einsum(h, b, "b/dp s f/tp, f/tp d -> b/dp s/tp d")


@wrong("b/dp s/tp d, d f/tp, f/tp d -> b/dp s/tp d")
def row_linear_without_sp(x, a, b):
    """A block of the summed tokens, of the wrong device."""
    h = jax.nn.relu(nn.column_linear(x, a, tp="tp", sp="tp"))
    return x + nn.row_linear(h, b, tp="tp")[:, : x.shape[1]]  # wrong: disagree or pending or layout


@row_linear_without_sp.right
def _(x, a, b):
    h = jax.nn.relu(nn.column_linear(x, a, tp="tp", sp="tp"))
    return x + split(nn.row_linear(h, b, tp="tp"), "b/dp s d -> b/dp s/tp d")


@wrong("b/dp s/tp d, d f -> b/dp s/tp f")
def split_hides_an_axis(x, w):
    """The features of each device's own tokens are split, as if all had the same tokens."""
    part = split(x, "... d -> ... d/tp")  # wrong: hidden
    return einsum(part, split(w, "d f -> d/tp f"), "... d/tp, d/tp f -> ... f")


@split_hides_an_axis.right
def _(x, w):
    part = split(all_gather(x, "b/dp s/tp d -> b/dp s d"), "b/dp s d -> b/dp s d/tp")
    return einsum(part, split(w, "d f -> d/tp f"), "b/dp s d/tp, d/tp f -> b/dp s/tp f")


@wrong("b/dp s d/tp -> b/dp s d/tp")
def rms_norm_without_tp(x):
    return nn.rms_norm(x)  # wrong: hidden or layout


rms_norm_without_tp.right(lambda x: nn.rms_norm(x, tp="tp"))
rms_norm_without_tp.whole(lambda x: x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6))


@wrong("b/dp s d/tp, d/tp -> b/dp s d/tp")
def layer_norm_without_tp(x, scale):
    return nn.layer_norm(x, scale)  # wrong: layout


layer_norm_without_tp.right(lambda x, scale: nn.layer_norm(x, scale, tp="tp"))


@wrong("b/dp s/tp, v/tp d -> b/dp s/tp d")
def embedding_without_sp(ids, table):
    """Rows of different tokens are added up."""
    return nn.embedding(ids, table, tp="tp")  # wrong: hidden


embedding_without_sp.right(
    lambda ids, table: nn.embedding(all_gather(ids, "b/dp s/tp -> b/dp s"), table, tp="tp", sp="tp")
)
embedding_without_sp.whole(lambda ids, table: table[ids])


@wrong("b/dp s/tp d, v/tp d, b/dp s/tp -> scalar")
def loss_of_a_block_of_tokens(x, table, labels):
    logits = nn.unembedding(x, table, tp="tp")  # wrong: hidden
    return nn.cross_entropy(logits, labels, tp="tp", dp="dp")


@loss_of_a_block_of_tokens.right
def _(x, table, labels):
    logits = nn.unembedding(x, table, tp="tp", sp="tp")
    return nn.cross_entropy(logits, all_gather(labels, "b/dp s/tp -> b/dp s"), tp="tp", dp="dp")


@loss_of_a_block_of_tokens.whole
def _(x, table, labels):
    scores = jax.nn.log_softmax(x @ table.T)
    return -jnp.take_along_axis(scores, labels[..., None], 2).mean()


@wrong("b/dp s/cp v/tp, b/dp s/cp -> scalar", mesh=CP)
def cross_entropy_without_cp(logits, labels):
    """A sum over some tokens."""
    return nn.cross_entropy(logits, labels, reduction="sum", tp="tp", dp="dp")  # wrong: layout or partial or pending


cross_entropy_without_cp.right(
    lambda logits, labels: nn.cross_entropy(logits, labels, reduction="sum", tp="tp", dp="dp", cp="cp")
)


@wrong("b/dp s/tp h k -> b/dp s/tp h k")
def rope_of_local_positions(x):
    positions = jnp.arange(x.shape[1])
    return nn.rotary_embedding(x, positions, nn.rotary_frequencies(x.shape[-1]))  # wrong: layout or disagree


rope_of_local_positions.right(
    lambda x: nn.rotary_embedding(x, spmd.iota("s/tp", s=16), nn.rotary_frequencies(x.shape[-1]))
)
