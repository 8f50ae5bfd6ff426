"""Weights at rest, micro-batches, optimizers, pipelines, experts."""

import jax
import jax.numpy as jnp

import spmd
from spmd import einsum, parallel
from tests.checker.twins.layers import mistake

# --- weights at rest --------------------------------------------------------------------------------------------

mistake(
    "parallel.gather",
    "the layout at rest has the axes in another order",
    "b/dp/fs d, d/dp/fs f -> b/dp/fs f",
    mesh={"dp": 2, "fs": 2},
    right=lambda x, w: einsum(x, parallel.gather(w, "d/dp/fs f", "d f"), "b/dp/fs d, d f -> b/dp/fs f"),
    wrong=lambda x, w: einsum(x, parallel.gather(w, "d/fs/dp f", "d f"), "b/dp/fs d, d f -> b/dp/fs f"),
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
    "the loss is the mean of each device's rows",
    STEP,
    right=lambda w, x: accumulated(
        w, x, loss=lambda w, x: (spmd.reduce(squares(w, x), "b/dp d -> {U:dp}"), squares(w, x).size), mean=True
    ),
    truth=lambda w, x: jax.grad(lambda w: jnp.mean((x * w[None, None]) ** 2))(w),
    wrong=lambda w, x: accumulated(w, x, loss=lambda w, x: squares(w, x).mean()),
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
    "d/dp f, d f/dp -> d/dp f",
    d=8,
    f=8,
    right=lambda w, momentum: w - 0.1 * spmd.relayout(momentum, "d f/dp -> d/dp f"),
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


def experts(x, w, up, down, noise):
    routing = parallel.router(x, w, k=2, noise=noise)
    y, report = parallel.moe(x, routing, up, up, down, groups=(4, 1), capacity_factor=None, **ALL)
    return y, report.balance_loss + report.z_loss


mistake(
    "parallel.router",
    "noise of jax.random: the same on all devices",
    MOE.replace("->", ", scalar ->"),
    mesh=EXPERTS,
    b=8,
    right=lambda x, w, up, down, key: experts(x, w, up, down, spmd.random.normal(key, "b/dp/ep s e", e=4)),
    wrong=lambda x, w, up, down, key: experts(x, w, up, down, jax.random.normal(key, (*x.shape[:2], w.shape[1]))),
)


# --- nn beside them ---------------------------------------------------------------------------------------------

mistake(
    "parallel.gather_einsum",
    "tp= names an axis that does not divide the sequence",
    "b/dp s/tp d, d f/tp -> b/dp s f/tp",
    right=lambda x, w: parallel.gather_einsum(x, w, tp="tp"),
    wrong=lambda x, w: parallel.gather_einsum(x, w, tp="dp"),
)
