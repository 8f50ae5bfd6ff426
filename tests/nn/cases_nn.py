"""The layers of `spmd.nn` but attention: linear layers, norms, embeddings, the loss, dropout."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import nn
from tests.layers import LayerCase, cases, fit, placements, total

# -------------------- norms


def plain_rms(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


@cases("rms_norm", draw=3)
def _():
    """dp divides tokens, sp the sequence, tp the features: the gradient of the scale is complete."""
    for mesh, axes in placements("dp", "sp", "tp"):
        yield LayerCase(
            name="rms_norm",
            fn=lambda axes: lambda x, scale: nn.rms_norm(x, scale, tp=axes["tp"]),
            ins=("b/dp s/sp d/tp", "d/tp"),
            outs="b/dp s/sp d/tp",
            shapes=fit(mesh, axes, b=(3, "dp"), s=(5, "sp"), d=(7, "tp")),
            mesh=mesh,
            axes=axes,
            reference=plain_rms,
            forward=lambda c: c.traffic("psum", "tp", "b/dp s/sp 1", dtype="float32"),
            backward=lambda c: total(
                c.traffic("psum", "tp", "b/dp s/sp 1", dtype="float32"), c.traffic("psum", ("dp", "sp"), "d/tp")
            ),
        )


@cases("layer_norm", draw=2)
def _():
    for mesh, axes in placements("dp", "sp", "tp"):
        yield LayerCase(
            name="layer_norm",
            fn=lambda axes: lambda x, scale, bias: nn.layer_norm(x + 30, scale, bias, tp=axes["tp"]),
            ins=("b/dp s/sp d/tp", "d/tp", "d/tp"),
            outs="b/dp s/sp d/tp",
            shapes=fit(mesh, axes, b=(3, "dp"), s=(5, "sp"), d=(7, "tp")),
            mesh=mesh,
            axes=axes,
            reference=plain_layer_norm,
            forward=lambda c: c.traffic("psum", "tp", "b/dp s/sp 1", 2, dtype="float32"),
            backward=lambda c: total(
                c.traffic("psum", "tp", "b/dp s/sp 1", 2, dtype="float32"),
                c.traffic("psum", ("dp", "sp"), "d/tp", 2),
            ),
            dtypes=("float32",),  # of numbers around 30, bfloat16 keeps three digits
            tolerance=1e-4,
        )


def plain_layer_norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None] + bias[None, None]


# -------------------- linear layers

STREAM = "b/dp s/cp/sp d"  # the residual stream: tokens divided by dp, and the sequence by cp and sp
WHOLE = "b/dp s/cp d"
TOKENS = ("dp", "cp")  # what divides tokens within a block


def linear_cases(name, body, ins, outs, reference, forward, backward, **more):
    """Every placement; the sequence divided over tp too, or not."""
    for mesh, axes in placements("dp", "cp", "tp", shared=[("sp", "tp")]):
        yield LayerCase(
            name=name,
            fn=lambda axes: lambda *args: body(*args, tp=axes["tp"], sp=axes["sp"], cp=axes["cp"]),
            ins=ins,
            outs=outs,
            shapes=fit(
                mesh,
                axes,
                b=(3, "dp"),
                s=(1, "cp", "tp"),
                d=(5,),
                f=(7, "tp"),
                v=(11, "tp"),
                g=(1, "tp"),
                h=(2, "tp"),
                k=(3,),
                r=(3,),
                j=(5,),
            ),
            mesh=mesh,
            axes=axes,
            reference=reference,
            forward=forward,
            backward=backward,
            label="sp" if axes["sp"] else "whole" if axes["tp"] else "plain",
            **more,
        )


def gathered(case):
    """Into a block: the sequence gathered."""
    return case.traffic("all_gather", "sp", WHOLE)


def scattered(case):
    """Out of a block: partial sums scattered onto the sequence, or summed."""
    return case.traffic("psum_scatter", "sp", WHOLE) if case.axes["sp"] else case.traffic("psum", "tp", WHOLE)


def summed(*weights, out_bias=()):
    """The gradients of weights, each equal where tokens differ; of a bias at the end, also where sp divides them."""
    return lambda case: total(
        *(case.traffic("psum", TOKENS, w) for w in weights),
        *(case.traffic("psum", (*TOKENS, "sp"), b) for b in out_bias),
    )


@cases("column_linear", draw=3)
def _():
    """Heads as two output dimensions, a bias, and a second weight that shares the gather."""

    def body(x, w, b, v, **axes):
        y, z = nn.column_linear(x, (w, v), (b, None), **axes)
        return y, z

    return linear_cases(
        "column_linear",
        body,
        (STREAM, "d h/tp k", "h/tp k", "d f/tp"),
        ("b/dp s/cp h/tp k", "b/dp s/cp f/tp"),
        lambda x, w, b, v: (jnp.tensordot(x, w, 1) + b[None, None], x @ v),
        gathered,
        lambda c: total(scattered(c), summed("d h/tp k", "h/tp k", "d f/tp")(c)),
    )


@cases("row_linear", draw=2)
def _():
    return linear_cases(
        "row_linear",
        nn.row_linear,
        ("b/dp s/cp h/tp k", "h/tp k d", "d"),
        STREAM,
        lambda x, w, b: jnp.einsum("bshk,hkd->bsd", x, w) + b[None, None],
        scattered,
        lambda c: total(gathered(c), summed("h/tp k d", out_bias=["d"])(c)),
    )


@cases("qkv_linear", draw=2)
def _():
    def reference(x, w, b):
        y = jnp.einsum("bsd,dgjk->bsgjk", x, w) + b[None, None]
        q = y[..., :3, :]
        return q.reshape(*q.shape[:2], -1, q.shape[-1]), y[..., 3, :], y[..., 4, :]

    return linear_cases(
        "qkv_linear",
        nn.qkv_linear,
        (STREAM, "d g/tp j k", "g/tp j k"),
        ("b/dp s/cp (g r)/tp k", "b/dp s/cp g/tp k", "b/dp s/cp g/tp k"),
        reference,
        gathered,
        lambda c: total(scattered(c), summed("d g/tp j k", "g/tp j k")(c)),
    )


@cases("mlp", draw=2)
def _():
    return linear_cases(
        "mlp",
        nn.mlp,
        (STREAM, "d f/tp", "f/tp d", "f/tp", "d"),
        STREAM,
        lambda x, v, w, a, b: jax.nn.gelu(x @ v + a[None, None]) @ w + b[None, None],
        lambda c: total(gathered(c), scattered(c)),
        lambda c: total(gathered(c), scattered(c), summed("d f/tp", "f/tp", "f/tp d", out_bias=["d"])(c)),
    )


def plain_gated(x, gate, up, down):
    opened = x @ gate
    return (opened / (1 + jnp.exp(-opened)) * (x @ up)) @ down


@cases("gated_mlp", draw=2)
def _():
    return linear_cases(
        "gated_mlp",
        lambda x, gate, up, down, **axes: nn.gated_mlp(x, (gate, up), down, **axes),
        (STREAM, "d f/tp", "d f/tp", "f/tp d"),
        STREAM,
        plain_gated,
        lambda c: total(gathered(c), scattered(c)),
        lambda c: total(gathered(c), scattered(c), summed("d f/tp", "d f/tp", "f/tp d")(c)),
    )


@cases("gated_mlp fused", draw=2)
def _():
    def reference(x, w, down, b, c):
        gate, up = x @ w[:, 0] + b[None, None, 0], x @ w[:, 1] + b[None, None, 1]
        return (jnp.tanh(gate) * up) @ down + c[None, None]

    return linear_cases(
        "gated_mlp fused",
        functools.partial(nn.gated_mlp, activation=jnp.tanh),
        (STREAM, "d 2 f/tp", "f/tp d", "2 f/tp", "d"),
        STREAM,
        reference,
        lambda c: total(gathered(c), scattered(c)),
        lambda c: total(gathered(c), scattered(c), summed("d 2 f/tp", "2 f/tp", "f/tp d", out_bias=["d"])(c)),
    )


# -------------------- embeddings


def numbers_below(size):
    """Integers for the arguments that `size` names by position, below it; normal numbers for the rest."""

    def make(rng, shapes):
        return [
            rng.integers(size[i](shapes), size=shape, dtype=np.int32)
            if i in size
            else rng.normal(size=shape).astype("f4")
            for i, shape in enumerate(shapes)
        ]

    return make


@cases("embedding", draw=2)
def _():
    return linear_cases(
        "embedding",
        nn.embedding,
        ("b/dp s/cp", "v/tp d"),
        STREAM,
        lambda ids, table: jnp.eye(table.shape[0])[ids] @ table,
        scattered,
        lambda c: total(gathered(c), summed("v/tp d")(c)),
        make=numbers_below({0: lambda shapes: shapes[1][0]}),
    )


@cases("embedding over features", draw=2)
def _():
    for case in linear_cases(
        "embedding over features",
        functools.partial(nn.embedding, over="features"),
        ("b/dp s/cp", "v f/tp"),
        "b/dp s/cp/sp f",
        lambda ids, table: jnp.eye(table.shape[0])[ids] @ table,
        lambda c: c.traffic("all_to_all", "sp", "b/dp s/cp/sp f"),
        lambda c: total(c.traffic("all_to_all", "sp", "b/dp s/cp/sp f"), summed("v f/tp")(c)),
        make=numbers_below({0: lambda shapes: shapes[1][0]}),
    ):
        yield case if case.axes["sp"] else replace(case, outs="b/dp s/cp f/tp")


@cases("unembedding", draw=2)
def _():
    """Tied: the table embeds the tokens whose scores are asked for, and its gradients add up."""

    def body(ids, table, **axes):
        return nn.unembedding(jnp.sin(nn.embedding(ids, table, **axes)), table, **axes)

    return linear_cases(
        "unembedding",
        body,
        ("b/dp s/cp", "v/tp d"),
        "b/dp s/cp v/tp",
        lambda ids, table: jnp.sin(jnp.eye(table.shape[0])[ids] @ table) @ table.T,
        lambda c: total(scattered(c), gathered(c)),
        lambda c: total(scattered(c), gathered(c), summed("v/tp d", "v/tp d")(c)),
        make=numbers_below({0: lambda shapes: shapes[1][0]}),
        out_dtype="float32",
    )


# -------------------- losses


def plain_cross_entropy(logits, labels, weights, smoothing=0.0, z=0.0):
    """Summed over tokens by hand, from probabilities."""
    weights = weights.astype(logits.dtype)
    top = logits.max(-1, keepdims=True)
    lse = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    logp = logits - lse[..., None]
    one = jnp.eye(logits.shape[-1])[jnp.clip(labels, 0, logits.shape[-1] - 1)]
    target = (1 - smoothing) * one + smoothing / logits.shape[-1]
    losses = -(target * logp).sum(-1) + z * lse**2
    return (losses * weights).sum() / weights.sum()


def with_labels(tokens, ignore=None):
    """Labels below the vocabulary of argument 0 or 1, some of them ignored, and a mask that leaves some rows nothing."""

    def make(rng, shapes):
        *floats, labels, mask = shapes
        numbers = rng.integers(shapes[tokens][-1] if tokens == 0 else shapes[1][0], size=labels, dtype=np.int32)
        counts = rng.random(mask) < np.linspace(0, 1, mask[0])[:, None]
        counts[-1, 0] = True
        if ignore is not None:
            numbers = np.where(rng.random(labels) < 0.2, ignore, numbers).astype(np.int32)
            numbers[-1, 0] = 3
        return [*(3 * rng.normal(size=shape).astype("f4") for shape in floats), numbers, counts]

    return make


def over_vocabulary(case, chunks=1):
    """The maximum, the sum of exponentials and the label's score of each token; at the end loss and count."""
    tokens = case.traffic("psum", "tp", "b/dp s/cp", 3, dtype="float32")
    return total(
        {key: (count * chunks, size) for key, (count, size) in tokens.items()},
        case.traffic("psum", TOKENS, "scalar", 2, dtype="float32"),
    )


@cases("cross_entropy", draw=2)
def _():
    for case in linear_cases(
        "cross_entropy",
        None,
        ("b/dp s/cp v/tp", "b/dp s/cp", "b/dp s/cp"),
        "scalar",
        lambda logits, labels, mask: plain_cross_entropy(logits, labels, mask & (labels != -100), 0.1, 1e-2),
        over_vocabulary,
        lambda c: {},
        make=with_labels(0, ignore=-100),
        out_dtype="float32",
    ):
        if case.axes["sp"] is None:
            yield replace(
                case,
                fn=lambda axes: lambda logits, labels, mask: nn.cross_entropy(
                    logits, labels, mask, label_smoothing=0.1, z_loss=1e-2, ignore=-100,
                    tp=axes["tp"], cp=axes["cp"], dp=axes["dp"],
                ),
            )  # fmt: skip


@cases("linear_cross_entropy", draw=3)
def _():
    """In three chunks: as many psums over tp, each of a third; all else once."""
    for case in linear_cases(
        "linear_cross_entropy",
        None,
        (STREAM, "v/tp d", "b/dp s/cp", "b/dp s/cp"),
        "scalar",
        lambda x, table, labels, mask: plain_cross_entropy(x @ table.T, labels, mask, 0.1, 1e-2),
        lambda c: total(gathered(c), over_vocabulary(c, chunks=3)),
        lambda c: total(scattered(c), summed("v/tp d")(c)),
        make=with_labels(1),
        out_dtype="float32",
    ):
        yield replace(
            case,
            shapes={**case.shapes, "s": 3 * case.shapes["s"]},
            fn=lambda axes: (
                lambda x, table, labels, mask: nn.linear_cross_entropy(
                    x, table, labels, mask, chunks=3, label_smoothing=0.1, z_loss=1e-2, **axes
                )
            ),
        )


# -------------------- dropout


@cases("dropout", draw=2)
def _():
    """The mask of the whole array, in a function of its own, which knows no sizes of the kernel."""

    def make(rng, shapes):
        return rng.normal(size=shapes[0]).astype("f4"), jax.random.key(5)

    for mesh, axes in placements("dp", "sp", "tp"):
        yield LayerCase(
            name="dropout",
            fn=lambda axes: spmd.scope(lambda x, key: nn.dropout(x, key, "b/dp s/sp d/tp", rate=0.25, **axes)),
            ins=("b/dp s/sp d/tp", "scalar"),
            outs="b/dp s/sp d/tp",
            shapes=fit(mesh, axes, b=(3, "dp"), s=(5, "sp"), d=(7, "tp")),
            mesh=mesh,
            axes=axes,
            reference=lambda x, key: jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0),
            forward=lambda c: {},
            backward=lambda c: {},
            make=make,
        )
