"""Layouts and mappings that cannot be; tests/language/test_messages.py has all the others."""

from __future__ import annotations

import spmd
from tests.errors.registry import bad, fixed


@bad
def list_for_a_mapping(mesh):
    spmd.AxisMapping(["batch"])


@bad
def mapping_with_an_axis_twice(mesh):
    spmd.AxisMapping({"batch": ("dp", "dp")})


@bad
def layout_with_an_axis_in_dim_and_mark(mesh):
    spmd.Layout("b/dp d {U:dp}")


@bad
def layout_of_empty_parentheses(mesh):
    spmd.Layout("()")


@fixed
def layout_of_empty_parentheses_fixed(mesh, fix):
    assert spmd.Layout(fix()).is_scalar
