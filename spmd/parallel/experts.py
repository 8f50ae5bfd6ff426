"""Mixture of experts: tokens choose experts, and travel to the devices that hold them.

Tokens are cut into *routing groups*, and each group gives each expert the same number of places, its capacity. Groups
are a dimension like any other, `"n/dp m/sp"`, so the strings determine what happens to a token, and the mesh does not.
In all strings of this file:

    b batch   s sequence   d features   e experts   f hidden units of an expert   k choices of a token
    n, m groups along batch and sequence   t tokens of a group   c places for a group in an expert
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from spmd import (
    all_gather,
    all_to_all,
    annotate,
    axis_size,
    defer,
    einsum,
    psum,
    rearrange,
    reduce,
    scope,
    size,
    softmax,
    top_k,
)
from spmd._trees.leaves import not_int
from spmd.errors import LayoutError, MeshError, SizeError, check_one_of, is_int
from spmd.language import Axes, axes_tuple
from spmd.nn.norm import wide
from spmd.parallel._dropless import (
    Moves,
    collected,
    dispatched,
    exchange_of,
    in_order,
    moves_of,
    near,
    without_capacity,
)


class Routing(NamedTuple):
    """Where tokens go: the result of `router`, for `moe`. All dimensions except the last are those of the tokens.

    Attributes:
      weights: `"... k"`, at least float32: the weight of each chosen expert's result.
      experts: `"... k"`, int32: the chosen experts, the best first.
      shares: `"... e"`, at least float32: the scores of all experts, normalized to sum 1.
      logits: `"... e"`, at least float32: the logits of all experts.
    """

    weights: Any
    experts: Any
    shares: Any
    logits: Any


class MoEReport(NamedTuple):
    """The report of `moe`: means over all tokens of all devices, equal on all devices.

    Attributes:
      balance_loss: Scalar: e times the sum over experts of (share of the choices) x (mean of `shares`). It is 1 if
        choices and scores are uniform. Its gradient flows through `shares`.
      z_loss: Scalar: the mean of the squared logsumexp of the logits.
      load: `"e"`: each expert's share of all choices, including dropped ones; sums to 1.
      drop_rate: Scalar: the share of all choices that found no place, or no room in `rows`.
    """

    balance_loss: Any
    z_loss: Any
    load: Any
    drop_rate: Any


@scope(mapping=None)
def router(
    x: Any,
    w: Any,
    *,
    k: int,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Any = None,
    noise: Any = None,
    among: tuple[int, int] | None = None,
) -> Routing:
    """Choose k experts for each token, in at least float32, whatever the dtype of x.

    Layouts: x `"... d"`, w `"d e"`, bias `"e"`, noise `"... e"`; results `"... k"` and `"... e"`, with `...` as in x.

    Communication: nothing forward. w is whole on the axes that divide tokens. If it is equal by JAX's own type there,
    its gradient is one psum over the axes that divide x, 2S(n-1)/n bytes for S = 4de. If it is deferred (`{R:}`) or a
    gathered copy, its gradient stays a partial sum, which the caller reduces once. If a partial gradient were used as
    the complete one, the devices' routers would drift apart; the check of the traced body makes this an error.

    Memory: x in float32 and the scores are kept for the backward pass.

    Args:
      x: The tokens.
      w: The router's weights.
      k: The number of experts that a token chooses. Of equal scores the lower expert wins.
      scores: "softmax" over the experts, or "sigmoid" of each.
      normalize: Divide the chosen experts' scores by their sum.
      scale: Multiplies the weights.
      bias: Added to the scores for the choice only, without gradient (see `balance_bias`).
      noise: Added to the logits: draw it with `spmd.random.normal(key, "b/dp s/sp e")`.
      among: A pair (n, m): the experts form n groups of equal size, one after another, and a token chooses among those
        of its m best groups. If a group is what one device of ep holds, a token goes to at most m devices. A group is
        as good as the sum of its two best scores, with the bias.

    Returns:
      A `Routing`.

    Raises:
      LayoutError: If scores is something else.
      SizeError: If there are fewer than k experts to choose among, or they do not form such groups.

    Example:
      >>> import jax.numpy as jnp, numpy as np, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(dp=2)
      >>> @spmd.kernel("t/dp d, d e -> t/dp k, t/dp k", mesh=mesh)
      ... def choose(x, w):
      ...     routing = parallel.router(x, w, k=2)
      ...     return routing.experts, routing.weights
      >>> experts, weights = choose(jnp.eye(2), jnp.array([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]]))
      >>> print(experts.tolist())
      [[1, 2], [0, 1]]
      >>> print(np.asarray(weights).round(2))
      [[0.73 0.27]
       [0.5  0.5 ]]

    References:
      Shazeer et al., "Outrageously Large Neural Networks", https://arxiv.org/abs/1701.06538;
      DeepSeek-AI, "DeepSeek-V3", https://arxiv.org/abs/2412.19437 (sigmoid scores, bias, groups)
    """
    if among is not None:
        _check_among(among, w.shape[-1], k)
    check_one_of("scores", scores, ("softmax", "sigmoid"), f"router(x, w, k={k!r}, scores={scores!r})")
    logits = einsum(x.astype(wide(x)), w.astype(wide(x)), "... d, d e -> ... e", precision=jax.lax.Precision.HIGHEST)
    if noise is not None:
        logits = logits + noise.astype(logits.dtype)
    if scores == "softmax":
        scored = shares = softmax(logits, "... [e]")
    else:
        scored = jax.nn.sigmoid(logits)
        shares = scored / jnp.sum(scored, axis=-1, keepdims=True)
    if bias is None and among is None:
        weights, experts = top_k(scored, "... [e]", k)
    else:
        shifted = scored
        if bias is not None:
            shifted = scored + jnp.expand_dims(bias.astype(scored.dtype), tuple(range(scored.ndim - 1)))
        shifted = jax.lax.stop_gradient(shifted)
        _, experts = top_k(shifted if among is None else _in_best_groups(shifted, *among), "... [e]", k)
        weights = jnp.take_along_axis(scored, experts, axis=-1)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(weights * scale, experts, shares, logits)


def _check_among(among: Any, e: int, k: int) -> None:
    call = f"router(x, w, k={k!r}, among={among!r})"
    if not (isinstance(among, tuple) and len(among) == 2 and all(is_int(g, 1) for g in among) and among[1] <= among[0]):
        rule = "among is a pair of positive ints: how many groups the experts form, and how many of them a token takes."
        raise SizeError(rule, call=call, advice="as in among=(8, 4)")
    n, m = among
    if e % n:
        raise SizeError(f"{e} experts do not form {n} groups of equal size.", call=call)
    if k > m * (e // n):
        raise SizeError(f"a token chooses {k} experts, and its groups ({m}) have only {m * (e // n)}.", call=call)


def _in_best_groups(scores: Any, n: int, m: int) -> Any:
    """The scores `"... e"`, minus infinity outside the m best of n groups."""
    groups = jnp.reshape(scores, (*scores.shape[:-1], n, -1))
    best, _ = top_k(groups, "... n [e]", min(2, groups.shape[-1]))
    _, taken = top_k(jnp.sum(best, axis=-1), "... [n]", m)
    among = jnp.any(jax.nn.one_hot(taken, n, dtype=bool), axis=-2)
    return jnp.reshape(jnp.where(among[..., None], groups, -jnp.inf), scores.shape)


def balance_bias(bias: Any, load: Any, *, rate: float = 1e-3) -> jax.Array:
    """One step of balancing without a loss: the bias falls by `rate` for overloaded experts and rises for the others.

    Layouts: bias and load `"e"`, whole. Communication: none; `MoEReport.load` is global already.

    Args:
      bias: What `router` adds to the scores for the choice.
      load: The share of the choices of each expert, from `MoEReport`.
      rate: The step.

    Returns:
      The new bias.

    Example:
      >>> import jax.numpy as jnp
      >>> from spmd import parallel
      >>> print(parallel.balance_bias(jnp.zeros(3), jnp.array([0.5, 0.25, 0.25]), rate=0.5))
      [-0.5  0.5  0.5]

    References:
      Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", https://arxiv.org/abs/2408.15664
    """
    load = jax.lax.stop_gradient(load)
    return bias + (rate * jnp.sign(jnp.mean(load) - load)).astype(bias.dtype)


@scope(mapping=None)
def moe(
    x: Any,
    routing: Routing,
    gate: Any,
    up: Any,
    down: Any,
    *,
    dp: Axes = None,
    sp: Axes = None,
    ep: Axes = None,
    tp: Axes = None,
    groups: tuple[int, int] | None = None,
    capacity_factor: float | None = 1.25,
    rows: int | None = None,
    ragged: bool | None = None,
    shared: tuple[Any, Any, Any] | None = None,
    activation: Callable[[Any], Any] = jax.nn.silu,
) -> tuple[jax.Array, MoEReport]:
    """Mixture of experts: each token goes through the experts it chose, gated MLPs that are divided over devices.

    Layouts: x and the result `"b/dp s/sp d"`, routing `"b/dp s/sp k"` and `"b/dp s/sp e"`; gate and up `"e/ep d f/tp"`,
    down `"e/ep f/tp d"`; shared gate and up `"d f/tp"`, down `"f/tp d"`. The axes of ep are the last axes of dp or of
    sp: `dp=("dp", "ep"), ep="ep"`. tp either does not divide tokens, or is the last axis of sp (before ep), as in
    Megatron's sequence parallelism. For FSDP, gather the weights first.

    Capacity: batch and sequence are cut into `groups = (n, m)` pieces, which makes n x m routing groups of t tokens. In
    each group, an expert takes at most c = ceil(capacity_factor * k * t / e) tokens, and never more than t: first all
    first choices in the order of the tokens, then the second choices. Choices without a place count zero. What is
    dropped depends on the groups, not on the mesh. The default, one group for each block of tokens, is (size of dp,
    size of sp), so pass `groups` to compare results between meshes.

    Without a capacity (`capacity_factor=None`) no expert has places. A device sorts its choices by expert, sends them
    to the experts' devices, and each expert multiplies the rows that it has (`jax.lax.ragged_dot`, on GPUs a loop over
    tiles of rows). `rows` bounds what one device takes from the blocks that it exchanges with; in a block of t tokens,
    by default all that can come: ep min(k, e/ep) t. With fewer rows, those of the last blocks, and of the last experts
    in a block, find no room: they count zero, and `drop_rate` counts them. So only with `rows` does the result depend
    on the mesh; `groups` do not matter.

    Communication, per device. A = n m e c d is the number of elements of all places, and B = b s d that of all tokens,
    both divided by the number of devices along dp and sp (all axes of both), in bytes of x's dtype. Forward: two
    all_to_alls over ep, dispatch and combine, A (ep-1)/ep each, and for the report one psum of 2e + 2 float32. With tp
    in sp, also an all_gather and a psum_scatter over tp, A (tp-1) each. With tp elsewhere, one psum of the result, 2B
    (tp-1)/tp. Backward: the same all_to_alls, all_gather and psum_scatter. With tp not in sp, one psum of x's gradient,
    2B (tp-1)/tp, and one psum of the gradient of the weights, k float32 per token. The gradients of gate, up and down
    are complete on ep and tp. On the other axes of dp and sp each is one psum, or stays partial if it is deferred or
    gathered. With tp in sp, a shared expert adds an all_gather and a psum_scatter each way, B (tp-1) each; otherwise it
    adds nothing.

    Without a capacity A is n m p d instead, where p is ep min(rows, min(k, e/ep) t), and the devices learn of each
    other how many rows they have for each expert: an all_gather over ep, 4e(ep-1) bytes, and with tp in sp another over
    tp, 4e ep(tp-1). Each pair of devices has room for its own worst case. On hardware with ragged_all_to_all, which
    CPUs are not, only rows that are there travel: about k t d (ep-1)/ep elements, whatever the bound, and with tp in sp
    p is `rows` for all_gather and psum_scatter.

    Memory: the places, A elements before and after the experts (times tp with tp in sp), and twice A f / d hidden
    units. There is no array of tokens x experts x places. Gathers move rows, also in the backward pass. Without a
    capacity, the rows that can come, times d and twice f. On CPUs JAX computes `ragged_dot` by a masked copy of the
    rows for each expert of a device; TPUs have a kernel for it. On GPUs a loop over tiles needs no copies.

    Args:
      x: The tokens.
      routing: From `router`.
      gate: The experts' gate projections, whose results go through the activation.
      up: The experts' up projections, whose results are multiplied by the gates.
      down: The experts' down projections.
      dp: The mesh axes that divide the batch, including those of ep if they do.
      sp: The mesh axes that divide the sequence.
      ep: The mesh axes that divide the experts.
      tp: The mesh axes that divide the hidden units.
      groups: The numbers of pieces of batch and sequence; multiples of the sizes of dp and sp.
      capacity_factor: Places per expert, in units of a balanced load; None for experts without a capacity.
      rows: Without a capacity, the most rows that one device takes; None for all that can come. A balanced load is k t.
      ragged: Without a capacity, whether rows travel by ragged_all_to_all in explicit mode; None for where devices are
        not CPUs. It wants the axes of ep in the order of the mesh, and is an all_to_all of padded blocks elsewhere.
      shared: Gate, up and down of an expert that takes every token with weight 1.
      activation: The activation of the gate.

    Returns:
      The sum over the chosen experts, and a `MoEReport`.

    Raises:
      MeshError: If ep or tp uses an axis that it may not use.
      SizeError: If groups do not divide, or the capacity factor or rows are not above zero.
      LayoutError: If rows or ragged are given besides a capacity factor.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(dp=2, ep=4)
      >>> @spmd.kernel("b/dp/ep s d, d e, e/ep d f, e/ep d f, e/ep f d -> b/dp/ep s d, scalar", mesh=mesh)
      ... def layer(x, w_router, gate, up, down):
      ...     routing = parallel.router(x, w_router, k=2)
      ...     y, report = parallel.moe(x, routing, gate, up, down, dp=("dp", "ep"), ep="ep")
      ...     return y, report.drop_rate
      >>> x, w = jnp.ones((8, 4, 6)), jnp.zeros((4, 6, 3))
      >>> y, drop_rate = layer(x, jnp.zeros((6, 4)), w, w, jnp.zeros((4, 3, 6)))
      >>> # without scores all tokens choose experts 0 and 1, which have 3 places for 4
      >>> print(y.shape, drop_rate)
      (8, 4, 6) 0.25

    References:
      Lepikhin et al., "GShard", https://arxiv.org/abs/2006.16668; Fedus et al., "Switch Transformers",
      https://arxiv.org/abs/2101.03961; Gale et al., "MegaBlocks" (no capacity), https://arxiv.org/abs/2211.15841; Zoph
      et al., "ST-MoE", https://arxiv.org/abs/2202.08906 (z-loss)
    """
    _check_bounds(capacity_factor, rows, ragged)
    at = _places(dp, sp, ep, tp, shared is not None)
    n, m = _groups(x, groups, dp, sp)
    if capacity_factor is None:
        n, m = _groups(x, None, dp, sp)  # nothing depends on groups: one for each block
    # Blocks come first: the inside of a group is whole, so its size is the same in every mode.
    blocks = rearrange(x, "(n b)/dp (m s)/sp d -> n/dp b m/sp s d", dp=dp, sp=sp, n=n, m=m)
    b, t = blocks.shape[1], blocks.shape[1] * blocks.shape[3]
    group = rearrange(blocks, "n/dp b m/sp s d -> n/dp m/sp (b s) d", dp=dp, sp=sp)
    grouped = "(n b)/dp (m s)/sp k -> n/dp m/sp (b s) k"
    routing = Routing(*(rearrange(part, grouped, dp=dp, sp=sp, n=n, m=m) for part in routing))
    k, e = routing.experts.shape[-1], routing.shares.shape[-1]
    # With tp not in sp, x is equal along tp: its gradient is summed here, once for all experts.
    group = defer(group, "n/dp m/sp t d -> n/dp m/sp t d {R:whole}", dp=dp, sp=sp, whole=at["whole"])
    weights = gate, up, down
    if capacity_factor is None:
        exchange = exchange_of(at, e, t, k, rows, ragged)
        chosen, kept, load = without_capacity(group, routing.experts, weights, activation, exchange)
    else:
        c = min(t, math.ceil(capacity_factor * k * t / e))
        chosen, kept, load = _with_capacity(group, routing.experts, weights, activation, at, e, c)
    chosen = annotate(chosen, "n/dp m/sp kt d {U:whole}", dp=dp, sp=sp, whole=at["whole"])
    chosen = jnp.reshape(chosen, (*group.shape[:2], k, t, -1)).astype(routing.weights.dtype)
    out = jnp.sum(chosen * jnp.swapaxes(routing.weights, 2, 3)[..., None], axis=2).astype(x.dtype)
    if shared is not None:
        out = out + _shared(group, *shared, activation, at)
    back = "n/dp m/sp (b s) d {U:whole} -> (n b)/dp (m s)/sp d {U:whole}"
    out = rearrange(out, back, dp=dp, sp=sp, whole=at["whole"], b=b)
    out = psum(out, "b/dp s/sp d {U:whole} -> b/dp s/sp d", dp=dp, sp=sp, whole=at["whole"])
    return out, _report(routing, load, kept, dp, sp)


def _check_bounds(capacity_factor: float | None, rows: int | None, ragged: bool | None) -> None:
    call = "moe(x, routing, gate, up, down)"
    if capacity_factor is not None and not capacity_factor > 0:
        rule = f"capacity_factor is above zero, or None for experts without a capacity, not {capacity_factor}."
        raise SizeError(rule, call=call, advice="as in capacity_factor=1.25")
    if capacity_factor is not None and (rows is not None or ragged is not None):
        rule = "rows and ragged are about experts without a capacity: with one, each expert has its places."
        raise LayoutError(rule, call=call, fix="capacity_factor=None")
    if rows is not None and (fault := not_int("rows, the most that one device takes,", rows, 1)):
        raise SizeError(fault, call=call, advice="as in rows=2 * k * t, twice a balanced load")


# --- choices and places: local to each group ----------------------------------------------------------------


def _with_capacity(
    group: Any, experts: Any, weights: tuple[Any, Any, Any], activation: Any, at: dict[str, Any], e: int, c: int
) -> tuple[Any, Any, Any]:
    """The results of the choices, whether each has a place, and the load of the experts."""
    moves, load = _plan(experts, e, c)
    # In auto mode, annotate tells the compiler that no row leaves its group. A gather of rows does not show that.
    x = jnp.reshape(dispatched(group, moves), (*group.shape[:2], e, c, -1))
    x = annotate(x, "n/dp/by_b m/sp/tp_s/by_s e c d", **near(at))
    results = _experts(x, *weights, activation, at)
    return collected(jnp.reshape(results, (*group.shape[:2], e * c, -1)), moves), moves.kept, load


def _plan(experts: Any, e: int, c: int) -> tuple[Moves, Any]:
    """The places of the choices `"n m t k"`, and each expert's share of the choices, `"n m e"`."""

    def of_group(experts: Any) -> tuple[Moves, Any]:
        """Of the choices of one group each expert takes the first c."""
        order, counts = in_order(experts, e)
        return moves_of(experts.T.reshape(-1), order, counts, jnp.minimum(counts, c), c), counts / order.size

    return jax.vmap(jax.vmap(of_group))(experts)


# --- the experts --------------------------------------------------------------------------------------------


def _experts(places: Any, gate: Any, up: Any, down: Any, activation: Any, at: dict[str, Any]) -> Any:
    """Send tokens to the experts' devices, through the experts, and back: a partial sum if tp divides no tokens."""
    outside, inside = _axes_of(at)
    x = all_to_all(places, "n/dp/by_b m/sp/tp_s/by_s e c d -> n/dp m/sp/tp_s e/by_b/by_s c d", **outside)
    x = all_gather(x, "n/dp m/sp/tp_s e/by_b/by_s c d -> n/dp m/sp e/by_b/by_s c d", **outside)
    into = "n/dp m/sp e/by_b/by_s c d, e/by_b/by_s d f/tp -> n/dp m/sp e/by_b/by_s c f/tp"
    h = activation(einsum(x, gate, into, **inside)) * einsum(x, up, into, **inside)
    out_of = "n/dp m/sp e/by_b/by_s c f/tp, e/by_b/by_s f/tp d -> n/dp m/sp/tp_s e/by_b/by_s c d {U:whole}"
    y = einsum(h, down, out_of, tp=at["tp"], whole=at["whole"], **outside)
    home = "n/dp m/sp/tp_s e/by_b/by_s c d {U:whole} -> n/dp/by_b m/sp/tp_s/by_s e c d {U:whole}"
    return all_to_all(y, home, whole=at["whole"], **outside)


def _shared(group: Any, gate: Any, up: Any, down: Any, activation: Any, at: dict[str, Any]) -> Any:
    """The expert that takes every token."""
    outside, inside = _axes_of(at)
    x = all_gather(group, "n/dp/by_b m/sp/by_s/tp_s t d -> n/dp/by_b m/sp/by_s t d", **outside)
    into = "n/dp/by_b m/sp/by_s t d, d f/tp -> n/dp/by_b m/sp/by_s t f/tp"
    h = activation(einsum(x, gate, into, **inside)) * einsum(x, up, into, **inside)
    out_of = "n/dp/by_b m/sp/by_s t f/tp, f/tp d -> n/dp/by_b m/sp/by_s/tp_s t d {U:whole}"
    return einsum(h, down, out_of, tp=at["tp"], whole=at["whole"], **outside)


def _axes_of(at: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The axes outside the products, where tp may divide tokens, and inside them, where it divides hidden units."""
    return near(at), {**{name: axes for name, axes in near(at).items() if name != "tp_s"}, "tp": at["tp"]}


def _report(routing: Routing, load: Any, kept: Any, dp: Axes, sp: Axes) -> MoEReport:
    """All means in one psum. A mean of products of local means would be a different number."""
    squares = jax.nn.logsumexp(routing.logits, axis=-1) ** 2
    dropped = jnp.mean(~kept, axis=2, dtype=jnp.float32)
    parts = (load, jnp.mean(routing.shares, axis=2), jnp.mean(squares, axis=2)[..., None], dropped[..., None])
    e = load.shape[-1]
    together = jnp.concatenate([part.astype(routing.shares.dtype) for part in parts], axis=-1)
    means = reduce(together, "n/dp m/sp w -> w", "mean", dp=dp, sp=sp)
    load, shares = means[:e], means[e : 2 * e]
    return MoEReport(e * jnp.sum(load * shares), means[2 * e], load, means[2 * e + 1])


# --- placements ---------------------------------------------------------------------------------------------


def _places(dp: Axes, sp: Axes, ep: Axes, tp: Axes, shared: bool) -> dict[str, Any]:
    """The mesh axes of the placeholders in the strings.

    dp and sp are without ep and tp. by_b and by_s are ep, if it divides the batch or the sequence. tp_s is tp if it
    divides the sequence, and whole is tp if it divides no tokens.
    """
    batch, sequence, experts, hidden = map(axes_tuple, (dp, sp, ep, tp))
    call = f"moe(..., dp={dp!r}, sp={sp!r}, ep={ep!r}, tp={tp!r})"

    def ends(axes: tuple[str, ...], tail: tuple[str, ...]) -> bool:
        return bool(tail) and axes[len(axes) - len(tail) :] == tail

    by_b, by_s = ends(batch, experts), ends(sequence, experts)
    if experts and not by_b and not by_s:
        rule = "the axes of ep divide both experts and tokens, so they must be the last axes of dp or of sp."
        last = (*(axis for axis in batch if axis not in experts), *experts)
        raise MeshError(rule, call=call, advice=f"dp={last!r}, and x divided so")
    rest = sequence[: len(sequence) - len(experts)] if by_s else sequence
    tp_s = ends(rest, hidden)
    if set(hidden) & {*batch, *experts} or (set(hidden) & set(sequence) and not tp_s):
        rule = "the axes of tp divide hidden units. They divide tokens only if they are the last of sp (before ep)."
        raise MeshError(rule, call=call, advice="other axes for tp, or sp ending in them")
    if shared and tp_s and by_s:
        rule = "the shared expert would gather the sequence over tp across the axes of ep."
        raise MeshError(rule, call=call, advice="add a gated MLP of x beside moe, and leave out shared=")
    return {
        "dp": batch[: len(batch) - len(experts)] if by_b else batch,
        "sp": rest[: len(rest) - len(hidden)] if tp_s else rest,
        "by_b": experts if by_b else None,
        "by_s": experts if by_s else None,
        "tp": tp,
        "tp_s": hidden if tp_s else None,
        "whole": None if tp_s else tp,
    }


def _groups(x: Any, groups: Any, dp: Axes, sp: Axes) -> tuple[int, int]:
    blocks = (axis_size(axes_tuple(dp)), axis_size(axes_tuple(sp)))
    if groups is None:
        return blocks
    call = f"moe(..., groups={groups!r})"
    if not (isinstance(groups, tuple) and len(groups) == 2 and all(is_int(g, 1) for g in groups)):
        rule = "groups is a pair of positive ints: the numbers of pieces of the batch and of the sequence."
        raise SizeError(rule, call=call, fix=f"groups={blocks}")
    sizes = (size(x, "[b/dp] s/sp d", dp=dp, sp=sp), size(x, "b/dp [s/sp] d", dp=dp, sp=sp))
    for name, axes, parts, count, whole in zip(("batch", "sequence"), (dp, sp), blocks, groups, sizes, strict=True):
        if count % parts or whole % count:
            rule = f"the {name} of {whole} is cut into groups of equal size, and no group is on two devices."
            got = [f"{count} groups", f"{parts} blocks, along {'/'.join(axes_tuple(axes)) or 'no axis'}"]
            raise SizeError(rule, call=call, got=got, fix=f"groups={blocks}")
    return groups
