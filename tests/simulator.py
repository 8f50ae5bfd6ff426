"""What sharded programs mean, in NumPy and loops over devices: the reference that `spmd` is compared with.

Nothing here imports `spmd` or JAX, and the layout reader below is a second one on purpose: a fault in the
library's own parser cannot hide in the reference.

A mesh is an ordered dict `{"dp": 2, "tp": 3}`. A device is its coordinates, one integer per axis. A value on
the mesh is a dict from coordinates to that device's block. Two levels:

* `scatter` and `gather` between a global array and its blocks, and each operation's global meaning;
* collectives, device by device: blocks in, blocks out.
"""

import itertools
import math
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np

Mesh = Mapping[str, int]
Coords = tuple[int, ...]
Blocks = dict[Coords, np.ndarray]


# -------------------- meshes


def coords(mesh: Mesh) -> Iterator[Coords]:
    """Every device of the mesh, in row-major order."""
    return itertools.product(*(range(size) for size in mesh.values()))


def count(mesh: Mesh, axes: Sequence[str]) -> int:
    """How many devices the axes have together."""
    return math.prod(mesh[axis] for axis in axes)


def position(mesh: Mesh, device: Coords, axes: Sequence[str]) -> int:
    """The device's index along `axes`, the first axis being the major one."""
    index, names = 0, list(mesh)
    for axis in axes:
        index = index * mesh[axis] + device[names.index(axis)]
    return index


def group(mesh: Mesh, device: Coords, axes: Sequence[str]) -> list[Coords]:
    """The devices that differ from `device` along `axes` only, by their position along `axes`."""
    names = list(mesh)
    same = [i for i, name in enumerate(names) if name not in axes]
    members = [other for other in coords(mesh) if all(other[i] == device[i] for i in same)]
    return sorted(members, key=lambda other: position(mesh, other, axes))


# -------------------- layouts


@dataclass(frozen=True)
class Simple:
    """A layout as this file reads it: per dimension its factors (name, axes), and the marks."""

    dims: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]
    bracketed: tuple[bool, ...]
    unreduced: tuple[str, ...]
    reduced: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [name for dim in self.dims for name, _ in dim]

    def axes(self, dim: int) -> tuple[str, ...]:
        return tuple(axis for _, axes in self.dims[dim] for axis in axes)


def read(layout: str) -> Simple:
    """Read a layout without `...` and margins: `b/dp (h k)/tp [v] d/1 {U:cp}`."""
    marks: dict[str, tuple[str, ...]] = {"U": (), "R": ()}
    for kind, axes in re.findall(r"\{([UR]):([^}]*)\}", layout):
        marks[kind] += tuple(axis.strip() for axis in axes.split(","))
    text = re.sub(r"\{[^}]*\}", " ", layout).strip()
    dims, brackets, unnamed = [], [], itertools.count()
    for word in re.findall(r"\[[^\]]*\]|\([^)]*\)\S*|\S+", "" if text == "scalar" else text):
        inside = word[1:-1].strip() if word.startswith("[") else word
        for part in re.findall(r"\([^)]*\)\S*|\S+", inside):
            factors, suffix = [part], ""
            if part.startswith("("):
                inner, _, suffix = part[1:].partition(")")
                factors = inner.split()
            atoms = []
            for i, factor in enumerate(factors):
                name, *axes = (factor + (suffix if i == 0 else "")).split("/")
                name = f"unnamed{next(unnamed)}" if name == "_" else name
                atoms.append((name, tuple(axis for axis in axes if axis != "1")))
            dims.append(tuple(atoms))
            brackets.append(word.startswith("["))
    return Simple(tuple(dims), tuple(brackets), marks["U"], marks["R"])


def split_pattern(pattern: str) -> tuple[list[str], list[str]]:
    """The layouts left and right of the arrow."""
    left, _, right = pattern.partition("->")
    cut = lambda side: [part.strip() for part in re.split(r",(?![^{]*\})", side.strip().rstrip(","))]
    return cut(left), cut(right)


def plain(layout: str) -> str:
    """The layout as an einops pattern: names and parentheses only."""
    words = []
    for dim in read(layout).dims:
        names = " ".join(name for name, _ in dim)
        words.append(f"({names})" if len(dim) > 1 else names)
    return " ".join(words)


def flat(layout: str) -> str:
    """The layout's names as an einops pattern with all parentheses dissolved."""
    return " ".join(read(layout).names)


def _factor_sizes(total: int, dim: Sequence[tuple[str, Any]], sizes: Mapping[str, int]) -> list[int]:
    known = [int(name) if name.isdigit() else sizes.get(name) for name, _ in dim]
    missing = [i for i, size in enumerate(known) if size is None]
    if len(missing) > 1:
        raise ValueError(f"sizes of {[dim[i][0] for i in missing]} are needed")
    rest = math.prod(size for size in known if size is not None)
    filled = [total // rest if size is None else size for size in known]
    assert math.prod(filled) == total, f"{filled} do not multiply to {total}"
    return filled


def _cut(shape: Sequence[int], layout: Simple, mesh: Mesh, device: Coords, sizes: Mapping[str, int]) -> Any:
    """The shape with all factors apart, and the device's slices of it."""
    apart, slices = [], []
    for total, dim in zip(shape, layout.dims, strict=True):
        whole = [(dim[0][0], dim[0][1])] if all(not axes for _, axes in dim[1:]) else list(dim)
        lengths = [total] if len(whole) == 1 else _factor_sizes(total, dim, sizes)
        for length, (name, axes) in zip(lengths, whole, strict=True):
            parts = count(mesh, axes)
            assert length % parts == 0, f"{name} of size {length} does not divide by {parts}"
            block, index = length // parts, position(mesh, device, axes)
            apart.append(length)
            slices.append(slice(index * block, (index + 1) * block))
    return apart, tuple(slices)


def local_shape(shape: Sequence[int], layout: str, mesh: Mesh) -> tuple[int, ...]:
    """The shape of each device's block."""
    seen = read(layout)
    return tuple(size // count(mesh, seen.axes(i)) for i, size in enumerate(shape))


# -------------------- between whole arrays and blocks


def scatter(
    array: np.ndarray, layout: str, mesh: Mesh, sizes: Mapping[str, int] | None = None, seed: int = 0
) -> Blocks:
    """Each device's block of `array`. Along `{U:}` axes the blocks are partial sums that add up to it.

    `sizes` are needed only where a factor other than the first of a dimension is divided.
    """
    array, seen = np.asarray(array), read(layout)
    assert array.ndim == len(seen.dims), f"{layout!r} has {len(seen.dims)} dims, the array {array.ndim}"
    blocks: Blocks = {}
    for device in coords(mesh):
        apart, slices = _cut(array.shape, seen, mesh, device, sizes or {})
        block = array.reshape(apart)[slices].reshape(local_shape(array.shape, layout, mesh))
        blocks[device] = _partial(block, mesh, device, seen.unreduced, seed)
    return blocks


def _partial(block: np.ndarray, mesh: Mesh, device: Coords, axes: Sequence[str], seed: int) -> np.ndarray:
    """This device's share of `block`: small whole numbers, and the remainder on the last device."""
    parts = count(mesh, axes)
    if parts == 1:
        return block.copy()
    noise = np.random.default_rng(seed).integers(-3, 4, size=(parts - 1, *block.shape)).astype(block.dtype)
    mine = position(mesh, device, axes)
    return noise[mine] if mine < parts - 1 else (block - noise.sum(0, dtype=block.dtype)).astype(block.dtype)


def gather(
    blocks: Blocks,
    layout: str,
    mesh: Mesh,
    sizes: Mapping[str, int] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> np.ndarray:
    """The global array of which these are the blocks; `{U:}` axes are summed.

    Raises:
      AssertionError: Devices that must hold the same block do not.
    """
    seen = read(layout)
    assert set(blocks) == set(coords(mesh)), "some devices have no block"
    if seen.unreduced:
        blocks = psum(blocks, mesh, seen.unreduced)
    first = next(iter(blocks.values()))
    shape = [size * count(mesh, seen.axes(i)) for i, size in enumerate(first.shape)]
    whole = np.zeros(shape, first.dtype)
    filled = np.zeros(shape, bool)
    for device, block in blocks.items():
        apart, slices = _cut(shape, seen, mesh, device, sizes or {})
        into, done = whole.reshape(apart), filled.reshape(apart)
        block = np.asarray(block).reshape(into[slices].shape)
        if done[slices].all() and not same(block, into[slices], rtol, atol):
            raise AssertionError(f"device {device} holds another copy than those before it ({layout!r})")
        into[slices], done[slices] = block, True
    assert filled.all()
    return whole


def same(a: np.ndarray, b: np.ndarray, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Equal within the tolerances; NaN equals NaN. Extension types such as bfloat16 compare as float32."""
    wide = [np.asarray(x) for x in (a, b)]
    wide = [x.astype(np.float32) if x.dtype.kind == "V" else x for x in wide]
    if wide[0].dtype.kind in "fc":
        return bool(np.allclose(*wide, rtol=rtol, atol=atol, equal_nan=True))
    return bool(np.array_equal(*wide))


def map_blocks(fn: Callable[..., np.ndarray], *operands: Blocks) -> Blocks:
    """`fn` on each device's own blocks: what local code does."""
    return {device: np.asarray(fn(*(blocks[device] for blocks in operands))) for device in operands[0]}


def blocks_of(array: Any, mesh: Any) -> Blocks:
    """The blocks of a `jax.Array` that lies on the `jax.sharding.Mesh` `mesh`."""
    places = {device: index for index, device in np.ndenumerate(mesh.devices)}
    return {places[shard.device]: np.asarray(shard.data) for shard in array.addressable_shards}


# -------------------- collectives, device by device


def all_gather(blocks: Blocks, mesh: Mesh, axes: Sequence[str], dim: int) -> Blocks:
    """Concatenate the group's blocks along `dim`, in the order of their positions along `axes`."""
    return {
        device: np.concatenate([blocks[other] for other in group(mesh, device, axes)], axis=dim) for device in blocks
    }


def all_reduce(blocks: Blocks, mesh: Mesh, axes: Sequence[str], fn: Callable[[Any, Any], Any]) -> Blocks:
    """Combine the group's blocks with a binary function."""
    reduced = {}
    for device in blocks:
        total, *rest = (blocks[other] for other in group(mesh, device, axes))
        for block in rest:
            total = fn(total, block)
        reduced[device] = total
    return reduced


def psum(blocks: Blocks, mesh: Mesh, axes: Sequence[str]) -> Blocks:
    """Sum the group's blocks."""
    return all_reduce(blocks, mesh, axes, np.add)


def pmax(blocks: Blocks, mesh: Mesh, axes: Sequence[str]) -> Blocks:
    """The largest of the group's blocks, element by element."""
    return all_reduce(blocks, mesh, axes, np.maximum)


def split(blocks: Blocks, mesh: Mesh, axes: Sequence[str], dim: int) -> Blocks:
    """Each device keeps its own piece of `dim`."""
    pieces = {}
    for device, block in blocks.items():
        pieces[device] = np.split(block, count(mesh, axes), axis=dim)[position(mesh, device, axes)]
    return pieces


def psum_scatter(blocks: Blocks, mesh: Mesh, axes: Sequence[str], dim: int) -> Blocks:
    """Sum the group's blocks, and keep one's own piece of `dim`."""
    return split(psum(blocks, mesh, axes), mesh, axes, dim)


def all_to_all(blocks: Blocks, mesh: Mesh, axes: Sequence[str], split_dim: int, concat_dim: int) -> Blocks:
    """Send piece i of `split_dim` to device i of the group, concatenate what arrives along `concat_dim`."""
    exchanged = {}
    for device in blocks:
        mine = position(mesh, device, axes)
        arrived = [
            np.split(blocks[other], count(mesh, axes), axis=split_dim)[mine] for other in group(mesh, device, axes)
        ]
        exchanged[device] = np.concatenate(arrived, axis=concat_dim)
    return exchanged


def ppermute(blocks: Blocks, mesh: Mesh, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Blocks:
    """Device `target` of the group receives the block of device `source`; nobody's target holds zeros."""
    moved = {}
    for device, block in blocks.items():
        sources = [source for source, target in pairs if target == position(mesh, device, axes)]
        assert len(sources) <= 1, f"two sources for one target: {sources}"
        moved[device] = blocks[group(mesh, device, axes)[sources[0]]] if sources else np.zeros_like(block)
    return moved


# -------------------- global meanings


def einsum(*operands: np.ndarray, pattern: str, sizes: Mapping[str, int] | None = None) -> np.ndarray:
    """The einsum of whole arrays; slashes and marks have no meaning here."""
    inputs, (output,) = split_pattern(pattern)
    sizes = dict(sizes or {})
    for array, layout in zip(operands, inputs, strict=True):
        for size, dim in zip(array.shape, read(layout).dims, strict=True):
            if len(dim) == 1:
                sizes[dim[0][0]] = size
    apart = [_apart(array, layout, sizes) for array, layout in zip(operands, inputs, strict=True)]
    names = dict.fromkeys(name for layout in inputs for name in read(layout).names)
    letters = dict(zip(names, string.ascii_letters, strict=False))
    word = lambda layout: "".join(letters[name] for name in read(layout).names)
    dtype = operands[0].dtype
    wide = [array.astype(np.float64 if dtype.kind in "fV" else np.complex128) for array in apart]
    wide = apart if dtype.kind in "iub" else wide
    result = np.einsum(f"{','.join(map(word, inputs))}->{word(output)}", *wide).astype(dtype)
    return _together(result, output)


def _apart(array: np.ndarray, layout: str, sizes: Mapping[str, int]) -> np.ndarray:
    known = {name: sizes[name] for name in read(layout).names if name in sizes and not name.isdigit()}
    return einops.rearrange(array, f"{plain(layout)} -> {flat(layout)}", **known)


def _together(array: np.ndarray, layout: str) -> np.ndarray:
    return einops.rearrange(array, f"{flat(layout)} -> {plain(layout)}")


REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "any": np.any,
    "all": np.all,
    "logsumexp": lambda x, axis: np.log(np.sum(np.exp(x - np.max(x)), axis=axis)) + np.max(x),
}


def reduce(array: np.ndarray, pattern: str, kind: str, sizes: Mapping[str, int] | None = None) -> np.ndarray:
    """Reduce the names that the right side lacks, over the whole array."""
    (layout,), (output,) = split_pattern(pattern)
    names, kept = read(layout).names, read(output).names
    gone = tuple(i for i, name in enumerate(names) if name not in kept)
    wide = array.astype(np.float64) if array.dtype.kind in "fV" else array
    found = REDUCTIONS[kind](_apart(wide, layout, sizes or {}), axis=gone)
    rest = [name for name in names if name in kept]
    found = np.asarray(found).transpose([rest.index(name) for name in kept])
    return _together(found if kind in ("any", "all") else found.astype(array.dtype), output)


def rearrange(array: np.ndarray, pattern: str, **sizes: int) -> np.ndarray:
    """einops.rearrange without the slashes."""
    (layout,), (output,) = split_pattern(pattern)
    return einops.rearrange(array, f"{plain(layout)} -> {plain(output)}", **sizes)


def repeat(array: np.ndarray, pattern: str, **sizes: int) -> np.ndarray:
    """einops.repeat without the slashes."""
    (layout,), (output,) = split_pattern(pattern)
    return einops.repeat(array, f"{plain(layout)} -> {plain(output)}", **sizes)


def bracketed(layout: str) -> tuple[int, ...]:
    """The positions of the bracketed dimensions."""
    return tuple(i for i, inside in enumerate(read(layout).bracketed) if inside)


def softmax(array: np.ndarray, layout: str) -> np.ndarray:
    """Over the bracketed dimensions."""
    axes, wide = bracketed(layout), np.asarray(array, np.float64)
    powers = np.exp(wide - wide.max(axis=axes, keepdims=True))
    return (powers / powers.sum(axis=axes, keepdims=True)).astype(array.dtype)


def argmin(array: np.ndarray, layout: str) -> np.ndarray:
    """The place of the least along the dimension in brackets."""
    return argmax(-array, layout)


def argmax(array: np.ndarray, layout: str) -> np.ndarray:
    """Over the one bracketed dimension, the first of equals."""
    (axis,) = bracketed(layout)
    return np.argmax(array, axis=axis)


def top_k(array: np.ndarray, layout: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and positions of the k largest along the bracketed dimension, the first of equals first."""
    (axis,) = bracketed(layout)
    order = np.argsort(-array, axis=axis, kind="stable")
    best = np.take(order, np.arange(k), axis=axis)
    return np.take_along_axis(array, best, axis=axis), best


def cumsum(array: np.ndarray, layout: str) -> np.ndarray:
    """Along the one bracketed dimension."""
    (axis,) = bracketed(layout)
    return np.cumsum(array, axis=axis, dtype=array.dtype)


def roll(array: np.ndarray, layout: str, by: int) -> np.ndarray:
    """By elements, along the one bracketed dimension."""
    (axis,) = bracketed(layout)
    return np.roll(array, by, axis=axis)


def take(table: np.ndarray, ids: np.ndarray, pattern: str) -> np.ndarray:
    """Rows of the table's bracketed dimension: `[v] d, b s -> b s d`. A dimension of both is that of a table each:
    `b [v] d, b s -> b s d`. A number outside the table gives zeros."""
    (rows, indices), (output,) = split_pattern(pattern)
    (axis,) = bracketed(rows)
    names, of_ids, of_result = read(rows).names, read(indices).names, read(output).names
    sizes = {**dict(zip(names, table.shape, strict=True)), **dict(zip(of_ids, ids.shape, strict=True))}
    out = np.zeros([sizes[name] for name in of_result], table.dtype)
    for place in np.ndindex(*out.shape):
        at = dict(zip(of_result, place, strict=True))
        row = int(ids[tuple(at[name] for name in of_ids)])
        if 0 <= row < table.shape[axis]:
            out[place] = table[tuple(row if i == axis else at[name] for i, name in enumerate(names))]
    return out


def scatter_add(rows: np.ndarray, ids: Sequence[np.ndarray], pattern: str, sizes: Mapping[str, int]) -> tuple:
    """Rows added one by one into a table of zeros, `n d, n -> [v] d`, and how many have no place there."""
    (given, indices), (output,) = split_pattern(pattern)
    names, counted = read(given).names, read(indices).names
    keys = [read(output).names[i] for i in bracketed(output)]
    rest = [name for name in names if name not in counted]
    x = rows.transpose([names.index(name) for name in (*counted, *rest)])
    table = np.zeros([sizes[key] for key in keys] + list(x.shape[len(counted) :]), rows.dtype)
    outside = 0
    for place in np.ndindex(*ids[0].shape):
        at = tuple(int(one[place]) for one in ids)
        if all(0 <= i < sizes[key] for i, key in zip(at, keys, strict=True)):
            table[at] += x[place]
        else:
            outside += 1
    return table.transpose([[*keys, *rest].index(name) for name in read(output).names]), outside


def summed_windows(blocks: np.ndarray, margins: Sequence[tuple[int, int]]) -> np.ndarray:
    """Blocks with margins, `(block, place, block, place)`, added into one array with margins, each at its place."""
    counts, wide = blocks.shape[::2], blocks.shape[1::2]
    local = [n - sum(m) for n, m in zip(wide, margins, strict=True)]
    out = np.zeros([k * n + sum(m) for k, n, m in zip(counts, local, margins, strict=True)], blocks.dtype)
    for i, j in np.ndindex(*counts):
        out[i * local[0] :, j * local[1] :][: wide[0], : wide[1]] += blocks[i, :, j]
    return out


def deposit(array: np.ndarray, margins: Sequence[tuple[int, int]], edges: Sequence[tuple[str, str]]) -> np.ndarray:
    """An array with margins, each element of which is added where `edges` say that it belongs: element by element."""
    for dim, (widths, ends) in enumerate(zip(margins, edges, strict=True)):
        given = np.moveaxis(array, dim, 0)
        n = len(given) - sum(widths)
        out = np.zeros((n, *given.shape[1:]), given.dtype)
        for place, row in enumerate(given):
            for to, sign in _owners(place - widths[0], n, ends):
                out[to] += (row * sign).astype(row.dtype)
        array = np.moveaxis(out, 0, dim)
    return array


def _owners(i: int, n: int, ends: tuple[str, str]) -> list[tuple[int, int]]:
    """The elements that an element at place i adds to, each with its sign."""
    if 0 <= i < n:
        return [(i, 1)]
    last, edge = (0, ends[0]) if i < 0 else (n - 1, ends[1])
    on_it = 2 * last - i  # mirrored at a wall on the last element
    beside = on_it - 1 if i < 0 else on_it + 1
    return {
        "periodic": [(i % n, 1)],
        "zero": [],
        "edge": [(last, 1)],
        "symmetric": [(beside, 1)],
        "antisymmetric": [(beside, -1)],
        "reflect": [(on_it, 1)],
        "antireflect": [(on_it, -1), (last, 2)],
    }[edge]


def exchange(
    rows: np.ndarray, owner: np.ndarray, blocks: int, capacity: int, hops: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows, owners and how many stayed, after rows went to their owners: row by row, until no row must stay."""
    slots = len(owner) // blocks
    home = lambda row: row // slots
    far = lambda row: (owner[row] - home(row)) % blocks
    goes = [row for row in range(len(owner)) if 0 <= owner[row] < blocks and owner[row] != home(row)]
    goes = [row for row in goes if hops is None or far(row) in [hop % blocks for hop in hops]]
    pair = lambda row: (home(row), int(owner[row]))
    goes = [row for row in goes if sum(pair(other) == pair(row) for other in goes if other < row) < capacity]
    offered, before = goes, None
    while goes != before:
        before = goes
        stay = [row for row in range(len(owner)) if owner[row] >= 0 and row not in goes]
        room = [slots - sum(home(row) == block for row in stay) for block in range(blocks)]
        goes = [row for block in range(blocks) for row in [r for r in offered if owner[r] == block][: room[block]]]
    out, found = np.zeros_like(rows), np.full(len(owner), -1)
    for block in range(blocks):
        there = [row for row in stay if home(row) == block] + [row for row in sorted(goes) if owner[row] == block]
        out[block * slots :][: len(there)] = rows[there]
        found[block * slots :][: len(there)] = owner[there]
    return out, found, sum(1 for row in stay if owner[row] != home(row))


def permute(array: np.ndarray, layout: str, mesh: Mesh, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Permute the blocks of the bracketed, divided dimension; blocks that are nobody's target are zeros."""
    (axis,) = bracketed(layout)
    blocks = np.split(array, count(mesh, read(layout).axes(axis)), axis=axis)
    moved = [np.zeros_like(block) for block in blocks]
    for source, target in pairs:
        moved[target] = blocks[source]
    return np.concatenate(moved, axis=axis)


def shift(array: np.ndarray, layout: str, mesh: Mesh, by: int = 1, wrap: bool = True) -> np.ndarray:
    """Block i goes to place i + by; without `wrap` those that fall off are lost."""
    (axis,) = bracketed(layout)
    blocks = count(mesh, read(layout).axes(axis))
    pairs = [(i, (i + by) % blocks) for i in range(blocks) if wrap or 0 <= i + by < blocks]
    return permute(array, layout, mesh, pairs)


def iota(layout: str, mesh: Mesh, size: int) -> Blocks:
    """Global positions along the one dimension of the layout, block by block."""
    return scatter(np.arange(size), layout, mesh)


def sent_bytes(kind: str, operand: int, devices: int) -> int:
    """What each device sends of an operand of so many bytes, by the books: a ring, or to each directly."""
    share = {"all_gather": devices - 1, "psum": 2 * (devices - 1) / devices, "ppermute": 1}
    return round(operand * share.get(kind, (devices - 1) / devices))
