"""What lies beyond the ends of an array: the `edge` of halos and stencils, one for all dimensions or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd._trees.leaves import kind_of
from spmd.comm._call import Call
from spmd.errors import LayoutError, did_you_mean
from spmd.language import Dim, Layout

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
        """How many elements at the end a mirror does not repeat: one if the wall lies on an element."""
        return int(EDGES.get(self.kind) == "reflect")

    @property
    def plain(self) -> bool:
        """Whether `jnp.pad` makes it without further work."""
        return not self.odd and self.kind != "constant"

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
            call.fail(rule, advice="convert the array to signed numbers first", error=LayoutError)
        if self.kind != "constant":
            return self
        if not _holds(x.dtype, self.value):
            shown = f"a value of {jnp.result_type(self.value)}" if _is_array(self.value) else repr(self.value)
            rule = f"the edge is a number that the array can hold, and {x.dtype} does not hold {shown}."
            call.fail(rule, error=LayoutError)
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
        call.fail(rule, got=[f"dimensions: {', '.join(known) or 'none with a name'}"], error=LayoutError)
    missing = next((dim for dim in wide if dim.atoms[0].name not in edge), None)
    if missing is not None:
        name = missing.atoms[0].name
        rule = f"edge says for each dimension with margins what lies beyond its ends, and {name} is not in it."
        advice = f'an entry for "{name}" in edge' if missing.atoms[0].named else "give the dimension a name"
        call.fail(rule, at=missing.span, got=[f"edge: {', '.join(edge) or 'empty'}"], advice=advice, error=LayoutError)
    return Edges({name: _ends(call, one, f"edge[{name!r}]") for name, one in edge.items()})


def _ends(call: Call, edge: Any, what: str) -> Ends:
    """Both ends, read from one edge or a pair."""
    if not isinstance(edge, tuple):
        both = _one(call, edge, what)
        return both, both
    if len(edge) != 2:
        rule = f"{what} is one edge, or a pair for the low and the high end, and this tuple has {len(edge)}."
        call.fail(rule, advice='as in ("zero", "edge")', error=LayoutError)
    low, high = _one(call, edge[0], f"{what}[0]"), _one(call, edge[1], f"{what}[1]")
    if (low.kind == "periodic") != (high.kind == "periodic"):
        rule = f"a dimension is periodic at both ends or at neither, and {what} says it of one."
        call.fail(rule, error=LayoutError)
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
    return call.fail(rule, advice=advice, error=LayoutError)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _is_number(value: Any) -> bool:
    if not _is_array(value):
        return isinstance(value, (bool, int, float, complex))
    return value.shape == () and (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == jnp.bool_)


def _holds(dtype: Any, value: Any) -> bool:
    """Whether this dtype holds a constant: floating-point dtypes round it, others hold it exactly or not at all."""
    if isinstance(value, jax.core.Tracer):
        return jnp.promote_types(dtype, value.dtype) == dtype
    value = np.asarray(value)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    if jnp.issubdtype(dtype, jnp.floating):
        return not jnp.issubdtype(value.dtype, jnp.complexfloating)
    low, high = (0, 1) if dtype == jnp.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return not jnp.issubdtype(value.dtype, jnp.complexfloating) and bool(low <= value <= high and value == int(value))
