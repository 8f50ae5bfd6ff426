"""Attention over divided sequences: rings, Ulysses, and their product."""

import itertools
import math
from dataclasses import replace

import numpy as np

from spmd import parallel
from tests.layers import LayerCase, cases, fit, in_order, placements, total
from tests.nn.dense import dense_attention, placed_order

QUERIES, KEYS, VALUES = "b/dp s/cp h/tp k", "b/dp t/cp g/tp k", "b/dp t/cp g/tp j"
RESULT = "b/dp s/cp h/tp j"


def documents(rng, shape):
    """A few documents in each row, not sorted: any numbers do."""
    return rng.integers(0, 3, size=shape).astype(np.int32)


def made(rng, shapes):
    """Queries, keys, values, and segments if there are any."""
    return [rng.normal(size=x).astype(np.float32) if len(x) == 4 else documents(rng, x) for x in shapes]


# -------------------- the ring

# Few, since each is compiled many times, and full: what is together here goes wrong together.
RINGS = {
    "window-chunks": {"causal": True, "window": 5, "chunk": 2, "segments": True},
    "both-ways": {"placement": "zigzag", "window": 3, "segments": True, "softcap": 1.5},
}
BALANCED = {
    "zigzag": {"causal": True, "placement": "zigzag", "segments": True},
    "striped": {"causal": True, "placement": "striped", "window": 5, "softcap": 2.0},
}


def ring_case(label, options, mesh, axes):
    options = dict(options)
    with_segments = options.pop("segments", False)
    sizes = fit(mesh, axes, b=(2, "dp"), s=(4, "cp"), h=(6, "tp"), g=(2, "tp"), k=(3,), j=(5,), u=(8,))
    sizes["t"] = sizes["s"]
    blocks = sizes["s"] // 4
    order = placed_order(sizes["s"], blocks, options.get("placement", "contiguous"))
    known = {name: x for name, x in options.items() if name not in ("placement", "chunk")}

    def body(axes):
        where = {"cp": axes["cp"], "tp": axes["tp"], **options}
        return lambda q, k, v, *more: parallel.ring_attention(q, k, v, segments=more[0] if more else None, **where)

    def reference(q, k, v, *more):
        return dense_attention(q, k, v, positions=order, segments=more[0] if more else None, **known)

    hops = blocks - 1
    if known.get("causal") and "window" in known and "placement" not in options:
        hops = min(hops, math.ceil((known["window"] - 1) / 4))

    both = "b/dp t/cp g/tp u"  # joined

    def forward(c):
        travel = [c.traffic("ppermute", "cp", x, hops) for x in (KEYS, VALUES)]
        return total(*travel, c.traffic("all_gather", "cp", "b/dp s", int(with_segments), dtype="int32"))

    def backward(c):
        there = c.traffic("ppermute", "cp", both, hops)
        gradients = c.traffic("ppermute", "cp", both, hops, dtype="float32")
        return total(there, gradients, c.traffic("ppermute", "cp", both, min(hops, 1)))

    return LayerCase(
        name="ring_attention",
        fn=body,
        ins=(QUERIES, KEYS, VALUES, *(["b/dp s/cp"] if with_segments else [])),
        outs=RESULT,
        shapes=sizes,
        mesh=mesh,
        axes=axes,
        reference=reference,
        forward=forward,
        backward=backward,
        make=made,
        build=in_order(options.get("placement", "contiguous"), "cp"),
        label=label,
    )


@cases("ring_attention", draw=2)
def _():
    for (label, options), (mesh, axes) in itertools.product(RINGS.items(), placements("dp", "tp", "cp")):
        yield ring_case(label, options, mesh, axes)


@cases("ring_attention_balanced", draw=1)
def _():
    """Zig-zag and striped under a causal mask, where half blocks are left out."""
    for (label, options), (mesh, axes) in itertools.product(BALANCED.items(), placements("dp", "tp", "cp")):
        if axes["cp"]:
            yield replace(ring_case(label, options, mesh, axes), name="ring_attention_balanced")


# -------------------- Ulysses, and its product with a ring

ALL = "b/dp s/ring/cp"


def ulysses_case(label, options, mesh, axes, groups):
    """q, k and v in s/ring/cp; `groups` key heads per device of tp, fewer than those of cp or more."""
    sizes = fit(mesh, axes, b=(2, "dp"), s=(2, "ring", "cp"), h=(groups, "tp", "cp"), g=(groups, "tp"), k=(3,))
    n = fit(mesh, axes, n=(1, "cp"))["n"]
    sizes["n"] = sizes["g"] // groups * math.lcm(groups, n)  # heads that are sent
    blocks = fit(mesh, axes, n=(1, "ring"))["n"]
    order = placed_order(sizes["s"], blocks, options.get("placement", "contiguous"))
    known = {name: x for name, x in options.items() if name != "placement"}

    def body(axes):
        where = {name: axes[name] for name in ("cp", "ring", "tp")}
        return lambda q, k, v, segments: parallel.ulysses_attention(q, k, v, segments=segments, **where, **options)

    def reference(q, k, v, segments):
        return dense_attention(q, k, v, positions=order, segments=segments, **known)

    def exchanged(c):
        queries = c.traffic("all_to_all", "cp", f"{ALL} h/tp k", 2)
        return total(queries, c.traffic("all_to_all", "cp", f"{ALL} n/tp k", 2))

    sent = "b/dp s/ring n/tp/cp"

    def forward(c):
        documents = c.traffic("all_gather", "cp", "b/dp s/ring", dtype="int32")
        everyones = c.traffic("all_gather", "ring", "b/dp s", dtype="int32")
        return total(exchanged(c), documents, everyones, c.traffic("ppermute", "ring", f"{sent} k", 2 * (blocks - 1)))

    def backward(c):
        there = c.traffic("ppermute", "ring", f"{sent} k", 2 * (blocks - 1))  # in half as many permutes
        back = c.traffic("ppermute", "ring", f"{sent} k", 2 * (blocks - 1), dtype="float32")
        home = c.traffic("ppermute", "ring", f"{sent} k", 2 * min(blocks - 1, 1))
        joined = {key: (count // 2, size) for key, (count, size) in total(there, back, home).items()}
        return total(exchanged(c), joined)

    return LayerCase(
        name="ulysses_attention",
        fn=body,
        ins=(f"{ALL} h/tp k", f"{ALL} g/tp k", f"{ALL} g/tp k", ALL),
        outs=f"{ALL} h/tp k",
        shapes=sizes,
        mesh=mesh,
        axes=axes,
        reference=reference,
        forward=forward,
        backward=backward,
        make=made,
        build=in_order(options.get("placement", "contiguous"), "ring"),
        label=label,
    )


@cases("ulysses_attention", draw=1)
def _():
    """As many key heads as devices, fewer, and numbers that do not divide each other."""
    for mesh, axes in placements("dp", "tp", "cp"):
        for groups in (1, 2, 3):
            yield ulysses_case(f"g{groups}", {"causal": True}, mesh, {**axes, "ring": None}, groups)


@cases("ulysses_in_a_ring", draw=1)
def _():
    """Both axes divide the sequence; the tokens in their order and in zig-zag."""
    for mesh, axes in placements("dp", "tp", "ring", "cp"):
        if not axes["ring"] or not axes["cp"]:
            continue
        for placement, groups in itertools.product(("contiguous", "zigzag"), (1, 2, 3)):
            options = {"causal": True, "placement": placement}
            case = ulysses_case(f"{placement}-g{groups}", options, mesh, axes, groups)
            yield replace(case, name="ulysses_in_a_ring")
