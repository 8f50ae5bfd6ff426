"""Slices, lookups and updates along whole dimensions: equal numbers, and no byte more than the plan says."""

import functools

import jax
import jax.numpy as jnp
import pytest

from spmd import propagate
from spmd.errors import SpmdError
from spmd.propagation._lookups import RULES
from tests.propagation.frozen import compare, enter
from tests.propagation.programs import struct
from tests.sampler import share

PROGRAMS = {}
entered = functools.partial(enter, PROGRAMS)


@entered("v d, b/dp s, d f/tp", "float32 int32 float32")
def embedding(table, ids, w):
    return jnp.take(table, ids, axis=0) @ w


@entered("v d, b/dp s", "float32 int32")
def embedding_gradient(table, ids):
    return jax.grad(lambda t: (jnp.take(t, ids, axis=0) ** 2).sum())(table)


@entered("b/dp d, b/dp s", "float32 int32")
def along_an_axis(x, at):
    return jnp.take_along_axis(x, at, axis=1)


@entered("b/dp d, b/dp s", "float32 int32")
def along_an_axis_gradient(x, at):
    return jax.grad(lambda x: (jnp.take_along_axis(x, at, axis=1) ** 3).sum())(x)


@entered("d f/tp, n", "float32 int32")
def rows_that_are_set(x, at):
    return x.at[at].set(jnp.tanh(x[at]), mode="drop").at[:, :].multiply(2.0)


@entered("b/dp d e, b/dp d e")
def pieces(x, y):
    x = jnp.concatenate([x[:, ::2], jnp.flip(y, 2), jnp.pad(x[:, 1:3], ((0, 0), (1, 0), (0, 0)))], axis=1)
    return jnp.clip(x, -1.0, 1.0) % 0.3


@entered("b/dp d, n", "float32 int32")
def moved_by_numbers(x, i):
    piece = jax.lax.dynamic_slice_in_dim(x, i[0], 4, 1)
    return jax.lax.dynamic_update_slice_in_dim(x, 2 * piece, i[1], 1)


@entered("b/dp d, b/dp d")
def cumulated(x, y):
    return jnp.cumsum(x, 1) + jax.lax.cummax(y, 1, reverse=True)


@entered("b/dp d f/tp")
def cumulated_gradient(x):
    return jax.grad(lambda x: (jnp.cumsum(x, 1) ** 2).sum())(x)


@entered("v/tp d, b/dp s", "float32 int32")
def rows_of_a_divided_table(table, ids):
    return jnp.tanh(table[ids]), jnp.take(table, ids - 2, axis=0, mode="clip")


@entered("v/tp d, b/dp s", "float32 int32")
def rows_of_a_divided_table_gradient(table, ids):
    return jax.grad(lambda t: (t[ids] ** 2).sum())(table)


@entered("b/dp d/tp e, n, n e, n", "float32 int32 float32 uint32")
def elements_of_a_divided_array(x, at, new, other):
    x = x.at[at, other].add(new).at[at[::-1], -1].set(new, mode="drop", unique_indices=True)
    return jax.lax.fori_loop(0, 3, lambda i, x: x.at[2 * i].set(1.0).at[:, i].multiply(2.0), x)


@entered("b d/tp")
def largest_of_a_divided_dimension(x):
    return jax.lax.top_k(x, 2)


@entered("b/tp d/dp")
def sorted_along_a_divided_dimension_gradient(x):
    return jax.grad(lambda x: (jnp.sort(x, 0) ** 3).sum())(x)


@entered("b/dp d, b/dp d")
def cumulated_over_devices(x, y):
    return jnp.cumsum(x, 0) + jax.lax.cumsum(y, 0, reverse=True)


@entered("b/dp/tp d f")
def turned_round(x):
    return jnp.flip(x, (0, 1))


@entered("n/dp h b s", "float32")
def convolved_pooled_and_sorted_out(x):
    window = lambda x, start, by: jax.lax.reduce_window(x, start, by, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def loss(x):
        spread = jax.lax.conv(x, jnp.ones((x.shape[1], x.shape[1], 1, 1), x.dtype), (1, 1), "SAME")
        return jax.lax.top_k(jnp.fft.fft(window(spread, -jnp.inf, jax.lax.max)).real ** 2, 2)[0].sum()

    return jax.grad(loss)(x)


@pytest.mark.parametrize("name", share(PROGRAMS))
def test_a_program(mesh, name):
    sent, auto = compare(PROGRAMS[name], mesh)
    assert sent <= auto


def test_each_rule_has_a_program(mesh):
    found = "".join(str(propagate(fn, *args).reading.module) for fn, args in (p.make(mesh) for p in PROGRAMS.values()))
    assert [name for name in RULES if name not in found] == []


@pytest.mark.parametrize(
    ("fn", "layouts", "told"),
    [
        (lambda x, y: x[:4].at[y.astype(int)[:, 0]].add(y), ("v d", "b/dp d"), "that is not a sum from zero"),
        (lambda x, y: x[:2].at[y.astype(int)[:, 0]].max(y), ("v d", "b/dp d"), "that is not a sum from zero"),
    ],
)
def test_what_is_refused(mesh, fn, layouts, told):
    args = [struct(mesh, one) for one in layouts]
    with pytest.raises(SpmdError, match=told):
        propagate(fn, *args).freeze()
