"""Where arguments lie when a kernel is called, as far as JAX shows it, and what the call moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._processes.copies import put
from spmd.checker import check_body
from spmd.comm._marks import mark, same_axes, tag_of
from spmd.comm.planner import move
from spmd.errors import Fault, MeshError, ModeError, PlacementError, VmapWarning, warn
from spmd.kernels._outputs import Unequal
from spmd.kernels._plan import Plan, apart_of, trial_of, typed
from spmd.kernels._signature import without
from spmd.language import Layout, axes_code, axes_product, axes_tuple, mesh_text
from spmd.mesh import check_alive, lies_whole, made_whole, outside_trace
from spmd.modes import Frame, current_frame, inside_kernel, no_frame


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
    """Return where an argument lies, if not as its layout says. It is empty if it does, or if JAX does not show it."""
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
    here = value.sharding
    if plan.left and isinstance(here, NamedSharding):
        here = NamedSharding(here.mesh, without(here.spec, value.ndim, plan.left))
    same = here.is_equivalent_to(NamedSharding(plan.mesh, wanted), value.ndim)
    return "" if same else str(getattr(here, "spec", here))


def _around(spec: P, layout: Layout, value: Any, dims: Sequence[int]) -> P:
    """The spec with the mapped dimensions in their places, which may keep the axes that divide them."""
    if not dims:
        return spec
    entries = list(_compat.partitions(spec, value.ndim - len(dims)))
    for dim in sorted(dims):
        entries.insert(dim, tuple(axis for axis in _axes(value, dim) if axis not in layout.axes) or None)
    return P(*entries)


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


def mapped_axes(plan: Plan, leaves: Sequence[Any]) -> tuple[str, ...]:
    """The axes that divide a mapped dimension, and no dimension of the kernel. Types keep Explicit ones."""
    free = set(plan.free_axes) & {*plan.sizes} - _used(plan) if plan.mode == "explicit" else ()
    return tuple(dict.fromkeys(axis for leaf in leaves for axis in _mapped_axes(leaf) if axis in free))


def unseen_axes(plan: Plan, leaves: Sequence[Any]) -> tuple[str, ...]:
    """The axes that may divide a mapped dimension, where nothing says it: inside `jit`, if none is Explicit."""
    known = [_compat.mapped(leaf) for leaf in leaves]
    hidden = any(dims and isinstance(value, jax.core.Tracer) for value, dims in known)
    if plan.mode != "explicit" or plan.typed_axes or not hidden or any(map(_compat.told_vmap, leaves)):
        return ()
    free = [axis for axis, n in plan.sizes.items() if n > 1 and axis not in _used(plan)]
    return tuple(free if len(free) < len(plan.sizes) else free[:-1])  # one stays, for the strings


def _used(plan: Plan) -> set[str]:
    results = (*plan.outputs.declared, *plan.outputs.layouts)  # the second are known after a trace
    return {axis for layout in (*(leaf.layout for leaf in plan.leaves), *results) for axis in layout.axes}


_GATHERS = "jax.vmap gathers the dimension that it maps, unless it is told the mesh axes that divide it."


def warn_unseen(plan: Plan, axes: tuple[str, ...]) -> None:
    """Warn that `jax.vmap` may gather, inside `jit`, what these axes divide, which the body needs itself."""
    divide, named = ("divides", "it") if len(axes) == 1 else ("divide", "some")
    got = [f"inside jax.jit nothing shows whether {', '.join(axes)} {divide} it, and the body names {named}"]
    advice = f"jax.vmap(fn, spmd_axis_name={axes_code(axes)}), of those that do"
    warn(str(Fault(_GATHERS, plan.signature.text, got=tuple(got), advice=advice)), VmapWarning)


def check_mapped(plan: Plan, leaves: Sequence[Any], out: Any, *, strict: bool) -> None:
    """Warn that `jax.vmap` gathered a divided dimension. Arrays show it outside jit, on Explicit axes inside too."""
    if plan.mode == "reference":
        return
    kept = {axis for x in jax.tree.leaves(out) for axis in _mapped_axes(x)}
    used = _used(plan)
    lost: list[str] = []
    got = []
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        axes = [a for a in _mapped_axes(leaf) if a in plan.sizes and a not in kept | used]
        if axes and isinstance(plan.mesh, Mesh):
            lost += [a for a in axes if a not in lost]
            got.append(f"{spec.path}: the mapped dimension is divided over {', '.join(axes)}")
    if not lost:
        return
    rule = _GATHERS
    shown: dict[str, Any] = {"call": plan.signature.text, "got": got}
    if max(len(_compat.mapped(leaf)[1]) for leaf in leaves) > 1:  # JAX fails on one around another vmap
        shown["advice"] = f"jax.vmap(fn, spmd_axis_name={axes_code(lost)}), and the innermost vmap over that dimension"
    else:
        shown["fix"] = f"jax.vmap(fn, spmd_axis_name={axes_code(lost)})"
    if strict:
        raise PlacementError(f'{rule[:-1]}, and boundary="error" forbids moving it.', **shown)
    warn(str(Fault(rule, **shown)), VmapWarning)


# --- the arguments of a kernel brought where its plan can use them ----------------------------------------------------


def arrived(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """The arguments of a call, those moved that `jit` would refuse or the compiler would not survive."""
    check_alive(zip(plan.paths, leaves, strict=True), plan.signature.text)
    if jax.ShapeDtypeStruct in map(type, leaves):
        plan.signature.fail("a jax.ShapeDtypeStruct has no values to run on.", advice=".trace(...) or .lower(...)")
    if plan.mode == "reference":
        return [x if lies_whole(x, plan.mesh) else made_whole(x, plan.mesh) for x in leaves]
    out = []
    for x, layout in zip(leaves, plan.layouts, strict=True):
        x = _brought(plan, x, layout) if plan.uneven else x
        out.append(put(x, _wanted(plan, x, layout)) if _foreign(plan, x) else x)
    return out


def _wanted(plan: Plan, leaf: Any, layout: Layout) -> NamedSharding:
    return NamedSharding(plan.mesh, plan.spec(layout, leaf.ndim))


def _foreign(plan: Plan, leaf: Any) -> bool:
    """Return whether `jit` refuses an array: its type names another mesh, or it was put on other devices.

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


# --- a kernel that is called where some of its axes are manual: in another kernel, or in the user's own `shard_map` ---


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
    if plan.left and outer.explicit:
        rule = f"this kernel leaves {', '.join(plan.left)} to the compiler, and inside this one every axis is explicit."
        advice = f"auto= for the outer kernel too, or {plan.left[0]} in the strings of this one"
        plan.signature.fail(rule, got=[outer.describe()], advice=advice, error=ModeError)
    _check_tags(plan, leaves)
    names = (
        "mode",
        "mesh",
        "sizes",
        "constrain",
        "island",
        "diagnosing",
        "invarying",
        "rows",
        "keeping",
        "stages",
        "left",
    )
    frame = plan.frame(leaves, local=outer.explicit, **{name: getattr(outer, name) for name in names})
    if outer.explicit and not inside_kernel():
        out = _checked(plan, frame, leaves)
    else:
        out = plan.run(frame, leaves, local=outer.explicit, role="operand")
    if plan.left:  # how they lie along those axes, no string of this kernel says
        out = [mark(x, Layout("..."), plan.signature.text, role="result", frame=frame) for x in out]
    return plan.outputs.returned(plan.outputs.build(out))


def _checked(plan: Plan, frame: Frame, shards: Sequence[Any]) -> Any:
    """The flat results of the body on the shards of somebody else's `shard_map`, after the pass."""

    def body(*shards: Any) -> Any:
        return plan.run(frame, shards, local=True, role="operand")

    whole = [_grown(x, s.layout, s.layout.axes, plan.sizes) for x, s in zip(shards, plan.leaves, strict=True)]
    with no_frame():
        inner = plan.jit(body, inline=True)
        check_body(
            inner.trace(*shards).jaxpr,
            shards,
            mesh_axes=frame.axis_names,
            kernel=plan.signature.text,
            axis_sizes=dict(frame.sizes),
            how=plan.check,
            ask=lambda **asked: trial_of(plan, whole, **asked),
            apart=lambda: apart_of(plan, whole),
        )
        return inner(*shards)


def _check_tags(plan: Plan, leaves: Sequence[Any]) -> None:
    wrong = []
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        known = tag_of(leaf)
        if known is not None and same_axes(known.layout.without(*plan.left), spec.layout) is False:
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
