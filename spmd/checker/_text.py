"""Layouts as text to paste, as the user would write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from spmd.language import Atom, Layout


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
