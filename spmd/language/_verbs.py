"""Which verb takes one layout to another. It depends on the layouts alone; the checker and the verbs both ask."""

from __future__ import annotations

from spmd.language._layout import Layout


def factors_of(layout: Layout) -> list[tuple[str, tuple[str, ...]]]:
    """Factor names with their axes; `...` counts as one."""
    out: list[tuple[str, tuple[str, ...]]] = []
    for dim in layout.dims:
        out += [("...", ())] if dim.ellipsis else [(a.name, a.axes or ()) for a in dim.atoms]
    return out


def verb_for(src: Layout, dst: Layout) -> str:
    """The verb that takes `src` to `dst`; "nothing" where they are the same."""
    pairs = list(zip((a for _, a in factors_of(src)), (a for _, a in factors_of(dst)), strict=True))
    lost = [a[len(b) :] for a, b in pairs if a != b and a[: len(b)] == b]
    gained = [b[len(a) :] for a, b in pairs if a != b and b[: len(a)] == a]
    tangled = any(a != b and a[: len(b)] != b and b[: len(a)] != a for a, b in pairs)
    summed = set(src.unreduced) - set(dst.unreduced)
    if tangled or set(dst.unreduced) - set(src.unreduced):
        return "relayout"
    if set(dst.reduced) - set(src.reduced):
        return "defer" if not (lost or gained or summed) else "relayout"
    gone = {axis for axes in lost for axis in axes}
    new = {axis for axes in gained for axis in axes}
    if summed:
        if not lost and not gained:
            return "psum"
        return "psum_scatter" if not lost and new == summed else "relayout"
    if lost and gained:
        return "all_to_all" if sorted(lost) == sorted(gained) else "relayout"
    if lost:
        return "all_gather" if gone else "nothing"
    return "split" if gained else "nothing"
