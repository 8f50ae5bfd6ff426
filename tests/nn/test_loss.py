"""Losses: what goes wrong silently elsewhere, each beside its wrong formula, and options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd import nn
from spmd.modes import MODES
from spmd.testing import assert_same_on_any_mesh
from tests.nn.cases_loss import plain_cross_entropy
from tests.nn.harness import MESH, mapped, normal
from tests.sampler import ROWS, Sampler, rare, seeds, share

# -------------------- the known traps

LOGITS, LABELS = 3 * normal(0, 4, 6, 8), np.random.default_rng(1).integers(8, size=(4, 6))
UNEVEN = np.arange(24).reshape(4, 6) < 15  # the first half of the batch has 12 tokens, the second 3


def test_a_loss_over_unequal_numbers_of_tokens():
    """A mean of the devices' means counts the tokens of the emptier device more than the others."""
    truth = plain_cross_entropy(LOGITS, LABELS, UNEVEN)

    def mean_of_means(logits, labels, mask):
        losses = nn.cross_entropy(logits, labels, mask, reduction="none")
        return lax.pmean(losses.sum() / mask.sum(), "dp")

    wrong = mapped(mean_of_means, (P("dp"), P("dp"), P("dp")), P())(LOGITS, LABELS, UNEVEN.astype(np.float32))
    assert abs(wrong - truth) > 0.02 * truth

    @spmd.kernel("b/dp s v/tp, b/dp s, b/dp s -> scalar", mesh=MESH)
    def loss(logits, labels, mask):
        return nn.cross_entropy(logits, labels, mask, tp="tp", dp="dp")

    for mode in MODES:
        np.testing.assert_allclose(jax.jit(getattr(loss, mode))(LOGITS, LABELS, UNEVEN), truth, rtol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_with_gathered_labels(fused):
    """A gathered copy varies by type, so that each device of tp has a share of the cotangent: the rule needs their sum."""
    truth = jax.grad(lambda x, t: plain_cross_entropy(x @ t.T, LABELS, np.ones((4, 6))), argnums=(0, 1))

    @spmd.kernel("b/dp s d, v/cp/tp d, b/dp s/cp -> scalar", mesh=spmd.make_mesh(dp=2, cp=2, tp=2))
    def loss(x, table, labels):
        labels = spmd.all_gather(labels, "b/dp s/cp -> b/dp s")
        if fused:
            return nn.linear_cross_entropy(x, table, labels, chunks=2, tp=("cp", "tp"), dp="dp")
        return nn.cross_entropy(nn.unembedding(x, table, tp=("cp", "tp")), labels, tp=("cp", "tp"), dp="dp")

    x, table = normal(1, 4, 6, 5), normal(2, 8, 5)
    found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, table, LABELS)
    for g, want in zip(found, truth(x, table), strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-6)


def test_gathered_scores_in_a_divided_loss():
    """Summed over tp, copies of all scores give n times the sum of exponentials: the loss is too large by log n."""
    truth = plain_cross_entropy(LOGITS, LABELS, np.ones((4, 6)))

    def summed_over_copies(logits, labels):
        logits = lax.all_gather(logits, "tp", axis=2, tiled=True)
        total = lax.psum(jnp.exp(logits).sum(-1), "tp")
        right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return lax.pmean((jnp.log(total) - right).mean(), ("dp", "tp"))

    wrong = mapped(summed_over_copies, (P("dp", None, "tp"), P("dp")), P())(LOGITS, LABELS)
    np.testing.assert_allclose(wrong, truth + np.log(4), rtol=1e-5)

    def loss(logits, labels, tp):
        logits = spmd.all_gather(logits, "b/dp s v/tp -> b/dp s v")
        return nn.cross_entropy(logits, labels, tp=tp, dp="dp")

    kernel = spmd.kernel("b/dp s v/tp, b/dp s -> scalar", mesh=MESH)
    with pytest.raises(spmd.errors.SpmdError):
        kernel(lambda logits, labels: loss(logits, labels, "tp"))(LOGITS, LABELS)
    np.testing.assert_allclose(
        kernel(lambda logits, labels: loss(logits, labels, None))(LOGITS, LABELS), truth, rtol=1e-6
    )


# -------------------- losses


def loss_of(logits, labels, *mask, **options):
    body = lambda logits, labels, *mask: nn.cross_entropy(logits, labels, *mask, tp="tp", dp="dp", **options)
    layouts = ("b/dp s v/tp", "b/dp s", "b/dp s")[: 2 + len(mask)]
    out = "b/dp s" if options.get("reduction") == "none" else "scalar"
    kernel = spmd.kernel(in_layouts=layouts, out_layouts=out, mesh=MESH)(body)

    def both(logits):
        value, pull = jax.vjp(lambda logits: kernel(logits, labels, *mask), logits)
        return value, pull(jnp.ones_like(value))[0]

    return tuple(map(np.asarray, jax.jit(both)(jnp.asarray(logits))))


def test_tokens_that_do_not_count():
    nothing = np.zeros((4, 6), bool)
    value, gradient = loss_of(LOGITS, LABELS, nothing)
    assert value == 0 and not gradient.any()
    unknown = np.where(UNEVEN, LABELS, 99)  # a label that there is not, where nothing counts
    value, gradient = loss_of(LOGITS, unknown, UNEVEN)
    np.testing.assert_allclose(value, plain_cross_entropy(LOGITS, LABELS, UNEVEN), rtol=1e-6)
    assert np.isfinite(gradient).all() and not gradient[~UNEVEN].any()
    same = loss_of(LOGITS, unknown, ignore=99)
    np.testing.assert_allclose(same[0], value, rtol=1e-6)
    np.testing.assert_array_equal(same[1], gradient)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mask_that_is_equal_on_devices_with_other_tokens(reduction):
    """The last token of each row counts nothing: all rows have one mask."""

    @spmd.kernel("b/dp s/cp v/tp, b/dp s/cp -> scalar", mesh=spmd.make_mesh(dp=2, cp=2, tp=2))
    def loss(logits, labels):
        mask = jnp.broadcast_to(spmd.iota("s/cp") < spmd.size("s") - 1, labels.shape)
        return nn.cross_entropy(logits, labels, mask, reduction=reduction, tp="tp", dp="dp", cp="cp")

    mask = np.arange(6) < 5
    truth = plain_cross_entropy(LOGITS, LABELS, np.broadcast_to(mask, (4, 6)))
    value = loss(LOGITS, LABELS)
    np.testing.assert_allclose(value, truth * (1 if reduction == "mean" else 20), rtol=1e-6)
    np.testing.assert_allclose(value, loss.reference(LOGITS, LABELS), rtol=1e-6)
    assert_same_on_any_mesh(loss, LOGITS, LABELS)


def test_a_label_outside_the_vocabulary_is_heard_of():
    for label in (-1, 8):
        labels = LABELS.copy()
        labels[2, 3] = label
        assert np.isnan(loss_of(LOGITS, labels)[0])
        each, _ = loss_of(LOGITS, labels, reduction="none")
        assert np.isnan(each).sum() == 1 and np.isnan(each[2, 3])


def by_optax(logits, labels, smoothing=0.0, z_loss=0.0):
    """The loss of each token."""
    logits = logits.astype(jnp.float32)
    if not smoothing:
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        target = optax.losses.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
        losses = optax.losses.softmax_cross_entropy(logits, target)
    return losses + (z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2 if z_loss else 0)


def in_each_mode(kernel, fn, *args):
    """The values and the first gradient of a kernel in each mode, and those of a function."""
    for one in (*(getattr(kernel, mode) for mode in MODES), fn):
        yield jax.tree.map(np.asarray, jax.jit(functools.partial(with_gradient, one))(*args))


def with_gradient(fn, x, *args):
    *args, cotangent = args
    value, pull = jax.vjp(lambda x: fn(x, *args), x)
    return value, pull(cotangent)[0]


@pytest.mark.parametrize("seed", seeds())
def test_masked_scores_have_the_loss_of_optax(seed):
    """A score of -inf takes its token out. A row of nothing else is NaN, as there."""
    sampler = Sampler(seed)
    tp = sampler.choice(["tp", None, ("tp", "dp")])
    smoothing, z_loss = sampler.choice([0.0, 0.1]), sampler.choice([0.0, 1e-2])
    dtype = sampler.choice([jnp.float32, jnp.bfloat16])
    logits, labels = sampler.scores(16)
    logits, cotangent = logits.astype(dtype), 1 + np.arange(len(ROWS), dtype=np.float32)

    @spmd.kernel("b v/tp, b -> b", axes={"tp": tp}, mesh=MESH)
    def loss(logits, labels):
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": "none"}
        return nn.cross_entropy(logits, labels, tp="tp", **options)

    truth = functools.partial(by_optax, smoothing=smoothing, z_loss=z_loss)
    *found, wanted = in_each_mode(loss, truth, logits, labels, cotangent)
    assert np.isfinite(wanted[0]).sum() >= (1 if smoothing else 4), "what is compared has numbers"
    told = slice(len(ROWS) - 1 if smoothing or z_loss else None)  # the last row's loss is infinite for several reasons
    for value, gradient in found:
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        both = (x[told].astype(np.float32) for x in (gradient, wanted[1]))
        np.testing.assert_allclose(*both, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("seed", seeds(6))
def test_masked_tokens_in_chunks_have_the_loss_of_optax(seed):
    """Scores of -inf come from the table here: the row of a token that is banned."""
    sampler = Sampler(seed)
    x, table = np.abs(sampler.array((2, 6, 4), whole=False)) + 0.1, sampler.array((8, 4), whole=False)
    table[sampler.choice([[6, 7], [1, 2, 5]])] = -np.inf
    labels = sampler.rng.choice([0, 3, 4], size=(2, 6)).astype(np.int32)

    @spmd.kernel("v/tp d, b/dp s/tp d, b/dp s -> b/dp s", mesh=spmd.make_mesh(dp=2, tp=2))
    def loss(table, x, labels):
        return nn.linear_cross_entropy(x, table, labels, chunks=3, reduction="none", tp="tp", sp="tp", dp="dp")

    truth = lambda table, x, labels: by_optax(jnp.einsum("bsd,vd->bsv", x, table), labels)
    *found, wanted = in_each_mode(loss, truth, table, x, labels, 1 + np.arange(12, dtype=np.float32).reshape(2, 6))
    for pair in found:
        for one, other in zip(pair, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# -------------------- padded vocabularies, capped scores, and what policies need


def by_hand(logits, softcap=None, count=None):
    """The scores that count, by plain JAX: capped, and without what is behind the vocabulary."""
    scores = logits.astype(jnp.float32)
    if softcap is not None:
        scores = jnp.where(jnp.isneginf(scores), -jnp.inf, softcap * jnp.tanh(scores / softcap))
    return scores[..., :count]


def finite_sum(terms, p):
    return jnp.where(p == 0, 0, terms).sum(-1)


def entropy_by_hand(scores):
    logp = jax.nn.log_softmax(scores)
    p = jnp.exp(logp)
    return -finite_sum(jnp.where(p == 0, 0, p) * jnp.where(p == 0, 0, logp), p)


def divergence_by_hand(scores, others):
    logp, logq = jax.nn.log_softmax(scores), jax.nn.log_softmax(others)
    p = jnp.exp(logp)
    return finite_sum(p * jnp.where(p == 0, 0, logp - logq), p)


OF_TOKENS = {
    "token_logprobs": (
        lambda logits, other, labels, how: nn.token_logprobs(logits, labels, **how),
        lambda scores, others, labels: jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1)[..., 0],
    ),
    "entropy": (
        lambda logits, other, labels, how: nn.entropy(logits, **how),
        lambda scores, others, labels: entropy_by_hand(scores),
    ),
    "kl_divergence": (
        lambda logits, other, labels, how: nn.kl_divergence(logits, other, **how),
        lambda scores, others, labels: divergence_by_hand(scores, others),
    ),
    "the second of kl_divergence": (
        lambda logits, other, labels, how: nn.kl_divergence(other, logits, **how),
        lambda scores, others, labels: divergence_by_hand(others, scores),
    ),
    "cross_entropy": (
        lambda logits, other, labels, how: nn.cross_entropy(
            logits, labels, reduction="none", label_smoothing=0.1, z_loss=1e-2, **how
        ),
        lambda scores, others, labels: by_optax(scores, labels, 0.1, 1e-2),
    ),
}


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("name", OF_TOKENS)
def test_what_scores_say_of_tokens(name, seed):
    """In each mode, forward and backward: capped or not, with padding or not, and some tokens that are banned."""
    sampler = Sampler(seed)
    fn, truth = OF_TOKENS[name]
    tp, dtype = sampler.choice(["tp", None, ("tp", "dp")]), sampler.choice([jnp.float32, jnp.bfloat16])
    softcap, count = sampler.choice([None, 2.0, 30.0]), sampler.choice([None, 13, 16])
    logits, other = (5 * sampler.array((4, 16), whole=False).astype(np.float32) for _ in range(2))
    if name != "cross_entropy":  # whose smoothing gives a share to what is banned
        banned = sampler.choice([[], [7], [5, 6, 9]])
        logits[1:, banned] = -np.inf
        other[:, banned] = -np.inf
    labels = sampler.rng.choice([0, 3, 12], size=4).astype(np.int32)
    logits, other = logits.astype(dtype), other.astype(dtype)

    @spmd.kernel("b v/tp, b v/tp, b -> b", axes={"tp": tp}, mesh=MESH)
    def kernel(logits, other, labels):
        return fn(logits, other, labels, {"tp": "tp", "softcap": softcap, "vocabulary": count})

    plain = lambda logits, other, labels: truth(by_hand(logits, softcap, count), by_hand(other, softcap, count), labels)
    *found, wanted = in_each_mode(kernel, plain, logits, other, labels, 1 + np.arange(4, dtype=np.float32))
    for value, gradient in found:
        np.testing.assert_allclose(value, wanted[0], rtol=2e-5, atol=1e-6)
        rows = np.isfinite(wanted[0])  # beyond, gradients are infinite for several reasons
        both = (np.nan_to_num(x[rows].astype(np.float32)) for x in (gradient, wanted[1]))
        np.testing.assert_allclose(*both, rtol=2e-2, atol=2e-6 if dtype == jnp.float32 else 1e-2)


def test_a_padded_table_in_chunks():
    """A vocabulary of 13 whose table has 16 rows: loss and gradient are those of 13 rows, and padding gets none."""
    x, table = normal(1, 2, 6, 4), normal(2, 16, 4)
    labels = np.random.default_rng(3).integers(13, size=(2, 6))

    @spmd.kernel("v/tp d, b/dp s/tp d, b/dp s -> scalar", mesh=spmd.make_mesh(dp=2, tp=2))
    def loss(table, x, labels):
        return nn.linear_cross_entropy(
            x, table, labels, chunks=3, tp="tp", sp="tp", dp="dp", vocabulary=13, softcap=1.5, label_smoothing=0.1
        )

    def plain(table, x, labels):
        return by_optax(by_hand(jnp.einsum("bsd,vd->bsv", x, table), 1.5, 13), labels, 0.1).mean()

    *found, wanted = in_each_mode(loss, plain, table, x, labels, np.float32(1))
    for value, gradient in found:
        np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(gradient, wanted[1], rtol=1e-5, atol=1e-6)
        assert not gradient[13:].any() and gradient[:13].any()


def test_a_label_of_padding_is_heard_of():
    each = jax.jit(lambda *given: nn.token_logprobs(*given, vocabulary=7))
    run = spmd.kernel("b v, b -> b", mesh=MESH)(each)(normal(0, 2, 8), np.array([6, 7]))
    assert np.isfinite(run[0]) and np.isnan(run[1])


def test_a_policy_gradient_on_any_mesh():
    """The clipped objective with its penalty, whose tokens and vocabulary are divided."""

    def objective(logits, reference, actions, old, advantages):
        logp = nn.token_logprobs(logits, actions, tp="tp", vocabulary=10)
        ratio = jnp.exp(logp - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        kl = nn.kl_divergence(logits, jax.lax.stop_gradient(reference), tp="tp", vocabulary=10)
        bonus = nn.entropy(logits, tp="tp", vocabulary=10)
        return spmd.reduce(gain - 0.1 * kl + 0.01 * bonus, "b/dp s -> scalar", "mean")

    kernel = spmd.kernel("b/dp s v/tp, b/dp s v/tp, b/dp s, b/dp s, b/dp s -> scalar", mesh=spmd.make_mesh(dp=2, tp=4))(
        objective
    )
    logits, other = normal(1, 4, 3, 12), normal(2, 4, 3, 12)
    actions = np.random.default_rng(3).integers(10, size=(4, 3)).astype(np.int32)
    assert_same_on_any_mesh(kernel, logits, other, actions, -2 + 0.1 * normal(4, 4, 3), normal(5, 4, 3))
    assert spmd.check(kernel, logits, other, actions, normal(4, 4, 3), normal(5, 4, 3)).verdict.kind in (
        "proved",
        "tested",
    )


@pytest.mark.parametrize("given", ["mask", "ignore"])
def test_what_a_token_that_does_not_count_has_for_scores_is_the_same(given):
    """A row of padding is NaN or all masked: its loss and its gradient are zero, and those of the others stay."""
    logits = np.where(UNEVEN[..., None], LOGITS, np.array([np.nan, -np.inf])[np.arange(24).reshape(4, 6, 1) % 2])
    if given == "ignore":
        value, gradient = loss_of(logits.astype(np.float32), np.where(UNEVEN, LABELS, -100), ignore=-100)
    else:
        value, gradient = loss_of(logits.astype(np.float32), LABELS, UNEVEN)
    np.testing.assert_allclose(value, plain_cross_entropy(LOGITS, LABELS, UNEVEN), rtol=1e-6)
    wanted = jax.grad(lambda x: plain_cross_entropy(x, LABELS, UNEVEN))(LOGITS)
    np.testing.assert_allclose(gradient, np.where(UNEVEN[..., None], wanted, 0), atol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
@rare
def test_labels_of_any_width(dtype):
    """Bytes as labels of a vocabulary that has more than bytes can count."""
    logits, labels = normal(18, 2, 3, 264), np.full((2, 3), 255, dtype)
    value, _ = loss_of(logits, labels)
    np.testing.assert_allclose(value, plain_cross_entropy(logits, labels.astype(int), np.ones((2, 3))), rtol=1e-6)


def test_reductions():
    weights = np.random.default_rng(5).random((4, 6)).astype(np.float32)
    mean, total, each = (loss_of(LOGITS, LABELS, weights, reduction=op)[0] for op in ("mean", "sum", "none"))
    np.testing.assert_allclose(total, each.sum(), rtol=1e-6)
    np.testing.assert_allclose(mean, each.sum() / weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(mean, plain_cross_entropy(LOGITS, LABELS, weights), rtol=1e-5)
    np.testing.assert_allclose(
        loss_of(LOGITS, LABELS)[0], plain_cross_entropy(LOGITS, LABELS, np.ones((4, 6))), rtol=1e-6
    )


@pytest.mark.parametrize(("layout", "shape"), share([("b/dp", 8), ("b/dp n s", (2, 3, 4)), ("m b/dp s", (3, 4, 5))]))
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_any_rank(layout, shape, mode):
    """`...` of no dimension, of two, and of two of which the second is divided."""
    labels = np.random.default_rng(6).integers(8, size=shape)
    logits = normal(7, *labels.shape, 8)
    kernel = spmd.kernel(in_layouts=(f"{layout} v/tp", layout), out_layouts="scalar", mesh=MESH)(
        lambda logits, labels: nn.cross_entropy(logits, labels, tp="tp", dp="dp")
    )
    truth = plain_cross_entropy(logits, labels, np.ones(shape))
    np.testing.assert_allclose(jax.jit(getattr(kernel, mode))(logits, labels), truth, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_is_wrong_before_the_loss_is_an_error(reduction):
    """The numbers of a program with this layer are compared as those of any other, also with a batch inside the rows."""

    @spmd.kernel("m b/dp v/tp, m b/dp -> scalar", mesh=MESH)
    def sharpened(logits, labels):  # each device normalizes its own block of the vocabulary
        return nn.cross_entropy(logits * jax.nn.softmax(logits), labels, reduction=reduction, tp="tp", dp="dp")

    args = normal(10, 3, 4, 8), np.zeros((3, 4), np.int32)
    with pytest.raises(spmd.errors.ReplicationError, match=r"spmd\.softmax"):
        sharpened(*args)
    assert spmd.check(sharpened, *args).verdict.kind == "wrong"


def test_the_scores_never_exist_whole():
    """In chunks no array of the compiled step, forward or backward, has the size of all scores; at once, some have."""
    x, table, labels = normal(8, 2, 64, 16), normal(9, 2048, 16), np.zeros((2, 64), np.int32)
    layouts = ("b/dp s/tp d", "v/tp d", "b/dp s")
    args = [spmd.shard(y, layout, mesh=MESH) for y, layout in zip((x, table, labels), layouts, strict=True)]
    scores = 4 * 64 * 512  # float32 of 64 tokens and a quarter of the vocabulary
    temporary = {}
    for chunks in (1, 8):
        body = lambda *args, chunks=chunks: nn.linear_cross_entropy(*args, chunks=chunks, tp="tp", sp="tp", dp="dp")
        kernel = spmd.kernel(in_layouts=layouts, out_layouts="scalar", mesh=MESH)(body)
        compiled = jax.jit(jax.value_and_grad(kernel, (0, 1))).lower(*args).compile()
        temporary[chunks] = compiled.memory_analysis().temp_size_in_bytes
        has_all = any(size in compiled.as_text() for size in ("f32[1,64,512]", "f32[64,512]", "f32[8,1,8,512]"))
        assert has_all == (chunks == 1)
    assert temporary[1] > scores
    # scores and slopes of a chunk, the gradient of the table twice (the sum, and a chunk's), and x with its gradient
    assert temporary[8] < 2 * scores / 8 + 2 * 4 * 512 * 16 + 6 * 4 * 64 * 16 + 4096
