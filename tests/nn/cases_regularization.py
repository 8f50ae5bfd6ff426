"""Dropout, whose mask is that of the whole array."""

import jax
import jax.numpy as jnp

import spmd
from spmd import nn
from tests.layers import LayerCase, cases, fit, placements


@cases("dropout", draw=2)
def _():
    """The mask of the whole array, in a function of its own, which knows no sizes of the kernel."""

    def make(rng, shapes):
        return rng.normal(size=shapes[0]).astype("f4"), jax.random.key(5)

    for mesh, axes in placements("dp", "sp", "tp"):
        yield LayerCase(
            name="dropout",
            fn=lambda axes: spmd.scope(lambda x, key: nn.dropout(x, key, "b/dp s/sp d/tp", rate=0.25, **axes)),
            ins=("b/dp s/sp d/tp", "scalar"),
            outs="b/dp s/sp d/tp",
            shapes=fit(mesh, axes, b=(3, "dp"), s=(5, "sp"), d=(7, "tp")),
            mesh=mesh,
            axes=axes,
            reference=lambda x, key: jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0),
            forward=lambda c: {},
            backward=lambda c: {},
            make=make,
        )
