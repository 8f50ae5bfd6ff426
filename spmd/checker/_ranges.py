"""Between which numbers the values of a program lie, whatever its arguments are.

`jnp.argmax(x)` is at least 0, so no number makes `jnp.argmax(x) < 0` true, and no draw has to. The positions of
an array are at most its size, so an int32 that counts them may be too small. Unknown bounds are infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmd._jaxprs.primitives import of_verbs
from spmd._jaxprs.walker import COMMUNICATES, Equation, axes_of, shape_of
from spmd._trees.leaves import is_key
from spmd.checker._primitives import MOVES, SAME


class Range(NamedTuple):
    """The least and the largest number that a value may be."""

    low: float = -math.inf
    high: float = math.inf

    def __or__(self, other: Range) -> Range:  # type: ignore[override]
        return Range(min(self.low, other.low), max(self.high, other.high))

    def widened(self, other: Range) -> Range:
        """What holds for both. A bound that moves is given up, so that loops settle."""
        low = self.low if other.low >= self.low else -math.inf
        return Range(low, self.high if other.high <= self.high else math.inf)


ANY = Range()
POSITIVE, _UNIT, _SIGNED = Range(0), Range(0, 1), Range(-1, 1)


def range_of(value: Any) -> Range:
    """The range of a number or an array that is known."""
    if value is None or is_key(value) or isinstance(value, jax.core.Tracer):
        return ANY
    x = np.asarray(value)
    if x.dtype.kind not in "biuf" or not x.size or np.isnan(x).any():
        return ANY
    return Range(float(x.min()), float(x.max()))


def _products(x: Range, y: Range) -> Range:
    ends = [0.0 if 0 in (a, b) else a * b for a in x for b in y]
    return Range(min(ends), max(ends))


def _sum(x: Range, y: Range) -> Range:
    return Range(*(-math.inf if i == 0 and math.isnan(s) else math.inf if math.isnan(s) else s
                   for i, s in enumerate((x.low + y.low, x.high + y.high))))  # fmt: skip


def _negative(x: Range) -> Range:
    return Range(-x.high, -x.low)


def _clamped(low: Range, x: Range, high: Range) -> Range:
    return Range(min(max(x.low, low.low), high.low), min(max(x.high, low.high), high.high))


def _quotient(x: Range, y: Range) -> Range:
    return ANY if y.low <= 0 else _products(x, Range(0 if math.isinf(y.high) else 1 / y.high, 1 / y.low))


def _sums(times: int, x: Range) -> Range:
    """The range of a sum of so many numbers."""
    return _products(x, Range(times, times))


def _even(eqn: Equation) -> bool:
    return eqn.params["y"] % 2 == 0


def _same(eqn: Equation) -> bool:
    return eqn.invars[0] is eqn.invars[1]


def _remainder(x: Range, y: Range) -> Range:
    most = max(abs(y.low), abs(y.high))
    return Range(0 if x.low >= 0 else -most, 0 if x.high <= 0 else most)


def _dot(eqn: Equation, x: Range, y: Range) -> Range:
    (left, right), _ = eqn.params["dimension_numbers"]
    if _same(eqn) and left == right and len(left) == len(shape_of(eqn.invars[0])):
        return POSITIVE
    return _sums(math.prod(shape_of(eqn.invars[0])[d] for d in left), _products(x, y))


def _counted(eqn: Equation) -> Range:
    return Range(0, max(shape_of(eqn.outvars[0])[eqn.params["dimension"]] - 1, 0))


def _added(eqn: Equation, x: Range) -> Range:
    before, after = (math.prod(shape_of(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    times = (
        before // max(after, 1) if eqn.primitive.name == "reduce_sum" else shape_of(eqn.invars[0])[eqn.params["axis"]]
    )
    return _sums(times, x) if eqn.primitive.name == "reduce_sum" else _sums(times, x) | x


def _decided(no: bool, yes: bool) -> Range:
    """The range of a boolean that may be False, and may be True."""
    return Range(float(not no), float(yes))


def _less(x: Range, y: Range) -> Range:
    return _decided(x.high >= y.low, x.low < y.high)


def _not(x: Range) -> Range:
    return Range(1 - x.high, 1 - x.low)


def _equal(x: Range, y: Range) -> Range:
    return _decided(not x.low == x.high == y.low == y.high, x.low <= y.high and y.low <= x.high)


_plain = lambda fn: lambda eqn, *ranges: fn(*ranges)
_within = lambda one: lambda eqn, *ranges: one
_first: Callable[..., Range] = lambda eqn, x, *_: x
_all: Callable[..., Range] = lambda eqn, *ranges: Range(min(x.low for x in ranges), max(x.high for x in ranges))

_SUMS = of_verbs("psum", "psum_scatter")
_COUNTS = _SUMS | {"iota", "reduce_sum", "cumsum"}
_ORDERS = ("lt", "le", "gt", "ge", "eq")
_MOVES = MOVES - {"bitcast_convert_type", "select_n", "dynamic_slice", "dynamic_update_slice"}

_RANGES: dict[str, Callable[..., Range]] = {
    **dict.fromkeys(SAME, _first),
    **dict.fromkeys(_MOVES, _all),
    **dict.fromkeys(("convert_element_type", "dynamic_slice", "reduce_max", "reduce_min", "cummax", "cummin"), _first),
    **dict.fromkeys(COMMUNICATES - _SUMS - of_verbs("ppermute", "ragged_all_to_all"), _first),
    # A device that gets nothing has zeros, or what it had.
    **dict.fromkeys(of_verbs("ppermute"), lambda eqn, *ranges: _all(eqn, *ranges) | Range(0, 0)),
    **dict.fromkeys(of_verbs("ragged_all_to_all"), lambda eqn, x, out, *_: x | out),
    "select_n": lambda eqn, _, *cases: _all(eqn, *cases),
    "dynamic_update_slice": lambda eqn, x, new, *_: x | new,
    "iota": _counted,
    # A place is at most as large as an array, which may have another size.
    **dict.fromkeys(("argmax", "argmin", "exp", "exp2", "sqrt", "rsqrt", "square"), _within(POSITIVE)),
    **dict.fromkeys(("logistic", "erfc"), _within(_UNIT)),
    **dict.fromkeys(("tanh", "sin", "cos", "sign", "erf"), _within(_SIGNED)),
    "abs": lambda eqn, x: Range(0, max(abs(x.low), abs(x.high))),
    "lt": _plain(_less),
    "gt": _plain(lambda x, y: _less(y, x)),
    "ge": _plain(lambda x, y: _not(_less(x, y))),
    "le": _plain(lambda x, y: _not(_less(y, x))),
    "eq": _plain(_equal),
    "ne": _plain(lambda x, y: _not(_equal(x, y))),
    "and": _plain(lambda x, y: Range(min(x.low, y.low), min(x.high, y.high))),
    "or": _plain(lambda x, y: Range(max(x.low, y.low), max(x.high, y.high))),
    "not": _plain(_not),
    **dict.fromkeys(("reduce_and", "reduce_or"), _first),
    "is_finite": lambda eqn, x: _decided(math.isinf(x.low) or math.isinf(x.high), True),
    "integer_pow": lambda eqn, x: POSITIVE if _even(eqn) else ANY,
    "neg": _plain(_negative),
    "add": _plain(_sum),
    "sub": _plain(lambda x, y: _sum(x, _negative(y))),
    "mul": lambda eqn, x, y: Range(0, _products(x, y).high) if _same(eqn) else _products(x, y),
    "div": _plain(_quotient),
    "rem": _plain(_remainder),
    "max": _plain(lambda x, y: Range(max(x.low, y.low), max(x.high, y.high))),
    "min": _plain(lambda x, y: Range(min(x.low, y.low), min(x.high, y.high))),
    "clamp": _plain(_clamped),
    **dict.fromkeys(("floor", "ceil", "round"), _plain(lambda x: Range(x.low - 1, x.high + 1))),
    **dict.fromkeys(("reduce_sum", "cumsum"), _added),
    "dot_general": _dot,
}  # fmt: skip


def ranges(eqn: Equation, operands: Sequence[Range], sizes: dict[str, int], free: bool) -> tuple[Range, bool]:
    """The range of the results of an equation, and whether it is larger than their type for numbers that are known.

    Args:
      eqn: The equation.
      operands: The ranges of its operands.
      sizes: The sizes of the mesh axes around it.
      free: Whether an operand is made of arguments: such a floating-point number may be NaN.
    """
    name, dtype = eqn.primitive.name, getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
    if dtype is None or not (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)):
        return ANY, False
    if name in ("and", "or", "not") and dtype != np.bool_:
        return ANY, False
    old = getattr(eqn.invars[0].aval, "dtype", dtype) if eqn.invars else dtype
    found = _found(eqn, operands, math.prod(sizes.get(axis, 1) for axis in axes_of(eqn)))
    if dtype == np.bool_:
        return _as_flag(name, operands, found, free and jnp.issubdtype(old, jnp.inexact)), False
    if not jnp.issubdtype(dtype, jnp.integer):
        whole = name == "convert_element_type" and old != np.bool_ and not jnp.issubdtype(old, jnp.inexact)
        counts = (name in _COUNTS or whole) and jnp.issubdtype(dtype, jnp.floating)
        exact = 2.0 ** (jnp.finfo(dtype).nmant + 1) if counts else math.inf  # up to here each whole number is one
        return found, any(math.isfinite(x) and abs(x) > exact for x in found)
    if name == "convert_element_type" and free and jnp.issubdtype(old, jnp.inexact):
        return ANY, False  # NaN may become any integer
    found = Range(*(math.trunc(x) if math.isfinite(x) else x for x in found))  # a quotient is cut, and a conversion
    info = jnp.iinfo(dtype)
    beyond = any(math.isfinite(x) and not info.min <= x <= info.max for x in found)
    if beyond or jnp.issubdtype(dtype, jnp.unsignedinteger):  # which wraps, as hashes mean it to
        return (POSITIVE if info.min == 0 else ANY), beyond and info.min < 0
    return found, False


def _found(eqn: Equation, operands: Sequence[Range], devices: int) -> Range:
    """The range before it is rounded to a type."""
    if eqn.primitive.name in _SUMS:
        return _sums(devices, operands[0])
    if eqn.primitive.name == "axis_index":
        return Range(0, devices - 1)
    rule = _RANGES.get(eqn.primitive.name)
    return ANY if rule is None else rule(eqn, *operands)


def _as_flag(name: str, operands: Sequence[Range], found: Range, nan: bool) -> Range:
    """The range of a boolean. NaN is not equal to any number, nor smaller or larger, and not zero."""
    if name == "convert_element_type":
        found = _not(_equal(operands[0], Range(0, 0)))
    low = 0 if nan and name in _ORDERS else max(found.low, 0)
    return Range(low, 1 if nan and name in ("ne", "convert_element_type") else min(found.high, 1))
