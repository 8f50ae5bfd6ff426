"""Factorisations, and the axes inside a node."""

import dataclasses
import itertools
import math

import pytest

import spmd
from spmd.searcher._result import communication, factorisations, laid, orders

H100 = spmd.accelerators.hardware("h100")


def test_16384_devices_over_five_axes_are_3060_meshes():
    found = [tuple(sizes.values()) for sizes in factorisations(16_384, ("dp", "fsdp", "cp", "tp", "pp"))]
    assert len(found) == len(set(found)) == math.comb(14 + 4, 4) == 3060
    assert all(math.prod(sizes) == 16_384 for sizes in found)


@pytest.mark.parametrize("devices", [1, 7, 12, 36])
def test_every_factorisation_comes_once(devices):
    found = [tuple(sizes.values()) for sizes in factorisations(devices, "abc")]
    every = [sizes for sizes in itertools.product(range(1, devices + 1), repeat=3) if math.prod(sizes) == devices]
    assert found == every


@pytest.mark.parametrize(
    "sizes", [{"dp": 4, "fsdp": 2, "tp": 8}, {"dp": 2, "fsdp": 16, "tp": 2}, {"a": 1, "b": 6, "c": 4}]
)
def test_no_other_order_takes_less(sizes):
    sent = [("all_gather", (axis,), 1e8 * (i + 1), 3) for i, axis in enumerate(sizes)]
    sent.append(("psum", tuple(sizes), 1e7, 1))
    order, seconds = laid(sent, sizes, H100)
    every = [dict(items) for items in itertools.permutations(sizes.items())]
    assert seconds == min(communication(sent, one, H100) for one in every) == communication(sent, order, H100)
    assert len(list(orders(sizes, H100))) <= len(every)


def test_the_axis_with_the_most_bytes_lies_inside_the_node():
    sent = [("all_gather", ("dp",), 9e9, 1), ("all_gather", ("tp",), 1e9, 1)]
    assert tuple(laid(sent, {"dp": 8, "tp": 8}, H100)[0]) == ("tp", "dp")


def test_what_overlaps_lies_outside_if_the_other_work_hides_it():
    sent = [("all_gather", ("dp",), 9e9, 1), ("all_gather", ("tp",), 1e9, 1)]
    order, seconds = laid(sent, {"tp": 8, "dp": 8}, H100, beside=1.0, overlap=("dp",))
    assert tuple(order) == ("dp", "tp") and seconds == 1.0 + communication(sent[1:], order, H100)


def test_a_torus_has_no_inside():
    assert list(orders({"dp": 4, "tp": 8}, spmd.accelerators.hardware("tpu-v5p"))) == [{"dp": 4, "tp": 8}]


def test_several_slices_have_one_and_the_network_between_them_is_priced():
    pod, between = spmd.accelerators.hardware("tpu-v5p"), spmd.accelerators.Link(6.25e9, latency=20e-6)
    slices = dataclasses.replace(pod, node=pod.default, node_size=64, default=between)
    sent = [("all_gather", ("dp",), 9e9, 1), ("all_gather", ("tp",), 1e9, 1)]
    order, seconds = laid(sent, {"dp": 8, "tp": 64}, slices)
    assert tuple(order) == ("tp", "dp") and seconds < communication(sent, {"dp": 8, "tp": 64}, slices) / 2
    crossed = slices.collective_seconds("all_gather", 9e9, ["dp"], {"dp": 8, "tp": 64})
    assert crossed == pytest.approx(7 * between.latency + 9e9 / between.bandwidth)
    crossing = {"dp": 4, "tp": 32}  # two of dp's four are in one slice
    times = [one.collective_seconds("psum", 1e9, ["dp"], crossing) for one in (slices, pod)]
    assert times[0] > 1e9 / 3 / between.bandwidth > 5 * times[1]
