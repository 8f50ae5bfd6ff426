"""`halo`: copies of the neighbours' borders, and what lies beyond the ends of the array. `deposit` is the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd import _compat
from spmd._trees.leaves import kind_of
from spmd.comm import _lax
from spmd.comm._call import Call, Operand, open_call
from spmd.comm._marks import constrain
from spmd.errors import Fix, SizeError, did_you_mean
from spmd.language import Dim, Layout
from spmd.modes import Frame

# Our names, each with the mode of `np.pad` that gives the same elements. The odd ones are turned after mirroring.
EDGES = {
    "periodic": "wrap",
    "zero": "constant",
    "edge": "edge",
    "symmetric": "symmetric",
    "antisymmetric": "symmetric",
    "reflect": "reflect",
    "antireflect": "reflect",
}
# What other libraries call them.
_ELSEWHERE = {
    "wrap": '"periodic"',
    "grid-wrap": '"periodic"',
    "circular": '"periodic"',
    "constant": "a number, as edge=0.0",
    "grid-constant": "a number, as edge=0.0",
    "zeros": '"zero"',
    "nearest": '"edge"',
    "replicate": '"edge"',
    "mirror": '"reflect"',
    "grid-mirror": '"symmetric"',
}


@dataclass(frozen=True)
class Edge:
    """What lies beyond one end: one of `EDGES`, or "constant" with its value."""

    kind: str
    value: Any = 0

    @property
    def mirrored(self) -> bool:
        return EDGES.get(self.kind) in ("symmetric", "reflect")

    @property
    def odd(self) -> bool:
        return self.kind.startswith("anti")

    @property
    def skipped(self) -> int:
        """Return how many elements at the end a mirror does not repeat: one if the wall lies on an element."""
        return int(EDGES.get(self.kind) == "reflect")

    def turned(self, mirrored: Any, last: Any) -> Any:
        """The mirrored elements as they lie beyond the end: unchanged, or odd about the wall on `last` or behind it."""
        if not self.odd:
            return mirrored
        return -mirrored if self.kind == "antisymmetric" else 2 * last - mirrored

    def continued(self, x: Any, dim: int, width: int, *, low: bool) -> Any:
        """The whole array with `width` elements more beyond one end.

        Uses `pad` and `where` alone, because XLA's partitioner aborts on slices of padded arrays that are joined again.
        """
        if not width:
            return x
        size, widths = x.shape[dim], [(0, 0)] * x.ndim
        widths[dim] = (width, 0) if low else (0, width)
        if self.kind == "constant":
            return jnp.pad(x, widths, constant_values=self.value)
        padded = jnp.pad(x, widths, mode=EDGES[self.kind])
        if not self.odd:
            return padded
        place = lax.broadcasted_iota(jnp.int32, padded.shape, dim)
        last = lax.slice_in_dim(x, 0 if low else size - 1, 1 if low else size, axis=dim)
        return jnp.where(place < width if low else place >= size, self.turned(padded, last), padded)

    def inside(self, places: Any, size: int, *, low: bool) -> Any:
        """The places that elements come from: places beyond one end point into the array, all others stay."""
        if self.kind == "edge":
            return jnp.clip(places, 0, size - 1)
        if low:
            return jnp.where(places < 0, self.skipped - 1 - places, places)
        return jnp.where(places >= size, 2 * size - 1 - self.skipped - places, places)

    def on(self, call: Call, x: Any) -> Edge:
        """This edge for the array `x`: a constant is given its dtype."""
        unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger) or x.dtype == jnp.bool_
        if self.odd and unsigned:
            rule = f'an edge "{self.kind}" has the opposite sign, and {x.dtype} has no negative numbers.'
            call.fail(rule, advice="convert the array to signed numbers first")
        if self.kind != "constant":
            return self
        if not _holds(x.dtype, self.value):
            shown = f"a value of {jnp.result_type(self.value)}" if _is_array(self.value) else repr(self.value)
            rule = f"the edge is a number that the array can hold, and {x.dtype} does not hold {shown}."
            call.fail(rule)
        value = self.value
        if isinstance(value, jax.core.Tracer):  # the check proves that it is equal on all devices
            value = call.operand(value, layout=Layout("scalar"), name="the edge").x
        return replace(self, value=jnp.asarray(value, x.dtype))


Ends = tuple[Edge, Edge]


@dataclass(frozen=True)
class Edges:
    """The two ends of each dimension by name, or one pair for all dimensions."""

    named: Mapping[str, Ends]
    others: Ends | None = None

    def of(self, dim: Dim) -> Ends:
        return self.others or self.named[dim.atoms[0].name]


def read_edges(call: Call, edge: Any, layouts: Iterable[Layout], wide: Iterable[Dim]) -> Edges:
    """The `edge` of a call: one for all dimensions or one for each name. `wide` are the dimensions with margins."""
    if isinstance(edge, Edges):  # from a call that contains this one
        return edge
    if not isinstance(edge, Mapping):
        return Edges({}, _ends(call, edge, "edge"))
    known = dict.fromkeys(atom.name for layout in layouts for atom in layout.atoms if atom.named)
    unknown = [name for name in edge if name not in known]
    if unknown:
        hint = did_you_mean(str(unknown[0]), known)
        rule = f"edge names the dimensions of the pattern, and {unknown[0]!r} is not one of them{hint or '.'}"
        call.fail(rule, got=[f"dimensions: {', '.join(known) or 'none with a name'}"])
    missing = next((dim for dim in wide if dim.atoms[0].name not in edge), None)
    if missing is not None:
        name = missing.atoms[0].name
        rule = f"edge says for each dimension with margins what lies beyond its ends, and {name} is not in it."
        advice = f'an entry for "{name}" in edge' if missing.atoms[0].named else "give the dimension a name"
        call.fail(rule, at=missing.span, got=[f"edge: {', '.join(edge) or 'empty'}"], advice=advice)
    return Edges({name: _ends(call, one, f"edge[{name!r}]") for name, one in edge.items()})


def _ends(call: Call, edge: Any, what: str) -> Ends:
    """Both ends, read from one edge or a pair."""
    if not isinstance(edge, tuple):
        both = _one(call, edge, what)
        return both, both
    if len(edge) != 2:
        rule = f"{what} is one edge, or a pair for the low and the high end, and this tuple has {len(edge)}."
        call.fail(rule, advice='as in ("zero", "edge")')
    low, high = _one(call, edge[0], f"{what}[0]"), _one(call, edge[1], f"{what}[1]")
    if (low.kind == "periodic") != (high.kind == "periodic"):
        rule = f"a dimension is periodic at both ends or at neither, and {what} says it of one."
        call.fail(rule)
    return low, high


def _one(call: Call, edge: Any, what: str) -> Edge:
    if isinstance(edge, str):
        if edge in EDGES:
            return Edge(edge)
        got, advice = repr(edge), _ELSEWHERE.get(edge.lower())
        hint = "" if advice else did_you_mean(edge, EDGES)
    elif _is_number(edge):
        return Edge("zero") if not _is_array(edge) and edge == 0 else Edge("constant", edge)
    else:
        got, advice, hint = kind_of(edge), None, ""
        if _is_array(edge):
            got = f"an array of shape {jnp.shape(edge)} and dtype {edge.dtype}"
    rule = f"{what} is one of {', '.join(map(repr, EDGES))}, or a number, not {got}{hint or '.'}"
    return call.fail(rule, advice=advice)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _is_number(value: Any) -> bool:
    if not _is_array(value):
        return isinstance(value, (bool, int, float, complex))
    return value.shape == () and (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == jnp.bool_)


def _holds(dtype: Any, value: Any) -> bool:
    """Return whether this dtype holds a constant: floating-point dtypes round it, others hold it exactly or not at
    all."""
    if isinstance(value, jax.core.Tracer):
        return jnp.promote_types(dtype, value.dtype) == dtype
    value = np.asarray(value)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    if jnp.issubdtype(dtype, jnp.floating):
        return not jnp.issubdtype(value.dtype, jnp.complexfloating)
    low, high = (0, 1) if dtype == jnp.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return not jnp.issubdtype(value.dtype, jnp.complexfloating) and bool(low <= value <= high and value == int(value))


# --- `halo`: copies of the neighbours' borders -----------------------------------------------------------------------


T = TypeVar("T")


def halo(x: T, pattern: str, /, *, edge: Any = "periodic", corners: bool = True, **names: Any) -> T:
    """Add margins with the neighbours' values: `halo(u, "x/a y -> 1+x/a+2 y")`.

    The global meaning is `jnp.pad`: the whole array with one more element before x and two after it. On each device the
    margins continue its own block. So code that reads neighbours and returns the inner part (`u[:-2] + u[2:]`) means
    the same on a block and on the whole. Margins may have any width, even wider than a block, on any number of
    dimensions, divided or whole. Corners are filled. An array that has margins may get wider ones, or margins in
    another dimension with the right corners. The margins that it has stay as they are.

    Communication: one collective-permute of the margin for each dimension with margins and for each side, or several if
    it is wider than a block. Together they send as many bytes as the margin has, with the corners that earlier
    dimensions have added. With `corners=False` these are not sent, and no dimension waits for another. A dimension that
    is whole sends nothing. Backward the same in reverse, a `deposit`: what lies in the margins is added
    to its owners.

    Args:
      x: An array or a pytree of arrays of this layout.
      pattern: `"layout -> layout"`, with the same dimensions and axes, and wider margins on the right.
      edge: What lies beyond the ends of the array. After a b c d, the next two elements are

        - "periodic": a b, the other end; `np.pad`'s "wrap";
        - a number, also a traced scalar, or "zero": `np.pad`'s "constant";
        - "edge": d d, the last element;
        - "symmetric": d c, mirrored at a wall half a step beyond the last element (cell-centred: no flux);
        - "antisymmetric": -d -c, the same with the opposite sign (cell-centred: zero at the wall);
        - "reflect": c b, mirrored at a wall on the last element (vertex-centred: no flux);
        - "antireflect": 2d-c 2d-b, the same odd about the last element (vertex-centred: the wall keeps its value);
          `np.pad`'s "reflect" with `reflect_type="odd"`.

        A pair is for the low and the high end: `("antisymmetric", 1.0)`. A dict has an entry for each dimension with
        margins: `{"x": "periodic", "y": "antisymmetric"}`.
      corners: False if nothing reads what lies in the margins of two dimensions at once, as in a five-point stencil. In
        explicit mode these are then NaN, so that whoever reads them notices. Integers and booleans have no NaN, so
        their corners are sent anyway.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array with its margins.

    Raises:
      LayoutError: If the sides differ in more than margins, a margin gets narrower, a dimension in several parts gets a
        margin, or an edge is unknown, names a dimension that the pattern lacks, or is a number that the array cannot
        hold.
      SizeError: If a mirrored margin is wider than the array, or, for a wall on the last element, as wide.

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
    example = 'stencil.halo(x, "b/dp d -> 1+b/dp+1 d")'
    also = {} if isinstance(edge, str) and edge == "periodic" and corners else None
    call = open_call("stencil.halo", pattern, names, arrays=(x,), example=example, also=also)
    check_sides(call)
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    edges = read_edges(call, edge, (src,), wider_dims(src, dst))

    def leaf(own: Call, operand: Operand) -> Any:
        margins = margins_of(own, operand, src, dst, edges)
        # without a NaN nothing would show that a corner was read, so the corners are filled
        if not corners and call.frame.explicit and jnp.issubdtype(operand.x.dtype, jnp.inexact):
            return _framed(operand.x, margins, corners=False)
        framed = all(one.sent for one in margins)
        return _framed(operand.x, margins, corners=True) if framed else widened(operand.x, margins)

    return call.each(x, leaf, margins=True)


def margins_of(call: Call, operand: Operand, src: Layout, dst: Layout, edges: Edges) -> list[Margins]:
    """For each dimension whose margin is wider in `dst` than in `src`, how it gets there."""
    margins, at = [], 0
    extra = len(call.ellipsis_shape())
    for given, dim in zip(src.dims, dst.dims, strict=True):
        if given.margin != dim.margin:
            factor = operand.factors[at]
            low, high = (one.on(call, operand.x) for one in edges.of(dim))
            one = Margins(call, at, factor.axes, factor.local, factor.size, given.margin, dim.margin, low, high)
            _check_mirrors(one, dim)
            margins.append(one)
        at += extra if dim.ellipsis else len(dim.atoms)
    return margins


def widened(x: Any, margins: list[Margins]) -> Any:
    """The block with its margins, corners too, which are joined to it one dimension after another."""
    return functools.reduce(lambda out, one: one.added(out), margins, x)


def wider_dims(src: Layout, dst: Layout) -> list[Dim]:
    return [b for a, b in zip(src.dims, dst.dims, strict=True) if a.margin != b.margin]


def check_sides(call: Call) -> None:
    """Check that both sides of a halo, or of a deposit, which is the way back, differ in margins that it can change."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    grows = call.name == "stencil.halo"
    who, more, less = ("halo", "wider", "narrower") if grows else ("deposit", "narrower", "wider")
    bare, wanted = without_margins(src), without_margins(dst)
    if wanted != bare or any(d.bracket for d in (*src.dims, *dst.dims)):
        rule = f"{who} changes margins and nothing else: both sides have the same dimensions on the same axes."
        cut = call.paste(src, bare) if any(any(d.margin) for d in src.dims) else None
        call.fail(rule, got=[f'"{bare.short}"', f'"{wanted.short}"'], fix=_with_margin(call, src) if grows else cut)
    for given, dim in zip(src.dims, dst.dims, strict=True):
        if any(have > want if grows else have < want for have, want in zip(given.margin, dim.margin, strict=True)):
            rule = f"{who} makes margins {more}, and {dim.short} is {less} than {given.short}."
            advice = "slice the array to cut margins off" if grows else "stencil.halo makes them wider"
            call.fail(rule, at=dim.span, advice=advice)
    held = "would be partial sums of the neighbours" if grows else "hold terms of other sums"
    call.complete(f"the margins of a partial sum {held}: psum first.")
    if src == dst:
        rule = f"no dimension has a {more} margin on the right, so there is nothing to add."
        advice = None if grows else 'margins on the left, as in "1+x/a+1 -> x/a"'
        call.fail(rule, fix=_with_margin(call, src) if grows else None, advice=advice)
    fault = next((d for d in (dst if grows else src).dims if any(d.margin) and len(d.atoms) != 1), None)
    if fault is not None:
        rule = f'{who} takes dimensions with one name each: those of "(a b)" have no neighbours of their own.'
        call.fail(rule, at=fault.span, advice="rearrange it into one dimension first")


def with_margins(layout: Layout, margins: dict[int, tuple[int, int]]) -> Layout:
    """The layout with other margins, given by position, and without brackets."""
    dims = [
        Dim(d.atoms, composite=d.composite, ellipsis=d.ellipsis, margin=margins.get(i, d.margin))
        for i, d in enumerate(layout.dims)
    ]
    return Layout.from_dims(dims, layout.unreduced, layout.reduced)


def without_margins(layout: Layout) -> Layout:
    return with_margins(layout, dict.fromkeys(range(len(layout.dims)), (0, 0)))


def _with_margin(call: Call, src: Layout) -> Fix | None:
    """The call with margins wider by one around the first divided dimension, to paste."""
    i = next((i for i, d in enumerate(src.dims) if d.axes), 0)
    if not src.dims or src.dims[i].ellipsis or len(src.dims[i].atoms) != 1:
        return None
    plain = with_margins(src, {})
    low, high = plain.dims[i].margin
    return call.paste(plain, with_margins(src, {i: (low + 1, high + 1)}))


def _check_mirrors(one: Margins, dim: Dim) -> None:
    for edge, width in zip((one.low, one.high), dim.margin, strict=True):
        most = one.size - edge.skipped
        if edge.mirrored and width > most:
            name = dim.atoms[0].name
            rule = f'a margin with the edge "{edge.kind}" is at most {most} wide, since {name} has {one.size}.'
            one.call.fail(rule, at=dim.span, got=[one.call.frame.describe()], error=SizeError)


def _framed(x: Any, margins: list[Margins], *, corners: bool) -> Any:
    """The block, padded once, with its margins written into the frame: the array itself is copied once and not for each
    dimension. Without corners each margin is made without the others, and the corners are NaN.
    """
    sides: list[tuple[Margins, Any, Any]] = []

    def part(one: Margins, start: int, stop: int) -> Any:
        """Elements of a dimension, with the margins that the array has by now."""
        piece = lax.slice_in_dim(x, start, stop, axis=one.dim)
        for other, *both in sides if corners else []:
            low, high = (lax.slice_in_dim(side, start, stop, axis=one.dim) for side in both)
            piece = lax.concatenate([low, piece, high], other.dim)
        return piece

    for one in margins:
        sides.append((one, *one.sides(x, functools.partial(part, one))))
    widths = {one.dim: one.wider for one in margins}
    frame = [(*widths.get(i, (0, 0)), 0) for i in range(x.ndim)]
    out = lax.pad(x, jnp.asarray(0 if corners else jnp.nan, x.dtype), frame)
    outside = {one.dim for one, *_ in sides}
    for one, low, high in sides:
        start = [before if not corners or i in outside else 0 for i, (before, *_) in enumerate(frame)]
        outside.discard(one.dim)
        for side, at in ((low, 0), (high, frame[one.dim][0] + x.shape[one.dim])):
            start[one.dim] = at
            out = lax.dynamic_update_slice(out, side, start) if side.size else out
    return out


@dataclass(frozen=True)
class Margins:
    """The margins of one dimension, before and after: those that the array has, and those that are wanted."""

    call: Call
    dim: int
    axes: tuple[str, ...]
    local: int
    size: int
    have: tuple[int, int]
    want: tuple[int, int]
    low: Edge
    high: Edge

    @property
    def blocks(self) -> int:
        return self.size // self.local

    @property
    def wider(self) -> tuple[int, int]:
        """Return how much is added on each side."""
        return self.want[0] - self.have[0], self.want[1] - self.have[1]

    @property
    def periodic(self) -> bool:
        return self.low.kind == "periodic"

    @property
    def sent(self) -> bool:
        """Return whether both margins are elements of the array or zeros, each of them once."""
        kinds = {self.low.kind, self.high.kind}
        few = self.blocks > 1 or max(self.want) <= self.size
        return self.call.frame.explicit and kinds <= {"periodic", "zero"} and few

    def sides(self, x: Any, part: Callable[[int, int], Any]) -> tuple[Any, Any]:
        """Return what is added before and after; `part(start, stop)` gives elements of the array."""
        before, length = self.wider[0], x.shape[self.dim]
        if not self.sent:
            wide = self.added(x)
            bounds = ((0, before), (before + length, wide.shape[self.dim]))
            low, high = (lax.slice_in_dim(wide, *both, axis=self.dim) for both in bounds)
        elif self.blocks > 1:
            low, high = self.received_from(part, *self.want)
        else:
            end = self.have[0] + self.size
            low = part(end - self.want[0], end - self.have[0])
            high = part(self.have[0] + self.have[1], self.have[0] + self.want[1])
            low, high = (low, high) if self.periodic else (jnp.zeros_like(low), jnp.zeros_like(high))
        return low, high

    def added(self, x: Any) -> Any:
        if not self.call.frame.explicit or self.blocks == 1:
            return self.padded(x)
        # Mirrored elements may lie on the other side, further inside than that margin reaches.
        (before, after), (low, high) = self.want, self.wider
        if low and self.low.mirrored:
            after = max(after, self.want[0] - self.local + self.low.skipped)
        if high and self.high.mirrored:
            before = max(before, self.want[1] - self.local + self.high.skipped)
        part = lambda start, stop: lax.slice_in_dim(x, start, stop, axis=self.dim)
        low, high = self.received_from(part, before, after)
        wide = lax.concatenate([low, x, high], self.dim)
        return wide if self.sent else self.filled(wide, before)

    # --- where the dimension is whole

    def padded(self, x: Any) -> Any:
        (before, after), d = self.want, self.dim
        inner = lax.slice_in_dim(x, self.have[0], self.have[0] + self.size, axis=d) if any(self.have) else x
        if self.low.kind == self.high.kind != "constant" and not self.low.odd:
            out = jnp.pad(inner, self.widths(x, before, after), mode=EDGES[self.low.kind])
        else:
            out = self.high.continued(self.low.continued(inner, d, before, low=True), d, after, low=False)
        if not any(self.have):
            return out
        low, high = self.wider  # what is there already stays
        place = lax.broadcasted_iota(jnp.int32, out.shape, d)
        there = (place >= low) & (place < low + x.shape[d])
        return jnp.where(there, jnp.pad(x, self.widths(x, low, high)), out)

    def widths(self, x: Any, before: int, after: int) -> list[tuple[int, int]]:
        """The widths for `pad` in this dimension."""
        return [(before, after) if i == self.dim else (0, 0) for i in range(x.ndim)]

    # --- where it is divided

    def received_from(self, part: Callable[[int, int], Any], before: int, after: int) -> tuple[Any, Any]:
        """The pieces of the devices before and after, as far as the array does not have them. Beyond the ends there are
        zeros unless it is periodic."""
        low = [self.received(part, -hop, near, far) for hop, near, far in self.hops(self.have[0], before)]
        high = [self.received(part, hop, near, far) for hop, near, far in self.hops(self.have[1], after)]
        first, last = (lax.concatenate(one, self.dim) if one else part(0, 0) for one in (low[::-1], high))
        return first, last

    def hops(self, have: int, want: int) -> list[tuple[int, int, int]]:
        """The pieces of a margin, the nearest first: how many blocks away each lies, and which of that block's
        elements it is, counted from the side that faces here."""
        pieces = []
        for hop in range(have // self.local + 1, -(-want // self.local) + 1):
            start = (hop - 1) * self.local
            pieces.append((hop, max(have - start, 0), min(want - start, self.local)))
        return pieces

    def received(self, part: Callable[[int, int], Any], hop: int, near: int, far: int) -> Any:
        """The elements `near` to `far` of the block `hop` places away, from the side that faces here."""
        start = self.have[0] + (self.local - far if hop < 0 else near)
        piece = part(start, start + far - near)
        n = self.blocks
        pairs = [((i + hop) % n, i) for i in range(n) if self.periodic or 0 <= i + hop < n]
        if hop % n == 0 and self.periodic:
            return piece
        return _lax.ppermute(piece, self.axes, self.call.mesh, pairs) if pairs else jnp.zeros_like(piece)

    def filled(self, wide: Any, before: int) -> Any:
        """The margins wanted, cut out of wider ones, with what lies beyond the ends as the edges say."""
        low, high = self.wider
        middle = lax.slice_in_dim(wide, before - self.have[0], before + self.local + self.have[1], axis=self.dim)
        first = [self.ring(wide, before, -self.want[0], low)] if low else []
        last = [self.ring(wide, before, self.local + self.have[1], high)] if high else []
        return lax.concatenate([*first, middle, *last], self.dim)

    def ring(self, wide: Any, before: int, first: int, width: int) -> Any:
        """The elements from `first` on, counted from the block's own first one."""
        is_low = first < 0
        edge = self.low if is_low else self.high
        sent = lax.slice_in_dim(wide, before + first, before + first + width, axis=self.dim)
        if edge.kind == "zero":
            return sent
        start = _lax.axis_index(self.axes, self.call.mesh) * self.local  # of this block
        places = start + first + jnp.arange(width, dtype=jnp.int32)
        outside = places < 0 if is_low else places >= self.size
        outside = outside.reshape(tuple(-1 if i == self.dim else 1 for i in range(wide.ndim)))
        if edge.kind == "constant":
            return jnp.where(outside, edge.value, sent)
        taken = lambda places: jnp.take(wide, places - start + before, axis=self.dim, mode="clip")
        mirrored = taken(edge.inside(places, self.size, low=is_low))
        if not edge.odd:
            return mirrored
        last = taken(jnp.full(1, 0 if is_low else self.size - 1, jnp.int32))
        return jnp.where(outside, edge.turned(mirrored, last), mirrored)


# --- `deposit`: what lies in margins is added to its owners. The way back of a halo -----------------------------------


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
    check_sides(call)
    [wide], [narrow] = call.pattern.inputs, call.pattern.outputs
    edges = read_edges(call, edge, (wide,), wider_dims(narrow, wide))
    _check_edges(call, edges)

    def leaf(own: Call, operand: Operand) -> Any:
        if operand.x.dtype == jnp.bool_:
            own.fail("a deposit adds numbers, and the array holds booleans.")
        return _narrowed(call.frame, operand.x, margins_of(own, operand, narrow, wide, edges))

    return call.each(x, leaf, margins=True)


def _narrowed(frame: Frame, x: Any, margins: list[Margins]) -> Any:
    """The transpose of `widened`, at an array of its result's shape."""
    if frame.explicit:  # typed as what a permute gives, so that nothing is summed
        x = _compat.pvary(x, frame.in_mesh_order({axis for one in margins for axis in one.axes}))
    narrow = x
    for one in margins:
        low, high = one.wider
        narrow = lax.slice_in_dim(narrow, low, narrow.shape[one.dim] - high, axis=one.dim)
    return jax.linear_transpose(lambda y: widened(_gathered(frame, y, margins), margins), narrow)(x)[0]


def _gathered(frame: Frame, x: Any, margins: list[Margins]) -> Any:
    """In auto mode each dimension whole whose margin is as wide as a block. XLA's partitioner fails at the gradient of
    some of these, and a device needs all of another block there."""
    if frame.mode != "auto":
        return x
    small = {m.dim for m in margins if m.axes and max(m.want) * frame.axis_size(m.axes) >= m.size}
    if not small:
        return x
    layout = Layout(" ".join(f"d{i}" if i in small else f"1+d{i}" for i in range(x.ndim)))  # with a margin: left open
    return constrain(x, layout, frame)


def _check_edges(call: Call, edges: Edges) -> None:
    ends = [*edges.named.values(), *([edges.others] if edges.others else [])]
    if any(end.kind == "constant" for pair in ends for end in pair):
        rule = "deposit cannot add to a fixed number beyond the ends of the grid."
        call.fail(rule, advice='edge="zero" drops what lies there')
