"""What moves between which devices in a step of a plan, worked out from the layouts before and after it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd.language import Layout

__all__ = ["Transfer", "groups", "transfers"]

Box = tuple[tuple[int, int], ...]
"""From where to where in each name of a layout."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one device receives: `nbytes`, from one of `sources`, who hold the same."""

    to: int
    sources: tuple[int, ...]
    nbytes: int


def groups(axes: Sequence[str], mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The devices that talk to each other, by place on the mesh: they differ along `axes` only; without axes all."""
    if not axes:
        return [tuple(range(math.prod(mesh.values())))]
    found: dict[tuple[int, ...], list[int]] = {}
    for device, at in enumerate(_places(mesh)):
        rest = tuple(n for axis, n in zip(mesh, at, strict=True) if axis not in axes)
        found.setdefault(rest, []).append(device)
    return [tuple(group) for group in found.values()]


def transfers(step: Any, sizes: Mapping[str, int], mesh: Mapping[str, int], itemsize: int) -> list[Transfer]:
    """What each device receives that it does not hold. A psum is left out: what travels are sums on their way."""
    if step.kind in ("split", "psum"):
        return []
    before, after = _boxes(step.before, sizes, mesh), _boxes(step.after, sizes, mesh)
    found = []
    for group in groups(step.axes, mesh):
        for to in group:
            owners: dict[Any, list[int]] = {}
            for device in group:
                # summands of equal place are different values: each is a source of its own
                owner = device if step.kind == "psum_scatter" else before[device]
                owners.setdefault(owner, []).append(device)
            for sources in owners.values():
                count = 0 if to in sources else _overlap(before[sources[0]], after[to])
                if count:
                    found.append(Transfer(to, tuple(sources), count * itemsize))
    return found


def _boxes(layout: Layout, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> list[Box]:
    """What each device holds, per name; a composite is as many names."""
    found = []
    for place in _places(mesh):
        at = dict(zip(mesh, place, strict=True))
        box = []
        for atom in layout.atoms:
            size = sizes[atom.name] if atom.size is None else atom.size
            block, parts = 0, 1
            for axis in atom.axes or ():
                block, parts = block * mesh[axis] + at[axis], parts * mesh[axis]
            box.append((block * size // parts, (block + 1) * size // parts))
        found.append(tuple(box))
    return found


def _places(mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh.values())))


def _overlap(a: Box, b: Box) -> int:
    return math.prod(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in zip(a, b, strict=True))
