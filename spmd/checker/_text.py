"""Layouts as text: to paste, as the user would write them, and to look at, as they are inferred."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from spmd.checker._state import HIDDEN, STEP, UNREAD, Axes, Dim, State, is_divided
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


# --- what is inferred -----------------------------------------------------------------------------------------------


def inferred_text(state: State, names: Sequence[Sequence[tuple[str, int]]], sizes: Mapping[str, int]) -> str:
    """What is known of a value, `b/dp s {U:tp}`.

    Args:
      state: What is known.
      names: For each dimension its parts, each with its size on the whole array. A dimension without a name, or of
        another size, is written as its size on the whole array.
      sizes: The sizes of the mesh axes, in their order.
    """
    words = [_dim_text(dim, parts, sizes) for dim, parts in zip(state.dims, names, strict=True)]
    differs = state.different.union(p.axis for p in state.pending if p.kind == STEP)
    for mark, axes in (("U", state.partial), ("V", differs)):
        words += [f"{{{mark}:{','.join(a for a in sizes if a in axes)}}}"] if axes else []
    done: dict[str, list[str]] = {}
    for axis in sizes:
        kinds = {p.kind for p in state.pending if p.axis == axis} - {STEP}
        if kinds:
            done.setdefault(", ".join(sorted(kinds - {UNREAD})), []).append(axis)
    pending = " and ".join(f"{kinds} over {', '.join(axes)}" for kinds, axes in done.items() if kinds)
    unknown = [f"? over {', '.join(done[''])}"] if "" in done else []
    words = words if state.dims or (done and not words) else ["scalar", *words]
    return " ".join([*words, *([f"? pending {pending}"] if pending else []), *unknown])


def _dim_text(dim: Dim, parts: Sequence[tuple[str, int]], sizes: Mapping[str, int]) -> str:
    """One dimension: a name for each factor if the whole sizes are those of the names, else the whole sizes."""
    factors = [(_whole(size, axes, sizes), axes) for size, axes in dim]
    unknown = any(axes is HIDDEN for _, axes in dim)
    if unknown and len(factors) == len(parts) == 1 and factors[0][0] and parts[0][1] % factors[0][0] == 0:
        return f"{parts[0][0]}/?"
    named = None if unknown else _named(factors, parts)
    shown = [(str(size), axes if axes is HIDDEN or is_divided(axes) else ()) for size, axes in factors]
    texts = ["/".join((name, *axes)) for name, axes in (shown if named is None else named)]
    return texts[0] if len(texts) == 1 else f"({' '.join(texts)})"


def _whole(size: int, axes: Axes, sizes: Mapping[str, int]) -> int:
    for axis in axes if is_divided(axes) else ():
        size *= sizes.get(axis, 1)
    return size


def _named(factors: Sequence[tuple[int, Axes]], parts: Sequence[tuple[str, int]]) -> list[tuple[str, Axes]] | None:
    """The parts, each with the axes that divide it; what follows the first part of a factor is whole."""
    rest = list(parts)
    found: list[tuple[str, Axes]] = []
    for whole, axes in factors:
        held = axes if is_divided(axes) else ()
        while rest and rest[0][1] and whole % rest[0][1] == 0 and (whole > 1 or not found):
            name, size = rest.pop(0)
            found.append((name, held))
            whole, held = whole // size, ()
        if whole != 1:
            return None
    return None if rest or not found else found
