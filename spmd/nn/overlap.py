"""Products that overlap with communication: an all-gather or a reduce-scatter as a ring of partial products.

Inside, the blocks are the first dimension of an array, `"c/tp ..."`, one per device along the ring. The sequence is cut
into the same number of parts, `"... b l"`. The block of number `here - j` comes from j places behind. In all strings:

    c blocks   a blocks of cp   b parts of the sequence   l tokens of a part   d features   f columns or rows of tp
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd import axis_size, custom_vjp, einsum, iota, rearrange, scope, shift
from spmd.errors import LayoutError
from spmd.nn.norm import Axes, wide

T = TypeVar("T")  # an array of weights, or a tree of them


@scope(mapping=None)
def gather_einsum(x: Any, w: T, *, tp: Axes, cp: Axes = None) -> T:
    """Gather a divided sequence and multiply it by divided columns, one block in transit while another is used.

    This computes what `column_linear(..., sp=...)` computes, which calls it with `overlap=True`. The blocks of x go
    round a ring in both directions at once. Each device multiplies the block that has arrived by its columns, and
    passes the block on at the same time. x is never gathered: a device holds two blocks besides its own.

    Layouts: x `"... s/cp/tp d"`, w `"d f/tp"`, or with several output dimensions, of which the first is divided:
    `"d h/tp k"`. Result `"... s/cp f/tp"`, in the dtype of x.

    Communication, on n devices of tp, for blocks of x of B bytes: n-1 collective-permutes, half of them in each
    direction. They send (n-1)B bytes, as an all-gather does. Backward 2(n-1) permutes, 2(n-1)B bytes: the gradient of x
    is summed block by block as it goes round, and x goes round once more for the gradient of w, because the gathered x
    was not kept. On links that carry both directions at once, each ring takes the time of n/2 hops. The gradient of w
    over other axes is that of `column_linear`.

    Memory: the divided x and w are kept for the backward pass.

    Args:
      x: The activations.
      w: The weight, or a tree of weights that share the ring.
      tp: The mesh axes that divide the sequence and the columns.
      cp: Mesh axes that divide the sequence outside of tp, in x and in the result.

    Returns:
      The outputs, or a tree of outputs for a tree of weights.

    Raises:
      LayoutError: If x or a weight has fewer than two dimensions.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> @spmd.kernel("b s/tp d, d f/tp -> b s f/tp", mesh=mesh)
      ... def up(x, w):
      ...     return spmd.parallel.gather_einsum(x, w, tp="tp")
      >>> x, w = jnp.ones((1, 4, 3)), jnp.ones((3, 8))
      >>> print(up(x, w)[0, 0], spmd.inspect.collectives(up, x, w).counts)
      [3. 3. 3. 3. 3. 3. 3. 3.] {'ppermute': 3}

    References:
      Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
      Models", https://doi.org/10.1145/3567955.3567959
    """
    weights, structure = jax.tree.flatten(w)
    _check_ranks("gather_einsum(x, w)", {"x": x, **{f"w[{i}]": one for i, one in enumerate(weights)}})
    flat = [one.reshape(one.shape[0], -1) for one in weights]
    outs = ring_columns(x, flat, tp=tp, cp=cp)
    return structure.unflatten([y.reshape(*y.shape[:-1], *one.shape[1:]) for y, one in zip(outs, weights, strict=True)])


@scope(mapping=None)
def einsum_scatter(x: Any, w: Any, *, tp: Axes, cp: Axes = None) -> jax.Array:
    """Sum a product over divided rows and scatter it onto the sequence, one block in transit while another is made.

    This computes what `row_linear(..., sp=...)` computes, which calls it with `overlap=True`. For each block of the
    sequence, two partial sums start half a ring away and come from both sides. Each device adds its product as they
    pass. The product of the whole sequence never exists: a device holds one block of it, and two sums.

    Layouts: x `"... s/cp f/tp"`, w `"f/tp d"`. Result `"... s/cp/tp d"`, in the dtype of x. Products and sums of a hop
    are at least float32 and travel in the dtype of x.

    Communication, on n devices of tp, for blocks of the result of B bytes: n-1 collective-permutes, half of them in
    each direction. They send (n-1)B bytes, as a reduce-scatter does. Backward as many: the cotangent goes round once,
    for both gradients. The gradient of w over other axes is that of `row_linear`.

    Memory: x and w are kept for the backward pass.

    Args:
      x: The activations.
      w: The weight.
      tp: The mesh axes that divide the rows, and the sequence of the result.
      cp: Mesh axes that already divide the sequence.

    Returns:
      The outputs.

    Raises:
      LayoutError: If x or the weight has fewer than two dimensions.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> @spmd.kernel("b s f/tp, f/tp d -> b s/tp d", mesh=mesh)
      ... def down(x, w):
      ...     return spmd.parallel.einsum_scatter(x, w, tp="tp")
      >>> x, w = jnp.ones((1, 4, 8)), jnp.ones((8, 3))
      >>> print(down(x, w)[0, 0], spmd.inspect.collectives(down, x, w).counts)
      [8. 8. 8.] {'ppermute': 3}

    References:
      Those of `gather_einsum`.
    """
    _check_ranks("einsum_scatter(x, w)", {"x": x, "w": w})
    n = axis_size(tp) if tp else 1
    source = "... (a/cp b l) (c f)/tp -> c/tp ... a/cp b l f" if cp else "... (b l) (c f)/tp -> c/tp ... b l f"
    blocks = rearrange(x, source, tp=tp, b=n, c=n, **_parts(cp))
    rows = rearrange(w.astype(x.dtype), "(c f)/tp d -> c/tp f d", tp=tp, c=n)
    found = _scatter(tp, n, blocks, rows)
    target = "... a/cp l d -> ... (a/cp c/tp l) d" if cp else "... l d -> ... (c l)/tp d"
    return rearrange(found, f"c/tp {target}", tp=tp, **_parts(cp))


@scope(mapping=None)
def ring_columns(x: Any, weights: list[Any], *, tp: Axes, cp: Axes) -> list[Any]:
    """The products of x with weights "d f/tp" or "d n f/tp" that share one ring."""
    n = axis_size(tp) if tp else 1
    sequence, rows = ("(a/cp c/tp l)", "a/cp l") if cp else ("(c l)/tp", "l")
    blocks = rearrange(x, f"... {sequence} d -> c/tp ... {rows} d", tp=tp, c=n, **_parts(cp))
    columns = {2: "d (c f)/tp -> c/tp d f", 3: "d n (c f)/tp -> c/tp d (n f)"}
    matrices = [rearrange(w.astype(x.dtype), columns[w.ndim], tp=tp, c=n) for w in weights]
    found = _gather(tp, n, blocks, tuple(matrices))
    rows, sequence = ("a/cp b l", "(a/cp b l)") if cp else ("b l", "(b l)")
    targets = {2: f"f -> ... {sequence} (c f)/tp", 3: f"(n f) -> ... {sequence} n (c f)/tp"}
    more = [{} if w.ndim == 2 else {"n": w.shape[1]} for w in weights]
    return [
        rearrange(y, f"c/tp ... {rows} {targets[w.ndim]}", tp=tp, **_parts(cp), **sizes)
        for y, w, sizes in zip(found, weights, more, strict=True)
    ]


def _parts(cp: Axes) -> dict[str, Any]:
    return {"cp": cp, "a": axis_size(cp)} if cp else {}


def _check_ranks(call: str, arrays: dict[str, Any]) -> None:
    short = [f"{name}: shape {jnp.shape(x)}" for name, x in arrays.items() if jnp.ndim(x) < 2]
    if short:
        rule = 'x has the layout "... s d" and w has the layout "d f": each has at least two dimensions.'
        raise LayoutError(rule, call=call, got=short)


# --- the products and their gradients ---------------------------------------------------------------------------


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _gather(tp: Axes, n: int, x: Any, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """The products `"c/tp ... b l f"` of all blocks `"c/tp ... l d"` with weights `"c/tp d f"`."""

    def visit(outs: Any, block: Any, source: Any) -> Any:
        parts = [einsum(block, w, "c/tp ... d, c/tp d f -> c/tp ... f", tp=tp) for w in weights]
        return tuple(_put(out, part, source, n) for out, part in zip(outs or (None,) * len(parts), parts, strict=True))

    return _circulate(tp, n, x, visit)


def _gather_forward(tp: Axes, n: int, x: Any, weights: tuple[Any, ...]) -> tuple[Any, Any]:
    return _gather(tp, n, x, weights), (x, weights)


def _gather_backward(tp: Axes, n: int, kept: Any, cotangents: tuple[Any, ...]) -> tuple[Any, Any]:
    x, weights = kept

    def part(target: Any) -> Any:
        back = "c/tp ... f, c/tp d f -> c/tp ... d"
        pairs = zip(cotangents, weights, strict=True)
        return functools.reduce(jnp.add, [_product(_pick(g, target), w, back, tp) for g, w in pairs])

    def visit(sums: Any, bits: Any, source: Any) -> Any:
        block = lax.bitcast_convert_type(bits, x.dtype)
        found = tuple(_weight_gradient(block, _pick(g, source)) for g in cotangents)
        return found if sums is None else jax.tree.map(jnp.add, sums, found)

    dx = _collect(tp, n, part, x.dtype)
    # As bits: in straight-line code XLA would merge these hops with those of the forward pass, and keep all blocks.
    sums = _circulate(tp, n, lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}"), visit)
    return dx, tuple(total.astype(w.dtype) for total, w in zip(sums, weights, strict=True))


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _scatter(tp: Axes, n: int, x: Any, w: Any) -> Any:
    """The sums over c of `"c/tp ... b l f"` times `"c/tp f d"`: device c gets part b = c, as `"c/tp ... l d"`."""
    product = "c/tp ... f, c/tp f d -> c/tp ... d"
    return _collect(tp, n, lambda target: _product(_pick(x, target), w, product, tp), x.dtype)


def _scatter_forward(tp: Axes, n: int, x: Any, w: Any) -> tuple[Any, Any]:
    return _scatter(tp, n, x, w), (x, w)


def _scatter_backward(tp: Axes, n: int, kept: Any, cotangent: Any) -> tuple[Any, Any]:
    x, w = kept

    def visit(state: Any, block: Any, source: Any) -> Any:
        dx, dw = state or (None, None)
        part = einsum(block, w, "c/tp ... d, c/tp f d -> c/tp ... f", tp=tp)
        found = _weight_gradient(_pick(x, source), block)
        return _put(dx, part, source, n), found if dw is None else dw + found

    dx, dw = _circulate(tp, n, cotangent, visit)
    return dx, dw.astype(w.dtype)


_scatter.defvjp(_scatter_forward, _scatter_backward)


# --- the rings --------------------------------------------------------------------------------------------------


def _circulate(tp: Axes, n: int, block: Any, visit: Callable[[Any, Any, Any], Any]) -> Any:
    """`state = visit(state, block, number)` for the blocks of all devices, which arrive from both sides.

    The next block travels while one is worked on: no permute depends on a product.
    """
    here = iota("c/tp", c=n, tp=tp)
    from_behind, from_ahead = n // 2, (n - 1) // 2  # hops in each direction: each other device once
    behind = _send(tp, block, 1) if from_behind else None
    ahead = _send(tp, block, -1) if from_ahead else None
    state = visit(None, block, here)

    def meet(state: Any, block: Any, number: Any) -> Any:
        return visit(state, block, number % n)

    def both(state: Any, behind: Any, ahead: Any, hop: Any) -> Any:
        return meet(meet(state, behind, here - hop), ahead, here + hop)

    def turn(carry: Any, hop: Any) -> tuple[Any, None]:
        state, behind, ahead = carry
        coming = _send(tp, behind, 1), _send(tp, ahead, -1)
        return (both(state, behind, ahead, hop), *coming), None

    if from_ahead:
        hops = jnp.arange(1, from_ahead, dtype=jnp.int32)
        (state, behind, ahead), _ = lax.scan(turn, (state, behind, ahead), hops)
        last = _send(tp, behind, 1) if from_behind > from_ahead else None
        state = both(state, behind, ahead, from_ahead)
        behind = last
    if from_behind > from_ahead:
        state = meet(state, behind, here - from_behind)
    return state


def _collect(tp: Axes, n: int, part: Callable[[Any], Any], dtype: Any) -> Any:
    """For each block the sum over all devices of `part(number)`, added up on the way from both sides.

    The transpose of `_circulate`: the same hops in the other direction. No product depends on a permute.
    """
    here = iota("c/tp", c=n, tp=tp)
    to_ahead, to_behind = n // 2, (n - 1) // 2

    def begun(target: Any) -> Any:
        return part(target % n).astype(dtype)

    def add(total: Any, by: int, target: Any) -> Any:
        arrived, own = _send(tp, total, by), part(target % n)
        return (arrived.astype(own.dtype) + own).astype(dtype)

    def turn(totals: Any, hop: Any) -> tuple[Any, None]:
        up, down = totals
        return (add(up, 1, here + hop), add(down, -1, here - hop)), None

    if not to_ahead:
        return part(here).astype(dtype)
    up = begun(here + to_ahead)
    if not to_behind:
        return add(up, 1, here)
    if to_ahead > to_behind:
        up = add(up, 1, here + to_behind)
    down = begun(here - to_behind)
    (up, down), _ = lax.scan(turn, (up, down), jnp.arange(to_behind - 1, 0, -1, dtype=jnp.int32))
    arrived = _send(tp, up, 1), _send(tp, down, -1)
    total = part(here)
    return (arrived[0].astype(total.dtype) + arrived[1].astype(total.dtype) + total).astype(dtype)


def _send(tp: Axes, x: Any, by: int) -> Any:
    return shift(x, "[c/tp] ...", by, tp=tp)


# --- parts of the sequence, and products ------------------------------------------------------------------------


def _pick(x: Any, part: Any) -> Any:
    """The part of `"c/tp ... b l f"` whose number is in `"c/tp"`: `"c/tp ... l f"`."""
    return jax.vmap(lambda one, b: lax.dynamic_index_in_dim(one, b, one.ndim - 3, keepdims=False))(x, part)


def _put(out: Any, part: Any, number: Any, n: int) -> Any:
    """The inverse of `_pick`; the first part makes the array."""
    if out is None:
        wide = jnp.expand_dims(part, -3)
        out = jnp.broadcast_to(wide, (*part.shape[:-2], n, *part.shape[-2:]))
    return jax.vmap(lambda one, x, b: lax.dynamic_update_index_in_dim(one, x, b, one.ndim - 3))(out, part, number)


def _product(x: Any, w: Any, pattern: str, tp: Axes) -> Any:
    return einsum(x, w, pattern, preferred_element_type=wide(x), tp=tp)


def _weight_gradient(x: Any, y: Any) -> Any:
    """`"c/tp d f"` from `"c/tp ... d"` and `"c/tp ... f"`: this device's part of the sum over these tokens."""
    tokens = tuple(range(1, x.ndim - 1))
    return lax.dot_general(x, y, ((tokens, tokens), ((0,), (0,))), preferred_element_type=wide(x))
