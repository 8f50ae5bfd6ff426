"""Memory and time from few numbers, added up by hand."""

import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize("grad", [jax.value_and_grad, jax.grad])
def test_what_is_computed_again_is_no_use(grad):
    """The share of the peak counts it, and MFU does not. With the gradient alone nothing is computed twice."""

    def seconds(around):
        loss = lambda w, x: around(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x).sum()
        args = (jax.ShapeDtypeStruct((256, 256), "float32"),) * 2
        return spmd.explain(grad(loss), *args, hardware="h100", compiled=False)

    once, twice = seconds(lambda fn: fn), seconds(jax.checkpoint)
    assert once.time.again == 0 and "MFU" not in str(once)
    assert twice.time.compute - twice.time.again == pytest.approx(once.time.compute)
    assert (twice.time.again > 0) == (grad is jax.value_and_grad)
    assert twice.time.mfu == pytest.approx(once.time.compute / twice.time.overlapped)
    assert twice.to_dict()["time"]["mfu"] == twice.time.mfu
    if not twice.time.again:
        return
    share = f"{twice.time.compute / twice.time.serial:.0%} of peak FLOP/s"
    useful = f"MFU, without what is computed again: {once.time.compute / twice.time.serial:.0%}"
    assert f"{share}; {useful}" in twice.table(200)


def test_a_gather_takes_what_its_link_says(mesh):
    link = spmd.accelerators.Link(bandwidth=1e9, latency=1e-6)
    machine = spmd.accelerators.Hardware(
        "made up", flops={"float32": 1e12}, hbm_bandwidth=1e12, hbm_bytes=1e9, default=link
    )

    @spmd.kernel("b/dp d/tp -> b/dp d", mesh=mesh)
    def gather(x):
        return spmd.all_gather(x, "b/dp d/tp -> b/dp d", to="invarying")

    report = spmd.explain(gather, jax.ShapeDtypeStruct((8, 64), "float32"), hardware=machine, compiled=False)
    [sent] = report.collectives
    assert report.time.by_axis == {"tp": pytest.approx(sent.bytes / 1e9 + 3e-6)}
