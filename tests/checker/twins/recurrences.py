"""Recurrences over a divided sequence: each block starts anew."""

import jax.numpy as jnp
from jax import lax

import spmd
from spmd import all_gather, split
from tests.checker.twins.registry import wrong

STREAM = "b/dp s/tp d -> b/dp s/tp d"


def along(step, x, start):
    """A scan along the sequence, which is dimension 1."""
    return lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def smooth(h, x):
    h = 0.9 * h + 0.1 * x
    return h, h


def cell(h, x):
    h = jnp.tanh(0.5 * h + x)
    return h, h


@wrong(STREAM)
def moving_average(x):
    return lax.scan(smooth, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)  # wrong: pending


@moving_average.right
def _(x):
    full = all_gather(x, "b/dp s/tp d -> b/dp s d")
    return split(along(smooth, full, jnp.zeros_like(full[:, 0])), "b/dp s d -> b/dp s/tp d")


moving_average.whole(lambda x: along(smooth, x, jnp.zeros_like(x[:, 0])))


@wrong(STREAM)
def recurrent_cell(x):
    return lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)  # wrong: pending


@recurrent_cell.right
def _(x):
    """One device after the other, the state goes along."""
    n, place = lax.axis_size("tp"), lax.axis_index("tp")
    out, state = jnp.zeros_like(x), jnp.zeros_like(x[:, 0])
    for turn in range(n):
        mine = along(cell, x, state)
        out = jnp.where(place == turn, mine, out)
        state = lax.ppermute(mine[:, -1], "tp", [(i, i + 1) for i in range(n - 1)])
    return out


recurrent_cell.whole(lambda x: along(cell, x, jnp.zeros_like(x[:, 0])))


@wrong(STREAM)
def prefix_products(x):
    return lax.associative_scan(jnp.multiply, 1.0 + 0.1 * x, axis=1)  # wrong: pending


@prefix_products.right
def _(x):
    full = lax.all_gather(1.0 + 0.1 * x, "tp", axis=1, tiled=True)
    full = lax.associative_scan(jnp.multiply, full, axis=1)
    return lax.dynamic_slice_in_dim(full, lax.axis_index("tp") * x.shape[1], x.shape[1], axis=1)


prefix_products.whole(lambda x: lax.associative_scan(jnp.multiply, 1.0 + 0.1 * x, axis=1))


@wrong(STREAM)
def running_maximum(x):
    return lax.cummax(x, axis=1)  # wrong: pending


@running_maximum.right
def _(x):
    full = lax.cummax(all_gather(x, "b/dp s/tp d -> b/dp s d"), axis=1)
    return split(full, "b/dp s d -> b/dp s/tp d")


running_maximum.whole(lambda x: lax.cummax(x, axis=1))


@wrong(STREAM)
def linear_attention(x):
    """The state that each token reads is a prefix sum."""
    state = jnp.einsum("bsd,bse->bsde", x, x).cumsum(1)  # wrong: pending
    return jnp.einsum("bsd,bsde->bse", x, state)


@linear_attention.right
def _(x):
    """Two passes: each block's own sums, and what comes before it."""
    outer = jnp.einsum("bsd,bse->bsde", x, x)
    totals = lax.all_gather(outer.sum(1), "tp")
    earlier = jnp.arange(lax.axis_size("tp")) < lax.axis_index("tp")
    before = jnp.where(earlier[:, None, None, None], totals, 0.0).sum(0)
    return jnp.einsum("bsd,bsde->bse", x, outer.cumsum(1) + before[:, None])


linear_attention.whole(lambda x: jnp.einsum("bsd,bsde->bse", x, jnp.einsum("bsd,bse->bsde", x, x).cumsum(1)))


@wrong("b/dp n/tp -> b/dp n/tp")
def distribution_function(x):
    """A divided histogram is summed up within each block."""
    p = jnp.exp(x)
    return p.cumsum(-1) / lax.psum(p.sum(-1, keepdims=True), "tp")  # wrong: pending


@distribution_function.right
def _(x):
    p = jnp.exp(x)
    return spmd.cumsum(p, "b/dp [n/tp]") / lax.psum(p.sum(-1, keepdims=True), "tp")


@distribution_function.whole
def _(x):
    p = jnp.exp(x)
    return p.cumsum(-1) / p.sum(-1, keepdims=True)


@wrong("b/dp s/tp d -> b/dp d", unseen="a sum of what each block's loop has left may be meant")
def last_state(x):
    """Each block's last state, added up."""
    last = lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0]  # wrong: pending
    return lax.psum(last, "tp")


@last_state.right
def _(x):
    full = all_gather(x, "b/dp s/tp d -> b/dp s d", to="invarying")
    return lax.scan(cell, jnp.zeros_like(full[:, 0]), full.swapaxes(0, 1))[0]


last_state.whole(lambda x: lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0])
