"""Embeddings, the last layer, losses and their labels."""

import jax
import jax.numpy as jnp

import spmd
from spmd import nn
from tests.checker.twins.layers import mistake

LOSS = "b/dp s v/tp, b/dp s -> scalar"
CP = {"dp": 2, "cp": 2, "tp": 2}

mistake(
    "nn.embedding",
    'over="features" where tp divides the vocabulary',
    "b s, v/tp d -> b s d/tp",
    right=lambda ids, table: spmd.split(nn.embedding(ids, table, tp="tp"), "b s d -> b s d/tp"),
    wrong=lambda ids, table: nn.embedding(ids, table, over="features", tp="tp")[..., : table.shape[1] // 2],
)
mistake(
    "nn.embedding",
    "over= is forgotten where tp divides the features",
    "b s, v d/tp -> b s d/tp",
    right=lambda ids, table: nn.embedding(ids, table, over="features", tp="tp"),
    wrong=lambda ids, table: nn.embedding(ids, table, tp="tp"),
)
mistake(
    "nn.embedding",
    "the ids are divided over the axis of the vocabulary",
    "b s/tp, v/tp d -> b s/tp d",
    right=lambda ids, table: nn.embedding(spmd.all_gather(ids, "b s/tp -> b s"), table, tp="tp", sp="tp"),
    wrong=lambda ids, table: nn.embedding(ids, table, tp="tp"),
)
mistake(
    "nn.embedding",
    "learned positions are looked up by each device's own count",
    "b s/cp d, s d -> b s/cp d",
    mesh={"cp": 2, "dp": 2},
    right=lambda x, table: x + nn.embedding(spmd.iota("s/cp"), table)[None],
    wrong=lambda x, table: x + nn.embedding(jnp.arange(x.shape[1]), table)[None],
)
mistake(
    "nn.unembedding",
    "sp= is forgotten where the stream is divided over the sequence, and the labels too",
    "b/dp s/tp d, v/tp d, b/dp s/tp -> scalar",
    right=lambda x, table, labels: nn.cross_entropy(
        nn.unembedding(x, table, tp="tp", sp="tp"), spmd.all_gather(labels, "b/dp s/tp -> b/dp s"), tp="tp", dp="dp"
    ),
    wrong=lambda x, table, labels: nn.cross_entropy(nn.unembedding(x, table, tp="tp"), labels, tp="tp", dp="dp"),
)
mistake(
    "nn.cross_entropy",
    "tp= is forgotten where tp divides the vocabulary",
    LOSS,
    right=lambda logits, labels: nn.cross_entropy(logits, labels, tp="tp", dp="dp"),
    wrong=lambda logits, labels: nn.cross_entropy(logits, labels % logits.shape[-1], dp="dp"),
)
mistake(
    "nn.cross_entropy",
    "each device divides its own sum by its own count, and the means are averaged",
    "b/dp s v/tp, b/dp s, b/dp s -> scalar",
    right=lambda logits, labels, mask: nn.cross_entropy(logits, labels, mask, tp="tp", dp="dp"),
    wrong=lambda logits, labels, mask: spmd.reduce(
        jnp.sum(nn.cross_entropy(logits, labels, mask, reduction="none", tp="tp"))[None] / jnp.sum(mask),
        "n/dp -> scalar",
        "mean",
    ),
)
mistake(
    "nn.cross_entropy",
    "the sum of each device's means is returned, n times the loss",
    LOSS,
    right=lambda logits, labels: nn.cross_entropy(logits, labels, tp="tp", dp="dp"),
    wrong=lambda logits, labels: spmd.psum(
        jnp.mean(nn.cross_entropy(logits, labels, reduction="none", tp="tp")), "{U:dp} -> scalar"
    ),
)
mistake(
    "nn.cross_entropy",
    "labels are the tokens, rolled by one on each device of cp",
    "b/dp s/cp v/tp, b/dp s/cp -> scalar",
    mesh=CP,
    right=lambda logits, labels: nn.cross_entropy(
        logits, spmd.roll(labels, "b/dp [s/cp]", -1), tp="tp", dp="dp", cp="cp"
    ),
    wrong=lambda logits, labels: nn.cross_entropy(logits, jnp.roll(labels, -1, axis=1), tp="tp", dp="dp", cp="cp"),
)
mistake(
    "nn.cross_entropy",
    "logits[:, :-1] and tokens[:, 1:] are taken on each device of cp",
    "b/dp s/cp v/tp, b/dp s/cp -> scalar",
    mesh=CP,
    right=lambda logits, labels: nn.cross_entropy(
        logits,
        spmd.roll(labels, "b/dp [s/cp]", -1),
        (labels >= 0) & (spmd.iota("s/cp") < spmd.size("s") - 1)[None],
        tp="tp",
        dp="dp",
        cp="cp",
    ),
    wrong=lambda logits, labels: nn.cross_entropy(logits[:, :-1], labels[:, 1:], tp="tp", dp="dp", cp="cp"),
)
mistake(
    "nn.cross_entropy",
    "the last token is masked on each device of cp",
    "b/dp s/cp v/tp, b/dp s/cp -> scalar",
    mesh=CP,
    right=lambda logits, labels: nn.cross_entropy(
        logits,
        labels,
        (labels >= 0) & (spmd.iota("s/cp") < spmd.size("s") - 1)[None],
        tp="tp",
        dp="dp",
        cp="cp",
    ),
    wrong=lambda logits, labels: nn.cross_entropy(
        logits,
        labels,
        (labels >= 0) & (jnp.arange(labels.shape[1]) < labels.shape[1] - 1)[None],
        tp="tp",
        dp="dp",
        cp="cp",
    ),
)
mistake(
    "nn.cross_entropy",
    "the labels count from the start of each device's vocabulary",
    LOSS,
    right=lambda logits, labels: nn.cross_entropy(logits, labels, tp="tp", dp="dp"),
    wrong=lambda logits, labels: nn.cross_entropy(
        logits, jnp.maximum(labels - spmd.offset("v/tp"), 0), tp="tp", dp="dp"
    ),
)
mistake(
    "nn.linear_cross_entropy",
    "sp= is forgotten where the stream is divided over the sequence, and the labels too",
    "b/dp s/tp d, v/tp d, b/dp s/tp -> scalar",
    right=lambda x, table, labels: nn.linear_cross_entropy(
        x, table, spmd.all_gather(labels, "b/dp s/tp -> b/dp s"), chunks=2, tp="tp", sp="tp", dp="dp"
    ),
    wrong=lambda x, table, labels: nn.linear_cross_entropy(x, table, labels, chunks=2, tp="tp", dp="dp"),
)
mistake(
    "nn.linear_cross_entropy",
    "the gradient of a loss that each device divides by its own number of rows",
    "b/dp s d, v/tp d, b/dp s -> v/tp d",
    right=lambda x, table, labels: spmd.grad(
        lambda table: nn.linear_cross_entropy(x, table, labels, chunks=1, tp="tp", dp="dp")
    )(table),
    wrong=lambda x, table, labels: spmd.grad(
        lambda table: (
            nn.linear_cross_entropy(x, table, labels, chunks=1, reduction="sum", tp="tp", dp="dp") / labels.size
        )
    )(table),
)
mistake(
    "jax.grad",
    "a plain gradient of a loss that is complete on each device",
    "b/dp s d, v/tp d, b/dp s -> v/tp d",
    right=lambda x, table, labels: spmd.grad(
        lambda table: nn.linear_cross_entropy(x, table, labels, chunks=1, tp="tp", dp="dp")
    )(table),
    wrong=lambda x, table, labels: jax.grad(
        lambda table: jnp.mean(nn.linear_cross_entropy(x, table, labels, chunks=1, reduction="none", tp="tp"))
    )(table),
)
