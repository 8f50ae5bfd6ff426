"""What a search prints, and why a mesh is not the best."""

import dataclasses
import itertools
import json
import math
import types

import jax
import pytest

import spmd
from spmd.searcher import Bound
from spmd.searcher._result import (
    bytes_at_rest,
    communication,
    factorisations,
    laid,
    marked,
    name_of,
    orders,
    row_of,
    undivided,
    without_latency,
)
from tests.searcher.programs import FLAT, bounded, flops, mlp


@pytest.fixture(scope="module")
def found():
    return spmd.search(mlp, devices=8, axes=("dp", "fsdp", "tp"), hardware="h100", top=3)


def test_the_table_has_the_best_rows_and_the_account(found):
    lines = str(found).splitlines()
    assert lines[0] == "8 devices over dp, fsdp, tp on h100"
    assert lines[2].split()[:2] == ["1*", "dp=8"]
    assert lines[5:] == [
        "10 candidates, 10 traced, 0 not traced; 7 more rows",
        "the first 3 rows are the best: all were traced",
        "* no row is quicker and smaller",
    ]
    assert "dp=8" in found._repr_html_() and "best dp=8, 10 of 10 traced" in repr(found)


def test_rows_are_sorted_and_the_marks_are_pareto(found):
    assert [row.seconds for row in found.rows] == sorted(row.seconds for row in found.rows)
    for row in found.rows:
        better = [o for o in found.rows if o.seconds <= row.seconds and o.peak <= row.peak and o is not row]
        assert row.pareto == (not any(o.seconds < row.seconds or o.peak < row.peak for o in better)), row.name


def test_why_tells_the_differences(found):
    text = found.why({"tp": 8})
    row, best = found.row({"tp": 8}), found.best
    assert f"{row.seconds / best.seconds:.2f} times" in text and "tp " in text and "memory" in text
    assert found.why(best.mesh).startswith("dp=8 is the best of 10")


def test_why_tells_that_a_bound_was_too_high():
    found = spmd.search(bounded, devices=8, axes=("dp", "fsdp", "tp"), hardware=FLAT, top=1)
    one = found.untraced[-1]
    assert "was not traced: it takes at least" in found.why(one.mesh)


def test_json_has_everything(found):
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["considered"] == 10 and plain["proven"] and len(plain["rows"]) == 10
    assert plain["rows"][0]["mesh"] == dict(found.best.mesh)
    assert plain["rows"][0]["time"]["serial"] == found.best.time.serial


# -------------------- what excludes a mesh without a trace

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


# -------------------- factorisations, and the axes inside a node


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


# -------------------- rows of a search

MESH = {"dp": 2, "fsdp": 1, "tp": 4}


def row(bound=None, overlap=()):
    fn, args = mlp(spmd.make_mesh(abstract=True, **MESH))
    return row_of(spmd.explain(fn, *args), MESH, {}, spmd.accelerators.hardware("h100"), bound or Bound(), overlap)


def test_a_row_is_what_explain_says_with_the_axes_in_its_order():
    found = row()
    fn, args = mlp(spmd.make_mesh(abstract=True, **found.mesh))
    explained = spmd.explain(fn, *args, hardware="h100")
    assert found.time == explained.time and found.memory == explained.memory
    assert found.seconds == pytest.approx(found.time.serial)
    assert found.mfu == pytest.approx(found.time.compute / found.time.serial)


def test_what_overlaps_costs_only_what_sticks_out():
    found = row(overlap=("tp",))
    work = found.time.compute + found.time.memory
    assert found.seconds == pytest.approx(max(work, found.time.communication))
    assert found.seconds < found.time.serial


def test_the_share_of_the_peak_is_that_of_what_the_model_needs():
    mesh = types.SimpleNamespace(size=8)
    assert row(Bound(needed={"float32": flops(mesh) / 2})).mfu == pytest.approx(row().mfu / 2)
    assert row().time.compute * spmd.accelerators.hardware("h100").peak("float32") == pytest.approx(flops(mesh))


def test_pareto_marks_what_is_smaller_than_all_that_is_quicker():
    pairs = [(1, 5), (2, 5), (2, 7), (3, 4), (3, 4), (4, 1)]
    rows = [types.SimpleNamespace(seconds=seconds, peak=size) for seconds, size in pairs]
    assert marked(rows) == [True, False, False, True, True, True]


def test_names_leave_out_axes_of_size_one():
    assert name_of({"dp": 4, "tp": 1}, {"micro": 8, "mapping": spmd.AxisMapping({})}).startswith(
        "dp=4 micro=8 mapping="
    )
    assert name_of({"dp": 1}, {}) == "one device"
