"""What the assertions of spmd.testing and the written view cannot work with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.testing import assert_collectives, assert_modes_agree, assert_no_unwritten_collectives, assert_sharded
from tests.errors.registry import X, bad, fixed


def gather(mesh):
    return spmd.kernel("b/dp d -> b d", mesh=mesh)(lambda x: spmd.all_gather(x, "b/dp d -> b d", to="invarying"))


def lying(mesh, layout="b/dp d"):
    return jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=spmd.Layout(layout).sharding(mesh))


# --- collectives ---------------------------------------------------------------------------------------------


@bad
def budget_of_an_unknown_kind(mesh):
    assert_collectives(gather(mesh), (X,), {"allgather": {"dp": 1}})


@fixed
def budget_of_an_unknown_kind_fixed(mesh):
    assert_collectives(gather(mesh), (lying(mesh),), {"all_gather": {"dp": 1}})


@bad
def budget_of_an_unknown_axis(mesh):
    assert_collectives(gather(mesh), (X,), {"all_gather": {"data": 1}}, view="written")


@bad
def budget_of_an_unknown_view(mesh):
    assert_collectives(gather(mesh), (X,), {"all_gather": {"dp": 1}}, view="compile")


@bad
def budget_of_loose_arguments(mesh):
    assert_no_unwritten_collectives(gather(mesh), lying(mesh))


@fixed
def budget_of_loose_arguments_fixed(mesh):
    assert_no_unwritten_collectives(gather(mesh), (lying(mesh),))


# --- parameters ----------------------------------------------------------------------------------------------


@bad
def sharded_tree_of_plain_arrays(mesh):
    assert_sharded({"w": np.ones((8, 4))})


@fixed
def sharded_tree_of_plain_arrays_fixed(mesh):
    tree = {"w": np.ones((8, 4))}
    assert_sharded(spmd.shard(tree, "d/dp f/tp", mesh=mesh))


@bad
def sharded_over_an_unknown_axis(mesh):
    assert_sharded({"w": lying(mesh)}, axes=("dq",))


@bad
def sharded_as_a_layout_with_an_unknown_axis(mesh):
    assert_sharded({"w": lying(mesh)}, {"w": "b/data d"})


@bad
def sharded_on_two_meshes(mesh):
    assert_sharded({"w": lying(mesh), "v": lying(spmd.make_mesh(dp=4, tp=2))})


@bad
def sharded_with_a_leaf_without_layout(mesh):
    assert_sharded({"w": lying(mesh)}, {"w": None})


# --- modes ---------------------------------------------------------------------------------------------------


@bad
def agreement_of_one_mode(mesh):
    assert_modes_agree(gather(mesh), X, modes=("auto",))


@fixed
def agreement_of_one_mode_fixed(mesh):
    assert_modes_agree(gather(mesh), X, modes=("explicit", "reference"))


@bad
def agreement_of_an_unknown_mode(mesh):
    assert_modes_agree(gather(mesh), X, modes=("manual", "reference"))


@bad
def agreement_without_values(mesh):
    assert_modes_agree(gather(mesh), jax.ShapeDtypeStruct((8, 4), jnp.float32))
