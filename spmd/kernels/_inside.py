"""A kernel that is called where some of its axes are manual: in another kernel, or in the user's own `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd.checker import check_body, in_states_of
from spmd.comm._marks import same_axes, tag_of
from spmd.errors import MeshError
from spmd.kernels._outputs import Unequal
from spmd.kernels._plan import Plan, typed
from spmd.kernels._trial import trial_of
from spmd.language import Layout, mesh_text
from spmd.modes import Frame, current_frame, inside_kernel, no_frame


def inlined(plan: Plan, leaves: Sequence[Any]) -> Any:
    """The results where all of the kernel's axes are manual: arguments are shards, and nothing moves."""
    outer = current_frame("a kernel inside another one")
    here = dict(outer.sizes)
    if any(here.get(a) != n for a, n in plan.sizes.items()):
        plan.signature.fail(
            "this kernel runs inside another one (or inside your shard_map), on another mesh.",
            got=[outer.describe(), mesh_text(plan.sizes)],
            error=MeshError,
        )
    _check_tags(plan, leaves)
    names = ("mode", "mesh", "sizes", "constrain", "island", "diagnosing", "invarying")
    frame = plan.frame(leaves, local=outer.explicit, **{name: getattr(outer, name) for name in names})
    if outer.explicit and not inside_kernel():
        out = _checked(plan, frame, leaves)
    else:
        out = plan.run(frame, leaves, local=outer.explicit, role="operand")
    return plan.outputs.returned(plan.outputs.build(out))


def _checked(plan: Plan, frame: Frame, shards: Sequence[Any]) -> Any:
    """The flat results of the body on the shards of somebody else's `shard_map`, after the pass."""

    def body(*shards: Any) -> Any:
        return plan.run(frame, shards, local=True, role="operand")

    pairs = list(zip(shards, plan.leaves, strict=True))
    with no_frame():
        inner = plan.jit(body, inline=True)
        check_body(
            inner.trace(*shards).jaxpr,
            in_states_of(shards),
            mesh_axes=frame.axis_names,
            kernel=plan.signature.text,
            axis_sizes=dict(frame.sizes),
            how=plan.signature.check,
            ask=lambda: trial_of(plan, [_grown(x, s.layout, s.layout.axes, plan.sizes) for x, s in pairs]),
        )
        return inner(*shards)


def _check_tags(plan: Plan, leaves: Sequence[Any]) -> None:
    wrong = []
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        known = tag_of(leaf)
        if known is not None and same_axes(known.layout, spec.layout) is False:
            wrong.append(f'{spec.path} holds "{known.layout.short}" ({known.origin}); wanted "{spec.layout.short}"')
    if wrong:
        plan.signature.fail(
            "inside a kernel, another kernel takes its arguments as they are: shards, which it does not move.",
            got=wrong,
            advice="all_gather, split or relayout before the call",
        )


def nested(plan: Plan, manual: Sequence[str], leaves: Sequence[Any]) -> Any:
    """The results where only some of the kernel's axes are manual: a `shard_map` over the others."""
    here = jax.sharding.get_abstract_mesh()
    missing = [a for a, n in plan.sizes.items() if here.shape.get(a) != n]
    if missing:
        lacking = ", ".join(missing)
        plan.signature.fail(
            f"the surrounding shard_map's mesh lacks the kernel's axis {lacking}, or has another size there.",
            got=[mesh_text(here.shape), mesh_text(plan.sizes)],
            error=MeshError,
        )
    pairs = list(zip(leaves, plan.leaves, strict=True))
    whole = [_grown(x, s.layout, manual, plan.sizes) for x, s in pairs]
    frame = plan.frame(whole)
    specs = tuple(plan.spec(s.layout.without(*manual), x.ndim) for x, s in pairs)
    rest = [a for a in plan.sizes if a not in manual]
    kinds = dict(zip(here.axis_names, here.axis_types, strict=True))
    if any(kinds[a] is AxisType.Explicit for a in rest):
        free = [a for a in plan.sizes if a in manual or kinds[a] is not AxisType.Explicit]
        leaves = [typed(x, s.layout.without(*free), here) for x, s in pairs]
    out_specs: list[P] = []

    def body(*shards: Any) -> Any:
        return plan.outputs.leaving(_checked(plan, frame, shards), frame, out_specs, without=tuple(manual))

    mapped = jax.shard_map(body, mesh=here, in_specs=specs, out_specs=out_specs, axis_names=frozenset(rest))
    try:
        return plan.outputs.returned(plan.outputs.build(mapped(*leaves)))
    except Unequal as unequal:
        raise plan.outputs.explained(unequal, plan.signature, frame) from None


def _grown(x: Any, layout: Layout, manual: Sequence[str], sizes: dict[str, int]) -> Any:
    """The shape that a shard over `manual` has when those axes are put together again."""
    only = layout.without(*(a for a in layout.axes if a not in manual))
    return jax.ShapeDtypeStruct(only.with_rank(x.ndim).global_shape(x.shape, sizes), x.dtype)
