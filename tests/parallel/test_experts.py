"""Experts: what does not depend on the mesh, options, and the faults that are silent elsewhere beside their formulas."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import Layout, parallel
from spmd.inspect import collectives
from tests.parallel.cases_experts import capacity, plain_choices, plain_moe
from tests.sampler import rare, share

B, S, D, E, F, K = 8, 6, 5, 6, 4, 2
GROUPS, FACTOR = (4, 2), 1.0
REPORT = parallel.MoEReport("scalar", "scalar", "e", "scalar")


@functools.cache
def arguments(seed: int = 0) -> tuple[np.ndarray, ...]:
    """x, router, gate, up, down. Tokens of one row are alike, so that groups differ and experts overflow."""
    rng = np.random.default_rng(seed)
    shapes = [(B, S, D), (D, E), (E, D, F), (E, D, F), (E, F, D)]
    x, *weights = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return (0.5 * x + 2 * x[:, :1]).astype(np.float32), *weights


def layer(mesh, dp=None, sp=None, ep=None, tp=None, groups=GROUPS, factor=FACTOR, **options):
    """The layer as a kernel: its result, the report and the chosen experts."""
    ins = ("b/dp s/sp d", "d e", "e/ep d f/tp", "e/ep d f/tp", "e/ep f/tp d")
    bind = lambda text: Layout(text).bind(
        **{k: v for k, v in {"dp": dp, "sp": sp, "ep": ep, "tp": tp}.items() if f"/{k}" in text}
    )

    def body(x, w, gate, up, down):
        routing = parallel.router(x, w, k=K, **options)
        axes = {"dp": dp, "sp": sp, "ep": ep, "tp": tp}
        y, report = parallel.moe(x, routing, gate, up, down, groups=groups, capacity_factor=factor, **axes)
        return y, report, routing.experts

    outs = (bind("b/dp s/sp d"), REPORT, bind("b/dp s/sp k"))
    return spmd.kernel(in_layouts=tuple(map(bind, ins)), out_layouts=outs, mesh=spmd.make_mesh(**mesh))(body)


MESHES = [
    ({"ep": 2}, {"dp": "ep", "ep": "ep"}),
    ({"dp": 2, "ep": 2, "tp": 2}, {"dp": ("dp", "ep"), "ep": "ep", "tp": "tp"}),
    ({"ep": 2, "tp": 2}, {"dp": "ep", "sp": "tp", "ep": "ep", "tp": "tp"}),
    ({"dp": 4, "ep": 2}, {"dp": "dp", "sp": "ep", "ep": "ep"}),
]


@pytest.mark.parametrize(("mesh", "axes"), share(MESHES))
def test_who_is_dropped_depends_on_the_groups_alone(mesh, axes) -> None:
    args = arguments()
    plain, *_, load, drop_rate = plain_moe(*args, groups=GROUPS, factor=FACTOR)
    assert 0.1 < drop_rate < 0.5  # something to drop, and something left
    kernel = layer(mesh, **axes)
    for run in (kernel, *([kernel.auto, kernel.reference] if len(mesh) == 3 else [])):
        y, report, experts = run(*args)
        np.testing.assert_allclose(y, plain, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(np.all(y == 0, axis=-1), np.all(plain == 0, axis=-1))
        np.testing.assert_allclose(report.load, load, rtol=1e-6)
        np.testing.assert_allclose(report.drop_rate, drop_rate, rtol=1e-6)
        best = np.argsort(-(args[0] @ args[1]), axis=-1, kind="stable")[..., :K]
        np.testing.assert_array_equal(experts, best)


def test_other_groups_drop_others_and_the_default_is_one_for_each_block() -> None:
    args = arguments()
    rates = []
    for groups in ((4, 2), (8, 1), None):
        *_, rate = plain_moe(*args, groups=groups or (2, 1), factor=FACTOR)
        found = layer({"dp": 2}, dp="dp", groups=groups)(*args)[1].drop_rate
        np.testing.assert_allclose(found, rate, rtol=1e-6)
        rates.append(float(rate))
    assert len(set(rates)) == 3


def test_without_a_factor_nothing_is_dropped() -> None:
    """All tokens to one expert, and it has room."""
    x, w, *weights = arguments()
    w = np.zeros_like(w)
    y, report, experts = layer({"ep": 2}, dp="ep", ep="ep", factor=None)(x, w, *weights)
    assert report.drop_rate == 0 and np.array_equal(np.unique(experts), [0, 1])
    gate, up, down = (part[:2] for part in weights)
    h = jax.nn.silu(np.einsum("bsd,edf->bsef", x, gate)) * np.einsum("bsd,edf->bsef", x, up)
    np.testing.assert_allclose(y, np.einsum("bsef,efd->bsd", h, down) / 2, rtol=1e-4, atol=1e-4)
    assert layer({"ep": 2}, dp="ep", ep="ep")(x, w, *weights)[1].drop_rate > 0.5


# -------------------- what is silent elsewhere


def test_the_balance_loss_is_no_mean_of_local_losses() -> None:
    """The trap: each device multiplies its own shares. Rows that prefer different experts look unbalanced one by one."""
    args = arguments()
    x, w = args[:2]
    found = layer({"dp": 4}, dp="dp")(*args)[1].balance_loss
    _, right, *_ = plain_moe(*args, groups=GROUPS, factor=FACTOR)
    wrong = np.mean([plain_moe(part, *args[1:], groups=(1, 1), factor=FACTOR)[1] for part in np.split(x, 4)])
    np.testing.assert_allclose(found, right, rtol=1e-5)
    assert abs(wrong - right) > 0.1 * right

    def gradient(run):
        return jax.grad(lambda w: run(x, w, *args[2:])[1].balance_loss)(w)

    expected = jax.jit(jax.grad(lambda w: plain_moe(x, w, *args[2:], groups=GROUPS, factor=FACTOR)[1]))(w)
    np.testing.assert_allclose(gradient(layer({"dp": 4}, dp="dp")), expected, rtol=1e-4, atol=1e-5)


def steps(reduce_gradient, out: str, count: int = 3):
    """Some steps of gradient descent on the router's weights, which every device keeps whole."""

    @spmd.kernel(f"b/dp/ep s/tp d, d e, e/ep d f/tp, e/ep d f/tp, e/ep f/tp d -> {out}", mesh=MESH)
    def train(x, w, gate, up, down):
        def loss(w):
            routing = parallel.router(x, w, k=K)
            axes = {"dp": ("dp", "ep"), "sp": "tp", "ep": "ep", "tp": "tp"}
            y, report = parallel.moe(x, routing, gate, up, down, groups=GROUPS, capacity_factor=FACTOR, **axes)
            return spmd.reduce(y**2, "b/dp/ep s/tp d -> scalar", "mean") + report.balance_loss

        for _ in range(count):
            deferred = spmd.defer(w, "d e -> d e {R:dp,ep,tp}")
            w = w - 0.1 * reduce_gradient(spmd.grad(loss)(deferred))
        return w if out == "d e" else w[None, None, None]

    return train


MESH = spmd.make_mesh(dp=2, ep=2, tp=2)
SUMMED = lambda g: spmd.psum(g, "d e {U:dp,ep,tp} -> d e")


@rare
def test_the_routers_of_all_devices_stay_the_same() -> None:
    """The trap: the weights are equal, their gradients are not, and nobody sums them."""
    args = arguments()
    train = steps(SUMMED, "d e")
    found, one = train(*args), steps(SUMMED, "d e", 1)(*args)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, found.addressable_shards[0].data)
    np.testing.assert_allclose(found, train.reference(*args), rtol=1e-4, atol=1e-5)
    with pytest.raises(spmd.errors.SpmdError, match=r"psum\(x, .*U:dp,ep,tp"):
        steps(lambda g: g, "d e")(*args)
    drifted = steps(lambda g: 8 * g, "i/dp j/ep l/tp d e", 1)(*args)  # each device's own, shown by another layout
    assert np.abs(drifted - one[None, None, None]).max() > 1e-2


def test_the_gradient_norm_counts_every_expert_once() -> None:
    """The trap: a norm of what one device holds, or of experts taken for replicated, misses the others' experts."""
    args = arguments()
    ins = ("b/dp/ep s d", "d e", "e/ep d f/tp", "e/ep d f/tp", "e/ep f/tp d")

    def of(norm, out="scalar"):
        @spmd.kernel(in_layouts=ins, out_layouts=out, mesh=MESH)
        def kernel(x, *weights):
            def loss(weights):
                routing = parallel.router(x, weights[0], k=K)
                axes = {"dp": ("dp", "ep"), "ep": "ep", "tp": "tp"}
                y, _ = parallel.moe(x, routing, *weights[1:], groups=GROUPS, capacity_factor=FACTOR, **axes)
                return spmd.reduce(y**2, "b/dp/ep s d -> scalar", "mean")

            return norm(spmd.grad(loss)(weights))

        return kernel(*args)

    def plain(weights):
        return (plain_moe(args[0], *weights, groups=GROUPS, factor=FACTOR)[0] ** 2).mean()

    squares = [float((np.asarray(g) ** 2).sum()) for g in jax.jit(jax.grad(plain))(args[1:])]
    right = math.sqrt(sum(squares))
    np.testing.assert_allclose(of(lambda g: parallel.global_norm(g, ins[1:])), right, rtol=1e-5)
    local = spmd.per_shard("what a device alone would know")(lambda g: jnp.sqrt(sum((leaf**2).sum() for leaf in g)))
    with pytest.raises(spmd.errors.SpmdError):
        of(local)
    missing = of(lambda g: local(g)[None, None, None], "i/dp j/ep l/tp")
    assert np.all(missing < 0.999 * right) and np.min(missing) < 0.5 * right  # and each device clips by its own


# -------------------- what it does not cost


def test_rows_are_moved_by_gathers_and_no_mask_is_made() -> None:
    """No scatter of rows, forward or backward, and no array of tokens x experts x places x anything."""
    e, t, d, f = 16, 64, 8, 4
    x = jnp.ones((1, t, d))
    routing = parallel.Routing(jnp.ones((1, t, K)), jnp.zeros((1, t, K), jnp.int32), *[jnp.ones((1, t, e))] * 2)
    weights = jnp.ones((e, d, f)), jnp.ones((e, d, f)), jnp.ones((e, f, d))
    mesh = spmd.make_mesh(ep=1)

    def loss(x, weights, w):
        kernel = spmd.kernel(
            in_layouts=("b s d", parallel.Routing("b s k", "b s k", "b s e", "b s e"), ("e d f", "e d f", "e f d")),
            out_layouts="b s d",
            mesh=mesh,
        )(lambda x, routing, w: parallel.moe(x, routing, *w, capacity_factor=1.0)[0])
        return kernel(x, routing._replace(weights=weights), w).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, routing.weights, weights)
    text = str(traced.jaxpr)
    assert "gather" in text and "scatter" not in text
    c = capacity(t, e, K, 1.0)
    largest = max(math.prod(map(int, s.split(","))) for s in re.findall(r"[fiub]\w+\[([\d,]+)\]", text))
    assert largest <= max(K * t * e, e * c * d, K * t * d) < t * e * c


@rare
def test_with_fsdp_the_gathered_weights_are_scattered_back() -> None:
    """Weights divided over dp for storage: a gather before, and its transpose in the place of the psum."""
    args = arguments()

    def body(x, w, *experts):
        into = ("e/ep d/dp f -> e/ep d f", "e/ep d/dp f -> e/ep d f", "e/ep f d/dp -> e/ep f d")
        experts = [spmd.all_gather(part, pattern) for part, pattern in zip(experts, into, strict=True)]
        routing = parallel.router(x, w, k=K)
        return parallel.moe(x, routing, *experts, dp=("dp", "ep"), ep="ep", groups=GROUPS, capacity_factor=FACTOR)[0]

    wide = [np.repeat(a, 2, axis=i) for a, i in zip(args, (2, 0, 1, 1, 2), strict=True)]  # d of 10 divides by 2
    ins = ("b/dp/ep s d", "d e", "e/ep d/dp f", "e/ep d/dp f", "e/ep f d/dp")
    kernel = spmd.kernel(in_layouts=ins, out_layouts="b/dp/ep s d", mesh=spmd.make_mesh(dp=2, ep=2))(body)

    @jax.jit
    def both(*args):
        y, pull = jax.vjp(kernel, *args)
        return y, pull(y)

    y, gradients = both(*wide)
    plain, pull = jax.vjp(lambda *args: plain_moe(*args, groups=GROUPS, factor=FACTOR)[0], *wide)
    np.testing.assert_allclose(y, plain, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-2), gradients, pull(y))
    mesh = spmd.make_mesh(dp=2, ep=2)
    placed = [spmd.shard(a, layout, mesh=mesh) for a, layout in zip(wide, ins, strict=True)]
    found = collectives(both, *placed, mesh=mesh).counts
    assert (found["all_gather"], found["psum_scatter"], found["all_to_all"]) == (3, 3, 4)


@rare
def test_under_scan_remat_and_a_mapping_that_uses_its_letters() -> None:
    """Two layers in a scan; the caller's mapping places names that the layer has too."""
    args = arguments()
    rules = {"b": ("dp", "ep"), "d": None, "s": None, "e": "ep", "f": None, "l": None, "n": "dp", "t": "tp", "k": "ep"}
    stacked = tuple(np.stack([a, a[::-1]]) for a in args[1:])

    @spmd.kernel("b s d, l d e/1, l e d f, l e d f, l e f d -> b s d", mesh=MESH, mapping=spmd.AxisMapping(rules))
    def model(x, *weights):
        def one(x, weights):
            routing = parallel.router(x, weights[0], k=K)
            y, _ = parallel.moe(x, routing, *weights[1:], dp=("dp", "ep"), ep="ep", groups=GROUPS)
            return x + y, None

        return jax.lax.scan(jax.checkpoint(one), x, weights)[0]

    def plain(x, *weights):
        for i in range(2):
            x = x + plain_moe(x, *(w[i] for w in weights), groups=GROUPS, factor=1.25)[0]
        return x

    gradient = lambda fn: jax.grad(lambda *a: jnp.mean(fn(*a) ** 2), (0, 1, 2))(args[0], *stacked)
    for a, b in zip(gradient(model), gradient(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())


# -------------------- the router's options


def routed(x, w, **options):
    """On four devices, and on one."""
    arrays = {name: value for name, value in options.items() if name in ("bias", "noise")}
    static = {name: value for name, value in options.items() if name not in arrays}
    ins = ("b/dp s d", "d e", {name: {"bias": "e", "noise": "b/dp s e"}[name] for name in arrays})
    outs = parallel.Routing("b/dp s k", "b/dp s k", "b/dp s e", "b/dp s e")

    @spmd.kernel(in_layouts=ins, out_layouts=outs, mesh=spmd.make_mesh(dp=4))
    def kernel(x, w, arrays):
        return parallel.router(x, w, k=K, **static, **arrays)

    found = kernel(x, w, arrays)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, kernel.reference(x, w, arrays)
    )
    return found


def test_router_weights_scale_bias_and_noise() -> None:
    x, w = arguments()[:2]
    shares, _, normal = plain_choices(x @ w, K)
    found = routed(x, w)
    np.testing.assert_allclose(found.weights, jnp.stack(normal, -1), rtol=1e-5)
    np.testing.assert_allclose(found.shares, shares, rtol=1e-5)
    raw = routed(x, w, normalize=False, scale=2.5).weights
    np.testing.assert_allclose(raw, 2.5 * np.sort(shares, -1)[..., : -K - 1 : -1], rtol=1e-5)
    bias = np.array([0, 0, 9, 0, 0, 5], np.float32)  # more than any score: the choice is fixed, the weights are not
    biased = routed(x, w, scores="sigmoid", bias=bias)
    assert np.array_equal(np.unique(biased.experts), [2, 5]) and np.all(biased.experts[..., 0] == 2)
    scored = 1 / (1 + np.exp(-(x @ w)[..., [2, 5]]))
    np.testing.assert_allclose(biased.weights, scored / scored.sum(-1, keepdims=True), rtol=1e-4)
    noise = np.random.default_rng(1).normal(size=(B, S, E)).astype(np.float32)
    np.testing.assert_allclose(routed(x, w, noise=noise).logits, x @ w + noise, rtol=1e-4, atol=1e-5)


def test_the_bias_balances_without_a_loss() -> None:
    """Steps of `balance_bias` on fixed tokens even out the load; the sign of the step is what does it."""
    x, w = arguments()[:2]
    spread = []
    for sign in (1, -1):
        bias, spreads = jnp.zeros(E), []
        for _ in range(50):
            experts = np.asarray(jax.lax.top_k(jax.nn.sigmoid(x @ w) + bias[None, None], K)[1])
            load = np.bincount(experts.ravel(), minlength=E) / experts.size
            bias = parallel.balance_bias(bias, jnp.asarray(load, jnp.float32), rate=sign * 0.02)
            spreads.append(load.max() - load.min())
        spread.append(np.mean(spreads[-20:]))
    assert spread[0] < 0.15 < 0.25 < spread[1]


@pytest.mark.parametrize("biased", share([False, True]))
def test_a_token_chooses_among_the_experts_of_its_best_groups(biased) -> None:
    """A group is as good as the sum of its two best scores; its experts are chosen one by one."""
    rng = np.random.default_rng(3)
    x, w = arguments()[0], rng.normal(size=(D, 12)).astype(np.float32)
    bias = 0.3 * rng.normal(size=12).astype(np.float32)
    n, m = 4, 2
    options = {"bias": bias} if biased else {}
    found = routed(x, w, scores="sigmoid", among=(n, m), **options)
    scored = 1 / (1 + np.exp(-(x @ w)))
    other = 0
    for token in np.ndindex(B, S):
        shifted = scored[token] + biased * bias
        groups = shifted.reshape(n, -1)
        best = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1))[:m]
        left = np.where(np.isin(np.arange(12) // 3, best), shifted, -np.inf)
        chosen = np.argsort(-left)[:K]
        np.testing.assert_array_equal(found.experts[token], chosen)
        np.testing.assert_allclose(found.weights[token], scored[token][chosen] / scored[token][chosen].sum(), rtol=1e-4)
        other += set(chosen) != set(np.argsort(-shifted)[:K])
    assert other > 3, "the groups must matter"
    every = routed(x, w, scores="sigmoid", among=(n, n), **options)
    np.testing.assert_array_equal(every.experts, routed(x, w, scores="sigmoid", **options).experts)
