"""Programs of several processes that cannot start."""

import os
from unittest import mock

import jax
import jax.numpy as jnp

import spmd
from tests.errors.registry import bad, fixed

TORCH = {"RANK": "1", "WORLD_SIZE": "2"}


LAUNCHED = {"SPMD_RANK": "0", "SPMD_PROCESSES": "2", "SPMD_COORDINATOR": "localhost:1"}


WHERE = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


def told(*variables):
    return mock.patch.dict(os.environ, {name: value for one in variables for name, value in one.items()})


@bad
def processes_that_did_not_join(mesh):
    with told(LAUNCHED):
        spmd.make_mesh(dp=2)


@fixed
def processes_that_did_not_join_fixed(mesh):
    with told(LAUNCHED):
        assert spmd.make_mesh(dp=2, alone=True).size == 2


@bad
def a_port_that_is_in_use(mesh):
    with mock.patch("spmd.cluster._start._in_use", lambda *_: True), told({**TORCH, "RANK": "0"}, WHERE):
        spmd.cluster.initialize()


@bad
def a_rank_that_two_sources_give_differently(mesh):
    with told(LAUNCHED, TORCH):
        spmd.cluster.initialize()


@bad
def a_coordinator_that_nobody_names(mesh):
    with told(TORCH):
        spmd.cluster.initialize()


@bad
def a_rank_that_is_not_a_number(mesh):
    with told({**TORCH, "RANK": "one"}):
        spmd.cluster.initialize()


@bad
def processes_that_jax_has_not_joined(mesh):
    """As where a backend knows of no other process: each would train alone."""
    with mock.patch("jax.distributed.initialize"), told(LAUNCHED):
        spmd.cluster.initialize()


bad(
    a_number_of_processes_without_a_rank=lambda mesh: spmd.cluster.initialize("localhost:1", num_processes=2),
    a_rank_that_is_too_large=lambda mesh: spmd.cluster.initialize("localhost:1", num_processes=2, process_id=2),
    processes_that_join_too_late=lambda mesh: spmd.cluster.initialize("localhost:1", num_processes=2, process_id=0),
    a_patience_that_is_no_time=lambda mesh: spmd.cluster.initialize(patience={"steps": 60}),
    a_step_that_is_not_lowered=(
        lambda mesh: spmd.cluster.same_program(jnp.sin),
        lambda mesh: spmd.cluster.same_program(jax.jit(jnp.sin).lower(1.0)),
    ),
)
