"""`relayout`: any change of layout, as a sequence of the other verbs' collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from spmd import _compat
from spmd.comm import _lax
from spmd.comm._call import Call, Operand, open_call
from spmd.comm._marks import constrain
from spmd.comm.collectives import axes_after, check_sides, check_to
from spmd.language import Atom, Dim, Layout

__all__ = ["Step", "relayout", "steps_between"]

T = TypeVar("T")
Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a relayout: its kind, the mesh axes, and the positions of the dimensions.

    `dim` is the dimension that loses axes (all_gather, all_to_all) or gains them (psum_scatter, split);
    `to` is the one that gains them in an all_to_all.
    """

    kind: str
    axes: Axes
    dim: int = -1
    to: int = -1


def steps_between(src: list[Axes], dst: list[Axes], summed: Axes) -> list[Step]:
    """The collectives that take one placement of the dimensions to another.

    What both sides share at the front of a dimension stays. An axis that is minor-most where it is and next
    in line where it goes moves by an all_to_all; the rest is gathered, minor-most first, and sliced again.
    Partial sums are scattered where they may be, and summed before all else where not.

    Args:
      src: The axes of each dimension now, major first.
      dst: The axes of each dimension then.
      summed: Axes on which the value is a partial sum now and complete then.
    """
    now = [list(a) for a in src]
    steps: list[Step] = []
    pending = list(summed)

    def scatter() -> bool:
        for i, want in enumerate(dst):
            have = now[i]
            if tuple(have) == want[: len(have)] and len(have) < len(want) and want[len(have)] in pending:
                axis = want[len(have)]
                pending.remove(axis)
                have.append(axis)
                steps.append(Step("psum_scatter", (axis,), i))
                return True
        return False

    def exchange() -> bool:
        for i, have in enumerate(now):
            if not have or tuple(have) == dst[i][: len(have)]:
                continue
            axis = have[-1]
            for j, want in enumerate(dst):
                n = len(now[j])
                if j != i and tuple(now[j]) == want[:n] and n < len(want) and want[n] == axis:
                    have.pop()
                    now[j].append(axis)
                    steps.append(Step("all_to_all", (axis,), i, j))
                    return True
        return False

    def gather() -> bool:
        for i, have in enumerate(now):
            if tuple(have) != dst[i][: len(have)]:
                steps.append(Step("all_gather", (have.pop(),), i))
                return True
        return False

    while scatter():
        pass
    if pending:
        steps.insert(0, Step("psum", tuple(pending)))
    while exchange() or gather():
        pass
    for i, want in enumerate(dst):
        for axis in want[len(now[i]) :]:
            steps.append(Step("split", (axis,), i))
    return steps


def relayout(x: T, pattern: str, *, to: str = "varying", **names: Any) -> T:
    """Bring an array from one layout to any other: `relayout(x, "a/x b -> a b/x")`.

    Communication: whatever the change needs, as a sequence of reduce-scatters, all-reduces, all-to-alls,
    all-gathers and local slices; nothing where the layouts are equal under the mapping. Backward the reverse
    of each.

    Args:
      x: An array or a pytree of arrays of this layout.
      pattern: `"layout -> layout"`, the same dimensions in the same order, any placement on either side.
      to: As in `all_gather`, the type of what is gathered: "varying" or "invarying".
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array in the new layout.

    Raises:
      LayoutError: If the dimensions differ.
      SizeError: If a dimension does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=2, y=2)
      >>> @spmd.kernel("a/x/y b -> a/y b/x", mesh=mesh)
      ... def move(v):
      ...     return spmd.relayout(v, "a/x/y b -> a/y b/x")
      >>> move(jnp.arange(16).reshape(4, 4)).sharding.spec
      P('y', 'x')
    """
    call = open_call("relayout", pattern, names, arrays=(x,))
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    check_sides(call)
    check_to(call, to)
    explicit = call.frame.explicit

    def leaf(value: Any) -> Any:
        own = call.fork()
        operand = own.operand(value)
        with call.scope():
            out = _run(own, operand, src, dst, to) if explicit else _constrained(own, operand, src, dst)
        return own.result(out)

    return jax.tree.map(leaf, x)


def _before_and_after(call: Call, operand: Operand, dst: Layout) -> tuple[list[Axes], list[Axes]]:
    after = axes_after(operand, dst)
    for factor, axes in zip(operand.factors, after, strict=True):
        call.local(factor.size, axes, factor.name, factor.span)  # divides, or an error
    return [f.axes for f in operand.factors], after


def _constrained(call: Call, operand: Operand, src: Layout, dst: Layout) -> Any:
    """The whole array in auto mode. XLA of jax 0.12 aborts the process on some direct changes between axes of sizes
    such as 2 and 3 ("Could not slice dimension"), and not on the steps: only there the steps are constraints."""
    frame = call.frame
    sizes = [frame.axis_size(a) for a in {*src.axes, *dst.axes}]
    if frame.mode != "auto" or frame.constrain != "all" or all(a % b == 0 or b % a == 0 for a in sizes for b in sizes):
        return operand.x
    x = operand.x
    now, after = _before_and_after(call, operand, dst)
    for step in steps_between(now, after, ()):
        for axis in step.axes:
            if step.kind != "split":
                now[step.dim] = now[step.dim][:-1]
            if step.kind != "all_gather":
                gains = step.dim if step.kind == "split" else step.to
                now[gains] = (*now[gains], axis)
        dims = [
            Dim((), ellipsis=True) if factor.name == "...0" else Dim((Atom(factor.name, axes),))
            for factor, axes in zip(operand.factors, now, strict=True)
            if not factor.name.startswith("...") or factor.name == "...0"
        ]
        x = constrain(x, Layout.from_dims(dims), frame)
    return x


def _run(call: Call, operand: Operand, src: Layout, dst: Layout, to: str) -> Any:
    before, after = _before_and_after(call, operand, dst)
    summed = call.frame.in_mesh_order(set(src.unreduced) - set(dst.unreduced))
    x = operand.x
    used = {a for axes in after for a in axes}
    for step in steps_between(before, after, summed):
        if step.kind == "psum":
            x = _lax.psum(x, step.axes)
        elif step.kind == "psum_scatter":
            x = _lax.psum_scatter(x, step.axes, step.dim)
        elif step.kind == "all_to_all":
            x = _lax.all_to_all(x, step.axes, split=step.to, concat=step.dim)
        elif step.kind == "all_gather":
            # what is sliced again must be typed varying; only an axis that leaves for good may be invarying
            x = _lax.all_gather(x, step.axes, step.dim, "varying" if set(step.axes) & used else to)
        else:
            for axis in step.axes:
                x = _lax.slice_block(x, axis, step.dim, call.frame.axis_size(axis))
    new = call.frame.in_mesh_order(set(dst.reduced) - set(src.reduced))
    return _compat.pvary(x, new) if new else x
