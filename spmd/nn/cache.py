"""A cache of keys and values for decoding, divided over batch, heads and sequence, with positions for each row."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd import axis_size, einsum, full, fused, iota, rearrange, scope, size, softmax, zeros
from spmd.errors import LayoutError
from spmd.nn.attention import attention_mask, check_positive
from spmd.nn.norm import Axes, wide

Cache = dict[str, Any]


@scope(mapping=None)
def kv_cache(
    batch: int,
    length: int,
    kv_heads: int,
    head: int,
    dtype: Any = None,
    *,
    dp: Axes = None,
    cp: Axes = None,
    tp: Axes = None,
    values: bool = True,
) -> Cache:
    """An empty cache: slots for keys and values, each with the position of its token.

    The token at position p is in slot p modulo the length. A cache that is shorter than the sequence is a ring buffer
    for a sliding window, in which the newest token replaces the oldest. Over cp the slots are dealt in turn: device c
    has the slots of positions c, c + n, c + 2n, ... (as in `sequence_order(..., "striped")`), so that all devices fill
    at the same rate.

    Layouts: `{"k": "b/dp t/cp g/tp k", "v": "b/dp t/cp g/tp k", "positions": "b/dp t/cp"}`, with position -1 for an
    empty slot. The shapes stay the same from the first token to the last, for `jax.jit` and `jax.lax.scan`. Donate the
    cache to write it in place.

    Communication: none.

    Args:
      batch: The global number of rows.
      length: The global number of slots: the longest sequence, or the window (plus the tokens of one append, less one).
        A multiple of the number of devices of cp.
      kv_heads: The global number of key and value heads; with `spread_heads`, the number that it makes.
      head: The size of a head.
      dtype: The dtype of keys and values; by default that of `jnp.zeros`.
      dp: The mesh axes that divide the batch.
      cp: The mesh axes that divide the slots.
      tp: The mesh axes that divide the heads.
      values: Whether it keeps values besides keys. `cached_latent_attention` needs none.

    Returns:
      The cache, a dict, without `"v"` if it keeps no values.

    Raises:
      SizeError: If a size does not divide.

    Example:
      >>> import spmd
      >>> mesh = spmd.make_mesh(dp=2)
      >>> layouts = {"k": "b/dp t g k", "v": "b/dp t g k", "positions": "b/dp t"}
      >>> new = lambda: spmd.nn.kv_cache(4, 8, 2, 3, dp="dp")
      >>> cache = spmd.kernel(in_layouts=(), out_layouts=layouts, mesh=mesh)(new)()
      >>> print(cache["k"].shape, cache["positions"][0])
      (4, 8, 2, 3) [-1 -1 -1 -1 -1 -1 -1 -1]
    """
    sizes = {"b": batch, "t": length, "g": kv_heads, "k": head, "dp": dp, "cp": cp, "tp": tp}
    slots = {name: sizes[name] for name in ("b", "t", "dp", "cp")}
    kept = {name: zeros("b/dp t/cp g/tp k", dtype, **sizes) for name in ("k", "v")[: 1 + values]}
    return {**kept, "positions": full("b/dp t/cp", -1, jnp.int32, **slots)}


@scope(mapping=None)
def kv_cache_append(
    cache: Cache, k: Any, v: Any, positions: Any, *, cp: Axes = None, tp: Axes = None, tokens: str = "whole"
) -> Cache:
    """Write tokens into the cache at the positions of each row: the whole prompt, or one or more further tokens.

    Layouts: the cache `"... t/cp g/tp k"` as `kv_cache` makes it, k and v `"... s g/tp k"`, positions `"... s"`. Each
    row has its own positions. A token at a negative position (padding, a row that has ended) is not written. With
    `tokens="striped"` the tokens are divided over cp too, in striped order: k and v `"... s/cp g/tp k"`, positions
    `"... s/cp"`. After `spmd.parallel.ring_attention(..., placement="striped")` has read a prompt, each device has
    exactly the tokens that it keeps.

    Communication: none. Each device writes the tokens that belong in its slots.

    Memory: a new cache, or the old one, overwritten, if it is not used again.

    Args:
      cache: The cache.
      k: The keys, after their rotary embedding.
      v: The values; None for a cache that keeps none.
      positions: The positions of the tokens, integers, different within a row. If several tokens share a slot, as in a
        prompt that is longer than the window, the latest stays.
      cp: The mesh axes that divide the slots.
      tp: The mesh axes that divide the heads.
      tokens: "whole" on each device of cp, or "striped" over it.

    Returns:
      The cache with these tokens.

    Raises:
      LayoutError: If `tokens` is something else, or values are given and the cache keeps none, or the reverse.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=2)
      >>> @spmd.kernel("b s g k, b s -> b t/cp", mesh=mesh, t=4)
      ... def prefill(k, positions):
      ...     cache = spmd.nn.kv_cache(2, 4, 1, 3, cp="cp")
      ...     return spmd.nn.kv_cache_append(cache, k, k, positions, cp="cp")["positions"]
      >>> print(prefill(jnp.ones((2, 3, 1, 3)), jnp.array([[0, 1, 2], [0, 1, -1]])))
      [[ 0  2  1 -1]
       [ 0 -1  1 -1]]
    """
    if tokens not in ("whole", "striped"):
        rule = f"tokens are 'whole' on each device of cp or 'striped' over it, not {tokens!r}."
        raise LayoutError(rule, call="kv_cache_append(cache, k, v, positions)")
    if (v is not None) != ("v" in cache):
        rule = (
            f"the cache keeps {'values' if 'v' in cache else 'no values'}, and v is {'' if v is None else 'not '}None."
        )
        raise LayoutError(rule, call="kv_cache_append(cache, k, v, positions)", advice="kv_cache(..., values=...)")
    blocks = axis_size(cp) if cp else 1
    opened = _in_blocks(cache, blocks, cp, tp)
    given = {"k": k, "v": v, "positions": positions}
    new = {name: given[name].astype(old.dtype) for name, old in cache.items()}
    new = _in_blocks(new, blocks, cp, tp) if tokens == "striped" else new
    write = _write
    for _ in range(positions.ndim - 1):
        write = jax.vmap(write, in_axes=(0, 0, None, None))
    write = jax.vmap(write, in_axes=(0, 0 if tokens == "striped" else None, 0, None))
    here = iota("c/cp", c=blocks, cp=cp)
    opened = write(opened, new, here, blocks)
    out = {}
    for name, x in opened.items():
        more, where = _heads(name, tp)
        out[name] = rearrange(x, f"c/cp ... l{more} -> ... (c l)/cp{more}", cp=cp, **where)
    return out


def _heads(name: str, tp: Axes) -> tuple[str, dict[str, Axes]]:
    """The dimensions behind the slots, and their axes."""
    return ("", {}) if name == "positions" else (" g/tp k", {"tp": tp})


def _in_blocks(cache: Cache, blocks: int, cp: Axes, tp: Axes) -> Cache:
    """The blocks along cp as the first dimension."""
    out = {}
    for name, x in cache.items():
        more, where = _heads(name, tp)
        out[name] = rearrange(x, f"... (c l)/cp{more} -> c/cp ... l{more}", c=blocks, cp=cp, **where)
    return out


def _write(cache: Cache, new: Cache, block: Any, blocks: int) -> Cache:
    """The slots of one row in one block, "l ...", with the tokens of "s ..." that belong there."""
    at = new["positions"]
    slots = cache["positions"].shape[0]
    mine = (at >= 0) & (at % blocks == block)
    place = jnp.where(mine, at // blocks, -1)
    latest = place > jnp.max(place) - slots  # newer tokens win: a scatter has no defined order
    target = jnp.where(mine & latest, place % slots, slots)  # one beyond the last: dropped
    return {name: old.at[target].set(new[name], mode="drop") for name, old in cache.items()}


@scope(mapping=None)
def cached_attention(
    q: Any,
    cache: Cache,
    positions: Any,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cp: Axes = None,
    tp: Axes = None,
) -> jax.Array:
    """Attention of one or more new tokens over the cache, which already has their own keys.

    The attention is causal: a query sees the slots at its own position and before. Over cp each device looks at its
    own slots, and the parts of the softmax are combined (flash decoding). `explain` and `search` take it for one kernel
    (see `spmd.fused`).

    Layouts: q `"... s h/tp k"`, the cache as `kv_cache` makes it, positions `"... s"`, result `"... s h/tp k"`. A
    query at a negative position gets zeros.

    Communication: none without cp. On n devices of cp, T = s h / tp is the number of queries times heads of a device in
    each of its rows. For each of these, a pmax and a psum of one float32, and a psum of the result in float32: 2(8 +
    4k)T(n-1)/n bytes per row. It can be differentiated, but is not meant to be.

    Memory: scores, `"... h/tp s t/cp"`.

    Args:
      q: Queries, after their rotary embedding.
      cache: The cache.
      positions: The positions of the queries.
      window: A query sees slots less than this many positions before, including its own.
      scale: The factor of the scores; by default 1 / sqrt(k).
      softcap: Scores become softcap * tanh(scores / softcap).
      cp: The mesh axes that divide the slots.
      tp: The mesh axes that divide the heads.

    Returns:
      The mixed values, an array like q.

    Raises:
      SizeError: If the window or soft cap is not above zero.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, cp=2)
      >>> @spmd.kernel("b/dp s g k -> s b/dp", mesh=mesh)
      ... def means(v):  # of each row, of what came before
      ...     cache = spmd.nn.kv_cache(2, 4, 1, 3, dp="dp", cp="cp")
      ...     def step(cache, token):
      ...         v, at = token
      ...         at = jnp.full(v.shape[:2], at)
      ...         cache = spmd.nn.kv_cache_append(cache, 0 * v, v, at, cp="cp")
      ...         return cache, spmd.nn.cached_attention(v, cache, at, cp="cp")[:, 0, 0, 0]
      ...     return jax.lax.scan(step, cache, (jnp.moveaxis(v, 1, 0)[:, :, None], jnp.arange(4)))[1]
      >>> print(means(jnp.arange(8.0).reshape(2, 4, 1, 1) * jnp.ones((1, 1, 1, 3))))
      [[0.  4. ]
       [0.5 4.5]
       [1.  5. ]
       [1.5 5.5]]

    References:
      Dao et al., "Flash-Decoding", https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    """
    check_positive("cached_attention(q, cache, positions)", window=window, softcap=softcap)
    names = {"g": size(cache["k"], "... t/cp [g/tp] k", cp=cp, tp=tp), "cp": cp, "tp": tp}
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    @fused("attention")
    def attend(q: Any, cache: Cache, positions: Any) -> Any:
        pattern = "... s (g r)/tp k, ... t/cp g/tp k -> ... (g r)/tp s t/cp"
        scores = einsum(q, cache["k"].astype(q.dtype), pattern, preferred_element_type=wide(q), **names) * scale
        if softcap is not None:
            scores = jnp.tanh(scores / softcap) * softcap
        mask: Any = attention_mask((positions, cache["positions"]), causal=True, window=window)
        weights = softmax(scores, "... h/tp s [t/cp]", where=jnp.expand_dims(mask, -3), cp=cp, tp=tp)
        pattern = "... (g r)/tp s t/cp, ... t/cp g/tp k -> ... s (g r)/tp k"
        return einsum(weights, cache["v"].astype(scores.dtype), pattern, **names).astype(q.dtype)

    return attend(q, cache, positions)
