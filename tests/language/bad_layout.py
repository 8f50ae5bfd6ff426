"""Layouts and mappings that cannot be; tests/language/test_messages.py has all the others."""

import spmd
from tests.errors.registry import bad, fixed

bad(
    list_for_a_mapping=lambda mesh: spmd.AxisMapping(["batch"]),
    mapping_with_an_axis_twice=lambda mesh: spmd.AxisMapping({"batch": ("dp", "dp")}),
    layout_with_an_axis_in_dim_and_mark=lambda mesh: spmd.Layout("b/dp d {U:dp}"),
    layout_of_empty_parentheses=lambda mesh: spmd.Layout("()"),
)


@fixed
def layout_of_empty_parentheses_fixed(mesh, fix):
    assert spmd.Layout(fix()).is_scalar
