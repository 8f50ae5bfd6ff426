"""Machines that cannot be."""

from types import SimpleNamespace

import jax

from spmd.accelerators import Hardware, Link, hardware
from tests.errors.registry import bad

FLOPS = {"float32": 1e12}


bad(
    hardware_is_no_name=lambda mesh: hardware(jax.devices()[0]),
    hardware_unknown=lambda mesh: hardware("h10"),
    hardware_of_a_cpu=lambda mesh: Hardware.from_devices(),
    hardware_of_two_kinds=lambda mesh: Hardware.from_devices(
        [SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")]
    ),
    link_without_bandwidth=lambda mesh: Link(bandwidth=0),
    link_with_negative_latency=lambda mesh: Link(bandwidth=1e9, latency=-1e-6),
    hardware_flops_are_a_number=lambda mesh: Hardware(
        "mine", 1e12, hbm_bandwidth=1e12, hbm_bytes=1e9, default=Link(1e9)
    ),
    hardware_peak_is_not_positive=lambda mesh: Hardware(
        "mine", {"float32": -1.0}, hbm_bandwidth=1e12, hbm_bytes=1e9, default=Link(1e9)
    ),
    hardware_memory_is_not_a_number=lambda mesh: Hardware(
        "mine", FLOPS, hbm_bandwidth=1e12, hbm_bytes=float("nan"), default=Link(1e9)
    ),
    hardware_link_is_a_number=lambda mesh: Hardware(
        "mine", FLOPS, hbm_bandwidth=1e12, hbm_bytes=1e9, default=Link(1e9), links={"dp": 50e9}
    ),
    seconds_of_an_unknown_collective=lambda mesh: hardware("h100").collective_seconds(
        "allreduce", 1e9, ("dp",), {"dp": 8}
    ),
    seconds_over_an_unknown_axis=lambda mesh: hardware("h100").collective_seconds(
        "psum", 1e9, ("data",), {"dp": 2, "tp": 4}
    ),
)
