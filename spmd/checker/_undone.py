"""What is done to a piece and undone again.

A model runs over two batches at once: `jnp.concatenate([x, y])` of two blocks is not a block, but the results are split
where the blocks were joined. Tokens are sorted by their experts on each device, and go back to where they were. Rows
are padded, and cut again; taken one by one, and written back. Each of these is right for blocks as for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import numpy as jnp
from jax.extend.core import Literal

from spmd._jaxprs import Role, held, opened, shape_of
from spmd.checker._history import History
from spmd.checker._table import TABLE, groups
from spmd.checker._values import Values

Range = tuple[int, int, int]  # of so many elements, from one to another


class Undone:
    """What is undone before a value is made.

    Args:
      history: Where the values of the program come from.
      values: Which variables hold one value.
      atom: The value.
    """

    def __init__(self, history: History, values: Values, atom: Any) -> None:
        self._history, self._values, self._atom = history, values, atom
        made: list[Any] = []
        self._users: dict[Any, list[Any]] = {}
        for var in history.behind(atom, _never):
            made += [found[0]] if (found := history.producer(var)) else []
            for operand in history.operands(var):
                if not isinstance(operand, Literal):
                    self._users.setdefault(operand, []).append(var)
        self._equations = list({id(eqn): eqn for eqn in made}.values())
        self._made_from: dict[int, set[Any]] = {}
        self._pairs: dict[tuple[int, int], bool] = {}

    def has(self, eqn: Any) -> bool:
        """Whether what an equation did to a piece is undone, or undoes what another one did."""
        if eqn.primitive.name in _FIRST and self._holds(eqn):
            return True
        return any(
            (self._ends(eqn, one) or self._is_by(eqn, one)) and self._holds(one)
            for one in self._named(*_FIRST)
            if one is not eqn
        )

    def _holds(self, first: Any) -> bool:
        """Whether each row of the value is made of one row of what an equation was given, by all ways."""
        rank = len(shape_of(self._atom))
        return any(self._every_way(self._atom, d, first) for d in ((None, *range(rank)) if rank else (None,)))

    def _every_way(self, atom: Any, dim: int | None, first: Any) -> bool:
        def before(var: Any, d: int | None, eqn: Any) -> list[tuple[Any, int | None]] | None:
            if eqn is first:
                return None
            if eqn is not None and self._ends(eqn, first) and d in self._rows_of(eqn, d):
                return [(eqn.invars[0], d)] if eqn.primitive.name in _PUTS else []
            return self._rows(var, d, eqn, first, loops=True)

        return self._followed(atom, dim, first, before)

    def _followed(self, atom: Any, dim: int | None, first: Any, before: Callable[..., Any]) -> bool:
        """Whether all ways back from the rows of a value to an equation are open. `before(var, d, eqn)` is one step
        back, from the rows of a value along a dimension: those that they are made of; None where a way ends."""
        todo, seen = [(atom, dim)], set()
        while todo:
            var, d = todo.pop()
            if (var, d) in seen or not self._is_of(var, first):
                continue
            seen.add((var, d))
            rows = before(var, d, self._history.made.get(var, (None,))[0])
            if rows is None:
                return False
            todo += rows
        return True

    def _named(self, *names: str) -> Iterator[Any]:
        return (eqn for eqn in self._equations if eqn.primitive.name in names)

    def _is_of(self, atom: Any, eqn: Any) -> bool:
        """Whether a value is made of what an equation gives."""
        if id(eqn) not in self._made_from:
            found, todo = set(eqn.outvars), list(eqn.outvars)
            while todo:
                new = set(self._users.get(todo.pop(), ())) - found
                found |= new
                todo += new
            self._made_from[id(eqn)] = found
        return not isinstance(atom, Literal) and atom in self._made_from[id(eqn)]

    # --- what undoes what

    def _ends(self, eqn: Any, first: Any) -> bool:
        """Whether one equation undoes what the other one did."""
        key = id(eqn), id(first)
        if key not in self._pairs:
            name, done = eqn.primitive.name, first.primitive.name
            self._pairs[key] = (
                (name in _CUTS and done in _JOINS and self._fit(first, eqn))
                or (name in _PUTS and done in _TAKES and self._back(first, eqn))
                or (name in ("gather", *_SCATTERS) and done == "sort" and self._in_order(eqn, first))
            )
        return self._pairs[key]

    def _rows_of(self, eqn: Any, d: int | None) -> Sequence[int | None]:
        """The dimension of the rows that are as they were. Of a sum over rows nobody asks."""
        numbers = eqn.params.get("dimension_numbers")
        if eqn.primitive.name in _CUTS:
            return [at for at, _ in _cut(eqn)]
        if eqn.primitive.name == "gather":
            return _picked(shape_of(eqn.outvars[0]), numbers.offset_dims, numbers.start_indices_batching_dims)
        if eqn.primitive.name == "dynamic_update_slice":
            pairs = zip(shape_of(eqn.invars[0]), shape_of(eqn.invars[1]), strict=True)
            return [at for at, (n, m) in enumerate(pairs) if n != m]
        return [d] if eqn.primitive.name in _SUMS else numbers.scatter_dims_to_operand_dims

    def _is_by(self, eqn: Any, first: Any) -> bool:
        """Whether an equation takes rows in an order."""
        return first.primitive.name == "sort" and any(self._is_of(atom, first) for atom in _places(eqn))

    def _fit(self, join: Any, cut: Any) -> bool:
        """Whether one equation cuts where the other one joined, and what is done between is done to each row."""
        if not self._is_of(cut.invars[0], join):
            return False
        at = {which: d for d, which in _cut(cut)}
        same = [(d, at[which]) for d, which in _joined(join) if which in at]
        return any(self.each_row(cut.invars[0], e, join, d) for d, e in same)

    def _back(self, take: Any, put: Any) -> bool:
        """Whether one equation puts where the other one took."""
        update = put.invars[1 if put.primitive.name == "dynamic_update_slice" else 2]
        if not self._is_of(update, take) or self._goes_round(update, put):
            return False
        one, other = self._where(take, take.outvars[0], take.invars[1:]), self._where(put, update, _places(put))
        return bool(one[0]) and one == other

    def _goes_round(self, update: Any, put: Any) -> bool:
        """Whether an update is made of what a round of the loop around it is given, but for counters."""
        _, callers = self._history.producer(put.outvars[0]) or (None, ())
        loops = [part for eqn in callers[-1:] for part in held(eqn) if part.role == Role.LOOP]
        given = [var for part in loops for var in _carries(part)]
        behind = set(self._history.behind(update, _never))
        return any(var in behind and (shape_of(var) or _is_float(var)) for var in given)

    def _where(self, eqn: Any, piece: Any, starts: Any) -> tuple[set[Any], int]:
        """The numbers that say where, and along how many elements."""
        numbers = eqn.params.get("dimension_numbers")
        moving = getattr(numbers, "start_index_map", None) or getattr(numbers, "scatter_dims_to_operand_dims", None)
        whole = shape_of(eqn.invars[0])
        if moving is None:
            moving = [d for d, (n, m) in enumerate(zip(whole, shape_of(piece), strict=True)) if n != m]
            starts = [starts[d] for d in moving]
        else:
            starts = self._columns(starts[0])
        if eqn.primitive.name == "gather" and len(starts) == len(moving):  # of whole dimensions it takes all
            taken = eqn.params["slice_sizes"]
            starts = [one for one, d in zip(starts, moving, strict=True) if taken[d] != whole[d]]
            moving = [d for d in moving if taken[d] != whole[d]]
        return {self._values.one(atom) for atom in starts}, sum(whole[d] for d in moving)

    def _columns(self, indices: Any) -> list[Any]:
        """The columns of indices that were put together, one for each dimension."""
        eqn, _ = self._history.producer(indices) or (None, ())
        if eqn is None or eqn.primitive.name != "concatenate":
            return [indices]
        return list(eqn.invars) if eqn.params["dimension"] == len(shape_of(indices)) - 1 else [indices]

    def _in_order(self, eqn: Any, sort: Any) -> bool:
        """Whether rows in some order are put, or taken, where that order says."""
        numbers = eqn.params["dimension_numbers"]
        if eqn.primitive.name == "gather":
            rows, dims = eqn.invars[0], numbers.start_index_map
        else:
            rows = eqn.invars[2]
            dims = _picked(shape_of(rows), numbers.update_window_dims, numbers.scatter_indices_batching_dims)
        ordered = len(dims) == 1 and self._is_of(rows, sort) and self._is_of(eqn.invars[1], sort)
        return ordered and self.each_row(rows, dims[0], sort)

    # --- row by row

    def each_row(self, atom: Any, dim: int, first: Any, place: int | None = None) -> bool:
        """Whether each row of a value along a dimension is made of one row of what an equation gives.

        Args:
          atom: The value.
          dim: The dimension of its rows.
          first: The equation.
          place: The dimension of the rows there, if not any.
        """

        parts = set() if place is None else {which for d, which in _joined(first) if d == place}

        def before(var: Any, d: int | None, eqn: Any) -> list[tuple[Any, int | None]] | None:
            if eqn is first:
                return [] if place in (None, d) else None
            moved = [] if eqn is None else [one for one in self._moved(var, d, eqn) if self._is_of(one[0], first)]
            if moved:
                return [(operand, d) for operand, _ in moved] if parts.issuperset(which for _, which in moved) else None
            return self._rows(var, d, eqn, first)

        return self._followed(atom, dim, first, before)

    def _moved(self, var: Any, d: int | None, eqn: Any) -> list[tuple[Any, Range]]:
        """The operands that an equation joins or cuts along a dimension, and which elements of the longer value they,
        or the result, are."""
        name = eqn.primitive.name
        joined = [which for at, which in _joined(eqn) if at == d] if name in _JOINS else []
        cuts = [which for at, which in _cut(eqn) if at == d] if name in _CUTS else []
        if cuts:
            i = self._history.made[var][1]  # each result of a split has a cut
            return [(eqn.invars[0], cuts[i])]
        return list(zip(eqn.invars[: len(joined)], joined, strict=True))

    def _rows(
        self, var: Any, d: int | None, eqn: Any, first: Any, *, loops: bool = False
    ) -> list[tuple[Any, int | None]] | None:
        """The operands that a row of a result is made of, and their rows; None where it is made of several.

        A sum over all rows has no dimension of rows.
        """
        if eqn is None or (eqn.params and held(eqn)):
            behind = [one for one in self._history.made_of.get(var, ()) if self._is_of(one, first)]
            rounds = eqn is not None and any(part.role in (Role.LOOP, Role.TEST) for part in held(eqn))
            given = [(one, _in_shape(d, shape_of(var), shape_of(one))) for one in behind]
            known = all(own is not None or d is None for _, own in given)
            return given if known and (loops or not rounds) else None
        found: list[tuple[Any, int | None]] = []
        if d is None:
            same = eqn.primitive.name in TABLE and TABLE[eqn.primitive.name].says == "elementwise"
            if not same and eqn.primitive.name != "reduce_sum":
                return None
            gone = [None] if same else [*eqn.params["axes"]]
            given = [atom for atom in eqn.invars if self._is_of(atom, first)]
            return [(given[0], gone[0])] if len(given) == len(gone) == 1 else None
        labels = _labels(eqn, d)
        if not labels:
            return None
        for atom, own in zip(eqn.invars, labels, strict=False):
            if self._is_of(atom, first):
                if len(own) != 1:
                    return None
                found.append((atom, own[0]))
        return found


def _labels(eqn: Any, d: int) -> list[list[int]]:
    """For each operand its dimensions along which one row makes a row of the result; none where that is not known."""
    name, out = eqn.primitive.name, shape_of(eqn.outvars[0])
    if name in TABLE:
        m = TABLE[name].map(eqn)
        label = m.result[d] if d < len(m.result) else None
        if label in m.whole or label in m.reduced:
            return []
        return [[i for i, one in enumerate(own) if one is not None and one == label] for own in m.operands]
    before = shape_of(eqn.invars[0])
    if name in ("stack", "unstack"):
        at = eqn.params["axis"]
        own = d + (d >= at) if name == "unstack" else d - (d > at)
        return [[own]] * len(eqn.invars) if name == "unstack" or d != at else []
    if name == "reshape":
        runs = [(old, new) for old, new in groups(before, out) if d in new]
        return [[runs[0][0].start]] if runs and len(runs[0][0]) == len(runs[0][1]) == 1 else []
    if name == "gather":
        numbers = eqn.params["dimension_numbers"]
        batch = [i for i in range(len(out)) if i not in numbers.offset_dims]
        return [[], [batch.index(d)]] if d in batch else []
    whole = {
        "slice": lambda: out[d] == before[d],
        "pad": lambda: eqn.params["padding_config"][d] == (0, 0, 0),
        "concatenate": lambda: eqn.params["dimension"] != d,
        "split": lambda: eqn.params["axis"] != d,
    }
    return [[d]] * len(eqn.invars) if name in whole and whole[name]() else []


def _picked(shape: Sequence[int], window: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dimensions of rows that indices pick. Those of a batch have rows of their own in each array."""
    places = [d for d in range(len(shape)) if d not in window]
    return [d for i, d in enumerate(places) if i not in batch]


def _in_shape(d: int | None, shape: Sequence[int], other: Sequence[int]) -> int | None:
    """A dimension of a value in what it was before a call, or a loop that stacks rows or takes them apart."""
    for moved, one, two in ((0, shape, other), (1, shape, other[1:]), (-1, shape[1:], other)):
        if d is not None and one == two and d + moved >= 0:
            return d + moved
    return None


def _carries(part: Any) -> list[Any]:
    """What a round of a loop is given by the one before."""
    inputs, count = opened(part.jaxpr)[0].invars, len(part.stacked) - sum(part.stacked)
    last = len(inputs) - sum(part.sliced)
    return inputs[last - count : last]


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _never(eqn: Any) -> bool:
    return False


def _joined(eqn: Any) -> Iterator[tuple[int, Range]]:
    """Which elements of a result are those of an operand, along a dimension."""
    out = shape_of(eqn.outvars[0])
    if eqn.primitive.name == "pad":
        for d, (n, (low, high, inside)) in enumerate(zip(out, eqn.params["padding_config"], strict=True)):
            if (low, high) != (0, 0) and not inside and min(low, high) >= 0:
                yield d, (n, low, n - high)
        return
    d, first = eqn.params["dimension"], 0
    for operand in eqn.invars:
        size = shape_of(operand)[d]
        yield d, (out[d], first, first + size)
        first += size


def _cut(eqn: Any) -> Iterator[tuple[int, Range]]:
    """Which elements of an operand are taken, along a dimension."""
    before = shape_of(eqn.invars[0])
    if eqn.primitive.name == "pad":  # a negative one, which JAX makes of the derivative of another
        for d, (n, (low, high, inside)) in enumerate(zip(before, eqn.params["padding_config"], strict=True)):
            if min(low, high) < 0 and max(low, high) <= 0 and not inside:
                yield d, (n, -low, n + high)
        return
    if eqn.primitive.name == "split":
        first = 0
        for size in eqn.params["sizes"]:
            yield eqn.params["axis"], (before[eqn.params["axis"]], first, first + size)
            first += size
        return
    starts, ends = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(before)
    for d, (n, first, last, stride) in enumerate(zip(before, starts, ends, strides, strict=True)):
        if stride == 1 and (first, last) != (0, n):
            yield d, (n, first, last)


def _places(eqn: Any) -> list[Any]:
    """What says where an equation takes or puts."""
    return eqn.invars[2:] if eqn.primitive.name == "dynamic_update_slice" else eqn.invars[1:2]


_JOINS = ("concatenate", "pad")
_CUTS = ("slice", "split", "pad")
_TAKES = ("dynamic_slice", "gather")
_SUMS = ("scatter-add", "scatter_add")
_SCATTERS = ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul")
_PUTS = ("dynamic_update_slice", *_SCATTERS)
_FIRST = (*_JOINS, *_TAKES, "sort")
