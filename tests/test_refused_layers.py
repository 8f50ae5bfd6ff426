"""Wrong calls of layers that are refused while they are traced: by the layer, by a verb in it, or by JAX's types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import all_gather, einsum, nn, parallel
from spmd.errors import SpmdError
from spmd.language import Pattern
from tests.checker.twins.layers import SIZES
from tests.checker.twins.layers_attention import HEADS, WEIGHTS
from tests.checker.twins.layers_linear import MLP
from tests.checker.twins.layers_loss import LOSS
from tests.checker.twins.layers_parallel import (
    ALL,
    EXPERTS,
    MOE,
    PIPE,
    STAGES,
    STEP,
    accumulated,
    clipped,
    squares,
    stage,
)
from tests.checker.twins.registry import Pair
from tests.sampler import share

REFUSED: dict[str, Pair] = {}


def refused(
    what: str, pattern: str, call: Callable[..., Any], mesh: Mapping[str, int] | None = None, **sizes: int
) -> None:
    """Register a wrong call. `sizes` are those that differ from `SIZES`."""
    assert what not in REFUSED, f"two are named {what}"
    REFUSED[what] = Pair(what, Pattern(pattern), dict(mesh or {"dp": 2, "tp": 2}), {**SIZES, "l": 2, **sizes}, call)


# -------------------- attention

CP = {"cp": 2, "tp": 2}


def attention_layer(x, q, k, v, o, **options):
    return x + nn.multi_head_attention(x, q, k, v, o, **{"tp": "tp", **options})


def decoded(k, *, keys=None, make=None, append=None, read=None):
    """All tokens are written into a cache, and read by queries that are the keys."""
    make, append, read = ({"cp": "cp", "tp": "tp"} | (one or {}) for one in (make, append, read))
    at = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    heads = spmd.size("g")
    cache = nn.kv_cache(spmd.size("b"), spmd.size("t"), heads, k.shape[-1], **make)
    cache = nn.kv_cache_append(cache, keys if keys is not None else k, k, at, **append)
    return nn.cached_attention(k, cache, at, **read)


CACHE = "b t g/tp k -> b t g/tp k"

refused(
    "nn.multi_head_attention: tp= is forgotten: the heads of other devices are never added",
    f"b s d, {WEIGHTS} -> b s d",
    lambda x, q, k, v, o: attention_layer(x, q, k, v, o, causal=True, tp=None),
)
refused(
    "nn.multi_head_attention: the output projection is divided along d instead of along the heads",
    "b s d, d h/tp k, d g/tp k, d g/tp k, h k d/tp -> b s d",
    lambda x, q, k, v, o: attention_layer(x, q, k, v, o, causal=True),
)
refused(
    "nn.multi_head_attention: key heads that do not divide the query heads",
    "b s d, d h/tp k, d g/tp k, d g/tp k, h/tp k d -> b s d",
    lambda x, q, k, v, o: attention_layer(x, jnp.repeat(q, 3, 1)[:, :3], k, v, o, causal=True),
)
refused(
    "nn.dot_product_attention: tp= is forgotten where tp divides the heads",
    "b s h/tp k, b s g/tp k, b s g/tp k -> b s h/tp k",
    lambda q, k, v: nn.dot_product_attention(q, k, v),
)
refused(
    "parallel.ring_attention: tp= is forgotten where tp divides the heads",
    HEADS,
    lambda q, k, v: parallel.ring_attention(q, k, v, cp="cp", causal=True),
    mesh=CP,
)
refused(
    "nn.cached_attention: cp= is forgotten where cp divides the slots",
    CACHE,
    lambda k: decoded(k, read={"cp": None}),
    mesh=CP,
)
refused(
    "nn.kv_cache_append: cp= is forgotten where cp divides the slots",
    CACHE,
    lambda k: decoded(k, append={"cp": None}),
    mesh=CP,
)
refused(
    "nn.kv_cache: the cache is whole, and the other calls divide it over cp",
    CACHE,
    lambda k: decoded(k, make={"cp": None}),
    mesh=CP,
)
refused(
    "nn.kv_cache: the heads of the cache are divided over cp and its slots over tp",
    CACHE,
    lambda k: decoded(k, make={"cp": "tp", "tp": "cp"}),
    mesh=CP,
)
refused(
    'nn.kv_cache_append: tokens="striped" for tokens that every device of cp has',
    CACHE,
    lambda k: decoded(k, append={"tokens": "striped"}),
    mesh=CP,
)
refused(
    "nn.cached_attention: tp= is forgotten where tp divides the heads",
    CACHE,
    lambda k: decoded(k, read={"tp": None}),
    mesh=CP,
)

# -------------------- linear


refused("nn.mlp: tp= is forgotten", MLP, lambda x, a, c: nn.mlp(x, a, c))
refused(
    "nn.mlp: tp= names the axis of the batch",
    "b/dp s d, d f/tp, f/tp d -> b/dp s d",
    lambda x, a, c: nn.mlp(x, a, c, tp="dp"),
)
refused("nn.mlp: w_in is divided along d", "b s d, d/tp f, f/tp d -> b s d", lambda x, a, c: nn.mlp(x, a, c, tp="tp"))
refused("nn.mlp: w_out is divided along d", "b s d, d f/tp, f d/tp -> b s d", lambda x, a, c: nn.mlp(x, a, c, tp="tp"))
refused(
    "nn.mlp: the weights rest divided over dp and are not gathered",
    "b/dp s d, d/dp f/tp, f/tp d/dp -> b/dp s d",
    lambda x, a, c: nn.mlp(x, a, c, tp="tp"),
)
refused(
    "nn.mlp: b_in is whole", "b s d, d f/tp, f/tp d, f -> b s d", lambda x, a, c, bias: nn.mlp(x, a, c, bias, tp="tp")
)
refused(
    "nn.mlp: cp= is forgotten, and cp is the major axis of the sequence",
    "b s/cp/tp d, d f/tp, f/tp d -> b s/cp/tp d",
    lambda x, a, c: nn.mlp(x, a, c, tp="tp", sp="tp"),
    mesh={"cp": 2, "tp": 2},
)
refused(
    "nn.mlp: sp= names cp instead of tp",
    "b s/cp/tp d, d f/tp, f/tp d -> b s/cp/tp d",
    lambda x, a, c: nn.mlp(x, a, c, tp="tp", sp="cp", cp="tp"),
    mesh={"cp": 2, "tp": 2},
)
refused(
    "nn.mlp: the stream is gathered by hand, and again by sp=",
    "b s/tp d, d f/tp, f/tp d -> b s/tp d",
    lambda x, a, c: nn.mlp(all_gather(x, "b s/tp d -> b s d"), a, c, tp="tp", sp="tp")[:, : x.shape[1]],
)
refused("nn.column_linear: tp= is forgotten", "b s d, d f/tp -> b s f/tp", lambda x, w: nn.column_linear(x, w))
refused(
    "nn.column_linear: sp= is forgotten where the stream is divided over the sequence",
    "b s/tp d, d f/tp -> b s f/tp",
    lambda x, w: nn.column_linear(x, w, tp="tp"),
)
refused(
    "nn.row_linear: tp= is forgotten: nobody sums the parts",
    "b s f/tp, f/tp d -> b s d",
    lambda x, w: nn.row_linear(x, w),
)
refused(
    "nn.row_linear: sp= is forgotten, and the result is added to a stream divided over the sequence",
    "b s f/tp, f/tp d, b s/tp d -> b s/tp d",
    lambda h, w, x: x + nn.row_linear(h, w, tp="tp"),
)
refused(
    "nn.row_linear: its input is divided over the sequence, not over the rows",
    "b s/tp f, f/tp d -> b s d",
    lambda h, w: nn.row_linear(h[..., : w.shape[0]], w, tp="tp"),
)
refused(
    "nn.row_linear: the bias is added to each device's part, before the sum",
    "b s f/tp, f/tp d, d -> b s d",
    lambda h, w, bias: spmd.psum(spmd.einsum(h, w, "b s f/tp, f/tp d -> b s d {U:tp}") + bias, "b s d {U:tp} -> b s d"),
)
refused(
    "nn.row_linear: the bias is divided over tp",
    "b s f/tp, f/tp d, d/tp -> b s d",
    lambda h, w, bias: nn.row_linear(h, w, bias, tp="tp"),
)
refused(
    "nn.rms_norm: the scale rests divided and is not gathered",
    "b/dp s d, d/dp -> b/dp s d",
    lambda x, scale: nn.rms_norm(x, scale),
)
refused(
    "nn.dropout: each device of tp has its own key, and they hold the same stream",
    "b/dp s d, scalar -> b/dp s d",
    lambda x, key: nn.dropout(x, jax.random.fold_in(key, spmd.axis_index("tp")), "b/dp s d", rate=0.5),
)

# -------------------- loss


refused(
    "nn.embedding: tp= is forgotten where tp divides the vocabulary",
    "b s, v/tp d -> b s d",
    lambda ids, table: nn.embedding(ids, table),
)
refused("nn.unembedding: tp= is forgotten", "b s d, v/tp d -> b s v/tp", lambda x, table: nn.unembedding(x, table))
refused(
    'nn.cross_entropy: reduction="none", and the mean of each device is returned as the loss',
    LOSS,
    lambda logits, labels: jnp.mean(nn.cross_entropy(logits, labels, reduction="none", tp="tp")),
)
refused(
    "nn.cross_entropy: dp= names an axis along which the rows are copies",
    "b s v/tp, b s -> scalar",
    lambda logits, labels: nn.cross_entropy(logits, labels, reduction="sum", tp="tp", dp="dp"),
)
refused(
    "nn.cross_entropy: the logits were gathered, and tp= is given all the same",
    LOSS,
    lambda logits, labels: nn.cross_entropy(
        spmd.all_gather(logits, "b/dp s v/tp -> b/dp s v"), labels, tp="tp", dp="dp"
    ),
)

# -------------------- parallel

REST = "b/dp d, d/dp f/tp -> b/dp f/tp"

STACK = "b/dp d, l d/dp f, l d -> b/dp d"


def multiplied(x, w):
    return einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")


def layer(w, x):
    return x + jnp.tanh(einsum(x * w["n"][None], w["w"], "b/dp d, d f -> b/dp f"))


def stack(x, w, n, **options):
    told = {"at_rest": {"w": "l d/dp f", "n": "l d"}, "compute": {"w": "l d f", "n": "l d"}} | options
    return parallel.scan_layers(layer, {"w": w, "n": n}, x, **told)


def experts(x, w, up, down, routing=None, **options):
    routing = parallel.router(x, w, k=2) if routing is None else routing
    told = ALL | {"groups": (4, 1), "capacity_factor": None} | options
    y, report = parallel.moe(x, routing, up, up, down, **told)
    return y, report.balance_loss + report.z_loss


refused(
    "parallel.gather: the layout in use forgets tp, so the columns are gathered too",
    REST,
    lambda x, w: multiplied(x, parallel.gather(w, "d/dp f/tp", "d f", data=("dp", "tp"))),
)
refused(
    "parallel.gather: the layout at rest divides the other dimension",
    REST,
    lambda x, w: multiplied(x, parallel.gather(w, "d f/tp/dp", "d f/tp")),
)
refused(
    "parallel.gather: data= leaves out an axis over which the weights are gathered",
    "b/dp/fs d, d/dp/fs f -> b/dp/fs f",
    lambda x, w: einsum(x, parallel.gather(w, "d/dp/fs f", "d f", data="dp"), "b/dp/fs d, d f -> b/dp/fs f"),
    mesh={"dp": 2, "fs": 2},
)
refused(
    "parallel.scan_layers: the layouts forget the dimension of the layers",
    STACK,
    lambda x, w, n: stack(x, w, n, at_rest={"w": "d/dp f", "n": "d"}, compute={"w": "d f", "n": "d"}),
    f=8,
)
refused(
    "parallel.scan_layers: the layouts at rest and in use are exchanged",
    STACK,
    lambda x, w, n: stack(
        x, w, n, at_rest={"w": "l d f", "n": "l d"}, compute={"w": "l d/dp f", "n": "l d"}, data="dp"
    ),
    f=8,
)
refused(
    "parallel.scan_layers: the scales rest divided, and their layout says whole",
    "b/dp d, l d/dp f, l d/dp -> b/dp d",
    lambda x, w, n: stack(x, w, n),
    f=8,
)
refused(
    "parallel.reduce_gradients: the gradients are complete already",
    "b/dp d -> d/dp",
    lambda x: parallel.reduce_gradients(spmd.reduce(x, "b/dp d -> d"), "d/dp", "d"),
)
refused(
    "parallel.reduce_gradients: data= leaves out an axis that divides the batch",
    "b/dp/fs d -> d/fs",
    lambda x: parallel.reduce_gradients(x.sum(0), "d/fs", "d"),
    mesh={"dp": 2, "fs": 2},
)
refused("parallel.accumulate: data= is empty", STEP, lambda w, x: accumulated(w, x, data=()))
refused(
    "parallel.accumulate: data= leaves out an axis that divides the batch",
    "d/dp, m b/dp/fs d -> d/dp",
    lambda w, x: accumulated(w, x, loss=lambda w, x: squares(w, x).sum()),
    mesh={"dp": 2, "fs": 2},
)
refused(
    "parallel.accumulate: the loss is reduced already",
    STEP,
    lambda w, x: accumulated(w, x, loss=lambda w, x: spmd.reduce(squares(w, x), "b/dp d -> scalar")),
)
refused(
    "parallel.accumulate: the loss is a sum, and its count is forgotten",
    STEP,
    lambda w, x: accumulated(w, x, mean=True),
)
refused(
    "parallel.clip_by_global_norm: the layouts name an axis along which the gradient is equal",
    "d f/tp -> d f/tp",
    lambda g: clipped(g, "d/dp f/tp"),
)
refused(
    "parallel.pipeline: pp= names the axis of the data",
    STAGES,
    lambda w, x: parallel.pipeline(stage, w, x, pp="dp"),
    mesh=PIPE,
    f=8,
)
refused(
    "parallel.pipeline: the parameters of all stages are on every device",
    "p d f, m b/dp d -> m b/dp d",
    lambda w, x: parallel.pipeline(stage, w[:1], x, pp="pp"),
    mesh=PIPE,
    f=8,
)
refused(
    "parallel.pipeline: repeats=: a device has layers 2i and 2i + 1 and works on them as on i and p + i",
    "l/pp d f, m b/dp d -> m b/dp d",
    lambda w, x: parallel.pipeline(stage, w.reshape(2, 1, *w.shape[-2:]), x, pp="pp", repeats=2),
    mesh=PIPE,
    v=2,
    f=8,
)
refused(
    "parallel.pipeline: the micro-batches are divided over pp and are not gathered",
    "p/pp d f, m b/dp/pp d -> m b/dp/pp d",
    lambda w, x: parallel.pipeline(stage, w, x, pp="pp"),
    mesh=PIPE,
    f=8,
)
refused(
    'parallel.pipeline: result="partial", and nobody sums it',
    STAGES,
    lambda w, x: parallel.pipeline(stage, w, x, pp="pp", result="partial"),
    mesh=PIPE,
    f=8,
)
refused(
    "parallel.moe: ep= is forgotten where ep divides the experts",
    MOE,
    lambda x, w, up, down: experts(x, w, up, down, ep=None),
    mesh=EXPERTS,
    b=8,
)
refused(
    "parallel.moe: dp= leaves out ep, which divides the batch too",
    MOE,
    lambda x, w, up, down: experts(x, w, up, down, dp="dp"),
    mesh=EXPERTS,
    b=8,
)
refused(
    "parallel.moe: dp= has the axes in another order",
    MOE,
    lambda x, w, up, down: experts(x, w, up, down, dp=("ep", "dp")),
    mesh=EXPERTS,
    b=8,
)
refused(
    "parallel.moe: tp= is forgotten where tp divides the hidden units",
    MOE,
    lambda x, w, up, down: experts(x, w, up, down, tp=None),
    mesh=EXPERTS,
    b=8,
)
refused(
    "parallel.moe: the batch is divided over ep first and dp second",
    MOE.replace("b/dp/ep", "b/ep/dp"),
    lambda x, w, up, down: experts(x, w, up, down),
    mesh=EXPERTS,
    b=8,
)
refused(
    "parallel.moe: sp= is forgotten where the stream is divided over the sequence",
    "b/dp/ep s/tp d, d e, e/ep d f, e/ep f d -> b/dp/ep s/tp d, scalar",
    lambda x, w, up, down: experts(x, w, up, down, tp=None),
    mesh=EXPERTS,
    b=8,
)
refused(
    "parallel.router: the router's weights are divided like the experts",
    MOE.replace("d e,", "d e/ep,"),
    lambda x, w, up, down: experts(x, w, up, down),
    mesh=EXPERTS,
    b=8,
)
refused(
    "nn.spread_heads: the heads are divided already", "b s g/tp k -> b s g/tp k", lambda k: nn.spread_heads(k, tp="tp")
)


@pytest.mark.parametrize("what", share(REFUSED))
def test_a_wrong_call_is_refused(what: str) -> None:
    one = REFUSED[what]
    kernel, args = one.kernel(one.mistaken, check="off"), one.arguments()
    with pytest.raises((SpmdError, TypeError, ValueError)):
        jax.eval_shape(kernel, *args)
