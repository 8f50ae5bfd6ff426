"""Layers given what does not fit, and what layers ask with."""

from __future__ import annotations

import spmd
from tests.errors.registry import X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


@bad
def size_of_nothing(mesh):
    body(SAME, lambda x: x * spmd.size(), mesh)


@bad
def size_of_an_array_without_brackets(mesh):
    body(SAME, lambda x: x * spmd.size(x, "b/dp d"), mesh)


@fixed
def size_of_an_array_without_brackets_fixed(mesh):
    assert (body(SAME, lambda x: x * spmd.size(x, "... [d]"), mesh) == 4 * X).all()
