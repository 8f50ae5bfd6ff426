"""What excludes a mesh before anything is traced: sizes, memory at rest, and what the program states of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from spmd.accelerators import Hardware
from spmd.searcher._meshes import laid


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
