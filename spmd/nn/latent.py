"""Attention with latent keys and values: all heads expand what one short vector per token holds (MLA).

In all strings of this file:

    b batch   s, t tokens   d features   h heads   c features of a latent   r rotary features   z both, c + r
    n features of a key without rotation   q those of a query, n + r   v features of a value
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd import all_gather, defer, einsum, fused, iota, scope, size, softmax
from spmd.nn.attention import attention_mask, dot_product_attention, rotary_embedding
from spmd.nn.cache import Cache, kv_cache_append
from spmd.nn.linear import column_linear, row_linear
from spmd.nn.norm import Axes, rms_norm, wide


class LatentWeights(NamedTuple):
    """The weights of `latent_attention`.

    Attributes:
      query: `"d h/tp q"`: n features without rotation, then r with.
      latent: `"d z"`: the latent of c features, then the rotary key of r, which all heads share.
      key: `"c h/tp n"`: expands a latent to keys.
      value: `"c h/tp v"`: expands a latent to values.
      out: `"h/tp v d"`: the output projection.
      scale: `"c"`: that of an RMSNorm of the latents; None for no norm.
    """

    query: Any
    latent: Any
    key: Any
    value: Any
    out: Any
    scale: Any = None


@scope(mapping=None)
def latent_attention(
    x: Any,
    weights: LatentWeights,
    *,
    frequencies: Any,
    positions: Any = None,
    queries_from: Any = None,
    scale: float | None = None,
    interleaved: bool = False,
    tp: Axes = None,
    sp: Axes = None,
) -> jax.Array:
    """Causal attention of a whole sequence, whose keys and values are expanded from one latent per token.

    A token has a latent of c features and one rotary key of r features, for all heads. A head's key is its expansion of
    the latent, followed by the rotary key. Its value is another expansion of the latent. So decoding has to remember
    c + r numbers per token (`cached_latent_attention`), and not 2 h k.

    Layouts: x and result `"... s/sp d"`, the weights as in `LatentWeights`. Heads are divided over tp. Latents are
    whole there: each device makes them all, or with `sp` those of its tokens.

    Communication, for S bytes of `"... s d"` and Z of `"... s z"` per device, on n devices of tp. Without `sp`, a psum
    of the result forward, 2S(n-1)/n, and backward a psum of the gradients of x, 2S(n-1)/n, and of the latents,
    2Z(n-1)/n. With `sp`, an all_gather of x and of the latents and a psum_scatter of the result, (2S + Z)(n-1)/n in
    all, and backward the reverse of each, as much again. Weights that are equal on axes that divide tokens have their
    gradients summed there.

    Memory: keys and values of a device's heads, and the scores `"... h/tp s t"`.

    Args:
      x: The activations.
      weights: The weights.
      frequencies: Those of `rotary_frequencies(r)`.
      positions: The positions of the tokens, integers `"s"` or `"... s"`, of all tokens also with `sp`; by default 0, 1
        and so on.
      queries_from: What queries are made of, by default x: a compressed x, say, `"... s/sp a"` with a query weight
        `"a h/tp q"`.
      scale: The factor of the scores; by default 1 / sqrt(n + r).
      interleaved: How features are paired, as in `rotary_embedding`.
      tp: The mesh axes that divide the heads.
      sp: The mesh axes that divide the sequence outside; the same as tp, or None.

    Returns:
      An array like x, not yet added to it.

    Raises:
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import nn
      >>> mesh = spmd.make_mesh(tp=2)
      >>> layouts = nn.LatentWeights("d h/tp q", "d z", "c h/tp n", "c h/tp v", "h/tp v d")
      >>> @spmd.kernel(in_layouts=("b s/tp d", layouts), out_layouts="b s/tp d", mesh=mesh)
      ... def layer(x, weights):
      ...     return nn.latent_attention(x, weights, frequencies=nn.rotary_frequencies(2), tp="tp", sp="tp")
      >>> ones = [jnp.ones(shape) for shape in ((6, 4, 5), (6, 10), (8, 4, 3), (8, 4, 3), (4, 3, 6))]
      >>> print(layer(jnp.ones((2, 4, 6)), nn.LatentWeights(*ones))[0, 0])
      [576. 576. 576. 576. 576. 576.]

    References:
      DeepSeek-AI, "DeepSeek-V2", https://arxiv.org/abs/2405.04434 (section 2.1)
    """
    if positions is None:
        positions = iota("s", s=size(x, "... [s/sp] d", sp=sp))
    turned = {"positions": positions, "frequencies": frequencies, "interleaved": interleaved}
    latents = _latents(x, weights, turned, sp)
    if not sp:  # equal along tp, where each device has the gradient of its heads: they are summed here, once
        latents = defer(latents, "... s z -> ... s z {R:tp}", tp=tp)
    c = weights.key.shape[0]
    q = _queries(x if queries_from is None else queries_from, weights, turned, tp, sp)
    expand = lambda w: einsum(latents[..., :c], w, "... s c, c h/tp n -> ... s h/tp n", tp=tp)
    keys, values = expand(weights.key), expand(weights.value)
    shared = jnp.expand_dims(latents[..., c:], -2)
    keys = jnp.concatenate([keys, jnp.broadcast_to(shared, (*keys.shape[:-1], shared.shape[-1]))], axis=-1)
    mixed = dot_product_attention(q, keys, values, causal=True, scale=scale, tp=tp)
    return row_linear(mixed, weights.out, tp=tp, sp=sp)


def _latents(x: Any, weights: LatentWeights, turned: dict[str, Any], sp: Axes) -> Any:
    """Normalized latents with rotary keys behind them, `"... s z"`: all that is remembered of a token."""
    z = einsum(x, weights.latent, "... s/sp d, d z -> ... s/sp z", sp=sp)
    c = weights.key.shape[0]
    if weights.scale is not None:
        z = jnp.concatenate([rms_norm(z[..., :c], weights.scale), z[..., c:]], axis=-1)
    if sp:
        z = all_gather(z, "... s/sp z -> ... s z", sp=sp)
    key = rotary_embedding(jnp.expand_dims(z[..., c:], -2), **turned)
    return jnp.concatenate([z[..., :c], jnp.squeeze(key, -2)], axis=-1)


def _queries(x: Any, weights: LatentWeights, turned: dict[str, Any], tp: Axes, sp: Axes) -> Any:
    """Queries `"... s h/tp q"`, their last features rotated."""
    n = weights.key.shape[-1]
    q = column_linear(x, weights.query, tp=tp, sp=sp)
    return jnp.concatenate([q[..., :n], rotary_embedding(q[..., n:], **turned)], axis=-1)


@scope(mapping=None)
def cached_latent_attention(
    x: Any,
    weights: LatentWeights,
    cache: Cache,
    positions: Any,
    *,
    frequencies: Any,
    queries_from: Any = None,
    scale: float | None = None,
    interleaved: bool = False,
    cp: Axes = None,
    tp: Axes = None,
) -> tuple[jax.Array, Cache]:
    """`latent_attention` of one or more new tokens over a cache of latents, into which it writes theirs first.

    No key or value is expanded. A head's query is multiplied by its expansion of keys instead, once, so it can be
    compared with latents; and the mixed latents are multiplied by its expansion of values. For one token and a long
    cache this is less work, and the cache is read once for all heads. For a prompt of many tokens `latent_attention`
    needs fewer operations, since keys have n + r features and latents c + r.

    Layouts: x and result `"... s d"`, positions `"... s"`, the cache as `kv_cache(b, t, 1, c + r, values=False)` makes
    it: `"b/dp t/cp 1 z"`, whole on tp, because all heads read it.

    Communication: a psum of the result over tp, 2S(n-1)/n bytes for S bytes of `"... s d"`. With cp, that of
    `cached_attention` for heads of c features: on n devices 2(8 + 4c)T(n-1)/n bytes per row, for T queries times heads
    of a device. It can be differentiated, but is not meant to be.

    Memory: 4(c + r) bytes per slot in float32, and scores, `"... h/tp s t/cp"`.

    Args:
      x: The activations of the new tokens.
      weights: The weights.
      cache: The cache.
      positions: The positions of the new tokens. One at a negative position is not written, and gets zeros.
      frequencies: Those of `rotary_frequencies(r)`.
      queries_from: What queries are made of; by default x.
      scale: The factor of the scores; by default 1 / sqrt(n + r).
      interleaved: How features are paired, as in `rotary_embedding`.
      cp: The mesh axes that divide the slots.
      tp: The mesh axes that divide the heads.

    Returns:
      An array like x, not yet added to it, and the cache with the new tokens.

    Raises:
      LayoutError: If the cache keeps values.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import nn
      >>> mesh = spmd.make_mesh(tp=2)
      >>> layouts = nn.LatentWeights("d h/tp q", "d z", "c h/tp n", "c h/tp v", "h/tp v d")
      >>> @spmd.kernel(in_layouts=("b s d", layouts), out_layouts="b s d", mesh=mesh)
      ... def layer(x, weights):
      ...     cache = nn.kv_cache(2, 16, 1, 10, values=False)
      ...     at = jnp.tile(jnp.arange(4)[None], (2, 1))
      ...     turn = nn.rotary_frequencies(2)
      ...     return nn.cached_latent_attention(x, weights, cache, at, frequencies=turn, tp="tp")[0]
      >>> ones = [jnp.ones(shape) for shape in ((6, 4, 5), (6, 10), (8, 4, 3), (8, 4, 3), (4, 3, 6))]
      >>> print(layer(jnp.ones((2, 4, 6)), nn.LatentWeights(*ones))[0, 0])
      [576. 576. 576. 576. 576. 576.]

    References:
      DeepSeek-AI, "DeepSeek-V2", https://arxiv.org/abs/2405.04434 (section 2.1.2)
    """
    turned = {"positions": positions, "frequencies": frequencies, "interleaved": interleaved}
    cache = kv_cache_append(cache, jnp.expand_dims(_latents(x, weights, turned, None), -2), None, positions, cp=cp)
    (c, _, n), names = weights.key.shape, {"cp": cp, "tp": tp}
    q = _queries(x if queries_from is None else queries_from, weights, turned, tp, None)
    absorbed = einsum(q[..., :n], weights.key, "... s h/tp n, c h/tp n -> ... s h/tp c", tp=tp)
    query = jnp.concatenate([absorbed, q[..., n:]], axis=-1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    @fused("attention")
    def attend(query: Any, kept: Any, positions: Any, slots: Any) -> Any:
        kept = kept.astype(query.dtype)
        pattern = "... s h/tp z, ... t/cp z -> ... h/tp s t/cp"
        scores = einsum(query, kept, pattern, preferred_element_type=wide(query), **names) * scale
        mask: Any = attention_mask((positions, slots), causal=True)
        shares = softmax(scores, "... h/tp s [t/cp]", where=jnp.expand_dims(mask, -3), **names)
        pattern = "... h/tp s t/cp, ... t/cp c -> ... s h/tp c"
        return einsum(shares, kept[..., :c].astype(shares.dtype), pattern, **names).astype(query.dtype)

    mixed = attend(query, jnp.squeeze(cache["k"], -2), positions, cache["positions"])
    values = einsum(mixed, weights.value, "... s h/tp c, c h/tp v -> ... s h/tp v", tp=tp)
    return row_linear(values, weights.out, tp=tp), cache
