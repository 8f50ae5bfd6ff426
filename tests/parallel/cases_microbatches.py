"""Gradients accumulated over micro-batches."""

import jax
import jax.numpy as jnp

import spmd
from spmd import einsum, parallel
from tests.layers import LayerCase, cases, fit, placements, total
from tests.parallel.cases_weights import bound, data_of


@cases("accumulate", draw=1)
def _():
    """The gradient is the result here; differentiated once more it would move what its own transposes move."""
    for mesh, axes in placements("rp", "fs"):
        if not data_of(axes):
            continue
        yield LayerCase(
            name="accumulate",
            fn=lambda axes: lambda x, w: jax.lax.stop_gradient(accumulated(axes, x, w)),
            ins=("m b/rp/fs d", "d/fs f"),
            outs="d/fs f",
            shapes=fit(mesh, axes, b=(3, "rp", "fs"), d=(5, "fs"), f=(7,), m=(4,)),
            mesh=mesh,
            axes=axes,
            reference=lambda x, w: jax.lax.stop_gradient(
                jax.grad(lambda w: (jnp.tanh(x.reshape(-1, w.shape[0]) @ w) ** 2).mean())(w)
            ),
            forward=lambda c: total(
                c.traffic("all_gather", "fs", "d f"),
                c.traffic("psum_scatter", "fs", "d f"),
                c.traffic("psum", "rp", "d/fs f"),
                c.traffic("psum", ("rp", "fs"), "1"),
            ),
            backward=lambda c: {},
            dtypes=("float32",),
        )


def accumulated(axes, x, w):
    data = data_of(axes)
    left = f"{{U:{','.join(data)}}}"

    def loss(w, x):
        y = jnp.tanh(einsum(x, w, "... d, d f -> ... f")) ** 2
        count = spmd.reduce(jnp.ones_like(y), f"{bound(axes, 'b/rp/fs')[0]} f -> {left}")
        return spmd.reduce(y, f"{bound(axes, 'b/rp/fs')[0]} f -> {left}"), count

    rest, use = bound(axes, "d/fs f", "d f")
    return parallel.accumulate(loss, w, x, at_rest=rest, compute=use, data=data, mean=True)[1]
