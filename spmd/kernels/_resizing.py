"""The sizes of a kernel's names: read off its arguments, and made other ones for a trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.language import Bound, Dim, Size, bind


def read_sizes(plan: Any, leaves: Sequence[Any]) -> Bound:
    """The sizes that the arguments of a kernel bind, and the dimensions of each of them."""
    known = {name: Size(size, "") for name, size in plan.signature.sizes}
    arrays = [(one.path, np.shape(x), one.layout) for one, x in zip(plan.leaves, leaves, strict=True)]
    return bind(arrays, plan.sizes, known=known)


def blocks_of(plan: Any, read: Bound, meshes: Sequence[Any]) -> dict[str, int]:
    """Into how many blocks each name is divided wherever it is written, on all meshes."""
    written = [dim for dims in read.dims for dim, _ in dims]
    written += [dim for layout in plan.outputs.declared for dim in layout.dims]

    def count(name: str) -> int:
        axes = {atom.axes or () for dim in written for atom in dim.atoms if atom.name == name}
        return math.lcm(*(math.prod(mesh.shape[a] for a in one) for one in axes for mesh in meshes))

    return {name: count(name) for name in read.sizes}


def distinct(free: Mapping[str, int], blocks: Mapping[str, int], used: set[int], least: int = 0) -> dict[str, int]:
    """The smallest size of each name: at least `least`, a multiple of its blocks, two in each of these, and none that
    another name has."""
    found, taken = {}, set(used)
    for name in free:
        step = blocks[name]
        small = max(2 * step, -(-least // step) * step)
        while small in taken:
            small += step
        taken.add(min(small, free[name]))
        found[name] = small
    return found


def resized_array(x: Any, dims: Sequence[tuple[Dim, int | None]], sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """An array with other sizes of its names."""
    shape = []
    for (dim, _), now in zip(dims, np.shape(x), strict=True):
        parts = [atom.size or sizes.get(atom.name) for atom in dim.atoms]
        known = [n for n in parts if n is not None]
        shape.append(math.prod(known) if len(known) == len(parts) > 0 else now)
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=getattr(x, "sharding", None))
