"""The router and the experts, with batch or sequence divided over ep, with and without sequence parallelism."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd import parallel
from tests.layers import Axes, LayerCase, cases, fit, placements, total

K = 2


def joined(*axes: Axes) -> Axes:
    """Several bindings one after another."""
    flat = [a for one in axes for a in ((one,) if isinstance(one, str) else one or ())]
    return tuple(flat) or None


def slashes(axes: Axes, without: Axes = None) -> str:
    """Axes as they are written in a layout."""
    return "".join(f"/{a}" for a in joined(axes) or () if a not in (joined(without) or ()))


# -------------------- written another way: every expert takes every token, and ranks come from running sums


def plain_choices(logits, k, scores="softmax", bias=None):
    """Scores that sum to 1, and k times the best of what is left: one-hot, with the weights."""
    scored = jax.nn.softmax(logits, -1) if scores == "softmax" else 1 / (1 + jnp.exp(-logits))
    shares = scored / scored.sum(-1, keepdims=True)
    left, e = scored if bias is None else scored + bias[None, None], logits.shape[-1]
    picks = []
    for _ in range(k):
        picks.append(jax.nn.one_hot(jnp.argmax(left, -1), e))
        left = jnp.where(picks[-1] > 0, -jnp.inf, left)
    weights = [(pick * scored).sum(-1) for pick in picks]
    return shares, picks, [w / sum(weights) for w in weights]


def into_groups(x, n, m):
    b, s, *rest = x.shape
    cut = x.reshape(n, b // n, m, s // m, *rest)
    return jnp.moveaxis(cut, 2, 1).reshape(n * m, (b // n) * (s // m), *rest)


def out_of_groups(x, n, m, b, s):
    cut = x.reshape(n, m, b // n, s // m, -1)
    return jnp.moveaxis(cut, 1, 2).reshape(b, s, -1)


def capacity(t, e, k, factor):
    return t if factor is None else min(t, math.ceil(factor * k * t / e))


@functools.partial(jax.jit, static_argnames=("groups", "factor", "scores", "k"))
def plain_moe(x, w, gate, up, down, *shared, groups, factor, scores="softmax", k=K):
    """GShard's dispatch mask, without its capacity dimension."""
    logits = x @ w
    shares, picks, weights = plain_choices(logits, k, scores)
    tokens = into_groups(x, *groups)
    e, t = w.shape[1], tokens.shape[1]
    hidden = jax.nn.silu(jnp.einsum("gtd,edf->gtef", tokens, gate)) * jnp.einsum("gtd,edf->gtef", tokens, up)
    results = jnp.einsum("gtef,efd->gted", hidden, down)
    taken, kept, out = jnp.zeros((tokens.shape[0], 1, e)), 0, 0
    for pick, weight in zip(picks, weights, strict=True):
        pick = into_groups(pick, *groups)
        rank = taken + jnp.cumsum(pick, axis=1) - pick
        taken = taken + pick.sum(1, keepdims=True)
        stays = jnp.where(rank < capacity(t, e, k, factor), pick, 0)
        kept = kept + stays.sum()
        out = out + jnp.einsum("gte,gt,gted->gtd", stays, into_groups(weight, *groups), results)
    out = out_of_groups(out, *groups, *x.shape[:2])
    if shared:
        out = out + (jax.nn.silu(x @ shared[0]) * (x @ shared[1])) @ shared[2]
    choices = x.shape[0] * x.shape[1] * k
    load = sum(pick.sum((0, 1)) for pick in picks) / choices
    balance = e * (load * shares.mean((0, 1))).sum()
    z = (jnp.log(jnp.exp(logits).sum(-1)) ** 2).mean()
    return out, balance, z, load, (choices - kept) / choices


# -------------------- the router


@cases("router", draw=2)
def _():
    """Its gradient is one psum of float32; with bias and sigmoid scores only the choice changes."""
    for i, (mesh, axes) in enumerate(placements("dp", "sp")):
        scores = ("softmax", "sigmoid")[i % 2]

        def fn(axes: Mapping[str, Axes], scores: str = scores) -> Any:
            def body(x, w, bias):
                found = parallel.router(x, w, k=K, scores=scores, bias=bias)
                return found.weights, found.shares, found.logits

            return body

        def plain(x, w, bias, scores=scores):
            logits = x @ w
            shares, _, weights = plain_choices(logits, K, scores, jax.lax.stop_gradient(bias))
            return jnp.stack(weights, -1), shares, logits

        yield LayerCase(
            name="router",
            fn=fn,
            ins=("b/dp s/sp d", "d e", "e"),
            outs=("b/dp s/sp k", "b/dp s/sp e", "b/dp s/sp e"),
            shapes={**fit(mesh, axes, b=(3, "dp"), s=(5, "sp")), "d": 7, "e": 6, "k": K},
            mesh=mesh,
            axes=axes,
            reference=plain,
            out_dtype="float32",
            label=scores,
            forward=lambda c: {},
            backward=lambda c: c.traffic("psum", ("dp", "sp"), "d e", dtype="float32"),
        )


# -------------------- the experts


def forward(c: LayerCase, shared: bool) -> Any:
    """Dispatch and combine, the report, and what tp costs. data and seq: all axes of batch and sequence."""
    return total(
        *(counts(c) if c.label.startswith("dropless") else []),
        c.traffic("all_to_all", "ep", "n/data m/seq p d", 2),
        c.traffic("psum", ("data", "seq"), "w", dtype="float32"),
        *(gathered(c, shared) if tp_in_sp(c) else [c.traffic("psum", "tp", "b/data s/seq d")]),
    )


def backward(c: LayerCase, shared: bool) -> Any:
    weights = slashes(joined(c.axes["data"], c.axes["seq"]), joined(c.axes["ep"], c.axes["tp"])).split("/")[1:]
    tokens = slashes(joined(c.axes["data"], c.axes["seq"]), c.axes["tp"]).split("/")[1:]
    beside = [c.traffic("psum", "tp", "b/data s/seq d"), c.traffic("psum", "tp", "b/data s/seq k", dtype="float32")]
    return total(
        c.traffic("all_to_all", "ep", "n/data m/seq p d", 2),
        *(gathered(c, shared) if tp_in_sp(c) else beside),
        c.traffic("psum", ("data", "seq"), "d e", dtype="float32"),
        c.traffic("psum", weights, "e/ep d f/tp", 3),
        *([c.traffic("psum", tokens, "d f/tp", 3)] if shared else []),
    )


def gathered(c: LayerCase, shared: bool) -> list[Any]:
    """With tp in sp: the places are gathered over tp and scattered back; for the shared expert the tokens are."""
    rest = slashes(c.axes["seq"], c.axes["tp"])
    layouts = [f"n/data m{rest} p d", *([f"b/data s{rest} d"] if shared else [])]
    return [c.traffic(kind, "tp", layout) for layout in layouts for kind in ("all_gather", "psum_scatter")]


def counts(c: LayerCase) -> list[Any]:
    """How many rows each device has for each expert, which all devices of ep, and of tp in sp, learn."""
    data, seq = slashes(c.axes["data"], c.axes["ep"]), slashes(c.axes["seq"], c.axes["ep"])
    rest = slashes(c.axes["seq"], joined(c.axes["ep"], c.axes["tp"]))
    near = c.traffic("all_gather", "ep", f"n{data} m{seq} e", dtype="int32")
    return [near, *([c.traffic("all_gather", "tp", f"n{data} m{rest} e", dtype="int32")] if tp_in_sp(c) else [])]


def tp_in_sp(c: LayerCase) -> bool:
    return bool({*(joined(c.axes["tp"]) or ())} & {*(joined(c.axes["seq"]) or ())})


def moe_case(
    mesh: Mapping[str, int], axes: Mapping[str, Axes], shared: bool, factor: float | None, more: int, label: str
) -> LayerCase:
    """A case with `more` groups for each block of tokens."""
    shapes = fit(
        mesh, axes, b=(2 * more, "data"), s=(3, "seq"), e=(3, "ep"), f=(4, "tp"), n=(more, "data"), m=(1, "seq")
    )
    groups, t, e = (shapes["n"], shapes["m"]), 6, shapes["e"]
    places = e // 3 * min(K, 3) * t if factor is None else e * capacity(t, e, K, factor)
    shapes |= {"d": 5, "k": K, "p": places, "w": 2 * e + 2}
    scores = "sigmoid" if shared else "softmax"

    def fn(axes: Mapping[str, Axes]) -> Any:
        def body(x, w, gate, up, down, *shared):
            routing = parallel.router(x, w, k=K, scores=scores)
            y, report = parallel.moe(
                x,
                routing,
                gate,
                up,
                down,
                shared=shared or None,
                groups=groups,
                capacity_factor=factor,
                dp=axes["data"],
                sp=axes["seq"],
                ep=axes["ep"],
                tp=axes["tp"],
            )
            return y.astype(jnp.float32), *report

        return body

    return LayerCase(
        name="moe",
        fn=fn,
        ins=("b/data s/seq d", "d e", "e/ep d f/tp", "e/ep d f/tp", "e/ep f/tp d")
        + (("d f/tp", "d f/tp", "f/tp d") if shared else ()),
        outs=("b/data s/seq d", "scalar", "scalar", "e", "scalar"),
        shapes=shapes,
        mesh=mesh,
        axes=axes,
        reference=lambda *args: plain_moe(*args, groups=groups, factor=factor, scores=scores),
        out_dtype="float32",
        label=label,
        forward=lambda c: forward(c, shared),
        backward=lambda c: backward(c, shared),
    )


def moe_placements() -> Iterator[tuple[str, dict[str, int], dict[str, Axes]]]:
    """ep on the batch or on the sequence, tp beside the tokens or in the sequence."""
    for mesh, axes in placements("dp", "ep", "tp"):
        dp, ep, tp = axes["dp"], axes["ep"], axes["tp"]
        own = {"ep": ep, "tp": tp}
        yield "batch", mesh, {"data": joined(dp, ep), "seq": None, **own}
        yield "megatron", mesh, {"data": joined(dp, ep), "seq": tp, **own}
        yield "sequence", mesh, {"data": dp, "seq": ep, **own}
        yield "both", mesh, {"data": dp, "seq": joined(tp, ep), **own}


@cases("moe", draw=4)
def _():
    for i, (label, mesh, axes) in enumerate(moe_placements()):
        shared = i % 3 == 0 and not (label == "both" and axes["ep"] and axes["tp"])
        yield moe_case(mesh, axes, shared, (1.0, 0.8, 0.6)[i // 3 % 3], 1 + i % 2, f"{label}{'-shared' * shared}")
    for i, (label, mesh, axes) in enumerate(moe_placements()):
        shared = i % 3 == 0 and not (label == "both" and axes["ep"] and axes["tp"])
        yield moe_case(mesh, axes, shared, None, 1, f"dropless-{label}")
