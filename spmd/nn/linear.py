"""Linear layers and MLPs, divided by columns and by rows (tensor parallelism), with a divided sequence in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from spmd import all_gather, annotate, axis_size, defer, einsum, scope
from spmd._trees.arguments import explained
from spmd.errors import LayoutError, SizeError
from spmd.nn.norm import Axes, with_rank
from spmd.nn.overlap import einsum_scatter, ring_columns

T = TypeVar("T")  # an array of weights, or a tree of them


@scope(mapping=None)
def column_linear(
    x: Any, w: T, b: Any = None, *, tp: Axes = None, sp: Axes = None, cp: Axes = None, overlap: bool = False
) -> T:
    """Multiply by a matrix with divided columns: each device makes its part of the outputs, for all tokens.

    The first half of a tensor-parallel pair; `row_linear` is the second. With `sp`, which names the same axes as `tp`,
    the tokens are divided as well and are gathered first (sequence parallelism).

    Layouts: x `"... s/cp/sp d"` (with `sp=None` any `"... d"`), w `"d f/tp"`, or with several output dimensions, of
    which the first is divided: `"d h/tp k"`; b like w without d. Result `"... s/cp f/tp"`. Computed in the dtype of x.

    Communication, for x of S bytes per device once its sequence is gathered, on n devices of tp: with `sp`, an
    all_gather forward, S(n-1)/n bytes, and a psum_scatter of the same bytes backward. Without `sp`, nothing forward,
    and backward a psum of x's gradient over tp, 2S(n-1)/n bytes, unless x is a gathered copy already. If w and b are
    equal by JAX's own type on axes that divide tokens, their gradients are summed over them: 2W(m-1)/m bytes for blocks
    of W bytes on m devices. With `sp` and `overlap`, collective-permutes send the same bytes forward, and twice as many
    backward, because x goes round again for the gradient of w. Without `sp`, `overlap` changes nothing.

    Memory: the gathered x is kept for the backward pass; under `jax.checkpoint` it is gathered again instead. With
    `overlap` the divided x is kept, and x is never gathered.

    Args:
      x: The activations.
      w: The weight, or a tree of weights that share one gather: `{"q": ..., "k": ..., "v": ...}`.
      b: The bias, or a tree of biases like w.
      tp: The mesh axes that divide the columns.
      sp: The mesh axes that divide the sequence until here.
      cp: Mesh axes that divide the sequence here and after (context parallelism).
      overlap: Whether the sequence is gathered block by block while it is multiplied (`parallel.gather_einsum`).

    Returns:
      The outputs, or a tree of outputs for a tree of weights.

    Raises:
      LayoutError: If a weight has fewer than two dimensions.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> @spmd.kernel("b s/tp d, d f/tp -> b s f/tp", mesh=mesh)
      ... def up(x, w):
      ...     return spmd.nn.column_linear(x, w, tp="tp", sp="tp")
      >>> print(up(jnp.ones((1, 4, 3)), jnp.ones((3, 8)))[0, 0])
      [3. 3. 3. 3. 3. 3. 3. 3.]

    References:
      Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053; for the sequence Korthikanti et al., "Reducing
      Activation Recomputation in Large Transformer Models", https://arxiv.org/abs/2205.05198
    """
    weights, structure = jax.tree.flatten(w)
    for one in weights:
        _check_rank("column_linear", one, 2, '"d f/tp"')
    # In a ring, several output dimensions, the first divided, are one divided dimension: (h k)/tp.
    flat = [one.reshape(one.shape[0], -1) for one in weights] if overlap else weights
    outs = _columns(x, flat, [_divided(one.ndim - 1) for one in flat], tp=tp, sp=sp, cp=cp, overlap=overlap)
    if overlap:
        outs = [y.reshape(*y.shape[:-1], *one.shape[1:]) for y, one in zip(outs, weights, strict=True)]
    biases = [None] * len(outs) if b is None else structure.flatten_up_to(b)
    pairs = zip(outs, biases, strict=True)
    return structure.unflatten([_plus("column_linear(x, w, b)", y, bias, "f/tp ...", tp=tp) for y, bias in pairs])


@scope(mapping=None)
def row_linear(
    x: Any, w: Any, b: Any = None, *, tp: Axes = None, sp: Axes = None, cp: Axes = None, overlap: bool = False
) -> jax.Array:
    """Multiply by a matrix whose rows are divided, and sum over the devices that hold them.

    The second half of a tensor-parallel pair. With `sp`, which names the same axes as `tp`, the sum is scattered onto
    the sequence: each device keeps its own tokens.

    Layouts: x `"... s/cp f/tp"` (with `sp=None` any `"... f/tp"`), w `"f/tp d"`, or with several input dimensions, of
    which the first is divided: `"h/tp k d"`; b `"d"`. Result `"... s/cp/sp d"`. Computed in the dtype of x.

    Communication, for a product of S bytes per device, on n devices of tp: with `sp`, a psum_scatter forward, S(n-1)/n
    bytes, and an all_gather of the same bytes backward. Without `sp`, a psum forward, 2S(n-1)/n bytes, and nothing
    backward. The gradients of w and b are those of `column_linear`. With `sp` the gradient of b is summed over tp too,
    in the same psum. With `sp` and `overlap`, collective-permutes send the same bytes, forward and backward.

    Memory: x is kept for the backward pass.

    Args:
      x: The activations.
      w: The weight.
      b: The bias, added once, after the sum.
      tp: The mesh axes that divide the rows.
      sp: The mesh axes that divide the sequence from here on.
      cp: Mesh axes that already divide the sequence.
      overlap: Whether the sum is scattered block by block while it is computed (`parallel.einsum_scatter`).

    Returns:
      The outputs.

    Raises:
      LayoutError: If the weight has fewer than two dimensions, or x has fewer dimensions than the weight's rows.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> @spmd.kernel("b s f/tp, f/tp d -> b s/tp d", mesh=mesh)
      ... def down(x, w):
      ...     return spmd.nn.row_linear(x, w, tp="tp", sp="tp")
      >>> print(down(jnp.ones((1, 4, 8)), jnp.ones((8, 3)))[0, 0])
      [8. 8. 8.]

    References:
      Those of `column_linear`.
    """
    _check_rank("row_linear", w, 2, '"f/tp d"')
    rows = w.ndim - 1
    _check_rank("row_linear", x, rows, '"... f/tp"', "x")
    w = w.astype(x.dtype)
    inputs = _divided(rows)
    if sp is None:
        y = einsum(x, w, f"... {inputs}, {inputs} d -> ... d", tp=tp)
    elif overlap and _is_ring("row_linear", tp, sp):
        y = einsum_scatter(x.reshape(*x.shape[: x.ndim - rows], -1), w.reshape(-1, w.shape[-1]), tp=tp, cp=cp)
    else:
        y = einsum(x, w, f"... s/cp {inputs}, {inputs} d -> ... s/cp/sp d", tp=tp, sp=sp, cp=cp)
    return _plus("row_linear(x, w, b)", y, b, "d")


@scope(mapping=None)
def qkv_linear(
    x: Any, w: Any, b: Any = None, *, tp: Axes = None, sp: Axes = None, cp: Axes = None, overlap: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values from one fused weight.

    The weight keeps the heads of a group together: its query heads, then its key head, then its value head. tp divides
    the groups, so every device that holds queries also holds their keys. (If all queries came first in the weight, a
    device could hold queries only.)

    Layouts: x `"... s/cp/sp d"`, w `"d g/tp j k"` with j = r + 2 for r query heads per group, b `"g/tp j k"`. Results:
    queries `"... s/cp (g r)/tp k"`, keys and values `"... s/cp g/tp k"`.

    Communication and memory: those of `column_linear`.

    Args:
      x: The activations.
      w: The fused weight.
      b: The fused bias.
      tp: The mesh axes that divide the groups.
      sp: The mesh axes that divide the sequence until here.
      cp: Mesh axes that divide the sequence here and after.
      overlap: As in `column_linear`.

    Returns:
      Queries, keys, values.

    Raises:
      LayoutError: If the weight does not have four dimensions, or a group does not have a query besides key and value.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b s d, d g/tp j k -> b s h/tp k, b s g/tp k, b s g/tp k", mesh=mesh)
      ... def project(x, w):
      ...     return spmd.nn.qkv_linear(x, w, tp="tp")
      >>> print(*(y.shape for y in project(jnp.ones((1, 3, 5)), jnp.ones((5, 2, 4 + 2, 7)))))
      (1, 3, 8, 7) (1, 3, 2, 7) (1, 3, 2, 7)

    References:
      Ainslie et al., "GQA", https://arxiv.org/abs/2305.13245, for grouped queries.
    """
    if w.ndim != 4 or w.shape[2] < 3:
        rule = 'a fused weight holds the queries, the key and the value of each group: "d g/tp j k" with j = r + 2.'
        raise LayoutError(rule, call="qkv_linear(x, w)", got=[f"w: shape {w.shape}"])
    y = column_linear(x, w, b, tp=tp, sp=sp, cp=cp, overlap=overlap)
    queries = y[..., :-2, :]
    return queries.reshape(*y.shape[:-3], -1, y.shape[-1]), y[..., -2, :], y[..., -1, :]


@explained
@scope(mapping=None)
def mlp(
    x: Any,
    w_in: Any,
    w_out: Any,
    b_in: Any = None,
    b_out: Any = None,
    *,
    activation: Callable[[Any], Any] = jax.nn.gelu,
    tp: Axes = None,
    sp: Axes = None,
    cp: Axes = None,
    overlap: bool = False,
) -> jax.Array:
    """Two linear layers with an activation in between: `column_linear`, then `row_linear`.

    Layouts: x and result `"... s/cp/sp d"` (with `sp=None` any `"... d"`), w_in `"d f/tp"`, b_in `"f/tp"`, w_out
    `"f/tp d"`, b_out `"d"`.

    Communication, for S bytes of `"... s/cp d"` per device, on n devices of tp: with `sp`, an all_gather and a
    psum_scatter, S(n-1)/n bytes each, forward and again backward. Without `sp`, a psum of 2S(n-1)/n bytes, forward and
    again backward. The gradients of the weights, and the changes by `overlap`, are those of `column_linear` and
    `row_linear`.

    Memory: the gathered x, and the hidden units before and after the activation, are kept for the backward pass.

    Args:
      x: The activations.
      w_in: The first weight.
      w_out: The second weight.
      b_in: The first bias.
      b_out: The second bias.
      activation: An elementwise function.
      tp: The mesh axes that divide the hidden units.
      sp: The mesh axes that divide the sequence outside; the same as tp, or None.
      cp: Mesh axes that divide the sequence throughout.
      overlap: Whether gather and scatter are rings that overlap with the products (see `column_linear`, `row_linear`).

    Returns:
      The outputs, an array like x.

    Raises:
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b s/tp d, d f/tp, f/tp d -> b s/tp d", mesh=mesh)
      ... def block(x, w_in, w_out):
      ...     return x + spmd.nn.mlp(x, w_in, w_out, activation=jax.nn.relu, tp="tp", sp="tp")
      >>> print(block(jnp.ones((1, 2, 3)), jnp.ones((3, 4)), jnp.ones((4, 3)))[0, 0])
      [13. 13. 13.]

    References:
      Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053
    """
    hidden = activation(column_linear(x, w_in, b_in, tp=tp, sp=sp, cp=cp, overlap=overlap))
    return row_linear(hidden, w_out, b_out, tp=tp, sp=sp, cp=cp, overlap=overlap)


@scope(mapping=None)
def gated_mlp(
    x: Any,
    w_in: Any,
    w_out: Any,
    b_in: Any = None,
    b_out: Any = None,
    *,
    activation: Callable[[Any], Any] = jax.nn.silu,
    tp: Axes = None,
    sp: Axes = None,
    cp: Axes = None,
    overlap: bool = False,
) -> jax.Array:
    """An MLP with gated hidden units: SwiGLU, or with other activations GEGLU and others.

    Layouts: x and result `"... s/cp/sp d"` (with `sp=None` any `"... d"`); w_in is the pair (gate, up) of `"d f/tp"`
    each, or fused, `"d 2 f/tp"`; b_in is the same without d; w_out `"f/tp d"`, b_out `"d"`. (In a weight fused as
    `"d (2 f)/tp"`, tp would separate gates from the units that they multiply.)

    Communication: that of `mlp`. Gate and up share one gather, and one psum_scatter or psum of their gradients.

    Memory: the gathered x, gates and up-projections are kept for the backward pass.

    Args:
      x: The activations.
      w_in: The weights of gate and up-projection, a pair or fused.
      w_out: The weight of the down-projection.
      b_in: The biases of gate and up-projection, a pair or fused.
      b_out: The bias of the down-projection.
      activation: The elementwise function of the gate.
      tp: The mesh axes that divide the hidden units.
      sp: The mesh axes that divide the sequence outside; the same as tp, or None.
      cp: Mesh axes that divide the sequence throughout.
      overlap: Whether gather and scatter are rings that overlap with the products (see `column_linear`, `row_linear`).

    Returns:
      The outputs, an array like x.

    Raises:
      LayoutError: If w_in is neither a pair nor fused.
      SpmdError: If sizes or placements do not fit.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("b s/tp d, d 2 f/tp, f/tp d -> b s/tp d", mesh=mesh)
      ... def block(x, w_in, w_out):
      ...     return spmd.nn.gated_mlp(x, w_in, w_out, tp="tp", sp="tp")
      >>> print(block(jnp.ones((1, 2, 3)), jnp.ones((3, 2, 4)), jnp.ones((4, 3)))[0, 0].round(2))
      [34.29 34.29 34.29]

    References:
      Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202
    """
    shape = getattr(w_in, "shape", None)
    if shape is None and isinstance(w_in, (tuple, list)) and len(w_in) == 2:
        biases = None if b_in is None else tuple(b_in)
        gate, up = column_linear(x, tuple(w_in), biases, tp=tp, sp=sp, cp=cp, overlap=overlap)
    elif shape is not None and len(shape) == 3 and shape[1] == 2:
        [both] = _columns(x, [w_in], ["n f/tp"], tp=tp, sp=sp, cp=cp, overlap=overlap)
        both = _plus("gated_mlp(x, w_in, w_out, b_in)", both, b_in, "n f/tp", tp=tp)
        gate, up = both[..., 0, :], both[..., 1, :]
    else:
        rule = 'w_in is the pair (gate, up) of "d f/tp" each, or fused "d 2 f/tp".'
        got = [f"w_in: {type(w_in).__name__ if shape is None else f'shape {shape}'}"]
        raise LayoutError(rule, call="gated_mlp(x, w_in, w_out)", got=got, advice="as in jnp.stack((gate, up), 1)")
    return row_linear(activation(gate) * up, w_out, b_out, tp=tp, sp=sp, cp=cp, overlap=overlap)


# --- where products meet communication ----------------------------------------------------------------------


def _divided(count: int) -> str:
    """So many dimensions, of which the first is divided: `"f/tp"`, `"f/tp k1 k2"`."""
    return " ".join(["f/tp", *(f"k{i}" for i in range(1, count))])


def _columns(
    x: Any, weights: list[Any], outputs: list[str], *, tp: Axes, sp: Axes, cp: Axes, overlap: bool
) -> list[Any]:
    """The products of x with weights of dimensions "d" and `outputs`; the sequence is gathered once for all of them."""
    if overlap and sp is not None and _is_ring("column_linear", tp, sp):
        return ring_columns(x, weights, tp=tp, cp=cp)
    x = entered(x, tp=tp, sp=sp, cp=cp)
    pairs = zip(weights, outputs, strict=True)
    return [einsum(x, w.astype(x.dtype), f"... d, d {dims} -> ... {dims}", tp=tp) for w, dims in pairs]


def entered(x: Any, *, tp: Axes, sp: Axes, cp: Axes) -> Any:
    """Prepare x for products with divided columns: gather its sequence, or leave its gradient for later.

    x is made varying once. Therefore the gradients of several products are added before they are summed over tp.
    """
    if sp is None:
        return defer(x, "... d -> ... d {R:tp}", tp=tp)
    return all_gather(x, "... s/cp/sp d -> ... s/cp d", sp=sp, cp=cp)


def _plus(call: str, y: Any, b: Any, layout: str, **names: Axes) -> Any:
    """Outputs and a bias for their last dimensions. The annotation says how it lies, which its shape does not."""
    if b is None:
        return y
    b = annotate(b, layout, **names)
    if b.shape != y.shape[y.ndim - b.ndim :]:
        rule = "a bias has one number for each output."
        got = [f"outputs: shape {y.shape} here", f"the bias: shape {b.shape} here"]
        advice = f'a bias of the layout "{layout}": split it if it is whole, gather it if it rests divided'
        raise SizeError(rule, call=call, got=got, advice=advice)
    return y + with_rank(b.astype(y.dtype), y.ndim)


def _is_ring(name: str, tp: Axes, sp: Axes) -> bool:
    """Return whether a ring moves anything; an error where it cannot."""
    if (tp if isinstance(tp, tuple) else (tp,)) != (sp if isinstance(sp, tuple) else (sp,)):
        rule = "a ring over the devices of tp moves a sequence that is divided over the same devices."
        advice = f"sp={tp!r}, or overlap=False"
        raise LayoutError(rule, call=f"{name}(x, w, overlap=True)", got=[f"tp={tp!r}", f"sp={sp!r}"], advice=advice)
    return sp is not None and axis_size(sp) > 1


def _check_rank(name: str, x: Any, rank: int, layout: str, which: str = "w") -> None:
    if jnp.ndim(x) < rank:
        rule = f"{which} has the layout {layout}, so it has at least {rank} dimension{'s' * (rank != 1)}."
        raise LayoutError(rule, call=f"{name}(x, w)", got=[f"{which}: shape {jnp.shape(x)}"])
