"""Programs that `propagate` refuses."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from tests.errors.registry import X, bad, fixed

bad(
    layouts_of_fewer_arrays=lambda mesh: spmd.propagate(jnp.add, X, X, mesh=mesh, layouts="b/dp d"),
    a_plan_without_a_mesh=lambda mesh: spmd.propagate(jnp.sin, X),
    a_plan_of_what_was_traced=lambda mesh: spmd.propagate(jax.jit(jnp.sin).trace(X)),
)


@bad
def a_plan_on_another_mesh(mesh):
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=spmd.Layout("b/dp d").sharding(mesh))
    spmd.propagate(jnp.sin, x, mesh=spmd.make_mesh(dp=8))


def column_sums(mesh):
    return spmd.kernel("b/dp d -> d", mesh=mesh)(lambda x: spmd.reduce(x, "b/dp d -> d", "sum"))


bad(
    a_budget_of_the_plan_of_a_kernel=lambda mesh: spmd.testing.assert_collectives(
        column_sums(mesh), (X,), {"psum": 1}, view="planned"
    ),
)


@fixed
def a_budget_of_the_plan_of_a_kernel_fixed(mesh, fix):
    spmd.testing.assert_collectives(column_sums(mesh), (X,), {"psum": 1}, **fix())
    return column_sums(mesh)(X), X.sum(0)


@bad
def a_plan_of_a_callback(mesh):
    abstract = spmd.make_mesh(dp=2, tp=4, abstract=True)
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=spmd.Layout("b/dp d").sharding(abstract))
    spmd.propagate(lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((8, 4), "float32"), x), x)


@bad
def a_factorisation_to_freeze(mesh):
    x = jax.ShapeDtypeStruct((8, 4, 4), "float32", sharding=spmd.Layout("b/dp d d2").sharding(mesh))
    spmd.propagate(lambda x: jnp.linalg.cholesky(x), x).freeze()


@bad
def an_uneven_dimension_to_freeze(mesh):
    x = jax.ShapeDtypeStruct((8,), "float32")
    spmd.propagate(jnp.polyint, x, mesh=mesh, layouts="d/tp").freeze()


@bad
def arrays_that_lie_differently_to_freeze(mesh):
    structs = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    spmd.propagate(jnp.nextafter, *structs, mesh=mesh, layouts="b/dp d, b d/tp").freeze()


@bad
def a_loop_over_a_divided_dimension_to_freeze(mesh):
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=spmd.Layout("b/dp d").sharding(mesh))
    spmd.propagate(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.cumprod(x, 0), x), x).freeze()


@bad
def an_update_that_is_no_sum_from_zero_to_freeze(mesh):
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=spmd.Layout("b/dp d").sharding(mesh))
    spmd.propagate(lambda x: jnp.ones((4, 4)).at[x[:, 0].astype(int)].add(x), x).freeze()


@bad
def a_large_constant_to_freeze(mesh):
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=spmd.Layout("b/dp d").sharding(mesh))
    spmd.propagate(lambda x: x * jnp.asarray(np.arange(8.0)[:, None], "float32"), x).freeze()
