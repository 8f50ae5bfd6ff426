"""Context parallelism: attention over a sequence that no device holds whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd import all_gather, all_to_all, axis_size, einsum, fused, iota, rearrange, repeat, scope, shift, size, take
from spmd.comm._marks import ordered
from spmd.errors import LayoutError, SizeError
from spmd.language import Axes, axes_tuple
from spmd.nn import attention_mask, dot_product_attention
from spmd.nn.attention import check_heads, check_positive
from spmd.nn.norm import wide
from spmd.parallel.sequence import Placement, block_positions, check_placement


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


# --- ring --------------------------------------------------------------------------------------------------------

# The ring of `ring_attention`: partial softmaxes as keys and values go round, and the backward ring.
#
# Inside, the blocks are the first dimension of an array, `"c/cp ..."`, one per device along the ring. Before them come
# the parts of a block that are worked on separately: `"z c/cp ..."`. In all strings of this file:
#
#     c blocks   z parts of a block   g key and value heads   r query heads per key head   l queries   m keys
#     k size of a query and a key     j size of a value

Tree = Any

# The value of a masked score, and the smallest maximum. They are far apart, so that the exponential of a masked score
# is zero even in a row of masked scores.
MASKED, FLOOR = -1e30, -1e20


@dataclass(frozen=True)
class Ring:
    """The static facts of one call."""

    cp: Axes
    tp: Axes
    blocks: int
    hops: int
    parts: int
    placement: str
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    chunk: int | None


@functools.partial(spmd.custom_vjp, nondiff_argnums=(0,))
def attend_in_ring(ring: Ring, q: Any, k: Any, v: Any, *segments: Any) -> Any:
    """The attention of `"z c/cp ... g/tp r l k"` over keys and values `"z c/cp ... g/tp m k"`.

    Segments, if any, are those of each block, `"z c/cp ... l"`, and those of all blocks, `"z c ... l"`.
    """
    return _forward(ring, q, k, v, *segments)[0]


def _forward(ring: Ring, q: Any, k: Any, v: Any, *segments: Any) -> tuple[Any, Any]:
    hop = functools.partial(_hop, ring, tuple(q), segments)
    keys = k, v
    state = hop(None, keys, 0, first=True)
    if ring.hops:
        # The next block travels while this one is worked on: the hop does not depend on the product.
        def body(carry: Tree, number: Any) -> tuple[Tree, None]:
            state, keys = carry
            ahead = _send(ring, keys)
            return (hop(state, keys, number), ahead), None

        numbers = jnp.arange(1, ring.hops, dtype=jnp.int32)
        (state, keys), _ = jax.lax.scan(body, (state, _send(ring, keys)), numbers)
        state = hop(state, keys, ring.hops)
    peak, total, mixed = (jnp.stack(part) for part in zip(*state, strict=True))
    total = jnp.where(total > 0, total, 1.0)  # a query that sees no key gets zeros
    out = (mixed / total[..., None]).astype(v.dtype)
    return out, (q, k, v, segments, out, peak + jnp.log(total))


def _backward(ring: Ring, kept: Tree, cotangent: Any) -> tuple[Any, ...]:
    # The blocks of the forward ring are not kept: they are sent again, and the scores are computed again. A compiler
    # that sees both passes must not undo that, and some drop the barrier. So keys and values are joined here, which
    # makes these hops different from those of the forward pass.
    (q, k, v, segments, out, logsumexp), cotangent = jax.lax.optimization_barrier((kept, cotangent))
    delta = jnp.sum(cotangent.astype(wide(q)) * out.astype(wide(q)), axis=-1)
    sums = tuple(cotangent), tuple(logsumexp), tuple(delta)
    hop = functools.partial(_hop_back, ring, tuple(q), segments, sums, k.shape[-1])
    keys = jnp.concatenate([k, v], axis=-1)
    dq, found = hop(keys, 0, first=True)
    if ring.hops:
        # The gradients of a block follow it, one hop behind. What is found here is added to what arrives.
        def body(carry: Tree, number: Any) -> tuple[Tree, None]:
            dq, found, keys = carry
            ahead, arrived = _send(ring, keys), _send(ring, found)
            more_q, more = hop(keys, number)
            return (dq + more_q, arrived + more, ahead), None

        numbers = jnp.arange(1, ring.hops, dtype=jnp.int32)
        (dq, found, keys), _ = jax.lax.scan(body, (dq, found, _send(ring, keys)), numbers)
        arrived = _send(ring, found)
        more_q, more = hop(keys, ring.hops)
        dq, found = dq + more_q, arrived + more
    found = found.astype(keys.dtype)
    if ring.hops:
        found = _send(ring, found, by=ring.blocks - ring.hops)  # home, in one step
    dk, dv = jnp.split(found, [k.shape[-1]], axis=-1)
    return (dq.astype(q.dtype), dk, dv, *(None for _ in segments))


attend_in_ring.defvjp(_forward, _backward)


def _here(ring: Ring) -> Any:
    return iota("c/cp", c=ring.blocks, cp=ring.cp)


def _send(ring: Ring, arrays: Tree, by: int = 1) -> Tree:
    return shift(arrays, "z [c/cp] ...", by, cp=ring.cp)


# --- one hop: which parts of the queries meet which parts of the keys ------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One part of each block: given by its number, or part 0 where `first` holds and part 1 elsewhere."""

    number: int = 0
    first: Any = None

    def take(self, parts: tuple[Tree, ...]) -> Tree:
        return parts[self.number] if self.first is None else jax.tree.map(self._where, *parts)

    def put(self, parts: tuple[Tree, ...], new: Tree) -> tuple[Tree, ...]:
        if self.first is None:
            return (*parts[: self.number], new, *parts[self.number + 1 :])
        return jax.tree.map(self._where, new, parts[0]), jax.tree.map(self._where, parts[1], new)

    def _where(self, yes: Any, no: Any) -> Any:
        return jnp.where(jnp.expand_dims(self.first, tuple(range(1, yes.ndim))), yes, no)


def _visits(ring: Ring, block: Any, source: Any, first: bool) -> list[tuple[_Part, _Part, bool]]:
    """Parts of queries, parts of keys, and whether positions must be compared for causality.

    Parts of keys that no query of a part may see are left out. In zig-zag, block c has the chunks c and 2n-1-c of 2n.
    Our late chunk sees the early chunk of every other block. In addition, our early chunk sees the early chunk of a
    block before ours, and our late chunk sees the late chunk of a block after ours.
    """
    if ring.parts == 1:
        return [(_Part(), _Part(), ring.causal)]
    if ring.placement == "zigzag" and not first:
        either = _Part(first=source < block)
        return [(_Part(1), _Part(0), False), (either, either, False)]
    return [(_Part(0), _Part(0), True), (_Part(1), _Part(0), False), (_Part(1), _Part(1), True)]


def _meetings(
    ring: Ring, q: tuple[Any, ...], keys: tuple[Any, Any], segments: tuple[Any, ...], number: Any, first: bool
) -> Iterator[tuple[_Part, _Part, bool, Tree, Tree]]:
    """The visits of one hop, with queries and keys, their positions, and their segments if any."""
    block = _here(ring)
    source = (block - number) % ring.blocks
    length = ring.parts * q[0].shape[-2]

    def at(number: Any) -> tuple[Any, ...]:
        parts = range(ring.parts)
        return tuple(block_positions(number, length, ring.blocks, ring.placement, z, ring.parts) for z in parts)

    ours = [q, at(block)]
    theirs = [tuple(x) for x in keys] + [at(source)]
    if segments:
        own, everyones = segments
        ours.append(tuple(own))
        theirs.append(tuple(take(everyones, source, "z [c] ... l, d/cp -> z d/cp ... l", cp=ring.cp)))
    for one, other, causal in _visits(ring, block, source, first):
        yield one, other, causal, [one.take(x) for x in ours], [other.take(x) for x in theirs]


def _hop(
    ring: Ring, q: tuple[Any, ...], segments: tuple[Any, ...], state: Tree, keys: Tree, number: Any, first: bool = False
) -> Tree:
    """The state of the softmax after one more block of keys."""

    def visit(state: Tree) -> Tree:
        for ours, _, causal, side, other in _meetings(ring, q, keys, segments, number, first):
            fold = functools.partial(_fold, ring, causal)
            state = ours.put(state, _kernel(ring, fold, side, ours.take(state), other)[0])
        return state

    return visit((None,) * ring.parts) if first else _if_seen(ring, number, visit, state)


def _hop_back(
    ring: Ring,
    q: tuple[Any, ...],
    segments: tuple[Any, ...],
    sums: tuple[Any, ...],
    size: int,
    keys: Any,
    number: Any,
    first: bool = False,
) -> tuple[Any, Any]:
    """Return what one block of keys adds to the gradient of the queries, and the block's own gradients from these
    queries."""
    k, v = jnp.split(keys, [size], axis=-1)

    def visit(gradients: Tree) -> Tree:
        dq, found = gradients
        for ours, theirs, causal, side, other in _meetings(ring, q, (k, v), segments, number, first):
            fold = functools.partial(_fold_back, ring, causal)
            more_q, more = _kernel(ring, fold, (side, [ours.take(x) for x in sums]), None, other)
            dq = ours.put(dq, ours.take(dq) + more_q)
            found = theirs.put(found, theirs.take(found) + more)
        return dq, found

    nothing = tuple(tuple(jnp.zeros_like(x, wide(x)) for x in parts) for parts in (q, keys))
    dq, found = visit(nothing) if first else _if_seen(ring, number, visit, nothing)
    return jnp.stack(dq), jnp.stack(found)


def _if_seen(ring: Ring, number: Any, visit: Any, kept: Tree) -> Tree:
    """Return what a visit makes of `kept`, or `kept` itself on devices from which the mask hides the whole block.

    Under a causal mask these are, with contiguous blocks, the blocks behind our own. A device that holds one block
    branches. Where arrays are whole, one product works on all blocks.
    """
    here = _here(ring)
    if not ring.causal or ring.placement != "contiguous" or here.shape != (1,):
        return visit(kept)
    return jax.lax.cond(here[0] >= number, visit, lambda kept: kept, kept)


# --- one product of queries and keys ---------------------------------------------------------------------------


def _kernel(ring: Ring, fold: Any, side: Tree, carry: Tree, keys: Tree) -> tuple[Tree, Tree]:
    """`fold` over all chunks: on an accelerator one kernel for each part of the queries and of the keys."""

    @fused("attention")
    def kernel(side: Tree, carry: Tree, keys: Tree) -> tuple[Tree, Tree]:
        return _over_chunks(ring, functools.partial(fold, side), carry, keys)

    return kernel(side, carry, keys)


def _over_chunks(ring: Ring, fn: Any, carry: Tree, keys: Tree) -> tuple[Tree, Tree]:
    """`fn(carry, keys) -> carry, found` over at most `chunk` keys at a time: the carry and all found, `"... m k"`."""
    length = keys[0].shape[-2]
    size = next(n for n in range(min(ring.chunk or length, length), 0, -1) if length % n == 0)
    if size == length:
        return fn(carry, keys)

    def cut(start: Any) -> Tree:
        k, v, *rest = keys
        pick = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        return (pick(k, axis=-2), pick(v, axis=-2), *(pick(x, axis=-1) for x in rest))

    carry, first = fn(carry, cut(0))  # gives the carry of the loop its type
    starts = jnp.arange(size, length, size, dtype=jnp.int32)
    carry, others = jax.lax.scan(lambda carry, start: fn(carry, cut(start)), carry, starts)

    def join(one: Any, more: Any) -> Any:
        whole = jnp.moveaxis(jnp.concatenate([one[None], more]), 0, -3)
        return whole.reshape(*one.shape[:-2], length, one.shape[-1])

    return carry, jax.tree.map(join, first, others)


def _scores(ring: Ring, side: Tree, keys: Tree, causal: bool) -> tuple[Any, Any]:
    """The scores `"c/cp ... g/tp r l m"`, with hidden ones set to `MASKED`, and the slope of the soft cap."""
    (q, q_at, *q_segments), (k, _, k_at, *k_segments) = side, keys
    pattern = "c/cp ... g/tp r l k, c/cp ... g/tp m k -> c/cp ... g/tp r l m"
    scores = _product(ring, q, k, pattern) * ring.scale
    slope = None
    if ring.softcap is not None:
        capped = jnp.tanh(scores / ring.softcap)
        scores, slope = capped * ring.softcap, 1 - capped**2
    # The block comes first in all arrays. Positions are equal along the dimensions of "...".
    at = [jnp.expand_dims(x, tuple(range(1, scores.ndim - 4))) for x in (q_at, k_at)]
    mask = attention_mask(
        (at[0], at[1]) if causal or ring.window is not None else None,
        causal=causal,
        window=ring.window,
        segments=(q_segments[0], k_segments[0]) if q_segments else None,
    )
    if mask is not None:
        scores = jnp.where(jnp.expand_dims(mask, (-4, -3)), scores, MASKED)
    return scores, slope


def _product(ring: Ring, x: Any, y: Any, pattern: str) -> Any:
    return einsum(x, y, pattern, preferred_element_type=wide(x), cp=ring.cp, tp=ring.tp)


def _fold(ring: Ring, causal: bool, side: Tree, state: Tree, keys: Tree) -> tuple[Tree, None]:
    """One step of the online softmax: maximum, sum of exponentials and weighted sum of values, including these keys."""
    scores, _ = _scores(ring, side, keys, causal)
    peak = jnp.maximum(scores.max(-1), FLOOR if state is None else state[0])
    powers = jnp.exp(scores - peak[..., None])
    total = powers.sum(-1)
    pattern = "c/cp ... g/tp r l m, c/cp ... g/tp m j -> c/cp ... g/tp r l j"
    mixed = _product(ring, powers.astype(keys[1].dtype), keys[1], pattern)
    if state is not None:
        shrink = jnp.exp(state[0] - peak)
        total, mixed = total + shrink * state[1], mixed + shrink[..., None] * state[2]
    return (peak, total, mixed), None


def _fold_back(ring: Ring, causal: bool, given: tuple[Tree, Sequence[Any]], dq: Any, keys: Tree) -> tuple[Any, Any]:
    """The gradients of queries (added to `dq`) and of joined keys and values, given the sums over all keys."""
    side, (cotangent, logsumexp, delta) = given
    (q, *_), (k, v, *_) = side, keys
    scores, slope = _scores(ring, side, keys, causal)
    weights = jnp.exp(scores - logsumexp[..., None])
    by_key = "c/cp ... g/tp r l m, c/cp ... g/tp r l k -> c/cp ... g/tp m k"
    dv = _product(ring, weights.astype(v.dtype), cotangent, by_key)
    pulled = _product(ring, cotangent, v, "c/cp ... g/tp r l j, c/cp ... g/tp m j -> c/cp ... g/tp r l m")
    slopes = weights * (pulled - delta[..., None]) * ring.scale
    slopes = (slopes if slope is None else slopes * slope).astype(q.dtype)
    dk = _product(ring, slopes, q, by_key)
    more = _product(ring, slopes, k, "c/cp ... g/tp r l m, c/cp ... g/tp m k -> c/cp ... g/tp r l k")
    return more if dq is None else dq + more, jnp.concatenate([dk, dv], axis=-1)
