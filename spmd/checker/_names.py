"""What the dimensions of values are called, and the strings that call them otherwise.

Strings give names, and the maps of the table carry them from operands to results. Two dimensions of one size can be
taken for each other, and no size shows it. So what a string says of a value is compared with the names that the value
came with. A slice that takes all of a longer dimension leaves no trace, and neither does a table of which a program
takes as many rows as it needs. So names only suspect. The body is then traced where the two have different sizes, and
what that trace raises decides.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import spmd.checker._reports as report
from spmd._jaxprs.facts import kernel_around
from spmd._jaxprs.lines import called_at, line_of
from spmd._jaxprs.walker import COMMUNICATES, Domain, Equation, Held, Rule, Variable, opened, shape_of, walk
from spmd.checker._claims import OVERLAP, arguments_of, claim_of
from spmd.checker._finding import Finding, found
from spmd.checker._history import History
from spmd.checker._table import NEW, TABLE, groups
from spmd.errors import SizeError
from spmd.language import Layout

Part = tuple[str, int]  # a name, and the size on the whole array
Label = tuple[Part, ...]  # what a dimension is called: `(b s)` has two parts; empty where nobody named it
Labels = tuple[Label, ...]


class Names(Domain):
    """What each dimension is called, and how large it is on the whole array.

    Strings give names: that of a kernel to its arguments, that of a verb to its result. From there they go where the
    rules of the primitives send the dimension. A name is only shown where the whole dimension still has its size.
    """

    rules: ClassVar[Mapping[str, Rule]] = {"spmd_layout": lambda walk, eqn, operands: walk.marked(eqn, *operands)}

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def constant(self, var: Variable | None, value: Any) -> Labels:
        return ((),) * len(shape_of(var) if var is not None else getattr(value, "shape", ()))

    def step(self, eqn: Equation, operands: Sequence[Labels]) -> list[Labels]:
        name, given = eqn.primitive.name, operands[0] if operands else ()
        entry = TABLE.get(name)
        if entry is not None:
            shaped = [one for one in operands if one] if entry.says == "elementwise" else []
            if shaped and all(one is shaped[0] for one in shaped):  # the most frequent equation of a program
                return [shaped[0]]
            return self._mapped(entry.map(eqn), eqn, operands)
        if name == "reshape":
            return [_regrouped(given, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))]
        if name == "gather":
            return [_picked(eqn, *operands)]
        moved = name in COMMUNICATES and len(operands) == len(eqn.outvars)
        like = operands if moved else [given] * len(eqn.outvars)
        pairs = zip(like, eqn.outvars, strict=True)
        return [one if len(one) == len(shape_of(v)) else self.constant(v, None) for one, v in pairs]

    def _mapped(self, m: Any, eqn: Equation, operands: Sequence[Labels]) -> list[Labels]:
        known: dict[int, Label] = {}
        for labels, given in zip(m.operands, operands, strict=False):
            for label, parts in zip(labels, given, strict=False):
                if label is not NEW and parts:
                    known[label] = self.met(known[label], parts) if label in known else parts
        result = tuple(() if label is NEW else known.get(label, ()) for label in m.result)
        return [(*result, *[()] * len(shape_of(v)))[: len(shape_of(v))] for v in eqn.outvars]

    def met(self, one: Label, other: Label) -> Label:
        """What a dimension is called that two operands have."""
        return one

    def marked(self, eqn: Equation, given: Labels) -> list[Labels]:
        """A string names the dimensions of a value; what `...` stands for keeps its names."""
        mapped = eqn.params.get("mapped", ())
        return [self.named(eqn.params["layout"], given, shape_of(eqn.outvars[0]), self.sizes, mapped)]

    def named(
        self, layout: Layout, given: Labels, shape: Sequence[int], sizes: Mapping[str, int], mapped: Sequence[int] = ()
    ) -> Labels:
        """The names that a layout gives to a block, or where `sizes` are none, to a whole array."""
        claim = claim_of(layout)
        places = claim.at(len(shape), mapped)
        found = list(given)
        dims = [dim for dim in layout.dims if not dim.ellipsis]
        for place, dim, axes in zip(places or (), dims, (*claim.before, *claim.behind), strict=bool(places)):
            atoms = [atom for atom in dim.atoms if atom.name not in ("_", "1")]
            if axes is OVERLAP or len(atoms) < len(dim.atoms) or len(atoms) > 1:
                continue
            whole = shape[place]
            for axis in axes[0]:
                whole *= sizes.get(axis, 1)
            found[place] = ((atoms[0].name, whole),) if atoms[0].named else ()
        return tuple(found)

    def join(self, one: Labels, other: Labels) -> Labels:
        return tuple(a if a == b else () for a, b in zip(one, other, strict=True))

    def may_not_run(self, value: Labels, start: Labels) -> Labels:
        return value

    def sliced(self, value: Labels, operand: Any) -> Labels:
        return value[1:]

    def stacked(self, value: Labels, result: Any) -> Labels:
        return ((), *value)

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Labels]) -> Sequence[Labels]:
        """A kernel's own string says what its arguments are called."""
        entering = list(operands)
        body = opened(part.jaxpr)[0]
        for i, leaf in arguments_of(eqn, kernel_around(self.callers)).items():
            entering[i] = self.named(leaf.layout, entering[i], shape_of(body.invars[i]), self.sizes)
        return self.run(eqn, part, entering)


def _picked(eqn: Equation, given: Labels, indices: Labels) -> Labels:
    """The names of what indices pick: those of the indices, and of the dimensions that are taken whole."""
    numbers, taken, before = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    window = iter([given[d] if taken[d] == n else () for d, n in enumerate(before) if d not in gone])
    rows = iter(indices[:-1])
    return tuple(next(window if d in numbers.offset_dims else rows) for d in range(len(shape_of(eqn.outvars[0]))))


def _regrouped(given: Labels, old: Sequence[int], new: Sequence[int]) -> Labels:
    """The names after a reshape: merged ones go together, and those that were merged are taken apart again."""
    if 0 in old or len(given) != len(old):
        return ((),) * len(new)
    out: list[Label] = [()] * len(new)
    for before, after in groups(old, new):
        parts = [part for d in before for part in given[d]] if all(given[d] for d in before) else []
        if len(after) == 1:
            out[after.start] = tuple(parts)
        elif len(parts) == len(after):
            for d, part in zip(after, parts, strict=True):
                out[d] = (part,)
    return tuple(out)


# --- what strings call otherwise --------------------------------------------------------------------------------------

_COMPARED = ("operand", "annotate", "output")  # what has come with names; a verb's result has those of its right side


class Called(NamedTuple):
    """A name that has the size of another one, on a dimension of so many elements here.

    Attributes:
      name: The name.
      size: How long the dimension was where it got the name. Of another length, it is another dimension.
      alike: The names of its kernel that have one size.
      origin: The equation that gave it, and those around.
    """

    name: str
    size: int
    alike: Any
    origin: tuple[Equation, tuple[Equation, ...]]


_MIXED: Any = (Called("", -1, None, ()),)  # two names met: neither is wrong


class Suspect(NamedTuple):
    """A string that calls dimensions otherwise than they came.

    Attributes:
      eqn: What it says.
      callers: The equations around.
      wrong: The names that dimensions came with, by their places in the string.
    """

    eqn: Equation
    callers: tuple[Equation, ...]
    wrong: Mapping[int, Called]


class Misnamed(Names):
    """Which strings call a dimension otherwise than it came. No sizes of axes are needed.

    Attributes:
      root: The jaxpr that is walked.
      calls: Those in which a dimension is called otherwise.
    """

    rules: ClassVar[Mapping[str, Rule]] = {"spmd_names": lambda walk, eqn, operands: walk.said(eqn, *operands)}

    def __init__(self, root: Any) -> None:
        super().__init__({})
        self.root = root
        self.calls: set[str] = set()

    @functools.cached_property
    def history(self) -> History:
        return History(self.root)

    def context(self) -> tuple[()]:
        return ()

    def step(self, eqn: Equation, operands: Sequence[Labels]) -> list[Labels]:
        """What moves between devices is the same dimension, however long it is here."""
        outs = super().step(eqn, operands)
        if eqn.primitive.name not in COMMUNICATES:
            return outs
        long = lambda label, n: (label[0]._replace(size=n),) if len(label) == 1 and label is not _MIXED else label
        pairs = zip(outs, eqn.outvars, strict=True)
        return [tuple(map(long, labels, shape_of(var))) for labels, var in pairs]

    def said(self, eqn: Equation, given: Labels) -> list[Labels]:
        """Compare the names that a string gives with those that the value came with. Where they differ once, nothing is
        compared again."""
        layout, alike, shape = eqn.params["layout"], eqn.params["alike"], shape_of(eqn.outvars[0])
        call, compared = eqn.params["call"], eqn.params["role"] in _COMPARED
        places = claim_of(layout).at(len(shape), eqn.params.get("mapped", ()))
        dims, out = [(i, dim) for i, dim in enumerate(layout.dims) if not dim.ellipsis], list(given)
        where, wrong = (eqn, tuple(self.callers)), {}
        for place, (i, dim) in zip(places or (), dims, strict=bool(places)):
            if len(dim.atoms) != 1 or (name := dim.names[0]) not in alike.names or out[place] is _MIXED:
                continue
            [have] = out[place] if len(out[place]) == 1 else [None]
            if have is None or have.alike is not alike or have.size != shape[place]:
                out[place] = (Called(name, shape[place], alike, where),)
            elif have.name != name:
                wrong[i], out[place] = have, _MIXED
            if not compared and call in self.calls:  # what comes of a mistake
                out[place] = _MIXED
        if wrong and compared:
            self.findings.append(Suspect(*where, wrong))
            self.calls.add(call)
        return [tuple(out)]

    def met(self, one: Label, other: Label) -> Label:
        return one if _names_of(one) == _names_of(other) else _MIXED

    def join(self, one: Labels, other: Labels) -> Labels:
        return tuple((a and b and self.met(a, b)) or a or b for a, b in zip(one, other, strict=True))

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Labels]) -> Sequence[Labels]:
        return self.run(eqn, part, operands)


def _names_of(label: Any) -> list[tuple[str, Any]]:
    return [(part.name, part.alike) for part in label]


def misnamed(jaxpr: Any, kernel: str) -> list[Finding]:
    """The strings that take a dimension for another one of its size. Not certain is what cannot be traced for another
    reason where the two have different sizes."""
    domain = Misnamed(jaxpr)
    walk(jaxpr, [domain.constant(var, None) for var in opened(jaxpr)[0].invars], domain)
    findings: list[Finding] = []
    for eqn, callers, wrong in domain.findings:
        said = [dim.names for dim in eqn.params["layout"].dims]
        raised = {i: have.alike.apart(*sorted((*said[i], have.name))) for i, have in wrong.items()}
        kept = {i: have for i, have in wrong.items() if None not in raised[i]}  # of a trace that ends, sizes may differ
        if not kept:
            continue
        every = [error for i in kept for error in raised[i]]
        ours = [one.fault.call or "" for one in every if isinstance(one, SizeError)]
        certain = any(one in call for one in ours for call in domain.calls)
        domain.callers[:] = callers
        fault = report.called_otherwise(domain, eqn, kept, [] if certain else every[:1])
        line = line_of(eqn, callers) or domain.history.line(eqn.invars[0]) or called_at()
        findings.append(found(fault, "name", line, certain))
    return findings
