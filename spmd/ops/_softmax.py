"""`softmax`, `argmax`, `argmin` and `cumsum`, along dimensions in brackets."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.comm import _lax
from spmd.errors import LayoutError
from spmd.language import Layout
from spmd.ops._along import Along, along
from spmd.ops._reduce import factors_by_name, placed, plain_dims

Axes = tuple[str, ...]


def softmax(x: Any, layout: str, /, *, where: Any = None, **names: Any) -> jax.Array:
    """Softmax along the dimensions in brackets: `softmax(x, "b h q [k/tp]")` is over all of k.

    Communication: none if these dimensions are whole. If they are divided, forward a pmax and a psum of the result
    without them, each 2S(n-1)/n bytes for S bytes; backward one psum of the same size.

    Args:
      x: The array.
      layout: Its layout, with one or more dimensions in brackets.
      where: Booleans that broadcast to x. Where they are False the probability is zero, and the element takes no part.
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
    one = along("softmax", x, layout, names)
    mask = None if where is None else _mask(one, where, jnp.shape(x))
    value = one.x if jnp.issubdtype(one.x.dtype, jnp.inexact) else one.x.astype(jax.eval_shape(jnp.exp, one.x).dtype)
    ours = jnp.iscomplexobj(value)  # of which JAX has no gradient
    whole = lambda: jax.nn.softmax(value, axis=one.dims, where=mask)
    alone = lambda: _divided_softmax(value, mask, one.dims, ())
    return one.result(alone if ours else whole, lambda: _divided_softmax(value, mask, one.dims, one.axes))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _divided_softmax(x: Any, mask: Any, dims: tuple[int, ...], axes: Axes) -> Any:
    seen = x if mask is None else jnp.where(mask, x, jnp.full_like(x, -jnp.inf))
    powers = jnp.exp(seen - _lax.pmax(jnp.max(seen.real, axis=dims, keepdims=True), axes).astype(x.dtype))
    out = powers / _lax.psum(jnp.sum(powers, axis=dims, keepdims=True), axes)
    return out if mask is None else jnp.where(mask, out, jnp.zeros_like(out))


@_divided_softmax.defjvp
def _divided_softmax_jvp(dims: tuple[int, ...], axes: Axes, primals: Any, tangents: Any) -> Any:
    """Needs the result alone: the backward pass keeps nothing else, and a row that is all masked gives no NaN."""
    x, mask = primals
    out = _divided_softmax(x, mask, dims, axes)
    weighted = out * tangents[0]
    return out, weighted - out * _lax.psum(jnp.sum(weighted, axis=dims, keepdims=True), axes)


def _mask(one: Along, where: Any, shape: tuple[int, ...]) -> Any:
    """The mask, with one axis per factor as the array."""
    try:
        mask = jnp.broadcast_to(where, shape)
    except ValueError:
        rule = f"where has shape {jnp.shape(where)}, which does not broadcast to {shape}, the shape of x here."
        one.call.fail(rule, error=LayoutError)
    if mask.dtype != jnp.bool_:
        one.call.fail(f"where is an array of booleans, not of {mask.dtype}.", error=LayoutError)
    return mask.reshape(one.x.shape)


def argmax(x: Any, pattern: str, /, **names: Any) -> jax.Array:
    """The position of the largest element along the dimension in brackets, counted in the whole of it.

    `argmax(x, "b [v/tp]")`, or with the result spelled out: `argmax(x, "b [v/tp] -> b")`. The first of equals wins,
    whichever device it lies on, and NaN counts as the largest, as in `jnp.argmax`. It has no gradient.

    Communication: none if the dimension is whole. If it is divided, a pmax and a pmin of the result, each 2S(n-1)/n
    bytes for S bytes of int32.

    Args:
      x: The array.
      pattern: Its layout with one dimension in brackets. `-> layout` may follow, with the others in any order.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      Positions, int32 or what `jnp.argmax` gives under `jax_enable_x64`, equal on the axes of that dimension.

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
    return _place_of("argmax", x, pattern, names)


def argmin(x: Any, pattern: str, /, **names: Any) -> jax.Array:
    """The position of the smallest element along the dimension in brackets, counted in the whole of it.

    `argmin(x, "b [v/tp]")`, or with the result spelled out: `argmin(x, "b [v/tp] -> b")`. The first of equals wins,
    whichever device it lies on, and NaN counts as the smallest, as in `jnp.argmin`. It has no gradient.

    Communication: that of `argmax`.

    Args:
      x: The array.
      pattern: Its layout with one dimension in brackets. `-> layout` may follow, with the others in any order.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      Positions as in `argmax`.

    Raises:
      CommunicationError: If the right side places a dimension otherwise.
      LayoutError: On a malformed pattern.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> least = spmd.kernel("b v/tp -> b", mesh=mesh)(lambda x: spmd.argmin(x, "b [v/tp]"))
      >>> print(least(-jnp.eye(8)[2:5]))
      [2 3 4]
    """
    return _place_of("argmin", x, pattern, names)


def _place_of(name: str, x: Any, pattern: str, names: Any) -> jax.Array:
    """`argmax` and `argmin`: the least place of those whose key is the largest."""
    example, least = f'{name}(x, "b/dp [d] -> b/dp")', name == "argmin"
    one = along(name, x, pattern, names, most=1, ordered=True, arrow=True, example=example)
    layout, order = _kept(one, name)
    value = lax.stop_gradient(one.x)
    local = (jnp.argmin if least else jnp.argmax)(value, axis=one.dim).astype(jnp.int32)
    dtype = jnp.result_type(int)  # that of jnp, though what is sent is int32 where that is enough

    def divided() -> Any:
        best = jnp.squeeze(jnp.take_along_axis(value, jnp.expand_dims(local, one.dim), one.dim), one.dim)
        key, start = _order_key(best, least=least), one.call.start(one.factor)
        place = local.astype(start.dtype) + start
        last = jnp.full_like(place, np.iinfo(place.dtype).max)
        first = _lax.pmin(jnp.where(key == _lax.pmax(key, one.axes), place, last), one.axes)
        return first.transpose(order).astype(dtype)

    return one.result(lambda: local.transpose(order).astype(dtype), divided, layout)


def _order_key(x: Any, *, least: bool = False) -> Any:
    """Integers in the order of `x`, or in the reverse if the least is looked for. pmax compares them reliably: all NaNs
    are largest either way, and the two zeros are equal."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ~x if least else x
    wide, word = (x, jnp.int64) if x.dtype == jnp.float64 else (x.astype(jnp.float32), jnp.int32)
    # Floats of one sign have the order of their bits; for negative numbers it runs backwards.
    bits = lax.bitcast_convert_type(jnp.where(wide == 0, jnp.zeros_like(wide), wide), word)
    largest = jnp.asarray(jnp.iinfo(word).max, word)
    bits = jnp.where(bits < 0, bits ^ largest, bits)
    return jnp.where(jnp.isnan(wide), largest, ~bits if least else bits)


def _kept(one: Along, who: str) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the result, without the dimension in brackets, and the order of the axes that are left."""
    call, operand = one.call, one.operand
    rest = [name for i, name in enumerate(operand.names) if i != one.dim]
    if not call.pattern.outputs:
        kept = [d for d in operand.layout.dims if not d.bracket]
        return Layout.from_dims(kept), tuple(range(len(rest)))
    [dst] = call.pattern.outputs
    plain_dims(call, dst, literals=True)
    dots = [name for name in rest if name.startswith("...")]
    names = [n for d in dst.dims for n in (dots if d.ellipsis else d.names)]
    if sorted(names) != sorted(rest):
        shown = ", ".join(n for n in rest if not n.startswith("...")) or "scalar"
        rule = f"{who} keeps the dimensions that are not in brackets: {shown}."
        call.fail(rule, got=[f"right: {dst.short}"], error=LayoutError)
    have = factors_by_name(operand)
    for atom in dst.atoms:
        factor = have[atom.name]
        if factor.axes != (atom.axes or ()):
            left, right = placed(factor.name, factor.axes), placed(factor.name, atom.axes or ())
            rule = f"{who} keeps the placement of the other dimensions: {left} on the left is {right} on the right."
            call.fail(rule, at=atom.span, advice="all_gather, split or relayout the result in a line of its own")
    return dst, tuple(rest.index(name) for name in names)


def cumsum(x: Any, layout: str, /, *, reverse: bool = False, **names: Any) -> jax.Array:
    """The running sum along the dimension in brackets: `cumsum(x, "b [s/cp] d")`, over all of s.

    Communication: none if the dimension is whole. If it is divided, forward one all-gather of the blocks' totals,
    S(n-1)/n bytes for n totals of S bytes together; backward a psum_scatter of the same bytes.

    Args:
      x: The array.
      layout: Its layout, with one dimension in brackets.
      reverse: Whether to sum from the end.
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
    one = along("cumsum", x, layout, names, most=1, linear=True)
    value = one.x.astype(jnp.result_type(int)) if one.x.dtype == jnp.bool_ else one.x
    sums = lax.cumsum(value, axis=one.dim, reverse=reverse)
    return one.result(whole=lambda: sums, divided=lambda: sums + _before(one, sums, reverse))


def _before(one: Along, sums: Any, reverse: bool) -> Any:
    """The total of the blocks that come before this one."""
    dim, axes = one.dim, one.factor.axes
    edge = 0 if reverse else sums.shape[dim] - 1
    total = lax.slice_in_dim(sums, edge, edge + 1, axis=dim)
    totals = _lax.all_gather(total, axes, dim, "varying")
    place = jnp.arange(totals.shape[dim], dtype=jnp.int32)
    here = _lax.axis_index(axes, dict(one.call.frame.sizes))
    earlier = place > here if reverse else place < here
    mask = earlier.reshape(tuple(-1 if i == dim else 1 for i in range(totals.ndim)))
    counted = jnp.where(mask, totals, jnp.zeros_like(totals))
    return jnp.sum(counted, axis=dim, keepdims=True, dtype=sums.dtype)
