"""The rules of a mapping: over which mesh axes named dimensions are divided, and where they put bare names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from spmd.errors import LayoutError
from spmd.language._syntax import Atom, Dim, divided, fault, writable

Axes = str | tuple[str, ...] | None
Rules = Mapping[str, tuple[str, ...]]


def rule_text(name: str, axes: tuple[str, ...]) -> str:
    """A rule as it is written in a mapping: `'batch': ('dp', 'fsdp')`."""
    return f"{name!r}: {(axes[0] if len(axes) == 1 else axes or None)!r}"


def axes_of_rule(name: object, value: object) -> tuple[str, ...]:
    """The axes of a rule as a tuple."""
    shown = (
        f"{name!r}: {value!r}"
        if isinstance(value, (str, tuple, list, type(None)))
        else f"{name!r}: {type(value).__name__}"
    )
    if not writable(name) or name == "scalar":
        raise LayoutError("The keys of a mapping are names of dimensions.", call="AxisMapping(...)", got=[shown])
    axes = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(axes, (tuple, list)) or not all(map(writable, axes)):
        rule = "A rule says a mesh axis, a tuple of mesh axes (major first), or None for whole."
        raise LayoutError(rule, call="AxisMapping(...)", got=[shown])
    for place, axis in enumerate(axes):
        if axis in axes[:place]:
            rule = f"A rule divides over each mesh axis once, but '{axis}' occurs twice."
            raise LayoutError(rule, call="AxisMapping(...)", got=[shown])
    return tuple(map(str, axes))  # NumPy's strings have a repr of their own


def place(dims: Iterable[Dim], marks: Mapping[str, Iterable[str]], rules: Rules) -> list[Dim]:
    """The dimensions with no bare name: placed by the rules, whole where there is none.

    Args:
      dims: The dimensions of a layout.
      marks: The axes of its marks, which no dimension may have too: `{"U": ..., "R": ...}`.
      rules: The mesh axes of each name.

    Raises:
      LayoutError: Two names come to lie on one mesh axis, or a factor behind a whole one is divided.
    """
    placed: list[Dim] = []
    ruled: set[str] = set()
    for dim in dims:
        atoms: list[Atom] = []
        for atom in dim.atoms:
            bare = atom.axes is None
            atoms.append(replace(atom, axes=rules.get(atom.name, ())) if bare else atom)
            if bare:
                ruled.add(atom.name)
        placed.append(replace(dim, atoms=tuple(atoms)))
    if ruled & rules.keys():  # what is whole breaks no rule
        _need_distinct(placed, marks, rules, ruled)
        for dim in placed:
            _need_leading(dim, rules, ruled)
    return placed


def _need_distinct(dims: list[Dim], marks: Mapping[str, Iterable[str]], rules: Rules, ruled: set[str]) -> None:
    """No mesh axis may be used twice; the message names both places."""

    def where(place: Atom | str) -> str:
        if isinstance(place, str):
            return f"the mark {place}"
        if place.name in ruled:
            return f"'{place.name}' by the rule {rule_text(place.name, rules[place.name])}"
        return f"'{divided(place)}' as written"

    seen: dict[str, Atom | str] = {axis: f"{{{kind}:{axis}}}" for kind, axes in marks.items() for axis in axes}
    for atom in (atom for dim in dims for atom in dim.atoms):
        for axis in atom.axes or ():
            if axis in seen:
                rule = f"The mapping puts two parts of one layout on the mesh axis '{axis}'."
                raise fault(rule, atom.span, got=[where(seen[axis]), where(atom)])
            seen[axis] = atom


def _need_leading(dim: Dim, rules: Rules, ruled: set[str]) -> None:
    """A rule may not divide a factor that stands behind a whole one."""
    whole: Atom | None = None
    for atom in dim.atoms:
        if not atom.axes:
            whole = whole or atom
        elif whole is not None and atom.name in ruled:
            rule = (
                "A composite dimension is divided on its leading factors, but the mapping divides "
                f"'{atom.name}' behind the whole factor '{whole.name}'."
            )
            ruling = f"by the rule {rule_text(whole.name, ())}" if whole.name in rules else "without a rule"
            got = [
                f"'{atom.name}' by the rule {rule_text(atom.name, rules[atom.name])}",
                f"'{whole.name}' whole {ruling}",
            ]
            bare = replace(dim, atoms=tuple(replace(one, axes=()) for one in dim.atoms))
            raise fault(rule, atom.span, got=got, advice=f"{bare.text}, or a rule that divides '{whole.name}' too")
