"""The walks that keep everything: the pass's own states, and the names of dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd._jaxprs.walker import equations
from spmd.checker._state import axes_of_dim
from spmd.inspect._recorded import record
from tests.checker.twins.registry import load

MESH = spmd.make_mesh(dp=2, tp=4)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def kept(body, pattern, primitive):
    """The axes of each dimension, and its name, of what a primitive gave last."""
    jaxpr = jax.make_jaxpr(spmd.kernel(pattern, mesh=MESH, check="off")(body))(X)
    states, names = record(jaxpr, "body")
    [eqn] = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == primitive]
    [key] = [key for key in states.made if key[1] == id(eqn)]
    [state], [labels] = states.made[key], names.made[key]
    return [axes_of_dim(dim) for dim in state.dims], [part[0][0] if part else "" for part in labels], state


def test_states_and_names_are_those_of_the_body():
    assert kept(lambda x: jnp.sin(x.T).T, "b/dp d/tp -> b/dp d/tp", "sin")[:2] == ([("tp",), ("dp",)], ["d", "b"])


def test_the_last_round_of_a_loop_counts():
    def body(x):
        def step(carry, _):
            return jnp.sin(carry[::-1] + x), None

        return lax.scan(step, lax.pcast(jnp.zeros((4, 4)), ("dp", "tp"), to="varying"), length=2)[0]

    axes, _, state = kept(body, "b/dp d/tp -> b/dp d/tp", "sin")
    assert axes == [("dp",), ("tp",)]
    assert {p.kind for p in state.pending} == {"flip"}


def test_outside_of_bodies_nothing_is_known_but_what_they_left():
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: x * 2)
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(kernel(x)))(X)
    states, _ = record(jaxpr, "program")
    outer = {eqn.primitive.name: states.made[(), id(eqn)] for eqn in jaxpr.eqns}
    assert outer["sin"] == [None]
    assert [axes_of_dim(dim) for dim in outer["jit"][0].dims] == [("dp",), ()]


@pytest.mark.parametrize("name", ["in_a_carry", "tanh_before_the_psum", "iterations_counted_by_a_block"])
def test_the_walk_that_keeps_everything_finds_the_same(name):
    pair = load()[name]
    run = pair.shard_map(pair.mistaken)
    findings = spmd.check(run, *pair.arguments())
    states, _ = record(jax.make_jaxpr(run)(*pair.arguments()), findings[0].call or "")
    assert {(one.kind, one.rule) for one in states.findings} == {(one.kind, one.rule) for one in findings}


def test_what_a_loop_stacks_is_not_what_left_the_body():
    """The tangent of a kernel with integers, by `float0`, for each step of a loop."""
    mesh = spmd.make_mesh(dp=2)
    kernel = spmd.kernel("b/dp d, b/dp -> b/dp d, b/dp", mesh=mesh)(lambda x, i: (x * 2, i + 1))

    def steps(x, i):
        tangents = (x, np.zeros(i.shape, jax.dtypes.float0))
        return jax.lax.scan(lambda c, _: (c, jax.jvp(kernel, (x, i), tangents)[1][0]), x, None, length=3)[1]

    found = spmd.check(steps, np.ones((4, 2), np.float32), np.arange(4, dtype=np.int32))
    assert "4/dp 2" in str(found.source())
