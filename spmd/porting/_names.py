"""What dimensions are called: dimensions that meet in an operation have one name, chosen by who divides them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmd import _compat
from spmd._jaxprs.walker import Equation, Held, Variable, opened, shape_of
from spmd.checker._state import HIDDEN, State, is_divided
from spmd.checker._table import NEW
from spmd.inspect._recorded import Label, Labels, Names, Part
from spmd.language import axes_tuple

# By the axes that divide them, dimensions have the names that most programs give them; others have the next letter.
_USUAL = {
    **dict.fromkeys(("dp", "data", "batch", "fsdp", "replica", "replica_dcn"), "b"),
    **dict.fromkeys(("cp", "sp", "seq", "sequence", "context"), "s"),
    **dict.fromkeys(("ep", "expert", "experts"), "e"),
    **dict.fromkeys(("pp", "stage", "stages", "pipe"), "p"),
    **dict.fromkeys(("x", "y", "z"), "x"),
}
_LETTERS = "dfhkmnqrtvwyzacgijlou"

Axes = tuple[str, ...]


class Word(NamedTuple):
    """One factor of a dimension: its name, and the axes that divide it."""

    name: str
    axes: Axes = ()

    def __str__(self) -> str:
        return "/".join((self.name, *self.axes))


Dims = list[list[Word]]  # of an array: for each dimension its factors


def text_of(dims: Dims, marks: Iterable[str] = (), bracket: int | None = None) -> str:
    """`b/dp [s/cp] (h/tp k) {U:ep}`."""
    words = [" ".join(map(str, words)) for words in dims]
    words = [f"({text})" if len(parts) > 1 else text for text, parts in zip(words, dims, strict=True)]
    words = [f"[{text}]" if i == bracket else text for i, text in enumerate(words)]
    partial = ",".join(marks)
    return " ".join([*words, *([f"{{U:{partial}}}"] if partial else [])]) or "scalar"


class Guess(Names):
    """The walk that finds which dimensions are one. At first each dimension of a body's argument is one of its own."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self._parents: dict[str, str] = {}

    def root(self, name: str) -> str:
        """The one name of all dimensions that are one."""
        while name in self._parents:
            name = self._parents[name]
        return name

    def join(self, one: Labels, other: Labels) -> Labels:
        for a, b in zip(one, other, strict=True):
            self._meet(a, b)
        return tuple(a or b for a, b in zip(one, other, strict=True))

    def same(self, one: Labels, other: Labels) -> bool:
        return list(map(self._rooted, one)) == list(map(self._rooted, other))

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Labels]) -> Sequence[Labels]:
        body = opened(part.jaxpr)[0]
        pairs = zip(body.invars, eqn.params["in_specs"], strict=True)
        entering = [self._entering(f"{id(eqn)}:{i}", var, spec) for i, (var, spec) in enumerate(pairs)]
        return self.run(eqn, part, entering)

    def _entering(self, name: str, var: Variable, spec: Any) -> Labels:
        shape = shape_of(var)
        entries = _compat.partitions(spec, len(shape))
        whole = [n * math.prod(map(self.sizes.__getitem__, axes_tuple(e))) for n, e in zip(shape, entries, strict=True)]
        return tuple(((f"{name}:{d}", size),) for d, size in enumerate(whole))

    def _mapped(self, m: Any, eqn: Equation, operands: Sequence[Labels]) -> list[Labels]:
        met: dict[int, Label] = {}
        for labels, given in zip(m.operands, operands, strict=False):
            for label, parts in zip(labels, given, strict=False):
                if label is not NEW and parts:
                    self._meet(met.setdefault(label, parts), parts)
        return super()._mapped(m, eqn, operands)

    def _meet(self, one: Label, other: Label) -> None:
        if [size for _, size in one] == [size for _, size in other]:
            for (a, _), (b, _) in zip(one, other, strict=True):
                a, b = self.root(a), self.root(b)
                if a != b:
                    self._parents[b] = a

    def _rooted(self, label: Label) -> list[Part]:
        return [(self.root(name), size) for name, size in label]


@dataclass
class Namer:
    """Chooses names for dimensions.

    Attributes:
      guess: Which dimensions are one.
      sizes: The sizes of the mesh axes.
      known: The name of each.
    """

    guess: Guess
    sizes: Mapping[str, int]
    known: dict[str, str] = field(default_factory=dict)

    def give(self, labels: Labels, names: Sequence[str]) -> None:
        """Give the dimensions of an argument these names."""
        for parts, name in zip(labels, names, strict=False):
            if len(parts) == 1 and name.isidentifier():
                self.known.setdefault(self.guess.root(parts[0][0]), name)

    def argument(self, shape: Sequence[int], labels: Labels, axes: Sequence[Axes]) -> Dims:
        """The dimensions of an argument or a result of this shape, on the whole array, that lies so."""
        fits = [len(parts) == 1 and parts[0][1] == n for parts, n in zip(labels, shape, strict=True)]
        names = [parts[0] if fit else ("", 0) for parts, fit in zip(labels, fits, strict=True)]
        dims = self._apart([[Word(self._name(part, given), given)] for part, given in zip(names, axes, strict=True)])
        self.known.update({f"!{word.name}": word.name for words in dims for word in words})  # all of them are taken
        return dims

    def of(self, state: State, labels: Labels) -> Dims:
        """The dimensions of a value as it was inferred."""
        found = []
        for dim, parts in zip(state.dims, labels, strict=True):
            whole = [(n * self._count(axes), axes if is_divided(axes) else ()) for n, axes in dim]
            if dim[0][1] is HIDDEN and len(dim) == len(parts) == 1:  # a block of which nobody knows the place
                axes = tuple(axis for axis in self.sizes if axis in state.different)
                block = dim[0][0] * self._count(axes), axes
                whole = [block] if block[0] == parts[0][1] else whole
            fits = [size for size, _ in whole] == [size for _, size in parts]  # a part of a dimension is another one
            names = parts if fits else [("", 0)] * len(dim)
            found.append([Word(self._name(part, axes), axes) for part, (_, axes) in zip(names, whole, strict=True)])
        return self._apart(found)

    def _count(self, axes: Axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes) if is_divided(axes) else 1

    def fresh(self, dims: Dims, axes: Axes = ()) -> str:
        """A name that no dimension of the array has."""
        return next(self._free({word.name for words in dims for word in words}, axes))

    def _name(self, part: Part, axes: Axes) -> str:
        if not part[0]:
            return ""
        root = self.guess.root(part[0])
        if root not in self.known:
            self.known[root] = next(self._free(set(self.known.values()), axes))
        return self.known[root]

    def _free(self, taken: set[str], axes: Axes) -> Iterator[str]:
        usual = [_USUAL[axis] for axis in axes if axis in _USUAL]
        numbered = (f"n{i}" for i in itertools.count(1))
        used = {*taken, *self.sizes, *self.known.values()}
        return (name for name in itertools.chain(usual, _LETTERS, numbered) if name not in used)

    def _apart(self, dims: Dims) -> Dims:
        """Names that occur once in an array: a second dimension of one name has a new one."""
        seen: set[str] = set()
        for words in dims:
            for i, word in enumerate(words):
                if word.name in seen or not word.name:
                    other = self.known.get(f"!{word.name}'", "")
                    if not word.name or not other or other in seen:
                        other = next(self._free(seen | {one.name for row in dims for one in row}, word.axes))
                        self.known[f"!{word.name}'"] = other  # of the next square matrix too
                    words[i] = word._replace(name=other)
                seen.add(words[i].name)
        return dims
