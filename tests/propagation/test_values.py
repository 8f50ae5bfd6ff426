"""How values lie and what their dimensions are called, by equations."""

import jax
import jax.numpy as jnp

import spmd
from spmd import propagate
from tests.propagation.programs import struct

MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)


def layouts_of(fn, *args, layouts):
    source = propagate(fn, *args, layouts=layouts).source()
    return {value.name: value.layouts for block in source.blocks for line in block.lines for value in line.values}


def test_values_in_loops_branches_and_calls():
    def program(x, w):
        def step(carry, row):
            fresh = jnp.tanh(carry @ w)
            return fresh, row * 2

        last, rows = jax.lax.scan(step, x, jnp.ones((3, 16)))
        chosen = jax.lax.cond(last.sum() > 0, lambda y: y + 1, lambda y: y, last)
        called = jax.jit(jnp.sin)(chosen)
        return called, rows

    found = layouts_of(program, struct(MESH, "b/dp d"), struct(MESH, "d e"), layouts="b d, d e")
    assert found["fresh"] == found["last"] == found["called"] == ("b/dp e",) or found["last"] == ("b/dp d",)
    assert found["chosen"][0].startswith("b/dp")


def test_strings_of_auto_mode_name_dimensions():
    @spmd.kernel("b/dp s/tp d, d f/tp -> b/dp s f/tp", mesh=MESH)
    def project(x, w):
        x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")
        return spmd.einsum(x, w, "b/dp s d, d f/tp -> b/dp s f/tp")

    [move] = propagate(project.auto, struct(MESH, "b/dp s/tp d"), struct(MESH, "d f/tp")).moves
    assert move.text == 'all_gather("b/dp s/tp d -> b/dp s d")'
