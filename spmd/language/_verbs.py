"""Which verb takes one layout to another. It depends on the layouts alone; the checker and the verbs both ask."""

from __future__ import annotations

from spmd.language._layout import Layout


def factors_of(layout: Layout) -> list[tuple[str, tuple[str, ...]]]:
    """Factor names with their axes; `...` counts as one."""
    out: list[tuple[str, tuple[str, ...]]] = []
    for dim in layout.dims:
        if dim.ellipsis:
            out.append(("...", ()))
        for atom in dim.atoms:
            out.append((atom.name, atom.axes or ()))
    return out


def verb_for(src: Layout, dst: Layout) -> str:
    """The verb that takes `src` to `dst`; "nothing" where they are the same."""
    lost: list[tuple[str, ...]] = []
    gained: list[tuple[str, ...]] = []
    tangled = False
    for (_, before), (_, after) in zip(factors_of(src), factors_of(dst), strict=True):
        if before == after:
            continue
        if before[: len(after)] == after:
            lost.append(before[len(after) :])
        elif after[: len(before)] == before:
            gained.append(after[len(before) :])
        else:
            tangled = True
    summed = set(src.unreduced) - set(dst.unreduced)
    if tangled or set(dst.unreduced) - set(src.unreduced):
        return "relayout"
    if set(dst.reduced) - set(src.reduced):
        return "defer" if not (lost or gained or summed) else "relayout"
    if summed:
        if not lost and not gained:
            return "psum"
        return "psum_scatter" if not lost and summed == set().union(*gained) else "relayout"
    if lost and gained:
        return "all_to_all" if sorted(lost) == sorted(gained) else "relayout"
    if lost:
        return "all_gather"
    return "split" if gained else "nothing"
