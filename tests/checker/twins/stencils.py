"""Stencils: without the neighbours' values, with those of the wrong side, or with too few."""

import jax.numpy as jnp
from jax import lax

from spmd import iota
from spmd.stencil import halo
from tests.checker.twins.registry import wrong

LINE = "b/dp n/tp -> b/dp n/tp"


def forward(n):
    return [(i, (i + 1) % n) for i in range(n)]


def backward(n):
    return [(i, (i - 1) % n) for i in range(n)]


def laplace(u):
    return jnp.roll(u, 1, 1) - 2 * u + jnp.roll(u, -1, 1)


@wrong(LINE)
def laplacian_without_a_halo(u):
    """Each block is periodic by itself."""
    return jnp.roll(u, 1, axis=1) - 2 * u + jnp.roll(u, -1, axis=1)  # wrong: pending


@laplacian_without_a_halo.right
def _(u):
    v = halo(u, "b/dp n/tp -> b/dp 1+n/tp+1")
    return v[:, :-2] - 2 * u + v[:, 2:]


laplacian_without_a_halo.whole(lambda u: laplace(u))


@wrong(LINE)
def differences_of_a_block(u):
    return jnp.diff(u, axis=1, append=0.0)  # wrong: pending


@differences_of_a_block.right
def _(u):
    n = lax.axis_size("tp")
    after = lax.ppermute(u[:, :1], "tp", [(i + 1, i) for i in range(n - 1)])
    return jnp.concatenate([u[:, 1:], after], axis=1) - u


differences_of_a_block.whole(lambda u: jnp.diff(u, axis=1, append=0.0))


@wrong(LINE)
def halo_of_the_wrong_side(u):
    """The block before sends its last value; here the block after does."""
    before = lax.ppermute(u[:, -1:], "tp", backward(lax.axis_size("tp")))  # wrong: order
    v = jnp.concatenate([before, u], axis=1)
    return v[:, 1:] - v[:, :-1]


@halo_of_the_wrong_side.right
def _(u):
    before = lax.ppermute(u[:, -1:], "tp", forward(lax.axis_size("tp")))
    v = jnp.concatenate([before, u], axis=1)
    return v[:, 1:] - v[:, :-1]


halo_of_the_wrong_side.whole(lambda u: u - jnp.roll(u, 1, axis=1))


@wrong(LINE)
def wrong_end_sent(u):
    """The right neighbour gets the first value of the block instead of the last."""
    before = lax.ppermute(u[:, :1], "tp", forward(lax.axis_size("tp")))  # wrong: order
    v = jnp.concatenate([before, u], axis=1)
    return v[:, 1:] - v[:, :-1]


@wrong_end_sent.right
def _(u):
    before = lax.ppermute(u[:, -1:], "tp", forward(lax.axis_size("tp")))
    v = jnp.concatenate([before, u], axis=1)
    return v[:, 1:] - v[:, :-1]


wrong_end_sent.whole(lambda u: u - jnp.roll(u, 1, axis=1))


@wrong(LINE)
def halo_along_another_axis(u):
    """Neighbours along dp hold other rows of the batch."""
    before = lax.ppermute(u[:, -1:], "dp", forward(lax.axis_size("dp")))  # wrong: layout or pending
    v = jnp.concatenate([before, u], axis=1)
    return v[:, 1:] - v[:, :-1]


@halo_along_another_axis.right
def _(u):
    before = lax.ppermute(u[:, -1:], "tp", forward(lax.axis_size("tp")))
    v = jnp.concatenate([before, u], axis=1)
    return v[:, 1:] - v[:, :-1]


halo_along_another_axis.whole(lambda u: u - jnp.roll(u, 1, axis=1))


@wrong(LINE)
def halo_on_one_side_only(u):
    before = lax.ppermute(u[:, -1:], "tp", forward(lax.axis_size("tp")))
    v = jnp.concatenate([before, u, u[:, :1]], axis=1)  # wrong: order
    return v[:, :-2] - 2 * u + v[:, 2:]


@halo_on_one_side_only.right
def _(u):
    before = lax.ppermute(u[:, -1:], "tp", forward(lax.axis_size("tp")))
    after = lax.ppermute(u[:, :1], "tp", backward(lax.axis_size("tp")))
    v = jnp.concatenate([before, u, after], axis=1)
    return v[:, :-2] - 2 * u + v[:, 2:]


halo_on_one_side_only.whole(lambda u: laplace(u))


@wrong("b/dp s/tp d -> b/dp s/tp d")
def token_shift_in_a_block(x):
    """Mix each token with the one before it; the first of a block is mixed with zeros."""
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))  # wrong: pending
    return 0.5 * x + 0.5 * before


@token_shift_in_a_block.right
def _(x):
    last = lax.ppermute(x[:, -1:], "tp", [(i, i + 1) for i in range(lax.axis_size("tp") - 1)])
    return 0.5 * x + 0.5 * jnp.concatenate([last, x[:, :-1]], axis=1)


token_shift_in_a_block.whole(lambda x: 0.5 * x + 0.5 * jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))))


@wrong("b/dp n/tp -> b/dp n/tp")
def windows_cut_at_the_edges(u):
    """A moving maximum of three."""
    return lax.reduce_window(u, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME")  # wrong: pending


@windows_cut_at_the_edges.right
def _(u):
    v = halo(u, "b/dp n/tp -> b/dp 1+n/tp+1", edge="edge")
    return lax.reduce_window(v, -jnp.inf, lax.max, (1, 3), (1, 1), "VALID")


windows_cut_at_the_edges.whole(lambda u: lax.reduce_window(u, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"))


@wrong(LINE)
def boundary_of_every_block(u):
    """The ends of the line are held at zero, and so are those of each block."""
    return u.at[:, 0].set(0.0).at[:, -1].set(0.0)  # wrong: pending


@boundary_of_every_block.right
def _(u):
    place = iota("n/tp")[None]
    return jnp.where((place == 0) | (place == 39), 0.0, u)


boundary_of_every_block.whole(lambda u: u.at[:, 0].set(0.0).at[:, -1].set(0.0))
