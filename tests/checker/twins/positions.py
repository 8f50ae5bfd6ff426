"""Numbers counted from the start of the block: positions, masks, ids, labels."""

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import iota, offset, split
from tests.checker.twins.registry import wrong

STREAM = "b/dp s/tp d -> b/dp s/tp d"


@wrong(STREAM)
def sinusoidal_positions(x):
    places = jnp.arange(x.shape[1], dtype=jnp.float32)
    return x + jnp.sin(places)[None, :, None]  # wrong: disagree or layout


sinusoidal_positions.right(lambda x: x + jnp.sin(iota("s/tp", jnp.float32))[None, :, None])
sinusoidal_positions.whole(lambda x: x + jnp.sin(jnp.arange(16.0))[None, :, None])


@wrong("b/dp s/tp d, s d -> b/dp s/tp d")
def learned_positions(x, table):
    """The first rows of the table, on every device."""
    return x + table[None, : x.shape[1]]  # wrong: disagree


learned_positions.right(lambda x, table: x + split(table, "s d -> s/tp d")[None])
learned_positions.whole(lambda x, table: x + table[None])


@wrong("b/dp s/tp k, b/dp s/tp k -> b/dp s/tp k")
def causal_mask_of_a_block(q, k):
    """Queries are a block, keys are all; the mask counts both from zero."""
    keys = lax.all_gather(k, "tp", axis=1, tiled=True)
    scores = jnp.einsum("bsk,btk->bst", q, keys)
    mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jnp.einsum("bst,btk->bsk", jax.nn.softmax(jnp.where(mask[None], scores, -1e9)), keys)  # wrong: disagree


@causal_mask_of_a_block.right
def _(q, k):
    keys = lax.all_gather(k, "tp", axis=1, tiled=True)
    scores = jnp.einsum("bsk,btk->bst", q, keys)
    mine = lax.axis_index("tp") * q.shape[1] + jnp.arange(q.shape[1])
    mask = mine[:, None] >= jnp.arange(keys.shape[1])[None]
    return jnp.einsum("bst,btk->bsk", jax.nn.softmax(jnp.where(mask[None], scores, -1e9)), keys)


@causal_mask_of_a_block.whole
def _(q, k):
    scores = jnp.einsum("bsk,btk->bst", q, k)
    mask = jnp.tril(jnp.ones((16, 16), bool))
    return jnp.einsum("bst,btk->bsk", jax.nn.softmax(jnp.where(mask[None], scores, -1e9)), k)


@wrong("b/dp s, v/tp d -> b/dp s d")
def rows_of_a_divided_table(ids, table):
    """Ids count in the whole vocabulary, and rows in a block of it."""
    rows = jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype)
    return lax.psum(rows @ table, "tp")  # wrong: disagree or pending or partial


@rows_of_a_divided_table.right
def _(ids, table):
    rows = jax.nn.one_hot(ids - lax.axis_index("tp") * table.shape[0], table.shape[0], dtype=table.dtype)
    return lax.psum(rows @ table, "tp")


rows_of_a_divided_table.whole(lambda ids, table: table[ids])


@wrong("b/dp s, v/tp d -> b/dp s d")
def rows_taken_by_number(ids, table):
    known = (ids >= 0) & (ids < table.shape[0])
    rows = jnp.where(known[..., None], table[jnp.clip(ids, 0, table.shape[0] - 1)], 0.0)
    return lax.psum(rows, "tp")  # wrong: pending


@rows_taken_by_number.right
def _(ids, table):
    mine = ids - lax.axis_index("tp") * table.shape[0]
    known = (mine >= 0) & (mine < table.shape[0])
    rows = jnp.where(known[..., None], table[jnp.clip(mine, 0, table.shape[0] - 1)], 0.0)
    return lax.psum(rows, "tp")


rows_taken_by_number.whole(lambda ids, table: table[ids])


@wrong("b/dp s v/tp, b/dp s -> b/dp s")
def score_of_the_label(logits, labels):
    hit = labels[..., None] == jnp.arange(logits.shape[-1])[None, None]
    return lax.psum(jnp.where(hit, logits, 0.0).sum(-1), "tp")  # wrong: disagree


@score_of_the_label.right
def _(logits, labels):
    hit = labels[..., None] == (offset("v/tp") + jnp.arange(logits.shape[-1]))[None, None]
    return lax.psum(jnp.where(hit, logits, 0.0).sum(-1), "tp")


score_of_the_label.whole(lambda logits, labels: jnp.take_along_axis(logits, labels[..., None], 2)[..., 0])


@wrong("b/dp s/tp, b/dp s/tp d -> b/dp s/tp d")
def labels_shifted_in_a_block(ids, x):
    """The last token of a block gets the first one of the same block as its label."""
    labels = jnp.roll(ids, -1, axis=1)  # wrong: pending
    return x * labels[..., None].astype(x.dtype)


@labels_shifted_in_a_block.right
def _(ids, x):
    labels = spmd.roll(ids, "b/dp [s/tp]", -1)
    return x * labels[..., None].astype(x.dtype)


labels_shifted_in_a_block.whole(lambda ids, x: x * jnp.roll(ids, -1, axis=1)[..., None].astype(x.dtype))


@wrong("b/dp s/tp -> b/dp s/tp")
def labels_by_slice_and_pad(ids):
    return jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))  # wrong: pending


@labels_by_slice_and_pad.right
def _(ids):
    first = lax.ppermute(ids[:, :1], "tp", [(i + 1, i) for i in range(lax.axis_size("tp") - 1)])
    return jnp.concatenate([ids[:, 1:], first], axis=1)


labels_by_slice_and_pad.whole(lambda ids: jnp.pad(ids[:, 1:], ((0, 0), (0, 1))))


@wrong(STREAM)
def first_token_of_every_block(x):
    """A token for the start of the text goes into the sequence, once per device."""
    return x.at[:, 0].set(1.0)  # wrong: pending


@first_token_of_every_block.right
def _(x):
    first = iota("s/tp")[None, :, None] == 0
    return jnp.where(first, 1.0, x)


first_token_of_every_block.whole(lambda x: x.at[:, 0].set(1.0))


@wrong("b/dp s/tp d -> b/dp d")
def last_token_of_every_block(x):
    """The state of the last token, a mean of those of all blocks."""
    return lax.pmean(x[:, -1], "tp")  # wrong: pending


@last_token_of_every_block.right
def _(x):
    last = (lax.axis_index("tp") == lax.axis_size("tp") - 1).astype(x.dtype)
    return lax.psum(x[:, -1] * last, "tp")


last_token_of_every_block.whole(lambda x: x[:, -1])


@wrong("n/tp m -> n/tp m")
def identity_of_a_block(a):
    return a + jnp.eye(*a.shape)  # wrong: disagree


identity_of_a_block.right(lambda a: a + (iota("n/tp")[:, None] == jnp.arange(a.shape[1])[None]).astype(a.dtype))
identity_of_a_block.whole(lambda a: a + jnp.eye(*a.shape))


@wrong("n/tp m -> n/tp m")
def triangle_of_a_block(a):
    return jnp.tril(a)  # wrong: disagree or pending


triangle_of_a_block.right(lambda a: jnp.where(iota("n/tp")[:, None] >= jnp.arange(a.shape[1])[None], a, 0.0))
triangle_of_a_block.whole(lambda a: jnp.tril(a))


@wrong("b/dp n/tp -> b/dp n/tp")
def grid_of_a_block(u):
    """The coordinates of a grid, from 0 to 1 on each device."""
    return u * jnp.sin(3 * jnp.linspace(0.0, 1.0, u.shape[1]))[None]  # wrong: disagree


grid_of_a_block.right(lambda u: u * jnp.sin(3 * spmd.linspace(0.0, 1.0, "n/tp"))[None])
grid_of_a_block.whole(lambda u: u * jnp.sin(3 * jnp.linspace(0.0, 1.0, u.shape[1]))[None])


@wrong("b/dp s/tp d -> b/dp s/tp d")
def padding_by_length(x):
    """Only the first 10 tokens of the sequence are text."""
    return jnp.where(jnp.arange(x.shape[1])[None, :, None] < 10, x, 0.0)  # wrong: disagree


padding_by_length.right(lambda x: jnp.where(iota("s/tp")[None, :, None] < 10, x, 0.0))
padding_by_length.whole(lambda x: jnp.where(jnp.arange(16)[None, :, None] < 10, x, 0.0))


@wrong("b/dp s/tp d/cp -> b/dp s/tp d/cp", mesh={"dp": 2, "tp": 2, "cp": 2})
def offset_along_another_axis(x):
    places = lax.axis_index("cp") * x.shape[1] + jnp.arange(x.shape[1])
    return x + jnp.cos(places.astype(x.dtype))[None, :, None]  # wrong: disagree or layout


@offset_along_another_axis.right
def _(x):
    places = lax.axis_index("tp") * x.shape[1] + jnp.arange(x.shape[1])
    return x + jnp.cos(places.astype(x.dtype))[None, :, None]


offset_along_another_axis.whole(lambda x: x + jnp.cos(jnp.arange(16.0))[None, :, None])
