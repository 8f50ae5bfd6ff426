"""The arguments of a kernel brought where its plan can use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from spmd import _compat
from spmd._replicas import check_replicas, put
from spmd.comm.planner import move
from spmd.kernels._plan import Plan
from spmd.language import Layout, axes_product, axes_tuple
from spmd.mesh import check_alive, lies_whole, made_whole, outside_trace


def arrived(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """The arguments of a call, those moved that `jit` would refuse or the compiler would not survive."""
    check_alive(zip(plan.paths, leaves, strict=True), plan.signature.text)
    if jax.ShapeDtypeStruct in map(type, leaves):
        plan.signature.fail("a jax.ShapeDtypeStruct has no values to run on.", advice=".trace(...) or .lower(...)")
    if plan.mode == "reference":
        return [x if lies_whole(x, plan.mesh) else made_whole(x, plan.mesh) for x in leaves]
    check_replicas(zip(plan.paths, leaves, strict=True), plan.mesh, plan.signature.text)
    out = []
    for x, layout in zip(leaves, plan.layouts, strict=True):
        x = _brought(plan, x, layout) if plan.uneven else x
        out.append(put(x, _wanted(plan, x, layout)) if _foreign(plan, x) else x)
    return out


def _wanted(plan: Plan, leaf: Any, layout: Layout) -> NamedSharding:
    return NamedSharding(plan.mesh, plan.spec(layout, leaf.ndim))


def _foreign(plan: Plan, leaf: Any) -> bool:
    """Whether `jit` refuses an array: its type names another mesh, or it was put on other devices.

    The order of the devices counts. A trace around the call takes the array as a constant, wherever it lies.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not isinstance(plan.mesh, Mesh):
        return False
    lies, devices = leaf.sharding, list(plan.mesh.devices.flat)
    if not isinstance(lies, NamedSharding):
        return leaf.committed and lies.device_set != set(devices) and outside_trace()
    if lies.mesh == plan.mesh:
        return False
    if AxisType.Explicit in lies.mesh.axis_types:
        return True
    return isinstance(lies.mesh, Mesh) and list(lies.mesh.devices.flat) != devices and outside_trace()


def _brought(plan: Plan, leaf: Any, layout: Layout) -> Any:
    """An argument that lies otherwise on this mesh, moved by the planned steps: the compiler may not survive it."""
    held = getattr(_compat.concrete(leaf), "sharding", None)
    ranked = layout.has_ellipsis or len(layout.dims) == leaf.ndim
    if not (isinstance(held, NamedSharding) and held.mesh == plan.mesh and ranked):
        return leaf
    wanted = _wanted(plan, leaf, layout)
    parts = [axes_product(axes_tuple(e), plan.sizes) for e in wanted.spec]
    fits = all(n % k == 0 for n, k in zip(leaf.shape, parts, strict=False))
    moved = move(leaf, wanted) if fits and not held.is_equivalent_to(wanted, leaf.ndim) else None
    return leaf if moved is None else moved
