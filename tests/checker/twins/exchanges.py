"""Exchanges: the wrong dimension is split, joined, gathered or scattered."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd import all_gather, all_to_all, psum_scatter, relayout
from tests.checker.twins.registry import wrong

HEADS = "b/dp s/tp h k -> b/dp s/tp h k"


def mixed_tokens(x):
    """An operation along the whole sequence."""
    return x - 0.5 * x.cumsum(1)


@wrong("b/dp s/tp h m -> b/dp s/tp h m")
def wrong_dimension_split(x):
    """Features are divided instead of heads, so that the softmax of a head sees a part of it."""
    y = lax.all_to_all(x, "tp", split_axis=3, concat_axis=1, tiled=True)
    y = jax.nn.softmax(mixed_tokens(y))  # wrong: pending or nonlinear
    return lax.all_to_all(y, "tp", split_axis=1, concat_axis=3, tiled=True)


@wrong_dimension_split.right
def _(x):
    y = lax.all_to_all(x, "tp", split_axis=2, concat_axis=1, tiled=True)
    y = jax.nn.softmax(mixed_tokens(y))
    return lax.all_to_all(y, "tp", split_axis=1, concat_axis=2, tiled=True)


wrong_dimension_split.whole(lambda x: jax.nn.softmax(mixed_tokens(x)))


@wrong(
    "b/dp s/tp d -> b/dp s/tp d",
    unseen="an all_to_all within one dimension leaves an order that has no name in a layout",
)
def split_and_joined_along_one_dimension(x):
    """Every fourth token, and never back again."""
    y = lax.all_to_all(x, "tp", split_axis=1, concat_axis=1, tiled=True)
    return jnp.tanh(y)  # wrong: layout


@split_and_joined_along_one_dimension.right
def _(x):
    y = lax.all_to_all(x, "tp", split_axis=1, concat_axis=1, tiled=True)
    return lax.all_to_all(jnp.tanh(y), "tp", split_axis=1, concat_axis=1, tiled=True)


split_and_joined_along_one_dimension.whole(lambda x: jnp.tanh(x))


@wrong(HEADS)
def heads_exchanged_one_way(x):
    """Back again, but onto the heads."""
    y = all_to_all(x, "b/dp s/tp h k -> b/dp s h/tp k")
    y = mixed_tokens(y)
    return jnp.concatenate(jnp.split(y, 4, axis=1), axis=2)  # wrong: layout or pending


@heads_exchanged_one_way.right
def _(x):
    y = mixed_tokens(all_to_all(x, "b/dp s/tp h k -> b/dp s h/tp k"))
    return all_to_all(y, "b/dp s h/tp k -> b/dp s/tp h k")


heads_exchanged_one_way.whole(lambda x: mixed_tokens(x))


@wrong(
    "b/dp s/tp n -> b/dp s n/tp",
    no_gradient="JAX cannot transpose an untiled all_to_all",
    unseen="which place of a merged dimension came first is lost at an untiled exchange",
)
def blocks_of_another_order(x):
    """Untiled, the new dimension is put behind the block's own rows, and merged there."""
    parts = x.reshape(*x.shape[:2], 4, -1)
    y = lax.all_to_all(parts, "tp", split_axis=2, concat_axis=2)
    return y.reshape(x.shape[0], -1, parts.shape[3])  # wrong: layout


@blocks_of_another_order.right
def _(x):
    parts = x.reshape(*x.shape[:2], 4, -1)
    y = lax.all_to_all(parts, "tp", split_axis=2, concat_axis=1)
    return y.reshape(x.shape[0], -1, parts.shape[3])


blocks_of_another_order.whole(lambda x: x)


@wrong("b/dp s/tp d -> b/dp s d", unseen="which place of a merged dimension came first is lost at an untiled gather")
def gathered_blocks_merged_in_another_order(x):
    blocks = lax.all_gather(x, "tp", axis=2, to="invarying")
    return blocks.reshape(x.shape[0], -1, x.shape[2])  # wrong: layout


@gathered_blocks_merged_in_another_order.right
def _(x):
    blocks = lax.all_gather(x, "tp", axis=1, to="invarying")
    return blocks.reshape(x.shape[0], -1, x.shape[2])


gathered_blocks_merged_in_another_order.whole(lambda x: x)


def entropy(scores):
    p = jax.nn.softmax(scores, axis=-1)
    return -(p * jnp.log(p)).sum(-1).mean()


@wrong("s/tp v -> scalar")
def gathered_along_the_wrong_dimension(scores):
    """The scores of four tokens become those of one."""
    full = lax.all_gather(scores, "tp", axis=1, tiled=True, to="invarying")  # wrong: order or layout or pending
    return entropy(full)


gathered_along_the_wrong_dimension.right(
    lambda scores: entropy(lax.all_gather(scores, "tp", axis=0, tiled=True, to="invarying"))
)
gathered_along_the_wrong_dimension.whole(lambda scores: entropy(scores))


@wrong("b/dp s d/tp, d/tp e -> b/dp s/tp e")
def scattered_onto_the_wrong_dimension(x, w):
    """The features are divided, and then cut and laid together as if the sequence were."""
    y = lax.psum_scatter(x @ w, "tp", scatter_dimension=2, tiled=True)
    return y.reshape(x.shape[0], 4, -1)  # wrong: layout


scattered_onto_the_wrong_dimension.right(lambda x, w: psum_scatter(x @ w, "b/dp s e {U:tp} -> b/dp s/tp e"))
scattered_onto_the_wrong_dimension.whole(lambda x, w: x @ w)


@wrong("b/dp/tp n d -> b/tp n/dp d", b=16)
def exchanged_over_the_major_axis(x):
    """The rows that come together were not neighbours."""
    return lax.all_to_all(x, "dp", split_axis=1, concat_axis=0, tiled=True)  # wrong: order or layout


exchanged_over_the_major_axis.right(lambda x: relayout(x, "b/dp/tp n d -> b/tp n/dp d"))
exchanged_over_the_major_axis.whole(lambda x: x)


@wrong("g/tp m d -> g m/tp d", mesh={"tp": 8}, g=16)
def experts_not_sent_back(x):
    """Tokens go to their experts and are returned from there without the way back."""
    y = lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True)
    y = jnp.tanh(y) * 0.5
    y = lax.all_to_all(y, "tp", split_axis=0, concat_axis=1, tiled=True)
    return y.reshape(16, 4, -1)  # wrong: layout


experts_not_sent_back.right(lambda x: jnp.tanh(lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True)) * 0.5)
experts_not_sent_back.whole(lambda x: jnp.tanh(x) * 0.5)


@wrong("b/dp s/tp h -> b/dp h")
def softmax_beside_a_gather(x):
    scores = all_gather(x, "b/dp s/tp h -> b/dp s h", to="invarying")
    weights = jax.nn.softmax(x, axis=1)  # wrong: pending or nonlinear
    return lax.psum((weights * x).sum(1), "tp") + scores.mean(1)


@softmax_beside_a_gather.right
def _(x):
    scores = all_gather(x, "b/dp s/tp h -> b/dp s h", to="invarying")
    return (jax.nn.softmax(scores, axis=1) * scores).sum(1) + scores.mean(1)


softmax_beside_a_gather.whole(lambda x: (jax.nn.softmax(x, axis=1) * x).sum(1) + x.mean(1))


@wrong("b/dp s/tp h k -> b/dp s h/tp k")
def blocks_around_the_heads(x):
    """The blocks of the sequence become heads, and go back to where they were only in the right program."""
    y = lax.all_to_all(x, "tp", split_axis=1, concat_axis=2, tiled=True)
    return jnp.tanh(y)  # wrong: layout


@blocks_around_the_heads.right
def _(x):
    y = jnp.tanh(lax.all_to_all(x, "tp", split_axis=1, concat_axis=2, tiled=True))
    back = lax.all_to_all(y, "tp", split_axis=2, concat_axis=1, tiled=True)
    return lax.all_to_all(back, "tp", split_axis=2, concat_axis=1, tiled=True)


blocks_around_the_heads.whole(lambda x: jnp.tanh(x))
