"""Meshes, modes and scopes that cannot be."""

import types
from unittest import mock

import jax
from jax.experimental import topologies

import spmd
from tests.errors.registry import bad, fixed

bad(
    numbers_for_devices=lambda mesh: spmd.make_mesh(dp=2, devices=[0, 1]),
    a_scope_with_a_mapping=lambda mesh: spmd.scope(mapping={"d": "dp"})(lambda x: x),
)


@fixed
def a_scope_with_a_mapping_fixed(mesh):
    assert spmd.scope(mapping=None)(lambda x: x)(3) == 3


bad(
    an_axis_that_no_layout_can_name=lambda mesh: spmd.make_mesh(**{"data axis": 2}),
    a_device_with_two_places=lambda mesh: spmd.make_mesh(dp=2, devices=[jax.devices()[0]] * 2),
    mesh_that_is_too_large=lambda mesh: spmd.make_mesh(dp=4, tp=4),
    mesh_without_axes=lambda mesh: spmd.make_mesh(),
)


@bad
def mesh_by_position(mesh):
    spmd.make_mesh((2, 4), ("dp", "tp"))  # pyright: ignore[reportCallIssue, reportArgumentType]


bad(
    mesh_with_a_size_of_zero=lambda mesh: spmd.make_mesh(dp=0),
    more_cpu_devices_than_run=lambda mesh: spmd.use_cpu_devices(64),
)


@bad
def unknown_mode(mesh):
    with spmd.mode("explict"):
        pass


@bad
def a_target_that_is_a_number(mesh):
    spmd.topology_devices(8)  # pyright: ignore[reportArgumentType]


@bad
def a_slice_with_another_count(mesh):
    found = types.SimpleNamespace(devices=jax.devices()[:8])
    with mock.patch.object(topologies, "get_topology_desc", return_value=found):
        spmd.topology_devices("v5p:2x2x2", 16)


@bad
def a_slice_without_its_compiler(mesh):
    with mock.patch.object(topologies, "get_topology_desc", side_effect=NotImplementedError):
        spmd.topology_devices("v5p:2x2x2")


bad(
    a_machine_for_a_target=lambda mesh: spmd.topology_devices("h100", 8),
    gpus_without_a_count=lambda mesh: spmd.topology_devices("h100_sxm.txtpb"),
    gpus_without_their_description=lambda mesh: spmd.topology_devices("h100_sxm.txtpb", 8),
    gpus_that_do_not_fill_their_hosts=lambda mesh: spmd.topology_devices("h100_sxm.txtpb", 12),
)


@bad
def nodes_with_unequal_parts(mesh):
    nodes = [types.SimpleNamespace(slice_index=i // 4, process_index=0) for i in range(6)]
    with mock.patch("spmd.mesh._devices", return_value=nodes):
        spmd.make_mesh(dp=3, tp=2)
