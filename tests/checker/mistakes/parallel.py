"""Weights at rest, micro-batches, optimizers, pipelines, experts."""

import jax
import jax.numpy as jnp

import spmd
from spmd import einsum, nn, parallel
from tests.checker.mistakes.registry import mistake

# --- weights at rest --------------------------------------------------------------------------------------------

REST = "b/dp d, d/dp f/tp -> b/dp f/tp"
STACK = "b/dp d, l d/dp f, l d -> b/dp d"


def multiplied(x, w):
    return einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")


def layer(w, x):
    return x + jnp.tanh(einsum(x * w["n"][None], w["w"], "b/dp d, d f -> b/dp f"))


def stack(x, w, n, **options):
    told = {"at_rest": {"w": "l d/dp f", "n": "l d"}, "compute": {"w": "l d f", "n": "l d"}} | options
    return parallel.scan_layers(layer, {"w": w, "n": n}, x, **told)


mistake(
    "parallel.gather",
    "the layout in use forgets tp, so the columns are gathered too",
    REST,
    right=lambda x, w: multiplied(x, parallel.gather(w, "d/dp f/tp", "d f/tp")),
    wrong=lambda x, w: multiplied(x, parallel.gather(w, "d/dp f/tp", "d f", data=("dp", "tp"))),
)
mistake(
    "parallel.gather",
    "the layout at rest divides the other dimension",
    REST,
    right=lambda x, w: multiplied(x, parallel.gather(w, "d/dp f/tp", "d f/tp")),
    wrong=lambda x, w: multiplied(x, parallel.gather(w, "d f/tp/dp", "d f/tp")),
)
mistake(
    "parallel.gather",
    "the layout at rest has the axes in another order",
    "b/dp/fs d, d/dp/fs f -> b/dp/fs f",
    mesh={"dp": 2, "fs": 2},
    right=lambda x, w: einsum(x, parallel.gather(w, "d/dp/fs f", "d f"), "b/dp/fs d, d f -> b/dp/fs f"),
    wrong=lambda x, w: einsum(x, parallel.gather(w, "d/fs/dp f", "d f"), "b/dp/fs d, d f -> b/dp/fs f"),
)
mistake(
    "parallel.gather",
    "data= leaves out an axis over which the weights are gathered",
    "b/dp/fs d, d/dp/fs f -> b/dp/fs f",
    mesh={"dp": 2, "fs": 2},
    right=lambda x, w: einsum(x, parallel.gather(w, "d/dp/fs f", "d f"), "b/dp/fs d, d f -> b/dp/fs f"),
    wrong=lambda x, w: einsum(x, parallel.gather(w, "d/dp/fs f", "d f", data="dp"), "b/dp/fs d, d f -> b/dp/fs f"),
)
mistake(
    "parallel.fsdp",
    "the layer is given the weights in use as if they were at rest",
    "b/dp d, d/dp f/tp -> b/dp f/tp",
    right=lambda x, w: parallel.fsdp(lambda w, x: multiplied(x, w), "d/dp f/tp", "d f/tp")(w, x),
    wrong=lambda x, w: parallel.fsdp(lambda w, x: multiplied(x, w[: x.shape[1]]), "d/dp f/tp", "d f/tp")(
        parallel.gather(w, "d/dp f/tp", "d f/tp"), x
    ),
)
mistake(
    "parallel.scan_layers",
    "the layouts forget the dimension of the layers",
    STACK,
    f=8,
    right=lambda x, w, n: stack(x, w, n),
    wrong=lambda x, w, n: stack(x, w, n, at_rest={"w": "d/dp f", "n": "d"}, compute={"w": "d f", "n": "d"}),
)
mistake(
    "parallel.scan_layers",
    "the layouts at rest and in use are exchanged",
    STACK,
    f=8,
    right=lambda x, w, n: stack(x, w, n),
    wrong=lambda x, w, n: stack(
        x, w, n, at_rest={"w": "l d f", "n": "l d"}, compute={"w": "l d/dp f", "n": "l d"}, data="dp"
    ),
)
mistake(
    "parallel.scan_layers",
    "the scales rest divided, and their layout says whole",
    STACK,
    wrong_pattern="b/dp d, l d/dp f, l d/dp -> b/dp d",
    f=8,
    right=lambda x, w, n: stack(x, w, n),
    wrong=lambda x, w, n: stack(x, w, n),
)
mistake(
    "parallel.reduce_gradients",
    "the gradients are complete already",
    "b/dp d -> d/dp",
    right=lambda x: parallel.reduce_gradients(x.sum(0), "d/dp", "d"),
    wrong=lambda x: parallel.reduce_gradients(spmd.reduce(x, "b/dp d -> d"), "d/dp", "d"),
)
mistake(
    "parallel.reduce_gradients",
    "data= leaves out an axis that divides the batch",
    "b/dp/fs d -> d/fs",
    mesh={"dp": 2, "fs": 2},
    right=lambda x: parallel.reduce_gradients(x.sum(0), "d/fs", "d", data=("dp", "fs")),
    wrong=lambda x: parallel.reduce_gradients(x.sum(0), "d/fs", "d"),
)

# --- micro-batches ----------------------------------------------------------------------------------------------

STEP = "d/dp, m b/dp d -> d/dp"


def squares(w, x):
    return (x * w[None]) ** 2


def accumulated(w, x, loss=None, **options):
    loss = loss or (lambda w, x: spmd.reduce(squares(w, x), "b/dp d -> {U:dp}"))
    told = {"at_rest": "d/dp", "compute": "d", "data": "dp"} | options
    return parallel.accumulate(loss, w, x, **told)[1]


mistake(
    "parallel.accumulate",
    "data= is empty",
    STEP,
    right=lambda w, x: accumulated(w, x),
    wrong=lambda w, x: accumulated(w, x, data=()),
)
mistake(
    "parallel.accumulate",
    "data= leaves out an axis that divides the batch",
    "d/dp, m b/dp/fs d -> d/dp",
    mesh={"dp": 2, "fs": 2},
    right=lambda w, x: accumulated(
        w, x, loss=lambda w, x: spmd.reduce(squares(w, x), "b/dp/fs d -> {U:dp,fs}"), data=("dp", "fs")
    ),
    wrong=lambda w, x: accumulated(w, x, loss=lambda w, x: squares(w, x).sum()),
)
mistake(
    "parallel.accumulate",
    "the loss is reduced already",
    STEP,
    right=lambda w, x: accumulated(w, x),
    wrong=lambda w, x: accumulated(w, x, loss=lambda w, x: spmd.reduce(squares(w, x), "b/dp d -> scalar")),
)
mistake(
    "parallel.accumulate",
    "the loss is the mean of each device's rows",
    STEP,
    right=lambda w, x: accumulated(
        w, x, loss=lambda w, x: (spmd.reduce(squares(w, x), "b/dp d -> {U:dp}"), squares(w, x).size), mean=True
    ),
    truth=lambda w, x: jax.grad(lambda w: jnp.mean((x * w[None, None]) ** 2))(w),
    wrong=lambda w, x: accumulated(w, x, loss=lambda w, x: squares(w, x).mean()),
)
mistake(
    "parallel.accumulate",
    "the loss is a sum, and its count is forgotten",
    STEP,
    right=lambda w, x: accumulated(w, x),
    wrong=lambda w, x: accumulated(w, x, mean=True),
)

# --- optimizers -------------------------------------------------------------------------------------------------


def clipped(gradient, layouts):
    clip = parallel.clip_by_global_norm(0.1, layouts)
    return clip.update(gradient, clip.init(gradient))[0]


mistake(
    "parallel.clip_by_global_norm",
    "the layouts are those in use, not those at rest",
    "d/dp f/tp -> d/dp f/tp",
    right=lambda g: clipped(g, "d/dp f/tp"),
    wrong=lambda g: clipped(g, "d f/tp"),
)
mistake(
    "parallel.clip_by_global_norm",
    "the layouts name an axis along which the gradient is equal",
    "d f/tp -> d f/tp",
    right=lambda g: clipped(g, "d f/tp"),
    wrong=lambda g: clipped(g, "d/dp f/tp"),
)
mistake(
    "parallel.clip_by_global_norm",
    "optax's norm inside the kernel: each device's own part",
    "d/dp f/tp -> d/dp f/tp",
    right=lambda g: clipped(g, "d/dp f/tp"),
    wrong=lambda g: g * jnp.minimum(1.0, 0.1 / jnp.sqrt(jnp.sum(g * g))),
)
mistake(
    "parallel.clip_by_global_norm",
    "the gradients of each device's rows are not summed yet",
    "b/dp d -> d",
    right=lambda x: clipped(spmd.reduce(x, "b/dp d -> d"), "d"),
    wrong=lambda x: spmd.psum(clipped(x.sum(0), "d"), "d {U:dp} -> d"),
)
mistake(
    "parallel.state_layouts",
    "the state of the optimizer is divided along another dimension than the parameter",
    "d/dp f, d/dp f -> d/dp f",
    wrong_pattern="d/dp f, d f/dp -> d/dp f",
    d=8,
    f=8,
    right=lambda w, momentum: w - 0.1 * momentum,
    wrong=lambda w, momentum: w - 0.1 * momentum.reshape(w.shape),
)

# --- pipelines --------------------------------------------------------------------------------------------------

PIPE = {"dp": 2, "pp": 2}
STAGES = "p/pp d f, m b/dp d -> m b/dp d"


def stage(w, x):
    return x + jnp.tanh(einsum(x, w, "b/dp d, d f -> b/dp f"))


def in_turn(w, x):
    for one in w.reshape(-1, *w.shape[-2:]):
        x = x + jnp.tanh(x @ one)
    return x


mistake(
    "parallel.pipeline",
    "pp= names the axis of the data",
    STAGES,
    mesh=PIPE,
    f=8,
    right=lambda w, x: parallel.pipeline(stage, w, x, pp="pp"),
    truth=in_turn,
    wrong=lambda w, x: parallel.pipeline(stage, w, x, pp="dp"),
)
mistake(
    "parallel.pipeline",
    "the parameters of all stages are on every device",
    STAGES,
    wrong_pattern="p d f, m b/dp d -> m b/dp d",
    mesh=PIPE,
    f=8,
    right=lambda w, x: parallel.pipeline(stage, w, x, pp="pp"),
    truth=in_turn,
    wrong=lambda w, x: parallel.pipeline(stage, w[:1], x, pp="pp"),
)
mistake(
    "parallel.pipeline",
    "repeats=: a device has layers 2i and 2i + 1 and works on them as on i and p + i",
    "v p/pp d f, m b/dp d -> m b/dp d",
    wrong_pattern="l/pp d f, m b/dp d -> m b/dp d",
    mesh=PIPE,
    v=2,
    f=8,
    right=lambda w, x: parallel.pipeline(stage, w, x, pp="pp", repeats=2),
    truth=in_turn,
    wrong=lambda w, x: parallel.pipeline(stage, w.reshape(2, 1, *w.shape[-2:]), x, pp="pp", repeats=2),
)
mistake(
    "parallel.pipeline",
    "the micro-batches are divided over pp and are not gathered",
    "p/pp d f, m b/dp/pp d -> m b/dp/pp d",
    mesh=PIPE,
    f=8,
    right=lambda w, x: spmd.psum_scatter(
        parallel.pipeline(stage, w, spmd.all_gather(x, "m b/dp/pp d -> m b/dp d"), pp="pp", result="partial"),
        "m b/dp d {U:pp} -> m b/dp/pp d",
    ),
    truth=in_turn,
    wrong=lambda w, x: parallel.pipeline(stage, w, x, pp="pp"),
)
mistake(
    "parallel.pipeline",
    'result="partial", and nobody sums it',
    STAGES,
    mesh=PIPE,
    f=8,
    right=lambda w, x: parallel.pipeline(stage, w, x, pp="pp"),
    truth=in_turn,
    wrong=lambda w, x: parallel.pipeline(stage, w, x, pp="pp", result="partial"),
)
mistake(
    "parallel.pipeline",
    'result="partial", and a nonlinear function is applied before the sum',
    STAGES,
    mesh=PIPE,
    f=8,
    right=lambda w, x: jnp.cos(parallel.pipeline(stage, w, x, pp="pp")),
    truth=lambda w, x: jnp.cos(in_turn(w, x)),
    wrong=lambda w, x: spmd.psum(
        jnp.cos(parallel.pipeline(stage, w, x, pp="pp", result="partial")), "m b/dp d {U:pp} -> m b/dp d"
    ),
)

# --- experts ----------------------------------------------------------------------------------------------------

EXPERTS = {"dp": 2, "ep": 2, "tp": 2}
MOE = "b/dp/ep s d, d e, e/ep d f/tp, e/ep f/tp d -> b/dp/ep s d, scalar"
ALL = {"dp": ("dp", "ep"), "ep": "ep", "tp": "tp"}


def experts(x, w, up, down, routing=None, **options):
    routing = parallel.router(x, w, k=2) if routing is None else routing
    told = ALL | {"groups": (4, 1), "capacity_factor": None} | options
    y, report = parallel.moe(x, routing, up, up, down, **told)
    return y, report.balance_loss + report.z_loss


def noisy(x, w, noise):
    return parallel.router(x, w, k=2, noise=noise)


mistake(
    "parallel.moe",
    "ep= is forgotten where ep divides the experts",
    MOE,
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down: experts(x, w, up, down),
    wrong=lambda x, w, up, down: experts(x, w, up, down, ep=None),
)
mistake(
    "parallel.moe",
    "dp= leaves out ep, which divides the batch too",
    MOE,
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down: experts(x, w, up, down),
    wrong=lambda x, w, up, down: experts(x, w, up, down, dp="dp"),
)
mistake(
    "parallel.moe",
    "dp= has the axes in another order",
    MOE,
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down: experts(x, w, up, down),
    wrong=lambda x, w, up, down: experts(x, w, up, down, dp=("ep", "dp")),
)
mistake(
    "parallel.moe",
    "tp= is forgotten where tp divides the hidden units",
    MOE,
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down: experts(x, w, up, down),
    wrong=lambda x, w, up, down: experts(x, w, up, down, tp=None),
)
mistake(
    "parallel.moe",
    "the batch is divided over ep first and dp second",
    MOE,
    wrong_pattern=MOE.replace("b/dp/ep", "b/ep/dp"),
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down: experts(x, w, up, down),
    wrong=lambda x, w, up, down: experts(x, w, up, down),
)
mistake(
    "parallel.moe",
    "sp= is forgotten where the stream is divided over the sequence",
    "b/dp/ep s/tp d, d e, e/ep d f, e/ep f d -> b/dp/ep s/tp d, scalar",
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down: experts(x, w, up, down, sp="tp", tp=None, groups=(4, 2)),
    wrong=lambda x, w, up, down: experts(x, w, up, down, tp=None),
)
mistake(
    "parallel.router",
    "the router's weights are divided like the experts",
    MOE,
    wrong_pattern=MOE.replace("d e,", "d e/ep,"),
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down: experts(x, w, up, down),
    wrong=lambda x, w, up, down: experts(x, w, up, down),
)
mistake(
    "parallel.router",
    "noise of jax.random: the same on all devices",
    MOE.replace("->", ", scalar ->"),
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down, key: experts(x, w, up, down, noisy(x, w, spmd.random.normal(key, "b/dp/ep s e", e=4))),
    wrong=lambda x, w, up, down, key: experts(
        x, w, up, down, noisy(x, w, jax.random.normal(key, (*x.shape[:2], w.shape[1])))
    ),
)
mistake(
    "parallel.router",
    "the loss of balance is computed from each device's own means",
    "b/dp s d, d e -> scalar",
    right=lambda x, w: balance(*(spmd.reduce(one, "b/dp s e -> e", "mean") for one in shares(x, w))),
    wrong=lambda x, w: spmd.reduce(
        balance(*(one.mean((0, 1)) for one in shares(x, w)))[None], "n/dp -> scalar", "mean"
    ),
)


def shares(x, w):
    """How often each expert is chosen by each token, and with which share."""
    routing = parallel.router(x, w, k=2)
    return jax.nn.one_hot(routing.experts, w.shape[1]).sum(2), routing.shares


def balance(load, share):
    return (load * share).sum()


# --- nn beside them ---------------------------------------------------------------------------------------------

mistake(
    "parallel.gather_einsum",
    "tp= names an axis that does not divide the sequence",
    "b/dp s/tp d, d f/tp -> b/dp s f/tp",
    right=lambda x, w: parallel.gather_einsum(x, w, tp="tp"),
    wrong=lambda x, w: parallel.gather_einsum(x, w, tp="dp"),
)
mistake(
    "parallel.einsum_scatter",
    "cp= is forgotten where cp divides the sequence",
    "b s/cp f/tp, f/tp d -> b s/cp/tp d",
    mesh={"cp": 2, "tp": 2},
    right=lambda h, w: parallel.einsum_scatter(h, w, tp="tp", cp="cp"),
    wrong=lambda h, w: parallel.einsum_scatter(h, w, tp="tp"),
)
mistake(
    "nn.spread_heads",
    "the heads are divided already",
    "b s g k -> b s g/tp k",
    wrong_pattern="b s g/tp k -> b s g/tp k",
    right=lambda k: nn.spread_heads(k, tp="tp"),
    wrong=lambda k: nn.spread_heads(k, tp="tp"),
)
