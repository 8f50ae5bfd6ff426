"""How a value lies, dimension by dimension, as far as a few simple rules can tell: what a fix is chosen by.

The pass itself knows of each mesh axis whether a value is equal or different along it. That is enough to find a fault
and too little to mend it: a block is gathered, a term is summed, a local mean is neither. So where there is a fault,
and only there, the jaxpr is read once more, and each value is followed from the arguments. No rule: not known, and
then a message advises instead of offering a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spmd._facts import kernel_around
from spmd._jaxprs import Held, axes_of, opened
from spmd._jaxprs import shape_of as _shape
from spmd._walker import Domain, walk
from spmd.checker._rounding import rounds
from spmd.checker._source import called_in_jax
from spmd.checker._table import groups
from spmd.language import Layout

Axes = tuple[str, ...]

# The value is constant along the dimension, which then lies as the other operands' does.
FREE: Axes = ("*",)


@dataclass(frozen=True)
class Made:
    """A reduction over a divided dimension: on each device it is that of its own block only."""

    op: str  # "sum", "mean", "max", ...; "scaled": a sum divided by the number of its terms, for whatever reason
    axes: frozenset[str]
    name: str | None = None  # the argument that was reduced, and how; None where it was something else
    layout: Layout | None = None
    dims: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class Place:
    """One value.

    Attributes:
      dims: The mesh axes that divide each dimension, None where that is not known, and FREE where any may.
      made: The reduction that it is a part of, if it is one.
      counts: Whether it is an arange, and nothing was done to it.
      value: The number that it is, of a literal.
      name: The argument that it is, as messages call it.
      layout: That argument's layout.
    """

    dims: tuple[Axes | None, ...]
    made: Made | None = None
    counts: bool = False
    value: float | None = None
    name: str | None = field(default=None, compare=False)
    layout: Layout | None = field(default=None, compare=False)

    @property
    def known(self) -> bool:
        """Whether it is a block, or the whole, of one array."""
        return self.made is None and None not in self.dims and FREE not in self.dims

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.dims if axes != FREE for axis in axes or ())

    @property
    def equal(self) -> bool:
        """Whether it is certainly the same on all devices."""
        return self.made is None and None not in self.dims and not self.axes

    def like(self, layout: Layout) -> Layout | None:
        """A layout with the axes that the value has; None where the dimensions do not correspond, or are not known."""
        extra = len(self.dims) - len(layout.dims)
        if extra and not layout.has_ellipsis:
            return None
        rest = list(self.dims)
        dims = []
        for dim in layout.dims:
            if dim.ellipsis:  # their axes are not checked there
                del rest[: extra + 1]
                dims.append(dim)
                continue
            axes = rest.pop(0)
            if axes is None or axes == FREE or (dim.composite and axes != dim.axes):
                return None
            dims.append(dim if axes == dim.axes else replace(dim, atoms=(replace(dim.atoms[0], axes=axes),)))
        if len({axis for dim in dims for axis in dim.axes}) != sum(len(dim.axes) for dim in dims):
            return None
        return layout.from_dims(tuple(dims), unreduced=sorted(self.made.axes) if self.made else ())


Found = Place | None
Rule = Callable[[Any, Sequence[Found]], Found]


class Places(Domain):
    """Where the operands of all layouts in a jaxpr lie.

    Args:
      jaxpr: The whole of it.
      names: What messages call the arguments of the body.
      layouts: The arguments' layouts.
    """

    def __init__(self, jaxpr: Any, names: Sequence[str], layouts: Sequence[Layout]):
        super().__init__()
        self.at: dict[int, Found] = {}
        self.arguments = list(zip(names, layouts, strict=False))
        walk(jaxpr, [None] * len(opened(jaxpr)[0].invars), self)

    def of(self, eqn: Any) -> Found:
        """How the operand of a layout's marker lies; None where that is not known, or not always the same."""
        return self.at.get(id(eqn))

    def constant(self, var: Any, value: Any) -> Found:
        return None

    def literal(self, value: Any) -> Found:
        number = np.asarray(value)
        plain = number.ndim == 0 and number.dtype.kind in "iuf"
        return Place((FREE,) * number.ndim, value=float(number) if plain else None)

    def step(self, eqn: Any, operands: Sequence[Found]) -> Sequence[Found]:
        name = eqn.primitive.name
        if name == "spmd_layout":
            [place] = operands
            if self.at.setdefault(id(eqn), place) != place:
                self.at[id(eqn)] = None
            return [_believed(eqn.params["layout"], place, len(_shape(eqn.outvars[0])))]
        if len(eqn.outvars) != 1 or name not in RULES:
            return [None] * len(eqn.outvars)
        found = RULES[name](eqn, operands)
        return [found if found and len(found.dims) == len(_shape(eqn.outvars[0])) else None]

    def join(self, one: Found, other: Found) -> Found:
        return one if one == other else None

    def sliced(self, value: Found, operand: Any) -> Found:
        return None

    def stacked(self, value: Found, result: Any) -> Found:
        return None

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Found]) -> Sequence[Found]:
        """The body of a kernel. Constants that JAX hoisted out of it come before the arguments."""
        body, _ = opened(part.jaxpr)
        kernel = kernel_around(self.callers)
        told = self.arguments or ([(leaf.path, leaf.layout) for leaf in kernel.arguments] if kernel else [])
        known = told if len(told) <= len(body.invars) else []
        places: list[Found] = [None] * (len(body.invars) - len(known))
        for (name, layout), var in zip(known, body.invars[len(places) :], strict=True):
            rank = len(_shape(var))
            place = _believed(layout.with_rank(rank) if layout.has_ellipsis else layout, None, rank)
            places.append(place and replace(place, name=name, layout=layout))
        self.run(eqn, part, places)
        return [None] * len(eqn.outvars)


def _believed(layout: Layout, place: Found, rank: int) -> Found:
    """What a layout says, which was checked."""
    if layout.has_ellipsis or len(layout.dims) != rank or any(any(dim.margin) for dim in layout.dims):
        return place
    dims = tuple(tuple(axis for atom in dim.atoms for axis in atom.axes or ()) for dim in layout.dims)
    made = Made("sum", frozenset(layout.unreduced)) if layout.unreduced else None
    kept = place is not None and place.dims == dims and place.made == made
    return replace(place, dims=dims) if kept and place else Place(dims, made)


# --- one primitive ------------------------------------------------------------------------------------------


def _identity(eqn: Any, ins: Sequence[Found]) -> Found:
    return ins[0]


def _retyped(eqn: Any, ins: Sequence[Found]) -> Found:
    """As it is, but for what opaque code is given."""
    return None if eqn.params["to"] == "hidden" else ins[0]


def _linear(eqn: Any, ins: Sequence[Found]) -> Found:
    """Another array that lies as this one."""
    return ins[0] and replace(ins[0], made=_changed(ins[0].made), counts=False, name=None, layout=None)


def _changed(made: Made | None) -> Made | None:
    """A reduction after something was done to its result: it is no longer that of the argument alone."""
    return made and replace(made, name=None, count=0)


def _converted(eqn: Any, ins: Sequence[Found]) -> Found:
    """The sum of rounded parts is not the rounded sum."""
    return None if ins[0] and ins[0].made and rounds(eqn) else _linear(eqn, ins)


def _elementwise(eqn: Any, ins: Sequence[Found]) -> Found:
    """As all operands lie; nothing is known of what is done to a part."""
    rank = len(_shape(eqn.outvars[0]))
    merged: list[Axes | None] = [FREE] * rank
    for place in ins:
        if place is None or place.made is not None:
            return None
        if len(place.dims) == rank:
            merged = [_merged(a, b) for a, b in zip(merged, place.dims, strict=True)]
    return Place(tuple(merged))


def _merged(one: Axes | None, two: Axes | None) -> Axes | None:
    return two if one == FREE else one if two in (FREE, one) else None


def _sum(eqn: Any, ins: Sequence[Found]) -> Found:
    """A sum of parts of the same kind is one too."""
    parts = [place.made for place in ins if place is not None]
    if len(parts) == len(ins) and len({(made and made.op, made and made.axes) for made in parts}) == 1 and parts[0]:
        op, axes = parts[0].op, parts[0].axes
        whole = Made(op, axes)
        dims = {place.dims for place in ins if place is not None}
        return Place(dims.pop(), whole) if len(dims) == 1 and op in ("sum", "mean") else None
    return _elementwise(eqn, ins)


def _product(eqn: Any, ins: Sequence[Found]) -> Found:
    """A part times what is equal on all devices is a part; divided by the number of its terms it is a mean."""
    first, second = ins
    if first is None or second is None:
        return None
    if first.made is None and second.made is None:
        return _elementwise(eqn, ins)
    if eqn.primitive.name == "mul" and first.made is None:
        first, second = second, first
    made = first.made
    if made is None or not second.equal or (eqn.primitive.name == "div" and rounds(eqn)):
        return None
    dims = tuple(map(_merged, first.dims, second.dims)) if second.dims else first.dims
    if None in dims:
        return None
    if made.op == "sum" and made.count and second.value in (made.count, 1 / made.count):
        sure = called_in_jax(eqn, "mean")
        return replace(first, made=replace(made, op="mean" if sure else "scaled"), name=None)
    return replace(first, made=_changed(made), name=None)


def _arange(eqn: Any, ins: Sequence[Found]) -> Found:
    rank = len(_shape(eqn.outvars[0]))
    return Place((None,) * rank, counts=rank == 1)


def _reduction(op: str) -> Rule:
    def rule(eqn: Any, ins: Sequence[Found]) -> Found:
        place = ins[0]
        gone = tuple(eqn.params["axes"])
        if place is None or any(place.dims[d] in (None, FREE) for d in gone):
            return None
        axes = frozenset(axis for d in gone for axis in place.dims[d] or ())
        dims = tuple(axes for d, axes in enumerate(place.dims) if d not in gone)
        if not axes:
            linear = place.made is None or op == "sum"
            return Place(dims, _changed(place.made)) if linear else None
        if place.made is not None:
            return None
        shape = _shape(eqn.invars[0])
        return Place(dims, Made(op, axes, place.name, place.layout, gone, math.prod(shape[d] for d in gone)))

    return rule


def _broadcast(eqn: Any, ins: Sequence[Found]) -> Found:
    place = ins[0]
    if place is None or place.made is not None:
        return None
    before, shape, to = _shape(eqn.invars[0]), eqn.params["shape"], eqn.params["broadcast_dimensions"]
    dims: list[Axes | None] = [FREE] * len(shape)
    for source, target in enumerate(to):
        dims[target] = place.dims[source] if before[source] == shape[target] else FREE
    return Place(tuple(dims))


def _transpose(eqn: Any, ins: Sequence[Found]) -> Found:
    place = ins[0]
    return place and Place(tuple(place.dims[d] for d in eqn.params["permutation"]), _changed(place.made))


def _squeeze(eqn: Any, ins: Sequence[Found]) -> Found:
    place, gone = ins[0], eqn.params["dimensions"]
    if place is None or any(place.dims[d] not in ((), FREE) for d in gone):
        return None
    return Place(tuple(axes for d, axes in enumerate(place.dims) if d not in gone), _changed(place.made))


def _reshape(eqn: Any, ins: Sequence[Found]) -> Found:
    """Blocks stay blocks where the leading one of the dims that are merged or split is divided, and no other."""
    place, old, new = ins[0], _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if place is None or 0 in old:
        return None
    dims: list[Axes | None] = [()] * len(new)
    before: list[int] = []
    after: list[int] = []
    runs = list(groups(old, new))
    for taken, made in runs:
        before, after = [*before, *taken], [*after, *made]
        if math.prod(old[d] for d in taken) == 1 and taken is not runs[-1][0]:
            continue  # dims of size 1 may lead those that follow
        axes = _leading([place.dims[d] for d in before], [old[d] for d in before])
        if axes and not after:
            return None
        ambiguous = axes not in ((), FREE) and len(after) > 1 and new[after[0]] == 1
        for d in after:
            dims[d] = None if axes is None or ambiguous else axes if d == after[0] or axes == FREE else ()
        before, after = [], []
    return Place(tuple(dims), _changed(place.made))


def _leading(held: Sequence[Axes | None], sizes: Sequence[int]) -> Axes | None:
    """The axes of these dims taken as one; None where blocks would not be one after another."""
    if held and all(axes == FREE for axes in held):
        return FREE
    joined: Axes = ()
    for i, axes in enumerate(held):
        if axes is None or axes == FREE or (axes and any(size > 1 for size in sizes[:i])):
            return None
        joined += axes
    return joined


def _dot(eqn: Any, ins: Sequence[Found]) -> Found:
    left, right = ins
    if left is None or right is None or not left.known or not right.known:
        return None
    (one, two), (batch_one, batch_two) = eqn.params["dimension_numbers"]
    if any(left.dims[i] != right.dims[j] for i, j in zip((*one, *batch_one), (*two, *batch_two), strict=True)):
        return None
    free = [axes for d, axes in enumerate(left.dims) if d not in (*one, *batch_one)]
    free += [axes for d, axes in enumerate(right.dims) if d not in (*two, *batch_two)]
    dims = (*(left.dims[d] for d in batch_one), *free)
    summed = frozenset(axis for d in one for axis in left.dims[d] or ())
    held = [axis for axes in dims for axis in axes or ()]
    if len(set(held)) != len(held) or summed & set(held):
        return None
    return Place(dims, Made("sum", summed) if summed else None)


def _gathered(eqn: Any, ins: Sequence[Found]) -> Found:
    place = ins[0]
    axes, dim = axes_of(eqn), eqn.params["all_gather_dimension"]
    if place is None or place.made or not eqn.params.get("tiled") or eqn.params.get("axis_index_groups"):
        return None
    have = place.dims[dim]
    if have is None or have == FREE or have[len(have) - len(axes) :] != axes:
        return None
    return Place(tuple(have[: len(have) - len(axes)] if d == dim else a for d, a in enumerate(place.dims)))


def _summed(eqn: Any, ins: Sequence[Found]) -> Found:
    place = ins[0]
    if place is None or place.made is None or place.made.op != "sum":
        return None
    left = place.made.axes - set(axes_of(eqn))
    return Place(place.dims, Made("sum", left) if left else None)


def _split(eqn: Any, ins: Sequence[Found]) -> Found:
    place, dim, axis = ins[0], eqn.params["dim"], eqn.params["axis"]
    if place is None or place.made or place.dims[dim] in (None, FREE):
        return None
    return Place(tuple((*(a or ()), axis) if d == dim else a for d, a in enumerate(place.dims)))


_CURVED = """abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt square integer_pow pow sin cos tan asin acos atan
    atan2 sinh cosh tanh asinh acosh atanh logistic erf erfc erf_inv lgamma digamma max min clamp rem floor ceil round
    eq ne lt le gt ge and or xor not is_finite select_n nextafter"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(("copy", "copy_p", "pvary", "pcast", "optimization_barrier", "name"), _identity),
    "spmd_retype": _retyped,
    **dict.fromkeys(("neg", "real", "imag", "conj", "reduce_precision"), _linear),
    "convert_element_type": _converted,
    **dict.fromkeys(_CURVED.split(), _elementwise),
    **dict.fromkeys(("add", "sub", "add_any"), _sum),
    **dict.fromkeys(("mul", "div"), _product),
    **{f"reduce_{op}": _reduction(op) for op in ("sum", "max", "min", "prod")},
    **{f"reduce_{name}": _reduction(op) for name, op in (("and", "all"), ("or", "any"))},
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), _summed),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), _gathered),
    "iota": _arange,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "spmd_split": _split,
}
