"""Copies that leave a kernel, or are carried in a loop, where another use of them pays for an invarying gather."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from tests.errors.registry import V, X, bad, body, fixed

W = X.T @ X


@bad
def weight_leaves_that_is_used_by_divided_data(mesh):
    def fn(x, w):
        w = spmd.all_gather(w, "d/tp f -> d f")
        return x @ w, w

    body("b/tp d, d/tp f -> b/tp f, d f", fn, mesh, X, W)


@fixed
def weight_leaves_that_is_used_by_divided_data_fixed(mesh, fix):
    def paying(x, w):
        w = fix(x=w)
        return x @ w, w

    def gathering_once_more(x, w):
        whole = spmd.all_gather(w, "d/tp f -> d f")
        return x @ whole, fix(x=w)

    for fn in (paying, gathering_once_more):
        y, w = body("b/tp d, d/tp f -> b/tp f, d f", fn, mesh, X, W)
        np.testing.assert_allclose(y, X @ W)
        np.testing.assert_array_equal(w, W)


@bad
def copy_used_in_each_step_of_a_loop(mesh):
    def fn(x, y):
        whole = spmd.all_gather(x, "s/dp -> s")
        scaled, _ = jax.lax.scan(lambda y, _: (y * whole[0], None), y, None, length=9)
        return whole, scaled

    body("s/dp, b/dp -> s, b/dp", fn, mesh, V, V)


@fixed
def copy_used_in_each_step_of_a_loop_fixed(mesh, fix):
    def fn(x, y):
        whole = fix(x=x)
        scaled, _ = jax.lax.scan(lambda y, _: (y * whole[0], None), y, None, length=9)
        return whole, scaled

    np.testing.assert_array_equal(body("s/dp, b/dp -> s, b/dp", fn, mesh, V + 1, V)[1], V)


@bad
def carried_copy_used_by_divided_data(mesh):
    def fn(x, y):
        def step(total, _):
            total = total + spmd.all_gather(x, "s/tp -> s")
            return total, jnp.outer(total, y)

        return jax.lax.scan(step, jnp.zeros(8), None, length=3)

    body("s/tp, b/tp -> s, n s b/tp", fn, mesh, V, V)


@fixed
def carried_copy_used_by_divided_data_fixed(mesh):
    def fn(x, y):
        def step(total, _):
            total = total + spmd.all_gather(x, "s/tp -> s", to="invarying")
            return total, jnp.outer(total, y)

        return jax.lax.scan(step, jnp.zeros(8), None, length=3)

    total, products = body("s/tp, b/tp -> s, n s b/tp", fn, mesh, V, V)
    np.testing.assert_array_equal(total, 3 * V)
    np.testing.assert_array_equal(products[1], np.outer(2 * V, V))
