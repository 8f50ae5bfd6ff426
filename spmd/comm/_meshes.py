"""From one mesh to another: which device sends which piece of an array to which, and the program that sends them.

Each block that is wanted is cut where the blocks that are held end. A device that holds a piece already keeps it. Of
the others that hold it the one that has sent least so far sends it, one of the same process first.
"""

from __future__ import annotations

import functools
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
from spmd._trees.leaves import described, kind_of
from spmd.comm import _lax
from spmd.comm._keywords import split_keywords
from spmd.comm.planner import corner, matchings
from spmd.errors import CommunicationError, LayoutError, MeshError, SizeError
from spmd.language import Layout, Pattern, Size, as_fault, axes_product, axes_tuple, bind, check_axes, mesh_text
from spmd.mesh import mesh_for, sizes_for

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
      devices: The ids of the devices of both meshes, in mesh order.

    Example:
      >>> import spmd
      >>> plan = spmd.plan("a/x b -> a b/y", sizes={"a": 8, "b": 8}, mesh={"x": 2}, to={"y": 4})
      >>> plan.bytes, plan.lower_bound, len(plan.links)
      (96, 64, 6)
    """

    source: Layout
    target: Layout
    sizes: dict[str, int]
    mesh: dict[str, int]
    to: dict[str, int]
    dtype: np.dtype
    pieces: tuple[Piece, ...]
    devices: tuple[tuple[int, ...], tuple[int, ...]]

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

    @property
    def head(self) -> tuple[str, str]:
        """Both layouts; sizes and meshes."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        meshes = f"{mesh_text(self.mesh)} -> {mesh_text(self.to)}"
        return f"{self.source.short} -> {self.target.short}", f"{sizes}, {self.dtype.name}; {meshes}"

    def __str__(self) -> str:
        return "\n".join(part for line in (*self.head, *self.said) for part in wrapped(line, 120))

    @property
    def said(self) -> list[str]:
        """What devices send to each other, a line for those that send a device as much, and the sum."""
        links: dict[tuple[int, int], list[int]] = {}
        for (sender, receiver), nbytes in self.links.items():
            links.setdefault((receiver, nbytes), []).append(sender)
        lines = []
        for (receiver, nbytes), senders in itertools.islice(links.items(), _MOST_LINKS):
            each = " each" if len(senders) > 1 else ""
            lines.append(f"{', '.join(map(str, senders))} -> {receiver}: {bytes_text(nbytes)}{each}")
        if len(links) > _MOST_LINKS:
            lines.append(f"... ({len(self.links)} pairs of devices in all)")
        received, sent = (max(side.values(), default=0) for side in (self.received, self.senders))
        total = f"a device receives at most {bytes_text(received)}, which is the least, and sends at most"
        lines.append(f"{total} {bytes_text(sent)}" if self.links else "nothing to do: every device has what it wants")
        return lines

    def __repr__(self) -> str:
        return f'MeshPlan("{self.head[0]}": {len(self.links)} links; {self.bytes} bytes)'


_MOST_LINKS = 16


def plan_between(pattern: str, names: Mapping[str, Any], mesh: Any, to: Any, dtype: np.dtype) -> MeshPlan:
    """The plan between two meshes.

    Args:
      pattern: `"layout -> layout"`; the axes on the left are those of `mesh`, the ones on the right those of `to`.
      names: The global size of each name, and mesh axes of names.
      mesh: A Mesh, an AbstractMesh or a dict; None for that of `jax.set_mesh`. The devices of one without devices are
        numbered from 0.
      to: The same of the second mesh.
      dtype: The type of the elements.
    """
    call = _call("plan(", pattern, ")")
    source, target, sizes = _sides(pattern, call, names)
    mesh = mesh_for(None, [], call) if mesh is None else mesh
    first, second = (sizes_for(one, call) for one in (mesh, to))
    for atom in source.atoms:
        if atom.named and atom.name not in sizes:
            raise SizeError(f"the size of {atom.name} is not known.", call=call, advice=f"say it: {atom.name}=...")
    shape = tuple(math.prod(sizes[a.name] if a.named else int(a.name) for a in dim.atoms) for dim in source.dims)
    ends = [_held(one, shape, on, sizes, call, pattern) for one, on in ((source, mesh), (target, to))]
    pieces = tuple(_pieces(shape, dtype.itemsize, ends))
    before, after = (tuple(_id(device) for device, _ in end) for end in ends)
    return MeshPlan(source, target, sizes, first, second, dtype, pieces, (before, after))


def _call(before: str, pattern: Any, after: str) -> str:
    """How messages show a call, whose pattern is a string."""
    if not isinstance(pattern, str | Layout):
        raise LayoutError(f"the pattern is a string, not {kind_of(pattern)}.", call=f"{before}...{after}")
    return f'{before}"{pattern}"{after}'


def check_plain(call: str, prefer: str, hardware: Any) -> None:
    """Between two meshes there is nothing to prefer."""
    if prefer != "collectives" or hardware is not None:
        rule = "between two meshes devices send each other pieces; prefer= and hardware= choose among collectives."
        raise CommunicationError(rule, call=call, advice="leave them out")


def _sides(pattern: str, call: str, names: Mapping[str, Any]) -> tuple[Layout, Layout, dict[str, int]]:
    """Both layouts, and the sizes among the keywords. The sides have the same dimensions, complete values, and nothing
    that is not written out."""
    read = Pattern(pattern, call=call)
    sizes, axes = split_keywords(call, read, names)
    read = read.bind(**axes) if axes else read
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
    unnamed = source.has_ellipsis or any(atom.name == "_" for atom in source.atoms)
    if unnamed or any(any(dim.margin) for dim in (*source.dims, *target.dims)):
        rule = "a change of meshes needs the name of every dimension, without margins."
        raise LayoutError(rule, call=call, source=pattern)
    return source, target, sizes


def _held(
    layout: Layout, shape: tuple[int, ...], mesh: Any, known: Mapping[str, int], call: str, pattern: str
) -> list[tuple[Any, Box]]:
    """The devices of a mesh, each with the box of the array that it holds. `known`: the sizes that the call gives."""
    sizes = sizes_for(mesh, call)
    check_axes(layout.axis_names, sizes, call=call, source=pattern)
    given = {name: Size(size, "the call") for name, size in known.items()}
    if faults := bind([("", shape, layout)], sizes, known=given).faults:
        raise SizeError(as_fault(faults, sizes, "the array does not fit the layout.", call=call, source=pattern))
    count = math.prod(sizes.values())
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else range(count)
    runs = [axes_tuple(axes) for axes in _compat.partitions(layout.spec, len(shape))]
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
        for first in itertools.product(*meets):
            block = tuple((s, s + w) for s, w in zip(first, widths, strict=True))
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


@dataclass(frozen=True)
class _Job:
    """One array: how messages call it, where it goes, what each device holds before and after, and the pieces."""

    call: str
    x: Any
    target: NamedSharding
    held: tuple[dict[Any, Box], dict[Any, Box]]
    pieces: tuple[Piece, ...]

    def room(self, donate: bool) -> tuple[bool, int]:
        """The key of the order in which arrays need the least memory at a time: first those that leave more room than
        they take, the smallest first, and then those that leave most."""
        here, there = (
            math.prod(b - a for a, b in next(iter(side.values()))) * self.x.dtype.itemsize for side in self.held
        )
        leaves = here if donate and not self.held[0].keys().isdisjoint(self.held[1]) else 0
        return there >= leaves, -leaves if there >= leaves else there


def moved_between(tree: Any, pattern: Any, to: Any, names: Mapping[str, Any], *, donate: bool = False) -> Any:
    """Arrays on the devices of another mesh, one after another, in the order that needs the least memory at a time.

    Args:
      tree: An array on a mesh, or a tree of them.
      pattern: A pattern for all, or a tree of patterns of the same form.
      to: The other mesh.
      names: Sizes and mesh axes of names.
      donate: Whether the arrays are deleted as soon as they are moved.
    """
    leaves, form = jax.tree.flatten_with_path(tree)
    if not isinstance(to, Mesh):
        rule = f"to= is a mesh with devices, not {kind_of(to)}."
        raise MeshError(rule, call="relayout(x, ..., to=...)", advice="as in to=spmd.make_mesh(tp=4)")
    try:
        patterns = form.flatten_up_to(pattern) if form.num_leaves and _is_tree(pattern) else [pattern] * len(leaves)
    except ValueError:
        rule = "a pattern is for all arrays, or there is a tree of patterns of the same form as the arrays."
        got = [f"arrays: {described(tree)}", f"patterns: {described(pattern)}"]
        raise LayoutError(rule, call="relayout(x, ..., to=mesh)", got=got) from None
    jobs = [
        _job(x, f"x{jax.tree_util.keystr(path)}", one, to, names)
        for (path, x), one in zip(leaves, patterns, strict=True)
    ]
    found: list[Any] = [None] * len(jobs)
    for i in sorted(range(len(jobs)), key=lambda i: jobs[i].room(donate)):
        x = jobs[i].x
        found[i] = jax.block_until_ready(_moved(jobs[i]))  # so that one is on its way at a time
        kept = {b.unsafe_buffer_pointer() for b in _buffers(found[i])} if donate else set()
        if donate and not any(b.unsafe_buffer_pointer() in kept for b in _buffers(x)):
            x.delete()
    return form.unflatten(found)


def _is_tree(pattern: Any) -> bool:
    return not jax.tree_util.all_leaves([pattern])


def _buffers(x: Any) -> list[Any]:
    return [shard.data for shard in x.addressable_shards]


def _job(x: Any, name: str, pattern: str, to: Mesh, names: Mapping[str, Any]) -> _Job:
    """What is to be done with one array, after all checks."""
    call = _call(f"relayout({name}, ", pattern, ", to=mesh)")
    if isinstance(x, jax.core.Tracer):
        rule = "relayout to another mesh runs outside of jit and of kernels."
        raise CommunicationError(rule, call=call, got=[kind_of(x)], advice="call it on the results of a kernel")
    source, target, sizes = _sides(pattern, call, names)
    lies = x.sharding if isinstance(x, jax.Array) else None
    if not isinstance(lies, NamedSharding) or not isinstance(lies.mesh, Mesh):
        rule = "relayout to another mesh needs an array that lies on a mesh."
        advice = f'spmd.shard({name}, "{source.short}", mesh=mesh) first, with the mesh on which it shall lie'
        raise MeshError(rule, call=call, got=[type(lies).__name__ if lies else kind_of(x)], advice=advice)
    ends = (source, lies.mesh), (target, to)
    held = [_held(one, x.shape, mesh, sizes, call, pattern) for one, mesh in ends]
    if not lies.is_equivalent_to(NamedSharding(lies.mesh, source.spec), x.ndim):
        first = [dim.names[0] for dim in source.dims]
        shown = Layout.of(x, " ".join(first)).short if all(map(str.isidentifier, first)) else lies.spec
        rule = "the array lies otherwise than the left side says."
        raise LayoutError(
            rule, call=call, source=pattern, got=[f"it lies as {shown}"], advice=f'"{shown} -> {target.short}"'
        )
    pieces = tuple(_pieces(x.shape, x.dtype.itemsize, held))
    return _Job(call, x, NamedSharding(to, target.spec), (dict(held[0]), dict(held[1])), pieces)


# JAX puts no array on other devices if these belong to other processes. So the processes of both meshes run one program
# on all their devices, in which devices send each other cells: pieces of one size.


def _moved(job: _Job) -> Any:
    """The array on the other mesh. A process without a device in either mesh sends nothing."""
    x, target = job.x, job.target
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    here = x.is_fully_addressable and target.is_fully_addressable
    if (keys and here) or (x.addressable_shards and x.sharding.is_equivalent_to(target, x.ndim)):
        return jax.device_put(x, target)
    if keys:
        rule = "random keys do not go to other processes."
        raise CommunicationError(rule, call=job.call, advice="make them there: jax.random.key(seed)")
    devices = tuple(dict.fromkeys((*job.held[0], *job.held[1])))
    mine = [device for device in devices if device.process_index == jax.process_index()]
    shape = target.shard_shape(x.shape)
    if not mine or not x.size:
        return jax.make_array_from_callback(x.shape, target, lambda _: np.empty(shape, x.dtype), dtype=x.dtype)
    before, after = (one.shard_shape(x.shape) or (1,) for one in (x.sharding, target))
    cell = tuple(map(math.gcd, before, after))
    held = {shard.device: shard.data.reshape(before) for shard in x.addressable_shards}
    blocks = [held[d] if d in held else jax.device_put(np.zeros(before, x.dtype), d) for d in mine]
    every = NamedSharding(Mesh(np.array(devices), ("d",)), jax.P("d"))
    stacked = (len(devices) * before[0], *before[1:])
    start = jax.make_array_from_single_device_arrays(stacked, every, blocks)
    out = _exchange(every, after, cell, _sends(job, devices, cell))(start)
    wanted = [shard.data.reshape(shape) for shard in out.addressable_shards if shard.device in job.held[1]]
    return jax.make_array_from_single_device_arrays(x.shape, target, wanted, dtype=x.dtype)


def _sends(job: _Job, devices: Sequence[Any], cell: tuple[int, ...]) -> tuple[Send, ...]:
    place = {device.id: i for i, device in enumerate(devices)}
    sends = []
    for piece in job.pieces:
        numbers = [place[device] for device in (piece.sender, piece.receiver)]
        ends = [side[devices[i]] for side, i in zip(job.held, numbers, strict=True)]
        for first in itertools.product(*(range(*span, w) for span, w in zip(piece.box, cell, strict=False))):
            at = [tuple((c - a) // w for c, (a, _), w in zip(first, box, cell, strict=False)) for box in ends]
            sends.append((numbers[0], numbers[1], at[0] or (0,), at[1] or (0,)))
    return tuple(sends)


Send = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""From which device to which, and where the cell lies in the block of each, counted in cells."""


@functools.lru_cache(maxsize=1024)
def _exchange(every: NamedSharding, after: tuple[int, ...], cell: tuple[int, ...], sends: tuple[Send, ...]) -> Any:
    """The program. In each round a device sends at most one cell and receives at most one."""
    count = len(every.device_set)
    own, far = ([send for send in sends if (send[0] == send[1]) is same] for same in (True, False))
    rounds = [[some[i] for i in one] for some in (own, far) for one in matchings([(a, b) for a, b, *_ in some])]

    def body(x: Any) -> Any:
        me = jax.lax.axis_index("d")
        out = _compat.pvary(jnp.zeros(after, x.dtype), ("d",))
        for one in rounds:
            reads, writes = (np.zeros((count, len(cell)), np.int32) for _ in range(2))
            gets = np.zeros(count, bool)
            for sender, receiver, read, write in one:
                reads[sender], writes[receiver], gets[receiver] = read, write, True
            piece = jax.lax.dynamic_slice(x, corner(reads, cell, me), cell)
            if one[0][0] != one[0][1]:
                piece = _lax.ppermute(piece, ("d",), {"d": count}, [(a, b) for a, b, *_ in one])
            place = corner(writes, cell, me)
            kept = jax.lax.dynamic_slice(out, place, cell)
            out = jax.lax.dynamic_update_slice(out, jnp.where(jnp.asarray(gets)[me], piece, kept), place)
        return out

    return jax.jit(jax.shard_map(body, mesh=every.mesh, in_specs=every.spec, out_specs=every.spec))
