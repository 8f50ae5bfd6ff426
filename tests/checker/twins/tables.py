"""Integers that each device knows without any data: positions, own rows, sides."""

import jax.numpy as jnp
from jax import lax

from tests.checker.twins.registry import wrong


def block(axes, n):
    """The places of this device's block of `n`."""
    return lax.axis_index(axes) * n + jnp.arange(n)


@wrong("b s/dp/tp d -> b s/dp/tp d")
def positions_in_another_order(x):
    places = block(("tp", "dp"), x.shape[1])
    return x + jnp.sin(places.astype(x.dtype))[None, :, None]  # wrong: disagree or layout


positions_in_another_order.right(lambda x: x + jnp.sin(block(("dp", "tp"), x.shape[1]).astype(x.dtype))[None, :, None])
positions_in_another_order.whole(lambda x: x + jnp.sin(jnp.arange(16, dtype=x.dtype))[None, :, None])


@wrong("n/dp m/tp -> n/dp m/tp")
def coordinates_exchanged(u):
    rows, columns = block("tp", u.shape[0]), block("dp", u.shape[1])
    place = rows[:, None] * 32 + columns[None]
    return u * jnp.cos(place.astype(u.dtype))  # wrong: disagree or layout


@coordinates_exchanged.right
def _(u):
    rows, columns = block("dp", u.shape[0]), block("tp", u.shape[1])
    return u * jnp.cos((rows[:, None] * 32 + columns[None]).astype(u.dtype))


coordinates_exchanged.whole(lambda u: u * jnp.cos(jnp.arange(40 * 32, dtype=u.dtype).reshape(40, 32)))


@wrong("b/dp s/tp d, s d -> b/dp s/tp d", s=8)
def rows_of_another_block(x, table):
    """Of eight positions, each device takes two by its number along an axis of two devices."""
    return x + table[block("dp", x.shape[1])][None]  # wrong: disagree or layout


rows_of_another_block.right(lambda x, table: x + table[block("tp", x.shape[1])][None])
rows_of_another_block.whole(lambda x, table: x + table[None])


@wrong("b/dp s -> b/dp v/tp", no_gradient="integers")
def counts_of_the_same_ids(ids):
    """How often each id occurs; each device counts the first ids of the vocabulary."""
    rows = jnp.arange(6)
    return (ids[..., None] == rows[None, None]).sum(1)  # wrong: layout


counts_of_the_same_ids.right(lambda ids: (ids[..., None] == block("tp", 6)[None, None]).sum(1))
counts_of_the_same_ids.whole(lambda ids: (ids[..., None] == jnp.arange(24)[None, None]).sum(1))


@wrong("b/dp s, v/tp d -> b/dp s d")
def scores_from_the_block_of_another_axis(ids, table):
    """Ids are counted from the start of a block that another axis numbers."""
    hit = ids[..., None] - lax.axis_index("dp") * table.shape[0] == jnp.arange(table.shape[0])[None, None]
    return lax.psum(hit.astype(table.dtype) @ table, "tp")  # wrong: disagree or pending or partial or copies


@scores_from_the_block_of_another_axis.right
def _(ids, table):
    hit = ids[..., None] - lax.axis_index("tp") * table.shape[0] == jnp.arange(table.shape[0])[None, None]
    return lax.psum(hit.astype(table.dtype) @ table, "tp")


scores_from_the_block_of_another_axis.whole(lambda ids, table: table[ids])


@wrong("b/dp d -> b/dp d")
def handed_on_by_everyone(x):
    """The last device hands its copy to all others; here everyone does."""
    last = lax.axis_index("tp") < lax.axis_size("tp")
    return lax.psum(jnp.where(last, x, 0.0), "tp")  # wrong: copies


@handed_on_by_everyone.right
def _(x):
    last = lax.axis_index("tp") == lax.axis_size("tp") - 1
    return lax.psum(jnp.where(last, x, 0.0), "tp")


handed_on_by_everyone.whole(lambda x: x)


@wrong("b/dp s/tp -> b/dp s/tp")
def edge_of_every_block(x):
    """Nothing is before the first token of the sequence; here nothing is before the first of each block."""
    before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)  # wrong: pending
    return x - before


@edge_of_every_block.right
def _(x):
    n = lax.axis_size("tp")
    edge = lax.ppermute(x[:, -1:], "tp", [(i, (i + 1) % n) for i in range(n)])
    edge = jnp.where(lax.axis_index("tp") == 0, 0.0, edge)
    return x - jnp.concatenate([edge, x[:, :-1]], axis=1)


edge_of_every_block.whole(lambda x: x - jnp.pad(x[:, :-1], ((0, 0), (1, 0))))


@wrong("b/dp s/tp d -> b/dp d")
def own_row_of_a_gathered_copy(x):
    """The state at the last token, which one device has: it is copied to the others, each of which takes another one."""
    whole = lax.all_gather(x, "tp", axis=1, tiled=True)
    at = (lax.axis_index("tp") + 1) * x.shape[1] - 1
    return lax.dynamic_index_in_dim(whole, at, 1, keepdims=False)  # wrong: layout or pending


@own_row_of_a_gathered_copy.right
def _(x):
    whole = lax.all_gather(x, "tp", axis=1, tiled=True, to="invarying")
    at = lax.axis_size("tp") * x.shape[1] - 1
    return lax.dynamic_index_in_dim(whole, at, 1, keepdims=False)


own_row_of_a_gathered_copy.whole(lambda x: x[:, -1])
