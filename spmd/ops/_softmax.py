"""Operations along a dimension in brackets, divided or not: `softmax`, `argmax`, `cumsum`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd import _lax
from spmd.comm._call import Call, Operand, open_call
from spmd.errors import LayoutError
from spmd.language import Layout, Pattern
from spmd.ops._partial_sums import factors_by_name, placed, plain_dims

__all__ = ["argmax", "bracketed", "cumsum", "open_bracketed", "softmax"]

Axes = tuple[str, ...]


def softmax(x: Any, layout: str, *, where: Any = None, **names: Any) -> Any:
    """Softmax along the dimensions in brackets: `softmax(x, "b h q [k/tp]")`, over all of k.

    Communication: nothing where the dimension is whole. Divided, forward a pmax and a psum of the result without
    that dimension, each 2S(n-1)/n bytes for S bytes; backward one psum of the same size.

    Args:
      x: The array.
      layout: Its layout, one or more dimensions in brackets.
      where: Booleans that broadcast to x; the others get probability zero and take no part.
      **names: Sizes (`h=4`) or mesh axes (`tp="model"`, `tp=None` for no division) of names in the layout.

    Returns:
      The probabilities, in the same layout.

    Raises:
      LayoutError: On a malformed layout, or one without brackets.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> print(spmd.kernel("k/tp -> k/tp", mesh=mesh)(lambda x: spmd.softmax(x, "[k/tp]"))(jnp.zeros(8)))
      [0.125 0.125 0.125 0.125 0.125 0.125 0.125 0.125]
    """
    call, operand = open_bracketed("softmax", x, layout, names)
    dims = bracketed(call, operand)
    mask = None if where is None else _mask(call, where, x, operand)
    divided = [f for f in (operand.factors[i] for i in dims) if f.local < f.size]
    axes = tuple(a for f in divided for a in f.axes)
    value = operand.x if jnp.issubdtype(operand.x.dtype, jnp.inexact) else operand.x.astype(jnp.result_type(float))
    with call.scope():
        if axes:
            out = _divided_softmax(value, mask, dims, call.frame.in_mesh_order(axes))
        else:
            out = jax.nn.softmax(value, axis=dims, where=mask)
    return call.result(out, operand.layout.without_brackets())


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _divided_softmax(x: Any, mask: Any, dims: tuple[int, ...], axes: Axes) -> Any:
    seen = x if mask is None else jnp.where(mask, x, jnp.full_like(x, -jnp.inf))
    powers = jnp.exp(seen - _lax.pmax(jnp.max(seen, axis=dims, keepdims=True), axes))
    out = powers / _lax.psum(jnp.sum(powers, axis=dims, keepdims=True), axes)
    return out if mask is None else jnp.where(mask, out, jnp.zeros_like(out))


@_divided_softmax.defjvp
def _divided_softmax_jvp(dims: tuple[int, ...], axes: Axes, primals: Any, tangents: Any) -> Any:
    """Needs the result only: nothing else is kept for the backward pass, and rows all masked give no NaN."""
    x, mask = primals
    out = _divided_softmax(x, mask, dims, axes)
    weighted = out * tangents[0]
    return out, weighted - out * _lax.psum(jnp.sum(weighted, axis=dims, keepdims=True), axes)


def _mask(call: Call, where: Any, x: Any, operand: Operand) -> Any:
    """The mask, one axis per factor as the operand."""
    try:
        mask = jnp.broadcast_to(where, jnp.shape(x))
    except ValueError:
        rule = f"where has shape {jnp.shape(where)}, which does not broadcast to {jnp.shape(x)}, the shape of x here."
        call.fail(rule, error=LayoutError)
    if mask.dtype != jnp.bool_:
        call.fail(f"where is an array of booleans, not of {mask.dtype}.", error=LayoutError)
    return mask.reshape(operand.x.shape)


def argmax(x: Any, pattern: str, **names: Any) -> Any:
    """The position of the largest element along the dimension in brackets, in the whole of it.

    `argmax(x, "b [v/tp]")`, or with the result spelled out: `argmax(x, "b [v/tp] -> b")`. The first of equals wins,
    on whatever device it lies, and NaN counts as the largest, as in `jnp.argmax`. It has no gradient.

    Communication: nothing where the dimension is whole. Divided, a pmax and a pmin of the result, each 2S(n-1)/n
    bytes for S bytes of int32.

    Args:
      x: The array.
      pattern: Its layout with one dimension in brackets; optionally `-> layout` with the others in any order.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      Positions as int32, equal on the axes of that dimension.

    Raises:
      CommunicationError: If the right side places a dimension otherwise.
      LayoutError: On a malformed pattern.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> best = spmd.kernel("b v/tp -> b", mesh=mesh)(lambda x: spmd.argmax(x, "b [v/tp]"))
      >>> print(best(jnp.eye(8)[2:5]))
      [2 3 4]
    """
    call, operand = open_bracketed("argmax", x, pattern, names, arrow="->" in str(pattern))
    dims = bracketed(call, operand, most=1, name="argmax")
    [dim] = dims
    out_layout, order = _kept(call, operand, dim)
    value = lax.stop_gradient(operand.x)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        call.fail(f"argmax needs numbers that are ordered, and the array is {value.dtype}.", error=LayoutError)
    local = jnp.argmax(value, axis=dim).astype(jnp.int32)
    factor = operand.factors[dim]
    if call.frame.explicit and factor.axes and factor.local == factor.size:
        local = _lax.pmin(local, factor.axes)  # of one block: it is the type that changes
    elif call.frame.explicit and factor.axes:
        key = _order_key(jnp.squeeze(jnp.take_along_axis(value, jnp.expand_dims(local, dim), axis=dim), dim))
        start = call.start(factor)
        place = local.astype(start.dtype) + start
        axes = call.frame.in_mesh_order(factor.axes)
        last = jnp.full_like(place, np.iinfo(place.dtype).max)
        with call.scope():
            best = _lax.pmax(key, axes)
            local = _lax.pmin(jnp.where(key == best, place, last), axes)
    return call.result(local.transpose(order), out_layout)


def _order_key(x: Any) -> Any:
    """Integers in the order of `x`, all NaNs largest and the two zeros equal: what pmax compares reliably."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide, word = (x, jnp.int64) if x.dtype == jnp.float64 else (x.astype(jnp.float32), jnp.int32)
    # Floats of one sign are ordered as their bits are; those of negative numbers run backwards.
    bits = lax.bitcast_convert_type(jnp.where(wide == 0, jnp.zeros_like(wide), wide), word)
    largest = jnp.asarray(jnp.iinfo(word).max, word)
    return jnp.where(jnp.isnan(wide), largest, jnp.where(bits < 0, bits ^ largest, bits))


def _kept(call: Call, operand: Operand, dim: int) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the result without the dimension `dim`, and the order of the axes that are left."""
    rest = [name for i, name in enumerate(operand.names) if i != dim]
    if not call.pattern.outputs:
        kept = [d for d in operand.layout.dims if not d.bracket]
        return Layout.from_dims(kept), tuple(range(len(rest)))
    [dst] = call.pattern.outputs
    plain_dims(call, dst, literals=True)
    dots = [name for name in rest if name.startswith("...")]
    names = [n for d in dst.dims for n in (dots if d.ellipsis else [a.name for a in d.atoms])]
    if sorted(names) != sorted(rest):
        shown = ", ".join(n for n in rest if not n.startswith("...")) or "scalar"
        rule = f"argmax keeps the dimensions that are not in brackets: {shown}."
        call.fail(rule, got=[f"right: {dst.short}"], error=LayoutError)
    have = factors_by_name(operand)
    for atom in dst.atoms:
        factor = have[atom.name]
        if factor.axes != (atom.axes or ()):
            one, two = placed(factor.name, factor.axes), placed(factor.name, atom.axes or ())
            rule = f"argmax keeps the placement of the other dimensions: {one} on the left is {two} on the right."
            call.fail(rule, at=atom.span, advice="all_gather, split or relayout the result in a line of its own")
    return dst, tuple(rest.index(name) for name in names)


def cumsum(x: Any, layout: str, *, reverse: bool = False, **names: Any) -> Any:
    """The running sum along the dimension in brackets: `cumsum(x, "b [s/cp] d")`, over all of s.

    Communication: nothing where the dimension is whole. Divided, forward one all-gather of the blocks' totals,
    S(n-1)/n bytes for S bytes, n totals; backward a psum_scatter of the same bytes.

    Args:
      x: The array.
      layout: Its layout, one dimension in brackets.
      reverse: Sum from the end.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The running sums, in the same layout and with the dtype of `jnp.cumsum`.

    Raises:
      LayoutError: On a malformed layout, or one without brackets.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: spmd.cumsum(x, "[s/cp]"))(jnp.arange(8)))
      [ 0  1  3  6 10 15 21 28]
    """
    call, operand = open_bracketed("cumsum", x, layout, names, linear=True)
    [dim] = bracketed(call, operand, most=1, name="cumsum")
    value = operand.x.astype(jnp.int32) if operand.x.dtype == jnp.bool_ else operand.x
    out = lax.cumsum(value, axis=dim, reverse=reverse)
    factor = operand.factors[dim]
    if factor.local < factor.size:
        with call.scope():
            out = out + _before(call, out, dim, factor.axes, reverse)
    return call.result(out, operand.layout.without_brackets())


def _before(call: Call, sums: Any, dim: int, axes: Axes, reverse: bool) -> Any:
    """The total of the blocks that come before this one."""
    edge = 0 if reverse else sums.shape[dim] - 1
    total = lax.slice_in_dim(sums, edge, edge + 1, axis=dim)
    totals = _lax.all_gather(total, axes, dim, "varying")
    place = jnp.arange(totals.shape[dim])
    here = _lax.axis_index(axes, dict(call.frame.sizes))
    earlier = place > here if reverse else place < here
    mask = earlier.reshape(tuple(-1 if i == dim else 1 for i in range(totals.ndim)))
    counted = jnp.where(mask, totals, jnp.zeros_like(totals))
    return jnp.sum(counted, axis=dim, keepdims=True, dtype=sums.dtype)


# --- brackets -----------------------------------------------------------------------------------------------


_EXAMPLES = {
    "argmax": 'argmax(x, "b/dp [d] -> b/dp")',
    "top_k": 'top_k(x, "b/dp [d]", 2)',
    "roll": 'roll(x, "b/dp [d]", 1)',
    "stencil.convolve": 'stencil.convolve(x, weights, "b/dp [d]")',
}


def open_bracketed(
    who: str, x: Any, pattern: Any, names: Mapping[str, Any], *, arrow: bool = False, linear: bool = False
) -> tuple[Call, Operand]:
    """The call and its operand; only what is linear may be of a partial sum."""
    if isinstance(pattern, Pattern):
        arrow = pattern.arrow
    call = open_call(who, pattern, names, arrays=(x,), arrow=arrow, example=_EXAMPLES.get(who, f'{who}(x, "b/dp [d]")'))
    [src] = call.pattern.inputs
    plain_dims(call, src, unnamed=True, literals=True)
    if src.unreduced and not linear:
        rule = f"{who} of a partial sum is not {who} of its parts: psum first."
        call.fail(rule, fix=call.summed_first())
    return call, call.operand(x)


def bracketed(call: Call, operand: Operand, *, most: int | None = None, name: str = "softmax") -> tuple[int, ...]:
    """The positions of the factors in brackets."""
    dims = tuple(i for i, factor in enumerate(operand.factors) if factor.bracket)
    if not dims or (most is not None and len(dims) > most):
        several = "one dimension" if most == 1 else "dimensions"
        got = f"{len(dims)} in brackets" if dims else "no brackets"
        last = operand.layout.dims[-1].short if operand.layout.dims else "k"
        call.fail(
            f"{name} works along the {several} in brackets.",
            got=[got],
            advice=f"as in [{last}]" if not dims else "one pair of brackets around one dimension",
            error=LayoutError,
        )
    return dims
