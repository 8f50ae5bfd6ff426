"""How far the draws of a program reach: which sides of its choices they took, and draws that take the others.

A choice is an equation that decides by value. `jnp.where(x > 3, a, b)` has two sides, and normal numbers take one. What
no draw took was not looked at: a verdict names it. So the sides that are left are driven at. A number is set to what it
is compared with, arguments are made large or small, or one block of them is, or one element is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.facts import per_shard_reason
from spmd._jaxprs.lines import call_site, is_ours, is_transposed, line_of
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, axes_of, equations, shape_of, walk
from spmd._trees.leaves import held_dtype, is_key, is_key_type
from spmd.checker._numbers import subsets
from spmd.checker._primitives import SAME, Array, numbers_of
from spmd.checker._ranges import ANY, Range, range_of, ranges

Key = tuple[int, ...]  # an equation and those around it, by their `id`
Side = tuple[str, Any]  # a question to a choice, and an answer

SIDE, TIE, APART, BEYOND, LARGE = "side", "tie", "apart", "beyond", "large"
WAY, WRAPS = "way", "wraps"

_TIMES = (1e4, 1e-4)  # by which arguments are multiplied
_MANY = 64  # sides of one choice
_FEW_INDICES = 4096  # that are looked at
_OVERFLOWS = 700.0  # beyond which an exponential is infinite, or zero
_PARTS = 1e5  # more than a number of half precision may be
_NUMBERS = 6  # of a program, that arguments are made equal to
_SEVERAL = 6  # sets of arguments that are made large while the others are not


class Choice(NamedTuple):
    """An equation whose result is decided by the values of arguments.

    Attributes:
      what: The primitive.
      line: The user's line.
      reads: Which arguments decide, by number.
      needs: How many different answers each question has.
      forward: Whether it decides in the forward pass: backward the same numbers decide again.
      numbers: The numbers that stand at its line: what arguments may be compared with.
    """

    what: str
    line: str
    reads: frozenset[int]
    needs: Mapping[str, int]
    forward: bool
    numbers: tuple[float, ...] = ()

    def at(self, places: Sequence[int]) -> Choice:
        """The same choice of a program that takes its arguments in another order."""
        return self._replace(reads=frozenset(places[i] for i in self.reads if i >= 0))


class Unreached(NamedTuple):
    """A side that no draw took.

    Attributes:
      what: The primitive that decides.
      line: The user's line.
      question: `SIDE`; `TIE`, where equal elements were never drawn; `APART`, where devices never decided differently;
        `BEYOND`, where no index left its block; `WAY`, where Python goes at the sizes given alone; `WRAPS`, where numbers
        are beyond their type at these sizes.
      taken: The sides that some draw took.
    """

    what: str
    line: str
    question: str
    taken: frozenset[Any] = frozenset()

    def __str__(self) -> str:
        return f"{_TEXTS[self.question]} {self.what} at {self.line}"


_TEXTS = {
    SIDE: "the other side of",
    TIE: "a tie in",
    APART: "devices that decide differently in",
    BEYOND: "an index beyond the block in",
    WAY: "the sizes given, which alone have",
    WRAPS: "numbers beyond their type in",
}


# --- what each choice is ----------------------------------------------------------------------------------------------


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


def _is_bool(eqn: Equation) -> bool:
    return eqn.outvars[0].aval.dtype == np.bool_


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
    return {tuple(row) for row in rows.tolist()[:_MANY]}


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
_INDEXED = {
    "gather": slice(1, 2),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub"), slice(1, 2)),
    **dict.fromkeys(("scatter-mul", "scatter_mul", "scatter-min", "scatter_min"), slice(1, 2)),
    **dict.fromkeys(("scatter-max", "scatter_max"), slice(1, 2)),
}

# For each primitive that decides by value: the answers that some numbers give, and how many answers there are. A sort
# whose equal elements cannot be told apart has none.
CHOICES: dict[str, tuple[Answers, Needs]] = {
    "select_n": (_decided, lambda eqn: {SIDE: len(eqn.invars) - 1}),
    "cond": (_decided, lambda eqn: {SIDE: len(eqn.params["branches"])}),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "is_finite"), (_answers, _always(side=2))),
    **dict.fromkeys(("and", "or", "reduce_and", "reduce_or"), (_answers, lambda eqn: {SIDE: 2} if _is_bool(eqn) else {})),
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
    **dict.fromkeys(_INDEXED, (_NONE, _always(beyond=2))),
    **dict.fromkeys(("gather", "dynamic_slice"), (_chosen, _always(beyond=2))),
    **dict.fromkeys(("add", "mul", "reduce_sum", "dot_general", "psum"), (_NONE, _halves)),
}  # fmt: skip
_BOUNDS = ("max", "min", "clamp")


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


# --- which choices a program has --------------------------------------------------------------------------------------


_FLAG = -1_000_000  # what a literal that is a flag has in place of the number of an array
_SHAPES = frozenset(("reshape", "broadcast_in_dim", "squeeze", "transpose", "jit", "pjit", *SAME))


class _Made(NamedTuple):
    """What a value is made of: arguments, by number, and captured arrays; and between which numbers it lies."""

    reads: frozenset[int] = frozenset()
    range: Range = ANY


def _rows(eqn: Equation) -> int:
    """How many places indices choose among."""
    shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    return math.prod(n - m + 1 for n, m in zip(shape, sizes, strict=True))


class _Reads(Domain):
    """What each value is made of.

    Attributes:
      keys: The arguments that are keys of random numbers.
      whole: The shapes of what is indexed where nothing is divided, by primitive and line.
      sizes: The mesh axes around the walk.
      found: The choices that arguments decide.
      captured: For the `id` of each array that the program closes over, the negative number that it has in what values are
        made of, and the array.
      lines: Where each captured array is read first.
      ways: The primitives at each line, but for those that change nothing but a shape.
      fixed: The answers of the choices that sizes alone decide, by primitive and line.
      beyond: The primitives and lines of numbers that are larger than their type allows.
    """

    def __init__(self, keys: Collection[int], whole: Mapping[tuple[str, str], Collection[Any]]) -> None:
        super().__init__()
        self.keys, self.whole = frozenset(keys), whole
        self.sizes: dict[str, int] = {}
        self.found: dict[Key, Choice] = {}
        self.captured: dict[int, tuple[int, Any]] = {}
        self.lines: dict[int, str] = {}
        self.ways: dict[tuple[str, str], None] = {}
        self.fixed: dict[tuple[str, str], frozenset[Any]] = {}
        self.beyond: dict[tuple[str, str], None] = {}
        self.keep = self._kept

    def constant(self, var: Variable | None, value: Any) -> _Made:
        if var is None or value is None or not hasattr(value, "dtype"):
            return _Made(range=range_of(value))
        self.captured.setdefault(id(value), (-1 - len(self.captured), value))
        return _Made(frozenset((self.captured[id(value)][0],)), range_of(value))

    def join(self, one: _Made, other: _Made) -> _Made:
        return _Made(one.reads | other.reads, one.range.widened(other.range))

    def decided(self, value: _Made, predicate: _Made) -> _Made:
        return value._replace(reads=value.reads | predicate.reads)

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[_Made]) -> Sequence[_Made]:
        before, self.sizes = self.sizes, {**self.sizes, **_compat.made_manual(eqn)}
        outs = super().mapped(eqn, part, operands)
        self.sizes = before
        return outs

    def literal(self, atom: Variable) -> _Made:
        """A flag that stands in the program is one that it closes over."""
        reads = frozenset((_FLAG,)) if atom.aval.dtype == np.bool_ else frozenset[int]()
        return _Made(reads, range_of(atom.val))

    def step(self, eqn: Equation, operands: Sequence[_Made]) -> list[_Made]:
        for one in operands:
            for i in one.reads:
                if i < 0:
                    self.lines.setdefault(i, line_of(eqn, self.callers))
        found, beyond = ranges(eqn, [one.range for one in operands], self.sizes)
        if beyond:
            self.beyond[eqn.primitive.name, line_of(eqn, self.callers)] = None
        return [_Made(_all_reads(operands), found)] * len(eqn.outvars)

    def _way(self, eqn: Equation) -> str:
        """Its primitive; a permutation written for fewer devices than there are is another one."""
        if eqn.primitive.name == "ppermute":
            count = math.prod(self.sizes.get(axis, 1) for axis in axes_of(eqn))
            return "ppermute" if len(eqn.params["perm"]) >= count // 2 else "a ppermute of some devices"
        return eqn.primitive.name

    def _kept(self, eqn: Equation, operands: Sequence[_Made], outs: Any) -> Any:
        if eqn.primitive.name not in _SHAPES and not is_ours(eqn):
            self.ways[self._way(eqn), line_of(eqn, self.callers)] = None
        if eqn.primitive.name not in CHOICES:
            return outs
        decides = slice(0, 1) if eqn.primitive.name in ("select_n", "cond", "sort") else slice(None)
        reads = _all_reads(operands[_INDEXED.get(eqn.primitive.name, decides)])
        needs = dict(CHOICES[eqn.primitive.name][1](eqn))
        if SIDE in needs:
            can = _possible(eqn, [one.range for one in operands], outs)
            if not reads or any(i >= 0 for i in reads) or eqn.primitive.name not in ("select_n", "cond"):
                needs[SIDE] = min(needs[SIDE], len(can))
            if not reads and call_site(eqn, self.callers) is not None:
                at = eqn.primitive.name, line_of(eqn, self.callers)
                self.fixed[at] = self.fixed.get(at, frozenset()) | can
        if not needs:
            return outs
        if eqn.primitive.name in ("gather", "dynamic_slice") and not any(i >= 0 for i in operands[0].reads):
            rows = _rows(eqn)  # of a table of constants: each is a side, as those of a switch are
            needs = {SIDE: rows} if 1 < rows <= _MANY else {}
        if BEYOND in needs and shape_of(eqn.invars[0]) in self.whole.get((eqn.primitive.name, line_of(eqn)), ()):
            return outs  # it is not divided
        # A bound on a number that keys alone make belongs to how it is drawn.
        drawn = reads <= self.keys and eqn.primitive.name in ("max", "min", "clamp", "convert_element_type")
        meant = drawn or per_shard_reason(eqn, self.callers) is not None
        if LARGE in needs and not any(i >= 0 for i in reads):
            del needs[LARGE]
        if reads and any(n > (q == SIDE) for q, n in needs.items()) and not meant:
            if (site := call_site(eqn, self.callers)) is not None:
                key = key_of(eqn, self.callers)
                before = self.found[key].reads if key in self.found else frozenset[int]()
                backward = is_transposed(eqn, self.callers)
                self.found[key] = Choice(eqn.primitive.name, line_of(*site), reads | before, needs, not backward)
        return outs


def _possible(eqn: Equation, given: Sequence[Range], outs: Sequence[_Made]) -> frozenset[Any]:
    """The answers that numbers of these ranges can give."""
    name = eqn.primitive.name
    if name in ("select_n", "cond"):
        return frozenset(range(int(max(given[0].low, 0)), int(min(given[0].high, _MANY)) + 1))
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
    known = outs[0].range
    return frozenset((known.low, known.high)[: 2 if known.high > known.low else 1])


def _all_reads(several: Sequence[_Made]) -> frozenset[int]:
    return frozenset[int]().union(*(one.reads for one in several))


def key_of(eqn: Equation, callers: Sequence[Equation]) -> Key:
    """What tells a choice from others: one jaxpr may be called at several places."""
    return (*map(id, callers), id(eqn))


class Reach:
    """Which sides of a program's choices were taken by draws whose results were compared.

    Attributes:
      choices: The choices.
      captured: The arrays that the program closes over and that are one number, as zeros are, and where each is read.
    """

    def __init__(self, choices: Mapping[Key, Choice], depends: Sequence[bool], results: int) -> None:
        self.choices = choices
        self._results = results
        self._depends = depends  # for each result whether it is made of arguments
        self._asked = frozenset((SIDE, TIE, APART, BEYOND, LARGE))
        self._taken: dict[Key, set[Side]] = {}
        self._bounds: list[tuple[Array, Array]] = []  # between which finite numbers each element of each result was
        self.captured: Sequence[tuple[str, Array]] = ()

    @classmethod
    def of(cls, jaxpr: Any, base: Any, arrays: Sequence[Any], results: int) -> Self:
        """The choices of a program that its arguments decide, but for those inside of this package: what its operations
        do is tested where they are.

        Args:
          jaxpr: The program.
          base: The same where nothing is divided.
          arrays: Its arguments, or structs of them.
          results: How many results it has, which stand behind its gradients.
        """
        whole: dict[tuple[str, str], set[Any]] = {}
        for eqn in equations(base):
            if eqn.primitive.name in _INDEXED:
                whole.setdefault((eqn.primitive.name, line_of(eqn)), set()).add(shape_of(eqn.invars[0]))
        reads = _Reads([i for i, x in enumerate(arrays) if is_key(x)], whole)
        outs = walk(jaxpr, [_Made(frozenset((i,))) for i in range(len(arrays))], reads)
        at: dict[str, dict[float, None]] = {}
        for eqn in equations(jaxpr) if reads.found else ():
            for atom in eqn.invars:
                if isinstance(atom, Literal) and np.ndim(atom.val) == 0 and jnp.issubdtype(atom.aval.dtype, jnp.number):
                    number = float(np.real(atom.val))
                    at.setdefault(line_of(eqn), {}).update({number: None} if math.isfinite(number) else {})
        for (_, line), shapes in whole.items():
            at.setdefault(line, {}).update(dict.fromkeys(float(n - 1) for shape in shapes for n in shape))
        tables = (np.asarray(x) for _, x in reads.captured.values() if not is_key(x) and np.size(x) <= _NUMBERS)
        known = (float(y) for x in tables if x.dtype.kind in "iuf" for y in x.flat if np.isfinite(y))
        everywhere = dict.fromkeys(x for some in (*at.values(), known) for x in some)
        found = {key: one._replace(numbers=(*{**at.get(one.line, {}), **everywhere},)) for key, one in reads.found.items()}
        reach = cls(found, [any(i >= 0 for i in one.reads) for one in outs], results)
        real = lambda x: not is_key(x) and np.size(x) > 1 and jnp.issubdtype(x.dtype, jnp.inexact)
        arrays = ((reads.lines.get(i, ""), np.asarray(x)) for i, x in reads.captured.values() if real(x))
        reach.captured = [(line, x) for line, x in arrays if (x == x.flat[0]).all()]
        return reach

    def add(self, more: Mapping[Key, set[Side]], results: Sequence[Array]) -> None:
        """Take in what a draw has shown, if its results are numbers that can be compared."""
        gradients = len(results) - self._results
        values = [np.abs(x) if x.dtype.kind == "c" else x.astype(np.float64) for x in map(numbers_of, results)]
        ends = [(np.where(np.isfinite(x), x, np.inf), np.where(np.isfinite(x), x, -np.inf)) for x in values]
        if self._bounds:
            pairs = zip(self._bounds, ends, strict=True)
            ends = [(np.minimum(low, x), np.maximum(high, y)) for (low, high), (x, y) in pairs]
        self._bounds = ends
        if all(not x.size or np.isfinite(x).any() for x in values[gradients:]):
            for key, answers in more.items():
                self._taken.setdefault(key, set()).update(answers)

    def adds(self, more: Mapping[Key, set[Side]]) -> bool:
        """Return whether a draw shows more than those before."""
        new = ((key, question) for key in more for question, _ in more[key] - self._taken.get(key, set()))
        return any(question in self._lacking(key, more[key]) | self._lacking(key) for key, question in new)

    def give_up(self, question: str) -> None:
        """Ask this no more: draws that should have answered it did not."""
        self._asked = self._asked - {question}

    def _lacking(self, key: Key, more: Collection[Side] = ()) -> set[str]:
        answers = self._taken.get(key, set()) | set(more)
        alone = ("alone", True) in answers and self.choices[key].forward
        needs = {**self.choices[key].needs, **({APART: 1} if alone else {})}
        return {q for q, n in needs.items() if q in self._asked and sum(asked == q for asked, _ in answers) < n}

    @property
    def open(self) -> list[Choice]:
        """The choices that have sides which no draw took."""
        return [one for key, one in self.choices.items() if self._lacking(key)]

    @property
    def unreached(self) -> tuple[Unreached, ...]:
        """The sides that no draw took, once for each line and question."""
        taken = {key: frozenset(x for q, x in self._taken.get(key, ()) if q == SIDE) for key in self.choices}
        every = ((c, taken[key], q) for key, c in self.choices.items() for q in sorted(self._lacking(key)))
        found = [Unreached(c.what, c.line, q, sides) for c, sides, q in every]
        return tuple({(one.line, one.question): one for one in reversed(found)}.values())[::-1]

    @property
    def flat(self) -> list[int]:
        """The results that are made of arguments, and have numbers which no draw compared: they are not finite, or always
        the same. Those of a gradient may be, as of a sum; but not if all are zero."""
        gradients = len(self._depends) - self._results
        found = []
        for i, (own, (low, high)) in enumerate(zip(self._depends, self._bounds, strict=False)):
            same = low == high
            still = bool(same.all()) and len(np.unique(low)) == 1 and (i >= gradients or not low.any())
            stuck = i >= gradients and bool((same & (low != 0)).any())
            if own and low.size and (still or stuck or (low > high).any()):
                found.append(i)
        return found


# --- what the sizes that are tried do not show -------------------------------------------------------------------------


def left_by_sizes(given: Any, tried: Any) -> list[Unreached]:
    """What a program does at the sizes given, and not at those at which it was tried.

    Python may take another way, positions come to a literal that small ones stay below, and numbers leave their type.

    Args:
      given: The program at the sizes given.
      tried: The same at other ones, or the same.
    """
    whole, small = (_walked(jaxpr) for jaxpr in (given, tried))
    found = [Unreached(what, line, WRAPS) for what, line in whole.beyond]
    if given is not tried:
        new = whole.ways.keys() - small.ways.keys()
        found += [Unreached(*at, WAY) for at in whole.ways if at in new]
        wider = (at for at, can in whole.fixed.items() if not can <= small.fixed.get(at, can))
        found += [Unreached(*at, SIDE) for at in wider]
    return list({(one.line, one.question): one for one in reversed(found)}.values())[::-1]


def _walked(jaxpr: Any) -> _Reads:
    arrays = jaxpr.in_avals
    reads = _Reads([i for i, x in enumerate(arrays) if is_key_type(getattr(x, "dtype", None))], {})
    # A mask counts at most all its elements: how many these are, its size says.
    known = [Range(0, 1) if getattr(x, "dtype", None) == np.bool_ else ANY for x in arrays]
    walk(jaxpr, [_Made(frozenset((i,)), one) for i, one in enumerate(known)], reads)
    return reads


# --- draws that take other sides --------------------------------------------------------------------------------------


class Drive(NamedTuple):
    """A change of arguments that may take another side.

    Attributes:
      places: The arguments that change.
      new: From such an argument to another one.
      keeps: Whether given arrays stay what they may be: sorted, or a mask.
      finite: Whether numbers stay finite.
      ties: Whether numbers become equal, or zero.
      scales: Whether they become large or small.
    """

    places: Collection[int]
    new: Callable[[Array], Any]
    keeps: bool = False
    finite: bool = True
    ties: bool = False
    scales: bool = False

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """The arguments, changed."""
        return [_cast(self.new(np.asarray(x)), x) if i in self.places else x for i, x in enumerate(arrays)]


def drives(arrays: Sequence[Any], aims: Sequence[Choice]) -> Iterator[Drive]:
    """Changes of arguments that may take the sides which are left, the likely ones first.

    Args:
      arrays: The arguments of a draw.
      aims: The choices that have such sides.
    """
    reads = sorted(frozenset[int]().union(*(one.reads for one in aims)))
    numbers = list(dict.fromkeys(x for one in aims for x in one.numbers))[:_NUMBERS]
    floats, ints, flags = ([i for i in reads if _kind(arrays[i]) == kind] for kind in ("float", "int", "bool"))
    times = lambda by: lambda x: x * by
    for by in _TIMES if floats else ():
        yield Drive(floats, times(by), keeps=True, scales=True)
        yield from (Drive(floats, _half(times(by), last), keeps=True, scales=True) for last in (False, True))
    if floats:  # parts that are large, and cancel
        yield Drive(floats, lambda x: x + _half(_PARTS)(np.full(x.shape, -_PARTS)), scales=True)
    if ints:
        near = (y for x in numbers if x == int(x) for y in (x, x + 1, x - 1))
        yield from (Drive(ints, _half(x)) for x in dict.fromkeys((*near, 0, 1, 2, -1)))
        yield Drive(ints, lambda x: x % 2, ties=True)
    if flags:
        yield from (Drive(flags, new, keeps=True) for x in (True, False) for new in (_half(x), _every(x), _half(x, last=True)))
    if not floats:
        return
    yield Drive(floats, np.sign, ties=True)
    yield Drive(floats, _half(0), ties=True)
    yield Drive(floats, np.negative)
    for x in numbers:
        yield from (Drive(floats, _half(y), ties=True) for y in (x * 1.5 + 1e-3, x * 0.5 - 1e-3, x))
    yield from (Drive(floats, _first(x), keeps=True, finite=False) for x in (np.inf, np.nan))
    for several in list(subsets(floats))[:_SEVERAL]:
        yield from (Drive(several, times(by), keeps=True) for by in _TIMES)
    yield Drive(floats, np.zeros_like, ties=True)


def _kind(x: Any) -> str:
    if is_key(x):
        return "key"
    dtype = held_dtype(x)
    if jnp.issubdtype(dtype, jnp.inexact):
        return "float"
    return "bool" if dtype == np.bool_ else "int"


def _cast(new: Array, like: Any) -> Array:
    dtype = held_dtype(like)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        new = np.clip(np.asarray(new, np.float64), float(info.min), float(info.max))
        new = np.where(new >= float(info.max), info.max, new.astype(np.int64)) if info.bits < 64 else new
    return np.asarray(new).astype(dtype)


def _every(y: Any) -> Callable[[Array], Array]:
    return lambda x: np.full_like(x, y)


def _half(y: Any, last: bool = False) -> Callable[[Array], Array]:
    """Change one half of an array, along its first dimension that has several elements: some blocks, and not all."""

    def new(x: Array) -> Array:
        place = next((d for d, n in enumerate(x.shape) if n > 1), None)
        if place is None:
            return np.broadcast_to(y(x) if callable(y) else y, x.shape)
        shape = [-1 if d == place else 1 for d in range(x.ndim)]
        chosen = (np.arange(x.shape[place]) < x.shape[place] // 2).reshape(shape) != last
        return np.where(chosen, y(x) if callable(y) else y, x)

    return new


def _first(y: float) -> Callable[[Array], Array]:
    """Change the first element alone."""
    return lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, y, x)
