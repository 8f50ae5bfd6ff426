"""Machines: the few numbers that bound the time of a program, and devices that are not here, to compile for."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from spmd._python.rooms import open_room
from spmd._trees.leaves import kind_of, not_int
from spmd.errors import MeshError, SpmdError, did_you_mean
from spmd.language import check_axes

__all__ = ["Hardware", "Link", "hardware"]
open_room(globals())

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
    >>> memory = {"hbm_bandwidth": 1e12, "hbm_bytes": 24e9}
    >>> lan = spmd.accelerators.Hardware("lab", {"float32": 80e12}, **memory, default=spmd.accelerators.Link(1.25e9))
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
                raise SpmdError(rule, call=call, advice="as in spmd.accelerators.Link(bandwidth=50e9, latency=4e-6)")

    @classmethod
    def from_devices(cls, devices: Sequence[Any] | None = None) -> Hardware:
        """The profile of the devices at hand, by their `device_kind`.

        The numbers are those of `hardware`, not measured. They hold for nodes as the vendor builds them. Where yours
        have fewer devices or other network cards, use `dataclasses.replace`. It starts JAX's devices.

        Args:
          devices: Devices of one kind. By default `jax.devices()`.

        Returns:
          The `Hardware`.

        Raises:
          SpmdError: If the devices are of several kinds, or no profile is known for theirs.

        >>> import types
        >>> device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
        >>> Hardware.from_devices([device]).name
        'h100'
        """
        kinds = sorted({one.device_kind for one in (jax.devices() if devices is None else devices)})
        found = [one for pattern, one in _KINDS if kinds and re.search(pattern, kinds[0])]
        if len(kinds) == 1 and found:
            return found[0]
        rule = (
            "no profile is known for these devices."
            if len(kinds) == 1
            else "a profile describes one kind of device, and these are of several kinds."
        )
        got = [
            f"device_kind: {', '.join(map(repr, kinds)) or 'no devices'}",
            f"presets: {', '.join(map(repr, _PRESETS))}",
        ]
        advice = "hardware=spmd.accelerators.hardware(NAME), or your own spmd.accelerators.Hardware(...)"
        raise SpmdError(rule, call="Hardware.from_devices()", got=got, advice=advice)

    def __hash__(self) -> int:
        return hash((self.name, self.hbm_bandwidth, self.default, self.node, self.node_size))

    def peak(self, dtype: Any) -> float:
        """Return the peak FLOP/s of one device for a dtype. A dtype not listed has the slowest one's."""
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
        >>> [round(h100.collective_seconds("psum", 1e9, [axis], mesh), 5) for axis in mesh]
        [0.02002, 0.00225]
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


# --- profiles ---------------------------------------------------------------------------------------------------------
# The vendors' peaks without 2:4 sparsity, and links each way. On NVIDIA's GPUs float32 is TF32, and on TPUs bfloat16,
# which is what JAX's default precision of matrix products means there.
#
# Latencies of GPUs are NCCL's own, src/graph/tuning.cc, hwLatencies of Ring/LL128: 1.9 us for NVLINK, 4.0 us for NET.
# 1 us per hop of a torus: Austin et al., "How to Scale Your Model", part 3 (jax-ml.github.io/scaling-book).
_NVLINK_LATENCY, _NETWORK_LATENCY, _HOP_LATENCY = 1.9e-6, 4.0e-6, 1.0e-6


def _floats(half: float, single: float, byte: float | None = None, **more: float) -> dict[str, float]:
    """Peak FLOP/s by dtype: of bfloat16 and float16, of float32, and of the types of one byte where they are faster."""
    bytes_ = {} if byte is None else dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), byte)
    return {"bfloat16": half, "float16": half, "float32": single, **bytes_, **more}


def _gpu(
    name: str, flops: dict[str, float], memory: float, speed: float, link: float, port: float, node: int
) -> Hardware:
    inside, outside = Link(link, _NVLINK_LATENCY), Link(port, _NETWORK_LATENCY)
    return Hardware(name, flops, speed, memory, default=outside, node=inside, node_size=node)


def _tpu(name: str, flops: dict[str, float], memory: float, speed: float, axis: float) -> Hardware:
    """`axis`: bytes per second that a chip sends along one axis of its torus, both ways around together."""
    return Hardware(name, flops, speed, memory * 2**30, default=Link(axis, _HOP_LATENCY, ring=True))


# A100 SXM, 80 GB: NVIDIA A100 Tensor Core GPU data sheet; DGX A100 data sheet: 8 GPUs behind NVSwitch at 600 GB/s both
# ways, one ConnectX-6 port of 200 Gb/s per GPU. It has no FP8.
_A100 = _gpu("a100", _floats(312e12, 156e12, float64=19.5e12, int8=624e12), 80e9, 2.039e12, 300e9, 25e9, 8)

# H100 SXM: NVIDIA H100 Tensor Core GPU data sheet, NVLink 900 GB/s both ways; DGX H100 data sheet: 8 GPUs behind
# NVSwitch, one ConnectX-7 port of 400 Gb/s per GPU. H200 SXM: the same chip with other memory, NVIDIA H200 data sheet.
_H100 = _gpu("h100", _floats(989.4e12, 494.7e12, 1978.9e12, float64=66.9e12), 80e9, 3.35e12, 450e9, 50e9, 8)
_H200 = replace(_H100, name="h200", hbm_bytes=141e9, hbm_bandwidth=4.8e12)

# B200 at 1,000 W in nodes of 8, GB200 at 1,200 W in a rack of 72: NVIDIA Blackwell architecture technical brief; memory
# as in the DGX B200 (1,440 GB in 8) and GB200 NVL72 (13.4 TB in 72) data sheets; NVLink 5 at 1.8 TB/s both ways, one
# port of 400 Gb/s per GPU.
_B200 = _gpu("b200", _floats(2250e12, 1100e12, 4500e12, float64=40e12), 180e9, 8e12, 900e9, 50e9, 8)
_GB200 = _gpu("gb200", _floats(2500e12, 1250e12, 5000e12, float64=45e12), 186e9, 8e12, 900e9, 50e9, 72)

# MI300X: AMD Instinct MI300X data sheet. XLA does not use TF32 there. Seven Infinity Fabric links of 64 GB/s each way
# reach the seven other GPUs of a node: 448 GB/s for collectives that use all of them, while a ppermute has one link,
# which this model does not know. One port of 400 Gb/s per GPU, as in the reference platforms. Latencies as NCCL's.
_MI300X = _gpu("mi300x", _floats(1307.4e12, 163.4e12, 2614.9e12, float64=163.4e12), 192e9, 5.3e12, 448e9, 50e9, 8)

# TPUs: docs.cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e and tpu7x; the int8 rate of v5p is that of "How to Scale
# Your Model", part 2, which measures 90 % of these bandwidths. A port sends 50 GB/s (v4, v5e) or 100 GB/s (v5p, v6e,
# tpu7x). An axis has two ports. Only slices that are large enough are wrapped around.
_TPU_V4 = _tpu("tpu-v4", _floats(275e12, 275e12, int8=275e12), 32, 1.2e12, 100e9)
_TPU_V5E = _tpu("tpu-v5e", _floats(197e12, 197e12, int8=393e12), 16, 819e9, 100e9)
_TPU_V5P = _tpu("tpu-v5p", _floats(459e12, 459e12, 459e12, int8=918e12), 95, 2765e9, 200e9)
_TPU_V6E = _tpu("tpu-v6e", _floats(918e12, 918e12, 918e12, int8=1836e12), 32, 1638e9, 200e9)
# Each of the two chiplets of an Ironwood chip is a device of its own in JAX and has half of everything. What they send
# each other goes over a faster link, which this model does not know.
_IRONWOOD = _tpu(
    "ironwood", _floats(1153.5e12, 1153.5e12, float8_e4m3fn=2307e12, float8_e5m2=2307e12), 96, 3690e9, 100e9
)

_TPUS = (_TPU_V4, _TPU_V5E, _TPU_V5P, _TPU_V6E, _IRONWOOD)
_PRESETS = {one.name: one for one in (_A100, _H100, _H200, _B200, _GB200, _MI300X, *_TPUS)}
PRESETS = tuple(_PRESETS)

# What `device.device_kind` says of each, as a pattern; the first that is found. "TPU v5" alone is v5p. Cards for PCIe
# and NVL, and Grace Hopper, have the same chips with other clocks, memory and links: the profiles are not theirs.
_KINDS = (
    (r"A100-SXM.*40GB", replace(_A100, name="a100-40gb", hbm_bytes=40e9, hbm_bandwidth=1.555e12)),
    (r"A100-SXM", _A100),
    (r"H100 80GB HBM3", _H100),
    (r"\bH200$", _H200),
    (r"GB200", _GB200),
    (r"B200", _B200),
    (r"MI300X", _MI300X),
    (r"TPU v4$", _TPU_V4),
    (r"TPU v5 ?(lite|e)", _TPU_V5E),
    (r"TPU v5p?$", _TPU_V5P),
    (r"TPU v6 ?(lite|e)", _TPU_V6E),
    (r"TPU ?v?7x?", _IRONWOOD),
)


def hardware(which: str | Hardware) -> Hardware:
    """The numbers of a machine: a preset by name, or a `Hardware` unchanged.

    - `"a100"`, `"h100"`, `"h200"`, `"b200"`, `"gb200"`, `"mi300x"`: GPUs in nodes of 8 (gb200: 72). Axes inside a node,
      the innermost of the mesh first, use the links between its GPUs. The others use one network port per GPU.
    - `"tpu-v4"`, `"tpu-v5e"`, `"tpu-v5p"`, `"tpu-v6e"`, `"ironwood"`: every mesh axis is one axis of the torus, wrapped
      around. For several slices, a slice is the node:
      `dataclasses.replace(pod, node=pod.default, node_size=256, default=spmd.accelerators.Link(6.25e9, 20e-6))`.

    These are the vendors' peaks, which no program reaches. The source cites them beside the numbers. For a similar
    machine, use `dataclasses.replace(hardware("h100"), links={"dp": Link(25e9, 10e-6)})`; for the one at hand,
    `Hardware.from_devices()`.

    Args:
      which: The name of a preset, or a `Hardware`.

    Returns:
      The `Hardware`.

    Raises:
      SpmdError: If no preset has this name.

    >>> import spmd
    >>> spmd.accelerators.hardware("h100").peak("bfloat16")
    989400000000000.0
    """
    if isinstance(which, Hardware):
        return which
    known = ", ".join(map(repr, _PRESETS))
    if not isinstance(which, str):
        rule = f"hardware is the name of a preset or an spmd.accelerators.Hardware, not {kind_of(which)}."
        raise SpmdError(rule, call="hardware(...)", got=[f"presets: {known}"])
    if which not in _PRESETS:
        rule = f"no hardware preset is called {which!r}{did_you_mean(which, _PRESETS) or '.'}"
        raise SpmdError(
            rule,
            call=f"hardware({which!r})",
            got=[f"presets: {known}"],
            advice="or your own spmd.accelerators.Hardware(...)",
        )
    return _PRESETS[which]


# --- topologies --------------------------------------------------------------------------------------------------

# Devices of machines that are not here, to compile for.

_DESCRIPTION = ".txtpb"  # how the names of XLA's descriptions of GPUs end
_WHERE = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"


def topology_devices(target: str | os.PathLike[str], count: int | None = None, *, per_host: int = 8) -> list[Any]:
    """Devices of a machine that is not here, to compile for. Nothing runs on them.

    The compilers for GPUs and TPUs need no such device. On a mesh of these devices `spmd.explain` shows what such a
    compiler makes of a program: the collectives that it runs, and the memory that it needs. No communication.

    The compiler must be installed: `pip install "jax[cuda13]"` for GPUs, on Linux, or `pip install "jax[tpu]"`. Where
    no such device is, call `spmd.use_cpu_devices(1)` first, so that JAX does not look for one.

    Args:
      target: For GPUs the file with XLA's description of one, such as `h100_sxm.txtpb`: they lie in
        `xla/backends/gpu/target_config/specs` of https://github.com/openxla/xla. For TPUs the name of a slice:
        "v5p:2x2x2".
      count: The number of devices. The name of a slice of TPUs says it too, and may say it alone.
      per_host: The GPUs of one host.

    Returns:
      The devices, for `spmd.make_mesh(devices=...)`.

    Raises:
      MeshError: If the compiler is not installed or does not know the target, if the file does not exist, if the GPUs
        do not fill their hosts, or if the slice has another number of TPUs.

    Example:
      >>> import spmd
      >>> devices = spmd.topology_devices("v5p:2x2x2")  # doctest: +SKIP
      >>> mesh = spmd.make_mesh(dp=2, tp=4, devices=devices)  # doctest: +SKIP
    """
    shown = os.fspath(target) if isinstance(target, os.PathLike) else target
    call = f"topology_devices({shown!r}{'' if count is None else f', {count!r}'})"
    if not isinstance(target, str | os.PathLike):
        rule = f"the target is a file or the name of a slice, not {kind_of(target)}."
        raise MeshError(rule, call=call, advice='"h100_sxm.txtpb", or "v5p:2x2x2"')
    if Path(target).suffix == _DESCRIPTION:
        return _devices(call, "cuda", "cuda", _gpus(call, Path(target), count, per_host))
    if ":" not in os.fspath(target):
        rule = f"the target is a file that ends with {_DESCRIPTION}, or the name of a slice of TPUs with its shape."
        raise MeshError(rule, call=call, advice=f'"v5p:2x2x2", or the description of a GPU, such as one of {_WHERE}')
    found = _devices(call, os.fspath(target), "tpu", {})
    if count not in (None, len(found)):
        rule = f"the slice has {len(found)} TPUs, not {count}."
        raise MeshError(rule, call=call, advice="another slice, or no count")
    return found


def _gpus(call: str, file: Path, count: Any, per_host: Any) -> dict[str, str]:
    """Return what JAX's compiler for GPUs wants to know."""
    fault = not_int("count, the number of GPUs,", count, 1) or not_int("per_host, the GPUs of one host,", per_host, 1)
    if fault:
        raise MeshError(fault, call=call, advice="as in count=8")
    hosts, left = divmod(count, per_host)
    if left and hosts:
        rule = f"{count} GPUs do not fill hosts of {per_host}."
        raise MeshError(rule, call=call, advice="another count, or per_host=")
    if not file.is_file():
        rule = "the file does not exist."
        raise MeshError(rule, call=call, advice=f"a description of the GPU, such as one of {_WHERE}")
    topology = f"1x{hosts}x{per_host}" if hosts else f"1x1x{count}"  # slices, hosts, devices of a host
    return {"target_config": file.read_text(), "topology": topology}


def _devices(call: str, name: str, platform: str, facts: dict[str, str]) -> list[Any]:
    try:
        return list(topologies.get_topology_desc(name, platform, **facts).devices)
    except jax.errors.JaxRuntimeError as error:
        rule = "the compiler does not know this target."
        advice = f"one of {_WHERE}" if facts else 'a slice such as "v5p:2x2x2"'
        raise MeshError(rule, call=call, advice=advice) from error
    except (NotImplementedError, RuntimeError) as error:
        extra, what = ("cuda13", "GPU") if facts else ("tpu", "TPU")
        rule = f"the compiler for {what}s is not there."
        advice = f'pip install "jax[{extra}]"; and where there is no {what}, spmd.use_cpu_devices(1) first'
        raise MeshError(rule, call=call, advice=advice) from error
