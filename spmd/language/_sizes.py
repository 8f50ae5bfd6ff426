"""Binding names to sizes: what shapes say of a layout's names, where each size came from, and what does not fit.

A size is that of the whole array, also where the shapes are those of shards. What does not fit is a `Misfit`, a fact:
its rule is one sentence, the same for a kernel, a call, a layout and a picture.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

from spmd._python.rooms import nearest
from spmd.errors import Fault, MeshError, did_you_mean
from spmd.language._syntax import Atom, Dim, Span

# --- mesh axes: how they are given, into how many blocks they divide, and what is said where the mesh lacks one -------


def axes_tuple(axes: str | Iterable[str] | None) -> tuple[str, ...]:
    """Mesh axes as a tuple, as an argument or an entry of a PartitionSpec gives them: one name, several, or None."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def axes_code(axes: Sequence[str]) -> str:
    """Mesh axes as Python has them: `"dp"`, `("dp", "tp")`."""
    return f'"{axes[0]}"' if len(axes) == 1 else str(tuple(axes)).replace("'", '"')


def axes_product(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Into how many blocks the axes divide."""
    total = 1
    for axis in axes:
        total *= sizes[axis]
    return total


def mesh_text(sizes: Mapping[str, int]) -> str:
    """A mesh in a message.

    >>> mesh_text({"dp": 2, "tp": 4})
    'mesh dp=2, tp=4'
    """
    return "mesh " + ", ".join(f"{axis}={size}" for axis, size in sizes.items()) if sizes else "a mesh without axes"


def axis_span(source: str, axis: str) -> tuple[int, int] | None:
    """Return where a mesh axis stands in a string: behind a slash, or in a mark."""
    found = re.search(rf"(?:/|[:,]\s*)({re.escape(axis)})\b", source)
    return None if found is None else found.span(1)


def with_axis(source: str, axis: str, known: Iterable[str]) -> str | None:
    """A string with a known axis in place of an unknown one that is surely meant for it, in quotes; None if none is.

    >>> with_axis("b/pd d", "pd", ["dp", "tp"]), with_axis("e/ep", "ep", ["dp", "tp"])
    ('"b/dp d"', None)
    """
    near = nearest(axis, known)
    sure = near and (sorted(near) == sorted(axis) or difflib.SequenceMatcher(None, axis, near).ratio() > 0.7)
    text = sure and near and re.sub(rf"((?:/|[:,]\s*)){re.escape(axis)}\b", rf"\g<1>{near}", source)
    return None if not text or text == source or "\n" in text else f'"{text}"'


def check_axes(
    axes: Iterable[str], sizes: Mapping[str, int], *, call: str | None = None, source: str | None = None
) -> None:
    """Complain about a mesh axis that the mesh does not have.

    Args:
      axes: The axes that are asked for.
      sizes: Those of the mesh, with their sizes.
      call: The call, for the message.
      source: The string in it that names the axes.

    Raises:
      MeshError: With the axes of the mesh, in mesh order, and the nearest name.
    """
    for axis in axes:
        if axis not in sizes:
            rule = f"the mesh has no axis {axis!r}{did_you_mean(axis, sizes) or '.'}"
            span = None if source is None else axis_span(source, axis)
            fix = None if source is None else with_axis(source, axis, sizes)
            raise MeshError(rule, call=call, source=source, span=span, got=[mesh_text(sizes)], fix=fix)


Shape = Sequence[int | None]


class Dims(Protocol):
    """What binding reads of a `Layout`."""

    dims: tuple[Dim, ...]

    @property
    def short(self) -> str: ...


class Size(NamedTuple):
    """The size of a name, where it came from, and the axes that divide it in any array."""

    size: int
    origin: str
    axes: tuple[str, ...] = ()


class Bound(NamedTuple):
    """What shapes say.

    Attributes:
      sizes: The size of each name.
      dims: For each array its dimensions, `...` written out, with their sizes; empty where the rank is wrong.
      faults: What does not fit.
    """

    sizes: dict[str, Size]
    dims: list[list[tuple[Dim, int | None]]]
    faults: list[Misfit]


@dataclass(frozen=True, slots=True)
class Misfit:
    """What does not fit, where, and which part of the layout says otherwise."""

    where: str
    span: Span | None

    @property
    def rule(self) -> str:
        """Say what is wrong, without a full stop."""
        raise NotImplementedError

    @property
    def advice(self) -> str | None:
        return None

    @property
    def told(self) -> str:
        """The rule and the advice, as one entry of a list."""
        return self.rule if self.advice is None else f"{self.rule}; {self.advice}"


def slashed(layout: Dims, axes: Container[str], rank: int) -> str | None:
    """The layout with a slash before each dimension that is called like a mesh axis, if it then has this rank."""
    bare = [dim.short for dim in layout.dims[1:] if dim.short in axes]
    if not bare or len(layout.dims) - len(bare) != rank:
        return None
    return re.sub(rf" (?=(?:{'|'.join(bare)})\b)", "/", layout.short)


@dataclass(frozen=True, slots=True)
class WrongRank(Misfit):
    layout: Dims
    rank: int
    shape: Shape = ()
    mesh: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def rule(self) -> str:
        count = sum(not dim.ellipsis for dim in self.layout.dims)
        least = "at least " if count < len(self.layout.dims) else ""
        return f'"{self.layout.short}" has {least}{count} dimension{"s" * (count != 1)}, not {self.rank}'

    @property
    def unspaced(self) -> str | None:
        """The layout with a space between the letters of its one name, if that has as many dimensions."""
        short = self.layout.short
        alone = len(self.layout.dims) == 1 and short.isalpha() and len(short) == self.rank > 1
        return f'"{" ".join(short)}"' if alone else None

    @property
    def advice(self) -> str | None:
        if self.unspaced:
            return f"names are separated by spaces: {self.unspaced}"
        if text := slashed(self.layout, self.mesh, self.rank):
            return f'a mesh axis stands behind a slash: "{text}"'
        one_more = self.layout.dims and len(self.layout.dims) + 1 == self.rank
        stacked = [axis for axis, n in self.mesh.items() if one_more and self.shape[:1] == (n,)]
        told = [f'lax.all_gather(x, "{axis}") puts blocks on a new first dimension' for axis in stacked]
        return f"{', and '.join(told)}: with tiled=True it joins them" if told else None


@dataclass(frozen=True, slots=True)
class Indivisible(Misfit):
    name: str
    size: int
    axes: tuple[str, ...]
    parts: int

    @property
    def rule(self) -> str:
        name = "" if self.name == "_" else f"{self.name} of "
        return f"{name}size {self.size} does not divide into the {self.parts} blocks of {'/'.join(self.axes)}"

    @property
    def advice(self) -> str:
        if self.name == str(self.size):
            axes = "/".join(self.axes)
            return f"{self.name} without /{axes}: each device along {axes} holds all of it"
        more = -self.size % self.parts
        name = "it" if self.name == "_" else self.name
        whole = f", or leave it whole: {name} without /{'/'.join(self.axes)}" if 0 < self.size < self.parts else ""
        return f"pad {name} by {more} to {self.size + more}{whole}"


@dataclass(frozen=True, slots=True)
class Unequal(Misfit):
    """Two sizes of one name. Divided over an axis of `blocks` too, the name would have the first size."""

    name: str
    size: int
    first: Size
    axes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    local: int | None = None
    layout: Dims | None = None

    @property
    def rule(self) -> str:
        part = "" if self.local in (None, self.size) else f" ({self.local} on each device)"
        return f"{self.name} has two sizes: {self.size} here{part}, and {self.first.size} from {self.first.origin}"

    @property
    def own(self) -> str | None:
        """Return what a dimension of another size may be, whose name is divided."""
        if self.local is None or not self.first.axes:
            return None
        return (
            f"{self.name} is divided over {'/'.join(self.first.axes)}: what the body slices, reshapes or concatenates\n"
            "is each device's own block; gather it first, or say what becomes of the blocks"
        )

    @property
    def advice(self) -> str | None:
        if not self.blocks or self.layout is None:
            return self.own
        if self.first.axes and self.blocks[0] not in self.first.axes:
            return self.own
        block, label = "/".join([self.name, *self.axes, self.blocks[0]]), self.where.rpartition(", ")[0]
        have = " ".join(block if dim.span == self.span else dim.short for dim in self.layout.dims)
        here = self.size if self.local is None else self.local
        return (
            f"{self.first.size} over {self.blocks[0]} is {here} on each device: "
            f"declare {block} where it stays divided,\n"
            f'or gather it first: all_gather({label or "x"}, "{have} -> {self.layout.short}")'
        )


@dataclass(frozen=True, slots=True)
class NotLiteral(Misfit):
    literal: int
    size: int

    @property
    def rule(self) -> str:
        return f"the layout says size {self.literal}, and the array has {self.size}"


@dataclass(frozen=True, slots=True)
class NotProduct(Misfit):
    size: int
    factors: tuple[tuple[str, int | None], ...]

    @property
    def rule(self) -> str:
        product = " * ".join(f"{name}={size}" for name, size in self.factors if size is not None)
        unknown = any(size is None for _, size in self.factors)
        return f"the size {self.size} {'does not divide by' if unknown else 'is not'} {product}"


@dataclass(frozen=True, slots=True)
class Narrow(Misfit):
    size: int
    margin: tuple[int, int]

    @property
    def rule(self) -> str:
        return f"size {self.size} is less than the margins {self.margin[0]} and {self.margin[1]} together"


def bind(
    arrays: Iterable[tuple[str, Shape, Dims]],
    mesh: Mapping[str, int],
    *,
    known: Mapping[str, Size] | None = None,
    local: bool = False,
    margins: bool = True,
    together: bool = False,
) -> Bound:
    """Bind the names of layouts to the sizes that shapes give them, and find all that does not fit.

    Args:
      arrays: For each array how messages call it, its shape (None for a size that is not known) and its layout.
      mesh: The sizes of the mesh axes.
      known: Sizes bound before.
      local: Whether the shapes are those of shards.
      margins: Whether the shapes hold the margins of `1+x/a+1`.
      together: Whether `...` stands for the same dimensions in all arrays; `...0`, `...1` are then bound too.
    """
    bound = Bound(dict(known or {}), [], [])
    composites: list[tuple[str, Dim, int | None]] = []
    for label, shape, layout in arrays:
        dims = written_out(layout.dims, len(shape), named=together)
        found: list[tuple[Dim, int | None]] = []
        bound.dims.append(found)
        if dims is None:
            where = f"{label} of shape {tuple(shape)}" if label else f"shape {tuple(shape)}"
            here = (tuple(shape), mesh) if local else ((), mesh)
            bound.faults.append(WrongRank(where, _span(layout), layout, len(shape), *here))
            continue
        for place, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            where = f"{label}, dimension {place}" if label else f"dimension {place}"
            if size is not None:
                inner = size - sum(dim.margin) * margins
                if inner < 0:
                    bound.faults.append(Narrow(where, dim.span, size, dim.margin))
                axes = dim.axes if local else ()
                size = inner * axes_product(axes, mesh) if axes else inner
            found.append((dim, size))
            if dim.composite:
                composites.append((where, dim, size))
            elif size is not None:
                _bind_one(bound, where, dim, size, mesh, layout, local)
    for composite in composites:  # after all others: these may say a factor's size
        _bind_factors(bound, *composite, mesh)
    return bound


def as_fault(faults: Sequence[Misfit], mesh: Mapping[str, int], several: str, **shown: Any) -> Fault:
    """Return what does not fit as the fault of an error: one, or several of which `several` is the rule."""
    axes, first = mesh_text(mesh), faults[0]
    if len(faults) == 1:
        return Fault(f"{first.where}: {first.rule}.", span=first.span, got=[axes], advice=first.advice, **shown)
    return Fault(several, span=first.span, got=[*(f"{one.where}: {one.told}" for one in faults), axes], **shown)


def another_name(names: Iterable[str]) -> str | None:
    """Advice where a name that a signature binds meets a dimension of another size."""
    bound = " and ".join(dict.fromkeys(names))
    said = f"use another name, or _, for another dimension: the signature binds {bound} for the whole body"
    return said if bound else None


def written_out(dims: Sequence[Dim], rank: int, *, named: bool = False) -> list[Dim] | None:
    """The dimensions of an array of this rank, unnamed ones or `...0`, `...1` in place of `...`; None if none fit."""
    out: list[Dim] = []
    extra = rank - len(dims)
    for dim in dims:
        if not dim.ellipsis:
            out.append(dim)
            continue
        for i in range(extra + 1):
            out.append(Dim((Atom(f"...{i}" if named else "_", (), None, dim.span),), span=dim.span))
    return out if len(out) == rank else None


def indivisible(
    name: str, size: int, axes: Sequence[str] | None, mesh: Mapping[str, int], where: str = "", span: Span | None = None
) -> Indivisible | None:
    """Return what is wrong with dividing a size over mesh axes, if anything."""
    parts = axes_product(axes, mesh) if axes else 1
    return Indivisible(where, span, name, size, tuple(axes or ()), parts) if size % parts else None


def _bind_one(
    bound: Bound, where: str, dim: Dim, size: int, mesh: Mapping[str, int], layout: Dims, local: bool
) -> None:
    """Bind a dimension of one atom."""
    [atom] = dim.atoms
    if dim.axes and not local:  # the blocks of a shard divide their sum
        fault = indivisible(atom.name, size, dim.axes, mesh, where, dim.span)
        bound.faults.extend([fault] if fault else [])
    if atom.size is not None and atom.size != size:
        bound.faults.append(NotLiteral(where, dim.span, atom.size, size))
    if atom.named:
        first = bound.sizes.setdefault(atom.name, Size(size, where))
        if first.size == size and not {*dim.axes} <= {*first.axes}:
            bound.sizes[atom.name] = first._replace(axes=(*first.axes, *(a for a in dim.axes if a not in first.axes)))
        if first.size != size:
            here = size // axes_product(dim.axes, mesh) if local else None
            over = [a for a, n in mesh.items() if local and size * n == first.size and a not in dim.axes]
            over.sort(key=lambda a: a not in first.axes)
            bound.faults.append(Unequal(where, dim.span, atom.name, size, first, dim.axes, tuple(over), here, layout))


def _bind_factors(bound: Bound, where: str, dim: Dim, size: int | None, mesh: Mapping[str, int]) -> None:
    """Bind the last unknown factor of a composite; with more unknown ones, none."""
    factors = {atom.name: bound.sizes[atom.name].size if atom.name in bound.sizes else None for atom in dim.atoms}
    unknown = [name for name, one in factors.items() if one is None]
    rest = prod(one for one in factors.values() if one is not None)
    fits = size is None or len(unknown) > 1 or (size % rest == 0 if unknown and rest else size == rest)
    if len(unknown) == 1 and size is not None and fits and rest:
        bound.sizes[unknown[0]] = Size(size // rest, where)
        factors[unknown[0]] = size // rest
    sized = [(atom, one) for atom in dim.atoms if (one := factors[atom.name]) is not None]
    wrong = [indivisible(atom.name, one, atom.axes, mesh, where, atom.span) for atom, one in sized]
    if not any(wrong) and size is not None:
        wrong = [indivisible(f"({' '.join(factors)})", size, dim.axes, mesh, where, dim.span)]
    bound.faults.extend(one for one in wrong if one)
    if not fits and size is not None:
        bound.faults.append(NotProduct(where, dim.span, size, tuple(factors.items())))


def _span(layout: Dims) -> Span | None:
    """Return where all dimensions stand."""
    return (layout.dims[0].span[0], layout.dims[-1].span[1]) if layout.dims else None
