"""Where arrays outside kernels lie, as far as a jaxpr tells, and the least that a change of place must move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from spmd import _compat
from spmd.comm.plans import plan
from spmd.errors import SpmdError
from spmd.language import Layout, axes_product, axes_tuple

# The axes of each dimension, major first. None: nobody knows.
Placement = tuple[tuple[str, ...], ...] | str | None
ONE_DEVICE = "one device"
ANYWHERE = "anywhere"  # made of constants, so made where it is wanted


def of_spec(spec: Any, rank: int, sizes: Mapping[str, int]) -> Placement:
    """The placement that a PartitionSpec says. Axes of size 1 do not divide anything."""
    dims: list[tuple[str, ...]] = []
    for entry in _compat.partitions(spec, rank):
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            return None
        dims.append(tuple(a for a in axes_tuple(entry) if sizes.get(a, 1) > 1))
    return tuple(dims)


def with_others(place: Placement, before: Placement, known: Iterable[str], sizes: Mapping[str, int]) -> Placement:
    """What a `shard_map` over some axes of a mesh says of a placement: the compiler leaves the others as they were."""
    others = {a for a, n in sizes.items() if n > 1 and a not in known}
    if not others or isinstance(place, str) or place is None:
        return place
    if not isinstance(before, tuple):
        return None
    kept = (tuple(a for a in axes if a in others) for axes in before)
    return tuple((*axes, *rest) for axes, rest in zip(place, kept, strict=True))


def of_sharding(sharding: Any, rank: int, sizes: Mapping[str, int]) -> Placement:
    """The placement that the sharding of an argument says, on the program's mesh."""
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        known = {a for a, n in sharding.mesh.shape.items() if n == 1 or sizes.get(a) == n}
        used = of_spec(sharding.spec, rank, sharding.mesh.shape)
        fits = used is not None and all(a in known for axes in used for a in axes)
        return used if fits else None
    if isinstance(sharding, SingleDeviceSharding) and math.prod(sizes.values()) > 1:
        return ONE_DEVICE
    return None


def text_of(placement: Placement, names: Sequence[str] = ()) -> str | None:
    """As a layout, of unnamed dimensions where there are no names: `_/dp _`."""
    if placement is None or isinstance(placement, str):
        return placement
    names = names or ("_",) * len(placement)
    return " ".join("/".join((name, *axes)) for name, axes in zip(names, placement, strict=True)) or "scalar"


def names_of(layout: Layout, rank: int) -> tuple[str, ...]:
    """What a layout calls the dimensions of an array: `("b", "(h k)")`."""
    dims = layout.with_rank(rank).dims
    return tuple(replace(d, atoms=tuple(replace(a, axes=None) for a in d.atoms)).short for d in dims)


def local_count(shape: Sequence[int], placement: Placement, sizes: Mapping[str, int]) -> int:
    """How many elements one device holds. All of them, if the placement is not known."""
    if placement is None or isinstance(placement, str):
        return math.prod(shape)
    return math.prod(-(-n // axes_product(axes, sizes)) for n, axes in zip(shape, placement, strict=True))


def moved_bytes(
    shape: Sequence[int], dtype: Any, source: Placement, target: Placement, sizes: Mapping[str, int]
) -> int | None:
    """What one device sends in the cheapest plan from one placement to another; where there is none (sizes that do not
    divide), the least that some device must receive."""
    if source is None or target is None or isinstance(target, str):
        return None
    if isinstance(source, str):  # on one device: the others have nothing
        return local_count(shape, target, sizes) * dtype.itemsize
    names = [f"d{i}" for i in range(len(shape))]
    pattern = f"{text_of(source, names)} -> {text_of(target, names)}"
    try:
        return plan(pattern, sizes=dict(zip(names, shape, strict=True)), mesh=sizes, dtype=dtype).bytes
    except SpmdError:
        return _received_bytes(shape, dtype.itemsize, source, target, sizes)


def _received_bytes(shape: Sequence[int], itemsize: int, source: Any, target: Any, sizes: Mapping[str, int]) -> int:
    """The least that the device which lacks most must receive: of its new shard, what its old one does not have."""
    used = [a for a in sizes if any(a in axes for axes in (*source, *target))]
    grid = np.indices([sizes[a] for a in used]) if used else np.zeros((0,), np.int64)
    place = dict(zip(used, grid, strict=True))
    common: Any = 1
    wanted = 1
    for n, old, new in zip(shape, source, target, strict=True):
        (start, end), (low, high) = _block(n, old, place, sizes), _block(n, new, place, sizes)
        common = common * np.maximum(np.minimum(end, high) - np.maximum(start, low), 0)
        wanted *= n // axes_product(new, sizes)
    return int(wanted - np.min(common)) * itemsize


def _block(n: int, axes: Sequence[str], place: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[Any, Any]:
    """Where each device's block of a dimension starts and ends."""
    index: Any = 0
    for axis in axes:
        index = index * sizes[axis] + place[axis]
    size = n // axes_product(axes, sizes)
    return index * size, (index + 1) * size
