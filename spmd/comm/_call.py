"""One call of a string operation: its pattern, resolved; its arrays, checked; its errors, with context.

Every operation opens a `Call`, turns each array into an `Operand` (the array with one axis per *factor*:
composite dimensions opened, `...` expanded) and hands back `call.result(...)`. What is checked on the spot
is checked here, for all operations alike: rank, sizes, names, mesh axes, JAX's own type and tags.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _compat
from spmd.comm import _lax
from spmd.comm._keywords import as_array, call_text, kind_of, resolve, split_keywords
from spmd.comm._marks import layout_p, mark, same_axes, tag_of
from spmd.errors import (
    CommunicationError,
    LayoutError,
    MeshError,
    SizeError,
    SpmdError,
    compose,
    did_you_mean,
)
from spmd.language import Dim, Layout, Pattern
from spmd.mesh import axis_span
from spmd.mode import Frame, current_frame

__all__ = ["Call", "Factor", "Operand", "open_call", "verb_between"]

Span = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Factor:
    """One named factor of an operand's dimension, with its size here and on the whole array."""

    name: str
    axes: tuple[str, ...]
    local: int
    size: int
    bracket: bool = False
    span: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Operand:
    """An array with one axis per factor of its layout."""

    x: Any
    factors: tuple[Factor, ...]
    layout: Layout

    def position(self, name: str) -> int:
        """Which array axis the factor `name` is."""
        return next(i for i, f in enumerate(self.factors) if f.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.factors)


# --- opening a call -----------------------------------------------------------------------------------------


def open_call(
    name: str,
    pattern: Any,
    binds: Mapping[str, Any],
    *,
    arrays: Sequence[Any] = (),
    inputs: int | None = 1,
    outputs: int | None = 1,
    arrow: bool = True,
    frame: Frame | None = None,
) -> Call:
    """Parse and resolve the pattern of one call, and check its keywords.

    Args:
      name: The operation, for messages.
      pattern: The user's string.
      binds: The user's keywords, sizes and axes together.
      arrays: The arrays given, to count them and to catch a string that came first.
      inputs: How many layouts the left side has; None for as many as there are arrays.
      outputs: How many layouts the right side has; None for any number.
      arrow: Whether the pattern has an arrow.
    """
    frame = frame or current_frame(f"spmd.{name}")
    first = next((a for a in arrays if isinstance(a, str)), None)
    if first is not None or not isinstance(pattern, (str, Pattern, Layout)):
        rule = (
            f"the {'pattern' if arrow else 'layout'} is a string, not {kind_of(pattern)}."
            if first is None
            else f"{'the key comes' if name.startswith('random.') else 'arrays come'} first, then the "
            f"{'pattern' if arrow else 'layout'}."
        )
        fix = call_text(name, first or ("b/dp d -> b d" if arrow else "b/dp d"), len(arrays))
        raise LayoutError(compose(rule, call=f"{name}(...)", fix=fix))
    text = call_text(name, pattern, len(arrays))
    parsed = _parse(pattern, text, arrow)
    sizes, axes = split_keywords(text, parsed, binds)
    if frame.watched:
        known = parsed.names if frame.bound else ()
        frame.met((*(a for a in parsed.axis_names if a not in axes), *(n for n in known if n not in sizes)))
    renames = tuple(r for r in frame.renames if r[0] in parsed.axis_names and r[0] not in axes)
    # A mesh axis has one name in a body, whether in a string or handed on by a keyword, as layers do.
    renames += tuple(sorted((name, frame.renamed(one) if frame.renames else one) for name, one in axes.items()))
    try:
        resolved = resolve(parsed, parsed.source, renames, frame.mapping)
    except LayoutError as error:
        raise LayoutError(f"{text}\n{error.args[0]}") from None
    call = Call(name, text, parsed, resolved, frame)
    call.check_counts(len(arrays) if inputs is None else inputs, outputs)
    call.check_mesh()
    for key, size in sizes.items():
        call.bind(key, size, f"the keyword {key}={size}", at=None)
    return call


def _parse(pattern: Any, text: str, arrow: bool) -> Pattern:
    return pattern if isinstance(pattern, Pattern) else Pattern(str(pattern), arrow=arrow, call=text)


@functools.lru_cache(maxsize=4096)
def _axes_of(pattern: Pattern) -> tuple[str, ...]:
    """Every mesh axis of a resolved pattern; asked at each call."""
    return tuple(axis for layout in (*pattern.inputs, *pattern.outputs) for axis in layout.axis_names)


class Call:
    """One call of a string operation."""

    def __init__(self, name: str, text: str, raw: Pattern, pattern: Pattern, frame: Frame):
        self.name = name
        self.text = text
        self.raw = raw
        self.pattern = pattern
        self.frame = frame
        self.sizes: dict[str, tuple[int, str]] = {n: (size, origin) for n, size, origin in frame.bound}

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The call's own text as a scope of names: what is traced inside carries it, and so do its transposes, through
        loops and remat, into the jaxpr, the compiled program and the profiler."""
        return jax.named_scope(" ".join(self.text.split()))

    def fork(self) -> Call:
        """The same call for another leaf of a pytree: sizes bound by one leaf do not bind the next."""
        other = Call(self.name, self.text, self.raw, self.pattern, self.frame)
        other.sizes = dict(self.sizes)
        return other

    # --- errors -------------------------------------------------------------------------------------------

    def fail(
        self,
        rule: str,
        *,
        at: Span = None,
        got: Sequence[str] = (),
        fix: str | None = None,
        error: type[SpmdError] = CommunicationError,
    ) -> NoReturn:
        """Raise `error` with this call, the fault underlined, the mesh and the fix."""
        span = at if at and at[1] > at[0] else None
        raise error(compose(rule, call=self.text, source=self.raw.source, span=span, got=list(got), fix=fix))

    def paste(self, pattern: str, name: str | None = None, **keywords: Any) -> str:
        """The text of another call, to paste."""
        tail = "".join(f', {k}="{v}"' if isinstance(v, str) else f", {k}={v}" for k, v in keywords.items())
        return f'{name or self.name}(x, "{pattern}"{tail})'

    # --- checks of the pattern ----------------------------------------------------------------------------

    def check_counts(self, inputs: int | None, outputs: int | None) -> None:
        left, right = self.pattern.inputs, self.pattern.outputs
        if inputs is not None and len(left) != inputs:
            arrays, layouts = (
                f"{inputs} array{'s' * (inputs != 1)}",
                f"{len(left)} layout{'s' * (len(left) != 1)}",
            )
            self.fail(f"{self.name} was given {arrays}, and the left side has {layouts}.", error=LayoutError)
        if outputs is not None and self.pattern.arrow and len(right) != outputs:
            self.fail(
                f"{self.name} gives {outputs} array, and the right side has {len(right)} layouts.",
                error=LayoutError,
            )

    def check_mesh(self) -> None:
        known = self.frame.axis_names
        for axis in _axes_of(self.pattern):
            if axis not in known:
                hint = did_you_mean(axis, (*known, *(name for name, _ in self.frame.renames)))
                self.fail(
                    f"the mesh has no axis {axis!r}{hint or '.'}",
                    at=axis_span(self.raw.source, axis),
                    got=[self.frame.describe()],
                    error=MeshError,
                )

    # --- sizes --------------------------------------------------------------------------------------------

    def bind(self, name: str, size: int, origin: str, at: Span) -> None:
        """Give a name its global size, or complain about the first binding."""
        known = self.sizes.get(name)
        if known is None:
            self.sizes[name] = (size, origin)
        elif known[0] != size:
            self.fail(
                f"{name} has two sizes: {size} here, and {known[0]} from {known[1]}.",
                at=at,
                got=[f"{name} = {known[0]}: {known[1]}", f"{name} = {size}: {origin}", self.frame.describe()],
                error=SizeError,
            )

    def local(self, size: int, axes: tuple[str, ...], name: str, at: Span, *, fix: str | None = None) -> int:
        """The size here of a dimension of global size `size`: a block in explicit mode, else the whole."""
        parts = self.frame.axis_size(axes) if axes else 1
        if size % parts:
            self.fail(
                f"{name} of size {size} does not divide into the {parts} blocks of {'/'.join(axes)}.",
                at=at,
                got=[self.frame.describe()],
                fix=fix or f"pad {name} by {-size % parts} to {size + -size % parts}",
                error=SizeError,
            )
        return size // parts if self.frame.explicit else size

    def index_dtype(self, size: int, name: str, at: Span = None) -> Any:
        """The dtype of positions along `size` elements: int32, or int64 where they need it and JAX has it."""
        if size <= 2**31:
            return jnp.int32
        if jax.config.jax_enable_x64:
            return jnp.int64
        rule = f"positions along {name}, of {size} elements, do not fit int32, and JAX has no int64 now."
        return self.fail(rule, at=at, fix='jax.config.update("jax_enable_x64", True)', error=SizeError)

    def start(self, factor: Factor) -> Any:
        """Where the block that is held here starts in the whole of a divided factor; of `index_dtype`."""
        dtype = self.index_dtype(factor.size, factor.name, factor.span)
        index = _lax.axis_index(factor.axes, dict(self.frame.sizes))
        return jnp.asarray(index, dtype) * np.asarray(factor.local, dtype)

    def _global(self, local: int, axes: tuple[str, ...], name: str, at: Span) -> int:
        if self.frame.explicit:
            return local * (self.frame.axis_size(axes) if axes else 1)
        self.local(local, axes, name, at)
        return local

    # --- operands -----------------------------------------------------------------------------------------

    def operand(
        self,
        x: Any,
        index: int = 0,
        *,
        layout: Layout | None = None,
        name: str | None = None,
        margins: bool = False,
    ) -> Operand:
        """Check one array against its layout and open its composite dimensions.

        Args:
          x: The array, as large as it is here.
          index: Which layout of the left side.
          layout: Another layout, already resolved.
          name: How messages call the array.
          margins: Whether the operation knows what to do with margins.
        """
        layout = self.pattern.inputs[index] if layout is None else layout
        if not margins:
            self.no_margins(layout)
        label = name or (f"operand {index}" if len(self.pattern.inputs) > 1 else "the array")
        x = as_array(x, label, functools.partial(self.fail, error=LayoutError))
        known = tag_of(x)
        dims = self._dims(layout, x.shape, label)
        # What is known of the placement first: a wrong axis explains a wrong size, not the reverse.
        self._check_type(x, layout, label, known)
        factors: list[Factor] = []
        shape: list[int] = []
        for position, (dim, size) in enumerate(zip(dims, x.shape, strict=True)):
            opened = self._open(dim, size, f"{label}, dimension {position}", position)
            factors += opened
            # a factor's size is that of its block, and the array has the margins too
            shape += [size] if isinstance(dim, Dim) and any(dim.margin) else [f.local for f in opened]
        # What a tag already says needs no note; where an error is explained, a gather's is the line to paste.
        explaining = self.frame.diagnosing and self.name in ("all_gather", "relayout")
        if self.frame.explicit and (explaining or not (known and same_axes(known[0], layout))):
            x = layout_p.bind(x, layout=layout, call=self.text, role="operand")
        return Operand(x if tuple(shape) == x.shape else x.reshape(shape), tuple(factors), layout)

    def no_margins(self, layout: Layout) -> None:
        fault = next((dim for dim in layout.dims if any(dim.margin)), None)
        if fault is not None:
            rule = f"{self.name} has no meaning for a margin: the copies of the neighbours would count twice."
            self.fail(rule, at=fault.span, error=LayoutError)

    def _dims(self, layout: Layout, shape: tuple[int, ...], label: str) -> list[Dim | str]:
        """The layout's dims, `...` replaced by as many marks as the array has dimensions for it."""
        fixed = sum(not d.ellipsis for d in layout.dims)
        extra = len(shape) - fixed
        if extra < 0 or (extra > 0 and not layout.has_ellipsis):
            least = "at least " if layout.has_ellipsis else ""
            self.fail(
                f'"{layout.short}" has {least}{fixed} dimension{"s" * (fixed != 1)}, and {label} has {len(shape)}.',
                at=(layout.dims[0].span[0], layout.dims[-1].span[1]) if layout.dims else None,
                got=[f"{label}: shape {shape}"],
                error=LayoutError,
            )
        dims: list[Dim | str] = []
        for dim in layout.dims:
            dims += [f"...{i}" for i in range(extra)] if dim.ellipsis else [dim]
        return dims

    def _open(self, dim: Dim | str, size: int, origin: str, position: int) -> list[Factor]:
        """The factors of one dimension; one factor's size may be left to find."""
        if isinstance(dim, str):
            self.bind(dim, size, origin, None)
            return [Factor(dim, (), size, size)]
        size -= sum(dim.margin)
        known = [self._known(atom) for atom in dim.atoms]
        local = [
            0 if k is None else self.local(k, a.axes or (), a.name, a.span)
            for a, k in zip(dim.atoms, known, strict=True)
        ]
        unknown = [i for i, k in enumerate(known) if k is None]
        if len(unknown) > 1:
            names = [dim.atoms[i].name for i in unknown]
            rule = f"the sizes of {' and '.join(names)} cannot be read off one dimension of {size}."
            self.fail(rule, at=dim.span, fix=f"{names[-1]}=...", error=SizeError)
        if unknown:
            [i] = unknown
            atom, rest = dim.atoms[i], math.prod(n for j, n in enumerate(local) if j != i)
            if size % rest:
                rule = f"a dimension of {size} ({origin}) does not divide by {rest}."
                self.fail(rule, at=dim.span, got=[self.frame.describe()], error=SizeError)
            local[i] = size // rest
            known[i] = self._global(local[i], atom.axes or (), atom.name, atom.span)
            if atom.name != "_":
                self.bind(atom.name, known[i] or 0, origin, atom.span)
        if math.prod(local) != size:
            self._size_mismatch(dim, size, local, origin)
        return [
            Factor(
                f"_{position}" if a.name == "_" else a.name,
                a.axes or (),
                n,
                n if k is None else k,
                dim.bracket,
                a.span,
            )
            for a, n, k in zip(dim.atoms, local, known, strict=True)
        ]

    def _known(self, atom: Any) -> int | None:
        if atom.size is not None:
            return atom.size
        entry = self.sizes.get(atom.name) if atom.name != "_" else None
        return None if entry is None else entry[0]

    def _size_mismatch(self, dim: Dim, size: int, expected: Sequence[int], origin: str) -> NoReturn:
        here = " on each device" if self.frame.explicit else ""
        got = [f"{origin}: size {size}{here}"]
        got += [
            f"{a.name} = {self.sizes[a.name][0]}: {self.sizes[a.name][1]}" for a in dim.atoms if a.name in self.sizes
        ]
        rule = f"{Layout.from_dims((dim,)).short} is {math.prod(expected)}{here}, but the array has {size}."
        self.fail(rule, at=dim.span, got=[*got, self.frame.describe()], error=SizeError)

    def _check_type(self, x: Any, layout: Layout, label: str, known: tuple[Layout, str] | None) -> None:
        """What JAX's type and the tag of a value already contradict, before the trace ends."""
        if known is not None:
            self._check_tag(known, layout, label)
        if not self.frame.explicit or not layout.unreduced:
            return
        manual = _compat.manual_axes()
        have = _compat.varying_axes(x) | _compat.unreduced_axes(x)
        equal = self.frame.in_mesh_order({a for a in layout.unreduced if a in manual and a not in have})
        if equal:
            n = self.frame.axis_size(equal)
            at = self.raw.source.find("{U:")
            self.fail(
                f"{label} is equal on {', '.join(equal)}, so it is no partial sum: summing {n} "
                f"copies multiplies it by {n}.",
                at=None if at < 0 else (at, self.raw.source.find("}", at) + 1),
                got=[f"{label}: {jax.typeof(x)}", self.frame.describe()],
                fix="leave out the {U:} mark, and the psum",
            )

    def _check_tag(self, known: tuple[Layout, str], layout: Layout, label: str) -> None:
        have, origin = known
        lost = self.frame.in_mesh_order(set(have.unreduced) - set(layout.unreduced))
        if lost:
            done = Layout.from_dims(have.dims, reduced=have.reduced)
            self.fail(
                f'{label} is a partial sum on {", ".join(lost)}, and is read as "{layout.short}", which is complete.',
                got=[f'"{have.short}": {origin}', self.frame.describe()],
                fix=f'psum(x, "{have.short} -> {done.short}")',
            )
        written, layout = layout, _written_out(layout, have)
        if same_axes(have, layout, marks=False) is not False:
            return
        here, there = _axes_by_dim(layout), _axes_by_dim(have)
        position = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
        verb = verb_between(have, layout)
        wanted, meant = _with_axes(have, layout), _with_axes(layout, have)
        self.fail(
            f'{label} holds "{have.short}", and is read as "{written.short}".',
            at=layout.dims[position].span,
            got=[f'"{have.short}": {origin}', self.frame.describe()],
            fix=f'{verb}(x, "{have.short} -> {wanted.short}") first, or "{meant.short}" in this string',
        )

    # --- results ------------------------------------------------------------------------------------------

    def factor(self, atom: Any) -> Factor:
        """The factor that an atom of the right side stands for."""
        size = self._known(atom)
        if size is None:
            self.fail(
                f"the size of {atom.name} is not known.",
                at=atom.span,
                fix=f"{atom.name}=...",
                error=SizeError,
            )
        axes = atom.axes or ()
        return Factor(atom.name, axes, self.local(size, axes, atom.name, atom.span), size, span=atom.span)

    def ellipsis_shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions that `...` stands for."""
        return tuple(self.sizes[f"...{i}"][0] for i in range(sum(n.startswith("...") for n in self.sizes)))

    def check_divides(self, operand: Operand, changes: Sequence[tuple[int, tuple[str, ...], tuple[str, ...]]]) -> None:
        """Every dimension that gains axes divides by them: `(position, axes lost, axes gained)`."""
        for i, lost, gained in changes:
            factor = operand.factors[i]
            kept = factor.axes[: len(factor.axes) - len(lost)]
            self.local(factor.size, (*kept, *gained), factor.name, factor.span)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape here of an array of this layout, from the sizes bound so far."""
        shape: list[int] = []
        for dim in layout.dims:
            if dim.ellipsis:
                shape += self.ellipsis_shape()
            else:
                shape.append(math.prod(self.factor(a).local for a in dim.atoms) + sum(dim.margin))
        return tuple(shape)

    def result(self, x: Any, layout: Layout | None = None, *, role: str = "result") -> Any:
        """Close the composite dimensions of a result (one axis per factor), mark it and tag it."""
        layout = self.pattern.outputs[0] if layout is None else layout
        if any(a.name == "_" for a in layout.atoms):  # an unnamed dimension keeps the size it has
            x = x if all(not d.composite for d in layout.dims) else x.reshape(self._close(x.shape, layout))
        else:
            shape = self.local_shape(layout)
            x = x if x.shape == shape else x.reshape(shape)
        before = dict.fromkeys(axis for one in self.pattern.inputs for axis in one.axis_names)
        gone = tuple(axis for axis in before if axis not in layout.axis_names)
        return mark(x, layout, self.text, role=role, frame=self.frame, gone=gone)

    def _close(self, sizes: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        extra, rest, shape = len(self.ellipsis_shape()), list(sizes), []
        for dim in layout.dims:
            for count in [1] * extra if dim.ellipsis else [len(dim.atoms)]:
                shape.append(math.prod(rest[:count]))
                del rest[:count]
        return tuple(shape)


@functools.lru_cache(maxsize=4096)
def _written_out(layout: Layout, have: Layout) -> Layout:
    """The layout with the dimensions of a value that lies as `have` in place of `...`; as it is where that fails."""
    extra = len(have.dims) - len(layout.dims) + 1
    if not layout.has_ellipsis or have.has_ellipsis or extra < 0:
        return layout
    at = next(i for i, dim in enumerate(layout.dims) if dim.ellipsis)
    dims = (*layout.dims[:at], *have.dims[at : at + extra], *layout.dims[at + 1 :])
    try:
        return Layout.from_dims(dims, layout.unreduced, layout.reduced)
    except LayoutError:  # a name or an axis twice: what lies otherwise may be any of them
        return layout


def _axes_by_dim(layout: Layout) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis for atom in dim.atoms for axis in atom.axes or ()) for dim in layout.dims)


def _with_axes(have: Layout, wanted: Layout) -> Layout:
    """The names of `have` with the axes of `wanted`, where the dimensions correspond; else `wanted`."""
    pairs = list(zip(have.dims, wanted.dims, strict=True))
    if any(len(h.atoms) != len(w.atoms) for h, w in pairs):
        return wanted
    dims = [
        replace(h, atoms=tuple(replace(a, axes=b.axes) for a, b in zip(h.atoms, w.atoms, strict=True)))
        for h, w in pairs
    ]
    return Layout.from_dims(tuple(dims), unreduced=have.unreduced, reduced=have.reduced)


def verb_between(have: Layout, wanted: Layout) -> str:
    """The verb that an error proposes, for layouts of one rank."""
    pairs = list(zip(_axes_by_dim(have), _axes_by_dim(wanted), strict=True))
    if all(b == a[: len(b)] for a, b in pairs):
        return "all_gather"
    if all(a == b[: len(a)] for a, b in pairs):
        return "split"
    return "relayout"
