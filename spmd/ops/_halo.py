"""`halo`: copies of the neighbours' borders, in the string."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd.comm import _lax
from spmd.comm._call import Call, open_call
from spmd.errors import LayoutError, SizeError
from spmd.language import Dim, Layout

__all__ = ["EDGES", "check_edge", "halo", "with_margins", "without_margins"]

T = TypeVar("T")
EDGES = {"periodic": "wrap", "zero": "constant", "edge": "edge", "reflect": "reflect"}  # ours, and jnp.pad's


def halo(x: T, pattern: str, *, edge: str = "periodic", corners: bool = True, **names: Any) -> T:
    """Add margins with the neighbours' values: `halo(u, "x/a y -> 1+x/a+2 y")`.

    The global meaning is `jnp.pad`: the whole array with one more element before x and two after it. On each device
    the margins continue its own block, so that code which reads neighbours and returns the inner part (`u[:-2] +
    u[2:]`) means the same on a block and on the whole. Margins may be of any width, wider than a block too, on any
    number of dimensions, divided or whole; corners are filled.

    Communication: for each dimension with margins and for each side one collective-permute of the margin, or several
    where it is wider than a block: in all as many bytes as the margin has, the corners included that earlier
    dimensions have added. Without corners, no bytes for them, and no dimension waits for another. None where the
    dimension is whole. Backward the same in reverse: what lies in the margins is added to the owners.

    Args:
      x: An array or a pytree of arrays of this layout.
      pattern: `"layout -> layout"`, the same dimensions and axes, margins on the right.
      edge: What lies beyond the ends of the array: "periodic" (the other end), "zero", "edge" (the last element) or
        "reflect" (mirrored, the last element not repeated).
      corners: False where nothing reads what lies in the margins of two dimensions at once, as in a five-point
        stencil: in explicit mode it is then NaN, so that whoever reads it notices. Integers and booleans have no NaN:
        their corners are sent all the same.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array with its margins.

    Raises:
      LayoutError: If the sides differ in more than margins, or a dimension in several parts gets one.
      SizeError: If a mirrored margin is as wide as the array.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a -> x/a", mesh=mesh)
      ... def neighbours(u):
      ...     u = spmd.stencil.halo(u, "x/a -> 1+x/a+1")
      ...     return u[:-2] + u[2:]
      >>> print(neighbours(jnp.arange(8)))
      [ 8  2  4  6  8 10 12  6]
    """
    call = open_call("stencil.halo", pattern, names, arrays=(x,))
    check_edge(call, edge)
    _check_sides(call)
    [dst] = call.pattern.outputs

    def leaf(value: Any) -> Any:
        own = call.fork()
        operand = own.operand(value)
        margins, at = [], 0
        extra = len(own.ellipsis_shape())
        for dim in dst.dims:
            if any(dim.margin):
                factor = operand.factors[at]
                _check_mirror(own, dim, factor.size, edge)
                margins.append(_Margins(own, at, factor.axes, factor.local, factor.size, *dim.margin, edge))
            at += extra if dim.ellipsis else len(dim.atoms)
        with call.scope():
            # what has no NaN cannot show that a corner was read: its corners are filled
            if not corners and call.frame.explicit and jnp.issubdtype(operand.x.dtype, jnp.inexact):
                return own.result(_crossed(operand.x, margins))
            return own.result(functools.reduce(lambda out, one: one.added(out), margins, operand.x))

    return jax.tree.map(leaf, x)


def check_edge(call: Call, edge: Any) -> None:
    if edge not in EDGES:
        call.fail(f"edge is one of {', '.join(map(repr, EDGES))}, not {edge!r}.", error=LayoutError)


def _check_sides(call: Call) -> None:
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    given = next((d for d in src.dims if any(d.margin)), None)
    if given is not None:
        rule = "margins are added to arrays without, and this one has some on the left."
        call.fail(rule, at=given.span, fix="cut them off first, or ask for the wider ones at once", error=LayoutError)
    bare = without_margins(dst)
    if bare != src or any(d.bracket for d in (*src.dims, *dst.dims)):
        rule = "halo changes margins and nothing else: both sides have the same dimensions on the same axes."
        call.fail(rule, got=[f'"{src.short}"', f'"{bare.short}"'], fix=_with_margin(call, src), error=LayoutError)
    if src.unreduced:
        rule = "the margins of a partial sum would be partial sums of the neighbours: psum first."
        call.fail(rule, fix=f'psum(x, "{src.short} -> {src.without(*src.unreduced).short}")')
    wide = [d for d in dst.dims if any(d.margin)]
    if not wide:
        rule = "no dimension has a margin on the right, so there is nothing to add."
        call.fail(rule, fix=_with_margin(call, src), error=LayoutError)
    fault = next((d for d in wide if len(d.atoms) != 1), None)
    if fault is not None:
        rule = "a dimension in several parts has no neighbours of its own."
        call.fail(rule, at=fault.span, fix="rearrange it into one dimension first", error=LayoutError)


def with_margins(layout: Layout, margins: dict[int, tuple[int, int]]) -> Layout:
    """The layout with other margins, by position, and without brackets."""
    dims = [
        Dim(d.atoms, composite=d.composite, ellipsis=d.ellipsis, margin=margins.get(i, d.margin))
        for i, d in enumerate(layout.dims)
    ]
    return Layout.from_dims(dims, layout.unreduced, layout.reduced)


def without_margins(layout: Layout) -> Layout:
    return with_margins(layout, dict.fromkeys(range(len(layout.dims)), (0, 0)))


def _with_margin(call: Call, src: Layout) -> str:
    """The call with margins around the first divided dimension, to paste."""
    text = [d.short for d in src.dims]
    i = next((i for i, d in enumerate(src.dims) if d.axes), 0)
    wide = [f"1+{t}+1" if k == i else t for k, t in enumerate(text)]
    return call.paste(f"{' '.join(text)} -> {' '.join(wide)}") if text else 'halo(x, "x/a -> 1+x/a+1")'


def _check_mirror(call: Call, dim: Dim, size: int, edge: str) -> None:
    if edge == "reflect" and max(dim.margin) >= size:
        rule = f"a mirrored margin is narrower than the dimension, and {dim.atoms[0].name} has {size}."
        call.fail(rule, at=dim.span, got=[call.frame.describe()], error=SizeError)


def _crossed(x: Any, margins: list[_Margins]) -> Any:
    """The block with margins on its sides, of which none has seen the others."""
    nothing = jnp.asarray(jnp.nan, x.dtype)
    out, widths = x, [(0, 0)] * x.ndim
    for one in margins:
        wide, d = one.added(x), one.dim
        low = lax.slice_in_dim(wide, 0, one.before, axis=d)
        high = lax.slice_in_dim(wide, one.before + x.shape[d], wide.shape[d], axis=d)
        low, high = (jnp.pad(side, widths, constant_values=nothing) for side in (low, high))
        out = lax.concatenate([low, out, high], d)
        widths[d] = (one.before, one.after)
    return out


@dataclass(frozen=True)
class _Margins:
    """The margins of one dimension, `before` and `after`."""

    call: Call
    dim: int
    axes: tuple[str, ...]
    local: int
    size: int
    before: int
    after: int
    edge: str

    @property
    def blocks(self) -> int:
        return self.size // self.local

    def added(self, x: Any) -> Any:
        if not self.call.frame.explicit or self.blocks == 1:
            widths = [(0, 0)] * x.ndim
            widths[self.dim] = (self.before, self.after)
            return jnp.pad(x, widths, mode=EDGES[self.edge])
        if self.edge in ("periodic", "zero"):
            return self.exchanged(x, self.before, self.after)
        # What is mirrored may lie on the other side, further inside than that margin reaches.
        mirrored = self.edge == "reflect"
        before = max(self.before, self.after - self.local + 1) if mirrored else self.before
        after = max(self.after, self.before - self.local + 1) if mirrored else self.after
        return self.filled(self.exchanged(x, before, after), before)

    def exchanged(self, x: Any, before: int, after: int) -> Any:
        """The block between what the devices before and after it have; zeros beyond the ends unless periodic."""
        low = [self.received(x, -hop, width) for hop, width in self.hops(before)]
        high = [self.received(x, hop, width) for hop, width in self.hops(after)]
        parts = [*reversed(low), x, *high]
        return lax.concatenate(parts, self.dim) if len(parts) > 1 else x

    def hops(self, width: int) -> list[tuple[int, int]]:
        """How far away each piece of a margin lies, in blocks, and how wide it is; the nearest first."""
        full, rest = divmod(width, self.local)
        return [*((hop, self.local) for hop in range(1, full + 1)), *([(full + 1, rest)] if rest else [])]

    def received(self, x: Any, hop: int, width: int) -> Any:
        """The border of the block `hop` places away, on the side that faces here."""
        start = self.local - width if hop < 0 else 0
        piece = lax.slice_in_dim(x, start, start + width, axis=self.dim)
        n = self.blocks
        if self.edge == "periodic":
            pairs = [((i + hop) % n, i) for i in range(n)]
        else:
            pairs = [(i + hop, i) for i in range(n) if 0 <= i + hop < n]
        if hop % n == 0 and self.edge == "periodic":
            return piece
        if not pairs:
            return jnp.zeros_like(piece)
        return _lax.ppermute(piece, self.axes, dict(self.call.frame.sizes), pairs)

    def filled(self, wide: Any, before: int) -> Any:
        """The margins wanted, cut out of wider ones, with what lies beyond the ends taken from inside."""
        start = _lax.axis_index(self.axes, dict(self.call.frame.sizes)) * self.local  # of this block
        inner = lax.slice_in_dim(wide, before, before + self.local, axis=self.dim)

        def margin(first: int, width: int) -> Any:
            places = start + first + jnp.arange(width, dtype=jnp.int32)
            if self.edge == "edge":
                inside = jnp.clip(places, 0, self.size - 1)
            else:
                inside = jnp.abs(places)
                inside = jnp.where(inside >= self.size, 2 * (self.size - 1) - inside, inside)
            return jnp.take(wide, inside - start + before, axis=self.dim, mode="clip")

        low = [margin(-self.before, self.before)] if self.before else []
        high = [margin(self.local, self.after)] if self.after else []
        return lax.concatenate([*low, inner, *high], self.dim)
