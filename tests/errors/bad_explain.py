"""Wrong questions to `explain`, and machines that cannot be."""

from __future__ import annotations

import jax

import spmd
from spmd import Hardware, Link, hardware
from tests.errors.registry import X, bad, fixed

SAME = "b/dp d -> b/dp d"
FLOPS = {"float32": 1e12}


def copied(mesh):
    return spmd.kernel(SAME, mesh=mesh)(lambda x: x + 0)


@bad
def explain_a_result(mesh):
    spmd.explain(copied(mesh)(X))


@fixed
def explain_a_result_fixed(mesh):
    assert spmd.explain(copied(mesh), X).total_bytes == 0


@bad
def explain_a_lowered_program_with_arguments(mesh):
    spmd.explain(copied(mesh).lower(X), X)


@fixed
def explain_a_lowered_program_with_arguments_fixed(mesh):
    assert spmd.explain(copied(mesh).lower(X)).written is None


@bad
def explain_compiled_without_devices(mesh):
    spmd.explain(copied(spmd.make_mesh(dp=2, tp=4, abstract=True)), X, compiled=True)


@bad
def explain_compiled_is_no_program(mesh):
    spmd.explain(copied(mesh), X, compiled="yes")


@bad
def explain_on_another_mesh(mesh):
    spmd.explain(copied(mesh), X, mesh=spmd.make_mesh(dp=4, tp=2, abstract=True))


@bad
def explain_two_meshes(mesh):
    flat = spmd.kernel(SAME, mesh=spmd.make_mesh(dp=8))(lambda x: x + 0)
    spmd.explain(lambda x: flat(copied(mesh)(x)), X)


@fixed
def explain_on_another_mesh_fixed(mesh):
    assert spmd.explain(copied(mesh), X, mesh=mesh).mesh == {"dp": 2, "tp": 4}


@bad
def explain_with_a_mesh_that_is_none(mesh):
    spmd.explain(copied(mesh), X, mesh=8)


@bad
def explain_on_unknown_hardware(mesh):
    spmd.explain(copied(mesh), X, hardware="tpu-v5")


@bad
def hardware_is_no_name(mesh):
    hardware(jax.devices()[0])


@bad
def hardware_unknown(mesh):
    hardware("a100")


@bad
def link_without_bandwidth(mesh):
    Link(bandwidth=0)


@bad
def link_with_negative_latency(mesh):
    Link(bandwidth=1e9, latency=-1e-6)


@bad
def hardware_flops_are_a_number(mesh):
    Hardware("mine", 1e12, hbm_bandwidth=1e12, hbm_bytes=1e9, default=Link(1e9))


@bad
def hardware_peak_is_not_positive(mesh):
    Hardware("mine", {"float32": -1.0}, hbm_bandwidth=1e12, hbm_bytes=1e9, default=Link(1e9))


@bad
def hardware_memory_is_not_a_number(mesh):
    Hardware("mine", FLOPS, hbm_bandwidth=1e12, hbm_bytes=float("nan"), default=Link(1e9))


@bad
def hardware_link_is_a_number(mesh):
    Hardware("mine", FLOPS, hbm_bandwidth=1e12, hbm_bytes=1e9, default=Link(1e9), links={"dp": 50e9})


@bad
def seconds_of_an_unknown_collective(mesh):
    hardware("h100").collective_seconds("allreduce", 1e9, ("dp",), {"dp": 8})


@bad
def seconds_over_an_unknown_axis(mesh):
    hardware("h100").collective_seconds("psum", 1e9, ("data",), {"dp": 2, "tp": 4})
