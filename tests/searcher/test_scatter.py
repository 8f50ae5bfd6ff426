"""The scatter plot of a search."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import spmd
from tests.searcher.programs import mlp


def test_a_point_for_each_row_at_its_time_and_memory():
    found = spmd.search(mlp, devices=8, axes=("dp", "fsdp", "tp"), hardware="h100")
    picture = found.plot()
    circles = [one for one in ET.fromstring(picture.svg).iter() if one.tag.endswith("circle")]
    rows = list(reversed(found.rows))
    assert len(circles) == len(rows) == 10
    across = sorted(range(10), key=lambda i: float(circles[i].get("cx")))
    assert [rows[i].seconds for i in across] == sorted(row.seconds for row in rows)
    for circle, row in zip(circles, rows, strict=True):
        assert (circle.get("fill") != "none") == row.pareto and circle[0].text.startswith(row.name)
    top = min(circles, key=lambda one: float(one.get("cy")))
    assert rows[circles.index(top)].peak == max(row.peak for row in rows)
    assert len(picture.to_dict()["rows"]) == 10 and found.best.name in str(picture)
