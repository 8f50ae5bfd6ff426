"""One call of a string operation: its resolved pattern, its checked arrays, and its errors with their context.

Every operation opens a `Call`, turns each array into an `Operand` and returns `call.result(...)`. An operand is the
array with one axis per *factor*: composite dimensions are opened, and `...` is expanded. All checks on the spot are
here, for all operations alike: rank, sizes, names, mesh axes, JAX's own type and tags.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, get_args

import jax
import jax.numpy as jnp
import numpy as np

import spmd.comm._lax as _lax
from spmd import _compat
from spmd._jaxprs.facts import CallName, Gather, layer_now, one_line, rather_told
from spmd._trees.leaves import kind_of
from spmd.comm._keywords import as_array, call_text, keyword_for, operand_names, resolve, split_keywords, works_along
from spmd.comm._marks import Known, kept_p, layout_p, mark, named, same_axes, tag_of
from spmd.errors import (
    CommunicationError,
    Fix,
    LayoutError,
    MeshError,
    SizeError,
    SpmdError,
    did_you_mean,
    if_possible,
    not_one_of,
)
from spmd.language import (
    Atom,
    Dim,
    Layout,
    Misfit,
    NotProduct,
    Pattern,
    Size,
    Unequal,
    WrongRank,
    another_name,
    axes_product,
    axis_span,
    bind,
    call_between,
    indivisible,
    no_room,
    with_axes_of,
    with_axis,
)
from spmd.modes import EVERYWHERE, Frame, closings, current_frame, place

Span = tuple[int, int] | None

# The operations that change the layout and nothing else. If their sides are swapped, the fix replaces the call.
To = Literal["varying", "invarying"]  # JAX's type of a gathered copy
_MOVES = ("all_gather", "all_to_all", "psum", "psum_scatter", "relayout", "split")


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
    names: tuple[str, ...]
    layout: Layout


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
    example: str,
    also: Mapping[str, Any] | None = None,
    shown: tuple[str, ...] | None = None,
) -> Call:
    """Parse and resolve the pattern of a call, and check its keywords.

    Args:
      name: The operation, for messages.
      pattern: The user's string.
      binds: The user's keywords, sizes and axes together.
      arrays: The arrays given, to count them and to catch a string that came first.
      inputs: How many layouts the left side has. None for as many as there are arrays.
      outputs: How many layouts the right side has. None for any number.
      arrow: Whether the pattern has an arrow.
      example: A correct call of this operation, for messages that cannot know which one was meant.
      also: The call's other arguments that differ from their defaults, by name, for fixes that repeat the call. If they
        are unknown, None, and then no fix repeats it.
      shown: How messages call the arrays. By default x, y and so on.
    """
    frame = frame or current_frame(f"spmd.{name}")
    if str in map(type, arrays) or not isinstance(pattern, (str, Pattern, Layout)):
        first, what = next((a for a in arrays if isinstance(a, str)), None), "pattern" if arrow else "layout"
        rule, fix = f"the {what} is a string, not {kind_of(pattern)}.", None
        if first is not None:
            rule = f"{'the key comes' if name.startswith('random.') else 'arrays come'} first, then the {what}."
        rest = [one for one in (*arrays, pattern) if not isinstance(one, str)]
        if first is not None and also is not None and len(rest) == len(arrays):
            how = {"inputs": inputs, "outputs": outputs, "arrow": arrow, "frame": frame, "example": example}
            fix = _in_order(name, first, binds, arrays=rest, also=also, shown=shown, **how)
        raise LayoutError(rule, call=f"{name}(...)", fix=fix, advice=None if fix else f"as in {example}")
    text = call_text(name, pattern, len(arrays))
    if arrow and isinstance(pattern, str) and pattern.strip() in frame.axis_names:  # as the collectives of `jax.lax`
        rule = f"the string holds the layouts before and after, and '{pattern.strip()}' is an axis of the mesh."
        raise LayoutError(rule, call=text, advice=f"as in {example}")
    written = pattern if isinstance(pattern, Pattern) else Pattern(str(pattern), arrow=arrow, call=text)
    sizes, axes = split_keywords(text, written, binds) if binds else ({}, {})
    if frame.watched:
        known = written.names if frame.bound else ()
        frame.met((*(a for a in written.axis_names if a not in axes), *(n for n in known if n not in sizes)))
    renames: tuple[tuple[str, Any], ...] = ()
    if frame.renames:  # a mesh axis has one name in a body, in strings as in keywords, which layers hand on
        renames = tuple(r for r in frame.renames if r[0] in written.axis_names and r[0] not in axes)
        axes = {name: frame.renamed(one) for name, one in axes.items()}
    renames += tuple(sorted(axes.items()))
    try:
        placed = resolve(written, written.source, renames, frame.mapping)
    except LayoutError as error:
        raise LayoutError(replace(error.fault, call=text)) from None
    call = Call(name, text, written, placed, frame, len(arrays), shown, also, sizes, tuple(axes))
    call.held = tuple(map(tag_of, arrays))
    call.shapes = tuple(getattr(one, "shape", None) for one in arrays)
    call.check_counts(len(arrays) if inputs is None else inputs, outputs)
    if not call.mesh.keys() >= set(placed.axis_names):
        call.no_axis()
    for key, size in sizes.items():
        call.bind(key, size, f"the keyword {key}={size}", at=None)
    return call


@dataclass(eq=False)
class Call:
    """One call of a string operation.

    `written` is its pattern as the user wrote it, `pattern` the same with axes renamed and bare names placed.
    """

    name: str
    text: str
    written: Pattern
    pattern: Pattern
    frame: Frame
    arrays: int
    names: tuple[str, ...] | None  # how messages call the arrays, where not x, y and so on
    also: Mapping[str, Any] | None
    given: Mapping[str, int]  # the sizes among its keywords
    said: tuple[str, ...]  # the axes of its string that keywords bind
    held: tuple[Known | None, ...] = ()  # how the arrays lie, where an operation of ours or the kernel says it
    shapes: tuple[tuple[int, ...] | None, ...] = ()  # of the arrays, here
    gather: Gather | None = None
    to: To = "varying"

    def __post_init__(self) -> None:
        self.mesh = dict(self.frame.sizes)
        self.sizes = dict(self.frame.known)

    @property
    def src(self) -> Layout:
        """The layout of the first array."""
        return self.pattern.inputs[0]

    @property
    def dst(self) -> Layout:
        """The layout of the first result."""
        return self.pattern.outputs[0]

    def type_copies(self, to: Any) -> None:
        """Decide JAX's type of what this call gathers: what the user says, or else what the kernel chose for this
        place. Where the kernel is traced again, what is traced in `scope` knows the call."""
        if to not in (None, "varying", "invarying"):
            self.fail(not_one_of("to", to, get_args(To)))
        frame = self.frame
        if frame.explicit and (frame.diagnosing or frame.invarying):
            where = place() if to is None else None
            chosen = where is not None and not frame.invarying.isdisjoint((where, EVERYWHERE))
            again = self.paste(self.src, self.dst, to="invarying")
            self.gather = Gather(where, again, chosen)
            to = "invarying" if chosen else to
        self.to = to or "varying"

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The call's own text as a scope of names: what is traced inside carries it, and so do its transposes, through
        loops and remat, into the jaxpr, the compiled program and the profiler."""
        text = one_line(self.text)
        if self.gather is not None and isinstance(text, CallName):
            text = CallName(text, text.verb, text.pattern, self.gather)
        return jax.named_scope(text)

    def hidden(self) -> contextlib.AbstractContextManager[Any]:
        """A context for the calls that this call is made of. Errors about gathers then name this call, not those
        inside."""
        frame = self.frame
        if not (frame.diagnosing or frame.invarying):
            return contextlib.nullcontext()
        return frame.replace(diagnosing=False, invarying=frozenset()).enter()

    def fork(self) -> Call:
        """The same call for another leaf of a pytree. Sizes that one leaf binds do not bind the next."""
        other = copy.copy(self)
        other.sizes = dict(self.sizes)
        return other

    def each(
        self,
        x: Any,
        compute: Callable[[Call, Operand], Any],
        layout: Layout | None = None,
        *,
        margins: bool = False,
    ) -> Any:
        """The result of this call for each leaf of a pytree: what `compute` makes of it, in the call's scope."""

        def leaf(path: Any, value: Any) -> Any:
            own = self.fork()
            operand = own.operand(value, margins=margins, name=self.label(path))
            with self.scope():
                out = compute(own, operand)
            return own.result(out, layout)

        return jax.tree.map_with_path(leaf, x)

    def label(self, path: Any) -> str | None:
        """Return how messages call a leaf of a tree of arrays. None where the array is no tree."""
        return f"{self._shown(0)}{jax.tree_util.keystr(path)}" if path else None

    # --- errors -------------------------------------------------------------------------------------------

    @property
    def shown(self) -> tuple[str, ...]:
        """Return how messages call the arrays."""
        return self.names or operand_names(self.name, self.arrays)

    def fail(
        self,
        rule: str,
        *,
        at: Span = None,
        got: Sequence[str] = (),
        fix: str | Fix | Sequence[str | Fix] | None = None,
        advice: str | None = None,
        error: type[SpmdError] = LayoutError,
    ) -> NoReturn:
        """Raise `error` with this call, the fault underlined, the mesh, the fix and advice."""
        span = at if at and at[1] > at[0] else None
        shown = {"call": self.text, "source": self.written.source, "span": span}
        raise error(rule, **shown, got=list(got), fix=fix, advice=advice)

    def refuse(self, rule: str, **how: Any) -> NoReturn:
        """Raise a `CommunicationError`, as `fail` does: the call would have to send what its string does not say."""
        self.fail(rule, **how, error=CommunicationError)

    @if_possible
    def paste(self, *sides: Layout | str, name: str | None = None, **keywords: Any) -> Fix | None:
        """Another call of the same arrays, to paste. It has the sizes that the user gave for names of the pattern. If
        it is the same operation, it has its other arguments too, and is None if those are unknown."""
        also = self.also if name in (None, self.name) else {}
        shown = self.shown if name in (None, self.name) else self.shown or ("x",)
        return None if also is None else self._fix(name or self.name, shown, sides, {**also, **keywords})

    @if_possible
    def first(self, verb: str, *sides: Layout | str, index: int = 0, of: str | None = None) -> Fix:
        """A call that turns one operand into what this call wants. `of` names the kernel's argument, if it is one."""
        return self._fix(verb, (of or self._shown(index),), sides, {})

    @if_possible
    def way(self, src: Layout, dst: Layout, *, index: int = 0, of: str | None = None, **how: Any) -> Fix | None:
        """The call that takes one operand from one layout to another, where its sizes have room for that. `how` are the
        keywords of a verb that gathers."""
        if self.no_room(src, dst, index):
            return None

        def make(verb: str, shown: str | Fix, *sides: Layout) -> Fix:
            return self._fix(verb, (shown,), sides, how if verb in ("all_gather", "relayout") else {})

        return call_between(src, dst, of or self._shown(index), make)

    def no_room(self, src: Layout, dst: Layout, index: int = 0) -> str | None:
        """Return why one operand cannot be moved from one layout to another."""
        shape = self.shapes[index] if index < len(self.shapes) else None
        how = {"known": self.frame.known, "local": self.frame.explicit}
        return None if shape is None else no_room(src, dst, shape, self.mesh, **how)

    @if_possible
    def around(self, first: Fix | None, *sides: Layout | str, index: int = 0) -> Fix | tuple[Fix | str, ...] | None:
        """This call again with another pattern, of an operand that the call `first` makes. If the other arguments are
        unknown, there are two fixes: that call and the pattern."""
        if first is None:
            return None
        again = self._fix(self.name, self.shown, sides, dict(self.also or {}))
        if self.also is None:
            return first, f'"{again.pattern}"'
        return replace(again, operands=(*again.operands[:index], first, *again.operands[index + 1 :]))

    @if_possible
    def summed_first(self, index: int = 0, right: Layout | None = None) -> Fix | tuple[Fix | str, ...] | None:
        """This call of an operand that a psum has completed, with another right side if one is given."""
        inputs, outputs = self.pattern.inputs, self.pattern.outputs if right is None else (right,)
        marked = inputs[index]
        whole = marked.without(*marked.unreduced)
        left = self._text(*(whole if i == index else layout for i, layout in enumerate(inputs)))
        results = [layout.without(*(set(marked.unreduced) & set(layout.unreduced))) for layout in outputs]
        first = self.first("psum", marked, whole, index=index)
        return self.around(first, left, *([self._text(*results)] if self.pattern.arrow else []), index=index)

    def complete(self, rule: str, index: int = 0) -> None:
        """Refuse an operand that is a partial sum, and say which psum comes first."""
        if self.pattern.inputs[index].unreduced:
            self.refuse(rule, fix=self.summed_first(index))

    @if_possible
    def with_slashes(self, pattern: Pattern | None = None) -> Fix | None:
        """This call with each name divided as the arrays are, where no name of its string is. None if nobody knows how
        they lie, or if the string moves data and says by its slashes where."""
        pattern = pattern or self.pattern
        states = not pattern.arrow and not any(dim.bracket for one in pattern.inputs for dim in one.dims)  # annotate
        slashes = pattern.axis_names or self.written.axis_names  # those of a layer may be bound to None
        if states or slashes or self.frame.mapping is not None or self.name in _MOVES:
            return None
        if len(self.held) != len(pattern.inputs):
            return None
        placed: dict[str, tuple[str, ...]] = {}
        for known, layout, shape in zip(self.held, pattern.inputs, self.shapes, strict=True):
            have = None if known is None or known.layout.unreduced else known.layout
            dims = None if have is None else with_axes_of(_written_out(layout, have), have)
            dims = self._by_signature(layout, shape) if known is None else dims
            if dims is None:
                return None
            for atom in (atom for dim in dims for atom in dim.atoms if atom.named):
                if placed.setdefault(atom.name, atom.axes or ()) != (atom.axes or ()):
                    return None
        as_held = lambda layout: Layout.from_dims(
            [replace(d, atoms=tuple(replace(a, axes=placed.get(a.name, a.axes)) for a in d.atoms)) for d in layout.dims]
        )
        try:
            sides = [self._text(*map(as_held, side)) for side in (pattern.inputs, pattern.outputs)]
        except LayoutError:  # two names of one array on one mesh axis
            return None
        return self.paste(*(sides if pattern.arrow else sides[:1]))

    def _by_signature(self, layout: Layout, shape: tuple[int, ...] | None) -> tuple[Dim, ...] | None:
        """The dimensions of an array, divided as the names of the signature are, if their sizes here fit."""
        dims: list[Dim] = []
        for dim, size in zip(layout.dims, shape or (), strict=False):
            first = self.frame.known.get(dim.atoms[0].name) if len(dim.atoms) == 1 else None
            if first is None or size * axes_product(first.axes, self.mesh) != first.size:
                return None
            dims.append(replace(dim, atoms=(replace(dim.atoms[0], axes=first.axes),)))
        return tuple(dims) if len(dims) == len(layout.dims) == len(shape or ()) else None

    def _text(self, *layouts: Layout) -> str:
        """The layouts of one side as text. Under a mapping a bare name is placed, so whole dimensions say that they
        are."""
        return ", ".join(one.short if self.frame.mapping is None else str(one) for one in layouts)

    def _shown(self, index: int) -> str:
        return self.shown[index] if index < len(self.shown) else "x"

    def _fix(
        self, verb: str, shown: tuple[str | Fix, ...], sides: Sequence[Layout | str], keywords: dict[str, Any]
    ) -> Fix:
        own = verb == self.name
        texts = [one if isinstance(one, str) else self._text(one if own else one.without_brackets()) for one in sides]
        # Sizes that the call was given and another call needs too, because no dimension tells them.
        dims = [dim for layout in self.pattern.layouts for dim in layout.dims if own or dim.composite]
        names = {name for dim in dims for name in dim.names}
        sizes = {name: size for name, size in self.given.items() if name in names}
        return Fix(verb, shown, " -> ".join(texts), {**keywords, **sizes})

    # --- checks of the pattern ----------------------------------------------------------------------------

    def check_counts(self, inputs: int | None, outputs: int | None) -> None:
        left, right = self.pattern.inputs, self.pattern.outputs
        if inputs is not None and len(left) != inputs:
            arrays = f"{inputs} array{'s' * (inputs != 1)}"
            layouts = f"{len(left)} layout{'s' * (len(left) != 1)}"
            one_by_one = "each array is an argument of its own" if None in self.shapes else None
            self.fail(f"{self.name} was given {arrays}, and the left side has {layouts}.", advice=one_by_one)
        if outputs is not None and self.pattern.arrow and len(right) != outputs:
            self.fail(f"{self.name} gives {outputs} array, and the right side has {len(right)} layouts.")

    def no_axis(self) -> NoReturn:
        """Complain about a mesh axis of the pattern that the mesh does not have."""
        known = self.frame.axis_names
        axis = next(axis for axis in self.pattern.axis_names if axis not in known)
        names = (*known, *(name for name, _ in self.frame.renames))
        hint = did_you_mean(axis, names)
        self.fail(
            f"the mesh has no axis {axis!r}{hint or '.'}",
            at=axis_span(self.written.source, axis),
            got=[self.frame.describe()],
            fix=with_axis(self.written.source, axis, names),
            error=MeshError,
        )

    # --- sizes --------------------------------------------------------------------------------------------

    def bind(self, name: str, size: int, origin: str, at: Span) -> None:
        """Give a name its global size, or complain about the first binding."""
        first = self.sizes.setdefault(name, Size(size, origin))
        if first.size != size:
            self.misfit(Unequal("", at, name, size, first), [f"{name} = {size}: {origin}"])

    def local(self, size: int, axes: tuple[str, ...], name: str, at: Span, *, fix: Fix | None = None) -> int:
        """The size here of a dimension of global size `size`: that of a block in explicit mode, otherwise the whole."""
        fault = indivisible(name, size, axes, self.mesh, span=at) if axes else None
        if fault is not None:
            self.misfit(fault, fix=fix)
        return size // axes_product(axes, self.mesh) if axes and self.frame.explicit else size

    def misfit(self, fault: Misfit, got: Sequence[str] = (), *, fix: Fix | None = None) -> NoReturn:
        """Raise an error for what does not fit, with the names and blocks that explain it."""
        names: Sequence[str] = ()
        advice = [fault.advice if not fix or isinstance(fault, WrongRank) else None]
        if isinstance(fault, Unequal):
            bare = self._without_its_margin(fault)
            names, advice = [] if bare else [fault.name], [bare or self._gather_block(fault) or fault.own]
        if isinstance(fault, NotProduct):
            names = [name for name, _ in fault.factors]
            got = [*got, *(f"{name} = {size}: {self.sizes[name].origin}" for name, size in fault.factors if size)]
        if other := another_name(name for name in self.frame.known if name in names):
            advice += [
                other,
                "@spmd.scope on a function that is called for several dimensions gives it names of its own",
            ]
        self.fail(
            f"{fault.rule}.",
            at=fault.span,
            got=[*got, self.frame.describe()],
            fix=fix,
            advice=";\n".join(one for one in advice if one) or None,
            error=LayoutError if isinstance(fault, WrongRank) else SizeError,
        )

    @if_possible
    def _without_its_margin(self, fault: Unequal) -> str | None:
        """Advice if the array would fit without the margin that the string has."""
        dim = next((d for layout in self.pattern.layouts for d in layout.dims if d.span == fault.span), None)
        here = fault.size if fault.local is None else fault.local
        if dim is None or not any(dim.margin) or fault.size * (here + sum(dim.margin)) != fault.first.size * here:
            return None
        bare = replace(dim, margin=(0, 0)).short
        return f"the array is {bare}, without a margin: jnp.pad makes room for one,\nstencil.halo copies the neighbours"

    @if_possible
    def _gather_block(self, fault: Unequal) -> str | None:
        """Advice if the array has the size of a block over an axis that the string does not name."""
        used = {axis for layout in self.pattern.layouts for axis in layout.axis_names}
        free = [axis for axis in fault.blocks if axis in (fault.first.axes or fault.blocks)]
        free.sort(key=lambda axis: axis in used and axis not in fault.first.axes)
        if not free:
            return None
        whole = "/".join([fault.name, *fault.axes])
        block = f"{whole}/{free[0]}"
        return f'as a block it is {block}: write "{block}" here if it stays divided; or gather it, "{block} -> {whole}"'

    def index_dtype(self, size: int, name: str, at: Span = None) -> Any:
        """The dtype of positions along `size` elements: int32, or int64 if they need it and JAX has it."""
        if size <= 2**31:
            return jnp.int32
        if jax.config.jax_enable_x64:
            return jnp.int64
        rule = f"positions along {name}, of {size} elements, do not fit int32, and JAX has no int64 now."
        return self.fail(rule, at=at, advice='jax.config.update("jax_enable_x64", True)', error=SizeError)

    def start(self, factor: Factor) -> Any:
        """Return where the local block of a divided factor starts in the whole, with the dtype of `index_dtype`."""
        dtype = self.index_dtype(factor.size, factor.name, factor.span)
        index = _lax.axis_index(factor.axes, dict(self.frame.sizes))
        return jnp.asarray(index, dtype) * np.asarray(factor.local, dtype)

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
        stacked = f", {len(x)} arrays of a {type(x).__name__} as one" if isinstance(x, tuple | list) else ""
        x = as_array(x, label, self.fail)
        self.shapes = (*self.shapes[:index], x.shape, *self.shapes[index + 1 :])  # of a tree, those of this leaf
        known = tag_of(x)
        told = known is not None and same_axes(known.layout, layout) is True
        bound = bind([(label, x.shape, layout)], self.mesh, known=self.sizes, local=self.frame.explicit, together=True)
        fault = bound.faults[0] if bound.faults else None
        here = " on each device" if self.frame.explicit else ""
        got = [f"{label}: shape {x.shape}{here}{stacked}"]
        if isinstance(fault, WrongRank):
            fault = replace(fault, shape=()) if stacked else fault  # and no gather has made its first dimension
            self.misfit(fault, got, fix=self._spaced() if fault.unspaced else None)
        # The placement is checked first, because a wrong axis explains a wrong size, and not the reverse.
        if known is not None and not told:
            self._check_tag(known, layout, label, index)
        if layout.unreduced and self.frame.explicit:
            self._check_partial(x, layout, label)
        if fault is not None:
            self.misfit(fault, got)
        self.sizes = bound.sizes
        factors: list[Factor] = []
        names: list[str] = []
        shape: list[int] = []
        for position, (dim, size) in enumerate(bound.dims[0]):
            for factor in self._open(dim, size or 0, position):
                factors.append(factor)
                names.append(factor.name)
                # A factor's size is that of its block. The array has the margins too.
                shape.append(x.shape[position] if any(dim.margin) else factor.local)
        if self.frame.explicit and not told:  # if a tag already says it, no note is needed
            said: dict[str, Any] = {"value": self._shown(index)}
            if layout.has_ellipsis:  # what `...` stands for must not be divided over an axis of the string
                said["named"] = self.pattern.axis_names
            x = layout_p.bind(x, layout=layout, call=self.text, role="operand", **said)
        x = named(x, layout, self.text, role="operand", frame=self.frame, name=self._shown(index))
        return Operand(x if tuple(shape) == x.shape else x.reshape(shape), tuple(factors), tuple(names), layout)

    def no_margins(self, layout: Layout) -> None:
        for dim in layout.dims:
            if dim.margin != (0, 0):
                rule = f"{self.name} has no meaning for a margin: the copies of the neighbours would count twice."
                self.fail(rule, at=dim.span)

    @if_possible
    def _spaced(self) -> Fix | None:
        """The call with a space between the letters of each name, if all its strings are written as NumPy's are."""
        names = [dim.short for one in self.written.layouts for dim in one.dims]
        alone = all(len(one.dims) < 2 for one in self.written.layouts) and all(name.isalpha() for name in names)
        if not alone or self.given:
            return None
        sides = (self.written.inputs, self.written.outputs) if self.written.arrow else (self.written.inputs,)
        texts = [", ".join(" ".join(one.short) if one.dims else one.short for one in side) for side in sides]
        return self.with_slashes(Pattern(" -> ".join(texts), arrow=self.written.arrow)) or self.paste(*texts)

    def _open(self, dim: Dim, size: int, position: int) -> list[Factor]:
        """The factors of one dimension of an operand."""
        if not dim.composite:
            [atom] = dim.atoms
            name = f"_{position}" if atom.name == "_" else atom.name
            return [self._factor(name, size, atom, dim.bracket)]
        unknown = [atom.name for atom in dim.atoms if atom.name not in self.sizes]
        if unknown:
            rule = f"the sizes of {' and '.join(unknown)} cannot be read off one dimension of {size}."
            self.fail(rule, at=dim.span, advice=f"{unknown[-1]}=... says one of them", error=SizeError)
        return [self._factor(a.name, self.sizes[a.name].size, a, dim.bracket) for a in dim.atoms]

    def _factor(self, name: str, size: int, atom: Atom, bracket: bool = False) -> Factor:
        axes = atom.axes or ()
        return Factor(name, axes, self.local(size, axes, name, atom.span), size, bracket, atom.span)

    def _check_partial(self, x: Any, layout: Layout, label: str) -> None:
        """Check a mark against JAX's type, before the trace ends: what is equal is not a partial sum."""
        manual = _compat.manual_axes()
        have = _compat.varying_axes(x) | _compat.unreduced_axes(x)
        equal = self.frame.in_mesh_order({a for a in layout.unreduced if a in manual and a not in have})
        if equal and not _compat.varying_axes(jax.lax.axis_index(equal[0])):
            rule = f"{label} has no type that says along which axes it differs, because check_vma is off."
            self.refuse(rule, at=self.mark_span("{U:"), advice="leave out check_vma, or write a kernel")
        if equal:
            n = self.frame.axis_size(equal)
            self.refuse(
                f"{label} is equal on {', '.join(equal)}, so it is not a partial sum: summing {n} "
                f"copies multiplies it by {n}.",
                at=self.mark_span("{U:"),
                got=[f"{label}: {jax.typeof(x)}", self.frame.describe()],
                advice="leave out the {U:} mark, and the psum",
            )

    def mark_span(self, mark: str, *, last: bool = False) -> tuple[int, int] | None:
        """Return where the string has a mark that begins so, the first one or the last one."""
        source = self.written.source
        at = source.rfind(mark) if last else source.find(mark)
        return None if at < 0 else (at, source.find("}", at) + 1)

    def _check_tag(self, known: Known, layout: Layout, label: str, index: int) -> None:
        have, origin, name, _ = known
        lost = self.frame.in_mesh_order(set(have.unreduced) - set(layout.unreduced))
        if lost:
            done = Layout.from_dims(have.dims, reduced=have.reduced)
            self.refuse(
                f'{label} is a partial sum on {", ".join(lost)}, and is read as "{layout.short}", which is complete.',
                got=[f'"{have.short}": {origin}', self.frame.describe()],
                fix=self.first("psum", have, done, index=index, of=name),
            )
        blocks = self.frame.in_mesh_order(set(have.axes) & set(layout.unreduced))
        if blocks:
            gather = self.first("all_gather", have, have.without(*blocks), index=index, of=name)
            self.refuse(
                f'{label} holds "{have.short}": blocks over {", ".join(blocks)}, which are not terms of a sum.',
                at=self.mark_span("{U:"),
                got=[f'"{have.short}": {origin}', self.frame.describe()],
                advice=f"{gather} makes it whole; leave out the mark" if gather else "leave out the mark",
            )
        written, layout = layout, _written_out(layout, have)
        if same_axes(have, layout, marks=False) is not False:
            return
        position = next(i for i, (a, b) in enumerate(zip(layout.dims, have.dims, strict=True)) if a.axes != b.axes)
        rule, at = f'{label} holds "{have.short}", and is read as "{written.short}".', layout.dims[position].span
        got = [f'"{have.short}": {origin}', self.frame.describe()]
        wanted, meant = _with_axes(have, layout), _with_axes(layout, have)
        fix = None if wanted is None or _misaligned(have, layout) else self.way(have, wanted, index=index, of=name)
        if (named := self._named(have, layout)) is not None:
            self.refuse(rule, at=at, got=got, fix=named, advice='"_" is a whole dimension')
        if fix is None and wanted is not None and (short := self.no_room(have, wanted, index)) is not None:
            self.refuse(rule, at=at, got=[*got, short])
        told = self._keyword(layout.dims[position], have.dims[position].axes, fix)
        told = told or self._rather(fix, have, index, {*have.axes} - {*layout.axes})
        if told is not None:
            self.refuse(rule, at=at, got=got, advice=told)
        if meant is not None and fix and fix.verb == "all_gather" and self._along(layout, have):
            left = ", ".join(meant.short if i == index else one.short for i, one in enumerate(self.pattern.inputs))
            again = self.paste(left, *([self._text(*self.pattern.outputs)] if self.pattern.arrow else []))
            string = "" if again else f'"{meant.short}" in this string: '
            self.refuse(rule, at=at, got=got, fix=again, advice=f"{string}{self.name} works along a divided dimension")
        turned = fix and self.name in _MOVES and same_axes(have, self.dst) is True
        said = ["before this call"] if fix else []
        said += [] if meant is None else [f'"{meant.short}" in this string']
        if (again := self.with_slashes()) is not None:
            said, fix = [f"or {fix} before this call, if each device needs the whole array"] if fix else [], again
        self.refuse(
            rule,
            at=at,
            got=got,
            fix=fix,
            advice="in place of this call, whose sides are swapped" if turned else "; or ".join(said) or None,
        )

    @if_possible
    def _named(self, have: Layout, layout: Layout) -> Fix | None:
        """This call with the names of an array that it has as unnamed, and that is divided there."""
        wrong = [dim.short for dim, lies in zip(layout.dims, have.dims, strict=True) if dim.axes != lies.axes]
        if self.name not in _MOVES or any(one != "_" for one in wrong):
            return None
        sides = [
            Layout.from_dims(
                [lies if dim.short == "_" else dim for dim, lies in zip(one.dims, have.dims, strict=True)],
                one.unreduced,
                one.reduced,
            )
            for one in (self.src, self.dst)
        ]
        return self.paste(*sides)

    @if_possible
    def _keyword(self, dim: Dim, have: tuple[str, ...], fix: Fix | None) -> str | None:
        """Advice for an array that is divided otherwise than a keyword of this call says. A layer hands its own on."""
        text = self.written.source[slice(*dim.span)]
        others = {axis for one in self.pattern.layouts for axis in one.axes} - {*dim.axes}
        for known, layout in zip(self.held, self.pattern.inputs, strict=False):
            have_dims = () if known is None else known.layout.dims
            dims = () if known is None else _written_out(layout, known.layout).dims
            others |= {
                axis for one, lie in zip(dims, have_dims, strict=False) if one.names != dim.names for axis in lie.axes
            }
        keyword = None if others & {*have} else keyword_for(text, self.said, dim.axes, have)
        if keyword is None:
            return None
        alone = f", if {'/'.join(have)} divides it everywhere; or else {fix} before {layer_now() or 'this call'}"
        return f"{keyword}, the keyword that says how {text} is divided{alone if fix and len(self.held) < 2 else ''}"

    def _along(self, layout: Layout, have: Layout) -> bool:
        """Return whether this call works along each dimension of its one array that lies otherwise than its string
        says."""
        wrong = [dim for dim, lies in zip(layout.dims, have.dims, strict=True) if dim.axes != lies.axes]
        kept = {name for one in self.pattern.outputs for name in one.names} if self.pattern.arrow else None
        return (
            self.name not in _MOVES and len(self.pattern.inputs) == 1 and all(works_along(one, kept) for one in wrong)
        )

    @if_possible
    def _rather(self, fix: Fix | None, have: Layout, index: int, axes: set[str]) -> str | None:
        """Advice in place of a fix that sends what an argument of a layer holds. Not so if the axis divides other data:
        then it is that of a weight at rest."""
        layer = layer_now() if fix and fix.verb in ("all_gather", "all_to_all", "relayout") else None
        others = [one for i, one in enumerate(self.held) if one is not None and i != index]
        if layer is None or any(axes & {*one.layout.axes} for one in others):
            return None
        return rather_told(layer, have.short, str(fix))

    # --- results ------------------------------------------------------------------------------------------

    def closing(self, operand: Operand, x: Any, axes: tuple[str, ...]) -> tuple[Operand, tuple[str, ...]]:
        """The operand with a note, and the axes along which the result is made equal, of these, which the string does
        not name.

        The check after the trace refuses it where it does not know that `x` is equal there: before its own layout was
        said, which is believed. Rows stay open, which differ there: those under `vmap`, and those of a known loop.
        """
        if not axes or _compat.mapped(x)[1]:
            return operand, ()
        is_row = (where := place()) in self.frame.rows
        said = {"layout": self.src, "call": self.text, "role": "closed", "closes": axes, "place": where}
        if self.frame.keeping:
            operand = replace(operand, x=kept_p.bind(operand.x, x, **said))
        elif not is_row:
            layout_p.bind(x, **said)
        if not is_row and (known := closings.get()) is not None:
            known.append(where)
        return operand, () if is_row else axes

    def factor(self, atom: Atom) -> Factor:
        """The factor that an atom of the right side stands for."""
        known = self.sizes.get(atom.name)
        size = atom.size if known is None else known.size
        if size is None:
            self.fail(
                f"the size of {atom.name} is not known.",
                at=atom.span,
                advice=f"say it: {atom.name}=...",
                error=SizeError,
            )
        return self._factor(atom.name, size, atom)

    def ellipsis_shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions that `...` stands for."""
        return tuple(self.sizes[f"...{i}"][0] for i in range(sum(n.startswith("...") for n in self.sizes)))

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape here of an array of this layout, from the sizes bound so far."""
        shape: list[int] = []
        for dim in layout.dims:
            if dim.ellipsis:
                shape += self.ellipsis_shape()
            else:
                size = 1
                for atom in dim.atoms:
                    size *= self.factor(atom).local
                shape.append(size + sum(dim.margin))
        return tuple(shape)

    def result(self, x: Any, layout: Layout | None = None, *, role: str = "result", due: bool = False) -> Any:
        """Close the composite dimensions of a result (one axis per factor), mark it and tag it.

        With `due` the note of its layout is left in any case: types do not see from what is done inside how it lies.
        """
        layout = self.dst if layout is None else layout
        if layout.has_unnamed:  # an unnamed dimension keeps the size it has
            shape = x.shape if all(not d.composite for d in layout.dims) else self._close(x.shape, layout)
        else:
            shape = self.local_shape(layout)
        x = x if x.shape == shape else self._closed(x, layout, shape)
        before = dict.fromkeys([axis for one in self.pattern.inputs for axis in one.axis_names])
        gone = tuple([axis for axis in before if axis not in layout.axis_names])
        # A reshape does not show which dimension an axis divides, if some have one element on a device.
        closed = [dim for one in self.pattern.layouts for dim in one.dims if dim.composite and dim.axes]
        due = due or (bool(closed) and (1 in shape or any(1 in self.local_shape(one) for one in self.pattern.inputs)))
        if self.frame.alike and not {*layout.names} <= {name for one in self.pattern.inputs for name in one.names}:
            x = named(x, layout, self.text, role="made", frame=self.frame)
        return mark(x, layout, self.text, role=role, frame=self.frame, gone=gone, due=due)

    def _closed(self, x: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
        """A result with its composite dimensions as one, and with those of size 1. Any other shape is an error."""
        opened = [n for dim in layout.dims for n in self._parts(dim) if n != 1]
        if not layout.has_unnamed and opened != [n for n in x.shape if n != 1]:
            rule = f"each device has {x.shape} of the result, and its layout says {shape}."
            self.fail(rule, got=[self.frame.describe()], error=SizeError)
        return x.reshape(shape)

    def _parts(self, dim: Dim) -> Sequence[int]:
        """The local sizes of a dimension's factors; of one with margins, that of all of it."""
        if dim.ellipsis:
            return self.ellipsis_shape()
        sizes = [self.factor(atom).local for atom in dim.atoms]
        return [math.prod(sizes) + sum(dim.margin)] if any(dim.margin) else sizes

    def _close(self, sizes: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        extra, rest, shape = len(self.ellipsis_shape()), list(sizes), []
        for dim in layout.dims:
            for count in [1] * extra if dim.ellipsis else [len(dim.atoms)]:
                shape.append(math.prod(rest[:count]))
                del rest[:count]
        return tuple(shape)


@if_possible
def _in_order(name: str, pattern: str, binds: Mapping[str, Any], **how: Any) -> Sequence[str | Fix]:
    """A call with its arrays before its string. What would be wrong with that is mended too."""
    arrays = how["arrays"]
    again = Fix(name, how["shown"] or operand_names(name, len(arrays)), pattern, {**how["also"], **binds})
    try:
        call = open_call(name, pattern, binds, **how)
        for i, x in enumerate(arrays):
            call.operand(x, i, margins=True)
    except SpmdError as error:
        more = error.fault.fixes
        return more if any(isinstance(one, Fix) and one.verb == name for one in more) else (again, *more)
    return (again,)


@functools.lru_cache(maxsize=4096)
def _written_out(layout: Layout, have: Layout) -> Layout:
    """The layout with `...` replaced by the dimensions of a value that lies as `have`. Unchanged if that fails."""
    extra = len(have.dims) - len(layout.dims) + 1
    if not layout.has_ellipsis or have.has_ellipsis or extra < 0:
        return layout
    at = next(i for i, dim in enumerate(layout.dims) if dim.ellipsis)
    dims = (*layout.dims[:at], *have.dims[at : at + extra], *layout.dims[at + 1 :])
    try:
        return Layout.from_dims(dims, layout.unreduced, layout.reduced)
    except LayoutError:  # a name or an axis twice: any of them may be the one that lies otherwise
        return layout


def _misaligned(have: Layout, wanted: Layout) -> bool:
    """Return whether one name stands for different dimensions of the two. Then the call is wrong, and not the
    placement."""
    here, there = ({a.name: i for i, dim in enumerate(x.dims) for a in dim.atoms if a.named} for x in (have, wanted))
    return any(here.get(name, i) != i for name, i in there.items())


def _with_axes(have: Layout, wanted: Layout) -> Layout | None:
    """The names of `have` with the axes of `wanted`. None if the dimensions do not correspond, or if its marks name one
    of these axes."""
    dims = with_axes_of(have, wanted)
    marked = {*have.unreduced, *have.reduced}
    if dims is None or any(axis in marked for dim in dims for axis in dim.axes):
        return None
    return Layout.from_dims(dims, unreduced=have.unreduced, reduced=have.reduced)
