"""What a port writes: names for dimensions, of which those that meet have one, and a verb for each raw collective."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spmd import _compat
from spmd._jaxprs.factored import Factors, name_of
from spmd._jaxprs.walker import Equation, Held, Variable, axes_of, opened, shape_of
from spmd.checker._names import Label, Labels, Part
from spmd.checker._state import HIDDEN, State, is_divided
from spmd.checker._table import NEW
from spmd.inspect._recorded import Names
from spmd.language import axes_code, axes_product, axes_tuple

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
        return axes_product(axes, self.sizes) if is_divided(axes) else 1

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


# --- verbs -------------------------------------------------------------------------------------------------------

# Raw collectives as verbs: what to write in place of each, from how its operand lies.

X = "\0"  # stands for the operand in what is written


@dataclass(frozen=True)
class Operand:
    """A collective of the trace, with what is known of its operand.

    Attributes:
      eqn: Its equation.
      number: Which of its operands.
      state: How the operand lies.
      dims: Its dimensions with their names.
      namer: Gives new names.
      order: The mesh axes.
      callee: What the program calls: `psum`, `pmean`, ...
      alone: Whether the call has one array.
    """

    eqn: Equation
    number: int
    state: State
    dims: Dims
    namer: Namer
    order: Axes
    callee: str
    alone: bool

    @property
    def axes(self) -> Axes:
        return axes_of(self.eqn)

    def first(self, last: int) -> Operand:
        """The same, with names of its own for the dimensions up to one, and `...` for those behind."""
        names = iter([letter for letter in "acgijlou" if letter not in self.namer.known.values()])
        mapped = [[word._replace(name=next(names, word.name)) for word in words] for words in self.dims[: last + 1]]
        return replace(self, dims=[*mapped, [Word("...")]])

    def partial(self, without: Sequence[str] = ()) -> Axes:
        return tuple(a for a in self.order if a in self.state.partial and a not in without)

    def at(self, dim: int) -> Word | None:
        """The one factor of a dimension."""
        words = self.dims[dim] if dim < len(self.dims) else []
        return words[0] if len(words) == 1 else None

    def like(self, dim: int, axes: Axes) -> Dims:
        """The dimensions, of which one lies otherwise."""
        return [[words[0]._replace(axes=axes)] if i == dim else words for i, words in enumerate(self.dims)]

    def simple(self) -> Operand:
        """The same, where nobody asks how a dimension of several factors is made."""
        one = [words if len(words) == 1 else [Word(self.namer.fresh(self.dims))] for words in self.dims]
        return replace(self, dims=one)

    def _block(self, word: Word, axes: Axes, taken: str) -> Word:
        """A factor without these axes: what a device has of it is another dimension."""
        if not set(word.axes) & set(axes):
            return word
        names = [[Word(taken)], *self.dims]
        return Word(self.namer.fresh(names), tuple(axis for axis in word.axes if axis not in axes))

    def apart(self, place: int, axes: Axes) -> Iterator[tuple[str, Dims, Dims]]:
        """The operand with a dimension of the devices, of which each has one element: its text, how it lies, and how it
        lies with all of them. The blocks of a divided dimension become that dimension, or it is a new one."""
        name = self.namer.fresh(self.dims, axes)
        held = [[self._block(word, axes, name) for word in words] for words in self.dims]
        before, after = ([*held[:place], [word], *held[place:]] for word in (Word(name, axes), Word(name)))
        divided = [i for i, words in enumerate(self.dims) if words[0].axes[-len(axes) :] == axes]
        if len(divided) == 1:
            [at] = divided
            whole = [list(words) for words in self.dims]
            whole[at] = [Word(name, self.dims[at][0].axes), held[at][0], *whole[at][1:]]
            sides = f'"{text_of(whole)} -> {text_of(before)}"'
            yield f"spmd.rearrange({X}, {sides}, {name}=spmd.axis_size({axes_code(axes)}))", before, list(after)
        yield f"jnp.expand_dims({X}, {place})", before, list(after)


def ways(found: Operand) -> list[str]:
    """Return what may be written in place of a collective, the best first; none where no verb says it."""
    rule, params = _RULES.get(found.eqn.primitive.name), found.eqn.params
    if rule is None or params.get("axis_index_groups") is not None:
        return []
    held = [i for i in range(len(found.dims)) if (word := found.at(i)) is not None and word.axes == found.axes]
    places = [params.get(key, -1) for key in ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")]
    last = max(places) if max(places) >= 0 else max(held, default=-1)  # any arrays whose first dimensions are alike
    general = last >= 0 or rule is _permutes
    return list(dict.fromkeys([*rule(found), *(rule(found.first(last)) if general else ())]))


def _sums(found: Operand) -> Iterator[str]:
    axes, mark = found.axes, ",".join(found.axes)
    after = ""
    if found.callee == "pmean":
        if not found.alone:
            return
        after = f" / spmd.axis_size({axes_code(axes)})"
    open_, close = ("(", ")") if after else ("", "")
    if not any(set(word.axes) & set(axes) for words in found.dims for word in words):
        rest = found.partial(axes)
        marks = [a for a in found.order if a in (*rest, *axes)]
        pattern = f"{text_of(found.dims, marks)} -> {text_of(found.dims, rest)}"
        yield f'{open_}spmd.psum({X}, "{pattern}"){after}{close}'
    yield f'{open_}spmd.psum({X}, "... {{U:{mark}}} -> ..."){after}{close}'


def _gathers(found: Operand) -> Iterator[str]:
    axes, dim = found.axes, found.eqn.params["all_gather_dimension"]
    to = ', to="invarying"' if found.eqn.primitive.name == "all_gather_invariant" else ""
    marks = found.partial(axes)
    if found.eqn.params["tiled"]:
        word = found.at(dim)
        if word is not None and word.axes[len(word.axes) - len(axes) :] == axes:
            right = found.like(dim, word.axes[: len(word.axes) - len(axes)])
            yield f'spmd.all_gather({X}, "{text_of(found.dims, marks)} -> {text_of(right, marks)}"{to})'
        elif word is not None and not word.axes:
            yield f'spmd.all_gather({X}, "{text_of(found.like(dim, axes), marks)} -> {text_of(found.dims, marks)}"{to})'
        return
    for operand, before, after in found.apart(dim, axes):
        yield f'spmd.all_gather({operand}, "{text_of(before, marks)} -> {text_of(after, marks)}"{to})'


def _scatters(found: Operand) -> Iterator[str]:
    axes, dim = found.axes, found.eqn.params["scatter_dimension"]
    rest = found.partial(axes)
    marks = [a for a in found.order if a in (*rest, *axes)]
    word = found.at(dim)
    if word is None:
        return
    left, right = text_of(found.dims, marks), text_of(found.like(dim, (*word.axes, *axes)), rest)
    verb = f'spmd.psum_scatter({X}, "{left} -> {right}")'
    yield verb if found.eqn.params["tiled"] else f"jnp.squeeze({verb}, {dim})"


def _exchanges(found: Operand) -> Iterator[str]:
    params, axes = found.eqn.params, found.axes
    split, concat, marks = params["split_axis"], params["concat_axis"], found.partial(found.axes)
    gives, takes = found.at(concat), found.at(split)
    tiled = params["tiled"]
    if takes is not None and gives is not None and tiled and split != concat and gives.axes[-len(axes) :] == axes:
        right = found.like(split, (*takes.axes, *axes))
        right[concat] = [gives._replace(axes=gives.axes[: -len(axes)])]
        yield f'spmd.all_to_all({X}, "{text_of(found.dims, marks)} -> {text_of(right, marks)}")'
        return
    # each device has one element of a new dimension, and gets all of it for a part of the dimension that is split
    place = 0 if tiled or concat <= split else concat + 1
    at = split + (place <= split)
    for operand, before, after in found.simple().apart(place, axes):
        after[at] = [after[at][0]._replace(axes=(*after[at][0].axes, *axes))]
        exchange = f'spmd.all_to_all({operand}, "{text_of(before, marks)} -> {text_of(after, marks)}")'
        if tiled:
            yield f"jnp.concatenate({exchange}, {concat})"
        elif concat <= split:
            yield f"jnp.moveaxis(jnp.squeeze({exchange}, {at}), 0, {concat})"
        else:
            yield f"jnp.squeeze({exchange}, {at})"


def _permutes(found: Operand) -> Iterator[str]:
    axes, perm = found.axes, [tuple(map(int, pair)) for pair in found.eqn.params["perm"]]
    count = axes_product(axes, found.namer.sizes)
    held = [i for i in range(len(found.dims)) if (word := found.at(i)) is not None and word.axes == axes]
    if held:
        layout, operand, behind = text_of(found.dims, found.partial(axes), held[0]), X, ""
    else:
        *_, (operand, before, _) = found.apart(0, axes)
        layout, behind = text_of(before, found.partial(axes), 0), "[0]"
    by = {to - start for start, to in perm}
    round_ = {step % count for step in by}
    if len(perm) == count and len(round_) == 1:
        [step] = round_
        yield f'spmd.shift({operand}, "{layout}", {step if step <= count // 2 else step - count}){behind}'
    elif len(by) == 1 and len(perm) == count - abs(step := next(iter(by))):
        yield f'spmd.shift({operand}, "{layout}", {step}, wrap=False){behind}'
    yield f'spmd.ppermute({operand}, "{layout}", {perm}){behind}'


def in_groups(found: Operand, factors: Factors) -> str:
    """Return what becomes of a collective in groups of an axis; "" where it has none."""
    axes = axes_of(found.eqn)
    if found.eqn.params.get("axis_index_groups") is not None:
        return f"groups of {', '.join(axes)} that are neither neighbours nor one of each"
    for axis, sizes in factors.items():
        names = [name_of(axis, place) for place in range(len(sizes))]
        if len(axes) == 1 and axes[0] in names:
            made = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
            return f"groups of {axis}: on a mesh with {made} in its place it is over {axes[0]}"
    return ""


def reduction(found: Operand, gone: Sequence[int], keeps: bool) -> str | None:
    """A reduction of a divided dimension and of the devices along it, as one call; None where these differ."""
    axes = [axis for dim in gone for word in found.dims[dim] for axis in word.axes]
    if set(axes) != set(found.axes):
        return None
    kept = [[Word("1")] if d in gone else words for d, words in enumerate(found.dims) if keeps or d not in gone]
    name = found.eqn.primitive.name.removeprefix("p")
    return f'spmd.reduce({X}, "{text_of(found.dims)} -> {text_of(kept)}", "{name}")'


_RULES: dict[str, Callable[[Operand], Iterator[str]]] = {
    **dict.fromkeys(("psum", "psum_invariant"), _sums),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _gathers),
    "reduce_scatter": _scatters,
    "all_to_all": _exchanges,
    "ppermute": _permutes,
}
