"""Wrong calls of `search`."""

import jax

import spmd
from tests.errors.registry import bad, fixed
from tests.searcher.programs import bounded, mlp

HOW = {"axes": ("dp", "fsdp", "tp"), "hardware": "h100"}


bad(
    search_without_devices=lambda mesh: spmd.search(mlp, devices=0, **HOW),
    search_with_too_much_memory=lambda mesh: spmd.search(mlp, devices=8, memory=90, **HOW),
    search_over_an_axis_twice=lambda mesh: spmd.search(mlp, devices=8, axes=("dp", "tp", "dp"), hardware="h100"),
    search_over_a_string=lambda mesh: spmd.search(mlp, devices=8, axes="dp,tp", hardware="h100"),
    search_where_nothing_is_left=lambda mesh: spmd.search(
        lambda mesh: mlp(mesh, sizes={"b": 63}), devices=8, where=lambda mesh: mesh["dp"] > 1, **HOW
    ),
)


@fixed
def search_where_nothing_is_left_fixed(mesh):
    assert spmd.search(mlp, devices=8, where=lambda mesh: mesh["dp"] > 1, **HOW).rows


bad(
    search_with_a_build_that_returns_a_function=lambda mesh: spmd.search(lambda mesh: mlp(mesh)[0], devices=8, **HOW),
    search_with_a_bound_that_is_too_high=lambda mesh: spmd.search(lambda mesh: bounded(mesh, 1e9), devices=8, **HOW),
)


@fixed
def search_with_a_bound_that_is_too_high_fixed(mesh):
    assert spmd.search(bounded, devices=8, **HOW).proven


bad(
    search_why_of_another_device_count=lambda mesh: spmd.search(mlp, devices=8, **HOW).why({"dp": 4}),
    search_for_an_unknown_machine=lambda mesh: spmd.search(
        lambda mesh: (jax.jit(lambda x: x), ()), devices=8, axes=("dp",), hardware="h1000"
    ),
)
