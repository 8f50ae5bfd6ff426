"""Random numbers of each device: when they are meant, and what is tested instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd

X = jax.ShapeDtypeStruct((8, 3), "float32")


def folded(*axes):
    key = jax.random.key(3)
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


def found(body, pattern="b/dp d -> b/dp e", x=X):
    return spmd.check(spmd.kernel(pattern, mesh=spmd.make_mesh(dp=4, tp=2), check="off")(body), x)


def dropout(x, *axes):
    return jnp.where(jax.random.bernoulli(folded(*axes), 0.5, x.shape), 2 * x, 0.0)


@jax.jit
def shared(x, key):
    return x + jax.random.normal(key, x.shape)


def rows(x):
    keys = jax.random.split(folded("dp"), x.shape[0])
    return lax.map(lambda row_key: row_key[0] + jax.random.normal(row_key[1], (3,)), (x, keys))


def one_copy(x):
    """Of copies along tp, made equal."""
    return lax.pmean(x, "tp")


MEANT = {
    "of each device's own rows": lambda x: x + jax.random.normal(folded("dp"), x.shape),
    "of each row of a loop": rows,
    "of a dropout": lambda x: dropout(x, "dp"),
    "of a dropout beside another choice": lambda x: jnp.where(dropout(x, "dp") > 0, jnp.ones(x.shape), 0.0),
    "of two layers": lambda x: shared(shared(x, folded("dp")), jax.random.fold_in(folded("dp"), 1)),
    "times equal weights": lambda x: x + jax.random.normal(folded("dp"), x.shape) * jnp.arange(3.0)[None],
    "of each row": lambda x: x * jax.random.normal(folded("dp"), (x.shape[0], 1)),
    "by a product": lambda x: jnp.einsum("bd,bd->b", x, jax.random.normal(folded("dp"), x.shape))[:, None],
    "that leave the body": lambda x: jax.random.normal(folded("dp"), x.shape),
}
WRONG = {
    "of one key": lambda x: x + jax.random.normal(folded(), x.shape),
    "of one key beside those of each device": lambda x: shared(shared(x, folded("dp")), folded()),
    "of one key beside those of one device": lambda x: shared(x + spmd.random.normal(folded(), "b/dp 3"), folded()),
    "of copies along tp alone": lambda x: one_copy(x + jax.random.normal(folded("tp"), x.shape)),
    "of copies along tp": lambda x: one_copy(x + jax.random.normal(folded("dp", "tp"), x.shape)),
    "of copies in a dropout": lambda x: one_copy(dropout(x, "dp", "tp")),
    "one row for a whole block": lambda x: x + jax.random.normal(folded("dp"), (1, 3)),
    "one number for a whole block": lambda x: x * jax.random.normal(folded("dp"), ()),
    "a matrix for each block": lambda x: x @ jax.random.normal(folded("dp"), (3, 3)),
    "of copies in the second layer": lambda x: one_copy(dropout(dropout(x, "dp"), "dp", "tp")),
}
QUIET = "with one number in place of all random ones, which depend on the mesh"


@pytest.mark.parametrize("name", MEANT)
def test_numbers_are_meant_for_own_blocks(name):
    told = found(MEANT[name])
    assert told.verdict.kind == "tested" and QUIET in str(told.verdict), told.verdict


@pytest.mark.parametrize("name", WRONG)
def test_numbers_are_not_meant(name):
    told = found(WRONG[name])
    assert told.verdict.kind == "wrong" and {one.kind for one in told} <= {"noise", "numbers", "copies"}, told


def test_blocks_along_two_axes_have_numbers_along_both():
    both = lambda *axes: lambda x: x + jax.random.normal(folded(*axes), x.shape)
    struct = jax.ShapeDtypeStruct((8, 4), "float32")
    assert found(both("dp", "tp"), "b/dp d/tp -> b/dp d/tp", struct).verdict.kind == "tested"
    assert found(both("dp"), "b/dp d/tp -> b/dp d/tp", struct).verdict.kind == "wrong"


def test_copies_with_other_numbers_are_found():
    """The sizes of a block do not tell: the noise has as many rows as the weights have columns on a device."""

    def body(x, w, v):
        y = lax.psum(jax.nn.relu(x @ w) @ v, "tp")
        return lax.pmean(dropout(y, "dp", "tp"), "tp")

    kernel = spmd.kernel("b/dp d, d h/tp, h/tp d -> b/dp d", mesh=spmd.make_mesh(dp=2, tp=4), check="off")(body)
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 6), (6, 8), (8, 6))]
    assert [one.kind for one in spmd.check(kernel, *args)] == ["numbers"]


def test_noise_that_is_that_of_one_device_hides_no_mistake():
    """The key is folded with the position in the whole array. So its numbers do not depend on the mesh."""

    def estimate(weights):
        @spmd.kernel("m, scalar -> scalar", mesh=spmd.make_mesh(dp=4))
        def gradient(w, key):
            at = spmd.iota("m/dp")
            noise = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(at)
            return lax.psum((weights(w, at) * noise).sum(), "dp")

        return spmd.check(gradient, jnp.arange(8.0), jax.random.key(0)).verdict

    assert estimate(lambda w, at: w[at]).kind == "tested"
    assert estimate(lambda w, at: jnp.roll(w, at.shape[0])[at]).kind == "wrong"
