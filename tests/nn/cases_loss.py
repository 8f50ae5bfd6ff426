"""Cross entropies over a divided vocabulary."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from spmd import nn
from tests.layers import cases, total
from tests.nn.cases_linear import STREAM, TOKENS, gathered, linear_cases, scattered, summed


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


# --- what probabilities say of tokens: a vocabulary with rows of padding, scores that are bent


def plain_scores(logits, softcap, vocabulary):
    scores = softcap * jnp.tanh(logits / softcap)
    return scores[..., :vocabulary]


def plain_logp(logits, softcap, vocabulary):
    scores = plain_scores(logits, softcap, vocabulary)
    scores = scores - scores.max(-1, keepdims=True)
    return scores - jnp.log(jnp.exp(scores).sum(-1, keepdims=True))


def padded(case):
    """Three tokens fewer than scores, of which there are at least eight."""
    return case.shapes["v"] - 3


def per_token(psums):
    return lambda case: case.traffic("psum", "tp", "b/dp s/cp", psums, dtype="float32")


def _on_tokens(name, ins, psums, call, plain, make=None):
    """Cases of a function of scores that gives a number for each token."""
    for case in linear_cases(
        name,
        None,
        ins,
        "b/dp s/cp",
        lambda *given: None,
        per_token(psums),
        lambda c: {},
        make=make,
        out_dtype="float32",
    ):
        if case.axes["sp"] is None:
            count = padded(case)
            yield replace(
                case,
                fn=lambda axes, count=count: lambda *given: call(*given, softcap=2.5, vocabulary=count, tp=axes["tp"]),
                reference=lambda *given, count=count: plain(*given, 2.5, count),
            )


def labels_of_some(rng, shapes):
    """Labels below the first of all tokens: padding has none."""
    floats, labels = shapes
    below = max(floats[-1] - 3, 1)
    return [3 * rng.normal(size=floats).astype("f4"), rng.integers(below, size=labels, dtype=np.int32)]


@cases("token_logprobs", draw=2)
def _():
    def plain(logits, labels, softcap, count):
        return jnp.take_along_axis(plain_logp(logits, softcap, count), labels[..., None], -1)[..., 0]

    yield from _on_tokens(
        "token_logprobs", ("b/dp s/cp v/tp", "b/dp s/cp"), 3, nn.token_logprobs, plain, make=labels_of_some
    )


@cases("entropy", draw=2)
def _():
    def plain(logits, softcap, count):
        logp = plain_logp(logits, softcap, count)
        return -(jnp.exp(logp) * logp).sum(-1)

    yield from _on_tokens("entropy", ("b/dp s/cp v/tp",), 3, nn.entropy, plain)


@cases("kl_divergence", draw=2)
def _():
    def plain(logits, other, softcap, count):
        one, two = plain_logp(logits, softcap, count), plain_logp(other, softcap, count)
        return (jnp.exp(one) * (one - two)).sum(-1)

    yield from _on_tokens("kl_divergence", ("b/dp s/cp v/tp", "b/dp s/cp v/tp"), 5, nn.kl_divergence, plain)
