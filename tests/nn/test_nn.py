"""What goes wrong silently elsewhere, each beside its wrong formula; and what the registry has no room for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd import nn
from tests.nn.cases_nn import plain_cross_entropy, plain_gated, plain_rms

MODES = ("explicit", "auto", "reference")
MESH = spmd.make_mesh(dp=2, tp=4)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mapped(body, in_specs, out_specs, mesh=MESH):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def quick(fn):
    """Jitted with little care for its speed."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


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
        np.testing.assert_allclose(quick(getattr(loss, mode))(LOGITS, LABELS, UNEVEN), truth, rtol=1e-6)


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
    with pytest.raises(spmd.SpmdError):
        kernel(lambda logits, labels: loss(logits, labels, "tp"))(LOGITS, LABELS)
    np.testing.assert_allclose(
        kernel(lambda logits, labels: loss(logits, labels, None))(LOGITS, LABELS), truth, rtol=1e-6
    )


def test_the_gradient_of_a_norm_where_the_sequence_is_divided():
    """Each device sees its tokens only: the gradient of a scale that all have is the sum over all of them."""
    x, scale, weights = normal(2, 4, 8, 5), normal(3, 5), normal(4, 4, 8, 5)
    truth = jax.grad(lambda scale: (plain_rms(x, scale) * weights).sum())(scale)

    def partial(x, scale, weights):
        scale = lax.pcast(scale, ("dp", "tp"), to="varying")  # as a framework without types sees it
        gradient = jax.grad(lambda scale: (plain_rms(x, scale) * weights).sum())(scale)
        return gradient[None, None]

    parts = mapped(partial, (P("dp", "tp"), P(), P("dp", "tp")), P("dp", "tp"))(x, scale, weights)
    assert np.abs(parts[0, 0] - truth).max() > 0.1
    np.testing.assert_allclose(parts.sum((0, 1)), truth, atol=1e-5)

    def gradient(x, scale, weights):
        loss = lambda scale: spmd.reduce(nn.rms_norm(x, scale) * weights, "b/dp s/tp d -> scalar")
        return spmd.grad(loss)(scale)

    kernel = spmd.kernel("b/dp s/tp d, d, b/dp s/tp d -> d", mesh=MESH)
    for mode in MODES:
        np.testing.assert_allclose(quick(getattr(kernel(gradient), mode))(x, scale, weights), truth, atol=1e-5)
    # deferred, the gradient is a partial sum, which does not leave the kernel as if it were complete
    with pytest.raises(spmd.SpmdError, match="psum"):
        kernel(lambda x, scale, weights: gradient(x, spmd.defer(scale, "d -> d {R:dp,tp}"), weights))(x, scale, weights)


def test_dropout_wants_the_layout_of_its_array():
    """A mask of another rank would broadcast: one coin for a whole matrix."""
    x, key = np.ones((4, 64), np.float32), jax.random.key(3)

    def drop(layout, rate=0.5, **names):
        body = lambda x, k: nn.dropout(x, k, layout, rate=rate, **names)
        return spmd.kernel("b/dp d, scalar -> b/dp d", mesh=MESH)(body)(x, key)

    for layout, names in [("scalar", {}), ("d", {"d": 64}), ("q", {"q": 64}), ("b/dp q 1", {"q": 64})]:
        for rate in (0.5, 0):
            with pytest.raises(spmd.LayoutError, match="has . dimensions?, and the array has 2"):
                drop(layout, rate, **names)
    with pytest.raises(spmd.SizeError, match="q is 1 on each device, but the array has 64"):
        drop("b/dp q", q=1)
    with pytest.raises(spmd.SpmdError, match='is read as "b/tp d"'):
        drop("b/tp d", 0)


def test_dropout_on_every_device():
    """One key for local draws: all devices drop the same numbers of different parts."""
    x, key = np.ones((4, 64), np.float32), jax.random.key(3)
    alike = mapped(lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype), (P("dp"), P()), P("dp"))(
        x, key
    )
    np.testing.assert_array_equal(alike[:2], alike[2:])

    def dropped(mesh, layout):
        found = spmd.kernel(f"{layout}, scalar -> {layout}", mesh=mesh)(lambda x, k: nn.dropout(x, k, layout, rate=0.5))
        return np.asarray(found(x, key))

    ours = dropped(MESH, "b/dp d")  # equal on tp, as the kernel's boundary checks
    assert (ours[:2] != ours[2:]).any()
    for mesh, layout in [(MESH, "b d/dp/tp"), (MESH, "b/tp d/dp"), (spmd.make_mesh(x=1), "b d/x")]:
        np.testing.assert_array_equal(dropped(mesh, layout), ours)
    assert set(np.unique(ours)) == {0.0, 2.0}


# -------------------- losses


def loss_of(logits, labels, *mask, **options):
    body = lambda logits, labels, *mask: nn.cross_entropy(logits, labels, *mask, tp="tp", dp="dp", **options)
    layouts = ("b/dp s v/tp", "b/dp s", "b/dp s")[: 2 + len(mask)]
    out = "b/dp s" if options.get("reduction") == "none" else "scalar"
    kernel = spmd.kernel(in_layouts=layouts, out_layouts=out, mesh=MESH)(body)

    def both(logits):
        value, pull = jax.vjp(lambda logits: kernel(logits, labels, *mask), logits)
        return value, pull(jnp.ones_like(value))[0]

    return tuple(map(np.asarray, quick(both)(jnp.asarray(logits))))


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


def test_a_label_outside_the_vocabulary_is_heard_of():
    for label in (-1, 8):
        labels = LABELS.copy()
        labels[2, 3] = label
        assert np.isnan(loss_of(LOGITS, labels)[0])
        each, _ = loss_of(LOGITS, labels, reduction="none")
        assert np.isnan(each).sum() == 1 and np.isnan(each[2, 3])


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
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


@pytest.mark.parametrize(("layout", "shape"), [("b/dp", 8), ("b/dp n s", (2, 3, 4)), ("m b/dp s", (3, 4, 5))])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_any_rank(layout, shape, mode):
    """`...` of no dimension, of two, and of two of which the second is divided."""
    labels = np.random.default_rng(6).integers(8, size=shape)
    logits = normal(7, *labels.shape, 8)
    kernel = spmd.kernel(in_layouts=(f"{layout} v/tp", layout), out_layouts="scalar", mesh=MESH)(
        lambda logits, labels: nn.cross_entropy(logits, labels, tp="tp", dp="dp")
    )
    truth = plain_cross_entropy(logits, labels, np.ones(shape))
    np.testing.assert_allclose(quick(getattr(kernel, mode))(logits, labels), truth, rtol=1e-6)


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


def test_wider_numbers_stay_wide():
    """Of float64 no layer keeps float32's digits only."""
    rng = np.random.default_rng(20)
    x, table, k = rng.normal(size=(2, 4, 6)), rng.normal(size=(8, 6)), rng.normal(size=(2, 4, 2, 6))
    with jax.enable_x64(True):
        turn, at, labels = nn.rotary_frequencies(6), jnp.arange(4), np.array([[1, 2, 7, 0]] * 2)

        def body(x, table, k):
            y = nn.layer_norm(nn.rms_norm(x, jnp.ones(6)), jnp.ones(6))
            q = nn.rotary_embedding(k, at, turn)
            mixed = nn.dot_product_attention(q, k, k, causal=True)
            ring = spmd.parallel.ring_attention(q, k, k, cp=None, causal=True)
            w = jnp.ones((8, 6, 3))
            routed = spmd.parallel.router(y, table.T, k=2)
            experts, _ = spmd.parallel.moe(y, routed, w, w, jnp.swapaxes(w, 1, 2), capacity_factor=None)
            clip = spmd.parallel.clip_by_global_norm(1e9, "...")
            loss = nn.linear_cross_entropy(y, table, labels, chunks=2)
            return [*clip.update([y, mixed, ring, experts], ())[0], loss]

        run = spmd.kernel(in_layouts=("b s d", "v d", "b s g k"), out_layouts="...", mesh=spmd.make_mesh(x=1))(body)
        found = run(x, table, k)
        truth = body_in_numpy(x, table, k, labels)
        for a, b in zip(found, truth, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def body_in_numpy(x, table, k, labels):
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    turn = np.exp(1j * np.arange(4)[:, None] * 1e4 ** (-np.arange(0, 6, 2) / 6))[None, :, None]
    turned = (k[..., :3] + 1j * k[..., 3:]) * turn
    scores = np.einsum("bshk,bthk->bhst", np.concatenate([turned.real, turned.imag], -1), k) / np.sqrt(6)
    powers = np.exp(scores) * np.tril(np.ones((4, 4)))
    mixed = np.einsum("bhst,bthk->bshk", powers / powers.sum(-1, keepdims=True), k)
    hidden = y.sum(-1, keepdims=True)
    experts = np.broadcast_to(3 * hidden / (1 + np.exp(-hidden)) * hidden, y.shape)
    logits = y @ table.T
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return [y, mixed, mixed, experts, losses.mean()]


# -------------------- mappings and containers


def test_a_mapping_of_the_same_names():
    """The kernel's rules for b, s, d and f are not those of the layers' own strings."""
    x, gate, up, down = normal(10, 2, 8, 5), normal(11, 5, 12), normal(12, 5, 12), normal(13, 12, 5)

    @spmd.kernel("b s d, d f, d f, f d -> b s d", mesh=MESH, mapping={"b": "dp", "s": "tp", "d": None, "f": "tp"})
    def block(x, gate, up, down):
        x = x + nn.gated_mlp(nn.rms_norm(x, jnp.ones(5)), (gate, up), down, tp="tp", sp="tp")
        return nn.dropout(x, jax.random.key(0), "b s d", rate=0.5)

    truth = x + plain_gated(plain_rms(x, jnp.ones(5)), gate, up, down)
    truth = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), 2 * truth, 0)
    for mode in MODES:
        np.testing.assert_allclose(quick(getattr(block, mode))(x, gate, up, down), truth, rtol=2e-4, atol=1e-5)


def test_a_tree_of_weights_shares_one_gather():
    x, weights = normal(14, 2, 4, 5), {"q": normal(15, 5, 8, 3), "kv": [normal(16, 5, 4), normal(17, 5, 4)]}

    @spmd.kernel(
        in_layouts=("b s/tp d", {"q": "d h/tp k", "kv": "d g/tp"}),
        out_layouts={"q": "b s h/tp k", "kv": "b s g/tp"},
        mesh=MESH,
    )
    def project(x, weights):
        return nn.column_linear(x, weights, tp="tp", sp="tp")

    found = project(x, weights)
    assert spmd.inspect.collectives(project, x, weights).counts == {"all_gather": 1}
    jax.tree.map(
        lambda y, w: np.testing.assert_allclose(y, np.tensordot(x, w, 1), rtol=1e-4, atol=1e-5), found, weights
    )
