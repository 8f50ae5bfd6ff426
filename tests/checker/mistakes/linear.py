"""Linear layers, MLPs, norms, dropout."""

import jax
import jax.numpy as jnp

import spmd
from spmd import all_gather, nn
from tests.checker.mistakes.registry import mistake

MLP = "b s d, d f/tp, f/tp d -> b s d"


def by_group(w):
    """A weight of all queries, all keys, all values as one of (query, key, value) for each group."""
    return jnp.swapaxes(w.reshape(w.shape[0], 3, -1, w.shape[-1]), 1, 2)


STREAM = "b s/tp d, d f/tp, f/tp d -> b s/tp d"

mistake(
    "nn.mlp",
    "sp= is forgotten where the stream is divided over the sequence",
    STREAM,
    right=lambda x, a, c: x + nn.mlp(x, a, c, tp="tp", sp="tp"),
    wrong=lambda x, a, c: x + nn.mlp(x, a, c, tp="tp"),
)
mistake(
    "nn.mlp",
    "tp= is forgotten",
    MLP,
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c),
)
mistake(
    "nn.mlp",
    "tp= names the axis of the batch",
    "b/dp s d, d f/tp, f/tp d -> b/dp s d",
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c, tp="dp"),
)
mistake(
    "nn.mlp",
    "the weights are swapped, and their blocks have the same shape",
    "b s d, d f/tp, f/tp d -> b s d",
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, c, a, tp="tp"),
)
mistake(
    "nn.mlp",
    "w_in is divided along d",
    MLP,
    wrong_pattern="b s d, d/tp f, f/tp d -> b s d",
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
)
mistake(
    "nn.mlp",
    "w_out is divided along d",
    MLP,
    wrong_pattern="b s d, d f/tp, f d/tp -> b s d",
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
)
mistake(
    "nn.mlp",
    "the weights rest divided over dp and are not gathered",
    "b/dp s d, d/dp f/tp, f/tp d/dp -> b/dp s d",
    right=lambda x, a, c: nn.mlp(
        x, all_gather(a, "d/dp f/tp -> d f/tp"), all_gather(c, "f/tp d/dp -> f/tp d"), tp="tp"
    ),
    wrong=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
)
mistake(
    "nn.mlp",
    "b_in is whole",
    "b s d, d f/tp, f/tp d, f/tp -> b s d",
    wrong_pattern="b s d, d f/tp, f/tp d, f -> b s d",
    right=lambda x, a, c, bias: nn.mlp(x, a, c, bias, tp="tp"),
    wrong=lambda x, a, c, bias: nn.mlp(x, a, c, bias, tp="tp"),
)
mistake(
    "nn.mlp",
    "b_in is whole, and each device takes its first part",
    "b s d, d f/tp, f/tp d, f -> b s d",
    right=lambda x, a, c, bias: nn.mlp(x, a, c, spmd.split(bias, "f -> f/tp"), tp="tp"),
    wrong=lambda x, a, c, bias: nn.mlp(x, a, c, bias[: a.shape[1]], tp="tp"),
)
mistake(
    "nn.mlp",
    "the activation is a softmax over the hidden units, which tp divides",
    MLP,
    right=lambda x, a, c: nn.mlp(x, a, c, activation=lambda h: spmd.softmax(h, "... [f/tp]"), tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c, activation=jax.nn.softmax, tp="tp"),
)
mistake(
    "nn.mlp",
    "the activation is a norm over the hidden units, without tp=",
    MLP,
    right=lambda x, a, c: nn.mlp(x, a, c, activation=lambda h: nn.rms_norm(h, tp="tp"), tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c, activation=nn.rms_norm, tp="tp"),
)
mistake(
    "nn.mlp",
    "cp= is forgotten, and cp is the major axis of the sequence",
    "b s/cp/tp d, d f/tp, f/tp d -> b s/cp/tp d",
    mesh={"cp": 2, "tp": 2},
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp", sp="tp", cp="cp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c, tp="tp", sp="tp"),
)
mistake(
    "nn.mlp",
    "sp= names cp instead of tp",
    "b s/cp/tp d, d f/tp, f/tp d -> b s/cp/tp d",
    mesh={"cp": 2, "tp": 2},
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp", sp="tp", cp="cp"),
    wrong=lambda x, a, c: nn.mlp(x, a, c, tp="tp", sp="cp", cp="tp"),
)
mistake(
    "nn.mlp",
    "the stream is gathered by hand, and again by sp=",
    "b s/tp d, d f/tp, f/tp d -> b s/tp d",
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp", sp="tp"),
    wrong=lambda x, a, c: nn.mlp(all_gather(x, "b s/tp d -> b s d"), a, c, tp="tp", sp="tp")[:, : x.shape[1]],
)
mistake(
    "nn.gated_mlp",
    "sp= is forgotten where the stream is divided over the sequence",
    "b s/tp d, d f/tp, d f/tp, f/tp d -> b s/tp d",
    right=lambda x, a, u, c: x + nn.gated_mlp(x, (a, u), c, tp="tp", sp="tp"),
    wrong=lambda x, a, u, c: x + nn.gated_mlp(x, (a, u), c, tp="tp"),
)
mistake(
    "nn.gated_mlp",
    "gate and up are fused as (2 f)/tp, so that tp divides the gates from what they multiply",
    "b s d, d j, f/tp d -> b s d",
    wrong_pattern="b s d, d j/tp, f/tp d -> b s d",
    j=32,
    right=lambda x, a, c: nn.gated_mlp(
        x, spmd.split(a.reshape(a.shape[0], 2, -1), "d two f -> d two f/tp"), c, tp="tp"
    ),
    wrong=lambda x, a, c: nn.gated_mlp(x, a.reshape(a.shape[0], 2, -1), c, tp="tp"),
)
mistake(
    "nn.column_linear",
    "tp= is forgotten",
    "b s d, d f/tp -> b s f/tp",
    right=lambda x, w: nn.column_linear(x, w, tp="tp"),
    wrong=lambda x, w: nn.column_linear(x, w),
)
mistake(
    "nn.column_linear",
    "sp= is forgotten where the stream is divided over the sequence",
    "b s/tp d, d f/tp -> b s f/tp",
    right=lambda x, w: nn.column_linear(x, w, tp="tp", sp="tp"),
    wrong=lambda x, w: nn.column_linear(x, w, tp="tp"),
)
mistake(
    "nn.row_linear",
    "tp= is forgotten: nobody sums the parts",
    "b s f/tp, f/tp d -> b s d",
    right=lambda x, w: nn.row_linear(x, w, tp="tp"),
    wrong=lambda x, w: nn.row_linear(x, w),
)
mistake(
    "nn.row_linear",
    "sp= is forgotten, and the result is added to a stream divided over the sequence",
    "b s f/tp, f/tp d, b s/tp d -> b s/tp d",
    right=lambda h, w, x: x + nn.row_linear(h, w, tp="tp", sp="tp"),
    wrong=lambda h, w, x: x + nn.row_linear(h, w, tp="tp"),
)
mistake(
    "nn.row_linear",
    "its input is divided over the sequence, not over the rows",
    "b s/tp f, f/tp d -> b s d",
    right=lambda h, w: nn.row_linear(spmd.all_to_all(h, "b s/tp f -> b s f/tp"), w, tp="tp"),
    wrong=lambda h, w: nn.row_linear(h[..., : w.shape[0]], w, tp="tp"),
)
mistake(
    "nn.row_linear",
    "the bias is added to each device's part, before the sum",
    "b s f/tp, f/tp d, d -> b s d",
    right=lambda h, w, bias: nn.row_linear(h, w, bias, tp="tp"),
    wrong=lambda h, w, bias: spmd.psum(
        spmd.einsum(h, w, "b s f/tp, f/tp d -> b s d {U:tp}") + bias, "b s d {U:tp} -> b s d"
    ),
)
mistake(
    "nn.row_linear",
    "the bias is divided over tp",
    "b s f/tp, f/tp d, d -> b s d",
    wrong_pattern="b s f/tp, f/tp d, d/tp -> b s d",
    right=lambda h, w, bias: nn.row_linear(h, w, bias, tp="tp"),
    wrong=lambda h, w, bias: nn.row_linear(h, w, bias, tp="tp"),
)
mistake(
    "nn.qkv_linear",
    "all queries come first in the fused weight, so that tp divides them from their keys",
    "b s d, d j k -> b s g/tp k",
    wrong_pattern="b s d, d j/tp k -> b s g/tp k",
    j=12,
    right=lambda x, w: nn.qkv_linear(x, spmd.split(by_group(w), "d g three k -> d g/tp three k"), tp="tp")[1],
    wrong=lambda x, w: nn.qkv_linear(x, by_group(w), tp="tp")[1],
)
mistake(
    "nn.rms_norm",
    "tp= is forgotten where tp divides the features",
    "b s d/tp, d/tp -> b s d/tp",
    right=lambda x, scale: nn.rms_norm(x, scale, tp="tp"),
    wrong=lambda x, scale: nn.rms_norm(x, scale),
)
mistake(
    "nn.rms_norm",
    "tp= is given where tp divides the sequence, and the features are whole",
    "b s/tp d -> b s/tp d",
    right=lambda x: nn.rms_norm(x),
    wrong=lambda x: nn.rms_norm(x, tp="tp"),
)
mistake(
    "nn.rms_norm",
    "the scale rests divided and is not gathered",
    "b/dp s d, d/dp -> b/dp s d",
    right=lambda x, scale: nn.rms_norm(x, all_gather(scale, "d/dp -> d")),
    wrong=lambda x, scale: nn.rms_norm(x, scale),
)
mistake(
    "nn.layer_norm",
    "tp= is forgotten where tp divides the features",
    "b s d/tp -> b s d/tp",
    right=lambda x: nn.layer_norm(x, tp="tp"),
    wrong=lambda x: nn.layer_norm(x),
)
mistake(
    "nn.layer_norm",
    "the scale is whole, and each device takes its first part",
    "b s d/tp, d -> b s d/tp",
    right=lambda x, scale: nn.layer_norm(x, spmd.split(scale, "d -> d/tp"), tp="tp"),
    wrong=lambda x, scale: nn.layer_norm(x, scale[: x.shape[-1]], tp="tp"),
)
mistake(
    "nn.dropout",
    "the layout leaves out the axis of the batch: the same mask for all rows",
    "b/dp s d, scalar -> b/dp s d",
    right=lambda x, key: nn.dropout(x, key, "b/dp s d", rate=0.5),
    wrong=lambda x, key: nn.dropout(x, key, "rows s d", rate=0.5),
)
mistake(
    "nn.dropout",
    "each device of tp has its own key, and they hold the same stream",
    "b/dp s d, scalar -> b/dp s d",
    right=lambda x, key: nn.dropout(x, key, "b/dp s d", rate=0.5),
    wrong=lambda x, key: nn.dropout(x, jax.random.fold_in(key, spmd.axis_index("tp")), "b/dp s d", rate=0.5),
)
