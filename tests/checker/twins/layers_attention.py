"""Attention, positions, masks, caches."""

import jax.numpy as jnp

import spmd
from spmd import nn, parallel
from tests.checker.twins.layers import mistake

CP = {"cp": 2, "tp": 2}
WEIGHTS = "d h/tp k, d g/tp k, d g/tp k, h/tp k d"
HEADS = "b s/cp h/tp k, b s/cp g/tp k, b s/cp g/tp k -> b s/cp h/tp k"
TURN = nn.rotary_frequencies(4)


def ring(q, k, v, **options):
    return parallel.ring_attention(q, k, v, cp="cp", tp="tp", causal=True, **options)


def layer(x, q, k, v, o, **options):
    return x + nn.multi_head_attention(x, q, k, v, o, **{"tp": "tp", **options})


mistake(
    "nn.multi_head_attention",
    "sp= is forgotten where the stream is divided over the sequence",
    f"b s/tp d, {WEIGHTS} -> b s/tp d",
    right=lambda x, q, k, v, o: layer(x, q, k, v, o, sp="tp", causal=True),
    wrong=lambda x, q, k, v, o: layer(x, q, k, v, o, causal=True),
)
mistake(
    "nn.multi_head_attention",
    "cp= and attend= are forgotten where cp divides the sequence",
    f"b s/cp d, {WEIGHTS} -> b s/cp d",
    mesh=CP,
    right=lambda x, q, k, v, o: layer(x, q, k, v, o, cp="cp", attend=ring),
    wrong=lambda x, q, k, v, o: layer(x, q, k, v, o, causal=True),
)
mistake(
    "nn.multi_head_attention",
    "cp= is given, and attend= is attention over each device's own tokens",
    f"b s/cp d, {WEIGHTS} -> b s/cp d",
    mesh=CP,
    right=lambda x, q, k, v, o: layer(x, q, k, v, o, cp="cp", attend=ring),
    wrong=lambda x, q, k, v, o: layer(
        x,
        q,
        k,
        v,
        o,
        cp="cp",
        attend=lambda q, k, v: nn.dot_product_attention(q, k, v, causal=True, tp="tp"),
    ),
)
mistake(
    "nn.multi_head_attention",
    "cp= is forgotten beside attend=, so the rotary positions start at 0 on each device",
    f"b s/cp d, {WEIGHTS} -> b s/cp d",
    mesh=CP,
    right=lambda x, q, k, v, o: layer(x, q, k, v, o, cp="cp", attend=ring, frequencies=TURN),
    wrong=lambda x, q, k, v, o: layer(x, q, k, v, o, attend=ring, frequencies=TURN),
)
mistake(
    "nn.multi_head_attention",
    "positions= are each device's own count",
    f"b s/cp d, {WEIGHTS} -> b s/cp d",
    mesh=CP,
    right=lambda x, q, k, v, o: layer(x, q, k, v, o, cp="cp", attend=ring, frequencies=TURN),
    wrong=lambda x, q, k, v, o: layer(
        x, q, k, v, o, cp="cp", attend=ring, frequencies=TURN, positions=jnp.arange(x.shape[1])
    ),
)
mistake(
    "nn.multi_head_attention",
    "the tokens are placed in zig-zag, and positions= are forgotten",
    f"b s/cp d, {WEIGHTS} -> b s/cp d",
    mesh=CP,
    right=lambda x, q, k, v, o: in_zigzag(
        x, q, k, v, o, positions=parallel.sequence_positions(spmd.size("s"), "zigzag", cp="cp")
    ),
    wrong=lambda x, q, k, v, o: in_zigzag(x, q, k, v, o),
)
mistake(
    "nn.multi_head_attention",
    "the sequence is divided over tp first and cp second, and the layer divides it over cp first",
    f"b s/tp/cp d, {WEIGHTS} -> b s/tp/cp d",
    mesh=CP,
    right=lambda x, q, k, v, o: spmd.relayout(
        layer(spmd.relayout(x, "b s/tp/cp d -> b s/cp/tp d"), q, k, v, o, cp="cp", sp="tp", attend=ring),
        "b s/cp/tp d -> b s/tp/cp d",
    ),
    wrong=lambda x, q, k, v, o: layer(x, q, k, v, o, cp="cp", sp="tp", attend=ring),
)
mistake(
    "nn.multi_head_attention",
    "fewer key heads than devices: whole keys, and kv_heads= is forgotten",
    "b s d, d h/tp k, d g k, d g k, h/tp k d -> b s d",
    g=2,
    h=8,
    mesh={"tp": 4},
    right=lambda x, q, k, v, o: layer(x, q, k, v, o, causal=True, kv_heads="whole"),
    wrong=lambda x, q, k, v, o: layer(x, q, k, v, o, causal=True),
)
mistake(
    "nn.multi_head_attention",
    'kv_heads="whole" where tp divides the key heads',
    f"b s d, {WEIGHTS} -> b s d",
    right=lambda x, q, k, v, o: layer(x, q, k, v, o, causal=True),
    wrong=lambda x, q, k, v, o: layer(x, q, k, v, o, causal=True, kv_heads="whole"),
)
mistake(
    "nn.dot_product_attention",
    "queries, keys and values are divided over the sequence",
    HEADS,
    mesh=CP,
    right=lambda q, k, v: ring(q, k, v),
    wrong=lambda q, k, v: nn.dot_product_attention(q, k, v, causal=True, tp="tp"),
)
mistake(
    "nn.dot_product_attention",
    "keys are gathered over cp, and the positions of the queries are each device's own count",
    HEADS,
    mesh=CP,
    right=lambda q, k, v: ring(q, k, v),
    wrong=lambda q, k, v: nn.dot_product_attention(
        q,
        *spmd.all_gather((k, v), "b s/cp g/tp k -> b s g/tp k"),
        causal=True,
        positions=(jnp.arange(q.shape[1]), jnp.arange(spmd.size("s"))),
        tp="tp",
    ),
)
mistake(
    "nn.dot_product_attention",
    "the bias of all heads is whole, and each device takes its first part",
    "b s h/tp k, b s g/tp k, h s t -> b s h/tp k",
    right=lambda q, k, bias: nn.dot_product_attention(q, k, k, bias=spmd.split(bias, "h s t -> h/tp s t"), tp="tp"),
    wrong=lambda q, k, bias: nn.dot_product_attention(q, k, k, bias=bias[: q.shape[2]], tp="tp"),
)
mistake(
    "nn.rotary_embedding",
    "positions= are each device's own count",
    "b s/cp h/tp k -> b s/cp h/tp k",
    mesh=CP,
    right=lambda q: nn.rotary_embedding(q, spmd.iota("s/cp"), TURN),
    wrong=lambda q: nn.rotary_embedding(q, jnp.arange(q.shape[1]), TURN),
)
mistake(
    "nn.rotary_embedding",
    "the features of a head are divided, and the first part of the frequencies is taken",
    "b s h k/tp -> b s h k/tp",
    right=lambda q: spmd.split(
        nn.rotary_embedding(spmd.all_gather(q, "b s h k/tp -> b s h k"), spmd.iota("s"), TURN), "b s h k -> b s h k/tp"
    ),
    wrong=lambda q: nn.rotary_embedding(q, spmd.iota("s"), TURN[: q.shape[-1] // 2]),
)
mistake(
    "nn.attention_mask",
    "a causal mask of each device's own count, for keys that were gathered over cp",
    HEADS,
    mesh=CP,
    right=lambda q, k, v: ring(q, k, v),
    wrong=lambda q, k, v: nn.dot_product_attention(
        q,
        *spmd.all_gather((k, v), "b s/cp g/tp k -> b s g/tp k"),
        mask=nn.attention_mask((jnp.arange(q.shape[1]), jnp.arange(spmd.size("s"))), causal=True)[None, None],
        tp="tp",
    ),
)
mistake(
    "parallel.ring_attention",
    "cp=None where cp divides the sequence",
    HEADS,
    mesh=CP,
    right=lambda q, k, v: ring(q, k, v),
    wrong=lambda q, k, v: parallel.ring_attention(q, k, v, cp=None, tp="tp", causal=True),
)
mistake(
    "parallel.ring_attention",
    "the tokens are placed in zig-zag, and placement= is forgotten",
    HEADS,
    mesh=CP,
    right=lambda q, k, v: parallel.restore_sequence(
        ring(*(placed(x) for x in (q, k, v)), placement="zigzag"), "zigzag", cp="cp", axis=1
    ),
    wrong=lambda q, k, v: parallel.restore_sequence(ring(*(placed(x) for x in (q, k, v))), "zigzag", cp="cp", axis=1),
)
mistake(
    "parallel.ring_attention",
    "the tokens are placed in zig-zag, and the rotary positions are contiguous",
    HEADS,
    mesh=CP,
    right=lambda q, k, v: parallel.restore_sequence(
        ring(*turned(q, k, "zigzag"), placed(v), placement="zigzag"), "zigzag", cp="cp", axis=1
    ),
    wrong=lambda q, k, v: parallel.restore_sequence(
        ring(*turned(q, k, "contiguous"), placed(v), placement="zigzag"), "zigzag", cp="cp", axis=1
    ),
)
mistake(
    "parallel.place_sequence",
    "axis= names the features, which cp does not divide",
    "b s/cp d -> b s/cp d",
    mesh={"cp": 2, "dp": 2},
    right=lambda x: parallel.place_sequence(x, "zigzag", cp="cp", axis=1) - x,
    truth=lambda x: jnp.take(x, parallel.sequence_order(8, 2, "zigzag"), axis=1) - x,
    wrong=lambda x: parallel.place_sequence(x, "zigzag", cp="cp", axis=2) - x,
)
mistake(
    "parallel.ulysses_attention",
    "cp=None where cp divides the sequence",
    HEADS,
    mesh=CP,
    right=lambda q, k, v: parallel.ulysses_attention(q, k, v, cp="cp", tp="tp", causal=True),
    wrong=lambda q, k, v: parallel.ulysses_attention(q, k, v, cp=None, tp="tp", causal=True),
)


def placed(x):
    return parallel.place_sequence(x, "zigzag", cp="cp", axis=1)


def in_zigzag(x, *weights, **options):
    """A layer whose tokens are placed in zig-zag before it, and restored behind it."""
    attend = lambda q, k, v: ring(q, k, v, placement="zigzag")
    y = layer(placed(x), *weights, cp="cp", attend=attend, frequencies=TURN, **options)
    return parallel.restore_sequence(y, "zigzag", cp="cp", axis=1)


def turned(q, k, placement):
    at = parallel.sequence_positions(spmd.size("s"), placement, cp="cp")
    return [nn.rotary_embedding(placed(x), at, TURN) for x in (q, k)]
