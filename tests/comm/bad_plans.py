"""What `plan` and `relayout` cannot plan."""

from __future__ import annotations

import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

SIZES = {"a": 8, "b": 16}
SWAP = "a/dp b -> a b/dp"


@bad
def plan_without_a_size(mesh):
    spmd.plan(SWAP, sizes={"a": 8}, mesh=mesh)


@fixed
def plan_without_a_size_fixed(mesh):
    assert spmd.plan(SWAP, sizes={"a": 8}, mesh=mesh, b=16).steps


@bad
def plan_of_a_size_that_does_not_divide(mesh):
    spmd.plan(SWAP, sizes={"a": 8, "b": 15}, mesh=mesh)


@bad
def plan_of_a_name_that_is_not_there(mesh):
    spmd.plan(SWAP, sizes={**SIZES, "c": 3}, mesh=mesh)


@bad
def plan_of_an_axis_that_is_not_there(mesh):
    spmd.plan("a/dq b -> a b/dq", sizes=SIZES, mesh=mesh)


@bad
def plan_of_other_dimensions(mesh):
    spmd.plan("a/dp b -> b a/dp", sizes=SIZES, mesh=mesh)


@fixed
def plan_of_other_dimensions_fixed(mesh, fix):
    np.testing.assert_array_equal(body("a/dp b -> b a/dp", lambda x: fix(x=x), mesh, X), X.T)


@bad
def plan_of_any_number_of_dimensions(mesh):
    spmd.plan("... b/dp -> ... b", sizes={"b": 16}, mesh=mesh)


@bad
def plan_of_margins(mesh):
    spmd.plan("1+a/dp+1 b -> a b/dp", sizes=SIZES, mesh=mesh)


@bad
def plan_of_a_dimension_without_a_name(mesh):
    spmd.plan("a/dp _ -> a _", sizes={"a": 8}, mesh=mesh)


@bad
def plan_of_what_becomes_a_partial_sum(mesh):
    spmd.plan("a/dp b -> a b {U:dp}", sizes=SIZES, mesh=mesh)


@bad
def plan_that_moves_nothing(mesh):
    spmd.plan("a/dp b -> a/dp b", sizes=SIZES, mesh=mesh)


@bad
def plan_without_a_mesh(mesh):
    spmd.plan(SWAP, sizes=SIZES)


@fixed
def plan_without_a_mesh_fixed(mesh):
    assert spmd.plan(SWAP, sizes=SIZES, mesh={"dp": 4}).bytes


@bad
def plan_on_a_number_of_devices(mesh):
    spmd.plan(SWAP, sizes=SIZES, mesh=8)


@bad
def plan_with_sizes_in_order(mesh):
    spmd.plan(SWAP, sizes=(8, 16), mesh=mesh)


@bad
def plan_of_no_dtype(mesh):
    spmd.plan(SWAP, sizes=SIZES, mesh=mesh, dtype="float31")


@bad
def plan_of_an_array(mesh):
    spmd.plan(np.ones((8, 16)), sizes=SIZES, mesh=mesh)


@bad
def plan_that_prefers_speed(mesh):
    spmd.plan(SWAP, sizes=SIZES, mesh=mesh, prefer="latencies")


@bad
def relayout_by_latency_of_nothing(mesh):
    body("a/dp b -> a b/dp", lambda x: spmd.relayout(x, SWAP, prefer="latency"), mesh)


@fixed
def relayout_by_latency_of_nothing_fixed(mesh):
    fn = lambda x: spmd.relayout(x, SWAP, prefer="latency", hardware="h100")
    body("a/dp b -> a b/dp", fn, mesh)


@bad
def plan_of_two_strings(mesh):
    spmd.plan("a/dp b", "a b/dp", sizes=SIZES, mesh=mesh)


@fixed
def plan_of_two_strings_fixed(mesh):
    assert spmd.plan("a/dp b -> a b/dp", sizes=SIZES, mesh=mesh).steps


@bad
def plan_with_sizes_by_position(mesh):
    spmd.plan(SWAP, SIZES, mesh)


@bad
def plan_of_an_array_and_a_pattern(mesh):
    spmd.plan(np.ones((8, 16)), SWAP)


@bad
def plan_of_the_dtype_none(mesh):
    spmd.plan(SWAP, sizes=SIZES, mesh=mesh, dtype=None)
