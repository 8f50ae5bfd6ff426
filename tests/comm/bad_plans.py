"""What `plan` and `relayout` cannot plan."""

import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

SIZES = {"a": 8, "b": 16}


SWAP = "a/dp b -> a b/dp"


bad(
    plan_without_a_size=lambda mesh: spmd.plan(SWAP, sizes={"a": 8}, mesh=mesh),
)


@fixed
def plan_without_a_size_fixed(mesh):
    assert spmd.plan(SWAP, sizes={"a": 8}, mesh=mesh, b=16).steps


bad(
    plan_of_a_size_that_does_not_divide=lambda mesh: spmd.plan(SWAP, sizes={"a": 8, "b": 15}, mesh=mesh),
    plan_of_a_name_that_is_not_there=lambda mesh: spmd.plan(SWAP, sizes={**SIZES, "c": 3}, mesh=mesh),
    plan_of_an_axis_that_is_not_there=lambda mesh: spmd.plan("a/dq b -> a b/dq", sizes=SIZES, mesh=mesh),
    plan_of_other_dimensions=(
        lambda mesh: spmd.plan("a/dp b -> b a/dp", sizes=SIZES, mesh=mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body("a/dp b -> b a/dp", lambda x: fix(x=x), mesh, X), X.T),
    ),
    plan_of_any_number_of_dimensions=lambda mesh: spmd.plan("... b/dp -> ... b", sizes={"b": 16}, mesh=mesh),
    plan_of_margins=lambda mesh: spmd.plan("1+a/dp+1 b -> a b/dp", sizes=SIZES, mesh=mesh),
    plan_of_a_dimension_without_a_name=lambda mesh: spmd.plan("a/dp _ -> a _", sizes={"a": 8}, mesh=mesh),
    plan_of_what_becomes_a_partial_sum=lambda mesh: spmd.plan("a/dp b -> a b {U:dp}", sizes=SIZES, mesh=mesh),
    plan_that_moves_nothing=lambda mesh: spmd.plan("a/dp b -> a/dp b", sizes=SIZES, mesh=mesh),
    plan_without_a_mesh=lambda mesh: spmd.plan(SWAP, sizes=SIZES),
)


@fixed
def plan_without_a_mesh_fixed(mesh):
    assert spmd.plan(SWAP, sizes=SIZES, mesh={"dp": 4}).bytes


bad(
    plan_on_a_number_of_devices=lambda mesh: spmd.plan(SWAP, sizes=SIZES, mesh=8),
    plan_with_sizes_in_order=lambda mesh: spmd.plan(SWAP, sizes=(8, 16), mesh=mesh),
    plan_of_no_dtype=lambda mesh: spmd.plan(SWAP, sizes=SIZES, mesh=mesh, dtype="float31"),
    plan_of_an_array=lambda mesh: spmd.plan(np.ones((8, 16)), sizes=SIZES, mesh=mesh),
    plan_that_prefers_speed=lambda mesh: spmd.plan(SWAP, sizes=SIZES, mesh=mesh, prefer="latencies"),
    relayout_by_latency_of_nothing=lambda mesh: body(
        "a/dp b -> a b/dp", lambda x: spmd.relayout(x, SWAP, prefer="latency"), mesh
    ),
)


@fixed
def relayout_by_latency_of_nothing_fixed(mesh):
    fn = lambda x: spmd.relayout(x, SWAP, prefer="latency", hardware="h100")
    body("a/dp b -> a b/dp", fn, mesh)


bad(
    plan_of_two_strings=lambda mesh: spmd.plan("a/dp b", "a b/dp", sizes=SIZES, mesh=mesh),
)


@fixed
def plan_of_two_strings_fixed(mesh):
    assert spmd.plan("a/dp b -> a b/dp", sizes=SIZES, mesh=mesh).steps


bad(
    plan_with_sizes_by_position=lambda mesh: spmd.plan(SWAP, SIZES, mesh),
    plan_of_an_array_and_a_pattern=lambda mesh: spmd.plan(np.ones((8, 16)), SWAP),
    plan_of_the_dtype_none=lambda mesh: spmd.plan(SWAP, sizes=SIZES, mesh=mesh, dtype=None),
)
