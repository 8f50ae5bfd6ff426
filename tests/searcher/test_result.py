"""What a search prints, and why a mesh is not the best."""

import dataclasses
import itertools
import json
import math
import types

import pytest

import spmd
from spmd.searcher import Bound
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


def test_a_bound_adds_up_and_leaves_latencies_out():
    bound = Bound({"bfloat16": 989.4e12}, {("all_gather", ("dp",)): 50e9})
    assert bound.seconds({"dp": 64}, H100) == pytest.approx(1 + 50e9 * 7 / 63 / 50e9)
    assert bound.seconds({"dp": 64}, H100, overlap=("dp",)) == 1
    assert Bound(traffic=H100.hbm_bandwidth).seconds({"dp": 64}, H100) == 1
    assert Bound().seconds({"dp": 64}, H100) == 0


# -------------------- factorisations, and the axes inside a node


def meshes(devices, axes):
    """The sizes of every mesh that a search considers."""
    asked = []
    with pytest.raises(spmd.errors.MeshError):  # where= leaves out all of them
        spmd.search(mlp, devices=devices, axes=axes, hardware="h100", where=lambda mesh: asked.append(dict(mesh)))
    return [tuple(one[axis] for axis in axes) for one in asked]


def test_16384_devices_over_five_axes_are_3060_meshes():
    found = meshes(16_384, ("dp", "fsdp", "cp", "tp", "pp"))
    assert len(found) == len(set(found)) == math.comb(14 + 4, 4) == 3060
    assert all(math.prod(sizes) == 16_384 for sizes in found)


@pytest.mark.parametrize("devices", [1, 7, 12, 36])
def test_every_factorisation_comes_once(devices):
    every = [sizes for sizes in itertools.product(range(1, devices + 1), repeat=3) if math.prod(sizes) == devices]
    assert meshes(devices, ("a", "b", "c")) == every


def priced(sizes, machine, **how):
    """The one mesh of these sizes, in the order that the search gives its axes, and the seconds of every other order."""
    found = spmd.search(mlp, devices=math.prod(sizes.values()), axes=tuple(sizes), hardware=machine, memory=1.0,
                        where=lambda mesh: dict(mesh) == sizes, **how).best  # fmt: skip
    others = []
    for order in itertools.permutations(sizes.items()):
        fn, args = mlp(spmd.make_mesh(abstract=True, **dict(order)))
        others.append(spmd.explain(fn, *args, hardware=machine).time.communication)
    return found, others


@pytest.mark.parametrize("sizes", [{"dp": 4, "fsdp": 2, "tp": 8}, {"dp": 2, "fsdp": 16, "tp": 2}])
def test_no_other_order_takes_less(sizes):
    found, others = priced(sizes, H100)
    assert found.time.communication == pytest.approx(min(others)) and max(others) > min(others)


def test_a_torus_has_no_inside_and_several_slices_have_one():
    """The axis that crosses slices goes over the network between them."""
    pod, between = spmd.accelerators.hardware("tpu-v5p"), spmd.accelerators.Link(6.25e9, latency=20e-6)
    slices = dataclasses.replace(pod, node=pod.default, node_size=64, default=between)
    sizes = {"dp": 8, "fsdp": 2, "tp": 8}
    found, others = priced(sizes, pod)
    assert found.time.communication == pytest.approx(min(others)) and max(others) == pytest.approx(min(others))
    found, others = priced(sizes, slices)
    assert found.time.communication == pytest.approx(min(others)) and max(others) > min(others)
    crossed = slices.collective_seconds("all_gather", 9e9, ["dp"], {"dp": 8, "tp": 64})
    assert crossed == pytest.approx(7 * between.latency + 9e9 / between.bandwidth)
    crossing = {"dp": 4, "tp": 32}  # two of dp's four are in one slice
    times = [one.collective_seconds("psum", 1e9, ["dp"], crossing) for one in (slices, pod)]
    assert times[0] > 1e9 / 3 / between.bandwidth > 5 * times[1]


# -------------------- rows of a search


def row(**how):
    fn = how.pop("build", mlp)
    where = lambda mesh: (mesh["dp"], mesh["tp"]) == (2, 4)
    return spmd.search(fn, devices=8, axes=("dp", "fsdp", "tp"), hardware="h100", where=where, **how).best


def test_a_row_is_what_explain_says_with_the_axes_in_its_order():
    found = row()
    fn, args = mlp(spmd.make_mesh(abstract=True, **found.mesh))
    explained = spmd.explain(fn, *args, hardware="h100")
    assert found.time == explained.time and found.memory == explained.memory
    assert found.seconds == pytest.approx(found.time.serial)
    assert found.mfu == pytest.approx(found.time.compute / found.time.serial)
    assert {*found.name.split()} == {"dp=2", "tp=4"}


def test_what_overlaps_costs_only_what_sticks_out():
    found = row(overlap=("tp",))
    work = found.time.compute + found.time.memory
    assert found.seconds == pytest.approx(max(work, found.time.communication))
    assert found.seconds < found.time.serial


def test_the_share_of_the_peak_is_that_of_what_the_model_needs():
    mesh = types.SimpleNamespace(size=8)
    half = lambda mesh: (*mlp(mesh), Bound(needed={"float32": flops(types.SimpleNamespace(size=8)) / 2}))
    assert row(build=half).mfu == pytest.approx(row().mfu / 2)
    assert row().time.compute * H100.peak("float32") == pytest.approx(flops(mesh))
