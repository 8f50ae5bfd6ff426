"""Numbers that a guard refuses."""

import tempfile
from unittest import mock

import jax.numpy as jnp
import numpy as np

import spmd
from spmd.cluster import checkpoints, guard
from tests.cluster.test_guard import with_a_flip
from tests.errors.registry import V, bad


@bad
def a_flipped_bit(mesh):
    with mock.patch("socket.gethostname", return_value="host7"):
        guard(0, {"w": with_a_flip(spmd.shard(V, "d/tp", mesh=mesh), 5)})


bad(
    a_guard_of_what_is_not_finite=lambda mesh: guard(
        200, {"w": spmd.shard(np.where(V == 3, np.inf, V).astype("f"), "d/tp", mesh=mesh)}
    ),
    a_guard_of_no_step=lambda mesh: guard(-1, {}),
)


@bad
def a_state_that_is_not_finite(mesh):
    with tempfile.TemporaryDirectory() as folder, checkpoints(folder) as saved:
        saved.save(4, {"w": jnp.full(3, jnp.nan)})


bad(
    checkpoints_with_another_policy=lambda mesh: checkpoints("never-made", keep="best"),
)
