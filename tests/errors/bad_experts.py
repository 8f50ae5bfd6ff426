"""What can be wrong in a call of `top_k`, `roll`, or of a layer of experts."""

from __future__ import annotations

import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

WIDE = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@bad
def top_k_without_brackets(mesh):
    body("b/dp d -> b/dp k", lambda x: spmd.top_k(x, "b/dp d", 2)[0], mesh)


@bad
def top_k_of_more_than_there_are(mesh):
    body("b/dp e/tp -> b/dp k", lambda x: spmd.top_k(x, "b/dp [e/tp]", 9)[0], mesh, WIDE)


@bad
def half_of_a_top_k(mesh):
    body("b/dp d -> b/dp k", lambda x: spmd.top_k(x, "b/dp [d]", 2.5)[0], mesh)


@bad
def top_k_of_a_partial_sum(mesh):
    body("b/dp d -> k", lambda x: spmd.top_k(x.sum(0), "[d] {U:dp}", 2)[0], mesh)


@fixed
def top_k_of_a_partial_sum_fixed(mesh):
    fn = lambda x: spmd.top_k(spmd.psum(x.sum(0), "d {U:dp} -> d"), "[d]", 2)[0]
    np.testing.assert_array_equal(body("b/dp d -> k", fn, mesh), np.sort(X.sum(0))[:-3:-1])


@bad
def roll_of_a_composite(mesh):
    body("b (h k)/tp -> b (h k)/tp", lambda x: spmd.roll(x, "b [(h k)/tp]", 1, k=2), mesh, WIDE, k=2)


@bad
def roll_by_half_an_element(mesh):
    body("b/dp d -> b/dp d", lambda x: spmd.roll(x, "[b/dp] d", 0.5), mesh)


@bad
def roll_with_too_many_shifts(mesh):
    body("b/dp d -> b/dp d", lambda x: spmd.roll(x, "[b/dp] d", (1, 2)), mesh)
