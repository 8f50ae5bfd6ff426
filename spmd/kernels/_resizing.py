"""The sizes of a kernel's names: read off its arguments, and made other ones for a trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.language import Bound, Size, bind


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
