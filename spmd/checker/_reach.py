"""How far the draws of a program reach: which choices its arguments decide, and which of their sides were compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.facts import per_shard_reason
from spmd._jaxprs.lines import call_site, is_ours, is_transposed, line_of
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, axes_of, equations, shape_of, walk
from spmd._trees.leaves import is_key, is_key_type
from spmd.checker._choices import (
    APART,
    BEYOND,
    CHOICES,
    COMPARISONS,
    INDEXED,
    LARGE,
    MANY,
    SIDE,
    TIE,
    WAY,
    WRAPS,
    Captured,
    Choice,
    Key,
    Side,
    Unreached,
    key_of,
    possible,
    rows_of,
)
from spmd.checker._primitives import SAME, Array, numbers_of
from spmd.checker._ranges import ANY, POSITIVE, Range, range_of, ranges
from spmd.checker._rounds import WHILE, is_shortened

_FEW = 6  # numbers of a captured table that arguments may be compared with
_FLAG = -1_000_000  # what a literal that is a flag has in place of the number of an array
_SHAPES = frozenset(("reshape", "broadcast_in_dim", "squeeze", "transpose", "jit", "pjit", *SAME))


class _Made(NamedTuple):
    """What a value is made of: arguments, by number, and captured arrays; and between which numbers it lies."""

    reads: frozenset[int] = frozenset()
    range: Range = ANY


class _Reads(Domain):
    """What each value is made of.

    Attributes:
      keys: The arguments that are keys of random numbers.
      whole: The shapes of what is indexed where nothing is divided, by primitive and line.
      sizes: The mesh axes around the walk.
      found: The choices that arguments decide.
      captured: For the `id` of each array that the program closes over, the negative number that stands for it in
        `_Made.reads`, and the array.
      lines: Where each captured array is read first.
      ways: The primitives at each line, but for those that change nothing but a shape; None if they are not asked for.
      fixed: The answers of the choices that sizes alone decide, by primitive and line.
      beyond: The primitives and lines of numbers that are larger than their type allows.
      rounds: The lengths of the scans of which not all rounds are run.
      inside: The choices inside of these, and whether an argument decides. Else the number of a round may.
    """

    def __init__(
        self,
        keys: Collection[int],
        whole: Mapping[tuple[str, str], Collection[Any]],
        rounds: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.keys, self.whole, self.rounds = frozenset(keys), whole, rounds
        self.inside: dict[Key, bool] = {}
        self.sizes: dict[str, int] = {}
        self.found: dict[Key, Choice] = {}
        self.captured: dict[int, tuple[int, Any]] = {}
        self.lines: dict[int, str] = {}
        self.ways: dict[tuple[str, str], None] | None = None
        self.fixed: dict[tuple[str, str], frozenset[Any]] = {}
        self.beyond: dict[tuple[str, str], None] = {}
        self.keep = self._note_choice

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
        reads = _all_reads(operands)
        found, beyond = ranges(eqn, [one.range for one in operands], self.sizes, any(i >= 0 for i in reads))
        if beyond:
            self.beyond[eqn.primitive.name, line_of(eqn, self.callers)] = None
        if eqn.primitive.name == "sort":
            return [_Made(reads, one.range) for one in operands]
        if eqn.primitive.name == "top_k":  # numbers, and their places
            return [_Made(reads, operands[0].range), _Made(reads, POSITIVE)]
        return [_Made(reads, found)] * len(eqn.outvars)

    def _way(self, eqn: Equation) -> str:
        """Its primitive; a permutation written for fewer devices than there are is another one."""
        if eqn.primitive.name == "ppermute":
            count = math.prod(self.sizes.get(axis, 1) for axis in axes_of(eqn))
            return "ppermute" if len(eqn.params["perm"]) >= count // 2 else "a ppermute of some devices"
        return eqn.primitive.name

    def _note_choice(self, eqn: Equation, operands: Sequence[_Made], outs: Any) -> Any:
        if self.ways is not None and eqn.primitive.name not in _SHAPES and not is_ours(eqn):
            self.ways[self._way(eqn), line_of(eqn, self.callers)] = None
        if eqn.primitive.name not in CHOICES:
            return outs
        decides = slice(0, 1) if eqn.primitive.name in ("select_n", "cond", "sort") else slice(None)
        reads = _all_reads(operands[INDEXED.get(eqn.primitive.name, decides)])
        needs = dict(CHOICES[eqn.primitive.name][1](eqn))
        if SIDE in needs:
            can = possible(eqn, [one.range for one in operands], outs[0].range if outs else ANY)
            if not reads or any(i >= 0 for i in reads) or eqn.primitive.name not in ("select_n", "cond"):
                needs[SIDE] = min(needs[SIDE], len(can))
            if not reads and self.ways is not None and call_site(eqn, self.callers) is not None:
                at = eqn.primitive.name, line_of(eqn, self.callers)
                self.fixed[at] = self.fixed.get(at, frozenset()) | can
        if not needs:
            return outs
        if eqn.primitive.name in ("gather", "dynamic_slice") and not any(i >= 0 for i in operands[0].reads):
            rows = rows_of(eqn)  # of a table of constants: each is a side, as those of a switch are
            needs = {SIDE: rows} if 1 < rows <= MANY else {}
        if BEYOND in needs and shape_of(eqn.invars[0]) in self.whole.get((eqn.primitive.name, line_of(eqn)), ()):
            return outs  # it is not divided
        # A bound on a number that keys alone make belongs to how it is drawn.
        drawn = reads <= self.keys and eqn.primitive.name in ("max", "min", "clamp", "convert_element_type")
        meant = drawn or per_shard_reason(eqn, self.callers) is not None
        if LARGE in needs and not any(i >= 0 for i in reads):
            del needs[LARGE]
        inside = any(is_shortened(one, self.rounds) for one in self.callers)
        if not reads:
            needs = {q: n for q, n in needs.items() if q in (SIDE, BEYOND)}
        asked = (reads or inside) and any(n > (q == SIDE) for q, n in needs.items()) and not meant
        if asked and (site := call_site(eqn, self.callers)) is not None:
            key = key_of(eqn, self.callers)
            if inside:
                self.inside[key] = bool(reads)
            before = self.found[key].reads if key in self.found else frozenset[int]()
            forward = bool(reads) and not is_transposed(eqn, self.callers)
            self.found[key] = Choice(eqn.primitive.name, line_of(*site), reads | before, needs, forward)
        return outs


def _all_reads(several: Sequence[_Made]) -> frozenset[int]:
    return frozenset[int]().union(*(one.reads for one in several))


class Reach:
    """Which sides of a program's choices were taken by draws whose results were compared.

    Attributes:
      choices: The choices.
      captured: The arrays that the program closes over and that are one number, as zeros are, and where each is read.
      inside: The choices inside of scans of which not all rounds were run, and whether an argument decides.
      rounds: How many rounds are run of loops that are longer.
    """

    def __init__(self, choices: Mapping[Key, Choice], depends: Sequence[bool], results: int) -> None:
        self.choices = choices
        self._results = results
        self._depends = depends  # for each result whether it is made of arguments
        self._asked = frozenset((SIDE, TIE, APART, BEYOND, LARGE))
        self._taken: dict[Key, set[Side]] = {}
        self._seen: dict[Key, set[Side]] = {}  # by draws whose results tell nothing
        self._bounds: list[tuple[Array, Array]] = []  # between which finite numbers each element of each result was
        self.inside: Mapping[Key, bool] = {}
        self.rounds: Mapping[int, int] = {}
        self.captured: tuple[Captured, ...] = ()

    @classmethod
    def of(
        cls, jaxpr: Any, base: Any, arrays: Sequence[Any], results: int, rounds: Mapping[int, int] | None = None
    ) -> Self:
        """The choices of a program that its arguments decide, but for those inside of this package: what its operations
        do is tested where they are.

        Args:
          jaxpr: The program.
          base: The same where nothing is divided.
          arrays: Its arguments, or structs of them.
          results: How many results it has, which stand behind its gradients.
          rounds: How many rounds a scan of each of these lengths runs, if not all.
        """
        whole: dict[tuple[str, str], set[Any]] = {}
        for eqn in equations(base):
            if eqn.primitive.name in INDEXED:
                whole.setdefault((eqn.primitive.name, line_of(eqn)), set()).add(shape_of(eqn.invars[0]))
        reads = _Reads([i for i, x in enumerate(arrays) if is_key(x)], whole, rounds or {})
        outs = walk(jaxpr, [_Made(frozenset((i,))) for i in range(len(arrays))], reads)
        at: dict[str, dict[float, None]] = {}
        least = 0.0
        for eqn in equations(jaxpr) if reads.found else ():
            for atom in eqn.invars:
                if isinstance(atom, Literal) and np.ndim(atom.val) == 0 and jnp.issubdtype(atom.aval.dtype, jnp.number):
                    number = float(np.real(atom.val))
                    at.setdefault(line_of(eqn), {}).update({number: None} if math.isfinite(number) else {})
                    least = min(least, number) if eqn.primitive.name in COMPARISONS and math.isfinite(number) else least
        for (_, line), shapes in whole.items():
            at.setdefault(line, {}).update(dict.fromkeys(float(n - 1) for shape in shapes for n in shape))
        tables = (np.asarray(x) for _, x in reads.captured.values() if not is_key(x) and np.size(x) <= _FEW)
        known = (float(y) for x in tables if x.dtype.kind in "iuf" for y in x.flat if np.isfinite(y))
        everywhere = dict.fromkeys(x for some in (*at.values(), known) for x in some)
        found = {
            key: one._replace(numbers=(*{**at.get(one.line, {}), **everywhere},), least=least)
            for key, one in reads.found.items()
        }
        reach = cls(found, [any(i >= 0 for i in one.reads) for one in outs], results)
        reach.inside, reach.rounds = reads.inside, rounds or {}
        real = lambda x: not is_key(x) and np.size(x) > 1 and jnp.issubdtype(x.dtype, jnp.inexact)
        constants = ((reads.lines.get(i, ""), np.asarray(x)) for i, x in reads.captured.values() if real(x))
        same = (Captured(line, str(x.dtype), x.shape) for line, x in constants if (x == x.flat[0]).all())
        reach.captured = tuple(same)
        return reach

    def add(self, more: Mapping[Key, set[Side]], results: Sequence[Array], *, apart: bool = True) -> None:
        """Take in what a draw has shown, if its results are numbers that can be compared. Where one device may have
        zeros alone, it does not count that devices decided differently: of zeros every decision makes zeros."""
        gradients = len(results) - self._results
        values = [np.abs(x) if x.dtype.kind == "c" else x.astype(np.float64) for x in map(numbers_of, results)]
        ends = [(np.where(np.isfinite(x), x, np.inf), np.where(np.isfinite(x), x, -np.inf)) for x in values]
        if self._bounds:
            pairs = zip(self._bounds, ends, strict=True)
            ends = [(np.minimum(low, x), np.maximum(high, y)) for (low, high), (x, y) in pairs]
        self._bounds = ends
        shown = all(not x.size or np.isfinite(x).any() for x in values[gradients:])
        for key, answers in more.items():
            counted = answers if apart else answers - {(APART, True)}
            (self._taken if shown else self._seen).setdefault(key, set()).update(counted)

    def see(self, more: Mapping[Key, set[Side]]) -> None:
        """Take in which sides a draw took whose results tell nothing."""
        for key, answers in more.items():
            self._seen.setdefault(key, set()).update(answers)

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
        return [one for key, one in self.choices.items() if self.inside.get(key, True) and self._lacking(key)]

    @property
    def needs_rounds(self) -> bool:
        """Whether rounds that were not run may take a side, or give a result other numbers."""
        asked = [key for key in self.choices if key in self.inside or WHILE in self.rounds]
        return bool(any(map(self._lacking, asked)) or (self.rounds and self.flat))

    @property
    def unreached(self) -> tuple[Unreached, ...]:
        """The sides that no draw took, once for each line and question."""
        taken = {key: frozenset(x for q, x in self._taken.get(key, ()) if q == SIDE) for key in self.choices}
        seen = lambda key, question: question not in self._lacking(key, self._seen.get(key, ()))
        asked = ((key, c) for key, c in self.choices.items() if self.inside.get(key, True))
        every = ((key, c, q) for key, c in asked for q in sorted(self._lacking(key)))
        found = [Unreached(c.what, c.line, q, taken[key], seen(key, q)) for key, c, q in every]
        return tuple({(one.line, one.question, one.seen): one for one in reversed(found)}.values())[::-1]

    @property
    def flat(self) -> list[int]:
        """The results that are made of arguments, and have numbers which no draw compared, because they are not finite
        or always the same. Those of a gradient may be the same, as of a sum, if they are not all zero."""
        gradients = len(self._depends) - self._results
        found = []
        for i, (own, (low, high)) in enumerate(zip(self._depends, self._bounds, strict=False)):
            same = low == high
            still = bool(same.all()) and len(np.unique(low)) == 1 and (i >= gradients or not low.any())
            stuck = i >= gradients and bool((same & (low != 0)).any())
            if own and low.size and (still or stuck or (low > high).any()):
                found.append(i)
        return found


# --- what the sizes that are tried do not show ------------------------------------------------------------------------


def left_by_sizes(given: Any, tried: Any) -> list[Unreached]:
    """What a program does at the sizes given, and not at those at which it was tried.

    Python may take another way, positions come to a literal that small ones stay below, and numbers leave their type.

    Args:
      given: The program at the sizes given.
      tried: The same at other ones, or the same.
    """
    whole = _walked(given)
    found = [Unreached(what, line, WRAPS) for what, line in whole.beyond]
    if given is not tried:
        small = _walked(tried)
        found += [Unreached(*at, WAY) for at in whole.ways or () if at not in (small.ways or ())]
        wider = (at for at, can in whole.fixed.items() if not can <= small.fixed.get(at, can))
        found += [Unreached(*at, SIDE) for at in wider]
    return list({(one.line, one.question): one for one in reversed(found)}.values())[::-1]


def _walked(jaxpr: Any) -> _Reads:
    arrays = jaxpr.in_avals
    reads = _Reads([i for i, x in enumerate(arrays) if is_key_type(getattr(x, "dtype", None))], {})
    reads.ways = {}
    # A mask counts at most all its elements: how many these are, its size says.
    known = [Range(0, 1) if getattr(x, "dtype", None) == np.bool_ else ANY for x in arrays]
    walk(jaxpr, [_Made(frozenset((i,)), one) for i, one in enumerate(known)], reads)
    return reads
