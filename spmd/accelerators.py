"""The few numbers of a machine that bound the time of a program: FLOP/s, memory, and links between devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from spmd._leaves import kind_of
from spmd.errors import SpmdError, did_you_mean
from spmd.language import check_axes

__all__ = ["PRESETS", "Hardware", "Link", "hardware"]

# How a collective uses its links. Bytes are what one device sends: see `spmd.inspect.Collective`.
_PASSES = {"all_gather": 1, "psum_scatter": 1, "psum": 2, "all_to_all": 1, "ragged_all_to_all": 1}
_DIRECT = ("ppermute", "sends", "pbroadcast")


@dataclass(frozen=True, slots=True)
class Link:
    """The speed of the links between the devices along a mesh axis.

    Attributes:
      bandwidth: Bytes per second that one device sends along the axis while it receives at the same rate.
      latency: Seconds per step of a collective, however few bytes it sends.
      ring: True if a device only reaches its two neighbours, as in a torus; `bandwidth` is then that of both directions
        together. False means a switch: every device reaches every other at full bandwidth.

    Raises:
      SpmdError: If a number is not positive and finite (the latency may be 0).

    >>> Link(bandwidth=50e9, latency=4e-6)
    Link(bandwidth=50000000000.0, latency=4e-06, ring=False)
    """

    bandwidth: float
    latency: float = 0.0
    ring: bool = False

    def __post_init__(self) -> None:
        call = f"Link(bandwidth={self.bandwidth!r}, latency={self.latency!r})"
        _check_number("bandwidth", self.bandwidth, "bytes per second", call)
        _check_number("latency", self.latency, "seconds", call, zero=True)


@dataclass(frozen=True)
class Hardware:
    """The machine that times are estimated for: one device's numbers, and the links between devices.

    Attributes:
      name: Its name in tables.
      flops: Peak FLOP/s of one device by dtype name: `{"bfloat16": 989e12}`.
      hbm_bandwidth: Bytes per second between a device and its memory.
      hbm_bytes: Bytes of memory per device.
      default: The link along every mesh axis that has no link of its own.
      links: The links of mesh axes by name.
      node: The link between devices of one node; None if all axes have the same link.
      node_size: Devices per node. Neighbours in the mesh share a node, the innermost (last) axes first.

    Raises:
      SpmdError: If a number is not positive and finite, or a link is not a `Link`.

    >>> import spmd
    >>> lan = spmd.Hardware("lab", {"float32": 80e12}, hbm_bandwidth=1e12, hbm_bytes=24e9, default=spmd.Link(1.25e9))
    >>> f"{lan.collective_seconds('all_gather', 1e9, ('dp',), {'dp': 4}):.1f} s"
    '0.8 s'
    """

    name: str
    flops: Mapping[str, float]
    hbm_bandwidth: float
    hbm_bytes: float
    default: Link
    links: Mapping[str, Link] = field(default_factory=dict)
    node: Link | None = None
    node_size: int = 1

    def __post_init__(self) -> None:
        call = f"Hardware({self.name!r}, ...)"
        if not isinstance(self.flops, Mapping) or not self.flops:
            rule = f"flops is a dict from dtype names to FLOP/s, not {self.flops!r}."
            raise SpmdError(rule, call=call, advice='as in flops={"bfloat16": 989e12, "float32": 494e12}')
        for name, peak in self.flops.items():
            _check_number(f"flops[{name!r}]", peak, "FLOP/s", call)
        _check_number("hbm_bandwidth", self.hbm_bandwidth, "bytes per second", call)
        _check_number("hbm_bytes", self.hbm_bytes, "bytes", call)
        _check_number("node_size", self.node_size, "devices", call)
        named = {"default": self.default, **{f"links[{axis!r}]": link for axis, link in self.links.items()}}
        for what, link in (named if self.node is None else {**named, "node": self.node}).items():
            if not isinstance(link, Link):
                rule = f"{what} is a Link, not {kind_of(link)}."
                raise SpmdError(rule, call=call, advice="as in spmd.Link(bandwidth=50e9, latency=4e-6)")

    def __hash__(self) -> int:
        return hash((self.name, self.hbm_bandwidth, self.default, self.node, self.node_size))

    def peak(self, dtype: Any) -> float:
        """Peak FLOP/s of one device for `dtype`; for a dtype that is not listed, that of the slowest listed one."""
        return self.flops.get(jnp.dtype(dtype).name, min(self.flops.values()))

    def link(self, axis: str, sizes: Mapping[str, int] | None = None) -> Link:
        """The slowest link that a collective over `axis` uses.

        Args:
          axis: A mesh axis.
          sizes: All axes of the mesh with their sizes, in mesh order. They determine which axes are inside a node;
            without them no axis is.

        Returns:
          The `Link`.

        >>> h100 = hardware("h100")
        >>> [h100.link(axis, {"dp": 4, "tp": 8}).bandwidth for axis in ("dp", "tp")]
        [50000000000.0, 450000000000.0]
        """
        phases = self._phases((axis,), {axis: 2**62} if sizes is None else sizes)
        return phases[0][0] if phases else self.links.get(axis, self.node or self.default)

    def collective_seconds(self, kind: str, nbytes: float, axes: Sequence[str], sizes: Mapping[str, int]) -> float:
        """Estimated seconds of one collective.

        The model is a ring per axis, with `latency` for each step and bytes over bandwidth. n devices take n - 1 steps.
        psum is a psum_scatter and an all_gather, so it takes 2(n - 1). A `ring` uses both directions at once and takes
        half of these. Over several axes, or an axis that is larger than a node, the slowest link comes first for
        all_gather and last for psum_scatter, where the pieces are smallest. The pieces are pipelined, so latencies add
        and the slowest link binds. An all_to_all is direct through a switch; on a `ring` the devices in between pass it
        on. A ppermute is one step, to a neighbour on a `ring`. Nothing else uses the links at the same time.

        Args:
          kind: `all_gather`, `psum_scatter`, `psum`, `all_to_all`, `ragged_all_to_all`, `ppermute`, `sends`
            or `pbroadcast`.
          nbytes: Bytes that one device sends, as `spmd.explain` and `spmd.plan` report them.
          axes: The mesh axes that it runs over.
          sizes: All axes of the mesh with their sizes, in mesh order.

        Returns:
          Seconds; 0 if the axes have only one device in all.

        Raises:
          SpmdError: If the kind is not known.
          MeshError: If an axis is not in `sizes`.

        >>> h100, mesh = hardware("h100"), {"dp": 4, "tp": 8}
        >>> [f"{h100.collective_seconds('psum', 1e9, axes, mesh) * 1e3:.2f} ms" for axes in (["tp"], ["dp"])]
        ['2.25 ms', '20.02 ms']
        """
        call = f"collective_seconds({kind!r}, {nbytes!r}, {tuple(axes)!r}, {dict(sizes)!r})"
        if kind not in _PASSES and kind not in _DIRECT:
            near = did_you_mean(kind, (*_PASSES, *_DIRECT)) or "."
            rule = f"no collective is called {kind!r}{near}"
            raise SpmdError(rule, call=call, got=[f"known: {', '.join((*_PASSES, *_DIRECT))}"])
        phases = self._phases(axes, sizes)
        if not phases:
            return 0.0
        if kind in _DIRECT:
            link = phases[0][0]
            return link.latency + nbytes / link.bandwidth * (2 if link.ring else 1)
        return _phased_seconds(kind, nbytes, phases)

    def _phases(self, axes: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[Link, int]]:
        """The links that a collective over `axes` uses, each with its number of devices, slowest first."""
        check_axes(axes, sizes)
        room, found = self.node_size if self.node is not None else 1, []
        for axis, size in reversed(tuple(sizes.items())):
            inside = max(n for n in range(1, min(room, size) + 1) if size % n == 0)
            room = room // inside if inside == size else 1
            if axis in axes and axis in self.links:
                found.append((self.links[axis], size))
            elif axis in axes:
                found += [(self.node, inside), (self.default, size // inside)]
        return sorted(((link, n) for link, n in found if link and n > 1), key=lambda phase: phase[0].bandwidth)


def _phased_seconds(kind: str, nbytes: float, phases: Sequence[tuple[Link, int]]) -> float:
    total, passes = math.prod(n for _, n in phases), _PASSES[kind]
    whole = nbytes * total / (total - 1)  # the larger side; for an all_to_all the shard
    before, steps, moving = 1, 0.0, []
    for link, n in phases:
        if kind not in ("all_to_all", "ragged_all_to_all"):
            moved = whole * before * (n - 1) / total
        elif link.ring:  # 1/n of the shard goes to each of the others, n/4 hops away on average
            moved = whole / n * (n * n // 4)
        else:  # the part that differs along this axis and along none of the slower ones
            moved = whole * (n - 1) / (before * n)
        before *= n
        steps += passes * link.latency * (n // 2 if link.ring else n - 1)
        moving.append(moved / link.bandwidth)
    return steps + max(moving)


def _check_number(what: str, value: Any, unit: str, call: str, zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        rule = f"{what} is a {'number that is not negative' if zero else 'positive number'} ({unit}), not {value!r}."
        raise SpmdError(rule, call=call)


# H100 SXM. NVIDIA H100 Tensor Core GPU data sheet (halved where it counts 2:4 sparsity): BF16 and FP16 989.4, TF32
# 494.7, FP8 and INT8 1978.9, FP64 66.9 TFLOP/s; HBM3 80 GB at 3.35 TB/s; NVLink 900 GB/s both ways. float32 is that of
# TF32, JAX's default for matrix products on this GPU. NVIDIA DGX H100 data sheet: 8 GPUs a node behind NVSwitch, one
# ConnectX-7 port of 400 Gb/s per GPU. Latencies: NCCL, src/graph/tuning.cc, hwLatencies of Ring/LL128 for NVLINK
# (1.9 us) and NET (4.0 us).
_H100 = Hardware(
    name="h100",
    flops={
        "bfloat16": 989.4e12,
        "float16": 989.4e12,
        "float32": 494.7e12,
        "float64": 66.9e12,
        "float8_e4m3fn": 1978.9e12,
        "float8_e5m2": 1978.9e12,
        "int8": 1978.9e12,
    },
    hbm_bandwidth=3.35e12,
    hbm_bytes=80e9,
    default=Link(50e9, 4.0e-6),
    node=Link(450e9, 1.9e-6),
    node_size=8,
)

# TPU v5p. Google Cloud, "TPU v5p" (docs.cloud.google.com/tpu/docs/v5p): 459 TFLOP/s in bfloat16 and FP8, 95 GiB of HBM
# at 2765 GB/s, a 3D torus with 1200 GB/s of interconnect per chip both ways (4800 Gb/s each way), so 200 GB/s are sent
# along each of three axes, both ways around the ring. int8 918 TOP/s and 1 us per hop: Austin et al.,
# "How to Scale Your Model", parts 2 and 3 (jax-ml.github.io/scaling-book), which measures 180 GB/s per axis. float32 is
# that of bfloat16, JAX's default for matrix products on TPUs.
_TPU_V5P = Hardware(
    name="tpu-v5p",
    flops={"bfloat16": 459e12, "float32": 459e12, "float8_e4m3fn": 459e12, "float8_e5m2": 459e12, "int8": 918e12},
    hbm_bandwidth=2765e9,
    hbm_bytes=95 * 2**30,
    default=Link(200e9, 1.0e-6, ring=True),
)

_PRESETS = {one.name: one for one in (_H100, _TPU_V5P)}
PRESETS = tuple(_PRESETS)


def hardware(which: str | Hardware) -> Hardware:
    """The numbers of a machine: a preset by name, or a `Hardware` unchanged.

    - `"h100"`: NVIDIA H100 SXM in nodes of 8. Axes inside a node, the innermost of the mesh first, use NVLink (450 GB/s
      each way). The others use one 400 Gb/s network port per GPU.
    - `"tpu-v5p"`: every mesh axis is one axis of the 3D torus, wrapped around, 200 GB/s.

    These are the vendors' peaks, which no program reaches. The source cites them beside the numbers. For a similar
    machine, use `dataclasses.replace(spmd.hardware("h100"), links={"dp": spmd.Link(25e9, 10e-6)})`.

    Args:
      which: `"h100"`, `"tpu-v5p"` or a `Hardware`.

    Returns:
      The `Hardware`.

    Raises:
      SpmdError: If no preset has this name.

    >>> import spmd
    >>> spmd.hardware("h100").peak("bfloat16")
    989400000000000.0
    """
    if isinstance(which, Hardware):
        return which
    known = ", ".join(map(repr, _PRESETS))
    if not isinstance(which, str):
        rule = f"hardware is the name of a preset or an spmd.Hardware, not {kind_of(which)}."
        raise SpmdError(rule, call="hardware(...)", got=[f"presets: {known}"])
    if which not in _PRESETS:
        rule = f"no hardware preset is called {which!r}{did_you_mean(which, _PRESETS) or '.'}"
        raise SpmdError(
            rule, call=f"hardware({which!r})", got=[f"presets: {known}"], advice="or your own spmd.Hardware(...)"
        )
    return _PRESETS[which]
