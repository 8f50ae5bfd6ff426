"""What a search prints, and why a mesh is not the best."""

import json

import pytest

import spmd
from tests.searcher.programs import FLAT, bounded, mlp


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
