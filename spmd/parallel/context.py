"""Context parallelism: attention over a sequence that no device holds whole."""

from __future__ import annotations

import math
from typing import Any

import jax

from spmd import all_gather, all_to_all, axis_size, rearrange, repeat, scope, size
from spmd.comm._marks import ordered
from spmd.errors import LayoutError, SizeError
from spmd.language import axes_tuple
from spmd.nn import dot_product_attention
from spmd.nn.attention import check_heads, check_positive
from spmd.parallel._ring import Ring, attend_in_ring
from spmd.parallel.sequence import Placement, check_placement

Axes = str | tuple[str, ...] | None


@scope(mapping=None)
def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cp: Axes,
    tp: Axes = None,
    causal: bool = False,
    window: int | None = None,
    segments: Any = None,
    placement: Placement = "contiguous",
    scale: float | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """Attention over a divided sequence: keys and values go round a ring, a block at a time, and queries stay.

    The result is exact, with an online softmax in float32. No device ever holds all keys or all values. It only holds
    the scores of its own queries with one block of keys (with `chunk`, one chunk of the block). The next block travels
    while one is worked on.

    Layouts: q `"... s/cp h/tp k"`, k and v `"... t/cp g/tp k"`, where g divides h (grouped queries: keys are not
    repeated before they are sent), segments `"... s/cp"`, result `"... s/cp h/tp k"`. The tokens of each block are
    those of `placement`, as `sequence_order` or `place_sequence` arrange them.

    Balance: under a causal mask a contiguous ring waits for its last device, which has work in each hop. The others
    skip the blocks that are hidden from them, and wait. This saves energy, and time where devices share cores. Auto and
    reference mode, where arrays are whole, skip nothing. Zig-zag and striped give all devices the same work, and skip
    half blocks that the mask hides on all devices: of the 4n products of half blocks on a device, zig-zag computes 2n +
    1 and striped 3n.

    Communication, for blocks of K and V bytes on n devices of cp: forward n-1 hops, each two collective-permutes of K +
    V bytes: (n-1)(K+V). Backward, keys and values go round again, followed by their gradients in float32, which then
    return to their owner in the dtype of the keys: (n-1)(K+V) + (n-1)(K+V)f + (K+V), where f is 1 for float32 and 2 for
    bfloat16. Segments are gathered once: (n-1) times those of a block. A causal window of w in contiguous blocks of l
    tokens needs only ceil((w-1)/l) hops, which replaces n-1 in these formulas.

    Memory: q, k, v, the result and one float32 per query and head are kept for the backward pass, all divided. While it
    runs, a device also holds the scores of its queries with one block of keys, or with `chunk` keys.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      cp: The mesh axes that divide the sequence; None for one device, where `chunk` still saves memory.
      tp: The mesh axes that divide the heads.
      causal: A query sees keys at its own position and before.
      window: A query sees keys less than this many positions away, including its own.
      segments: Integers; queries only see keys with the same number.
      placement: "contiguous", "zigzag" or "striped".
      scale: The factor of the scores; by default 1 / sqrt(k).
      softcap: Scores become softcap * tanh(scores / softcap), before the mask.
      chunk: The largest number of keys to work on at once. The actual number is a divisor of a block, or of half a
        block if halves are skipped. By default the whole block.

    Returns:
      The mixed values, an array like q, in the dtype of v.

    Raises:
      SizeError: If the number of key heads does not divide that of the query heads, or the placement does not divide
        the sequence. If causal masks, windows or segments are used with different numbers of keys and queries. If the
        window, soft cap or chunk is not above zero.
      LayoutError: If the placement is unknown, or segments are a pair.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> @spmd.kernel("s/cp h k, s/cp h k -> s/cp h k", mesh=mesh)
      ... def look(q, v):
      ...     return spmd.parallel.ring_attention(q, 0 * v, v, cp="cp", causal=True)
      >>> v = jnp.arange(8.0)[:, None, None]
      >>> print(look(jnp.ones((8, 1, 1)), v)[:, 0, 0])  # the mean of what came before
      [0.  0.5 1.  1.5 2.  2.5 3.  3.5]

    References:
      Liu, Zaharia and Abbeel, "Ring Attention", https://arxiv.org/abs/2310.01889; Brandon et al., "Striped
      Attention", https://arxiv.org/abs/2311.09431; the backward pass of a block as in Dao, "FlashAttention-2",
      https://arxiv.org/abs/2307.08691
    """
    blocks = axis_size(cp) if cp else 1
    call = "ring_attention(q, k, v)"
    check_heads(call, q, k)
    check_positive(call, window=window, softcap=softcap, chunk=chunk)
    if isinstance(segments, tuple):
        rule = "queries and keys are the same tokens here, so they have the same segments."
        raise LayoutError(rule, call="ring_attention(q, k, v, segments=...)", advice="segments of one array")
    by_position = causal or window is not None
    if by_position:
        q, k, v = ordered((q, k, v), placement, cp)
    groups = size(k, "... t/cp [g/tp] k", cp=cp, tp=tp)
    q = rearrange(q, "... (c l)/cp (g r)/tp k -> c/cp ... g/tp r l k", c=blocks, g=groups, cp=cp, tp=tp)
    k = rearrange(k, "... (c m)/cp g/tp k -> c/cp ... g/tp m k", c=blocks, cp=cp, tp=tp)
    v = rearrange(v, "... (c m)/cp g/tp k -> c/cp ... g/tp m k", c=blocks, cp=cp, tp=tp)
    length = q.shape[-2]
    check_placement(placement, f"ring_attention(q, k, v, placement={placement!r})", length * blocks, blocks)
    if (by_position or segments is not None) and k.shape[-2] != length:
        rule = "causal masks, windows and segments compare the same tokens, so there are as many keys as queries."
        raise SizeError(rule, call=call, got=[f"queries: {length * blocks}", f"keys: {k.shape[-2] * blocks}"])
    parts = 2 if causal and placement != "contiguous" and length % 2 == 0 else 1
    hops = blocks - 1
    if causal and window is not None and placement == "contiguous":
        hops = min(hops, -(-(window - 1) // length))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    ring = Ring(cp, tp, blocks, hops, parts, placement, causal, window, scale, softcap, chunk)
    q = rearrange(q, "c/cp ... g/tp r (z l) k -> z c/cp ... g/tp r l k", z=parts, cp=cp, tp=tp)
    k = rearrange(k, "c/cp ... g/tp (z m) k -> z c/cp ... g/tp m k", z=parts, cp=cp, tp=tp)
    v = rearrange(v, "c/cp ... g/tp (z m) k -> z c/cp ... g/tp m k", z=parts, cp=cp, tp=tp)
    documents = ()
    if segments is not None:
        own = rearrange(segments, "... (c z l)/cp -> z c/cp ... l", c=blocks, z=parts, cp=cp)
        documents = (own, all_gather(own, "z c/cp ... l -> z c ... l", cp=cp))
    out = attend_in_ring(ring, q, k, v, *documents)
    out = rearrange(out, "z c/cp ... g/tp r l k -> ... (c z l)/cp (g r)/tp k", cp=cp, tp=tp)
    return ordered(out, placement, cp, anew=True) if by_position else out


@scope(mapping=None)
def ulysses_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cp: Axes,
    ring: Axes = None,
    tp: Axes = None,
    causal: bool = False,
    window: int | None = None,
    segments: Any = None,
    placement: Placement = "contiguous",
    scale: float | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention over a divided sequence: an all-to-all gives each device all tokens of some heads, another undoes it.

    `ring` is another axis that divides the sequence, the major one. With it, each device has its heads of the tokens
    of one block after the all-to-all, and the blocks go round the ring. (This is USP: Ulysses on as many devices as
    key heads, where links are fast, times a ring of any size.)

    Layouts: q `"... s/ring/cp h/tp k"`, k and v `"... s/ring/cp g/tp k"`, segments `"... s/ring/cp"`, result like q. cp
    and tp together divide the query heads. If there are fewer key heads than devices, they are repeated before they are
    sent, to the least common multiple of g/tp and n: with g = 2 heads on n = 4 devices, each receives one. This sends
    n/g times the bytes of plain division, and g times fewer than gathering all heads.

    Communication, for Q, K, V bytes of a device's queries, keys and values (including repeated ones) on n devices of
    cp: four all-to-alls, (2Q + K + V)(n-1)/n bytes, forward and again backward. Segments add an all-gather. `ring` adds
    what `ring_attention` sends for keys and values of K and V bytes.

    Memory: that of `dot_product_attention` on whole sequences with h/(n tp) heads, or of `ring_attention`.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      cp: The mesh axes of the all-to-all; they divide the sequence.
      ring: Mesh axes that divide the sequence as the major ones, outside cp, or None.
      tp: The mesh axes that divide the heads.
      causal: A query sees keys at its own position and before.
      window: A query sees keys less than this many positions away, including its own.
      segments: Integers; queries only see keys with the same number.
      placement: The order of the tokens over `ring`, as in `ring_attention`. Without `ring` it is "contiguous": all
        devices do the same work in any order.
      scale: The factor of the scores; by default 1 / sqrt(k).
      softcap: Scores become softcap * tanh(scores / softcap), before the mask.
      chunk: With `ring`, the largest number of keys to work on at once.
      implementation: Without `ring`, that of `dot_product_attention`.

    Returns:
      The mixed values, an array like q.

    Raises:
      SizeError: If cp and tp together do not divide the query heads.
      LayoutError: If an option needs `ring`, or does not work with it.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> @spmd.kernel("s/cp h k, s/cp g k -> s/cp h k", mesh=mesh)
      ... def look(q, v):
      ...     return spmd.parallel.ulysses_attention(q, 0 * v, v, cp="cp", causal=True)
      >>> v = jnp.arange(8.0)[:, None, None] * jnp.ones((8, 2, 1))
      >>> print(jnp.round(2 * look(jnp.ones((8, 4, 1)), v)[:, 0, 0]))
      [0. 1. 2. 3. 4. 5. 6. 7.]

    References:
      Jacobs et al., "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509; Fang and Zhao, "USP",
      https://arxiv.org/abs/2405.07719
    """
    call = "ulysses_attention(q, k, v)"
    check_heads(call, q, k)
    blocks = axis_size(cp) if cp else 1
    _check_options(call, ring, placement, chunk, implementation)
    heads = size(q, "... s/ring/cp [h/tp] k", ring=ring, cp=cp, tp=tp)
    here = heads // (axis_size(tp) if tp else 1)
    if here % blocks:
        rule = f"the {blocks} devices of cp take equal parts of the query heads that tp leaves, here {here}."
        raise SizeError(rule, call=call, advice="fewer devices for cp, the others in ring=...")
    in_order = ring is None and (causal or window is not None)
    if in_order:
        q, k, v = ordered((q, k, v), placement, cp)
    groups = size(k, "... s/ring/cp [g/tp] k", ring=ring, cp=cp, tp=tp) // (axis_size(tp) if tp else 1)
    copies = math.lcm(groups, blocks) // groups
    names = {"ring": ring, "cp": cp, "tp": tp}
    k, v = (repeat(x, "... s/ring/cp g/tp k -> ... s/ring/cp (g r)/tp k", r=copies, **names) for x in (k, v))
    q, k, v = all_to_all((q, k, v), "... s/ring/cp h/tp k -> ... s/ring h/tp/cp k", **names)
    if segments is not None:
        segments = all_gather(segments, "... s/ring/cp -> ... s/ring", ring=ring, cp=cp)
    divided = (*axes_tuple(tp), *axes_tuple(cp)) or None
    options = {"causal": causal, "window": window, "segments": segments, "scale": scale, "softcap": softcap}
    if ring is None:
        out = dot_product_attention(q, k, v, tp=divided, implementation=implementation, **options)
    else:
        out = ring_attention(q, k, v, cp=ring, tp=divided, placement=placement, chunk=chunk, **options)
    out = all_to_all(out, "... s/ring h/tp/cp k -> ... s/ring/cp h/tp k", **names)
    return ordered(out, placement, cp, anew=True) if in_order else out


# --- arguments ---------------------------------------------------------------------------------------------------


def _check_options(call: str, ring: Axes, placement: str, chunk: int | None, implementation: str | None) -> None:
    fault = None
    if ring is None and placement != "contiguous":
        fault = f"placement={placement!r} balances a ring, and there is none: leave it out, or give ring=."
    elif ring is None and chunk is not None:
        fault = "chunk= is for a ring, and there is none: implementation= chooses a kernel that stores no scores."
    elif ring is not None and implementation is not None:
        fault = "implementation= is for whole sequences, and a ring computes its own products: give one of the two."
    if fault:
        raise LayoutError(fault, call=call)
