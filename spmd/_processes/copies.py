"""Copies of one block on several devices: whether they are equal in every bit, by checksums that devices compute."""

from __future__ import annotations

import collections
import hashlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmd._processes.agreement import everyone, gathered, ranks
from spmd._trees.leaves import is_key
from spmd.mesh import outside_trace, processes_of

# A checksum is a sum of 32 bits over all elements, each mixed with its position. So it does not depend on how they are
# cut. The devices sum what they hold, where an array is saved and where it is read. A change of one bit changes the
# sum; one in four billion of the other changes does not.


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """The checksum of an array, which the devices compute."""
    words = _words(x)
    place = jnp.uint32(0)
    for dim, size in enumerate(words.shape):
        steps = jnp.arange(size, dtype=jnp.uint32) * np.uint32(0x9E3779B1) + np.uint32(dim + 1)
        # mixed once for each position along a dimension, which XLA would do again for each element
        steps = jax.lax.optimization_barrier(_scrambled(_scrambled(steps)))
        place += jax.lax.broadcast_in_dim(steps, words.shape, (dim,))
    return jnp.sum(_scrambled(words.astype(jnp.uint32) ^ place), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers of at most 32 bits; of random keys, those of their numbers."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    width = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo(x.dtype).bits
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(width, 32)}"))


def _scrambled(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3. Appleby, 2011."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


@jax.jit
def checksums(leaves: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The checksums of all arrays, in one program: of many programs at once, those on CPU may wait for each other."""
    return {path: checksum(x) for path, x in leaves.items()}


def _by_device(leaves: Mapping[str, jax.Array]) -> dict[Any, dict[str, Any]]:
    """Return the checksum of each block that this process holds, and whether its numbers are finite, by device.

    One program for all devices that hold blocks of one shape: a program for each would be compiled for each.
    """
    groups: dict[Any, dict[str, list[Any]]] = collections.defaultdict(dict)
    for path, x in leaves.items():
        by_shape: dict[Any, list[Any]] = collections.defaultdict(list)
        for part in x.addressable_shards:
            by_shape[part.data.shape].append(part)
        for parts in by_shape.values():
            groups[tuple(part.device for part in parts)][path] = [_in_a_row(part) for part in parts]
    found: dict[Any, dict[str, Any]] = collections.defaultdict(dict)
    for devices, several in groups.items():
        mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
        rows = NamedSharding(mesh, PartitionSpec("device"))
        whole = lambda blocks, rows=rows: jax.make_array_from_single_device_arrays(
            (len(blocks) * blocks[0].shape[0], *blocks[0].shape[1:]), rows, blocks
        )
        with jax.set_mesh(mesh):  # the mesh of the program around it has others
            sums = jax.device_get(_looked({path: whole(blocks) for path, blocks in several.items()}))
        for path, both in sums.items():
            for device, one in zip(devices, both.reshape(-1, 2), strict=True):
                found[device][path] = one
    return found


def _in_a_row(part: Any) -> jax.Array:
    """The block of a device, with a first dimension."""
    block = jax.random.key_data(part.data) if is_key(part.data) else part.data
    return block if block.ndim else jax.device_put(np.asarray(block)[None], part.device)


@jax.jit
def _looked(blocks: Mapping[str, jax.Array]) -> dict[str, Any]:
    """The checksum of each block, and whether all of its numbers are finite."""
    each = lambda x: jnp.stack([checksum(x), jnp.uint32(_finite(x))])
    where = PartitionSpec("device")
    return cast(Any, jax.shard_map(lambda all_: jax.tree.map(each, all_), in_specs=where, out_specs=where)(blocks))


def _finite(x: jax.Array) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    narrow = jnp.finfo(x.dtype).bits < 16  # of some of them JAX knows no infinity
    return jnp.isfinite(x.astype("float32") if narrow else x).all()


class Look:
    """What the devices say of the blocks that they hold; the same in all processes.

    Communication: an all-gather of 8 bytes for each array and device.
    """

    def __init__(self, leaves: Mapping[str, jax.Array]) -> None:
        self._leaves = leaves
        most = max(collections.Counter(one.process_index for one in jax.devices()).values())
        seen, fine = _by_device(leaves), (0, 1)
        mine = [[one.id, *(n for p in leaves for n in seen.get(one, {}).get(p, fine))] for one in jax.local_devices()]
        whole = gathered(np.array([*mine, *mine[:1] * (most - len(mine))], np.uint32))
        rows = whole.reshape(-1, 1 + 2 * len(leaves))
        self._sums = {int(row[0]): row[1::2] for row in rows}
        self._fine = {int(row[0]): row[2::2] for row in rows}

    def different_copies(self) -> list[str]:
        """The blocks of which devices hold copies that differ in a bit, and on which of them."""
        found: list[tuple[str, dict[Any, int]]] = []
        for leaf, (path, x) in enumerate(self._leaves.items()):
            copies: dict[str, dict[Any, int]] = collections.defaultdict(dict)
            for device, where in x.sharding.devices_indices_map(x.shape).items():
                copies[path + block_text(where, x.shape)][device] = int(self._sums[device.id][leaf])
            found += [(block, sums) for block, sums in copies.items() if len(set(sums.values())) > 1]
        hosts = everyone(socket.gethostname()) if found else []
        return [_odd(*one, hosts) for one in found]

    def not_finite(self) -> list[str]:
        """The arrays with numbers that are not finite, and the ranks that hold them where others hold none: first
        those of the fewest ranks, for a sum takes such a number to all of them."""
        found: list[tuple[int, str]] = []
        for leaf, (path, x) in enumerate(self._leaves.items()):
            held = {one.process_index for one in x.sharding.device_set}
            odd = {one.process_index for one in x.sharding.device_set if not self._fine[one.id][leaf]}
            found += [(len(odd), f"{path}: {ranks(sorted(odd))}" if odd < held else path)] if odd else []
        return [text for _, text in sorted(found, key=lambda one: one[0])]


def _odd(block: str, sums: Mapping[Any, int], hosts: Sequence[str]) -> str:
    """Return who has other copies of a block than most."""
    counts = collections.Counter(sums.values()).most_common()
    clear = len(counts) == 1 or counts[0][1] > counts[1][1]
    odd = [device for device, value in sums.items() if not clear or value != counts[0][0]]
    shown = ", ".join(f"device {one.id} (rank {one.process_index} on {hosts[one.process_index]})" for one in odd[:8])
    others = f"differs from {counts[0][1]} equal copies" if clear else "have different copies, and no majority is right"
    return f"{block}: {shown} {others}"


def block_text(index: Sequence[slice] | None, shape: Sequence[int]) -> str:
    """A block as Python writes it: `[0:4, 0:8]`; empty for a scalar."""
    limits = (one.indices(n) for one, n in zip(index or (), shape, strict=True))
    return f"[{', '.join(f'{start}:{stop}' for start, stop, _ in limits)}]" if shape else ""


# --- arrays of the host ------------------------------------------------------------------------------------------


def takes_part(mesh: Any) -> bool:
    """Return whether all processes have devices in a mesh, and there are several: only then can they compare
    anything."""
    return isinstance(mesh, Mesh) and 1 < len(processes_of(mesh)) == jax.process_count()


def fingerprint(x: Any) -> str:
    """Dtype, shape and a hash of the elements: `float32[8, 4] #5f3a09c1d2e4`."""
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(x) if is_key else x)
    digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()
    return f"{x.dtype if is_key else array.dtype}{list(np.shape(x))} #{digest[:16]}"


def is_local(x: Any) -> bool:
    """Return whether a value lies in this process alone, so that the others have one of their own."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return x.is_fully_addressable if isinstance(x, jax.Array) else True


def put(x: Any, sharding: Any) -> Any:
    """`jax.device_put`, but for devices of several processes, each of which gives the whole array: there JAX would
    compare them by sending all of it to all (for 16 MiB 205 ms, and 4 without)."""
    if sharding.is_fully_addressable or not is_local(x) or not outside_trace():
        return jax.device_put(x, sharding)
    whole = x if isinstance(x, jax.Array) else np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
    return jax.make_array_from_callback(whole.shape, sharding, lambda where: whole[where])
