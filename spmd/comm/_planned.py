"""One device's shard, moved by the steps of a plan: what `relayout` does, and a `psum` that is told what to prefer."""

from __future__ import annotations

from typing import Any, Literal, get_args

from spmd import _compat
from spmd.accelerators import Hardware, hardware
from spmd.comm._call import Call, Operand
from spmd.comm.planner._route import Axes, Request
from spmd.comm.planner._run import run
from spmd.errors import CommunicationError, check_one_of
from spmd.language import Layout, factors_of

Prefer = Literal["collectives", "bytes", "latency"]
PREFER = get_args(Prefer)


def check_prefer(call: str, prefer: Any, profile: Any) -> Hardware | None:
    """The hardware profile that the keywords name. Keywords that name none are an error."""
    check_one_of("prefer", prefer, PREFER, call, CommunicationError)
    if profile is None and prefer == "latency":
        rule = 'prefer="latency" weighs steps by what the links of the mesh take, so it needs a hardware profile.'
        raise CommunicationError(rule, call=call, advice='hardware="h100", or a spmd.accelerators.Hardware of your own')
    return None if profile is None else hardware(profile)


def axes_after(operand: Operand, dst: Layout) -> list[tuple[str, ...]]:
    """The axes that each of the operand's factors has in `dst`. Factors that `...` stands for have none."""
    atoms = factors_of(dst)
    extra = len(operand.factors) - len(atoms) + 1
    after: list[tuple[str, ...]] = []
    for name, axes in atoms:
        after += [()] * extra if name == "..." else [axes]
    return after


def before_and_after(call: Call, operand: Operand) -> tuple[list[Axes], list[Axes]]:
    after = axes_after(operand, call.dst)
    for factor, axes in zip(operand.factors, after, strict=True):
        call.local(factor.size, axes, factor.name, factor.span)  # divides, or an error
    return [f.axes for f in operand.factors], after


def planned(call: Call, operand: Operand, prefer: str, profile: Hardware | None) -> Any:
    """One device's shard, by the steps of the plan."""
    frame, src, dst, x = call.frame, call.src, call.dst, operand.x
    before, after = before_and_after(call, operand)
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
