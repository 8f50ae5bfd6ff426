"""Batches and checkpoints that cannot be."""

from __future__ import annotations

import tempfile

import jax
import jax.numpy as jnp

import spmd
from tests.errors.registry import X, bad


@bad
def batches_that_do_not_divide(mesh):
    spmd.cluster.batches(X, "b/dp d", batch=3, mesh=mesh)


@bad
def batches_of_samples_of_different_shapes(mesh):
    next(spmd.cluster.batches([X[0], X[1][:2]], "b/dp d", batch=2, shuffle=False, mesh=mesh))


@bad
def batches_of_batches(mesh):
    """As a data set of grain after `.batch(4)`."""
    spmd.cluster.batches([X[:4], X[4:]], "b/dp d", batch=4, mesh=mesh)


@bad
def batches_without_samples(mesh):
    spmd.cluster.batches([], "b/dp d", batch=2, mesh=mesh)


@bad
def batches_of_integers_that_do_not_fit(mesh):
    next(spmd.cluster.batches([2**40, 2**40], "b/dp", batch=2, mesh=mesh))


@bad
def batches_that_are_not_counted(mesh):
    spmd.cluster.batches(X, "b/dp d", batch=0, mesh=mesh)


@bad
def batches_with_the_state_of_others(mesh):
    one, other = (spmd.cluster.batches(X, "b/dp d", batch=2, seed=seed, mesh=mesh) for seed in (0, 1))
    one.state = other.state


@bad
def batches_on_a_mesh_without_devices(mesh):
    spmd.cluster.batches(X, "b/dp d", batch=2, mesh=spmd.make_mesh(dp=2, abstract=True))


@bad
def a_step_that_is_not_a_number(mesh):
    spmd.cluster.stopping("3")


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
