"""Where arguments lie when a kernel is called, as far as JAX shows it, and what its call moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd.errors import PlacementError, compose, warn
from spmd.language import Layout
from spmd.mesh import abstract_of

if TYPE_CHECKING:
    from spmd.kernel._plan import Plan

__all__ = ["VmapWarning", "check_boundary", "check_mapped"]


class VmapWarning(UserWarning):
    """`jax.vmap` of a kernel gathers the dimension that it maps, which was divided."""


def check_boundary(plan: Plan, leaves: Sequence[Any]) -> None:
    """With `boundary="error"`: every argument already lies as the signature says, as far as JAX shows it."""
    wrong = []
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        here = _elsewhere(plan, _compat.concrete(leaf), spec.layout)
        if here:
            wrong.append(f'{spec.path}: {here}; wanted "{spec.layout.short}"')
    if wrong:
        plan.signature.fail(
            'an argument lies elsewhere than its layout says, and boundary="error" forbids moving it.',
            got=wrong,
            advice="shard(x, layout) before the call",
            error=PlacementError,
        )


def _elsewhere(plan: Plan, leaf: Any, layout: Layout) -> str:
    """Where an argument lies if not as its layout says; nothing where JAX does not show it."""
    mapped = _compat.mapped(leaf)
    if mapped is not None:
        array, dim = mapped
        spec = list(plan.spec(layout, array.ndim - 1).partitions)
        spec += [None] * (array.ndim - 1 - len(spec))
        own = tuple(axis for axis in _axes(array, dim) if axis not in layout.axes)
        return _unlike(array, NamedSharding(plan.mesh, P(*spec[:dim], own or None, *spec[dim:])))
    if isinstance(leaf, jax.core.Tracer):  # its type shows Explicit axes only
        if not plan.typed_axes or plan.mode == "reference":
            return ""
        known = jax.typeof(leaf).sharding
        wanted = plan.spec(layout.without(*plan.free_axes), leaf.ndim)
        if known.mesh.empty:
            return "a traced array that lies on no mesh"
        same = known.mesh.shape == abstract_of(plan.mesh).shape and _form(known.spec) == _form(wanted)
        return "" if same else str(known.spec)
    if not isinstance(leaf, jax.Array):
        return f"{'an array of the host' if np.ndim(leaf) else f'a {type(leaf).__name__}'}, not placed"
    return _unlike(leaf, NamedSharding(plan.mesh, plan.spec(layout, leaf.ndim)))


def _unlike(array: Any, wanted: NamedSharding) -> str:
    here = array.sharding
    return "" if here.is_equivalent_to(wanted, array.ndim) else str(getattr(here, "spec", here))


def _axes(array: Any, dim: int) -> tuple[str, ...]:
    """The axes that divide one dimension of an array."""
    partitions = getattr(getattr(array.sharding, "spec", None), "partitions", ())
    entry = partitions[dim] if dim < len(partitions) else None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _form(spec: P) -> tuple[Any, ...]:
    """A spec without the entries at its end that say nothing."""
    entries = [(one,) if isinstance(one, str) else one or () for one in spec.partitions]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries), spec.unreduced, spec.reduced


def check_mapped(plan: Plan, leaves: Sequence[Any], out: Any, *, strict: bool) -> None:
    """Say that `jax.vmap` gathered a dimension which was divided, where the arrays show it: outside jit."""
    if plan.mode == "reference":
        return
    kept = {axis for x in jax.tree.leaves(out) if (one := _compat.mapped(x)) for axis in _axes(*one)}
    used = {axis for layout in (*(leaf.layout for leaf in plan.leaves), *plan.outputs.layouts) for axis in layout.axes}
    lost: list[str] = []
    got = []
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        one = _compat.mapped(leaf)
        axes = [] if one is None else [a for a in _axes(*one) if a in plan.sizes and a not in kept | used]
        if axes and isinstance(plan.mesh, Mesh):
            lost += [a for a in axes if a not in lost]
            got.append(f"{spec.path}: the mapped dimension is divided over {', '.join(axes)}")
    if not lost:
        return
    name = f'"{lost[0]}"' if len(lost) == 1 else str(tuple(lost)).replace("'", '"')
    rule = "jax.vmap gathers the dimension that it maps, unless it is told the mesh axes that divide it."
    shown = {"call": plan.signature.text, "got": got, "fix": f"jax.vmap(fn, spmd_axis_name={name})"}
    if strict:
        raise PlacementError(compose(f'{rule[:-1]}, and boundary="error" forbids moving it.', **shown))  # type: ignore[arg-type]
    warn(compose(rule, **shown), VmapWarning)  # type: ignore[arg-type]
