"""What is done to a piece and undone again raises no alarm; what stays done, or is undone elsewhere, does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

X = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
half = lambda z: z[: len(z) // 2]


def put_back(x, order, y):
    return jnp.zeros_like(x).at[order].set(y)


def row_by_row(x, row):
    return lax.fori_loop(0, len(x), lambda i, y: y.at[i].set(row(x, i, y)), jnp.zeros_like(x))


def counted(x):
    """Two numbers of each row, from an integer loop around."""
    order = jnp.argsort(x[:, 0])
    return jnp.tanh(x[order] * 2.0), order


UNDONE = {
    "joined and cut": lambda x: half(jnp.tanh(jnp.concatenate([x, x * 2.0]))),
    "joined, and cut in two": lambda x: sum(jnp.split(jnp.concatenate([x, x * 2.0]) @ jnp.eye(6), 2)),
    "joined and cut in a jit": lambda x: half(jax.jit(lambda z: jax.nn.softmax(z, axis=1))(jnp.concatenate([x, x]))),
    "joined and cut through a reshape": lambda x: half(jnp.concatenate([x, x]).reshape(-1, 2, 3).sum(1).repeat(2, 1)),
    "padded and cut": lambda x: jnp.tanh(jnp.pad(x, ((1, 2), (0, 0))))[1:-2],
    "sorted and put back": lambda x: put_back(x, counted(x)[1], counted(x)[0]),
    "sorted and taken back": lambda x: counted(x)[0][jnp.argsort(counted(x)[1])],
    "sorted and summed": lambda x: x * lax.psum(jax.ops.segment_sum(counted(x)[0], counted(x)[1] % 1, 1), "tp"),
    "taken and put": lambda x: row_by_row(x, lambda x, i, y: jnp.sin(x[i])),
    "taken and put in pairs": lambda x: lax.fori_loop(
        0,
        len(x) // 2,
        lambda i, y: lax.dynamic_update_slice(y, jnp.cos(lax.dynamic_slice(x, (2 * i, 0), (2, 6))), (2 * i, 0)),
        x * 0.0,
    ),
}
NOT_UNDONE = {
    "cut elsewhere": lambda x: jnp.concatenate([x, x * 2.0])[1 : 1 + len(x)],
    "added up between": lambda x: half(jnp.cumsum(jnp.concatenate([x, x * 2.0]), axis=0)),
    "averaged between": lambda x: half(jnp.concatenate([x, x]) - jnp.concatenate([x, x]).mean(0, keepdims=True)),
    "turned between": lambda x: half(jnp.flip(jnp.concatenate([x, x * 2.0]), 0)),
    "cut, and a stencil": lambda x: jnp.pad(x, ((1, 1), (0, 0)))[1:-1] + jnp.pad(x, ((1, 1), (0, 0)))[2:],
    "padded before, cut behind": lambda x: jnp.tanh(jnp.pad(x, ((1, 1), (0, 0))))[:-2],
    "sorted": lambda x: counted(x)[0],
    "put back after a sum": lambda x: put_back(x, counted(x)[1], jnp.cumsum(counted(x)[0], axis=0)),
    "put back in another order": lambda x: put_back(x, jnp.argsort(x[:, 1], stable=False), counted(x)[0]),
    "added up behind": lambda x: jnp.cumsum(half(jnp.concatenate([x, x * 2.0])), axis=0),
    "put back, and used as it is": lambda x: put_back(x, counted(x)[1], counted(x)[0]) + counted(x)[0],
    "put elsewhere": lambda x: row_by_row(x, lambda x, i, y: jnp.sin(x[i - 1])),
    "with the one before": lambda x: row_by_row(x, lambda x, i, y: x[i] + y[i - 1]),
}


def kernel(body):
    return spmd.kernel("n/tp d -> n/tp d", mesh=spmd.make_mesh(dp=2, tp=4))(body)


def raw(body):
    return jax.shard_map(body, mesh=spmd.make_mesh(dp=2, tp=4), in_specs=jax.P("tp"), out_specs=jax.P("tp"))


def alone(body):
    return spmd.kernel("n/tp d -> n/tp d", mesh=spmd.make_mesh(dp=1, tp=1))(body)(X)


@pytest.mark.parametrize("name", UNDONE)
def test_what_is_undone(name):
    body = UNDONE[name]
    assert not spmd.check(kernel(body), X) and not spmd.check(raw(body), X)
    np.testing.assert_allclose(kernel(body)(X), alone(body), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NOT_UNDONE)
def test_what_is_not_undone(name):
    body = NOT_UNDONE[name]
    assert [one.kind for one in spmd.check(kernel(body), X)][:1] == ["pending"]
    unchecked = jax.jit(raw(body))(X)
    assert not np.allclose(unchecked, jax.jit(raw_alone(body))(X), atol=1e-3)


def raw_alone(body):
    return jax.shard_map(body, mesh=spmd.make_mesh(dp=1, tp=1), in_specs=jax.P("tp"), out_specs=jax.P("tp"))
