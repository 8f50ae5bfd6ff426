"""Choices: the equations of a program that decide by value, and the sides that numbers take.

`jnp.where(x > 3, a, b)` has two sides, and normal numbers take one. What no draw took was not looked at: a verdict
names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from spmd._jaxprs.walker import Equation, shape_of
from spmd._trees.leaves import is_key_type
from spmd.checker._primitives import Array, numbers_of
from spmd.checker._ranges import Range

Key = tuple[int, ...]  # an equation and those around it, by their `id`
Side = tuple[str, Any]  # a question to a choice, and an answer

SIDE, TIE, APART, BEYOND, LARGE = "side", "tie", "apart", "beyond", "large"
WAY, WRAPS = "way", "wraps"

MANY = 64  # sides of one choice
_FEW_INDICES = 4096  # that are looked at
_OVERFLOWS = 700.0  # beyond which an exponential is infinite, or zero


class Choice(NamedTuple):
    """An equation whose result is decided by the values of arguments.

    Attributes:
      what: The primitive.
      line: The user's line.
      reads: Which arguments decide, by number.
      needs: How many different answers each question has.
      forward: Whether it decides in the forward pass: backward the same numbers decide again.
      numbers: The numbers that stand at its line: what arguments may be compared with.
      least: The smallest number with which anything is compared in the program, or 0.
    """

    what: str
    line: str
    reads: frozenset[int]
    needs: Mapping[str, int]
    forward: bool
    numbers: tuple[float, ...] = ()
    least: float = 0.0

    def at(self, places: Sequence[int]) -> Choice:
        """The same choice of a program that takes its arguments in another order."""
        return self._replace(reads=frozenset(places[i] for i in self.reads if i >= 0))


class Unreached(NamedTuple):
    """A side that no draw took.

    Attributes:
      what: The primitive that decides.
      line: The user's line.
      question: `SIDE`; `TIE`, where equal elements were never drawn; `APART`, where devices never decided differently;
        `BEYOND`, where no index left its block; `WAY`, where Python goes at the sizes given alone; `WRAPS`, where
        numbers are beyond their type at these sizes.
      taken: The sides that some draw took.
      seen: Whether a draw took what is left, and all its results were infinite or NaN, on one device too.
    """

    what: str
    line: str
    question: str
    taken: frozenset[Any] = frozenset()
    seen: bool = False

    def __str__(self) -> str:
        return f"{_TEXTS[self.question]} {self.what} at {self.line}"


class Captured(NamedTuple):
    """An array that a program closes over and that is one number, as zeros are."""

    line: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"other numbers of a captured array, which is one number: {self.dtype}{list(self.shape)} at {self.line}"


_TEXTS = {
    SIDE: "the other side of",
    TIE: "a tie in",
    APART: "devices that decide differently in",
    BEYOND: "an index beyond the block in",
    WAY: "the sizes given, which alone have",
    WRAPS: "numbers beyond their type in",
}


def _two(x: Array) -> set[Any]:
    """At most two of the different numbers in an array."""
    flat = numbers_of(x).ravel()
    if not flat.size:
        return set()
    other = flat[flat != flat[0]]
    return {flat[0].item(), *([other[0].item()] if other.size else [])}


def _answers(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> set[Any]:
    return _two(outs[0])


def _decided(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> set[Any]:
    return {int(i) for i in np.unique(numbers_of(operands[0]))}


def _larger(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> set[Any]:
    rank = len(shape_of(eqn.outvars[0]))
    x, y = (numbers_of(z).reshape(z.shape[:lead] + (1,) * rank if z.ndim == lead else z.shape) for z in operands)
    return {side for side, there in ((0, x > y), (1, x < y)) if there.any()}


def _clamped(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> set[Any]:
    low, x, high = (numbers_of(z) for z in operands)
    shaped = lambda z: z.reshape(z.shape[:lead] + (1,) * (x.ndim - lead)) if z.ndim == lead else z
    low, high = shaped(low), shaped(high)
    sides = (("low", x < low), ("in", (x > low) & (x < high)), ("high", x > high))
    return {side for side, there in sides if there.any()}


def _tied(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> bool:
    """Return whether an array whose largest or smallest element is asked for has it twice, or one that is sorted has
    equal elements."""
    x = numbers_of(operands[0])
    places = (eqn.params.get(name) for name in ("dimension", "axes", "axis"))
    place = next((one for one in places if one is not None), -1)  # of several names that JAX has for it
    axis = (place[0] if isinstance(place, tuple) else place) % len(shape_of(eqn.invars[0])) + lead
    ordered = np.sort(x, axis)
    first = lambda at: np.take(ordered, at, axis)
    if ordered.shape[axis] < 2:
        return False
    if eqn.primitive.name == "argmin":
        return bool((first(0) == first(1)).any())
    if eqn.primitive.name == "argmax":
        return bool((first(-1) == first(-2)).any())
    return bool((np.diff(ordered, axis=axis) == 0).any()) if x.dtype.kind != "b" else True


def _of_flags(eqn: Equation) -> Mapping[str, int]:
    return {SIDE: 2} if eqn.outvars[0].aval.dtype == np.bool_ else {}


def _converts(eqn: Equation) -> Mapping[str, int]:
    """A conversion decides if it cuts digits off, or if the new type has not all numbers of the old one."""
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if new == np.float16 and old != new:
        return {LARGE: 1}
    if is_key_type(old) or jnp.issubdtype(new, jnp.inexact) or old == np.bool_:
        return {}
    narrow = jnp.issubdtype(old, jnp.inexact) or (new != np.bool_ and np.dtype(new).itemsize < np.dtype(old).itemsize)
    return {SIDE: 2} if narrow else {}


def _converted(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> set[Any]:
    x = numbers_of(operands[0])
    if x.dtype.kind not in "iu":
        return _two(outs[0])
    info = jnp.iinfo(eqn.params["new_dtype"])
    fits = (x >= info.min) & (x <= info.max)
    return {side for side, there in (("in", fits), ("beyond", ~fits)) if there.any()}


def _divided(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> set[Any]:
    rank = len(shape_of(eqn.outvars[0]))
    x, y = (np.abs(z).reshape(z.shape[:lead] + (1,) * rank if z.ndim == lead else z.shape) for z in operands)
    return {side for side, there in (("in", x < y), ("beyond", x >= y)) if there.any()}


def _chosen(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> set[Any]:
    """The rows that indices choose, of few."""
    if eqn.primitive.name == "dynamic_slice":
        indices = np.stack([x.ravel() for x in np.broadcast_arrays(*operands[1:])], -1)
    else:
        indices = operands[1].reshape(-1, operands[1].shape[-1])
    rows = np.unique(indices[:_FEW_INDICES], axis=0)
    return {tuple(row) for row in rows.tolist()[:MANY]}


def _halves(eqn: Equation) -> Mapping[str, int]:
    return {LARGE: 1} if eqn.outvars[0].aval.dtype == np.float16 else {}


def _is_whole(eqn: Equation) -> Mapping[str, int]:
    return {SIDE: 2} if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer) else {}


Answers = Callable[[Equation, int, Sequence[Array], Sequence[Array]], set[Any]]
Needs = Callable[[Equation], Mapping[str, int]]

_always = lambda **needs: lambda eqn: needs
_ordered = lambda eqn: {TIE: 1} if len(eqn.invars) > eqn.params["num_keys"] else {}
_NONE: Answers = lambda *_: set()

# What takes or puts elements at indices: its operand, and which operands are indices.
INDEXED = {
    "gather": slice(1, 2),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub"), slice(1, 2)),
    **dict.fromkeys(("scatter-mul", "scatter_mul", "scatter-min", "scatter_min"), slice(1, 2)),
    **dict.fromkeys(("scatter-max", "scatter_max"), slice(1, 2)),
}

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

# For each primitive that decides by value: the answers that some numbers give, and how many answers there are. A sort
# whose equal elements cannot be told apart has none.
CHOICES: dict[str, tuple[Answers, Needs]] = {
    "select_n": (_decided, lambda eqn: {SIDE: len(eqn.invars) - 1}),
    "cond": (_decided, lambda eqn: {SIDE: len(eqn.params["branches"])}),
    **dict.fromkeys((*COMPARISONS, "is_finite"), (_answers, _always(side=2))),
    **dict.fromkeys(("and", "or", "reduce_and", "reduce_or"), (_answers, _of_flags)),
    **dict.fromkeys(("max", "min"), (_larger, _always(side=2))),
    "clamp": (_clamped, _always(side=3)),
    "sign": (lambda eqn, lead, operands, outs: set(np.unique(numbers_of(outs[0])).tolist()), _always(side=3)),
    **dict.fromkeys(("floor", "ceil", "round"), (_answers, _always(side=2))),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), (_NONE, _always(large=1))),
    "convert_element_type": (_converted, _converts),
    "rem": (_divided, _always(side=2)),
    "div": (_divided, _is_whole),
    **dict.fromkeys(("argmax", "argmin"), (_answers, _always(side=2, tie=1))),
    "top_k": (_NONE, _always(tie=1)),
    "sort": (_NONE, _ordered),
    **dict.fromkeys(INDEXED, (_NONE, _always(beyond=2))),
    **dict.fromkeys(("gather", "dynamic_slice"), (_chosen, _always(beyond=2))),
    **dict.fromkeys(("add", "mul", "reduce_sum", "dot_general", "psum"), (_NONE, _halves)),
}  # fmt: skip


def sides(eqn: Equation, lead: int, operands: Sequence[Array], outs: Sequence[Array]) -> Iterator[Side]:
    """The answers of a choice to its questions, for these numbers.

    Args:
      eqn: The equation.
      lead: How many mesh axes the arrays have in front.
      operands: Its operands.
      outs: Its results.
    """
    answers, needs = CHOICES[eqn.primitive.name]
    if LARGE not in needs(eqn):
        yield from ((SIDE, one) for one in answers(eqn, lead, operands, outs))
    if TIE in needs(eqn) and _tied(eqn, lead, operands, outs):
        yield TIE, True
    if LARGE in needs(eqn):
        halves = eqn.outvars[0].aval.dtype == np.float16
        x = np.abs(outs[0] if halves else operands[0])
        large = ~np.isfinite(x) if halves else np.isfinite(x) & (x > _OVERFLOWS)
        yield from [(LARGE, True)] * bool(large.any())
    if LARGE in needs(eqn) or BEYOND in needs(eqn):
        return  # an index at an end of its array is seen where it is computed
    asked = operands[0] if eqn.primitive.name in ("cond", "select_n") else outs[0]
    if asked.ndim == lead and asked.size > 1:  # one number for each device, and not the same one by how it is made
        yield "alone", True
        if (asked != asked.flat[0]).any():
            yield APART, True


def rows_of(eqn: Equation) -> int:
    """How many places indices choose among."""
    shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    return math.prod(n - m + 1 for n, m in zip(shape, sizes, strict=True))


def possible(eqn: Equation, given: Sequence[Range], known: Range) -> frozenset[Any]:
    """The answers that numbers of these ranges can give, to results in a known one."""
    name = eqn.primitive.name
    if name in ("select_n", "cond"):
        return frozenset(range(int(max(given[0].low, 0)), int(min(given[0].high, MANY)) + 1))
    if name in ("max", "min"):
        x, y = given
        return frozenset(side for side, can in ((0, x.high > y.low), (1, y.high > x.low)) if can)
    if name == "clamp":
        low, x, high = given
        return frozenset(("in", *["low"] * (x.low < low.high), *["high"] * (x.high > high.low)))
    if name == "sign":
        x = given[0]
        ends = [-1] * (x.low < 0) + [1] * (x.high > 0)
        return frozenset(ends if len(ends) > 1 else (*ends, *[0] * (x.low <= 0 <= x.high)))
    if name in ("rem", "div"):
        x, y = given
        most, least = max(abs(x.low), abs(x.high)), 0 if y.low <= 0 <= y.high else min(abs(y.low), abs(y.high))
        return frozenset(("in", *["beyond"] * (most >= least)))
    if name == "convert_element_type" and not jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact):
        info = jnp.iinfo(eqn.params["new_dtype"])
        return frozenset(("in", *["beyond"] * (given[0].low < info.min or given[0].high > info.max)))
    return frozenset((known.low, known.high)[: 2 if known.high > known.low else 1])


def key_of(eqn: Equation, callers: Sequence[Equation]) -> Key:
    """What tells a choice from others: one jaxpr may be called at several places."""
    return (*map(id, callers), id(eqn))
