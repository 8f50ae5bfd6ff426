"""The meshes of a number of devices: how many lie along each axis, and which axes lie inside a node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from spmd.accelerators import Hardware

Sizes = dict[str, int]
Sent = Iterable[tuple[str, tuple[str, ...], float, float]]
"""Collectives: the kind, the mesh axes, the bytes that one device sends in each, and how many there are."""


def factorisations(devices: int, axes: Sequence[str]) -> Iterator[Sizes]:
    """Every way to write a number as a product, a factor for each axis.

    >>> [tuple(sizes.values()) for sizes in factorisations(4, ("dp", "tp"))]
    [(1, 4), (2, 2), (4, 1)]
    """
    first, *others = axes
    if not others:
        yield {first: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ({first: size, **rest} for rest in factorisations(devices // size, others))


def orders(sizes: Mapping[str, int], hardware: Hardware) -> Iterator[Sizes]:
    """The orders of a mesh's axes that differ in what lies inside a node. The other axes stay as they are.

    >>> from spmd import hardware
    >>> [tuple(order) for order in orders({"dp": 4, "tp": 8}, hardware("h100"))]
    [('tp', 'dp'), ('dp', 'tp')]
    """
    yield from _orders(dict(sizes), {}, hardware.node_size if hardware.node is not None else 1)


def _orders(outer: Sizes, inner: Sizes, room: int) -> Iterator[Sizes]:
    candidates = [axis for axis, size in outer.items() if size > 1 and axis not in inner]
    if room == 1 or len(candidates) <= 1:
        yield {**{axis: size for axis, size in outer.items() if axis not in inner}, **inner}
        return
    for axis in candidates:
        size = outer[axis]
        yield from _orders(outer, {axis: size, **inner}, room // size if size <= room else 1)


def laid(
    sent: Sent, sizes: Mapping[str, int], hardware: Hardware, beside: float = 0.0, overlap: Sequence[str] = ()
) -> tuple[Sizes, float]:
    """The order of the axes in which a step takes least, and its seconds; of equal orders the first.

    Args:
      sent: Its collectives.
      sizes: The mesh.
      hardware: The machine.
      beside: Seconds of all other work.
      overlap: Collectives over these axes alone take place beside the other work.
    """
    sent = list(sent)
    hidden = [one for one in sent if set(one[1]) <= set(overlap)]
    exposed = [one for one in sent if one not in hidden]

    def seconds(order: Sizes) -> float:
        return communication(exposed, order, hardware) + max(beside, communication(hidden, order, hardware))

    found = ((seconds(order), order) for order in orders(sizes, hardware))
    best, order = min(found, key=lambda pair: pair[0])
    return order, best


def communication(sent: Sent, sizes: Mapping[str, int], hardware: Hardware) -> float:
    """Seconds of these collectives, one after another."""
    return math.fsum(count * hardware.collective_seconds(kind, size, axes, sizes) for kind, axes, size, count in sent)
