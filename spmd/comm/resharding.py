"""`relayout`: any change of layout, by the steps of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import jax

from spmd import _compat
from spmd.accelerators import Hardware
from spmd.comm._call import Call, Operand, To, open_call
from spmd.comm._marks import constrain
from spmd.comm.collectives import axes_after, check_sides
from spmd.comm.planner._route import Request
from spmd.comm.planner._run import run, uneven
from spmd.comm.plans import Prefer, check_prefer
from spmd.language import Atom, Dim, Layout

T = TypeVar("T")
Axes = tuple[str, ...]


def relayout(
    x: T,
    pattern: str,
    /,
    *,
    to: To | None = None,
    prefer: Prefer = "collectives",
    hardware: str | Hardware | None = None,
    **names: Any,
) -> T:
    """Bring an array from one layout to any other by the cheapest steps: `relayout(x, "a/x b -> a b/x")`.

    The steps are local slices, all_gathers, all_to_alls (of several axes, from and to several dimensions at once),
    ppermutes of whole shards, and for partial sums psum_scatters and psums. The planner takes the sequence with the
    fewest bytes per device, then the fewest collectives, then the smallest intermediate array, then the smallest arrays
    early, so that gathers come last. No array on the way is larger than the larger end, unless the sizes do not divide
    in any other way. If it saves bytes, a mesh axis that neither side names may carry slices of the copies along it.
    Between axes of different sizes, rounds of point-to-point sends are taken if they send less in no more collectives,
    or need no larger array on the way. `spmd.plan` shows the steps, their bytes, and the least that any method must
    send.

    Communication: forward what the plan says, and nothing if the layouts are equal under the mapping. Backward what the
    plan of the way back says. If copies are typed varying, their gradients are parts of a sum, which the way back adds
    up.

    Args:
      x: An array or a pytree of arrays of this layout.
      pattern: `"layout -> layout"`, with the same dimensions in the same order, and any placement on either side.
      to: As in `all_gather`, JAX's type of what is whole afterwards.
      prefer: "collectives"; "bytes" to send pieces from device to device, in rounds of ppermutes, if collectives cannot
        reach the lower bound; "latency" to take the least time on a hardware profile.
      hardware: The profile, or the name of a preset: see `spmd.accelerators.hardware`. "latency" needs one.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array in the new layout.

    Raises:
      LayoutError: If the dimensions differ.
      SizeError: If a dimension does not divide.
      CommunicationError: If `prefer` is not one of these, or lacks its profile.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=2, y=2)
      >>> @spmd.kernel("a/x/y b -> a/y b/x", mesh=mesh)
      ... def move(v):
      ...     return spmd.relayout(v, "a/x/y b -> a/y b/x")
      >>> move(jnp.arange(16).reshape(4, 4)).sharding.spec
      P('y', 'x')

    References:
      Memory-efficient array redistribution through portable collective communication, arXiv 2112.01075: all changes of
      layout as slices, all_to_alls, one permutation and gathers, none larger than both ends. Here all_to_all is more
      general, partial sums take part, and the search is exact (A* with the lower bound as its estimate).
    """
    example = 'relayout(x, "b/dp d -> b d/dp")'
    also = {} if to is None else {"to": to}
    call = open_call("relayout", pattern, names, arrays=(x,), example=example, also=also)
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    check_sides(call)
    call.type_copies(to)
    profile = check_prefer(call.text, prefer, hardware)
    explicit = call.frame.explicit

    def leaf(value: Any) -> Any:
        own = call.fork()
        operand = own.operand(value)
        with call.scope():
            out = _planned(own, operand, dst, prefer, profile) if explicit else _constrained(own, operand, src, dst)
        return own.result(out)

    return jax.tree.map(leaf, x)


def _before_and_after(call: Call, operand: Operand, dst: Layout) -> tuple[list[Axes], list[Axes]]:
    after = axes_after(operand, dst)
    for factor, axes in zip(operand.factors, after, strict=True):
        call.local(factor.size, axes, factor.name, factor.span)  # divides, or an error
    return [f.axes for f in operand.factors], after


def _constrained(call: Call, operand: Operand, src: Layout, dst: Layout) -> Any:
    """The whole array in auto mode. If the compiler cannot make the change at once, the steps are constraints."""
    frame = call.frame
    sizes = [frame.axis_size(a) for a in {*src.axes, *dst.axes}]
    if frame.mode != "auto" or frame.constrain != "all" or not uneven(sizes):
        return operand.x
    x = operand.x
    for now in _one_by_one(*_before_and_after(call, operand, dst)):
        dims = [
            Dim((), ellipsis=True) if factor.name == "...0" else Dim((Atom(factor.name, axes),))
            for factor, axes in zip(operand.factors, now, strict=True)
            if not factor.name.startswith("...") or factor.name == "...0"
        ]
        x = constrain(x, Layout.from_dims(dims), frame)
    return x


def _one_by_one(now: list[Axes], then: list[Axes]) -> Iterator[list[Axes]]:
    """The placements on the way. Each differs from the one before in one axis. An axis that is minor-most where it is,
    and next in line where it goes, is exchanged. Anything else in the way is gathered, minor-most first, and divided
    again at the end."""
    now = list(now)

    def next_in_line(axis: str) -> int | None:
        lines = enumerate(zip(now, then, strict=True))
        return next((i for i, (have, want) in lines if want[: len(have) + 1] == (*have, axis)), None)

    while wrong := [i for i, (have, want) in enumerate(zip(now, then, strict=True)) if have != want[: len(have)]]:
        ready = [(i, to) for i in wrong if (to := next_in_line(now[i][-1])) is not None]
        dim, to = ready[0] if ready else (wrong[0], None)
        axis, now[dim] = now[dim][-1], now[dim][:-1]
        if to is not None:
            now[to] = (*now[to], axis)
        yield list(now)
    for dim, want in enumerate(then):
        while now[dim] != want:
            now[dim] = want[: len(now[dim]) + 1]
            yield list(now)


def _planned(call: Call, operand: Operand, dst: Layout, prefer: str, profile: Hardware | None) -> Any:
    """One device's shard, by the steps of the plan."""
    frame, src, x = call.frame, operand.layout, operand.x
    before, after = _before_and_after(call, operand, dst)
    manual = _compat.manual_axes()
    here, there = ({a for axes in side for a in axes} for side in (before, after))
    request = Request(
        sizes=tuple(f.size for f in operand.factors),
        mesh=frame.sizes,
        source=tuple(before),
        target=tuple(after),
        summed=frame.in_mesh_order(set(src.unreduced) - set(dst.unreduced)),
        # No step may use these: partial sums that stay, copies that are marked reduced, and axes of the compiler.
        kept=tuple(a for a in frame.axis_names if a in (*dst.unreduced, *src.reduced, *dst.reduced) or a not in manual),
        itemsize=x.dtype.itemsize,
        prefer=prefer,
        hardware=profile if prefer == "latency" else None,
    )
    x = run(x, request, frozenset(here - there if call.to == "varying" else ()))
    new = frame.in_mesh_order(set(dst.reduced) - set(src.reduced))
    return _compat.pvary(x, new) if new else x
