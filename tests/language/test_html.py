"""Layouts, patterns and mappings in a notebook: each part of a string, in words."""

import re

import pytest

import spmd
from spmd.language import Pattern

WHOLE = "whole, unless a mapping divides it"


def rows(html: str) -> list[list[str]]:
    """The texts of the rows of a table."""
    found = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)]
    return [[text.replace("&gt;", ">") for text in row] for row in found]


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        ("scalar", [["scalar", "one number"]]),
        ("b/dp/fsdp d/1", [["b/dp/fsdp", "divided over dp and fsdp"], ["d/1", "whole"]]),
        ("(h k)/tp ... d", [["(h k)/tp", "divided over tp"], ["...", "any number of dimensions"], ["d", WHOLE]]),
        ("2+s/cp+1", [["2+s/cp+1", "divided over cp, and 2 more from the block before, 1 from the block after"]]),
        ("d {U:tp}", [["d", WHOLE], ["{U:tp}", "a term of a sum along tp"]]),
        ("d {R:dp}", [["d", WHOLE], ["{R:dp}", "its gradient is a term of a sum along dp"]]),
    ],
)
def test_a_layout_has_a_row_for_each_part(layout, wanted):
    assert rows(spmd.Layout(layout)._repr_html_())[1:] == wanted


def test_a_pattern_has_its_sides():
    found = rows(Pattern("b/dp, d -> b/dp {U:tp}")._repr_html_())
    assert [row[0] for row in found if len(row) == 1] == ["in: b/dp", "in: d", "out: b/dp {U:tp}"]


def test_a_mapping_has_its_rules():
    assert rows(spmd.AxisMapping({"b": ("dp", "fsdp"), "d": None})._repr_html_())[1:] == [
        ["b", "divided over dp and fsdp"],
        ["d", "whole"],
    ]
    assert "no rules" in spmd.AxisMapping()._repr_html_()
