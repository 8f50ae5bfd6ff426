"""Random numbers of each device: when they are meant, and what is tested instead."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd
from spmd.checker import Trial
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._numbers import Difference
from spmd.checker._verdict import but_for_noise, is_meant

X = jax.ShapeDtypeStruct((8, 3), "float32")


def folded(*axes):
    key = jax.random.key(3)
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


def walked(body, spec=("dp",)):
    """The walk over a body whose argument is divided so."""
    mesh = spmd.make_mesh(dp=4, tp=2)
    run = jax.shard_map(body, mesh=mesh, in_specs=jax.P(*spec), out_specs=jax.P(("dp", "tp")))
    walk = Dataflow("", ("dp", "tp"))
    walk_closed(walk, jax.make_jaxpr(run)(X if len(spec) == 1 else jax.ShapeDtypeStruct((8, 4), "float32")))
    return walk


def dropout(x, *axes):
    return jnp.where(jax.random.bernoulli(folded(*axes), 0.5, x.shape), 2 * x, 0.0)


@jax.jit
def shared(x, key):
    return x + jax.random.normal(key, x.shape)


def rows(x):
    keys = jax.random.split(folded("dp"), x.shape[0])
    return lax.map(lambda row_key: row_key[0] + jax.random.normal(row_key[1], (3,)), (x, keys))


MEANT = {
    "of each device's own rows": lambda x: x + jax.random.normal(folded("dp"), (2, 3)),
    "of each row of a loop": rows,
    "of a dropout": lambda x: dropout(x, "dp"),
    "of a dropout beside another choice": lambda x: jnp.where(dropout(x, "dp") > 0, jnp.ones(x.shape), 0.0),
    "of two layers": lambda x: shared(shared(x, folded("dp")), jax.random.fold_in(folded("dp"), 1)),
    "times equal weights": lambda x: x + jax.random.normal(folded("dp"), (2, 3)) * jnp.arange(3.0)[None],
    "of each row": lambda x: x * jax.random.normal(folded("dp"), (2, 1)),
    "by a product": lambda x: jnp.einsum("bd,bd->b", x, jax.random.normal(folded("dp"), (2, 3)))[:, None],
    "that leave the body": lambda x: jax.random.normal(folded("dp"), (2, 3)),
}
WRONG = {
    "of one key": lambda x: x + jax.random.normal(folded(), (2, 3)),
    "of copies along tp alone": lambda x: x + jax.random.normal(folded("tp"), (2, 3)),
    "of copies along tp": lambda x: x + jax.random.normal(folded("dp", "tp"), (2, 3)),
    "of copies in a dropout": lambda x: dropout(x, "dp", "tp"),
    "one row for a whole block": lambda x: x + jax.random.normal(folded("dp"), (1, 3)),
    "one number for a whole block": lambda x: x * jax.random.normal(folded("dp"), ()),
    "a matrix for each block": lambda x: x @ jax.random.normal(folded("dp"), (3, 3)),
    "of copies in the second layer": lambda x: dropout(dropout(x, "dp"), "dp", "tp"),
}


@pytest.mark.parametrize("name", MEANT)
def test_numbers_are_meant_for_own_blocks(name):
    assert is_meant(walked(MEANT[name]))


@pytest.mark.parametrize("name", WRONG)
def test_numbers_are_not_meant(name):
    assert not is_meant(walked(WRONG[name]))


def test_blocks_along_two_axes_have_numbers_along_both():
    both = lambda x, *axes: x + jax.random.normal(folded(*axes), (2, 2))
    assert is_meant(walked(lambda x: both(x, "dp", "tp"), ("dp", "tp")))
    assert not is_meant(walked(lambda x: both(x, "dp"), ("dp", "tp")))


def test_what_is_meant_is_tried_without_noise():
    meant, wrong = walked(MEANT["of a dropout"]), walked(WRONG["of copies in a dropout"])
    sizes = {"dp": 4, "tp": 2}
    trial, quiet = Trial(sizes, (Difference((), "", ""),)), Trial(sizes, quiet=True)
    assert but_for_noise(trial, meant).why.startswith("its random numbers depend on the mesh")
    assert but_for_noise(replace(trial, quieted=lambda: quiet), meant) is quiet
    assert but_for_noise(replace(trial, quieted=lambda: quiet), wrong).wrong
    agrees = Trial(sizes)
    assert but_for_noise(agrees, meant) is agrees


def test_copies_with_other_numbers_are_found():
    """The sizes of a block do not tell: the noise has as many rows as the weights have columns on a device."""

    def body(x, w, v):
        y = lax.psum(jax.nn.relu(x @ w) @ v, "tp")
        return lax.pmean(dropout(y, "dp", "tp"), "tp")

    kernel = spmd.kernel("b/dp d, d h/tp, h/tp d -> b/dp d", mesh=spmd.make_mesh(dp=2, tp=4), check="off")(body)
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 6), (6, 8), (8, 6))]
    assert [one.kind for one in spmd.check(kernel, *args)] == ["numbers"]
