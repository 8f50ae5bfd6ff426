"""Rows of a search."""

import types

import pytest

import spmd
from spmd.searcher import Bound
from spmd.searcher._result import marked, name_of, row_of
from tests.searcher.programs import flops, mlp

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
