"""`Pattern`: what you have -> what you want."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import starmap
from typing import Any, final

from spmd.errors import Fix, LayoutError, if_possible
from spmd.language._layout import AxisMapping, Layout, make, of_sides
from spmd.language._parse import Parser
from spmd.language._sizes import Size, bind
from spmd.language._syntax import Axes, Value, with_call


@final
class Pattern(Value):
    """Layouts on both sides of an arrow: left what you have, right what you want.

    Immutable and hashable; a string is parsed once. Newlines and a trailing comma are allowed.

    Args:
      text: The pattern as a string. A Pattern is returned as it is.
      arrow: False for the functions that take the layouts of their operands only, `"b [c/cp] l"`.
      call: The call to show in an error. It contains the string.

    Raises:
      LayoutError: If the string is not a pattern.

    >>> pattern = Pattern("b/dp d, d f/tp -> b/dp f/tp")
    >>> pattern.inputs
    (Layout('b/dp d'), Layout('d f/tp'))
    >>> pattern.bind(tp=None)
    Pattern('b/dp d, d f/1 -> b/dp f/1')
    """

    __slots__ = ("arrow", "axis_names", "empty_left", "empty_right", "inputs", "names", "outputs", "source")

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    source: str
    """The string as written; the spans of the layouts' atoms refer to it."""
    arrow: bool
    empty_left: bool
    """Whether nothing stands left of the arrow; `inputs` then holds one scalar."""
    empty_right: bool
    names: tuple[str, ...]
    """All names of dimensions and factors, in order of appearance, each once."""
    axis_names: tuple[str, ...]
    """All mesh axes it mentions, in dimensions and marks, each once."""

    def __new__(cls, text: str | Pattern, *, arrow: bool = True, call: str | None = None) -> Pattern:
        if isinstance(text, Pattern):
            return text
        if not isinstance(text, str):
            rule = f"A pattern is a string such as 'b/dp d -> b d', but this is of type {type(text).__name__}."
            raise LayoutError(rule, call=call)
        try:
            return _parsed(str(text), bool(arrow))
        except LayoutError as error:
            raise with_call(error, text, call or f'Pattern("{text}")', lambda one: _parsed(one, bool(arrow))) from None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of both sides."""
        return (*self.inputs, *self.outputs)

    @property
    def bare(self) -> tuple[str, ...]:
        """The names that stand somewhere without a placement of their own, each once."""
        return tuple(dict.fromkeys(name for layout in self.layouts for name in layout.bare))

    def bind(self, **axes: Axes) -> Pattern:
        """Return the pattern with mesh axes renamed, as `Layout.bind` does.

        Args:
          **axes: The new name of each axis, a tuple of names, or None for no division.

        >>> Pattern("... s/tp d -> ... s d").bind(tp=("tk", "tr"))
        Pattern('... s/tk/tr d -> ... s d')
        """
        return self._map(lambda layout: layout.bind(**axes)) if axes else self

    def resolve(self, mapping: Mapping[str, Axes] | None = None) -> Pattern:
        """Return the pattern with no bare name, as `Layout.resolve` does.

        Args:
          mapping: The rules, an AxisMapping or a dict.

        >>> Pattern("embed mlp -> embed/1 mlp").resolve({"embed": "dp", "mlp": "tp"})
        Pattern('embed/dp mlp/tp -> embed/1 mlp/tp')
        """
        return self._map(AxisMapping.of(mapping).resolve)

    def _map(self, change: Callable[[Layout], Layout]) -> Pattern:
        inputs, outputs = tuple(map(change, self.inputs)), tuple(map(change, self.outputs))
        return _make(inputs, outputs, self.source, self.arrow, self.empty_left, self.empty_right)

    def __str__(self) -> str:
        left = "" if self.empty_left else ", ".join(map(str, self.inputs))
        right = "" if self.empty_right else ", ".join(map(str, self.outputs))
        return f"{left} -> {right}".strip() if self.arrow else left

    def __repr__(self) -> str:
        return f"Pattern({str(self)!r})" if self.arrow else f"Pattern({str(self)!r}, arrow=False)"

    def _repr_html_(self) -> str:
        sides = (("in", self.inputs), ("out", self.outputs)) if self.arrow else (("", self.inputs),)
        return of_sides(str(self), sides)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.inputs, self.outputs, self.source, self.arrow, self.empty_left, self.empty_right)


def _make(
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout, ...],
    source: str,
    arrow: bool,
    empty_left: bool,
    empty_right: bool,
) -> Pattern:
    pattern = object.__new__(Pattern)
    names: dict[str, None] = {}
    axis_names: dict[str, None] = {}
    for layout in (*inputs, *outputs):
        names |= dict.fromkeys(layout.names)
        axis_names |= dict.fromkeys(layout.axis_names)
    pattern._hold(
        (inputs, outputs, arrow, empty_left, empty_right),
        inputs=inputs,
        outputs=outputs,
        source=source,
        arrow=arrow,
        empty_left=empty_left,
        empty_right=empty_right,
        names=tuple(names),
        axis_names=tuple(axis_names),
    )
    return pattern


@lru_cache(maxsize=4096)
def _parsed(text: str, arrow: bool) -> Pattern:
    left, right, empty_left, empty_right = Parser(text).pattern(arrow)
    return _make(tuple(starmap(make, left)), tuple(starmap(make, right)), text, arrow, empty_left, empty_right)


# --- which verb takes one layout to another. It depends on the layouts alone; the checker and the verbs both ask ------


Divided = tuple[str, ...]


def factors_of(layout: Layout) -> list[tuple[str, tuple[str, ...]]]:
    """Factor names with their axes; `...` counts as one."""
    out: list[tuple[str, tuple[str, ...]]] = []
    for dim in layout.dims:
        if dim.ellipsis:
            out.append(("...", ()))
        for atom in dim.atoms:
            out.append((atom.name, atom.axes or ()))
    return out


def verb_of(changes: Iterable[tuple[Divided, Divided]]) -> str:
    """The verb that changes the axes of factors, each from the first of a pair to the second."""
    lost: list[Divided] = []
    gained: list[Divided] = []
    for before, after in changes:
        if before == after:
            continue
        if before[: len(after)] == after:
            lost.append(before[len(after) :])
        elif after[: len(before)] == before:
            gained.append(after[len(before) :])
        else:
            return "relayout"
    if lost and gained:
        return "all_to_all" if sorted(lost) == sorted(gained) else "relayout"
    return "all_gather" if lost else "split" if gained else "nothing"


def verb_for(src: Layout, dst: Layout) -> str:
    """The verb that takes `src` to `dst`. It is "nothing" if they are the same."""
    pairs = zip(factors_of(src), factors_of(dst), strict=True)
    moved = verb_of((before, after) for (_, before), (_, after) in pairs)
    summed = set(src.unreduced) - set(dst.unreduced)
    if moved == "relayout" or set(dst.unreduced) - set(src.unreduced):
        return "relayout"
    if set(dst.reduced) - set(src.reduced):
        return "defer" if moved == "nothing" and not summed else "relayout"
    if not summed:
        return moved
    if moved == "nothing":
        return "psum"
    return "psum_scatter" if moved == "split" and summed == set(dst.axes) - set(src.axes) else "relayout"


def turned(src: Layout, dst: Layout) -> Layout | None:
    """The dimensions of `src` in the order in which `dst` names them. None where that is no other order of the same."""
    before, after = ([dim.names for dim in one.dims] for one in (src, dst))
    named = all(not dim.composite and dim.atoms and dim.atoms[0].named for dim in src.dims)
    if before == after or sorted(before) != sorted(after) or not named:
        return None
    by_name = dict(zip(before, src.dims, strict=True))
    return Layout.from_dims([by_name[names] for names in after], src.unreduced, src.reduced)


@if_possible
def call_between(
    src: Layout, dst: Layout, shown: str | Fix, make: Callable[[str, str | Fix, Layout, Layout], Fix]
) -> Fix | None:
    """The call that takes an array from one layout to another: a rearrange where `dst` names the same dimensions in
    another order, and the verb if anything moves. None where nothing changes.

    Args:
      src: How the array lies.
      dst: How it is to lie.
      shown: The array in the call.
      make: A call of a verb, of an array, between two layouts.
    """
    there = turned(src, dst)
    if there is not None:
        shown, src = make("rearrange", shown, src, there), there
    verb = verb_for(src, dst)
    if verb == "nothing":
        return shown if isinstance(shown, Fix) else None
    return make(verb, shown, src, dst)


def no_room(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    mesh: Mapping[str, int],
    *,
    known: Mapping[str, Size] | None = None,
    local: bool = True,
) -> str | None:
    """Return why an array cannot be moved from one layout to another: a size that does not divide into the blocks of
    `dst`, or that is not the one which a name of `src` has. None if it can.

    Args:
      src: How the array lies.
      dst: How it is to lie.
      shape: Its shape.
      mesh: The sizes of the mesh axes.
      known: The sizes of names.
      local: Whether the shape is that of a shard.
    """
    have = bind([("", shape, src)], mesh, known=known, local=local)
    if have.faults:
        return have.faults[0].told
    found = have.dims[0]
    if turned(src, dst) is not None:
        by_name = {dim.names: (dim, size) for dim, size in found}
        found = [by_name[dim.names] for dim in dst.dims]
    faults = bind([("", [size for _, size in found], dst)], mesh, known=have.sizes, margins=False).faults
    return faults[0].told if faults else None
