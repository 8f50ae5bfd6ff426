"""The meshes of a number of devices: how many lie along each axis, and which axes lie inside a node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

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


# --- what excludes a mesh before anything is traced: sizes, memory at rest, and what the program states of itself -----


@dataclass(frozen=True)
class Bound:
    """The least that a step takes on one device, stated without a trace: the third value of a `build`.

    `search` traces meshes in the order of the seconds that this takes, and stops where no other mesh can be better. A
    bound that exceeds what the trace says is an error.

    Attributes:
      flops: Floating-point operations of matrix products by dtype name, with what is computed again and what idle
        stages of a pipeline compute.
      sent: Bytes that one device sends, by kind of collective and mesh axes, as `explain` counts them:
        `{("all_gather", ("fsdp",)): 1e9}`.
      memory: Bytes of memory at the peak.
      needed: The part of `flops` that the model needs, for the share of the peak; None for all that the trace has.
      traffic: Bytes read from memory and written to it.

    >>> import spmd
    >>> bound = spmd.searcher.Bound({"bfloat16": 989.4e12}, {("psum", ("dp",)): 1e9})
    >>> round(bound.seconds({"dp": 16}, spmd.hardware("h100")), 6)
    1.002074
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    memory: float = 0.0
    needed: Mapping[str, float] | None = None
    traffic: float = 0.0

    def seconds(self, mesh: Mapping[str, int], hardware: Hardware, *, overlap: Sequence[str] = ()) -> float:
        """Seconds of this work, with the axes of the mesh in the best order; without latencies.

        Args:
          mesh: The sizes of the axes.
          hardware: The machine.
          overlap: Mesh axes, as in `search`.
        """
        sent = [(kind, axes, size, 1) for (kind, axes), size in self.sent.items()]
        beside = compute_seconds(self.flops, hardware) + self.traffic / hardware.hbm_bandwidth
        return laid(sent, mesh, without_latency(hardware), beside, overlap)[1]


def compute_seconds(flops: Mapping[str, float], hardware: Hardware) -> float:
    """Seconds of floating-point work by dtype name, at the peaks."""
    return math.fsum(count / hardware.peak(dtype) for dtype, count in flops.items())


def without_latency(hardware: Hardware) -> Hardware:
    """The same machine with links that answer at once."""
    links = {axis: replace(link, latency=0.0) for axis, link in hardware.links.items()}
    node = None if hardware.node is None else replace(hardware.node, latency=0.0)
    return replace(hardware, default=replace(hardware.default, latency=0.0), links=links, node=node)


def undivided(args: Sequence[Any]) -> str | None:
    """The first argument that its sharding does not divide evenly."""
    for one in jax.tree.leaves(args):
        sharding = getattr(one, "sharding", None)
        if sharding is None:
            continue
        try:
            sharding.shard_shape(one.shape)
        except ValueError:
            return f"{tuple(one.shape)} as {sharding.spec}"
    return None


def bytes_at_rest(args: Sequence[Any]) -> int:
    """Bytes of the arguments on one device."""
    total = 0
    for one in jax.tree.leaves(args):
        sharding = getattr(one, "sharding", None)
        shape = one.shape if sharding is None else sharding.shard_shape(one.shape)
        total += math.prod(shape) * one.dtype.itemsize
    return total
