"""A kernel before the arbiter: what its numbers say, at its own sizes or at small ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from spmd._trees.leaves import held_dtype
from spmd.checker import Trial, tried
from spmd.checker._shrinking import distinct, resized_array
from spmd.language import Bound, Size, bind
from spmd.mesh import resized, with_sizes
from spmd.modes import ambient_mode

# --- the sizes of a kernel's names: read off its arguments, and made other ones for a trial ---------------------------


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


_DEVICES = 64  # that are taken as they are
_SMALL = 2**14  # numbers in arguments that are taken as they are


def trial_of(plan: Any, leaves: Sequence[Any]) -> Trial:
    """Return what the numbers of a kernel say: forward and backward, on its mesh and where nothing is divided.

    An axis with one device has two here, because a program is right on all meshes or on none; and one of a large mesh
    has four.

    Args:
      plan: The kernel.
      leaves: Its arguments, or what has their shapes.
    """
    most = 4 if math.prod(plan.sizes.values()) > _DEVICES else math.inf
    small = {axis: int(min(max(n, 2), most)) for axis, n in plan.sizes.items()}
    mesh = with_sizes(plan.mesh, {**small, **dict.fromkeys(plan.left, 1)})

    def run(*arrays: Any) -> Any:
        other = plan.again(with_sizes(mesh, dict(resized.value)), ambient_mode()[0])
        return other.outputs.returned(other.traced(arrays))

    found = Trial(dict(mesh.shape), why="its arguments do not fit the mesh")
    for arrays in _candidates(plan, leaves, mesh):
        found = tried(run, arrays, mesh, dict(mesh.shape), written=dict(plan.mesh.shape))
        if not found.why:
            break
    return found


def _candidates(plan: Any, leaves: Sequence[Any], mesh: Any) -> Iterator[list[Any]]:
    """The arguments as they are, if they are small, and with the smallest sizes of all names."""
    same = {**mesh.shape, **plan.sizes} == dict(mesh.shape)
    small = sum(math.prod(np.shape(x)) for x in leaves) <= _SMALL
    if same and small:
        yield list(leaves)
    read = read_sizes(plan, leaves)
    if not read.faults:
        fixed = {name for name, _ in plan.signature.sizes}
        sizes = {name: one.size for name, one in read.sizes.items()}
        free = {name: size for name, size in sizes.items() if name not in fixed}
        blocks = blocks_of(plan, read, [mesh])
        least = {**sizes, **distinct(free, blocks, {sizes[name] for name in fixed & sizes.keys()})}
        grown = {name: math.lcm(size, blocks[name]) for name, size in sizes.items()}
        for chosen in (least, grown):
            yield [resized_array(x, dims, chosen) for x, dims in zip(leaves, read.dims, strict=True)]
    if same and not small:
        yield [jax.ShapeDtypeStruct(np.shape(x), held_dtype(x)) for x in leaves]
