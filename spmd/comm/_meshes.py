"""From one mesh to another: which device sends which piece of an array to which, and the arrays that are made of them.

Each block that is wanted is cut where the blocks that are held end. A device that holds a piece already keeps it. Of
the others that hold it the one that has sent least so far sends it, one of the same process first.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmd import _compat
from spmd._text import bytes_text, fields_of, wrapped
from spmd._trees.leaves import kind_of
from spmd.errors import CommunicationError, LayoutError, MeshError, SizeError
from spmd.language import Layout, Pattern, axes_product, axes_tuple, check_axes, mesh_text
from spmd.mesh import sizes_for

Box = tuple[tuple[int, int], ...]
"""From where to where in each dimension of the whole array."""


@dataclass(frozen=True)
class Piece:
    """What one device gets from another, or has itself.

    Attributes:
      sender: The id of the device that holds it.
      receiver: The id of the device that wants it; equal to `sender` where nothing travels.
      box: Where it lies in the whole array: a pair of start and stop for each dimension.
      bytes: How large it is.
    """

    sender: int
    receiver: int
    box: Box
    bytes: int


@dataclass(frozen=True, repr=False)
class MeshPlan:
    """What is sent between the devices of two meshes. It prints as a table of the devices.

    Attributes:
      source: The layout before, with axes of `mesh`.
      target: The layout after, with axes of `to`.
      sizes: The global size of each name.
      mesh: The axes of the first mesh with their sizes.
      to: The axes of the second mesh with their sizes.
      dtype: The type of the elements.
      pieces: All pieces, also those that devices have themselves.

    Example:
      >>> import spmd
      >>> plan = spmd.plan("a/x b -> a b/y", sizes={"a": 8, "b": 8}, mesh={"x": 2}, to={"y": 4})
      >>> plan.bytes, plan.lower_bound, len(plan.links)
      (64, 64, 6)
    """

    source: Layout
    target: Layout
    sizes: dict[str, int]
    mesh: dict[str, int]
    to: dict[str, int]
    dtype: np.dtype
    pieces: tuple[Piece, ...]

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each device of the second mesh gets from others. No method brings it less."""
        found = {piece.receiver: 0 for piece in self.pieces}
        for piece in self.sent:
            found[piece.receiver] += piece.bytes
        return found

    @cached_property
    def senders(self) -> dict[int, int]:
        """Bytes that each device sends to others, of those that send any."""
        return dict(sum((Counter({piece.sender: piece.bytes}) for piece in self.sent), Counter()))

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes from each device to each other, of those pairs that send any."""
        return dict(sum((Counter({(piece.sender, piece.receiver): piece.bytes}) for piece in self.sent), Counter()))

    @property
    def sent(self) -> list[Piece]:
        """The pieces that travel."""
        return [piece for piece in self.pieces if piece.sender != piece.receiver]

    @property
    def bytes(self) -> int:
        """Return the most that any device receives or sends."""
        return max((*self.received.values(), *self.senders.values()), default=0)

    @property
    def lower_bound(self) -> int:
        """Return the most that any device must receive whatever the method: what it wants and lacks. It is proved. How
        much a device must send, it does not say."""
        return max(self.received.values(), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        links = [{"from": a, "to": b, "bytes": n} for (a, b), n in self.links.items()]
        return {
            "source": self.source.short,
            "target": self.target.short,
            **fields_of(self, "sizes", "mesh", "to"),
            "dtype": self.dtype.name,
            "bytes": self.bytes,
            "lower_bound": self.lower_bound,
            "links": links,
        }

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        lines = [
            f"{self.source.short} -> {self.target.short}",
            f"{sizes}, {self.dtype.name}; {mesh_text(self.mesh)} -> {mesh_text(self.to)}",
        ]
        for (sender, receiver), nbytes in list(self.links.items())[:_MOST_LINKS]:
            lines.append(f"{sender} -> {receiver}: {bytes_text(nbytes)}")
        if len(self.links) > _MOST_LINKS:
            lines.append(f"... ({len(self.links)} pairs of devices in all)")
        received, sent = (max(side.values(), default=0) for side in (self.received, self.senders))
        total = f"a device receives at most {bytes_text(received)}, which is the least, and sends at most"
        lines.append(f"{total} {bytes_text(sent)}" if self.links else "nothing to do: every device has what it wants")
        return "\n".join(part for line in lines for part in wrapped(line, 120))

    def __repr__(self) -> str:
        return f'MeshPlan("{self.source.short} -> {self.target.short}": {len(self.links)} links; {self.bytes} bytes)'


_MOST_LINKS = 16


def plan_between(pattern: str, sizes: Mapping[str, int], mesh: Any, to: Any, dtype: np.dtype) -> MeshPlan:
    """The plan between two meshes.

    Args:
      pattern: `"layout -> layout"`; the axes on the left are those of `mesh`, the ones on the right those of `to`.
      sizes: The global size of each name.
      mesh: A Mesh, an AbstractMesh or a dict. The devices of one without devices are numbered from 0.
      to: The same of the second mesh.
      dtype: The type of the elements.
    """
    call = f'plan("{pattern}")'
    source, target = _sides(pattern, call)
    first, second = (sizes_for(one, call) for one in (mesh, to))
    for layout, axes in ((source, first), (target, second)):
        check_axes(layout.axis_names, axes, call=call, source=pattern)
    if lacking := [atom.name for atom in source.atoms if atom.named and atom.name not in sizes]:
        rule = f"the size of {lacking[0]} is not given."
        raise LayoutError(rule, call=call, advice=f'sizes={{"{lacking[0]}": ...}}')
    known = {atom.name: int(sizes[atom.name]) for atom in source.atoms if atom.named}
    shape = tuple(math.prod(known.get(a.name) or int(a.name) for a in dim.atoms) for dim in source.dims)
    ends = [_held(source, shape, mesh, first, call), _held(target, shape, to, second, call)]
    pieces = _pieces(shape, dtype.itemsize, ends)
    return MeshPlan(source, target, known, first, second, dtype, tuple(pieces))


def _sides(pattern: str, call: str) -> tuple[Layout, Layout]:
    """Both layouts. They have the same dimensions, complete values, and nothing that is not written out."""
    read = Pattern(pattern, call=call)
    if len(read.inputs) != 1 or len(read.outputs) != 1:
        raise LayoutError("a change of meshes has one layout on each side.", call=call, source=pattern)
    [source], [target] = read.inputs, read.outputs
    if [dim.names for dim in source.dims] != [dim.names for dim in target.dims]:
        got = [f"left: {source.short}", f"right: {target.short}"]
        rule = "a change of meshes keeps the dimensions and their order: both sides name the same ones."
        raise LayoutError(rule, call=call, got=got, advice="rearrange first")
    if marks := (*source.unreduced, *source.reduced, *target.unreduced, *target.reduced):
        rule = f"an array that goes to another mesh is complete, and {marks[0]} stands in a mark."
        raise LayoutError(rule, call=call, source=pattern, advice="complete the sum first, with psum or psum_scatter")
    if source.has_ellipsis or any(any(dim.margin) for dim in (*source.dims, *target.dims)):
        raise LayoutError("a change of meshes needs every dimension, without margins.", call=call, source=pattern)
    return source, target


def _held(
    layout: Layout, shape: tuple[int, ...], mesh: Any, sizes: Mapping[str, int], call: str
) -> list[tuple[Any, Box]]:
    """The devices of a mesh, each with the box of the array that it holds."""
    count = math.prod(sizes.values())
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else range(count)
    runs = [axes_tuple(axes) for axes in _compat.partitions(layout.spec, len(shape))]
    for n, axes, dim in zip(shape, runs, layout.dims, strict=True):
        if n % axes_product(axes, sizes):
            many = f"the {axes_product(axes, sizes)} blocks of {'/'.join(axes)}"
            rule = f"{dim.names[0]} of size {n} does not divide into {many}."
            raise SizeError(rule, call=call, got=[mesh_text(sizes)])
    places = np.unravel_index(np.arange(count), tuple(sizes.values()) or (1,))
    at = dict(zip(sizes, places, strict=False))
    starts = []
    for n, axes in zip(shape, runs, strict=True):
        block, width = np.zeros(count, np.int64), n // axes_product(axes, sizes)
        for axis in axes:
            block = block * sizes[axis] + at[axis]
        starts.append([(int(b) * width, (int(b) + 1) * width) for b in block])
    boxes = list(zip(*starts, strict=True)) if shape else [()] * count
    return list(zip(devices, boxes, strict=True))


def _pieces(shape: tuple[int, ...], itemsize: int, sides: Sequence[list[tuple[Any, Box]]]) -> Iterator[Piece]:
    """Every piece that a device of the second side wants, from the device that sends it."""
    have, want = sides
    holders: dict[Box, list[Any]] = {}
    for device, box in have:
        holders.setdefault(box, []).append(device)
    widths = [stop - start for start, stop in have[0][1]]
    load: Counter[int] = Counter()
    for receiver, box in want:
        # The blocks that it meets form a grid.
        meets = [range(start // w * w, stop, w) if w else () for (start, stop), w in zip(box, widths, strict=True)]
        for corner in itertools.product(*meets):
            block = tuple((s, s + w) for s, w in zip(corner, widths, strict=True))
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, block, strict=True))
            nbytes = itemsize * math.prod(b - a for a, b in common)
            far = _process(receiver)
            sender = min(holders[block], key=lambda d: (_id(d) != _id(receiver), _process(d) != far, load[_id(d)]))
            if _id(sender) != _id(receiver):
                load[_id(sender)] += nbytes
            yield Piece(_id(sender), _id(receiver), common, nbytes)


def _id(device: Any) -> int:
    return device if isinstance(device, int) else device.id


def _process(device: Any) -> int:
    return 0 if isinstance(device, int) else device.process_index


# --- arrays -------------------------------------------------------------------------------------------------------


def moved_between(tree: Any, pattern: Any, to: Mesh, *, donate: bool = False) -> Any:
    """Arrays on the devices of another mesh, one after another, the one first that leaves most room on each device.

    Args:
      tree: An array on a mesh, or a tree of them.
      pattern: A pattern for all, or a tree of patterns of the same form.
      to: The other mesh.
      donate: Whether the arrays are deleted as soon as they are moved.
    """
    leaves, form = jax.tree.flatten(tree)
    patterns = [pattern] * len(leaves) if isinstance(pattern, str) else form.flatten_up_to(pattern)
    jobs = [_job(x, one, to) for x, one in zip(leaves, patterns, strict=True)]
    found: list[Any] = [None] * len(leaves)
    for i in sorted(range(len(leaves)), key=lambda i: jobs[i][1]):
        target, _, pieces = jobs[i]
        found[i] = jax.block_until_ready(_moved(leaves[i], to, target, pieces))  # so that one is on its way at a time
        kept = {b.unsafe_buffer_pointer() for b in _buffers(found[i])} if donate else set()
        if donate and not any(b.unsafe_buffer_pointer() in kept for b in _buffers(leaves[i])):
            leaves[i].delete()
    return form.unflatten(found)


def _buffers(x: Any) -> list[Any]:
    return [shard.data for shard in x.addressable_shards]


def _job(x: Any, pattern: str, to: Mesh) -> tuple[NamedSharding, int, tuple[Piece, ...]]:
    """Where an array goes, by how many bytes its blocks there are larger, and its pieces."""
    call = f'relayout(x, "{pattern}", to=mesh)'
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        rule = "relayout to another mesh moves arrays that lie on a mesh, outside of jit and of kernels."
        raise CommunicationError(rule, call=call, got=[kind_of(x)], advice="call it on the results of a kernel")
    lies = x.sharding
    if not isinstance(lies, NamedSharding) or not isinstance(lies.mesh, Mesh):
        rule = "relayout to another mesh needs an array that lies on a mesh."
        advice = 'spmd.shard(x, "b/dp d", mesh=mesh) first'
        raise MeshError(rule, call=call, got=[type(lies).__name__], advice=advice)
    source, target = _sides(pattern, call)
    if source.rank != x.ndim:
        rule = f"the array has {x.ndim} dimensions, and the pattern names {source.rank}."
        raise LayoutError(rule, call=call, source=pattern, got=[f"shape {x.shape}"])
    sizes = dict(zip((dim.names[0] for dim in source.dims), x.shape, strict=True))
    for layout, mesh in ((source, lies.mesh), (target, to)):
        check_axes(layout.axis_names, dict(mesh.shape), call=call, source=pattern)
    if not lies.is_equivalent_to(NamedSharding(lies.mesh, source.spec), x.ndim):
        lies_as = Layout.of(x, " ".join(sizes)).short if len(sizes) == x.ndim else lies.spec
        rule = "the array lies otherwise than the left side says."
        raise LayoutError(
            rule, call=call, source=pattern, got=[f"it lies as {lies_as}"], advice="write on the left how it lies"
        )
    held = [_held(one, x.shape, mesh, dict(mesh.shape), call) for one, mesh in ((source, lies.mesh), (target, to))]
    pieces = tuple(_pieces(x.shape, x.dtype.itemsize, held))
    grows = [math.prod(b - a for a, b in side[0][1]) * x.dtype.itemsize for side in held]
    return NamedSharding(to, target.spec), grows[1] - grows[0], pieces


def _moved(x: Any, to: Mesh, target: NamedSharding, pieces: tuple[Piece, ...]) -> Any:
    """JAX's own way where whole shards stay or where processes share the work, and by pieces otherwise."""
    if x.sharding.is_equivalent_to(target, x.ndim) or not (x.is_fully_addressable and target.is_fully_addressable):
        return jax.device_put(x, target)
    if not x.size or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):  # keys cannot be put together
        return jax.device_put(x, target)
    shards = {shard.device.id: (_box(shard.index, x.shape), shard.data) for shard in x.addressable_shards}
    parts: dict[int, list[Piece]] = {}
    for piece in pieces:
        parts.setdefault(piece.receiver, []).append(piece)
    placed = []
    for device in to.devices.flat:
        got = [(piece.box, _cut(*shards[piece.sender], piece.box, device)) for piece in parts[device.id]]
        placed.append(got[0][1] if len(got) == 1 else _joined(got))
    return jax.make_array_from_single_device_arrays(x.shape, target, placed)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(one.indices(n)[:2] for one, n in zip(index, shape, strict=True))


def _cut(held: Box, shard: Any, box: Box, device: Any) -> Any:
    """A piece of a shard, on the device that wants it."""
    if held != box:
        starts = [a - c for (a, _), (c, _) in zip(box, held, strict=True)]
        stops = [b - c for (_, b), (c, _) in zip(box, held, strict=True)]
        shard = jax.lax.slice(shard, starts, stops)
    return jax.device_put(shard, device)


def _joined(got: list[tuple[Box, Any]], dim: int = 0) -> Any:
    """The pieces of one device, which form a grid, as one array."""
    if len(got) == 1:
        return got[0][1]
    rows: dict[tuple[int, int], list[tuple[Box, Any]]] = {}
    for box, x in got:
        rows.setdefault(box[dim], []).append((box, x))
    return jnp.concatenate([_joined(rows[key], dim + 1) for key in sorted(rows)], dim)
