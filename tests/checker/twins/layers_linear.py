"""Linear layers, MLPs, norms, dropout."""

import jax
import jax.numpy as jnp

import spmd
from spmd import all_gather, nn
from tests.checker.twins.layers import mistake

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
    "the weights are swapped, and their blocks have the same shape",
    "b s d, d f/tp, f/tp d -> b s d",
    right=lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
    wrong=lambda x, a, c: nn.mlp(x, c, a, tp="tp"),
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
    "nn.gated_mlp",
    "sp= is forgotten where the stream is divided over the sequence",
    "b s/tp d, d f/tp, d f/tp, f/tp d -> b s/tp d",
    right=lambda x, a, u, c: x + nn.gated_mlp(x, (a, u), c, tp="tp", sp="tp"),
    wrong=lambda x, a, u, c: x + nn.gated_mlp(x, (a, u), c, tp="tp"),
)
mistake(
    "nn.gated_mlp",
    "gate and up are fused as (2 f)/tp, so that tp divides the gates from what they multiply",
    "b s d, d j/tp, f/tp d -> b s d",
    j=32,
    right=lambda x, a, c: nn.gated_mlp(
        x,
        spmd.split(all_gather(a, "d j/tp -> d j").reshape(a.shape[0], 2, -1), "d two f -> d two f/tp"),
        c,
        tp="tp",
    ),
    wrong=lambda x, a, c: nn.gated_mlp(x, a.reshape(a.shape[0], 2, -1), c, tp="tp"),
)
mistake(
    "nn.qkv_linear",
    "all queries come first in the fused weight, so that tp divides them from their keys",
    "b s d, d j/tp k -> b s g/tp k",
    j=12,
    right=lambda x, w: nn.qkv_linear(
        x, spmd.split(by_group(all_gather(w, "d j/tp k -> d j k")), "d g three k -> d g/tp three k"), tp="tp"
    )[1],
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
