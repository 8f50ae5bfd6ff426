"""A program of several processes: `python -m spmd launch -n 2 -m tests.cluster.programs SEED [FAMILY ...]`.

The processes have eight virtual CPU devices together. Each checks its own shards against NumPy.
"""

import contextlib
import functools
import io
import os
import re
import shutil
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.experimental.multihost_utils as multihost
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import fft, stencil
from spmd.__main__ import main as main_command
from spmd.mesh import crossing
from tests.cluster import families

SHOWN = Path(__file__).with_name("crossing.txt")
LOCAL = families.DEVICES // int(os.environ.get("SPMD_PROCESSES", "1"))  # devices of each process
X = np.random.default_rng(0).normal(size=(16, 8, 4)).astype(np.float32)

CHECKS: list[Callable[[Any], None]] = []
check = CHECKS.append


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """The shards that are here, and only here is all that a process can see."""
    assert found.shape == np.shape(wanted)
    assert len(found.addressable_shards) == LOCAL
    for shard in found.addressable_shards:
        np.testing.assert_allclose(shard.data, np.asarray(wanted)[shard.index], atol=tolerance)


def mine(rows: np.ndarray) -> np.ndarray:
    """This process's part of some rows."""
    return np.split(rows, jax.process_count())[jax.process_index()]


def batch(mesh: Any) -> Any:
    return spmd.from_process_local(mine(X), "x/a/b y z", mesh=mesh)


@check
def rows_that_each_process_has_read(mesh):
    x = batch(mesh)
    assert x.shape == X.shape and x.sharding.spec[0] == ("a", "b")
    close(x, X)
    tree = spmd.from_process_local({"x": mine(X), "n": mine(np.arange(16))}, {"x": "x/a y z", "n": "x/a"}, mesh=mesh)
    close(tree["n"], np.arange(16))  # equal along b, within a process


@check
def parts_of_another_size_are_refused(mesh):
    rows = spmd.cluster.my_rows("x/a/b y z", X.shape, mesh=mesh)
    close(spmd.from_process_local(X[rows], "x/a/b y z", shape=X.shape, mesh=mesh), X)
    try:
        spmd.from_process_local(X[rows][1:], "x/a/b y z", shape=X.shape, mesh=mesh)
    except spmd.errors.SizeError as error:
        assert "the devices of this process hold" in str(error)
    else:
        raise AssertionError("no error")


@check
def arrays_of_the_host_reach_the_devices_of_all(mesh):
    other = np.arange(8)
    tree = {"x": X.astype(np.float64), "n": other, "h": jnp.asarray(X, jnp.bfloat16), "r": 0.5, "k": jax.random.key(1)}
    placed = spmd.shard(tree, {"x": "x/a y z", "n": "n/b", "h": "x y/b z", "r": "scalar", "k": "scalar"}, mesh=mesh)
    close(placed["x"], X)
    close(placed["n"], other)
    close(placed["h"], jnp.asarray(X, jnp.bfloat16), 0)
    close(placed["r"], np.float32(0.5))
    close(jax.jit(jax.random.key_data)(placed["k"]), jax.random.key_data(jax.random.key(1)))
    close(jax.jit(lambda x: x + spmd.shard(X, "x/a y z", mesh=mesh))(placed["x"]), 2 * X)


@check
def batches_of_which_each_process_reads_its_rows(mesh):
    read, size = [], mesh.devices.size

    class Source:
        __len__ = lambda self: len(X)

        def __getitem__(self, index):
            read.append(index)
            return X[index]

    for layout, share in (("x/a/b y z", jax.process_count()), ("x/b y z/a", 1), ("x/a y z/b", jax.process_count())):
        read.clear()
        data = spmd.cluster.batches(Source(), layout, batch=size, seed=1, mesh=mesh, prefetch=0)
        read.clear()  # the first sample told the shapes
        order = data.order.samples(0, size)
        close(next(data), X[order])
        assert len(read) == len(set(read)) == size // share, (layout, read)


@check
def batches_that_differ_between_processes_are_refused(mesh):
    rank = jax.process_index()
    turned = jax.sharding.Mesh(mesh.devices.T, ("a", "b")) if rank else mesh
    size = mesh.devices.size
    for source, more in (
        (X[: 16 - rank], {}),
        (X, {"seed": rank}),
        (X[..., : 4 - (rank > 0)], {}),
        (X, {"batch": size * (1 + rank)}),
        (X, {"mesh": turned}),
    ):
        make = functools.partial(spmd.cluster.batches, source, "x/a/b y z", **{"batch": size, "mesh": mesh, **more})
        try:
            make()
        except spmd.errors.SizeError as error:
            assert "do not read the same batches" in str(error)
        else:
            raise AssertionError("no error")
        with unittest.mock.patch.object(spmd.cluster.Batches, "_check_same", lambda self: None):
            make()  # with the guard off, nothing is said


@check
def exchanges_between_processes(mesh):
    @spmd.kernel("x/a/b y z -> x y/a/b z", mesh=mesh)
    def turn(x):
        return spmd.all_to_all(x, "x/a/b y z -> x y/a/b z")

    x = batch(mesh)
    close(turn(x), X)
    central = stencil.stencil(lambda u: u[2:] - u[:-2], "1+x/a/b+1 y z -> x/a/b y z")
    padded = spmd.kernel("x/a/b y z -> x/a/b y z", mesh=mesh)(central)
    close(padded(x), np.roll(X, -1, 0) - np.roll(X, 1, 0))


@check
def fourier_transforms_there_and_back(mesh):
    there, away = "x/a y/b z -> kx ky/a kz/b", "kx ky/a kz/b -> x/a y/b z"

    @spmd.kernel(there, mesh=mesh)
    def forward(x):
        return fft.fft(x, there)

    @spmd.kernel(away, mesh=mesh)
    def back(f):
        return fft.ifft(f, away)

    x = spmd.shard(batch(mesh), "x/a y/b z")
    spectrum = forward(x)
    close(spectrum, np.fft.fftn(X), 1e-3)
    close(back(spectrum), X)


@check
def arrays_that_are_created_sharded(mesh):
    make = spmd.init(lambda key: jax.random.normal(key, (16, 12)), "i/a j/b", mesh=mesh)
    close(make(jax.random.key(0)), jax.random.normal(jax.random.key(0), (16, 12)))
    table = spmd.from_function(lambda i, j: 10 * i + j, "x/a y/b", x=16, y=12, mesh=mesh)
    close(table, 10 * np.arange(16)[:, None] + np.arange(12))

    @spmd.kernel("scalar -> x/a/b", mesh=mesh, x=16)
    def draw(key):
        return spmd.random.uniform(key, "x/a/b")

    close(draw(jax.random.key(1)), jax.random.uniform(jax.random.key(1), (16,)))


@check
def fields_on_disk(mesh):
    """Each process writes its own blocks and no other, and reads what its devices need and no more."""
    rank, folder = jax.process_index(), shared_folder()
    across = jax.sharding.Mesh(mesh.devices.T, ("a", "b"))
    for place, layout, name in ((mesh, "x/a y/b z", "blocks"), (across, "x/a y z", "copies"), (mesh, "x y z/b", "z")):
        x = spmd.shard(X, layout, mesh=place)
        spmd.cluster.write_zarr(folder / name, x, "x y z")
        close(spmd.cluster.read_zarr(folder / name, mesh=place), X)
        close(spmd.cluster.read_zarr(folder / name, "x y/b z", mesh=across), X)
        # on a disk of its own each process finds what it writes and nothing else, and process 0 misses the rest
        alone, first = folder / f"{rank}" / name, [one for one in x.global_shards if one.replica_id == 0]
        here = [one for one in first if one.device.process_index == rank]
        whole = {one.device.process_index for one in first} == {0}
        try:
            with unittest.mock.patch("shutil.rmtree"):  # a write that fails removes what it has written
                spmd.cluster.write_zarr(alone, x, "x y z")
        except spmd.errors.PlacementError as error:
            assert not whole and "do all processes reach this disk?" in str(error)
        else:
            assert whole
        assert len([*alone.parent.glob(f"{name}*/c/*/*/*")]) == len(here), (name, here)
    kept = folder / f"{rank}" / "rows"
    shutil.copytree(folder / "blocks", kept)
    for one in kept.glob("c/*/*/*"):
        if one.parts[-3] != f"{rank}":  # the rows of the other processes
            one.unlink()
    close(spmd.cluster.read_zarr(kept, "x/a y z", mesh=mesh), X)


def shared_folder() -> Path:
    """A new folder, the same in all processes."""
    names = multihost.process_allgather(np.frombuffer(os.urandom(8), np.uint8)).reshape(-1)
    folder = Path(tempfile.gettempdir()) / f"spmd-{bytes(names[:8]).hex()}"
    folder.mkdir(exist_ok=True)
    return folder


def shown(mesh: Any) -> str:
    """What people see of a mesh that crosses processes: explain, visualize and info."""

    @spmd.kernel("x/a y/b, y f/a -> x/a f", mesh=mesh)
    def layer(x, w):
        w = spmd.all_gather(w, "y f/a -> y f")
        x = spmd.all_gather(x, "x/a y/b -> x/a y", to="invarying")
        return spmd.einsum(x, w, "x/a y, y f -> x/a f")

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
    report = spmd.explain(layer, shape(8, 16), shape(16, 8))
    assert report.crossing == ("a",) and [one.axes for one in report.between_processes] == [("a",)]
    assert report.to_dict()["bytes_between_processes"] == report.by_axis()["a"][0].total_bytes
    with contextlib.redirect_stdout(io.StringIO()) as info:
        assert main_command(["info"]) == 0
    devices = info.getvalue().partition("devices: ")[2]
    table = re.sub(r"programs.py:[0-9]+", "programs.py:1  ", report.table(100).partition("memory per device")[0])
    texts = [table, spmd.visualize("x/a y", (8, 4), mesh).text(100)]
    assert bool(devices) == (jax.process_index() == 0)  # it alone prints
    return "\n\n".join(line.strip() for line in [*texts, devices]) + "\n"


@check
def axes_that_cross_processes_are_shown(mesh):
    assert crossing(mesh) == ("a",)
    assert crossing(jax.sharding.Mesh(mesh.devices.T, ("a", "b"))) == ("b",)
    assert crossing(jax.sharding.Mesh(mesh.devices.reshape(-1), ("a",))) == ("a",)
    assert crossing(jax.sharding.Mesh(mesh.devices[:1], ("a", "b"))) == () == crossing(mesh.abstract_mesh)
    text = shown(mesh)
    if jax.process_count() == 2 and jax.process_index() == 0:
        if os.environ.get("SPMD_UPDATE_GOLDEN"):
            SHOWN.write_text(text)
        assert text == SHOWN.read_text(), text


@check
def a_mesh_that_leaves_a_process_out_is_refused(mesh):
    count, last = jax.process_count(), jax.process_count() - 1
    try:
        spmd.make_mesh(a=LOCAL * last)
    except spmd.errors.MeshError as error:
        assert f"process {last} of {count} has no device in the mesh" in str(error)
    else:
        raise AssertionError("no error")
    assert spmd.make_mesh(a=LOCAL * last, partial=True).size == LOCAL * last


@check
def reference_mode_says_that_it_cannot(mesh):
    x = batch(mesh)
    double = spmd.kernel("x/a/b y z -> x/a/b y z", mesh=mesh)(lambda x: 2 * x)
    for call in (lambda: double.reference(x), lambda: spmd.shard(x, "x y z")):
        try:
            with spmd.mode("reference"):
                call()
        except spmd.errors.ModeError as error:
            assert "spans processes" in str(error)
        else:
            raise AssertionError("no error")


def main(seed: int, chosen: list[str]) -> None:
    """Join the others and run the checks, all in the same order, then random programs of these families."""
    jax.config.update("jax_num_cpu_devices", LOCAL)
    spmd.cluster.initialize(cpu_devices=LOCAL)
    count = jax.process_count()
    assert jax.device_count() == LOCAL * count
    mesh = spmd.make_mesh(a=count, b=LOCAL)
    for one in CHECKS:
        one(mesh)
        print(one.__name__, flush=True)
    assert not (chosen and families.run(seed, chosen))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
