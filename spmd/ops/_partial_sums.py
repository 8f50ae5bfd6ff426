"""What becomes of partial sums: the part of `einsum`, `reduce` and `take` that reads the right side.

An operation that works along divided dimensions leaves a part of its result on each device. The right side says what
becomes of the parts. If the axis is absent, they are reduced. If it is an extra minor-most axis of an output dimension,
they are reduced and scattered onto it. If it is in `{U:axis}`, they are left. Nothing else may change: what was whole
stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from spmd import _compat, _lax
from spmd.comm._call import Call, Factor, Operand
from spmd.errors import Fix, LayoutError, did_you_mean
from spmd.language import Atom, Layout

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Landing:
    """What becomes of the partial axes: those of each `(position, axes)` are scattered, others summed, others left."""

    scatters: tuple[tuple[int, Axes], ...]
    sums: Axes
    left: Axes

    @property
    def all_axes(self) -> Axes:
        """The axes that are reduced, scattered or not."""
        return (*self.sums, *(axis for _, axes in self.scatters for axis in axes))


def placed(name: str, axes: Iterable[str]) -> str:
    """How a factor is written: `b/dp/fsdp`."""
    return "/".join((name, *axes))


# --- what a pattern may contain -----------------------------------------------------------------------------


def plain_dims(call: Call, layout: Layout, *, unnamed: bool = False, literals: bool = False) -> None:
    """Complain about dimensions that mean nothing to the operation: margins, `_`, literal sizes."""
    call.no_margins(layout)
    for dim in layout.dims:
        for atom in dim.atoms:
            if (atom.name == "_" and not unnamed) or (atom.size is not None and not literals):
                what = "an unnamed dimension" if atom.name == "_" else f"the literal size {atom.name}"
                rule = f"{call.name} follows dimensions by their names, and {what} has none: name it."
                call.fail(rule, at=atom.span, error=LayoutError)


def right_names(call: Call, dst: Layout, have: Mapping[str, Any]) -> list[str]:
    """The factors of the right side, one per array axis, without literal 1s."""
    if dst.reduced:
        call.fail(
            f"{{R:{','.join(dst.reduced)}}} is made by defer, not by {call.name}.",
            at=call.mark_span("{R:", last=True),
            error=LayoutError,
        )
    dots = [name for name in have if name.startswith("...")]
    if dots and not dst.has_ellipsis:
        rule = f"{call.name} keeps the dimensions of '...', since the pattern does not say how they are placed."
        call.fail(rule, advice="name them, or write ... on the right too", error=LayoutError)
    names: list[str] = []
    for dim in dst.dims:
        if dim.ellipsis:
            names += dots
        for atom in dim.atoms:
            if atom.size == 1:
                continue
            if atom.name not in have:
                known = [name for name in have if not name.startswith(("_", "..."))]
                hint = did_you_mean(atom.name, known)
                rule = f"{atom.name} is on the right and not on the left{hint or '.'}"
                call.fail(rule, at=atom.span, got=[f"on the left: {', '.join(known) or 'no names'}"], error=LayoutError)
            names.append(atom.name)
    return names


# --- reading the right side ---------------------------------------------------------------------------------


def land(
    call: Call, have: Mapping[str, Factor], partial: Mapping[str, str], names: Sequence[str], *, linear: bool = True
) -> Landing:
    """Read off the right side what becomes of each partial axis.

    Args:
      call: The call. Its operands are open already.
      have: The factors of the left side by name.
      partial: The axes along which the local result is a part, each with the reason, for messages.
      names: The factors of the right side, one per array axis.
      linear: Whether partial results may be left (`{U:}`), as for sums.
    """
    dst = call.pattern.outputs[0]
    atoms = {atom.name: atom for atom in dst.atoms}
    scatters: list[tuple[int, Axes]] = []
    gone: set[str] = set()
    for position, name in enumerate(names):
        if name not in atoms:  # one of "..."
            continue
        before, after = have[name].axes, atoms[name].axes or ()
        if before == after:
            continue
        _check_step(call, atoms[name], before, after, have, partial)
        gained = after[len(before) :]
        call.local(have[name].size, after, name, atoms[name].span)
        scatters.append((position, gained))
        gone.update(gained)
    left = dst.unreduced
    if left:
        _check_left(call, dst, partial, linear)
    if not call.frame.explicit:  # whole arrays have no parts
        return Landing((), (), ())
    gone.update(left)
    return Landing(tuple(scatters), call.frame.in_mesh_order(set(partial) - gone), call.frame.in_mesh_order(left))


def _check_step(
    call: Call, atom: Atom, before: Axes, after: Axes, have: Mapping[str, Factor], partial: Mapping[str, str]
) -> None:
    """An output dimension may gain minor-most axes that carry partial results, and nothing else."""
    dst = call.pattern.outputs[0]
    one, two = placed(atom.name, before), placed(atom.name, after)
    if after == before[: len(after)]:
        lost = "/".join(before[len(after) :])
        rule = (
            f"{call.name} never gathers: {one} on the left is {two} on the right. Gather {lost} in a line of its own."
        )
        _refuse(call, atom, rule, partial, _in_two_lines(call, {atom.name: before}, "all_gather"))
    if before != after[: len(before)]:
        rule = (
            f"{call.name} adds axes at the end of a dimension only: {one} on the left cannot become {two}. "
            "That is a relayout."
        )
        axes = {name: have[name].axes for name in dst.names if name in have}
        _refuse(call, atom, rule, partial, _in_two_lines(call, axes, "relayout"))
    for axis in after[len(before) :]:
        if axis in partial:
            continue
        owner = next((f for f in have.values() if axis in f.axes), None)
        verb = "split" if owner is None else "relayout"
        why = "nothing is a partial sum along it" if owner is None else f"it divides {owner.name} on the left"
        rule = f"{axis} on {two} has nothing to scatter: {why}. That is a {verb}."
        axes = {n: have[n].axes for n in (atom.name, *([] if owner is None else [owner.name]))}
        _refuse(call, atom, rule, partial, _in_two_lines(call, axes, verb))


def _refuse(call: Call, atom: Atom, rule: str, partial: Mapping[str, str], fix: Fix | None) -> NoReturn:
    call.fail(rule, at=atom.span, got=_got(call, partial), fix=fix)


def _in_two_lines(call: Call, axes: Mapping[str, Axes], verb: str) -> Fix | None:
    """The operation without the change of layout, and the verb that then makes the change."""
    dst = call.pattern.outputs[0]
    first = call.paste(", ".join(layout.short for layout in call.pattern.inputs), with_axes(dst, axes))
    bare = dst.without_brackets()
    return None if first is None else Fix(verb, (first,), f"{with_axes(bare, axes)} -> {bare.short}")


def _check_left(call: Call, dst: Layout, partial: Mapping[str, str], linear: bool) -> None:
    for axis in dst.unreduced:
        at = call.mark_span("{U:", last=True)
        if not linear:
            call.fail("only sums and means can be left partial: the parts of anything else do not add up.", at=at)
        if axis not in partial:
            call.fail(
                f"{{U:{axis}}} on the right, and the result is not a partial sum on {axis}.",
                at=at,
                got=_got(call, partial),
                advice=f"leave {axis} out of the mark",
            )


def _got(call: Call, partial: Mapping[str, str]) -> list[str]:
    shown = [f"partial sum on {axis}: {why}" for axis, why in partial.items()]
    return [*(shown or ["no partial sum"]), call.frame.describe()]


def with_axes(layout: Layout, axes: Mapping[str, Axes]) -> str:
    """The layout's text with other axes on some names, for pasting. It is never checked."""

    def atom_text(atom: Atom) -> str:
        return placed(atom.name, axes.get(atom.name, atom.axes or ()))

    parts = []
    for dim in layout.dims:
        inside = " ".join(map(atom_text, dim.atoms))
        inside = "..." if dim.ellipsis else f"({inside})" if dim.composite else inside
        parts.append(f"[{inside}]" if dim.bracket else inside)
    if layout.unreduced:
        parts.append(f"{{U:{','.join(layout.unreduced)}}}")
    return " ".join(parts) or "scalar"


# --- running it ---------------------------------------------------------------------------------------------


def finish(x: Any, landing: Landing) -> Any:
    """Scatter first, so that the sum travels in blocks. Runs in the call's `scope`."""
    for position, axes in landing.scatters:
        x = _lax.psum_scatter(x, axes, position)
    x = _lax.psum(x, landing.sums) if landing.sums else x
    # A partial sum is typed varying even if all operands were equal (zeros), because carries of loops need that.
    return _compat.pvary(x, landing.left) if landing.left else x


def factors_by_name(operand: Operand) -> dict[str, Factor]:
    """An operand's factors by name."""
    return {factor.name: factor for factor in operand.factors}
