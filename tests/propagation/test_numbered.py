"""Numbers of equations: they reach the module through loops, calls, branches and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.propagation._module import Reading
from spmd.propagation._propagation import trace
from tests.propagation.programs import struct

MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)


@jax.custom_jvp
def halved(x):
    return jnp.sin(x) / 2


halved.defjvp(lambda primals, tangents: (halved(*primals), tangents[0] * jnp.cos(primals[0])))


def deep(x, w):
    step = jax.checkpoint(lambda x: halved(x @ w))
    x = jax.lax.scan(lambda x, _: (step(x), None), x, length=2)[0]
    return jax.lax.cond(jnp.sum(x) > 0, jax.jit(jnp.tanh), jnp.cos, x)


def read(fn, *args):
    traced = trace(fn, args, {}, MESH, [])
    module = traced.module()
    return traced, Reading(dict(MESH.shape), {}).read(module, len(traced.given))


def test_every_number_is_that_of_an_equation_inside_the_ones_before():
    traced, reading = read(jax.grad(lambda x, w: deep(x, w).sum()), struct(MESH, "b/dp d"), struct(MESH, "d e/tp"))
    names = {tuple(traced.equations[i].primitive.name for i in number) for number in reading.places}
    assert any(one[-1] == "dot_general" and "scan" in one for one in names)
    assert any(one[-1] == "tanh" and "cond" in one for one in names)
    assert any(one[-1] in ("sin", "cos") and "scan" in one for one in names)


def test_the_numbered_program_is_the_program():
    x, w = np.ones((16, 32), np.float32), np.ones((32, 32), np.float32)
    traced = trace(deep, (x, w), {}, MESH, [])
    traced.module()
    got = jax.jit(lambda *args: jax.extend.core.jaxpr_as_fun(traced.jaxpr)(*args)[0])(x, w)
    np.testing.assert_allclose(got, deep(x, w), rtol=1e-6)


def test_constraints_reach_a_result_and_an_input():
    def product(x, w):
        return jnp.sin(x @ w) * 2

    traced = trace(product, (struct(MESH, "b d"), struct(MESH, "d e")), {}, MESH, [])
    traced.module()  # which numbers the equations
    wanted = spmd.Layout("b/dp e").sharding(MESH)
    asked = traced.module({id(eqn): {0: wanted} for eqn in traced.equations if eqn.primitive.name == "dot_general"})
    [place] = Reading(dict(MESH.shape), {}).read(asked, 2).results
    assert [axis.name for axis in place.dims[0]] == ["dp"]
    asked = traced.module({None: {1: spmd.Layout("d e/tp").sharding(MESH)}})
    [place] = Reading(dict(MESH.shape), {}).read(asked, 2).results
    assert [axis.name for axis in place.dims[1]] == ["tp"]


def test_arguments_that_nobody_uses_keep_their_numbers():
    traced, reading = read(lambda x, unused, w: x @ w, *(struct(MESH, one) for one in ("b/dp d", "b", "d e/tp")))
    assert [len(place.dims) for place in reading.inputs] == [2, 1, 2] and len(traced.given) == 3
