"""Cross-entropy over a divided vocabulary: no device ever holds all scores of a token."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd import all_to_all, custom_vjp, defer, einsum, iota, rearrange, reduce, scope, size, take
from spmd._trees.arguments import explained
from spmd._trees.leaves import not_int
from spmd.errors import LayoutError, SizeError, check_one_of
from spmd.nn.linear import entered
from spmd.nn.norm import Axes, wide, wide_einsum, with_rank

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


@explained
@scope(mapping=None)
def cross_entropy(
    logits: Any,
    labels: Any,
    mask: Any = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocabulary: int | None = None,
    ignore: int | None = None,
    reduction: Reduction = "mean",
    tp: Axes = None,
    cp: Axes = None,
    dp: Axes = None,
) -> jax.Array:
    """Cross-entropy of labels under scores with a divided vocabulary, computed in at least float32.

    With probabilities p = softmax(logits) and smoothing e, the loss of a token is the cross-entropy of p under the
    mixture of (1 - e) times the label's unit vector and e times the uniform distribution, plus `z_loss` times the
    squared logsumexp. The mean is over all tokens that count, on all devices. It is a global sum divided by a global
    count, so it is right if devices hold different numbers of these tokens (a mean of the devices' means is not).

    A score of -inf takes its token out of the vocabulary: a banned token, or padding. As in optax, the loss is infinite
    if the label is out, or if smoothing gives a share to what is out; if all are out, it is NaN. A token that does not
    count has no loss and no gradient, whatever its scores are.

    Layouts: logits `"... s/cp v/tp"`, labels and mask `"... s/cp"`, whole over tp; `...` divided over dp. The result is
    a scalar, complete on every axis; with `reduction="none"` it is `"... s/cp"`. Gathered scores are not divided over
    tp, so they are an error. For these use `tp=None`.

    Communication, for T tokens per device on n devices of tp: forward, three psums over tp of one float32 per token
    (the maximum, the sum of exponentials, the label's score), 24T(n-1)/n bytes. A sum or mean adds a psum of one number
    over dp and cp, and with a mask a second one. Backward nothing, except if labels are a gathered copy: then a psum of
    one number per token.

    Memory: the logits and one number per token are kept for the backward pass, which makes one array of their size.
    Reverse mode only.

    Args:
      logits: Scores, before softmax.
      labels: Integers. A label outside the vocabulary makes the loss NaN, if it counts.
      mask: Which tokens count: booleans, or weights.
      label_smoothing: The share e, from 0 to 1.
      z_loss: The weight of the squared logsumexp, which keeps scores from drifting.
      softcap: The bound c that `c * tanh(score / c)` keeps scores within. One of -inf stays so.
      vocabulary: How many tokens there are, where the table has more rows so that its size divides: the scores behind
        them are as -inf, and smoothing gives them nothing.
      ignore: A label that does not count, such as -100.
      reduction: "mean" (0 if no token counts), "sum", or "none", which gives each token's loss, 0 if it does not count.
      tp: The mesh axes that divide the vocabulary.
      cp: The mesh axes that divide the sequence.
      dp: The mesh axes that divide the dimensions of `...`, together.

    Returns:
      The loss, at least float32.

    Raises:
      LayoutError: If `reduction` is something else, labels are not integers, smoothing is not from 0 to 1, or softcap
        is not above 0.
      SizeError: If labels or mask do not have the shape of the tokens, or the vocabulary is larger than the scores are.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=2)
      >>> @spmd.kernel("b/dp s v/tp, b/dp s -> scalar", mesh=mesh)
      ... def loss(logits, labels):
      ...     return spmd.nn.cross_entropy(logits, labels, tp="tp", dp="dp")
      >>> print(loss(jnp.zeros((2, 3, 8)), jnp.zeros((2, 3), int)))  # log 8
      2.0794415

    References:
      Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053; Szegedy et al., https://arxiv.org/abs/1512.00567
      (smoothing); Chowdhery et al., "PaLM", https://arxiv.org/abs/2204.02311 (z-loss); Gemma team, "Gemma 2",
      https://arxiv.org/abs/2408.00118 (softcap).
    """
    scoring = _Scoring.of("cross_entropy", tp, softcap, vocabulary, label_smoothing, z_loss)
    labels = _checked("cross_entropy", logits, labels, mask, reduction)
    losses = _token_losses(logits, labels, scoring)
    return _reduced(losses, _weights(labels, mask, ignore, losses.dtype), reduction, dp, cp)


@scope(mapping=None)
def linear_cross_entropy(
    x: Any,
    table: Any,
    labels: Any,
    mask: Any = None,
    *,
    chunks: int = 8,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocabulary: int | None = None,
    ignore: int | None = None,
    reduction: Reduction = "mean",
    tp: Axes = None,
    sp: Axes = None,
    cp: Axes = None,
    dp: Axes = None,
) -> jax.Array:
    """The last linear layer and `cross_entropy` in one, in chunks of the sequence: all scores never exist at once.

    Each chunk of the sequence computes its scores and losses, and drops the scores. The backward pass computes them
    again, chunk by chunk. (With a vocabulary of 128k the scores in float32 are 0.5 MB per token, often the largest
    array of a model.) The table's gradient is summed over devices once, after the last chunk.

    Layouts: x `"... s/cp/sp d"`, table `"v/tp d"` as for `embedding`, labels and mask `"... s/cp"`, whole over tp;
    `...` divided over dp. The result is that of `cross_entropy`.

    Communication: that of `unembedding`, forward and backward, and that of `cross_entropy`, which the backward pass
    does not repeat. If the table is equal by JAX's own type on axes that divide tokens, one psum of its gradient.

    Memory: the gathered x, a copy of x cut into chunks, and one number per token are kept. While it runs, it also needs
    the scores of one chunk and, backward, their gradients: 8TV/cn bytes for T tokens per device, a vocabulary of V and
    c chunks. Reverse mode only.

    Args:
      x: The residual stream after the last norm.
      table: One row per token of the vocabulary.
      labels: Integers. A label outside the vocabulary makes the loss NaN, if it counts.
      mask: Which tokens count: booleans, or weights.
      chunks: The number of parts of a device's sequence; it divides the local size of `s`. 1 computes all scores at
        once.
      label_smoothing: As in `cross_entropy`.
      z_loss: As in `cross_entropy`.
      softcap: As in `cross_entropy`.
      vocabulary: As in `cross_entropy`.
      ignore: As in `cross_entropy`.
      reduction: As in `cross_entropy`.
      tp: The mesh axes that divide the vocabulary.
      sp: The mesh axes that divide the sequence of x until here; the same as tp, or None.
      cp: Mesh axes that divide the sequence of x, labels and mask.
      dp: The mesh axes that divide the dimensions of `...`, together.

    Returns:
      The loss, at least float32.

    Raises:
      LayoutError: As in `cross_entropy`, or if chunks is not an int of at least 1.
      SizeError: As in `cross_entropy`.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=2)
      >>> @spmd.kernel("b/dp s/tp d, v/tp d, b/dp s -> scalar", mesh=mesh)
      ... def loss(x, table, labels):
      ...     return spmd.nn.linear_cross_entropy(x, table, labels, chunks=2, tp="tp", sp="tp", dp="dp")
      >>> print(loss(jnp.ones((2, 6, 5)), jnp.zeros((8, 5)), jnp.zeros((2, 6), int)))  # log 8
      2.0794415

    References:
      Those of `cross_entropy`; for the cost of the scores Wijmans et al., "Cut Your Losses",
      https://arxiv.org/abs/2411.09009.
    """
    if fault := not_int("chunks, the number of parts,", chunks, 1):
        raise LayoutError(fault, call="linear_cross_entropy(x, table, labels)")
    scoring = _Scoring.of("linear_cross_entropy", tp, softcap, vocabulary, label_smoothing, z_loss)
    x = entered(x, tp=tp, sp=sp, cp=cp)
    labels = _checked("linear_cross_entropy", x, labels, mask, reduction)
    # Made varying before the loop, so that its gradient is added up over chunks first, and over devices once.
    table = defer(table, "v/tp d -> v/tp d {R:dp,cp}", tp=tp, dp=dp, cp=cp)

    def chunk(_: None, part: Any) -> Any:
        x, labels = part
        logits = wide_einsum(x, table.astype(x.dtype), "... d, v/tp d -> ... v/tp", tp=tp)
        return None, _token_losses(logits, labels, scoring)

    if chunks == 1:
        losses = chunk(None, (x, labels))[1]
    else:
        # Every c-th token is in the same chunk, so that each chunk is divided over cp as the whole is.
        parts = (
            rearrange(x, "... (s c)/cp d -> c ... s/cp d", c=chunks, cp=cp),
            rearrange(labels, "... (s c)/cp -> c ... s/cp", c=chunks, cp=cp),
        )
        kept = jax.checkpoint_policies.save_only_these_names("logsumexp")
        _, losses = jax.lax.scan(jax.checkpoint(chunk, policy=kept), None, parts)
        losses = rearrange(losses, "c ... s/cp -> ... (s c)/cp", cp=cp)
    return _reduced(losses, _weights(labels, mask, ignore, losses.dtype), reduction, dp, cp)


# --- what probabilities say of tokens -------------------------------------------------------------------------------


@scope(mapping=None)
def token_logprobs(
    logits: Any, labels: Any, *, softcap: float | None = None, vocabulary: int | None = None, tp: Axes = None
) -> jax.Array:
    """The log-probability of given tokens under scores with a divided vocabulary, as policy gradients need it.

    It is `cross_entropy` of each token with its sign changed: -inf for a token whose score is -inf.

    Layouts: logits `"... v/tp"`, labels `"..."`, whole over tp; the result `"..."`.

    Communication: forward, three psums over tp of one float32 per token, 24T(n-1)/n bytes for T tokens per device on n
    devices. Backward nothing. Reverse mode only.

    Args:
      logits: Scores, before softmax.
      labels: Integers. One outside the vocabulary gives NaN.
      softcap: As in `cross_entropy`.
      vocabulary: As in `cross_entropy`.
      tp: The mesh axes that divide the vocabulary.

    Returns:
      The log-probabilities, at least float32.

    Raises:
      LayoutError: As in `cross_entropy`.
      SizeError: As in `cross_entropy`.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b v/tp, b -> b", mesh=mesh)
      ... def logprobs(logits, actions):
      ...     return spmd.nn.token_logprobs(logits, actions, tp="tp")
      >>> print(logprobs(jnp.zeros((2, 8)), jnp.zeros(2, int)))  # -log 8
      [-2.0794415 -2.0794415]

    References:
      Schulman et al., "Proximal policy optimization", https://arxiv.org/abs/1707.06347
    """
    scoring = _Scoring.of("token_logprobs", tp, softcap, vocabulary)
    return -_token_losses(logits, _checked("token_logprobs", logits, labels, None, "none"), scoring)


@scope(mapping=None)
def entropy(logits: Any, *, softcap: float | None = None, vocabulary: int | None = None, tp: Axes = None) -> jax.Array:
    """The entropy, in nats, of the probabilities that scores with a divided vocabulary stand for.

    A score of -inf is a probability of 0 and adds nothing, forward and backward.

    Layouts: logits `"... v/tp"`, the result `"..."`.

    Communication: forward, three psums over tp of one float32 per token, 24T(n-1)/n bytes for T tokens per device on n
    devices. Backward nothing. Reverse mode only.

    Args:
      logits: Scores, before softmax.
      softcap: As in `cross_entropy`.
      vocabulary: As in `cross_entropy`.
      tp: The mesh axes that divide the vocabulary.

    Returns:
      The entropy of each token's distribution, at least float32.

    Raises:
      LayoutError: As in `cross_entropy`.
      SizeError: As in `cross_entropy`.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b v/tp -> b", mesh=mesh)
      ... def spread(logits):
      ...     return spmd.nn.entropy(logits, tp="tp")
      >>> print(spread(jnp.zeros((1, 8))))  # log 8
      [2.0794415]

    References:
      Williams and Peng, "Function optimization using connectionist reinforcement learning algorithms", 1991.
    """
    return _entropies(logits, _Scoring.of("entropy", tp, softcap, vocabulary).of_size(logits))


@scope(mapping=None)
def kl_divergence(
    logits: Any, other: Any, *, softcap: float | None = None, vocabulary: int | None = None, tp: Axes = None
) -> jax.Array:
    """KL(p || q), in nats, of the probabilities p and q of two arrays of scores with a divided vocabulary.

    What p excludes, by a score of -inf, adds nothing. What q alone excludes makes it infinite. Both have gradients: a
    reference policy has `jax.lax.stop_gradient` around it.

    Layouts: logits and other `"... v/tp"`, the result `"..."`.

    Communication: forward, five psums over tp of one float32 per token, 40T(n-1)/n bytes for T tokens per device on n
    devices. Backward nothing. Reverse mode only.

    Args:
      logits: The scores of p, before softmax.
      other: The scores of q.
      softcap: As in `cross_entropy`, for both.
      vocabulary: As in `cross_entropy`, for both.
      tp: The mesh axes that divide the vocabulary.

    Returns:
      The divergence of each token's distributions, at least float32.

    Raises:
      LayoutError: As in `cross_entropy`.
      SizeError: If both have not the same shape, or as in `cross_entropy`.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b v/tp, b v/tp -> b", mesh=mesh)
      ... def apart(p, q):
      ...     return spmd.nn.kl_divergence(p, q, tp="tp")
      >>> print(apart(jnp.zeros((1, 4)), jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]]))))
      [0.1217773]

    References:
      Ziegler et al., "Fine-tuning language models from human preferences", https://arxiv.org/abs/1909.08593
    """
    if jnp.shape(logits) != jnp.shape(other):
        got = [f"logits: shape {jnp.shape(logits)}", f"other: shape {jnp.shape(other)}"]
        raise SizeError("both have a score for each token of one vocabulary.", call="kl_divergence(...)", got=got)
    scoring = _Scoring.of("kl_divergence", tp, softcap, vocabulary).of_size(logits)
    return _divergences(logits, other, scoring)


class _Scoring(NamedTuple):
    """How scores are read, and what is asked of them.

    Attributes:
      tp: The mesh axes that divide the vocabulary.
      softcap: The bound of scores, if there is one.
      vocabulary: How many tokens there are, if the scores have more.
      smoothing: The share of the uniform distribution.
      z_loss: The weight of the squared logsumexp.
      name: The function that the user called.
    """

    tp: Axes
    softcap: float | None
    vocabulary: int | None
    smoothing: float
    z_loss: float
    name: str

    @classmethod
    def of(
        cls,
        name: str,
        tp: Axes,
        softcap: float | None,
        vocabulary: int | None,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> _Scoring:
        if not 0 <= smoothing <= 1:
            raise LayoutError(f"label_smoothing is from 0 to 1, not {smoothing!r}.", call=f"{name}(...)")
        if softcap is not None and not softcap > 0:
            raise LayoutError(f"softcap is a number above 0, or None, not {softcap!r}.", call=f"{name}(...)")
        if vocabulary is not None and (fault := not_int("vocabulary, the number of tokens,", vocabulary, 1)):
            raise LayoutError(fault, call=f"{name}(...)")
        return cls(tp, softcap, vocabulary, smoothing, z_loss, name)

    def of_size(self, logits: Any) -> _Scoring:
        """The same with the number of tokens, after the scores are checked."""
        most = size(logits, "... [v/tp]", tp=self.tp)
        if self.vocabulary is not None and self.vocabulary > most:
            rule = f"the vocabulary has {self.vocabulary:,} tokens, and there are scores for {most:,}."
            raise SizeError(rule, call=f"{self.name}(...)")
        return self._replace(vocabulary=self.vocabulary or most)

    def numbers(self, scores: Any) -> Any:
        """The number of the token that each score of this device is for."""
        most = size(scores, "... [v/tp]", tp=self.tp)
        return with_rank(iota("v/tp", jnp.int32, v=most, tp=self.tp), scores.ndim)

    def scores(self, logits: Any) -> tuple[Any, Any]:
        """The scores that count, and what a slope of theirs is times as a slope of the logits; None for 1."""
        scores, slope = logits.astype(wide(logits)), None
        if self.softcap is not None:
            bent = jnp.tanh(scores / self.softcap)
            slope = 1 - bent**2
            scores = jnp.where(scores == -jnp.inf, scores, self.softcap * bent)
        if self.vocabulary is not None and self.vocabulary < size(logits, "... [v/tp]", tp=self.tp):
            scores = jnp.where(self.numbers(logits) < self.vocabulary, scores, -jnp.inf)
        return scores, slope


def _with_slope(slopes: Any, slope: Any, logits: Any, cotangent: Any) -> Any:
    """Slopes of scores as slopes of logits; 0 for a token that does not count."""
    slopes = slopes if slope is None else slopes * slope
    return jnp.where(cotangent[..., None] == 0, 0.0, slopes * cotangent[..., None]).astype(logits.dtype)


def _lse(scores: Any, scoring: _Scoring) -> Any:
    return reduce(scores, "... v/tp -> ...", "logsumexp", tp=scoring.tp)


def _expected(p: Any, x: Any, scoring: _Scoring) -> Any:
    """The mean of a number under probabilities; what has a probability of 0 adds nothing, were it infinite."""
    return reduce(jnp.where(p == 0, 0.0, x) * p, "... v/tp -> ...", tp=scoring.tp)


def _token_losses(logits: Any, labels: Any, scoring: _Scoring) -> Any:
    """The loss of each token. The backward pass uses the kept logsumexp and does not communicate."""
    scoring = scoring.of_size(logits)
    known = (labels >= 0) & (labels < scoring.vocabulary)
    # Outside of the custom rule: labels may be a gathered copy, and then JAX sums the copies' cotangents here.
    return jnp.where(known, _losses(logits, labels, scoring), jnp.nan)


def _loss(logits: Any, labels: Any, scoring: _Scoring) -> Any:
    return _loss_forward(logits, labels, scoring)[0]


def _loss_forward(logits: Any, labels: Any, scoring: _Scoring) -> Any:
    scores, _ = scoring.scores(logits)
    lse = checkpoint_name(_lse(scores, scoring), "logsumexp")
    expected = _expected(_target(logits, labels, scoring), scores, scoring)
    return lse - expected + (scoring.z_loss * lse**2 if scoring.z_loss else 0.0), (logits, labels, lse)


def _loss_backward(scoring: _Scoring, kept: Any, cotangent: Any) -> Any:
    logits, labels, lse = kept
    scores, slope = scoring.scores(logits)
    p = jnp.exp(scores - lse[..., None])
    p = p * (1 + 2 * scoring.z_loss * lse)[..., None] if scoring.z_loss else p
    return _with_slope(p - _target(logits, labels, scoring), slope, logits, cotangent), None


_losses = custom_vjp(_loss, nondiff_argnums=(2,))
_losses.defvjp(_loss_forward, _loss_backward)


def _target(logits: Any, labels: Any, scoring: _Scoring) -> Any:
    """The distribution that the labels stand for: this device's part of the vocabulary."""
    assert scoring.vocabulary is not None
    numbers, rest = scoring.numbers(logits), scoring.smoothing / scoring.vocabulary
    found = jnp.where(labels[..., None] == numbers, 1 - scoring.smoothing + rest, rest)
    return (jnp.where(numbers < scoring.vocabulary, found, 0.0) if rest else found).astype(wide(logits))


def _entropy(logits: Any, scoring: _Scoring) -> Any:
    return _entropy_forward(logits, scoring)[0]


def _entropy_forward(logits: Any, scoring: _Scoring) -> Any:
    scores, _ = scoring.scores(logits)
    lse = _lse(scores, scoring)
    logp = scores - lse[..., None]
    found = -_expected(jnp.exp(logp), logp, scoring)  # the scores' own mean would cancel most digits of lse
    return found, (logits, lse, found)


def _entropy_backward(scoring: _Scoring, kept: Any, cotangent: Any) -> Any:
    logits, lse, found = kept
    scores, slope = scoring.scores(logits)
    logp = scores - lse[..., None]
    p = jnp.exp(logp)
    return (_with_slope(jnp.where(p == 0, 0.0, -p * (logp + found[..., None])), slope, logits, cotangent),)


_entropies = custom_vjp(_entropy, nondiff_argnums=(1,))
_entropies.defvjp(_entropy_forward, _entropy_backward)


def _divergence(logits: Any, other: Any, scoring: _Scoring) -> Any:
    return _divergence_forward(logits, other, scoring)[0]


def _divergence_forward(logits: Any, other: Any, scoring: _Scoring) -> Any:
    (one, _), (two, _) = scoring.scores(logits), scoring.scores(other)
    lses = _lse(one, scoring), _lse(two, scoring)
    logp, logq = one - lses[0][..., None], two - lses[1][..., None]
    p = jnp.exp(logp)
    found = _expected(p, jnp.where(p == 0, 0.0, logp - logq), scoring)
    return found, (logits, other, lses, found)


def _divergence_backward(scoring: _Scoring, kept: Any, cotangent: Any) -> Any:
    logits, other, lses, found = kept
    (one, of_one), (two, of_two) = scoring.scores(logits), scoring.scores(other)
    logp, logq = one - lses[0][..., None], two - lses[1][..., None]
    p = jnp.exp(logp)
    slopes = jnp.where(p == 0, 0.0, p * (logp - logq - found[..., None]))
    return (
        _with_slope(slopes, of_one, logits, cotangent),
        _with_slope(jnp.exp(logq) - p, of_two, other, cotangent),
    )


_divergences = custom_vjp(_divergence, nondiff_argnums=(2,))
_divergences.defvjp(_divergence_forward, _divergence_backward)


# --- all tokens ---------------------------------------------------------------------------------------------


def _weights(labels: Any, mask: Any, ignore: int | None, dtype: Any) -> Any:
    """Return how much each token counts; None if all count the same."""
    if mask is None and ignore is None:
        return None
    # A mask may be equal on devices whose tokens differ. Its weights are those of the tokens, and differ as these do.
    counts = (labels == labels if ignore is None else labels != ignore).astype(dtype)
    return counts if mask is None else mask.astype(dtype) * counts


def _reduced(losses: Any, weights: Any, reduction: str, dp: Axes, cp: Axes) -> Any:
    if weights is not None:
        losses = jnp.where(weights == 0, 0.0, losses) * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return _over_all(losses, "sum", dp, cp)
    if weights is None:
        return _over_all(losses, "mean", dp, cp)
    count = _over_all(weights, "sum", dp, cp)
    return jnp.where(count == 0, 0.0, _over_all(losses, "sum", dp, cp) / jnp.where(count == 0, 1.0, count))


def _over_all(x: Any, op: Literal["sum", "mean"], dp: Axes, cp: Axes) -> Any:
    """The sum or mean over the tokens of all devices.

    dp may divide any of the leading dimensions, and nobody says which. A sum of all tokens does not depend on it: each
    device adds up its own.
    """
    last = x.shape[-1] if x.ndim > (cp is None) else 1  # one dimension is the sequence only if cp divides it
    total = reduce(x.reshape(-1, last).sum(0), "s/cp {U:dp} -> scalar", dp=dp, cp=cp)
    return total if op == "sum" else total / size(jnp.zeros(x.size), "[t/dp/cp]", dp=dp, cp=cp)


def _checked(name: str, scores: Any, labels: Any, mask: Any, reduction: str) -> Any:
    """The labels, wide enough for any vocabulary, after the arguments are checked."""
    call = f"{name}(...)"
    if isinstance(mask, str):
        rule = f"{name} takes no pattern: its third argument is a mask, an array with a number for each token."
        raise LayoutError(
            rule, call=call, advice='mesh axes are keywords: tp="tp" divides the vocabulary, dp="dp" the batch'
        )
    check_one_of("reduction", reduction, REDUCTIONS, call)
    if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
        got = [f"labels: {jnp.result_type(labels)}{list(jnp.shape(labels))}"]
        raise LayoutError("labels are integers, the numbers of tokens in the vocabulary.", call=call, got=got)
    tokens, marks = scores.shape[:-1], jnp.shape(labels if mask is None else mask)
    if not tokens == jnp.shape(labels) == marks:
        rule = "labels and a mask have one number for each token: if broadcast, a number would be counted once."
        got = [f"tokens: shape {tokens}", f"labels: shape {jnp.shape(labels)}", f"mask: shape {marks}"]
        fix = "jnp.broadcast_to(mask, labels.shape)" if tokens == jnp.shape(labels) else None
        raise SizeError(rule, call=call, got=got if mask is not None else got[:2], fix=fix)
    return labels.astype(jnp.int32)


# --- embeddings: rows of a table by index, and the same table as the last layer ---------------------------------------


Part = Literal["vocabulary", "features"]
PARTS = get_args(Part)


@scope(mapping=None)
def embedding(
    ids: Any, table: Any, *, over: Part = "vocabulary", tp: Axes = None, sp: Axes = None, cp: Axes = None
) -> jax.Array:
    """Look up the vectors of tokens in a table that is divided over its vocabulary or over its features.

    If the vocabulary is divided, each device looks up the rows that it has, with zeros for the others, and the sum is
    the result. If the features are divided, each device looks up its features of all tokens. With `sp` these are then
    exchanged for all features of its own tokens, which sends n times fewer bytes. The tied `unembedding` and the losses
    need a divided vocabulary. An index outside the table gives zeros.

    Layouts: ids `"... s/cp"` (with `sp=None` any `"..."`), whole over tp. Divided vocabulary: table `"v/tp d"`, result
    `"... s/cp/sp d"`. Divided features: table `"v d/tp"`, result `"... s/cp/sp d"`, or `"... d/tp"` with `sp=None`.

    Communication, for S bytes of `"... s/cp d"` per device, on n devices of tp. Divided vocabulary: with `sp`, a
    psum_scatter forward, S(n-1)/n bytes, and an all_gather of the same bytes backward; without, a psum forward,
    2S(n-1)/n bytes. Divided features: with `sp`, an all_to_all of S(n-1)/n² bytes, forward and again backward; without,
    nothing. If the table is equal by JAX's own type on axes that divide tokens, its gradient is summed over them:
    2V(m-1)/m bytes for a block of V bytes on m devices, however few rows were looked up.

    Memory: the ids are kept for the backward pass. The gradient has the size of the table's block.

    Args:
      ids: Integers.
      table: One row per token of the vocabulary.
      over: "vocabulary" or "features": what tp divides.
      tp: The mesh axes that divide the table.
      sp: The mesh axes that divide the sequence from here on; the same as tp, or None.
      cp: Mesh axes that already divide the sequence of ids.

    Returns:
      The vectors, in the dtype of the table.

    Raises:
      LayoutError: If `over` is something else, or ids are not integers.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b s, v/tp d -> b s/tp d", mesh=mesh)
      ... def embed(ids, table):
      ...     return spmd.nn.embedding(ids, table, tp="tp", sp="tp")
      >>> print(embed(jnp.array([[3, 0]]), jnp.arange(8.0).reshape(4, 2)))
      [[[6. 7.]
        [0. 1.]]]

    References:
      Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053, for the vocabulary.
    """
    check_one_of("over", over, PARTS, "embedding(ids, table)")
    if over == "vocabulary":
        if sp is None:
            return take(table, ids, "[v/tp] d, ... -> ... d", tp=tp)
        return take(table, ids, "[v/tp] d, ... s/cp -> ... s/cp/sp d", tp=tp, sp=sp, cp=cp)
    found = take(table, ids, "[v] d/tp, ... -> ... d/tp", tp=tp)
    return found if sp is None else all_to_all(found, "... s/cp d/tp -> ... s/cp/sp d", tp=tp, sp=sp, cp=cp)


@scope(mapping=None)
def unembedding(
    x: Any, table: Any, *, tp: Axes = None, sp: Axes = None, cp: Axes = None, preferred_element_type: Any = "float32"
) -> jax.Array:
    """Scores for all tokens of the vocabulary, `x @ table.T`. Each device computes those of its part.

    The table may be that of `embedding` (tied weights, whose gradients add up) or a separate one. `cross_entropy` takes
    the scores. `linear_cross_entropy` does both, and never holds all scores.

    Layouts: x `"... s/cp/sp d"` (with `sp=None` any `"... d"`), table `"v/tp d"`, result `"... s/cp v/tp"`.

    Communication and memory: those of `column_linear`.

    Args:
      x: The residual stream after the last layer.
      table: One row per token of the vocabulary.
      tp: The mesh axes that divide the vocabulary.
      sp: The mesh axes that divide the sequence until here; the same as tp, or None.
      cp: Mesh axes that divide the sequence here and after.
      preferred_element_type: The dtype of the scores; None for that of x.

    Returns:
      The scores.

    Raises:
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b s/tp d, v/tp d -> b s v/tp", mesh=mesh)
      ... def scores(x, table):
      ...     return spmd.nn.unembedding(x, table, tp="tp", sp="tp")
      >>> print(scores(jnp.ones((1, 2, 2)), jnp.arange(8.0).reshape(4, 2))[0, 0])
      [ 1.  5.  9. 13.]

    References:
      Press and Wolf, "Using the Output Embedding to Improve Language Models", https://arxiv.org/abs/1608.05859
    """
    x = entered(x, tp=tp, sp=sp, cp=cp)
    table = table.astype(x.dtype)
    pattern = "... d, v/tp d -> ... v/tp"
    if preferred_element_type is not None and jnp.dtype(preferred_element_type) == wide(x):
        return wide_einsum(x, table, pattern, tp=tp)
    return einsum(x, table, pattern, tp=tp, preferred_element_type=preferred_element_type)
