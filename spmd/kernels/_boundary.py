"""Where arguments lie when a kernel is called, as far as JAX shows it, and what the call moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd.errors import Fault, PlacementError, warn
from spmd.kernels._plan import Plan
from spmd.language import Layout, axes_tuple


class VmapWarning(UserWarning):
    """`jax.vmap` of a kernel gathers the dimension that it maps, which was divided."""


def check_boundary(plan: Plan, leaves: Sequence[Any]) -> None:
    """With `boundary="error"`: every argument already lies as the signature says, as far as JAX shows it."""
    wrong = []
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        here = _elsewhere(plan, leaf, spec.layout)
        if here:
            wrong.append(f'{spec.path}: {here}; wanted "{spec.layout.short}"')
    if wrong:
        plan.signature.fail(
            'an argument does not lie as its layout says, and boundary="error" forbids moving it.',
            got=wrong,
            advice="shard(x, layout) before the call",
            error=PlacementError,
        )


def _elsewhere(plan: Plan, leaf: Any, layout: Layout) -> str:
    """Where an argument lies, if not as its layout says. It is empty if it does, or if JAX does not show it."""
    value, dims = _compat.mapped(leaf)
    if isinstance(value, jax.core.Tracer):  # its type shows Explicit axes only
        if not plan.typed_axes or plan.mode == "reference":
            return ""
        known = jax.typeof(value).sharding
        wanted = _around(plan.spec(layout.without(*plan.free_axes), value.ndim - len(dims)), layout, value, dims)
        if known.mesh.empty:
            return "a traced array that lies on no mesh"
        same = known.mesh.shape == plan.mesh.shape and _form(known.spec) == _form(wanted)
        return "" if same else str(known.spec)
    if not isinstance(value, jax.Array):
        return f"{'an array of the host' if np.ndim(value) else f'a {type(value).__name__}'}, not placed"
    wanted = _around(plan.spec(layout, value.ndim - len(dims)), layout, value, dims)
    return _unlike(value, NamedSharding(plan.mesh, wanted))


def _around(spec: P, layout: Layout, value: Any, dims: Sequence[int]) -> P:
    """The spec with the mapped dimensions in their places, which may keep the axes that divide them."""
    if not dims:
        return spec
    entries = list(_compat.partitions(spec, value.ndim - len(dims)))
    for dim in sorted(dims):
        entries.insert(dim, tuple(axis for axis in _axes(value, dim) if axis not in layout.axes) or None)
    return P(*entries)


def _unlike(array: Any, wanted: NamedSharding) -> str:
    here = array.sharding
    return "" if here.is_equivalent_to(wanted, array.ndim) else str(getattr(here, "spec", here))


def _axes(array: Any, dim: int) -> tuple[str, ...]:
    """The axes that divide one dimension of an array."""
    sharding = jax.typeof(array).sharding if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    spec = getattr(sharding, "spec", None)
    return () if spec is None else axes_tuple(_compat.partitions(spec, array.ndim)[dim])


def _form(spec: P) -> tuple[Any, ...]:
    """A spec without the empty entries at its end."""
    entries = [axes_tuple(one) for one in _compat.partitions(spec)]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries), spec.unreduced, spec.reduced


def _mapped_axes(x: Any) -> tuple[str, ...]:
    """The axes that divide the mapped dimensions, as far as JAX shows them."""
    value, dims = _compat.mapped(x)
    return tuple(axis for dim in dims for axis in _axes(value, dim))


def check_mapped(plan: Plan, leaves: Sequence[Any], out: Any, *, strict: bool) -> None:
    """Warn that `jax.vmap` gathered a divided dimension. Arrays show it outside jit, on Explicit axes inside too."""
    if plan.mode == "reference":
        return
    kept = {axis for x in jax.tree.leaves(out) for axis in _mapped_axes(x)}
    used = {axis for layout in (*(leaf.layout for leaf in plan.leaves), *plan.outputs.layouts) for axis in layout.axes}
    lost: list[str] = []
    got = []
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        axes = [a for a in _mapped_axes(leaf) if a in plan.sizes and a not in kept | used]
        if axes and isinstance(plan.mesh, Mesh):
            lost += [a for a in axes if a not in lost]
            got.append(f"{spec.path}: the mapped dimension is divided over {', '.join(axes)}")
    if not lost:
        return
    name = f'"{lost[0]}"' if len(lost) == 1 else str(tuple(lost)).replace("'", '"')
    rule = "jax.vmap gathers the dimension that it maps, unless it is told the mesh axes that divide it."
    shown: dict[str, Any] = {"call": plan.signature.text, "got": got}
    if max(len(_compat.mapped(leaf)[1]) for leaf in leaves) > 1:  # JAX fails on one around another vmap
        shown["advice"] = f"jax.vmap(fn, spmd_axis_name={name}), and the innermost vmap over that dimension"
    else:
        shown["fix"] = f"jax.vmap(fn, spmd_axis_name={name})"
    if strict:
        raise PlacementError(f'{rule[:-1]}, and boundary="error" forbids moving it.', **shown)
    warn(str(Fault(rule, **shown)), VmapWarning)
