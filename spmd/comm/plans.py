"""`relayout`: any change of layout, by the steps of a plan; and `plan`, which says them without doing them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Never, NoReturn, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from spmd._text import Table, bytes_text, fields_of, seconds_text, shown_width, wrapped
from spmd._trees.leaves import kind_of
from spmd.accelerators import Hardware
from spmd.comm._call import Call, Operand, To, open_call
from spmd.comm._marks import constrain
from spmd.comm._meshes import MeshPlan, check_plain, moved_between, plan_between
from spmd.comm._planned import Prefer, before_and_after, check_prefer, planned
from spmd.comm.collectives import check_sides
from spmd.comm.planner._route import Axes, NamedRoute, Request, in_parts, route, seconds_of
from spmd.comm.planner._run import uneven
from spmd.errors import CommunicationError, LayoutError, SizeError
from spmd.language import Atom, Dim, Layout, axes_product, mesh_text
from spmd.mesh import sizes_for
from spmd.modes import Frame, ambient_mapping, try_frame

_EXAMPLE = 'plan("b/dp d -> b d", sizes={"b": 8, "d": 4}, mesh=mesh)'


@dataclass(frozen=True)
class Step:
    """One step of a `Plan`.

    Attributes:
      kind: "split" (a local slice), "all_gather", "all_to_all", "psum_scatter", "psum", "ppermute", or "sends":
        rounds of ppermutes, each of one piece.
      axes: The mesh axes, or parts of them, whose devices talk to each other, in mesh order; none for a split.
      before: The layout before it. A composite dimension that is divided otherwise than a layout can say is
        opened into its factors.
      after: The layout after it.
      bytes: What one device sends, by the conventions of `spmd.inspect.Collective`.
      shape: The local shape after it.
      collectives: How many it takes: none for a split, one per round of sends.
      seconds: Its estimated time, if the plan has a hardware profile.

    Example:
      >>> import spmd
      >>> [step] = spmd.plan("a/x b -> a b", sizes={"a": 8, "b": 8}, mesh={"x": 4}).steps
      >>> step.kind, step.axes, step.bytes, step.shape
      ('all_gather', ('x',), 192, (8, 8))
    """

    kind: str
    axes: Axes
    before: Layout
    after: Layout
    bytes: int
    shape: tuple[int, ...]
    collectives: int = 1
    seconds: float | None = None

    @property
    def text(self) -> str:
        """The step as the call of a verb: `all_to_all(x, "a/x b -> a b/x")`."""
        return f'{self.kind}(x, "{self.before.short} -> {self.after.short}")'

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**fields_of(self), "before": self.before.short, "after": self.after.short}


@dataclass(frozen=True, repr=False)
class Plan:
    """The steps of a relayout, what they send, and the least that any method must send. It prints as a table.

    Attributes:
      source: The layout before.
      target: The layout after.
      sizes: The global size of each name.
      mesh: All mesh axes with their sizes, in mesh order.
      dtype: The type of the elements.
      prefer: What it was planned for.
      steps: The steps, in order.
      lower_bound: Bytes that some device must receive whatever the method: what its target shard needs and its source
        shard lacks, on the device where that is most. For a partial sum of u parts that q devices want, it is the
        larger of the target shard and u - 1 + q - 1 transfers per element, averaged over the devices of all axes, also
        of those that hold copies. Both are proved, and no plan sends more than `ratio` times the least.
      exceeds: Whether an array on the way is larger per device than both ends. It is only if no sequence of collectives
        that was found avoids it.
      shape: The local shape before.
      parts: The axes that steps take in parts: `{"y": {"y_1": 2, "y_2": 2}}`, the major part first. In the layouts of
        steps the parts stand in place of the axis.

    Example:
      >>> import spmd
      >>> plan = spmd.plan("a/x b -> a b/x", sizes={"a": 8, "b": 8}, mesh={"x": 4})
      >>> [step.text for step in plan.steps]
      ['all_to_all(x, "a/x b -> a b/x")']
      >>> plan.bytes, plan.lower_bound, plan.ratio
      (48, 48, 1.0)
    """

    source: Layout
    target: Layout
    sizes: dict[str, int]
    mesh: dict[str, int]
    dtype: np.dtype
    prefer: str
    steps: tuple[Step, ...]
    lower_bound: int
    exceeds: bool
    shape: tuple[int, ...]
    parts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def steps_mesh(self) -> dict[str, int]:
        """The mesh axes with their sizes, and parts in place of the axes that are taken in parts."""
        return in_parts(self.mesh, tuple((axis, tuple(names.items())) for axis, names in self.parts.items()))

    @property
    def bytes(self) -> int:
        """Return what one device sends, which is what it receives, in all steps."""
        return sum(step.bytes for step in self.steps)

    @property
    def ratio(self) -> float:
        """`bytes` over `lower_bound`, or 1 if nothing must travel and nothing does."""
        return self.bytes / self.lower_bound if self.lower_bound else 1.0

    @property
    def collectives(self) -> int:
        """Return how many collectives the compiled program has."""
        return sum(step.collectives for step in self.steps)

    @property
    def peak(self) -> int:
        """Bytes per device of the largest array between steps, both ends included."""
        return self.dtype.itemsize * max(math.prod(s) for s in (self.shape, *(step.shape for step in self.steps)))

    @property
    def seconds(self) -> float | None:
        """The estimated time of its collectives, if it was planned with a hardware profile."""
        times = [step.seconds for step in self.steps if step.seconds is not None]
        return sum(times) if times else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "source": self.source.short,
            "target": self.target.short,
            **fields_of(self, "sizes", "mesh"),
            "dtype": self.dtype.name,
            **fields_of(
                self, "prefer", "steps", "bytes", "lower_bound", "ratio", "peak", "exceeds", "seconds", "parts"
            ),
        }

    def table(self, width: int | None = None) -> str:
        """Return the plan as text.

        Args:
          width: The number of columns. By default it is that of the terminal.
        """
        return _table(self, shown_width(width))

    def __str__(self) -> str:
        return self.table()

    def _repr_svg_(self) -> str:
        """A notebook shows the picture. It stands on this room, so it is found by the door of the package."""
        return sys.modules["spmd"].visualize(self).svg

    def __repr__(self) -> str:
        kinds = ", ".join(step.kind for step in self.steps) or "nothing to do"
        return f'Plan("{self.source.short} -> {self.target.short}": {kinds}; {self.bytes} bytes)'


def plan(
    pattern: str,
    /,
    *misplaced: Never,
    sizes: Mapping[str, int] | None = None,
    mesh: Any = None,
    dtype: Any = "float32",
    prefer: Prefer = "collectives",
    hardware: str | Hardware | None = None,
    to: Any = None,
    **names: Any,
) -> Plan | MeshPlan:
    """The cheapest way from one layout to another: `plan("a/x b -> a b/x", sizes=..., mesh=...)`.

    `relayout` does it inside a kernel, and `shard` does it to an array that lies on the mesh already. `plan` runs
    nothing and needs no devices. See `relayout` for what is compared and for the source of the method. A bare name lies
    where the surrounding `axis_mapping` says, or, inside a kernel, the mapping of the kernel.

    Communication: none. The plan says what the steps would send.

    Args:
      pattern: `"layout -> layout"`, with the same dimensions in the same order. The left one may have `{U:axes}`.
      *misplaced: Nothing. All else is given by keyword.
      sizes: The global size of each name.
      mesh: A Mesh, an AbstractMesh or `{"x": 4}`. The default is that of `jax.set_mesh`.
      dtype: The type of the elements.
      prefer: As in `relayout`: "collectives", "bytes" or "latency".
      hardware: A profile or the name of a preset, as `spmd.accelerators.hardware` takes it. Steps then have seconds.
        `prefer="latency"` needs a profile.
      to: Another mesh, with other devices, other axes or another order. The axes on the right are then its own, and the
        plan says which device sends how much to which. Devices of meshes without devices are numbered from 0.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The `Plan`. It prints as a table of its steps, their bytes, the lower bound and the ratio. With `to` a `MeshPlan`.

    Raises:
      LayoutError: If the dimensions differ, or a size is not given.
      SizeError: If a dimension does not divide.
      MeshError: If there is no mesh, or an axis is unknown.

    Example:
      >>> import spmd
      >>> p = spmd.plan("a/x b -> a b/x", sizes={"a": 4096, "b": 4096}, mesh={"x": 4})
      >>> [step.kind for step in p.steps], p.bytes, p.lower_bound
      (['all_to_all'], 12582912, 12582912)

    References:
      arXiv 2112.01075
    """
    if misplaced:
        _misplaced(pattern, *misplaced)
    if sizes is not None and not isinstance(sizes, Mapping):
        rule = f"sizes is a dict of dimension names and their sizes, not {sizes!r}."
        raise SizeError(rule, call="plan(...)", advice='as in sizes={"a": 4096, "b": 4096}')
    if to is not None:
        check_plain("plan(..., to=mesh)", prefer, hardware)
        return plan_between(pattern, {**(sizes or {}), **names}, mesh, to, _dtype(dtype))
    here = try_frame()
    mapping = ambient_mapping() if here is None else here.mapping
    frame = Frame("explicit", None, tuple(sizes_for(mesh, "plan(...)").items()), mapping)
    profile = check_prefer("plan(...)", prefer, hardware)
    kind = _dtype(dtype)
    call = open_call("plan", pattern, {**(sizes or {}), **names}, frame=frame, example=_EXAMPLE)
    if mapping is not None and here is None:
        for layout in call.written.layouts:
            mapping.place(layout, call.text)
    check_sides(call)
    source, target = _complete(call)
    request = Request(
        sizes=tuple(call.factor(a).size for a in source.atoms),
        mesh=frame.sizes,
        source=tuple(atom.axes or () for atom in source.atoms),
        target=tuple(atom.axes or () for atom in target.atoms),
        summed=tuple(a for a in source.unreduced if a not in target.unreduced),
        kept=target.unreduced,
        itemsize=kind.itemsize,
        prefer=prefer,
        hardware=profile if prefer == "latency" else None,
    )
    for atom in target.atoms:
        call.factor(atom)  # divides, or an error
    known = {atom.name: call.factor(atom).size for atom in source.atoms if atom.named}
    return as_plan(route(request), request, (source, target), known, kind, profile)


def as_plan(
    found: NamedRoute,
    request: Request,
    sides: tuple[Layout, Layout],
    sizes: dict[str, int],
    dtype: np.dtype,
    profile: Hardware | None,
) -> Plan:
    """A route with layouts and shapes."""
    source, target = sides
    mesh = in_parts(dict(request.mesh), found.parts)
    steps, before = [], source
    if found.parts:  # the ends of the steps have parts too
        cut = {axis: tuple(name for name, _ in names) for axis, names in found.parts}
        sums = [name for axis in source.unreduced for name in cut.get(axis, (axis,))]
        before = _layout(source, found.legs[0].before, sums)
    for leg in found.legs:
        last = leg is found.legs[-1] and not found.parts
        after = target if last else _layout(source, leg.after, (*request.kept, *leg.summed))
        sent = leg.kind, leg.nbytes, leg.collectives, leg.axes
        seconds = None if profile is None else seconds_of(profile, *sent, dict(request.mesh), found.parts)
        shape = _shape(after, request, leg.after, mesh)
        steps.append(Step(leg.kind, leg.axes, before, after, leg.nbytes, shape, leg.collectives, seconds))
        before = after
    return Plan(
        source,
        target,
        sizes,
        dict(request.mesh),
        dtype,
        request.prefer,
        tuple(steps),
        found.bound,
        found.exceeds,
        _shape(source, request, request.source, dict(request.mesh)),
        {axis: dict(names) for axis, names in found.parts},
    )


def _layout(like: Layout, placement: tuple[Axes, ...], unreduced: Sequence[str]) -> Layout:
    """The dimensions of `like`, divided otherwise. Composites that cannot be written so are opened."""
    axes = iter(placement)
    dims = [replace(d, atoms=tuple(replace(a, axes=next(axes)) for a in d.atoms)) for d in like.dims]
    try:
        return Layout.from_dims(dims, unreduced)
    except LayoutError:
        return Layout.from_dims([Dim((atom,)) for dim in dims for atom in dim.atoms], unreduced)


def _shape(like: Layout, request: Request, placement: tuple[Axes, ...], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The local shape of an array whose factors lie so."""
    local = iter(n // axes_product(axes, mesh) for n, axes in zip(request.sizes, placement, strict=True))
    return tuple(math.prod(next(local) for _ in dim.atoms) for dim in like.dims)


# --- what plan is given -----------------------------------------------------------------------------------------


def _misplaced(pattern: Any, *rest: Any) -> NoReturn:
    """More than a pattern was given by position: two layouts, an array as for `relayout`, sizes or a mesh."""
    texts = [str(one) for one in (pattern, *rest) if isinstance(one, str | Layout)]
    shown = next((one for one in texts if "->" in one), " -> ".join(texts[:2]) if len(texts) > 1 else "a/x b -> a b/x")
    rule = "plan takes one string, the pattern, and all else by keyword."
    if len(texts) > 1 and "->" not in "".join(texts):
        rule = "plan takes both layouts in one string, with '->' between them."
    elif texts and not isinstance(pattern, str | Layout):
        rule = "plan takes a pattern and keywords, not an array."
    got = [", ".join(f'"{one}"' if isinstance(one, str | Layout) else kind_of(one) for one in (pattern, *rest))]
    advice = f'as in plan("{shown}", sizes={{...}}, mesh=mesh)'
    raise LayoutError(rule, call="plan(...)", got=got, advice=advice)


def _dtype(dtype: Any) -> np.dtype:
    try:
        if dtype is None:  # NumPy's float64
            raise TypeError
        return jnp.dtype(dtype)
    except TypeError:
        rule = f"dtype is the type of the elements, not {dtype!r}."
        raise CommunicationError(rule, call="plan(...)", advice="as in dtype=jnp.bfloat16") from None


def _complete(call: Call) -> tuple[Layout, Layout]:
    """Both layouts. They must say the size of everything: no `...`, no margins, no unnamed dimension."""
    [source], [target] = call.pattern.inputs, call.pattern.outputs
    for dim in (*source.dims, *target.dims):
        rule = None
        if dim.ellipsis:
            rule, advice = "a plan needs every dimension, and '...' stands for any number of them.", "write them out"
        elif any(dim.margin):
            rule, advice = "a plan moves blocks, and a margin is a copy of the neighbours'.", "leave the margins out"
        elif any(atom.name == "_" for atom in dim.atoms):
            rule, advice = "a plan needs every size, and '_' has no name to give it by.", "name the dimension"
        if rule:
            call.fail(rule, at=dim.span, advice=advice)
    return source.without_brackets(), target.without_brackets()


# --- as text ----------------------------------------------------------------------------------------------------


def _table(found: Plan, width: int) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in found.sizes.items())
    head = [f"{found.source.short} -> {found.target.short}"]
    head = head if len(head[0]) <= width else [found.source.short, f"-> {found.target.short}"]
    head.append(f"{sizes}, {found.dtype.name}; {mesh_text(found.mesh)}")
    rows = []
    for step in found.steps:
        kind = f"{step.kind} in {step.collectives}" if step.kind == "sends" else step.kind
        shard, time = "x".join(map(str, step.shape)), "" if found.seconds is None else seconds_text(step.seconds or 0)
        rows.append((kind, "/".join(step.axes), step.after.short, shard, bytes_text(step.bytes), time))
    columns = ("step", "axes", "layout after", "shard after", "bytes", "time")
    table = [Table(rows, columns, right=(4, 5), below=(2,)).text(width)] if rows else []
    sentences = [part for line in summary(found) for part in wrapped(line, width)]
    return "\n".join([*(part for line in head for part in wrapped(line, width)), *table, *sentences])


def summary(found: Plan) -> list[str]:
    """The result of a plan, one sentence per line."""
    if not found.steps:
        return ["nothing to do", f"largest array on the way: {bytes_text(found.peak)} per device"]
    total = f"total: {bytes_text(found.bytes)} per device, lower bound {bytes_text(found.lower_bound)}"
    total += f", ratio {found.ratio:.2f}" + ("" if found.seconds is None else f", {seconds_text(found.seconds)}")
    lines = [total, f"largest array on the way: {bytes_text(found.peak)} per device"]
    if found.exceeds:
        lines.append("larger than both ends: no sequence of collectives avoids it for these sizes")
    for axis, names in found.parts.items():
        sizes = " x ".join(str(n) for n in names.values())
        lines.append(f"{', '.join(names)}: parts of {axis}, which is {sizes} devices")
    return lines


# --- relayout ----------------------------------------------------------------------------------------------------

# `relayout`: any change of layout, by the steps of a plan.

T = TypeVar("T")


def relayout(
    x: T,
    pattern: str,
    /,
    *,
    to: To | Mesh | None = None,
    prefer: Prefer = "collectives",
    hardware: str | Hardware | None = None,
    donate: bool = False,
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
      to: As in `all_gather`, JAX's type of what is whole afterwards. Or another mesh, outside of kernels: axes on the
        right are then those of that mesh, `x` lies on its own mesh as the left side says, and devices send each other
        pieces, as `spmd.plan(..., to=)` shows. The pattern may be a tree of patterns. One array moves after another, in
        the order that needs the least memory. Each process with a device in either mesh makes the call.
      prefer: "collectives"; "bytes" to send pieces from device to device, in rounds of ppermutes, if collectives cannot
        reach the lower bound; "latency" to take the least time on a hardware profile.
      hardware: The profile, or the name of a preset: see `spmd.accelerators.hardware`. "latency" needs one.
      donate: To another mesh only: whether each array is deleted as soon as it is moved.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array in the new layout.

    Raises:
      LayoutError: If the dimensions differ.
      SizeError: If a dimension does not divide.
      CommunicationError: If `prefer` is not one of these or lacks its profile; if random keys go to other processes.

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
    if not isinstance(to, str | None):
        check_plain("relayout(x, ..., to=mesh)", prefer, hardware)
        return moved_between(x, pattern, to, names, donate=donate)
    if donate:
        rule = "donate= is for a change of meshes: XLA reuses the memory of arrays within a program by itself."
        raise CommunicationError(rule, call=f'relayout(x, "{pattern}")', advice="leave donate= out, or give to=mesh")
    example = 'relayout(x, "b/dp d -> b d/dp")'
    also = {} if to is None else {"to": to}
    call = open_call("relayout", pattern, names, arrays=(x,), example=example, also=also)
    check_sides(call)
    call.type_copies(to)
    profile = check_prefer(call.text, prefer, hardware)
    if call.frame.explicit:
        return call.each(x, lambda own, operand: planned(own, operand, prefer, profile))
    return call.each(x, lambda own, operand: _constrained(own, operand))


def _constrained(call: Call, operand: Operand) -> Any:
    """The whole array in auto mode. If the compiler cannot make the change at once, the steps are constraints."""
    frame = call.frame
    sizes = [frame.axis_size(a) for a in {*call.src.axes, *call.dst.axes}]
    if frame.mode != "auto" or frame.constrain != "all" or not uneven(sizes):
        return operand.x
    x = operand.x
    for now in _one_by_one(*before_and_after(call, operand)):
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
