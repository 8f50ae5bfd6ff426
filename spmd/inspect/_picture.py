"""`visualize`: which device holds what, as text and as SVG."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

import spmd.inspect._blocks as blocks
from spmd import _compat
from spmd._text import Line
from spmd._trees.leaves import is_array, kind_of
from spmd.comm._marks import tag_of
from spmd.comm.plans import MeshPlan, Plan
from spmd.drawing import _picture as draw
from spmd.errors import Fix, LayoutError, MeshError, PlacementError, SpmdError
from spmd.inspect._blocks import Holdings
from spmd.inspect._picture_plan import PlanDrawing
from spmd.language import AxisMapping, Layout
from spmd.mesh import ambient_mesh, sizes_for
from spmd.modes import Frame, ambient_mapping, try_frame

_CALL = "visualize(...)"


def visualize(
    layout_or_array_or_plan: Any,
    shape: Any = None,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
) -> draw.Picture:
    """Draw which device holds which block of an array: `visualize("b/dp s d/tp", (8, 16, 32), mesh)`.

    It draws any rank and any layout: dimensions over several axes, composites, partial sums (`sum(0-3)`: the value is
    the sum of what these devices hold), margins, and replicas (one cell lists all its devices). For more than 64
    devices the picture is a summary. Inside a kernel, at trace time, it draws a traced value by the layout that `spmd`
    knows of it, or a layout string on the kernel's mesh with the sizes that the signature binds.

    Communication: none. No values are read.

    Args:
      layout_or_array_or_plan: A layout, an array on devices, a `jax.ShapeDtypeStruct` with a sharding, a value that is
        traced in a kernel, a `Plan`, also one of two meshes, or a mesh, which is drawn with its devices.
      shape: For a layout, the global shape, or sizes by name: `{"b": 8}`. Without it blocks are numbered.
      mesh: For a layout, a mesh, an abstract mesh, or `{"dp": 2}`. By default it is that of the kernel being traced, or
        else that of `jax.set_mesh`.

    Returns:
      A `Picture`. It prints as text, and a notebook shows it as SVG. `.save("file.svg")` writes it to a file.

    Raises:
      LayoutError: If the string is not a layout, or the value does not have one.
      SizeError: If sizes do not fit the layout.
      MeshError: If there is no mesh, or it lacks an axis.
      PlacementError: If the array does not lie on devices, or the compiler has yet to decide where it lies.

    Example:
      >>> import spmd
      >>> print(spmd.visualize("b/dp d", (8, 4), {"dp": 2, "tp": 2}))
      b/dp d   b=8, d=4   mesh dp=2, tp=2
      <BLANKLINE>
              d
      b/dp     0:4
           ┌──────┐
       0:4 │ 0, 1 │
           ├──────┤
       4:8 │ 2, 3 │
           └──────┘
      <BLANKLINE>
      each device holds a shard of 4 x 4
      devices in one cell hold equal copies (along tp)
      <BLANKLINE>
      devices  tp=0  tp=1
      dp=0        0     1
      dp=1        2     3
    """
    what = layout_or_array_or_plan
    if isinstance(what, (str, Layout)):
        return draw.Picture(_of_holdings(_of_text(what, shape, mesh)))
    if (shape is not None or mesh is not None) and (isinstance(what, Plan | MeshPlan) or hasattr(what, "sharding")):
        rule = "An array or a plan has a shape and a mesh of its own. Only a layout is given them."
        raise LayoutError(rule, call=_CALL, fix=Fix("visualize"))
    if isinstance(what, Plan):
        return draw.Picture(PlanDrawing(what))
    if isinstance(what, MeshPlan):
        return draw.Picture(_of_two_meshes(what))
    if isinstance(what, Mesh | AbstractMesh):
        return draw.Picture(_of_mesh(what))
    if isinstance(what, jax.core.Tracer):
        return draw.Picture(_of_tracer(what))
    return draw.Picture(_of_holdings(_of_array(what)))


@dataclass(frozen=True)
class _Drawn:
    """A picture: grids, with sentences below the first of them.

    Attributes:
      title: What is drawn.
      about: What else the heading says.
      grids: The grids, those of one list side by side.
      said: The sentences.
      subject: What the picture shows, for whoever cannot see it.
      facts: The same as plain values.
    """

    title: str
    about: Sequence[str]
    grids: Sequence[list[list[draw.Grid]]]
    said: Sequence[str]
    subject: str
    facts: dict[str, Any]

    def lines(self, width: int) -> list[Line]:
        first, *others = [draw.grid_lines(rows, width) for rows in self.grids] or [[]]
        parts = [draw.heading([self.title, *self.about], width), first, draw.sentences(self.said, width), *others]
        return [line for part in parts if part for line in ([], *part)][1:]

    def svg(self) -> str:
        parts = [draw.caption(self.title, ["; ".join(filter(None, self.about))])]
        parts += [draw.flow([draw.grid_box(rows) for rows in self.grids])] if self.grids else []
        parts += [draw.caption("", self.said)] if self.said else []
        return draw.card(draw.below(parts, 16), self.subject)

    def to_dict(self) -> dict[str, Any]:
        return self.facts


def _of_holdings(held: Holdings) -> _Drawn:
    """The blocks, and the devices of the mesh, if there are few enough to list."""
    colours = blocks.tints(held)
    own = {device: colours[held.cells[block][0][0]] for device, block in held.block_of.items()}  # that of its block
    devices = [[[blocks.device_grid(held, own)]]] if held.mesh and not blocks.is_summary(held) else []
    grids = [blocks.block_grids(held, colours), *devices]
    about = [held.kind, held.mesh_text if held.mesh else ""]
    return _Drawn(
        held.title, about, grids, blocks.facts(held), f"{held.title}: which device holds what", held.to_dict()
    )


def _of_mesh(mesh: Mesh | AbstractMesh) -> _Drawn:
    """Return which device is where, in colours that go along the first axis of several devices."""
    held = blocks.of_layout(Layout("scalar"), {}, mesh, call=_CALL)
    first = next((place for place, (_, size) in enumerate(held.mesh) if size > 1), 0)
    colours = {device: at[first] for device, at in zip(held.devices, held.coordinates, strict=True)}
    grid = blocks.device_grid(held, {device: colour % blocks.MOST_DEVICES for device, colour in colours.items()})
    return _Drawn(held.mesh_text, [], [[[grid]]], [], held.mesh_text, {"devices": held.placed})


def _of_two_meshes(plan: MeshPlan) -> _Drawn:
    """Return what the devices of both meshes hold, side by side, and what they send to each other."""
    ends = zip((plan.source, plan.target), (plan.mesh, plan.to), plan.devices, strict=True)
    states = [
        replace(
            blocks.of_layout(layout, plan.sizes, _abstract(mesh), call=_CALL),
            devices=devices,
        )
        for layout, mesh, devices in ends
    ]
    colours = blocks.tints(*states)
    rows = [blocks.block_grids(state, colours) for state in states]
    grids = [[*before, *after] for before, after in itertools.zip_longest(*rows, fillvalue=[])]
    title, about = plan.head
    return _Drawn(title, [about], [grids], plan.said, f"{title}: which device sends what", plan.to_dict())


# --- a layout ------------------------------------------------------------------------------------------------


def _of_text(text: str | Layout, shape: Any, mesh: Any) -> Holdings:
    call = f'visualize("{text}")'
    if isinstance(text, str) and "->" in text:
        advice = f'spmd.visualize(spmd.plan("{text}", sizes=..., mesh=mesh, dtype=...))'
        rule = "A picture shows one layout. The picture of a pattern is the picture of its plan."
        raise LayoutError(rule, call=call, advice=advice)
    frame = try_frame()
    layout = Layout(text, call=call).without_brackets()
    if shape is not None and not isinstance(shape, Mapping):
        shape = _sequence(shape, call)
        layout = layout.with_rank(len(shape)) if layout.has_ellipsis else layout
    if layout.has_ellipsis:
        rule = "A picture needs every dimension, and only a shape tells how many '...' stands for."
        raise LayoutError(rule, call=call, advice="shape=(8, 16), or write the dimensions out")
    sizes, dims = blocks.known_sizes(layout, shape, call)
    if mesh is None and frame is not None:
        layout = _placed(layout.bind(**dict(frame.renames)), frame.mapping)
        bound = {name: known.size for name, known in frame.bound if name in layout.names}
        return blocks.of_layout(layout, {**bound, **sizes}, _frame_mesh(frame), dims=dims, call=call)
    given = mesh is None or isinstance(mesh, Mesh | AbstractMesh)
    found = mesh or ambient_mesh() if given else _abstract(sizes_for(mesh, call))
    if found is None:
        rule = "A layout says which mesh axes divide an array, and the mesh says how many devices they have."
        advice = f'as in visualize("{text}", shape, mesh=spmd.make_mesh(dp=2, tp=4))'
        raise MeshError(rule, call=call, advice=advice)
    mapping = ambient_mapping()
    layout = layout if mapping is None else mapping.place(layout, call)
    return blocks.of_layout(layout, sizes, found, dims=dims, call=call)


def _placed(layout: Layout, mapping: AxisMapping | None) -> Layout:
    return layout if mapping is None else layout.resolve(mapping)


def _sequence(shape: Any, call: str) -> tuple[Any, ...]:
    try:
        return tuple(shape)
    except TypeError:
        rule = f"The shape is a tuple of global sizes or a mapping from names to them, not {kind_of(shape)}."
        raise LayoutError(rule, call=call, advice="as in (8, 16)") from None


def _frame_mesh(frame: Frame) -> Mesh | AbstractMesh:
    """The mesh of a body, with its devices if they are known."""
    if isinstance(frame.mesh, Mesh) and tuple(frame.mesh.shape.items()) == tuple(frame.sizes):
        return frame.mesh
    return _abstract(dict(frame.sizes))


def _abstract(sizes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


# --- a traced value ------------------------------------------------------------------------------------------


def _of_tracer(x: Any) -> _Drawn:
    call = "visualize(x)"
    frame, known = try_frame(), tag_of(x)
    if frame is None:
        return _of_holdings(_of_typed(x, call))
    if known is not None:
        return _of_holdings(_of_tagged(x, known[0], frame, call))
    axes = ", ".join(frame.in_mesh_order(_compat.varying_axes(x)))
    said = {
        "explicit": f"its shards differ along {axes}" if axes else "its shards are equal",
        "auto": "it is whole, and where it lies is the compiler's choice",
        "reference": "it is whole, and lies on one device",
    }
    sentence = f'no layout is known of it, and annotate(x, "...") states one; in {frame.mode} mode {said[frame.mode]}'
    title = f"a traced value   {_kind(x)}"
    return _Drawn(title, [], [], [sentence], title, {"layout": None, "notes": [sentence]})


def _of_tagged(x: Any, layout: Layout, frame: Frame, call: str) -> Holdings:
    layout = layout.without_brackets()
    layout = _placed(layout.with_rank(x.ndim) if layout.has_ellipsis else layout, frame.mapping)
    mesh = _frame_mesh(frame)
    shape = layout.global_shape(x.shape, mesh) if frame.explicit else tuple(x.shape)
    sizes = {name: known.size for name, known in frame.bound if name in layout.names}
    notes = [f"the value is {_kind(x)} here, in {frame.mode} mode"]
    if frame.mode == "reference":
        notes[0] += ": whole, on one device; the layout is drawn"
    about = {"kind": _kind(x, shape), "itemsize": _itemsize(x.dtype), "notes": notes}
    return blocks.of_layout(layout, sizes, mesh, dims=list(shape), call=call, **about)


def _of_typed(x: Any, call: str) -> Holdings:
    """A value that jit alone traces: its type says where it lies along axes of type Explicit."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types:
        rule = "While jit traces, the compiler has not decided yet where a value lies."
        advice = 'visualize("b/dp d", x.shape, mesh=mesh), or visualize the result outside jit'
        raise PlacementError(rule, call=call, advice=advice)
    auto = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is not AxisType.Explicit]
    notes = [f"along {', '.join(auto)} the compiler decides"] if auto else []
    return _of_named(x, cast(NamedSharding, sharding), call, notes)


# --- an array ------------------------------------------------------------------------------------------------


def _of_array(x: Any) -> Holdings:
    call = "visualize(x)"
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        raise _nowhere(x, call)
    notes = []
    if getattr(x, "committed", True) is False:
        notes.append("uncommitted: JAX may move it to where other arguments live")
    if isinstance(sharding, NamedSharding):
        return _of_named(x, sharding, call, notes)
    table = {device.id: index for device, index in sharding.devices_indices_map(tuple(x.shape)).items()}
    if len(table) > 1:
        notes.append(f"a {type(sharding).__name__}, which a layout cannot express")
    return blocks.of_indices(tuple(x.shape), table, kind=_kind(x), itemsize=_itemsize(x.dtype), notes=tuple(notes))


def _of_named(x: Any, sharding: NamedSharding, call: str, notes: list[str]) -> Holdings:
    names = Layout(" ".join(f"dim{place}" for place in range(len(x.shape))))
    layout = Layout.of(x, names)
    mesh, size = sharding.mesh, _itemsize(x.dtype)
    return blocks.of_layout(layout, {}, mesh, dims=list(x.shape), call=call, kind=_kind(x), itemsize=size, notes=notes)


def _nowhere(x: Any, call: str) -> SpmdError:
    if hasattr(x, "shape"):
        rule = f"A picture shows an array on devices, and this {type(x).__name__} does not have a sharding."
        return PlacementError(rule, call=call, advice='as in visualize("b/dp d", x.shape, mesh=mesh)')
    rule = f"visualize draws a layout, an array on devices or a plan, not {kind_of(x)}."
    fix, advice = None, 'as in visualize("b/dp d", (8, 16), mesh=mesh)'
    if isinstance(x, (dict, list, tuple)) and all(map(is_array, jax.tree.leaves(x))):
        fix, advice = "for x in jax.tree.leaves(tree): print(spmd.visualize(x))", None
    return LayoutError(rule, call=call, fix=fix, advice=advice)


def _kind(x: Any, shape: Sequence[int] | None = None) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape if shape is None else shape))}]"


def _itemsize(dtype: Any) -> int | None:
    return getattr(dtype, "itemsize", None)
