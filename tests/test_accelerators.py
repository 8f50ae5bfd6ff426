"""Hardware profiles: the model of a collective's time against formulas written out here, and by simulating a ring."""

import dataclasses
import math
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from spmd.accelerators import Hardware, Link, hardware
from spmd.errors import SpmdError

MESH = {"dp": 6, "tp": 4}
SWITCH = Hardware("switch", {"float32": 1e12}, 1e11, 1e9, Link(1e9, 1e-6))
RING = dataclasses.replace(SWITCH, default=Link(1e9, 1e-6, ring=True))


def ring_seconds(shard: float, n: int, link: Link) -> float:
    """A gather around a ring, simulated: in each step each device passes a block on, or one each way."""
    have = [{i} for i in range(n)]
    seconds, ways = 0.0, (1, -1) if link.ring else (1,)
    moving = {(i, way): i for i in range(n) for way in ways}
    while any(len(blocks) < n for blocks in have):
        arrived = {}
        for (device, way), block in moving.items():
            to = (device + way) % n
            have[to].add(block)
            arrived[to, way] = block
        moving = arrived
        seconds += link.latency + shard / (link.bandwidth / len(ways))
    return seconds


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_gather_takes_as_long_as_the_ring_that_is_simulated(n):
    shard = 5e6
    for machine in (SWITCH, RING):
        expected = ring_seconds(shard, n, machine.default)
        got = machine.collective_seconds("all_gather", shard * (n - 1), ["x"], {"x": n})
        if machine is RING and n % 2 == 0:  # the last step of an even ring sends each way half a block
            expected -= shard / machine.default.bandwidth
        assert got == pytest.approx(expected)


def test_a_psum_is_a_scatter_and_a_gather():
    for machine in (SWITCH, RING, hardware("h100")):
        for axes in (["tp"], ["dp"], ["dp", "tp"]):
            once = machine.collective_seconds("psum_scatter", 3e6, axes, MESH)
            assert machine.collective_seconds("psum", 6e6, axes, MESH) == pytest.approx(2 * once)


def test_an_all_to_all_is_direct_through_a_switch_and_passed_on_around_a_ring():
    shard, n = 4e6, 8
    sent = shard * (n - 1) / n
    hops = sum(min(d, n - d) for d in range(n)) / n  # per byte of the shard, on average
    switch = SWITCH.collective_seconds("all_to_all", sent, ["x"], {"x": n})
    ring = RING.collective_seconds("all_to_all", sent, ["x"], {"x": n})
    assert switch == pytest.approx(sent / 1e9 + 7e-6)
    assert ring == pytest.approx(shard * hops / 1e9 + 4e-6)


def test_a_permute_is_one_step_of_one_direction():
    assert SWITCH.collective_seconds("ppermute", 1e6, ["tp"], MESH) == pytest.approx(1e-3 + 1e-6)
    assert RING.collective_seconds("ppermute", 1e6, ["tp"], MESH) == pytest.approx(2e-3 + 1e-6)


@pytest.mark.parametrize("axes", [["dp", "tp"], ["tp", "dp"]])
def test_over_two_axes_the_slow_link_carries_the_small_pieces(axes):
    machine = dataclasses.replace(SWITCH, links={"dp": Link(1e8, 5e-6), "tp": Link(1e9, 1e-6)})
    whole = 24e6
    got = machine.collective_seconds("all_gather", whole * 23 / 24, axes, MESH)
    slow, fast = whole / 24 * 5 / 1e8, whole * 3 / 4 / 1e9  # dp gathers shards, tp blocks of six
    assert got == pytest.approx(max(slow, fast) + 5 * 5e-6 + 3 * 1e-6)
    moved = slow * 1e8 + fast * 1e9
    assert moved == pytest.approx(whole * 23 / 24)  # the bytes are those of one collective over both


def test_nothing_moves_over_axes_of_one_device():
    for kind in ("psum", "all_gather", "ppermute", "all_to_all"):
        assert SWITCH.collective_seconds(kind, 0, ["x"], {"x": 1}) == 0.0
        assert hardware("h100").collective_seconds(kind, 0, [], {"x": 4}) == 0.0


@pytest.mark.parametrize(
    ("sizes", "fast"),
    [
        ({"dp": 4, "tp": 8}, {"tp"}),
        ({"dp": 4, "tp": 4}, {"tp"}),  # half of dp's neighbours share a node, the others do not
        ({"dp": 2, "cp": 2, "tp": 2}, {"dp", "cp", "tp"}),
        ({"dp": 3, "tp": 2}, {"dp", "tp"}),
        ({"tp": 8, "dp": 4}, {"dp"}),  # innermost first: dp fills half a node, and tp leaves it
        ({"x": 16}, set()),
        ({"dp": 2, "tp": 9}, set()),  # three of tp share a node, and then nothing of dp does
    ],
)
def test_axes_inside_a_node_of_h100s_go_over_nvlink(sizes, fast):
    h100 = hardware("h100")
    assert {axis for axis in sizes if h100.link(axis, sizes).bandwidth == 450e9} == fast


def test_an_axis_larger_than_a_node_uses_both_links():
    h100 = hardware("h100")
    whole = 16e9
    got = h100.collective_seconds("all_gather", whole * 15 / 16, ["x"], {"x": 16})
    network, nvlink = whole / 16 / 50e9, whole * 7 / 8 / 450e9
    assert got == pytest.approx(max(network, nvlink) + 4e-6 + 7 * 1.9e-6)


def test_without_sizes_no_axis_lies_in_a_node_and_named_links_win():
    h100 = hardware("h100")
    assert h100.link("tp") == h100.default
    mine = Link(25e9, 1e-5)
    named = dataclasses.replace(h100, links={"tp": mine})
    assert named.link("tp", {"dp": 4, "tp": 8}) == named.link("tp") == mine
    assert named.link("dp", {"dp": 8, "tp": 8}) == h100.default  # a name does not move the devices
    assert named.link("dp", {"dp": 2, "tp": 4}) == h100.node


def test_peaks():
    h100, tpu = hardware("h100"), hardware("tpu-v5p")
    assert h100.peak("bfloat16") == h100.peak(jnp.bfloat16) == 989.4e12
    assert tpu.peak("bfloat16") == 459e12
    assert h100.peak("complex64") == min(h100.flops.values())
    assert hardware(h100) is h100
    assert len({h100, tpu, dataclasses.replace(h100)}) == 2


@pytest.mark.parametrize("name", ["h100", "tpu-v5p"])
def test_presets_are_sane(name):
    """The ratios that textbooks quote: FLOPs per byte of memory and of network in the hundreds and thousands."""
    one = hardware(name)
    assert 100 < one.peak("bfloat16") / one.hbm_bandwidth < 400
    assert 1000 < one.peak("bfloat16") / one.default.bandwidth < 30000
    assert math.isclose(one.hbm_bytes, 90e9, rel_tol=0.15)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5e", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU v6e", "tpu-v6e"),
        ("TPU7x", "ironwood"),
    ],
)
def test_the_devices_name_their_profile(kind, name):
    assert Hardware.from_devices([SimpleNamespace(device_kind=kind)] * 8).name == name


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL"]
    + ["NVIDIA GH200 480GB", "NVIDIA GB300", "NVIDIA H20"],
)
def test_a_relative_of_a_device_has_no_profile(kind):
    """Another clock, memory or link under the same chip's name: numbers of the SXM module would be wrong."""
    with pytest.raises(SpmdError, match="no profile is known"):
        Hardware.from_devices([SimpleNamespace(device_kind=kind)])


def test_profiles_agree_with_what_their_vendors_say_of_a_whole_system():
    """Totals of systems, which the data sheets give beside the figures per device."""
    peak = lambda name, dtype="bfloat16": hardware(name).peak(dtype)
    assert 8 * peak("h100", "float8_e4m3fn") * 2 == pytest.approx(32e15, rel=0.02)  # DGX H100, sparse
    assert 8 * peak("b200", "float8_e4m3fn") * 2 == pytest.approx(72e15, rel=0.01)  # DGX B200, sparse
    assert 72 * peak("gb200") * 2 == pytest.approx(360e15, rel=0.01)  # GB200 NVL72, sparse
    assert 72 * hardware("gb200").node.bandwidth * 2 == pytest.approx(130e12, rel=0.01)
    assert 8 * hardware("a100").node.bandwidth * 2 == pytest.approx(4.8e12)  # DGX A100
    assert 256 * peak("tpu-v5e") == pytest.approx(50.63e15, rel=0.01)  # a pod
    assert 256 * peak("tpu-v6e") == pytest.approx(234.9e15, rel=0.01)
    assert 9216 * 2 * peak("ironwood", "float8_e4m3fn") == pytest.approx(42.5e18, rel=0.01)
