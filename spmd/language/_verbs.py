"""Which verb takes one layout to another. It depends on the layouts alone; the checker and the verbs both ask."""

from __future__ import annotations

from collections.abc import Iterable

from spmd.language._layout import Layout

Axes = tuple[str, ...]


def factors_of(layout: Layout) -> list[tuple[str, tuple[str, ...]]]:
    """Factor names with their axes; `...` counts as one."""
    out: list[tuple[str, tuple[str, ...]]] = []
    for dim in layout.dims:
        if dim.ellipsis:
            out.append(("...", ()))
        for atom in dim.atoms:
            out.append((atom.name, atom.axes or ()))
    return out


def verb_of(changes: Iterable[tuple[Axes, Axes]]) -> str:
    """The verb that changes the axes of factors, each from the first of a pair to the second."""
    lost: list[Axes] = []
    gained: list[Axes] = []
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
