"""`deposit`: what lies in margins is added to its owners. The way back of a halo."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd.comm._call import Call, open_call
from spmd.comm._marks import constrain
from spmd.errors import LayoutError
from spmd.language import Layout
from spmd.ops._halo import Edges, Margins, margins_of, read_edges, widened, wider_dims, without_margins

T = TypeVar("T")


def deposit(x: T, pattern: str, /, *, edge: Any = "periodic", **names: Any) -> T:
    """Add what lies in margins to the elements that it belongs to: `deposit(rho, "1+x/a+1 y -> x/a y")`.

    Each device has added something to a block with margins, as particles do near a border. What it added to a margin
    belongs to elements of other devices. So a margin here holds contributions, not copies: the array that is meant is
    the sum of all blocks, each at its place. What is computed from an array with the margins of a `halo` is added to a
    new array, or the copies count too. On the whole array a deposit is the transpose of `jnp.pad`: what lies beyond the
    ends is added where `halo` would copy it from. It is the transpose of `halo` with the same edge, and each is the
    gradient of the other.

    Margins may have any width, even wider than a block, on any number of dimensions, divided or whole. What lies in
    corners arrives too. A margin may also get narrower without going away.

    Communication: that of the halo, in reverse: one collective-permute for each dimension with margins and for each
    side, or several if it is wider than a block, together as many bytes as the margins. Backward the halo.

    Args:
      x: An array or a pytree of arrays of this layout, of numbers.
      pattern: `"layout -> layout"`, with the same dimensions and axes, and narrower margins on the right.
      edge: Where contributions beyond the ends of the array go, as in `halo`: one edge for all dimensions, a pair for
        the low and the high end, or a dict with an entry for each dimension with margins. "periodic" adds them at the
        other end. "zero" drops them. "edge" adds them to the last element. "symmetric" and "reflect" add each to its
        mirror image; "antisymmetric" subtracts it there; "antireflect" subtracts it there and adds it twice to the last
        element.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array with what was in its margins, and without them.

    Raises:
      LayoutError: If the sides differ in more than margins, a margin gets wider, a dimension in several parts has a
        margin, the array holds booleans, or an edge is unknown, a number other than zero, or names a dimension that
        the pattern lacks.
      SizeError: If a mirrored margin is wider than the array, or, for a wall on the last element, as wide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a -> x/a", mesh=mesh)
      ... def to_both_sides(u):
      ...     # each element adds to the ones before and after it
      ...     wide = jnp.pad(u, (0, 2)) + jnp.pad(u, (2, 0))
      ...     return spmd.stencil.deposit(wide, "1+x/a+1 -> x/a")
      >>> print(to_both_sides(jnp.arange(8)))
      [ 8  2  4  6  8 10 12  6]
    """
    example = 'stencil.deposit(x, "1+b/dp+1 d -> b/dp d")'
    also = {} if isinstance(edge, str) and edge == "periodic" else None
    call = open_call("stencil.deposit", pattern, names, arrays=(x,), example=example, also=also)
    _check_sides(call)
    [wide], [narrow] = call.pattern.inputs, call.pattern.outputs
    edges = read_edges(call, edge, (wide,), wider_dims(narrow, wide))
    _check_edges(call, edges)

    def leaf(value: Any) -> Any:
        own = call.fork()
        operand = own.operand(value, margins=True)
        if operand.x.dtype == jnp.bool_:
            own.fail("a deposit adds numbers, and the array holds booleans.", error=LayoutError)
        margins = margins_of(own, operand, narrow, wide, edges)
        with call.scope():
            return own.result(_narrowed(operand.x, margins))

    return jax.tree.map(leaf, x)


def _narrowed(x: Any, margins: list[Margins]) -> Any:
    """The transpose of `widened`, at an array of its result's shape."""
    if margins and margins[0].call.frame.explicit:  # typed as what a permute gives, so that nothing is summed
        x = _compat.pvary(x, margins[0].call.frame.in_mesh_order({axis for one in margins for axis in one.axes}))
    narrow = x
    for one in margins:
        low, high = one.wider
        narrow = lax.slice_in_dim(narrow, low, narrow.shape[one.dim] - high, axis=one.dim)
    return jax.linear_transpose(lambda y: widened(_gathered(y, margins), margins), narrow)(x)[0]


def _gathered(x: Any, margins: list[Margins]) -> Any:
    """In auto mode each dimension whole whose margin is as wide as a block. XLA's partitioner fails at the gradient of
    some of these, and a device needs all of another block there."""
    if not margins or margins[0].call.frame.mode != "auto":
        return x
    frame = margins[0].call.frame
    small = {m.dim for m in margins if m.axes and max(m.want) * frame.axis_size(m.axes) >= m.size}
    if not small:
        return x
    layout = Layout(" ".join(f"d{i}" if i in small else f"1+d{i}" for i in range(x.ndim)))  # with a margin: left open
    return constrain(x, layout, frame)


def _check_edges(call: Call, edges: Edges) -> None:
    ends = [*edges.named.values(), *([edges.others] if edges.others else [])]
    if any(end.kind == "constant" for pair in ends for end in pair):
        rule = "deposit cannot add to a fixed number beyond the ends of the grid."
        call.fail(rule, advice='edge="zero" drops what lies there', error=LayoutError)


def _check_sides(call: Call) -> None:
    [wide], [narrow] = call.pattern.inputs, call.pattern.outputs
    bare, wanted = without_margins(wide), without_margins(narrow)
    if wanted != bare or any(d.bracket for d in (*wide.dims, *narrow.dims)):
        rule = "deposit changes margins and nothing else: both sides have the same dimensions on the same axes."
        fix = call.paste(wide, bare) if any(any(d.margin) for d in wide.dims) else None
        call.fail(rule, got=[f'"{bare.short}"', f'"{wanted.short}"'], fix=fix, error=LayoutError)
    for given, dim in zip(wide.dims, narrow.dims, strict=True):
        if any(have < want for have, want in zip(given.margin, dim.margin, strict=True)):
            rule = f"deposit makes margins narrower, and {dim.short} is wider than {given.short}."
            call.fail(rule, at=dim.span, advice="stencil.halo makes them wider", error=LayoutError)
    if wide.unreduced:
        rule = "the margins of a partial sum hold terms of other sums: psum first."
        call.fail(rule, fix=call.summed_first())
    if wide == narrow:
        rule = "no dimension has a narrower margin on the right, so there is nothing to add."
        advice = 'margins on the left, as in "1+x/a+1 -> x/a"'
        call.fail(rule, advice=advice, error=LayoutError)
    fault = next((d for d in wide.dims if any(d.margin) and len(d.atoms) != 1), None)
    if fault is not None:
        rule = 'deposit takes dimensions with one name each: those of "(a b)" have no neighbours of their own.'
        call.fail(rule, at=fault.span, advice="rearrange it into one dimension first", error=LayoutError)
