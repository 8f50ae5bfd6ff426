"""Memory and time from few numbers, added up by hand."""

import pytest

import spmd
from spmd.inspect import Memory, Time


def test_what_is_donated_counts_once():
    memory = Memory(arguments=100, outputs=60, temporaries=30, aliased=50)
    assert memory.total == 140 and memory.to_dict()["total"] == 140
    assert Memory(100, 60).total == 160


def test_without_a_compiled_program_memory_is_what_stands():
    memory = Memory(8, 4, None, 2, estimated=5, opened=6, unfused=7)
    assert (memory.total, memory.peak, memory.cautious) == (10, 15, 18)  # a tenth above 16, which is more than 17


def test_time_lies_between_all_overlap_and_none():
    time = Time(compute=2.0, memory=3.0, communication=1.0, by_axis={}, flops=0.0, hardware="x")
    assert (time.overlapped, time.serial, time.bound) == (3.0, 6.0, "memory")


def test_a_gather_takes_what_its_link_says(mesh):
    link = spmd.accelerators.Link(bandwidth=1e9, latency=1e-6)
    machine = spmd.accelerators.Hardware(
        "made up", flops={"float32": 1e12}, hbm_bandwidth=1e12, hbm_bytes=1e9, default=link
    )

    @spmd.kernel("b/dp d/tp -> b/dp d", mesh=mesh)
    def gather(x):
        return spmd.all_gather(x, "b/dp d/tp -> b/dp d", to="invarying")

    import jax

    report = spmd.explain(gather, jax.ShapeDtypeStruct((8, 64), "float32"), hardware=machine, compiled=False)
    [sent] = report.collectives
    assert report.time.by_axis == {"tp": pytest.approx(sent.bytes / 1e9 + 3e-6)}
