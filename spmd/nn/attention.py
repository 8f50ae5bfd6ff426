"""Attention over whole sequences with divided heads (tensor parallelism), the layer around it, and rotary positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _compat, annotate, axis_size, einsum, fused, iota, scope, size, softmax, take
from spmd._trees.arguments import explained
from spmd._trees.leaves import not_int
from spmd.comm._marks import ordered
from spmd.errors import LayoutError, SizeError, check_one_of, did_you_mean, is_int
from spmd.nn.linear import column_linear, row_linear
from spmd.nn.norm import Axes, wide, wide_einsum, with_rank

# --- attention masks from positions and segments, which need not be those of a whole sequence -------------------------


def attention_mask(
    positions: tuple[Any, Any] | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    segments: tuple[Any, Any] | None = None,
) -> jax.Array | None:
    """Return which keys each query sees, from the positions of both and the segments of both.

    The positions are arguments, so the mask is right for a divided or permuted sequence (`spmd.iota`,
    `spmd.parallel.sequence_positions`) and for a cache. This is plain JAX, for any mode, inside and outside kernels.

    Layouts: positions and segments `"... s"` of the queries and `"... t"` of the keys, divided in any way; result
    `"... s t"`. Positions may leave out the dimensions of `...`.

    Communication: none.

    Args:
      positions: Integers of the queries and of the keys. No query sees a key at a negative position (an empty slot of a
        cache, padding).
      causal: A query sees keys at its own position and before.
      window: A query sees keys less than this many positions away: its own and `window - 1` before it (and after it, if
        not causal).
      segments: Integers of the queries and of the keys, for several documents in one sequence. A query only sees keys
        with its own number.

    Returns:
      Booleans, True where a query sees a key, or None if no mask was asked for.

    Raises:
      SizeError: If the window is not a positive int.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> at = jnp.arange(4)
      >>> print(spmd.nn.attention_mask((at, at), causal=True, window=2).astype(int))
      [[1 0 0 0]
       [1 1 0 0]
       [0 1 1 0]
       [0 0 1 1]]
    """
    check_positive("attention_mask(positions)", window=window)
    given = [x for pair in (positions, segments) if pair is not None for x in pair]
    rank = max((x.ndim for x in given), default=0)
    lifted = [with_rank(x, rank) for x in given]
    seen = []
    if positions is not None:
        q_at, k_at = lifted.pop(0)[..., :, None], lifted.pop(0)[..., None, :]
        ahead = q_at - k_at
        seen.append(jnp.broadcast_to(k_at >= 0, ahead.shape))
        if causal:
            seen.append(ahead >= 0)
        if window is not None:
            seen.append(jnp.abs(ahead) < window)
    if segments is not None:
        seen.append(lifted[0][..., :, None] == lifted[1][..., None, :])
    return functools.reduce(jnp.logical_and, seen) if seen else None


def check_heads(call: str, q: Any, k: Any) -> None:
    """Raise if the key heads do not divide the query heads."""
    if q.shape[-2] % k.shape[-2]:
        rule = f"each key head serves the same number of query heads, and {k.shape[-2]} do not divide {q.shape[-2]}."
        raise SizeError(rule, call=call, got=[f"q: shape {q.shape}", f"k: shape {k.shape}"])


def check_positive(call: str, **given: Any) -> None:
    """Raise if a window, a chunk or a cap is not above zero. Traced values are not checked."""
    for name, value in given.items():
        if value is None or isinstance(value, jax.Array):
            continue
        fault = not_int(name, value, 1, "None")
        if name == "softcap":
            above = is_int(value, 1) or (isinstance(value, float | np.floating) and value > 0)
            fault = "" if above else f"softcap is a number above zero, or None, not {value!r}."
        if fault:
            raise SizeError(fault, call=call)


T = TypeVar("T")


Pair = Any | tuple[Any, Any]


@explained
@scope(mapping=None)
def dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    window: int | None = None,
    segments: Pair = None,
    positions: Pair = None,
    scale: float | None = None,
    softcap: float | None = None,
    tp: Axes = None,
    kv_heads: Literal["divided", "whole"] = "divided",
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention over a whole sequence: multi-head, grouped-query (g < h) or multi-query (g = 1).

    Query head i looks at key and value head i * g // h. The softmax is at least float32, whatever the dtype. A query
    that sees no key gets zeros. Each device works on its own heads. It uses plain einsums, or
    `jax.nn.dot_product_attention` if `implementation` asks for its kernels (mainly "cudnn" on GPUs). These kernels skip
    what is hidden if the only masks are causal masks and windows. `explain` and `search` take it for one kernel (see
    `spmd.fused`), whose scores are neither kept nor written nor read, unless `implementation` is "xla".

    Layouts: q `"... s h/tp k"`, k and v `"... t g/tp k"`, result `"... s h/tp k"`. If there are fewer key heads than
    devices in tp, pass whole keys and values, `"... t g k"`, and `kv_heads="whole"`: each device then picks the heads
    that its queries look at (see `spread_heads`).

    Communication: none, forward and backward. With `kv_heads="whole"`, the backward pass has a psum over tp of the
    gradients of keys and values that are equal by JAX's type: 2S(n-1)/n bytes for S bytes of each.

    Memory: the scores of a device's heads, `"... h/tp s t"`, are kept for the backward pass, unless a kernel avoids
    them. If this is too much, use `jax.checkpoint`, a kernel, or `spmd.parallel.ring_attention`, which works in chunks,
    also on one device.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      mask: Booleans `"... h/tp s t"`, True where a query sees a key. Dimensions may be 1.
      bias: Added to the scores; an array in the same layout as the mask. It may hide keys by -inf. A query of which it
        hides all keys is NaN, where a mask gives zeros.
      causal: A query sees keys at its own position and before.
      window: A query sees keys less than this many positions away, including its own.
      segments: Integers `"... s"`. Queries see keys with the same number. A pair if queries and keys have different
        ones.
      positions: Integers `"s"` or `"... s"`; by default 0, 1, ... A pair if queries and keys have different ones. No
        query sees a key at a negative position.
      scale: The factor of the scores; by default 1 / sqrt(k).
      softcap: Scores become softcap * tanh(scores / softcap), before the mask.
      tp: The mesh axes that divide the heads.
      kv_heads: "divided" like the query heads, or "whole".
      implementation: None for plain einsums; "xla" or "cudnn" for that implementation of
        `jax.nn.dot_product_attention`. On a mesh of CPUs, or of no devices, "cudnn" is plain einsums too, so that a
        program for GPUs can be planned and tested there.

    Returns:
      The mixed values, an array like q.

    Raises:
      SizeError: If the number of key heads does not divide that of the query heads. If a causal mask or a window has
        different numbers of queries and keys, and no positions. If a window or soft cap is not above zero.
      LayoutError: If `kv_heads` is unknown, the mask is not boolean, or an implementation is used with a soft cap.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("s h/tp k, s g/tp k -> s h/tp k", mesh=mesh)
      ... def look(q, v):
      ...     return spmd.nn.dot_product_attention(q, jnp.zeros_like(v), v, causal=True, tp="tp")
      >>> v = jnp.arange(4.0)[:, None, None] * jnp.ones((4, 2, 1))
      >>> print(look(jnp.ones((4, 4, 1)), v)[:, 0, 0])  # the mean of what came before
      [0.  0.5 1.  1.5]

    References:
      Vaswani et al., https://arxiv.org/abs/1706.03762; Ainslie et al., "GQA", https://arxiv.org/abs/2305.13245; the
      soft cap as in Gemma 2, https://arxiv.org/abs/2408.00118
    """
    k, v = spread_heads((k, v), tp=tp) if _is_whole(kv_heads, "dot_product_attention") else (k, v)
    check_heads("dot_product_attention(q, k, v)", q, k)
    if softcap is not None and implementation is not None:
        rule = f"the implementation {implementation!r} has no soft cap."
        raise LayoutError(rule, call="dot_product_attention(q, k, v, softcap=...)", fix="implementation=None")
    if mask is not None and mask.dtype != bool:
        rule = f"a mask is boolean, True where a query sees a key, and this one is {mask.dtype}."
        raise LayoutError(
            rule, call="dot_product_attention(q, k, v, mask=...)", advice="pass what is added to the scores as bias="
        )
    if bias is not None and bias.ndim > 2 and bias.shape[-3] > 1:  # a bias for all heads is equal on all devices
        bias = annotate(bias, "... h/tp s t", tp=tp)
    check_positive("dot_product_attention(q, k, v)", window=window, softcap=softcap)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    counted = (causal or window is not None) and positions is None
    if counted:
        _check_counted(q, k)
    implementation = _kernel_for(q, implementation)
    back = causal or window is None or implementation != "cudnn"  # cuDNN has no windows that look ahead
    known = implementation is not None and mask is None and segments is None and positions is None and back

    def attend(q: Any, k: Any, v: Any, bias: Any, mask: Any, positions: Any, segments: Any) -> Any:
        if known:
            return _by_jax(q, k, v, bias, None, causal, window, scale, implementation)
        at = jnp.arange(q.shape[-3], dtype=jnp.int32) if counted else positions
        made = attention_mask(_pair(at), causal=causal, window=window, segments=_pair(segments))
        mask = _both(mask, made, q.ndim)
        if implementation is None:
            out = _plainly(q, k, v, bias, mask, scale, softcap, tp)
        else:
            out = _by_jax(q, k, v, bias, mask, False, None, scale, implementation)
        if mask is None:
            return out
        seen = jnp.any(mask, axis=-1, keepdims=True)  # "... h s 1"
        return jnp.where(jnp.swapaxes(seen, -3, -2), out, jnp.zeros_like(out))

    if implementation != "xla":
        attend = fused("attention")(attend)
    return attend(q, k, v, bias, mask, positions, segments)


@scope(mapping=None)
def spread_heads(heads: T, *, tp: Axes) -> T:
    """Key and value heads for more devices than heads: each device picks the heads that its queries look at.

    With g heads and n devices, the result has as many heads as the least common multiple of g and n. Each head is
    repeated, and the result is divided. With g = 2 and n = 4 each device holds one head, and two devices hold the same
    one: a device needs the memory of one head, not of g.

    Layouts: heads `"... g k"`, whole on tp; result `"... n/tp k"`. The heads are keys and values, or the weights that
    make them, `"d g k"`. With weights each device also computes only the heads that it holds, as in
    `multi_head_attention`.

    Communication: none forward. Backward, if the heads are equal by JAX's own type, a psum of their gradient over tp,
    2S(n-1)/n bytes for S bytes.

    Args:
      heads: An array, or a tree of arrays.
      tp: The mesh axes that divide the query heads.

    Returns:
      The heads, divided.

    Raises:
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> spread = spmd.kernel("g k -> n/tp k", mesh=mesh)(lambda x: spmd.nn.spread_heads(x, tp="tp"))
      >>> print(spread(jnp.array([[5.0], [7.0]]))[:, 0])
      [5. 5. 7. 7.]
    """
    parts = axis_size(tp) if tp else 1

    def spread(x: Any) -> Any:
        groups = x.shape[-2]
        copies = math.lcm(groups, parts)
        head = iota("n/tp", n=copies, tp=tp)
        which = head * groups // copies
        return take(x, which, "... [g] k, n/tp -> ... n/tp k", tp=tp)

    return jax.tree.map(spread, heads)


@scope(mapping=None)
def multi_head_attention(
    x: Any,
    wq: Any,
    wk: Any,
    wv: Any,
    wo: Any,
    *,
    biases: tuple[Any, Any, Any] | None = None,
    attend: Callable[[Any, Any, Any], Any] | None = None,
    frequencies: Any = None,
    positions: Any = None,
    tp: Axes = None,
    sp: Axes = None,
    cp: Axes = None,
    kv_heads: Literal["divided", "whole"] = "divided",
    overlap: bool = False,
    **options: Any,
) -> jax.Array:
    """The attention layer: projections to heads, rotary positions, attention, output projection.

    Layouts: x and result `"... s/cp/sp d"` (with `sp=None` and `cp=None` any `"... s d"`), wq `"d h/tp k"`, wk and wv
    `"d g/tp k"`, wo `"h/tp k d"`. With fewer key heads than devices in tp, wk and wv `"d g k"` and
    `kv_heads="whole"`.

    Communication, for S bytes of `"... s/cp d"` per device, on n devices of tp: with `sp`, an all_gather and a
    psum_scatter of S(n-1)/n bytes each, forward and again backward. Without `sp`, a psum of 2S(n-1)/n bytes, forward
    and again backward. `attend` adds its own. If a weight is equal on axes that divide tokens, its gradient is summed
    over them, 2W(m-1)/m bytes for W bytes on m devices. With `kv_heads="whole"` the gradients of wk and wv are summed
    over tp as well. `overlap` changes this as in `column_linear` and `row_linear`.

    Memory: the gathered x, queries, keys, values and mixed values are kept, and what `attend` keeps.

    Args:
      x: The activations.
      wq: Weights of the queries.
      wk: Weights of the keys.
      wv: Weights of the values.
      wo: Weights of the output projection.
      biases: The biases of queries, keys and values: `"h/tp k"`, `"g/tp k"` and `"g/tp k"`.
      attend: A function from queries, keys and values, `"... s/cp h/tp k"`, to the mixed values, such as `lambda q, k,
        v: spmd.parallel.ring_attention(q, k, v, cp="cp", tp="tp", causal=True)`. By default `dot_product_attention`
        with tp and the options.
      frequencies: Those of `rotary_frequencies`, or None for no rotary embedding.
      positions: The positions for the rotary embedding, integers `"s/cp"` or `"... s/cp"`; by default 0, 1, ... over
        all of s. Masks count tokens in the order of the array, unless `attend` does otherwise.
      tp: The mesh axes that divide the heads.
      sp: The mesh axes that divide the sequence outside; the same as tp, or None.
      cp: Mesh axes that divide the sequence throughout. They require `attend`.
      kv_heads: "divided" like the query heads, or "whole".
      overlap: Whether gather and scatter are rings that overlap with the projections, as in `column_linear` and
        `row_linear`.
      **options: Those of `dot_product_attention`: causal, window, segments, softcap and so on.

    Returns:
      An array like x, not yet added to it.

    Raises:
      LayoutError: If the sequence is divided and `attend` is missing, options are given besides `attend`, or positions
        are given without frequencies.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> layouts = ("b s/tp d", "d h/tp k", "d g/tp k", "d g/tp k", "h/tp k d")
      >>> @spmd.kernel(in_layouts=layouts, out_layouts="b s/tp d", mesh=mesh)
      ... def layer(x, wq, wk, wv, wo):
      ...     turn = spmd.nn.rotary_frequencies(6)
      ...     return x + spmd.nn.multi_head_attention(
      ...         x, wq, wk, wv, wo, frequencies=turn, causal=True, tp="tp", sp="tp")
      >>> sizes = (2, 8, 5), (5, 4, 6), (5, 2, 6), (5, 2, 6), (4, 6, 5)
      >>> print(layer(*map(jnp.ones, sizes))[0, 0])
      [121. 121. 121. 121. 121.]

    References:
      Those of `dot_product_attention`, `rotary_embedding` and `column_linear`.
    """
    if attend is None and cp is not None:
        rule = "dot_product_attention works on whole sequences, and cp divides this one."
        advice = "attend=lambda q, k, v: spmd.parallel.ring_attention(q, k, v, cp=..., tp=..., causal=True)"
        raise LayoutError(rule, call="multi_head_attention(x, ..., cp=...)", advice=advice)
    if attend is not None and options:
        rule = f"attend is given, so {', '.join(sorted(options))} would not be used: pass it to attend."
        raise LayoutError(rule, call="multi_head_attention(x, ..., attend=...)")
    if positions is not None and frequencies is None:
        rule = "positions are those of the rotary embedding, which needs frequencies."
        advice = "as in frequencies=spmd.nn.rotary_frequencies(k)"
        raise LayoutError(rule, call="multi_head_attention(x, ..., positions=...)", advice=advice)
    if _is_whole(kv_heads, "multi_head_attention"):
        wk, wv = spread_heads((wk, wv), tp=tp)  # the weights, so that only the heads in use are computed
        biases = biases and (biases[0], *spread_heads(biases[1:], tp=tp))
    q, k, v = column_linear(x, (wq, wk, wv), biases, tp=tp, sp=sp, cp=cp, overlap=overlap)
    if frequencies is not None:
        if positions is None:
            counted = iota("s/cp", s=size(q, "... [s/cp] h/tp k", cp=cp, tp=tp), cp=cp)
            positions = ordered(counted, "contiguous", cp, anew=True)
        positions = annotate(positions, "... s/cp", cp=cp)
        q, k = (rotary_embedding(y, positions, frequencies) for y in (q, k))
    mixed = dot_product_attention(q, k, v, tp=tp, **options) if attend is None else attend(q, k, v)
    return row_linear(mixed, wo, tp=tp, sp=sp, cp=cp, overlap=overlap)


# --- what is computed on each device -----------------------------------------------------------------------------


def _kernel_for(q: Any, implementation: str | None) -> str | None:
    """The implementation to use here: without a GPU plain einsums have cuDNN's numbers, and in plans its kernel."""
    if implementation != "cudnn":
        return implementation
    if not _compat.runs_on_gpu():
        return None
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        rule = f"cuDNN's attention is for bfloat16 and float16, and these queries are {q.dtype}."
        raise LayoutError(rule, call="dot_product_attention(q, k, v, ...)", fix="implementation=None")
    return implementation


def _by_jax(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    causal: bool,
    window: int | None,
    scale: float,
    implementation: Any,
) -> Any:
    """`jax.nn.dot_product_attention`, mapped over the dimensions that it does not take."""
    reach = None if window is None else (window - 1, 0 if causal else window - 1)

    def attend(q: Any, k: Any, v: Any, *given: Any) -> Any:
        named = dict(zip([n for n, x in (("bias", bias), ("mask", mask)) if x is not None], given, strict=True))
        # Its own code promotes dtypes, also under a caller's strict promotion rules.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jax.nn.dot_product_attention(
                q, k, v, **named, scale=scale, is_causal=causal, local_window_size=reach, implementation=implementation
            )

    given = [with_rank(x, q.ndim) for x in (bias, mask) if x is not None]
    lead = q.ndim - 4
    if lead > 0:
        given = [jnp.broadcast_to(x, (*q.shape[:lead], *x.shape[lead:])) for x in given]
    for _ in range(lead):
        attend = jax.vmap(attend)
    return attend(q, k, v, *given)


def _plainly(q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float, softcap: float | None, tp: Axes) -> Any:
    groups = size(k, "... t [g/tp] k", tp=tp)
    pattern = "... s (g r)/tp k, ... t g/tp k -> ... (g r)/tp s t"
    scores = wide_einsum(q, k, pattern, g=groups, tp=tp) * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + with_rank(bias.astype(scores.dtype), scores.ndim)
    mask = None if mask is None else with_rank(mask, scores.ndim)
    weights = softmax(scores, "... h/tp s [t]", where=mask, tp=tp).astype(v.dtype)
    return einsum(weights, v, "... (g r)/tp s t, ... t g/tp k -> ... s (g r)/tp k", g=groups, tp=tp)


# --- arguments ---------------------------------------------------------------------------------------------------


def _pair(x: Pair) -> Any:
    return x if x is None or isinstance(x, tuple) else (x, x)


def _both(mask: Any, made: Any, rank: int) -> Any:
    """The user's mask `"... h s t"` and the one of positions and segments, `"... s t"`."""
    if made is None:
        return mask
    made = with_rank(jnp.expand_dims(made, -3), rank)
    return made if mask is None else made & with_rank(mask, rank)


def _is_whole(kv_heads: str, call: str) -> bool:
    check_one_of("kv_heads", kv_heads, ("divided", "whole"), f"{call}(..., kv_heads={kv_heads!r})")
    return kv_heads == "whole"


def _check_counted(q: Any, k: Any) -> None:
    if q.shape[-3] != k.shape[-3]:
        raise SizeError(
            "causal masks and windows compare positions. The numbers of queries and keys differ, so the positions "
            "must be given.",
            call="dot_product_attention(q, k, v, causal=True)",
            got=[f"q: shape {q.shape}", f"k: shape {k.shape}"],
            advice="positions=(q_positions, k_positions)",
        )


# --- rotary position embeddings, for given positions --------------------------------------------------------------


SCALINGS = ("linear", "ntk", "llama3")


def rotary_embedding(x: Any, positions: Any, frequencies: Any, *, interleaved: bool = False) -> jax.Array:
    """Rotate the features of each head by angles that grow with the position.

    The positions are an argument, so the result is right for a divided sequence: pass `spmd.iota("s/cp")`, or
    `spmd.parallel.sequence_positions` for a balanced placement. Angles are at least float32, whatever the dtype of x.
    This is plain JAX, for any mode.

    Layouts: x `"... s h k"`, divided in any way except along k; positions `"s"` or `"... s"`; frequencies `"k/2"` (half
    of k, whole). The result is like x.

    Communication: none, forward and backward.

    Args:
      x: Queries or keys.
      positions: Their positions, integers.
      frequencies: Angles per position, from `rotary_frequencies`. If there are fewer than k/2, the remaining features
        stay as they are (partial rotary embeddings).
      interleaved: Whether features 2i and 2i+1 are a pair, as in the paper. Otherwise i and i + k/2 are, as in Llama's
        weights on Hugging Face and in GPT-NeoX.

    Returns:
      The array, rotated, in the dtype of x.

    Raises:
      SizeError: If there are more frequencies than pairs of features.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> turn = spmd.kernel("s/cp h k -> s/cp h k", mesh=mesh)(lambda x: spmd.nn.rotary_embedding(
      ...     x, spmd.iota("s/cp"), spmd.nn.rotary_frequencies(2)))
      >>> print(jnp.round(100 * turn(jnp.ones((4, 1, 2)))[1, 0]))  # by one radian
      [-30. 138.]

    References:
      Su et al., "RoFormer", https://arxiv.org/abs/2104.09864
    """
    turned = 2 * frequencies.shape[-1]
    if turned > x.shape[-1]:
        rule = f"{turned // 2} frequencies turn {turned} features, and x has {x.shape[-1]}."
        raise SizeError(rule, call="rotary_embedding(x, positions, frequencies)")
    at, turns = positions.astype(wide(x)), frequencies.astype(wide(x))
    angles = at[..., None, None] * turns.reshape((1,) * (positions.ndim + 1) + (-1,))
    angles = with_rank(angles, x.ndim)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turning, rest = x[..., :turned].astype(wide(x)), x[..., turned:]
    if interleaved:
        one, two = turning[..., 0::2], turning[..., 1::2]
        pairs = jnp.stack([one * cos - two * sin, one * sin + two * cos], axis=-1)
        out = pairs.reshape(turning.shape)
    else:
        one, two = jnp.split(turning, 2, axis=-1)
        out = jnp.concatenate([one * cos - two * sin, one * sin + two * cos], axis=-1)
    return jnp.concatenate([out.astype(x.dtype), rest], axis=-1)


@explained
@scope
def rotary_frequencies(
    k: int,
    *,
    theta: float = 10_000.0,
    scaling: str | None = None,
    factor: float = 1.0,
    original_length: int = 8192,
    low: float = 1.0,
    high: float = 4.0,
) -> jax.Array:
    """The angles per position for `rotary_embedding`: theta ** (-2i/k), stretched for sequences longer than trained on.

    Communication: none; the numbers are the same on all devices.

    Args:
      k: The number of rotated features, an even number: the size of a head, or less for partial rotary embeddings.
      theta: The base; a larger base rotates slower.
      scaling: None, or one of three. "linear" divides all angles by the factor (position interpolation). "ntk" raises
        the base to theta * factor ** (k / (k - 2)), which keeps the fastest angle and divides the slowest by the
        factor. "llama3" divides by the factor those that rotate less than `low` times in the original length, keeps
        those that rotate more than `high` times, and blends in between.
      factor: How many times longer sequences become.
      original_length: For "llama3", the length trained on.
      low: For "llama3", the number of rotations below which the factor fully applies.
      high: For "llama3", the number of rotations above which it does not apply.

    Returns:
      k/2 angles, fastest first: float32, or float64 if `jax_enable_x64` is set.

    Raises:
      LayoutError: If the scaling is unknown.
      SizeError: If k is odd.

    Example:
      >>> import spmd
      >>> print(spmd.nn.rotary_frequencies(4), spmd.nn.rotary_frequencies(4, scaling="linear", factor=2.0))
      [1.   0.01] [0.5   0.005]

    References:
      Linear: https://arxiv.org/abs/2306.15595. NTK-aware: https://arxiv.org/abs/2309.00071 (section 3.1). Llama 3:
      https://github.com/meta-llama/llama-models (apply_scaling).
    """
    call = f"rotary_frequencies({k!r})"
    if k % 2:
        raise SizeError(f"features are rotated in pairs, and {k} is odd.", call=call)
    if scaling not in (None, *SCALINGS):
        shown = ", ".join(map(repr, SCALINGS))
        hint = did_you_mean(str(scaling), SCALINGS) or "."
        raise LayoutError(f"scaling is None or one of {shown}, not {scaling!r}{hint}", call=call)
    if scaling == "ntk" and k > 2:
        theta = theta * factor ** (k / (k - 2))
    frequencies = theta ** (-jnp.arange(0, k, 2, dtype=float) / k)
    if scaling == "linear":
        frequencies = frequencies / factor
    if scaling == "llama3":
        turns = original_length * frequencies / (2 * math.pi)
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    return frequencies
