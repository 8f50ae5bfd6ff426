"""Groups of devices in compiled text, in each form that JAX prints, and the mesh axes that they stand for."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from spmd.errors import SpmdError
from spmd.language import axes_product, mesh_text

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAME = r"(?:'[^']*'|\"[^\"]*\"|[\w.]+)"
_MESH = re.compile(
    r"^@?mesh[\[<](?P<sizes>[^\]>]*)[\]>]"
    r"(?:,\s*device_ids=\((?P<ids>(?:[^()]|\([^()]*\))*)\))?"
    r"\s*\{(?P<axes>[^}]*)\}"
)
_SIZE = re.compile(rf"({_NAME})=(\d+)")
_AXIS = re.compile(rf"({_NAME})(?::\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


def parse_groups(text: str, partitions: int) -> Groups:
    """The groups in `text`, which begins with the value of `replica_groups=`.

    Three forms are printed: a list, a transposed iota, and axes of a mesh with parts of axes.

    >>> parse_groups("{{0,1},{2,3}}, to_apply=%add", 4)
    ((0, 1), (2, 3))
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['x'=2,'y'=4] {'y':(1)2}", 8)
    ((0, 2), (1, 3), (4, 6), (5, 7))

    Raises:
      SpmdError: The text has another form.
    """
    if text.startswith("{"):
        return _listed(text) or (tuple(range(partitions)),)
    if found := _IOTA.match(text):
        shape, dims = _ints(found.group(1)), _ints(found.group(2))
        order = _ints(found.group(3)) if found.group(3) else tuple(range(len(dims)))
        return _rows(np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape))
    if found := _MESH.match(text):
        return _mesh_groups(found)
    raise SpmdError(f"The compiled text has replica groups in a form that is not known here: {text[:80]!r}.")


def parse_pairs(text: str) -> Groups:
    """The (source, target) pairs of a collective-permute.

    >>> parse_pairs("{{0,1},{1,0}}, metadata={}")
    ((0, 1), (1, 0))
    """
    return _listed(text)


def named_mesh(text: str) -> dict[str, int] | None:
    """The mesh that the groups of `text` are written in, when its axes carry their own names.

    >>> named_mesh("mesh['dp'=2,'tp'=4] {'tp'}"), named_mesh("mesh['axis_0'=8] {'axis_0'}")
    ({'dp': 2, 'tp': 4}, None)
    """
    found = _MESH.match(text)
    if found is None:
        return None
    sizes = {name.strip("'\""): int(size) for name, size in _SIZE.findall(found.group("sizes"))}
    invented = all(re.fullmatch(r"(mesh_)?axis_\d+", name) for name in sizes)
    return None if invented else sizes


def axes_of_groups(groups: Groups, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], bool]:
    """The mesh axes, in mesh order, along which the members of a group differ.

    Device i of the groups is the i-th of the mesh in row-major order. The second value says whether each
    group spans those axes entirely; XLA's own resharding also uses parts of axes.

    >>> axes_of_groups(((0, 2), (1, 3)), {"dp": 2, "tp": 2})
    (('dp',), True)
    >>> axes_of_groups(((0, 1), (2, 3)), {"tp": 4})
    (('tp',), False)
    """
    differs = _differing(groups, mesh)
    axes = tuple(name for name in mesh if name in differs)
    size = axes_product(axes, mesh)
    return axes, all(len(group) == size for group in groups)


def axes_of_pairs(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes, in mesh order, along which a source and its target differ.

    >>> axes_of_pairs(((0, 1), (1, 0), (2, 3), (3, 2)), {"dp": 2, "tp": 2})
    ('tp',)
    """
    differs = _differing(pairs, mesh)
    return tuple(name for name in mesh if name in differs)


def _differing(groups: Groups, mesh: Mapping[str, int]) -> set[str]:
    shape = tuple(mesh.values())
    members = [device for group in groups for device in group]
    if max(members, default=0) >= math.prod(shape):
        size = f"the {mesh_text(mesh)} has only {math.prod(shape)} devices"
        rule = f"The compiled program has a device {max(members)}, and {size}."
        raise SpmdError(rule, advice="mesh= is the mesh that the program was compiled for")
    found: set[str] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group, dtype=np.int64), shape))
        varies = (places != places[:, :1]).any(axis=1)
        found.update(name for name, different in zip(mesh, varies, strict=True) if different)
    return found


def _mesh_groups(found: re.Match[str]) -> Groups:
    sizes = {name.strip("'\""): int(size) for name, size in _SIZE.findall(found.group("sizes"))}
    parts = [
        (name.strip("'\""), int(before or 1), int(size) if size else None)
        for name, before, size in _AXIS.findall(found.group("axes"))
    ]
    factors: list[tuple[str, int, int]] = []  # (axis, product of the factors before it, size), mesh order
    for name, size in sizes.items():
        cuts = {1, size}
        for axis, before, part in parts:
            if axis == name and part is not None:
                cuts |= {before, before * part}
        edges = sorted(cuts)
        factors += [(name, a, b // a) for a, b in itertools.pairwise(edges)] or [(name, 1, 1)]
    chosen: list[int] = []
    for axis, before, part in parts:
        end = sizes[axis] if part is None else before * part
        chosen += [i for i, (name, at, _) in enumerate(factors) if name == axis and before <= at < end]
    rest = [i for i in range(len(factors)) if i not in chosen]
    devices = _device_ids(found.group("ids"), math.prod(sizes.values()))
    grid = devices.reshape([size for _, _, size in factors]).transpose(rest + chosen)
    return _rows(grid.reshape(-1, math.prod(factors[i][2] for i in chosen)))


def _device_ids(text: str | None, count: int) -> np.ndarray:
    """The mesh's devices: in order, listed, or as a transposed iota `[4,2]T(1,0)`."""
    if text is None:
        return np.arange(count)
    if text.startswith("["):
        dims, _, order = text.partition("T")
        grid = np.arange(count).reshape(_ints(dims.strip("[]")))
        return grid.transpose(_ints(order.strip("()"))).reshape(-1) if order else grid.reshape(-1)
    return np.asarray(_ints(text))


def _listed(text: str) -> Groups:
    """`{{0,1},{2,3}}` at the start of `text`; the list ends where its outer brace closes."""
    depth, end = 0, len(text)
    for at, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            end = at
            break
    return tuple(_ints(group) for group in re.findall(r"\{([\d,\s]+)\}", text[1:end]))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _rows(grid: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in grid)


def axes_text(axes: Sequence[str]) -> str:
    """Axis names as a layout writes them: `dp/tp`; `-` if there are none."""
    return "/".join(axes) or "-"
