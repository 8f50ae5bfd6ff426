"""Batches and checkpoints that cannot be."""

import contextlib
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

import spmd
from tests.errors.registry import X, bad, fixed

bad(
    batches_that_do_not_divide=lambda mesh: spmd.cluster.batches(X, "b/dp d", batch=3, mesh=mesh),
    batches_of_samples_of_different_shapes=lambda mesh: next(
        spmd.cluster.batches([X[0], X[1][:2]], "b/dp d", batch=2, shuffle=False, mesh=mesh)
    ),
    # As a data set of grain after `.batch(4)`.
    batches_of_batches=lambda mesh: spmd.cluster.batches([X[:4], X[4:]], "b/dp d", batch=4, mesh=mesh),
    batches_without_samples=lambda mesh: spmd.cluster.batches([], "b/dp d", batch=2, mesh=mesh),
    batches_of_integers_that_do_not_fit=lambda mesh: next(
        spmd.cluster.batches([2**40, 2**40], "b/dp", batch=2, mesh=mesh)
    ),
    batches_that_are_not_counted=lambda mesh: spmd.cluster.batches(X, "b/dp d", batch=0, mesh=mesh),
)


@bad
def batches_with_the_state_of_others(mesh):
    one, other = (spmd.cluster.batches(X, "b/dp d", batch=2, seed=seed, mesh=mesh) for seed in (0, 1))
    one.state = other.state


bad(
    batches_on_a_mesh_without_devices=lambda mesh: spmd.cluster.batches(
        X, "b/dp d", batch=2, mesh=spmd.make_mesh(dp=2, abstract=True)
    ),
    a_step_that_is_not_a_number=lambda mesh: spmd.cluster.stopping("3"),
)


@bad
def a_checkpoint_of_another_state(mesh):
    def make(size):
        return spmd.init(lambda key: {"w": jax.random.normal(key, (size, 4))}, "d/dp f", mesh=mesh)

    with tempfile.TemporaryDirectory() as folder:
        saved = spmd.cluster.checkpoints(folder)
        try:
            saved.save(1, make(8)(jax.random.key(0)))
            saved.restore(make(16), jax.random.key(0))
        finally:
            saved.close()


@bad
def a_checkpoint_of_something_else(mesh):
    with tempfile.TemporaryDirectory() as folder:
        saved = spmd.cluster.checkpoints(folder)
        try:
            saved.save(1, {"w": jnp.ones(3), "name": "a"})
        finally:
            saved.close()


@contextlib.contextmanager
def opened():
    """Checkpoints in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder, spmd.cluster.checkpoints(folder) as saved:
        yield saved


@bad
def a_checkpoint_inside_jit(mesh):
    with opened() as saved:
        jax.jit(lambda x: saved.save(1, {"w": x}))(X)


@bad
def a_checkpoint_of_donated_arrays(mesh):
    with opened() as saved:
        x = jnp.ones(8)
        x.delete()
        saved.save(1, {"w": x})


@bad
def a_checkpoint_restored_with_a_function(mesh):
    with opened() as saved:
        saved.restore(lambda key: {"w": jnp.ones(8)}, jax.random.key(0))


@fixed
def a_checkpoint_restored_with_a_function_fixed(mesh):
    with opened() as saved:
        assert saved.restore(spmd.init(lambda key: {"w": jnp.ones(8)}, "d", mesh=mesh), jax.random.key(0)).step == 0


@bad
def a_checkpoint_of_keys_with_one_text(mesh):
    class Key:
        __lt__ = lambda self, other: id(self) < id(other)
        __repr__ = lambda self: "layer"

    with opened() as saved:
        saved.save(1, {Key(): jnp.ones(8), Key(): jnp.zeros(8)})


@bad
def checkpoints_that_are_closed(mesh):
    with opened() as saved:
        saved.close()
        saved.save(1, {"w": jnp.ones(8)})


bad(
    checkpoints_at_another_url=lambda mesh: spmd.cluster.checkpoints("s3://bucket/run"),
)


@bad
def checkpoints_of_two_programs_in_one_folder(mesh):
    taken = "process 4711 on node-7"
    with opened() as saved, mock.patch.multiple(saved, path="run", _lease=mock.Mock(take=lambda: taken)):
        saved.save(1, {"w": jnp.ones(8)})


@bad
def a_checkpoint_in_place_of_something_else(mesh):
    here = {"path": Path("."), "_local": False}  # without the free bytes of this disk
    with opened() as saved, contextlib.chdir(saved.path), mock.patch.multiple(saved, **here):
        Path("steps/1/thesis").mkdir(parents=True)
        saved.save(1, {"w": jnp.ones(8)})


@bad
def a_source_that_ends(mesh):
    class Source:
        __len__ = lambda self: 8

        def __getitem__(self, index):
            return next(iter([X[0]] if index == 0 else []))

    next(spmd.cluster.batches(Source(), "b/dp d", batch=2, shuffle=False, mesh=mesh))


@bad
def batches_that_are_closed(mesh):
    with spmd.cluster.batches(X, "b/dp d", batch=2, mesh=mesh) as data:
        next(data)
    next(data)
