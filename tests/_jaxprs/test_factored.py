"""Programs in groups of an axis, over a mesh with two axes in its place: the same numbers, from the same equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import spmd
from spmd._jaxprs.factored import expanded, factors_of, in_factors, name_of, sizes_of

X = jnp.sin(jnp.arange(128.0)).reshape(16, 8)
UNTYPED = {"check_" + "vma": False}
NEAR, FAR = (
    {2: [[0, 1], [2, 3], [4, 5], [6, 7]], 4: [[0, 1, 2, 3], [4, 5, 6, 7]]},
    {
        2: [[0, 2, 4, 6], [1, 3, 5, 7]],
        4: [[0, 4], [1, 5], [2, 6], [3, 7]],
    },
)


def traced(body, out=P("a"), size=8):
    mesh = spmd.make_mesh(a=size)
    fn = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=out, **UNTYPED))
    return fn, jax.make_jaxpr(fn)(X)


BODIES = {
    "psum": lambda x, near, far: lax.psum(x, "a", axis_index_groups=near) - lax.psum(x, "a", axis_index_groups=far),
    "all_gather": lambda x, near, far: lax.all_gather(x, "a", axis_index_groups=far, tiled=True),
    "psum_scatter": lambda x, near, far: lax.psum_scatter(
        x, "a", axis_index_groups=near, scatter_dimension=1, tiled=True
    ),
    "all_to_all": lambda x, near, far: lax.all_to_all(x, "a", 1, 0, axis_index_groups=near, tiled=True),
    "in_a_loop": lambda x, near, far: lax.fori_loop(
        0, 3, lambda i, y: y + lax.pmax(y, "a", axis_index_groups=near) * lax.psum(y, "a"), x
    ),
    "beside_others": lambda x, near, far: lax.ppermute(
        lax.psum(x, "a", axis_index_groups=far), "a", [(i, (i + 1) % 8) for i in range(8)]
    ),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", BODIES)
def test_it_computes_the_same(name, size):
    body = BODIES[name]
    fn, jaxpr = traced(lambda x: body(x, NEAR[size], FAR[size]))
    factors = factors_of(jaxpr, {"a": 8})
    assert factors == {"a": (8 // size, size)}
    made = in_factors(jaxpr, factors)
    assert "axis_index_groups=None" in str(made) and "[[" not in str(made).replace(" ", "")
    mesh = spmd.make_mesh(**sizes_of({"a": 8}, factors))
    with jax.set_mesh(mesh):
        [got] = jax.jit(jaxpr_as_fun(made))(jax.device_put(X, jax.NamedSharding(mesh, P())))
    np.testing.assert_allclose(got, fn(X), rtol=1e-5)


def test_other_groups_have_no_factors():
    _, jaxpr = traced(lambda x: lax.psum(x, "a", axis_index_groups=[[0, 3, 5, 6], [1, 2, 4, 7]]))
    assert factors_of(jaxpr, {"a": 8}) == {}
    both = lambda x: lax.psum(lax.psum(x, "a", axis_index_groups=NEAR[2]), "a", axis_index_groups=NEAR[4])
    assert factors_of(traced(both)[1], {"a": 8}) == {}
    assert factors_of(traced(lambda x: lax.psum(x, "a"))[1], {"a": 8}) == {}


def test_names_and_sizes():
    factors = {"b": (2, 3)}
    assert expanded(("a", "b"), factors) == ("a", "b0", "b1") and name_of("b", 1) == "b1"
    assert sizes_of({"a": 5, "b": 6, "c": 7}, factors) == {"a": 5, "b0": 2, "b1": 3, "c": 7}
