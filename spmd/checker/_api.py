"""The three questions that a kernel asks of the pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd import _compat
from spmd._jaxprs import opened
from spmd._walker import equations
from spmd.checker._axes import Origin
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._report import describe, raise_all
from spmd.checker._source import line_of
from spmd.checker._state import UNKNOWN, State
from spmd.errors import Fix
from spmd.language import Layout


def check_jaxpr(
    closed_jaxpr: Any,
    *,
    mesh_axes: tuple[str, ...],
    kernel: str,
    arg_names: Sequence[str] = (),
    arg_layouts: Sequence[Layout] = (),
) -> None:
    """Check every layout in the body of a kernel that was traced as `jit(shard_map(body))`.

    No communication, no evaluation.

    Args:
      closed_jaxpr: `kernel.trace(*args).jaxpr`.
      mesh_axes: The mesh axes that the kernel's layouts speak about.
      kernel: Its name, for the message.
      arg_names: What messages call the inputs of the body (`x`, `params['w']`), without hoisted constants.
      arg_layouts: Their layouts, from which a message tells how to mend a value.

    Raises:
      ReplicationError: One for all findings, each with the user's line and the text to paste.
    """
    walk = Dataflow(kernel, mesh_axes)
    walk.arg_names, walk.arg_layouts = tuple(arg_names), tuple(arg_layouts)
    walk_closed(walk, closed_jaxpr)
    raise_all(kernel, walk.findings)


class InState(NamedTuple):
    """One input of an inlined body: the axes it may differ on, and those it is a partial sum on."""

    different: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()


def in_states_of(values: Iterable[Any]) -> list[InState]:
    """What JAX says of arrays: varying is different, unreduced is a partial sum, all else is equal."""
    states = []
    for value in values:
        partial = _compat.unreduced_axes(value)
        different = _compat.varying_axes(value) | partial
        states.append(InState(tuple(sorted(different)), tuple(sorted(partial))))
    return states


def check_body(
    closed_jaxpr: Any,
    in_states: Sequence[InState] | None = None,
    *,
    mesh_axes: tuple[str, ...],
    kernel: str,
    axis_sizes: Mapping[str, int] | None = None,
) -> None:
    """Check a body that was inlined in the user's own `shard_map`, and traced on its shards.

    No communication, no evaluation.

    Args:
      closed_jaxpr: The body's own jaxpr.
      in_states: Its inputs in order, without constants; `in_states_of(arrays)` reads them off JAX's types.
        None: nothing is known of an input until its first layout.
      mesh_axes: The mesh axes that the kernel's layouts speak about.
      kernel: Its name, for the message.
      axis_sizes: Their sizes, if known.

    Raises:
      ReplicationError: One for all findings.
    """
    walk = Dataflow(kernel, mesh_axes, axis_sizes)
    walk.active = True
    if in_states is None:
        inner, _ = opened(closed_jaxpr)
        operands = [State(flags=UNKNOWN)] * len(inner.invars)
    else:
        operands = [_seeded(walk, i, state) for i, state in enumerate(in_states)]
    walk_closed(walk, closed_jaxpr, operands)
    raise_all(kernel, walk.findings)


def _seeded(walk: Dataflow, index: int, state: InState) -> State:
    origin = 0
    for axis in (*state.different, *state.partial):
        origin |= walk.origins.bit(("input", index), Origin("input", axis, f"input {index}, which varies over {axis}"))
    partial = walk.axes.mask(tuple(state.partial))
    return State(walk.axes.mask(tuple(state.different)) | partial, partial, 0, 0, origin)


@dataclass(frozen=True)
class OutputFacts:
    """What one output of a body really is.

    Attributes:
      different: Mesh axes along which it may differ.
      partial: Mesh axes along which it is certainly a partial sum.
      copies: For each axis on which it is equal as a gathered copy, which JAX types varying, the lines of the
        all_gathers that made it so. (On an axis in neither, it became equal in another way.)
      calls: The same gathers as the calls that the user wrote, `to="invarying"` added, ready to paste.
      reasons: For each axis in `different`, the values and primitives that it comes from.
    """

    different: tuple[str, ...]
    partial: tuple[str, ...]
    copies: dict[str, tuple[str, ...]]
    calls: dict[str, tuple[Fix, ...]]
    reasons: dict[str, tuple[str, ...]]


def explain_output(
    closed_jaxpr: Any,
    *,
    mesh_axes: tuple[str, ...],
    kernel: str = "kernel",
    arg_names: Sequence[str] = (),
    arg_layouts: Sequence[Layout] = (),
) -> list[OutputFacts]:
    """Tell gathered copies from different values, for each output of the first body in a jaxpr.

    For a kernel whose outputs JAX refused: it is traced again with out_specs that allow everything, and the
    jaxpr of that says which outputs are equal after all, and which `all_gather` should say `to="invarying"`.

    Args:
      closed_jaxpr: The diagnosing jaxpr.
      mesh_axes: The mesh axes to tell about.
      kernel: Its name.
      arg_names: What messages call the inputs of the body.
      arg_layouts: Their layouts.

    Returns:
      One entry per output of the body.
    """
    walk = Dataflow(kernel, mesh_axes)
    walk.trusting = False
    walk.arg_names, walk.arg_layouts = tuple(arg_names), tuple(arg_layouts)
    walk_closed(walk, closed_jaxpr)
    if not walk.outputs:
        return []
    # A nested body is recorded before the one around it, and the outermost is the kernel.
    outs = walk.outputs[-1]
    written = _gather_calls(closed_jaxpr)
    return [_facts(walk, state, written) for state in outs]


def _facts(walk: Dataflow, state: State, written: Mapping[tuple[str, str], tuple[Fix, ...]]) -> OutputFacts:
    different = walk.axes.names(state.different & walk.wanted)
    copies: dict[str, tuple[str, ...]] = {}
    calls: dict[str, tuple[Fix, ...]] = {}
    for axis in walk.axes.names(walk.wanted & ~state.different):
        lines = [line_of(o.eqn, o.callers) for o in walk.origins.of(state.origin, axis, "gather")]
        if lines:
            copies[axis] = tuple(dict.fromkeys(lines))
            calls[axis] = tuple(dict.fromkeys(fix for line in lines for fix in written.get((line, axis), ())))
    reasons = {axis: tuple(dict.fromkeys(map(describe, walk.origins.of(state.origin, axis)))) for axis in different}
    return OutputFacts(different, walk.axes.names(state.partial & walk.wanted), copies, calls, reasons)


def _gather_calls(jaxpr: Any) -> dict[tuple[str, str], tuple[Fix, ...]]:
    """For each user line and axis the gathers as they may leave the kernel; they told their own markers."""
    found: dict[tuple[str, str], tuple[Fix, ...]] = {}
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "spmd_layout" and "again" in eqn.params:
            for axis in eqn.params["layout"].axes:
                key = line_of(eqn), axis
                found[key] = (*found.get(key, ()), eqn.params["again"])
    return found
