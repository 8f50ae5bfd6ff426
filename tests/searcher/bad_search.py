"""Wrong calls of `search`."""

from __future__ import annotations

import jax

import spmd
from tests.errors.registry import bad, fixed
from tests.searcher.programs import bounded, mlp

HOW = {"axes": ("dp", "fsdp", "tp"), "hardware": "h100"}


@bad
def search_without_devices(mesh):
    spmd.search(mlp, devices=0, **HOW)


@bad
def search_with_too_much_memory(mesh):
    spmd.search(mlp, devices=8, memory=90, **HOW)


@bad
def search_over_an_axis_twice(mesh):
    spmd.search(mlp, devices=8, axes=("dp", "tp", "dp"), hardware="h100")


@bad
def search_over_a_string(mesh):
    spmd.search(mlp, devices=8, axes="dp,tp", hardware="h100")


@bad
def search_where_nothing_is_left(mesh):
    spmd.search(lambda mesh: mlp(mesh, sizes={"b": 63}), devices=8, where=lambda mesh: mesh["dp"] > 1, **HOW)


@fixed
def search_where_nothing_is_left_fixed(mesh):
    assert spmd.search(mlp, devices=8, where=lambda mesh: mesh["dp"] > 1, **HOW).rows


@bad
def search_with_a_build_that_returns_a_function(mesh):
    spmd.search(lambda mesh: mlp(mesh)[0], devices=8, **HOW)


@bad
def search_with_a_bound_that_is_too_high(mesh):
    spmd.search(lambda mesh: bounded(mesh, 1e9), devices=8, **HOW)


@fixed
def search_with_a_bound_that_is_too_high_fixed(mesh):
    assert spmd.search(bounded, devices=8, **HOW).proven


@bad
def search_why_of_another_device_count(mesh):
    spmd.search(mlp, devices=8, **HOW).why({"dp": 4})


@bad
def search_for_an_unknown_machine(mesh):
    spmd.search(lambda mesh: (jax.jit(lambda x: x), ()), devices=8, axes=("dp",), hardware="h1000")
