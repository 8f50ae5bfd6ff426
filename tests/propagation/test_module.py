"""Shardy's dialect as plain values: axes and their parts, where values lie, loops, and where what moves comes from."""

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import propagate
from tests.propagation.programs import struct

MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)


@pytest.mark.parametrize("dtype, width", [("bfloat16", 2), ("int8", 1), ("bool", 1), ("complex64", 8), ("float32", 4)])
def test_widths_of_dtypes(dtype, width):
    move = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, struct(MESH, "b d").sharding))
    [one] = propagate(move, struct(MESH, "b/dp d", dtype)).moves
    assert one.bytes == 8 * 32 * width


def test_parts_of_axes_are_put_together():
    """Shardy goes from one axis to another by way of a part of the larger one."""

    def program(x):
        return jax.lax.with_sharding_constraint(x, struct(MESH, "b/tp d/dp").sharding)

    plan = propagate(program, struct(MESH, "b/dp d/tp"), layouts="b d")
    assert [(one.kind, one.source, one.target, one.bytes) for one in plan.moves] == [
        ("ppermute", "b/dp d/tp", "b/tp:(1)2 d/dp/tp:(2)2", 256),
        ("all_to_all", "b/tp:(1)2 d/dp/tp:(2)2", "b/tp d/dp", 128),
    ]


def test_loops_are_multiplied_out_and_those_of_unknown_length_are_not():
    def program(x, w):
        x = jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x @ w, x)

    plan = propagate(program, struct(MESH, "b/dp d"), struct(MESH, "d/tp e"))
    [scanned] = [one for one in plan.moves if one.count == 5 and one.kind == "psum"]
    assert scanned.exact and not plan.exact
    assert any(one.count == 1 and not one.exact for one in plan.moves)


def test_branches_are_not_exact():
    def program(x):
        return jax.lax.cond(jnp.sum(x) > 0, lambda: jnp.sort(x, 0), lambda: x)

    plan = propagate(program, struct(MESH, "b/dp d"))
    assert [(one.branch, one.exact) for one in plan.moves if one.kind == "all_to_all"] == [(True, False)] * 2


def test_a_loop_that_moves_what_does_not_change():
    """The weights of a layer are another slice in each round; of the loop around that they are the same."""

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def batches(x, w):
        return jax.lax.scan(lambda total, x: (total + layers(x, w), None), x[0], x)[0]

    weights = jax.ShapeDtypeStruct((3, 32, 32), "float32", sharding=spmd.Layout("l d/dp e").sharding(MESH))
    rows = jax.ShapeDtypeStruct((4, 16, 32), "float32", sharding=spmd.Layout("m b/dp d").sharding(MESH))
    [once] = [one for one in propagate(layers, struct(MESH, "b/dp d"), weights).moves if one.kind == "all_gather"]
    [often] = [one for one in propagate(batches, rows, weights).moves if one.kind == "all_gather"]
    assert (once.raw.part, once.raw.unchanging, once.count) == (True, False, 3)
    assert (often.raw.part, often.raw.unchanging, often.count) == (True, True, 12)


def test_a_sum_of_which_a_slice_is_kept():
    def program(x, w):
        return jax.lax.with_sharding_constraint(x @ w, struct(MESH, "b d/tp").sharding)

    [move] = propagate(program, struct(MESH, "b d/tp"), struct(MESH, "d/tp e")).moves
    assert move.kind == "psum" and move.raw.scatters and "psum_scatter" in move.why
