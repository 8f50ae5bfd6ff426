"""What the dimensions of values are called, and the strings that call them otherwise.

Strings give names, and the maps of the table carry them from operands to results. Two dimensions of one size can be
taken for each other, and no size shows it. So what a string says of a value is compared with the names that the value
came with. A slice that takes all of a longer dimension leaves no trace, and neither does a table of which a program
takes as many rows as it needs. So names only suspect. The body is then traced where the two have different sizes, and
what that trace raises decides.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import spmd.checker._reports as report
from spmd._jaxprs.facts import Apart, kernel_around
from spmd._jaxprs.lines import called_at, line_of
from spmd._jaxprs.primitives import primitive_of
from spmd._jaxprs.walker import COMMUNICATES, Domain, Equation, Held, Rule, Variable, opened, shape_of, walk
from spmd.checker._claims import OVERLAP, arguments_of, claim_of
from spmd.checker._finding import Finding, found
from spmd.checker._history import History
from spmd.checker._table import NEW, TABLE, groups
from spmd.errors import ReplicationError, SizeError
from spmd.language import Layout

Part = tuple[str, int]  # a name, and the size on the whole array
Where = tuple[Any, tuple[Any, ...]]  # an equation, and those around it
Label = tuple[Any, ...]  # what a dimension is called: `(b s)` has two parts; empty where no string named it
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


@dataclass(frozen=True, slots=True)
class Called:
    """A name that a kernel's signature gave to a dimension, or the string of a call.

    Attributes:
      name: The name.
      kernel: Whose name it is, by number.
      gone: The names that products have summed over since the signature or a verb gave it: what the next layer calls
        "d" this one calls "e". A string may call it one of these. None if it may be called anything.
      origin: The argument or the call, and of a call the equation, and those around.
    """

    name: str
    kernel: int
    gone: frozenset[str] | None = frozenset()
    origin: tuple[str, Where | None] = field(default=("", None), compare=False)


_MIXED: Any = (Called("", -1),)  # two names met: neither is wrong


class Suspect(NamedTuple):
    """A string that calls dimensions otherwise than they came.

    Attributes:
      where: The equation that says what the string says, and those around.
      apart: What tells the names of its kernel apart.
      wrong: The names that dimensions came with, by their places in the string.
    """

    where: Where
    apart: Apart
    wrong: Mapping[int, Called]


class Misnamed(Names):
    """Which strings call a dimension otherwise than it came. No sizes of axes are needed.

    Attributes:
      root: The jaxpr that is walked.
      kernels: The one that it is the body of, and those that it calls. The names of others, inlined in these, are not
        followed.
      here: The number of the one in whose body the walk is.
      calls: Those in which a dimension is called otherwise.
    """

    rules: ClassVar[Mapping[str, Rule]] = {"spmd_names": lambda walk, eqn, operands: walk.said(eqn, *operands)}

    def __init__(self, root: Any, own: Apart | None) -> None:
        super().__init__({})
        self.root = root
        self.kernels, self.here = [own], 0
        self.calls: set[str] = set()

    @functools.cached_property
    def history(self) -> History:
        return History(self.root)

    def context(self) -> int:
        return self.here

    def entered(self, atoms: Sequence[Variable]) -> list[Labels]:
        """The arguments of the kernel that the walk enters, as its signature calls them."""
        apart, out = self.kernels[self.here], [self.constant(atom, None) for atom in atoms]
        for at, leaf in enumerate(apart.arguments if apart else (), len(atoms) - len(apart.arguments if apart else ())):
            out[at] = self.as_said(leaf.layout.with_rank(len(out[at])), f"argument {leaf.path}")
        return out

    def as_said(self, layout: Layout, what: str, where: Where | None = None) -> Labels:
        """The names of a layout without `...`, which an argument or a call gave."""
        return tuple(
            [
                tuple(
                    [
                        Called(name, self.here, frozenset() if where is None else None, (what, where))
                        for name in dim.names
                    ]
                )
                for dim in layout.dims
            ]
        )

    def run(self, eqn: Equation, part: Held, operands: Sequence[Labels]) -> list[Labels]:
        before = self.here
        if (apart := getattr(eqn.params.get("name"), "apart", None)) is not None:
            with contextlib.suppress(ValueError):  # a part of a derivative, which is given other arrays
                self.kernels.append(apart(eqn.invars))
                self.here = len(self.kernels) - 1
                operands = self.entered(eqn.invars)
        outs = super().run(eqn, part, operands)
        self.here = before
        return outs

    def step(self, eqn: Equation, operands: Sequence[Labels]) -> list[Labels]:
        name, outs = eqn.primitive.name, super().step(eqn, operands)
        if primitive_of(eqn).pointwise or (name in TABLE and TABLE[name].says in ("elementwise", "permuted")):
            return outs
        known = primitive_of(eqn).dims.partition(":")[0]
        if known == "reduced":
            return outs
        summed = self._summed(eqn, operands) if known == "contracted" else None
        more = lambda one: replace(one, gone=None if summed is None or one.gone is None else one.gone | summed)
        return [tuple([label if label is _MIXED else tuple(map(more, label)) for label in labels]) for labels in outs]

    def _summed(self, eqn: Equation, operands: Sequence[Labels]) -> frozenset[str]:
        """The names of the dimensions that a product sums over."""
        over = zip(eqn.params["dimension_numbers"][0], operands, strict=True)
        return frozenset(one.name for dims, labels in over for d in dims for one in labels[d])

    def said(self, eqn: Equation, given: Labels) -> list[Labels]:
        """Compare the names that a string gives with those that the value came with. Where they differ once, nothing is
        compared again."""
        layout, apart, where = eqn.params["layout"], self.kernels[self.here], (eqn, tuple(self.callers))
        if apart is None or apart.bound != eqn.params["of"]:
            return [given]
        known, sizes, mapped = eqn.params["known"], dict(apart.bound), eqn.params.get("mapped", ())
        places = claim_of(layout).at(len(given), mapped)
        dims, out = [(i, dim) for i, dim in enumerate(layout.dims) if not dim.ellipsis], list(given)
        known = None if known is None or known.origin in self.calls else known  # what comes of a mistake
        if known is not None and len(known.layout.dims) == len(given):  # the result of a verb
            out = [a or b for a, b in zip(given, self.as_said(known.layout, known.origin, (known, ())), strict=True)]
        made, wrong = eqn.params["role"] in ("made", "created"), dict[int, Called]()
        held = {one.name for label in out for one in label}
        for place, (i, dim) in zip(places or (), dims, strict=bool(places)):
            if len(dim.atoms) != 1 or (name := dim.names[0]) not in apart.alike or (out[place] is _MIXED and not made):
                continue
            ours = [one for one in out[place] if one.kernel == self.here and one.name in sizes]
            # Of another length, it is another dimension.
            anew = made or len(out[place]) != len(ours) or [sizes[one.name].size for one in ours] != [sizes[name].size]
            gone = () if anew else ours[0].gone
            if anew or (name not in held and (gone is None or name in gone)):
                out[place] = (Called(name, self.here, frozenset() if made else None, (eqn.params["call"], where)),)
            elif ours[0].name != name:
                wrong[i], out[place] = ours[0], _MIXED
        if wrong:
            self.findings.append(Suspect(where, apart, wrong))
            self.calls.add(eqn.params["call"])
        return [tuple(out)]

    def met(self, one: Label, other: Label) -> Label:
        return one if [part.name for part in one] == [part.name for part in other] else _MIXED

    def join(self, one: Labels, other: Labels) -> Labels:
        return tuple((a and b and self.met(a, b)) or a or b for a, b in zip(one, other, strict=True))

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Labels]) -> Sequence[Labels]:
        return self.run(eqn, part, operands)


def misnamed(jaxpr: Any, own: Apart | None = None) -> list[Finding]:
    """The strings that take a dimension for another one of its size. Where the two cannot have different sizes for
    another reason, a string is not certain to be wrong, and one after other than elementwise code is not told.

    Args:
      jaxpr: A body, or a program that calls kernels.
      own: What tells the names of the body apart.
    """
    domain = Misnamed(jaxpr, own)
    walk(jaxpr, domain.entered(opened(jaxpr)[0].invars), domain)
    findings: list[Finding] = []
    for (eqn, callers), apart, wrong in domain.findings:
        said = [dim.names for dim in eqn.params["layout"].dims]
        raised = {i: apart.raised(*sorted((*said[i], have.name))) for i, have in wrong.items()}
        kept = {i: have for i, have in wrong.items() if None not in raised[i]}  # of a trace that ends, sizes may differ
        if not kept:
            continue
        every = [error for i in kept for error in raised[i]]
        ours = [one.fault.call for one in every if isinstance(one, ReplicationError | SizeError) and one.fault.call]
        certain = any(one in call for one in ours for call in domain.calls)
        if not certain and all(have.gone != frozenset() for have in kept.values()):
            continue  # a body that needs equal sizes, such as a layer whose result is its next argument
        domain.callers[:] = callers
        fault = report.called_otherwise(domain, eqn, apart.kernel, kept, [] if certain else every[:1])
        line = line_of(eqn, callers) or domain.history.line(eqn.invars[0]) or called_at()
        findings.append(found(fault, "name", line, certain))
    return list(dict.fromkeys(findings))
