"""Words that the messages share: places, reasons, lists, and layouts as the user would write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from spmd._jaxprs.lines import line_of
from spmd._jaxprs.walker import Equation, Variable
from spmd.checker._history import Origin
from spmd.checker._state import HIDDEN, Pending, State, axes_of_dim
from spmd.language import Atom, Layout

_SHOWN = 3  # reasons listed per value; a value of a deep network has hundreds


# The names that users know, for the variants that JAX picks by type.
_KNOWN_AS = {
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "psum_scatter",
    "reduce_scatter_start": "psum_scatter_start",
    "unreduced_reduce_scatter": "psum_scatter",
    "add_any": "add",
    "select_n": "where",
    "dot_general": "matmul",
}


def named(of: Any) -> str:
    name: str = of if isinstance(of, str) else of.primitive.name
    return _KNOWN_AS.get(name, name)


def where(walk: Any, eqn: Equation) -> tuple[str, ...]:
    place = line_of(eqn, walk.callers)
    return (f"{named(eqn)} at {place}" if place else f"{named(eqn)} in {walk.kernel}",)


def reasons(walk: Any, atom: Variable, axes: Sequence[str]) -> list[str]:
    """Return why the value differs along these axes: the inputs and the primitives that it was made from."""
    lines: dict[str, None] = {}
    for axis in axes:
        for origin in walk.history.sources(atom, axis):
            lines[describe(origin)] = None
    found = list(lines)
    if len(found) > _SHOWN:
        found = [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]
    return found


def describe(origin: Origin) -> str:
    """One reason, as a line."""
    if origin.kind == "input":
        return f"made from {origin.label}"
    place = line_of(origin.eqn, origin.callers)
    at = f", at {place}" if place else ""
    if origin.kind == "spmd_layout":
        return f'made from a value divided by "{origin.eqn.params["layout"]}"{at}'
    return f"made from {named(origin.kind)} over {origin.axis}{at}"


def joined(one: str | None, other: str | None, between: str = " ") -> str | None:
    """Two pieces of advice, of which some could not be made."""
    return f";{between}".join(filter(None, (one, other))) or None


def listed(names: Sequence[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def marked(axes: Sequence[str]) -> str:
    return f"{{U:{','.join(axes)}}}"


def shown_dims(state: State) -> str:
    """A state as a layout without names."""
    dims = []
    for dim in state.dims:
        axes = axes_of_dim(dim)
        unknown = any(a is HIDDEN for _, a in dim)
        parts = ["/".join(("_", *axes_of_dim((factor,)))) for factor in dim] if axes else ["_"]
        dims.append("?" if unknown else parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
    marks = f" {marked(sorted(state.partial))}" if state.partial else ""
    return (" ".join(dims) or "scalar") + marks


def text_of(layout: Layout, given: Layout, call: str) -> str:
    """The text of `layout`, which is the layout `given` in `call`, or that one changed.

    A resolved layout says `/1` wherever nothing divides. That is noise, except where a mapping is in force:
    then some name of the call is divided without a slash, and a bare name in a fix would be divided too.
    """
    written = all("/".join((atom.name, *atom.axes)) in call for atom in given.atoms if atom.axes)
    return layout.short if written else str(layout)


def changed(
    layout: Layout,
    *,
    drop: Iterable[str] = (),
    add: str | None = None,
    unreduced: Iterable[str] | None = None,
) -> Layout:
    """`layout` without some axes in its dims, with one more on its first dim, or with other `{U:}` marks."""
    gone = set(drop)
    dims = []
    for dim in layout.without_brackets().dims:
        atoms = tuple(replace(a, axes=tuple(x for x in a.axes or () if x not in gone)) for a in dim.atoms)
        if add is not None and atoms:
            atoms = (replace(atoms[0], axes=(*(atoms[0].axes or ()), add)), *atoms[1:])
            add = None
        dims.append(replace(dim, atoms=_leading(atoms)))
    marks = layout.unreduced if unreduced is None else tuple(sorted(unreduced))
    return Layout.from_dims(tuple(dims), unreduced=marks, reduced=layout.reduced)


def _leading(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """The factors of a dimension, divided on the leading ones only: another one behind a whole factor is whole too."""
    whole = next((i for i, one in enumerate(atoms) if not one.axes), len(atoms))
    return (*atoms[:whole], *(replace(one, axes=()) if one.axes else one for one in atoms[whole:]))


def written(eqn: Equation, layout: Layout) -> str:
    return text_of(layout, eqn.params["layout"], eqn.params["call"])


def done_to_pieces(pending: Sequence[Pending]) -> str:
    kinds = list(dict.fromkeys(KINDS.get(p.kind, p.kind) for p in pending))
    verb, along = "was" if len(kinds) == 1 else "were", listed(list(dict.fromkeys(p.axis for p in pending)))
    return f"{listed(kinds)} {verb} done on each device's own piece along {along}"


def pieces_of(walk: Any, pending: Sequence[Pending]) -> list[str]:
    """Return where it was done."""
    lines: dict[str, None] = {}
    for p in pending:
        eqn, callers = walk.made_pending[p.at]
        place = line_of(eqn, callers)
        lines[f"{named(eqn)} over {p.axis}" + (f", at {place}" if place else "")] = None
    return list(lines)


KINDS = {
    "max": "a maximum", "min": "a minimum", "product": "a product",
    "all": "a test of all elements", "any": "a test of any element",
    "position": "an argmax or argmin", "scan": "a cumulative operation", "sort": "a sort", "flip": "a flip",
    "fft": "a transform", "stencil": "a stencil", "slice": "a slice", "pad": "a pad", "index": "an index",
    "concatenate": "a concatenation", "top_k": "a top_k", "linear algebra": "a factorisation",
    "recurrence": "a loop", "pairs": "a product of one piece with another", "update": "an update",
    "gather": "a gather along another dimension", "xor": "an xor",
    "term": "a slice of a partial sum, this device's block of its own term,",
}  # fmt: skip
