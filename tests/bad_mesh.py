"""Meshes, modes and scopes that cannot be."""

from __future__ import annotations

import jax

import spmd
from tests.errors.registry import bad, fixed


@bad
def numbers_for_devices(mesh):
    spmd.make_mesh(dp=2, devices=[0, 1])


@bad
def a_scope_with_a_mapping(mesh):
    spmd.scope(mapping={"d": "dp"})(lambda x: x)


@fixed
def a_scope_with_a_mapping_fixed(mesh):
    assert spmd.scope(mapping=None)(lambda x: x)(3) == 3


@bad
def an_axis_that_no_layout_can_name(mesh):
    spmd.make_mesh(**{"data axis": 2})


@bad
def a_device_with_two_places(mesh):
    spmd.make_mesh(dp=2, devices=[jax.devices()[0]] * 2)


@bad
def mesh_that_is_too_large(mesh):
    spmd.make_mesh(dp=4, tp=4)


@bad
def mesh_without_axes(mesh):
    spmd.make_mesh()


@bad
def mesh_by_position(mesh):
    spmd.make_mesh((2, 4), ("dp", "tp"))  # pyright: ignore[reportCallIssue, reportArgumentType]


@bad
def mesh_with_a_size_of_zero(mesh):
    spmd.make_mesh(dp=0)


@bad
def more_cpu_devices_than_run(mesh):
    spmd.use_cpu_devices(64)


@bad
def unknown_mode(mesh):
    with spmd.mode("explict"):
        pass
