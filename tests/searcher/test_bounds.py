"""What excludes a mesh without a trace."""

import jax
import pytest

import spmd
from spmd.searcher import Bound
from spmd.searcher._result import bytes_at_rest, undivided, without_latency

H100 = spmd.accelerators.hardware("h100")


def argument(layout, *shape, **axes):
    sharding = spmd.Layout(layout).sharding(spmd.make_mesh(abstract=True, **axes))
    return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding)


def test_bytes_at_rest_are_those_of_one_device():
    args = [{"w": argument("a/dp b", 8, 3, dp=4)}, jax.ShapeDtypeStruct((5,), "float32")]
    assert bytes_at_rest(args) == 2 * 3 * 2 + 5 * 4


def test_an_argument_that_the_mesh_does_not_divide_is_named():
    assert undivided([argument("a/dp b", 8, 3, dp=4)]) is None
    assert "(6, 3)" in undivided([argument("a/dp b", 8, 3, dp=4), argument("a/dp b", 6, 3, dp=4)])


def test_a_bound_adds_up_and_leaves_latencies_out():
    bound = Bound({"bfloat16": 989.4e12}, {("all_gather", ("dp",)): 50e9})
    assert bound.seconds({"dp": 64}, H100) == pytest.approx(1 + 50e9 * 7 / 63 / 50e9)
    assert bound.seconds({"dp": 64}, H100, overlap=("dp",)) == 1
    assert Bound(traffic=H100.hbm_bandwidth).seconds({"dp": 64}, H100) == 1
    assert Bound().seconds({"dp": 64}, H100) == 0


def test_only_latencies_go():
    quiet = without_latency(H100)
    assert (quiet.default.latency, quiet.node.latency) == (0, 0)
    assert (quiet.default.bandwidth, quiet.node.bandwidth) == (H100.default.bandwidth, H100.node.bandwidth)
