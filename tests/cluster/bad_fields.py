"""Fields that cannot be written or read."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.cluster import read_zarr, write_zarr
from tests.errors.registry import bad, fixed


@contextlib.contextmanager
def written(mesh, dtype="float32") -> Iterator[None]:
    """A field in the file `u.zarr` of a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_zarr("u.zarr", spmd.shard(jnp.ones((4, 8), dtype), "x/dp y/tp", mesh=mesh), "x y")
        yield


@bad
def a_field_that_is_there_already(mesh):
    with written(mesh):
        write_zarr("u.zarr", jnp.ones((4, 8)), "x y")


@bad
def a_field_in_place_of_something_else(mesh):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("docs").mkdir()
        Path("docs/thesis.tex").touch()
        write_zarr("docs", jnp.ones((4, 8)), "x y", overwrite=True)


@bad
def a_field_in_place_of_a_file(mesh):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("thesis.tex").touch()
        write_zarr("thesis.tex", jnp.ones((4, 8)), "x y", overwrite=True)


bad(
    a_field_of_numpy=lambda mesh: write_zarr("u.zarr", np.ones(8), "x"),
    a_field_of_random_keys=lambda mesh: write_zarr("keys.zarr", jax.random.split(jax.random.key(0), 8), "n"),
    a_field_inside_jit=lambda mesh: jax.jit(lambda x: write_zarr("u.zarr", x, "x"))(jnp.ones(8)),
)


@bad
def a_field_read_inside_jit(mesh):
    with written(mesh):
        jax.jit(lambda x: x + read_zarr("u.zarr", mesh=mesh))(1.0)


bad(
    a_field_with_names_of_another_rank=lambda mesh: write_zarr("u.zarr", jnp.ones((4, 8)), "x y z"),
)


@bad
def a_field_that_was_not_written_to_its_end(mesh):
    with written(mesh):
        Path("u.zarr").rename(f"u.zarr.{'0123456789abcdef' * 2}.part")
        read_zarr("u.zarr", mesh=mesh)


@bad
def a_field_with_its_names_exchanged(mesh):
    with written(mesh):
        read_zarr("u.zarr", "y/dp x/tp", mesh=mesh)


@fixed
def a_field_with_its_names_exchanged_fixed(mesh):
    with written(mesh):
        found = read_zarr("u.zarr", "y/dp x/tp", mesh=mesh, rename={"x": "y", "y": "x"})
    assert found.shape == (4, 8)


@bad
def a_field_with_a_name_that_it_does_not_have(mesh):
    with written(mesh):
        read_zarr("u.zarr", "x/dp y", mesh=mesh, rename={"lon": "x"})


@bad
def a_field_far_too_large(mesh):
    with written(mesh), mock.patch("spmd.cluster._fields._memory", lambda: 64.0):
        read_zarr("u.zarr", mesh=mesh)


bad(
    a_field_at_another_url=lambda mesh: write_zarr("ftp://host/u.zarr", jnp.ones(8), "x"),
)


@bad
def a_field_of_another_rank(mesh):
    with written(mesh):
        read_zarr("u.zarr", "x/dp y z", mesh=mesh)


@bad
def a_field_that_does_not_divide(mesh):
    with written(mesh):
        read_zarr("u.zarr", "x/dp/tp y", mesh=mesh)


@bad
def a_field_on_a_mesh_without_its_axes(mesh):
    with written(mesh):
        read_zarr("u.zarr", mesh=spmd.make_mesh(i=8))


@bad
def a_field_of_another_kind_of_number(mesh):
    with written(mesh, "int32"):
        read_zarr("u.zarr", mesh=mesh, dtype="float32")


@bad
def a_group_of_fields(mesh):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("all.zarr").mkdir()
        Path("all.zarr/zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))
        read_zarr("all.zarr", "x", mesh=mesh)


@bad
def a_field_of_zarr_2(mesh):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("u.zarr").mkdir()
        Path("u.zarr/.zarray").write_text(json.dumps({"zarr_format": 2}))
        read_zarr("u.zarr", "x", mesh=mesh)
