"""Strings that say another layout than the value has, some operations after the arguments."""

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import all_gather, all_to_all, einsum, psum, psum_scatter, reduce, split, take
from tests.checker.twins.registry import wrong


@wrong("b/dp d/tp, d f -> b/dp f")
def whole_operand_said_to_be_divided(x, w):
    """The first rows of the weight, on every device."""
    rows = jnp.tanh(w)[: x.shape[1]]
    return einsum(x, rows, "b/dp d/tp, d/tp f -> b/dp f")  # wrong: layout


@whole_operand_said_to_be_divided.right
def _(x, w):
    rows = split(jnp.tanh(w), "d f -> d/tp f")
    return einsum(x, rows, "b/dp d/tp, d/tp f -> b/dp f")


whole_operand_said_to_be_divided.whole(lambda x, w: x @ jnp.tanh(w))


@wrong("b/dp s/tp d -> b/dp s/tp d")
def divided_operand_said_to_be_whole(x):
    return x - reduce(jnp.sin(x), "b/dp t d -> b/dp 1 d", "mean")  # wrong: layout


divided_operand_said_to_be_whole.right(lambda x: x - reduce(jnp.sin(x), "b/dp s/tp d -> b/dp 1 d", "mean"))
divided_operand_said_to_be_whole.whole(lambda x: x - jnp.sin(x).mean(1, keepdims=True))


@wrong("b/dp s d/tp -> b/dp s d/tp")
def softmax_of_a_piece_by_string(x):
    return spmd.softmax(2.0 * x, "b/dp s [e]")  # wrong: layout


softmax_of_a_piece_by_string.right(lambda x: spmd.softmax(2.0 * x, "b/dp s [d/tp]"))
softmax_of_a_piece_by_string.whole(lambda x: jax.nn.softmax(2.0 * x))


@wrong("b/dp s/tp d -> b/dp s/tp d")
def cumulative_sum_of_a_piece_by_string(x):
    return spmd.cumsum(x * 1.0, "b/dp [t] d")  # wrong: layout


cumulative_sum_of_a_piece_by_string.right(lambda x: spmd.cumsum(x * 1.0, "b/dp [s/tp] d"))
cumulative_sum_of_a_piece_by_string.whole(lambda x: x.cumsum(1))


@wrong("b/dp s, v/tp d -> b/dp s d")
def rows_of_a_block_by_string(ids, table):
    """Ids of the whole vocabulary in a block of the table."""
    rows = take(table * 1.0, ids % table.shape[0], "[w] d, b/dp s -> b/dp s d")  # wrong: layout
    return lax.pmean(rows, "tp")


rows_of_a_block_by_string.right(lambda ids, table: take(table * 1.0, ids, "[v/tp] d, b/dp s -> b/dp s d"))
rows_of_a_block_by_string.whole(lambda ids, table: table[ids])


@wrong("b/dp s/tp, v d -> b/dp s/tp d")
def arange_said_to_be_divided(ids, table):
    places = jnp.arange(ids.shape[1]) * 2 % table.shape[0]
    rows = take(table, places, "[v] d, s/tp -> s/tp d")  # wrong: layout
    return jnp.where(ids[..., None] > 3, rows[None], 0.0)


@arange_said_to_be_divided.right
def _(ids, table):
    places = spmd.iota("s/tp") * 2 % table.shape[0]
    rows = take(table, places, "[v] d, s/tp -> s/tp d")
    return jnp.where(ids[..., None] > 3, rows[None], 0.0)


arange_said_to_be_divided.whole(
    lambda ids, table: jnp.where(ids[..., None] > 3, table[jnp.arange(16) * 2 % 24][None], 0.0)
)


@wrong("b/dp d, d f -> b/dp f")
def complete_value_said_to_be_partial(x, w):
    y = lax.pcast(jnp.tanh(x @ w), "tp", to="varying")
    return psum(y, "b/dp f {U:tp} -> b/dp f")  # wrong: copies or partial


complete_value_said_to_be_partial.right(lambda x, w: jnp.tanh(x @ w))


@wrong("b/dp d/tp, d/tp f -> b/dp f/tp")
def gathered_product_scattered(x, w):
    x, w = all_gather(x, "b/dp d/tp -> b/dp d"), all_gather(w, "d/tp f -> d f")
    return psum_scatter(x @ w, "b/dp f {U:tp} -> b/dp f/tp")  # wrong: copies or partial


gathered_product_scattered.right(lambda x, w: psum_scatter(x @ w, "b/dp f {U:tp} -> b/dp f/tp"))
gathered_product_scattered.whole(lambda x, w: x @ w)


@wrong("b/dp d/tp, d/tp f, f/tp e -> b/dp e")
def partial_sum_said_to_be_divided(x, w, v):
    """Both are different on each device, and only one is a block."""
    y = (x @ w)[:, : v.shape[0]]
    return einsum(y, v, "b/dp f/tp, f/tp e -> b/dp e")  # wrong: partial or layout


@partial_sum_said_to_be_divided.right
def _(x, w, v):
    y = psum_scatter(x @ w, "b/dp f {U:tp} -> b/dp f/tp")
    return einsum(y, v, "b/dp f/tp, f/tp e -> b/dp e")


partial_sum_said_to_be_divided.whole(lambda x, w, v: x @ w @ v)


@wrong("b/dp s h/tp k -> b/dp s h/tp k", h=64)
def another_dimension_said_to_be_divided(x):
    """The heads are divided, and the string moves the sequence."""
    y = all_to_all(x + 0.0, "b/dp t/tp n k -> b/dp t n/tp k")  # wrong: layout
    return jnp.tanh(y).reshape(x.shape)


@another_dimension_said_to_be_divided.right
def _(x):
    y = all_to_all(x + 0.0, "b/dp s h/tp k -> b/dp s/tp h k")
    return all_to_all(jnp.tanh(y), "b/dp s/tp h k -> b/dp s h/tp k")


another_dimension_said_to_be_divided.whole(lambda x: jnp.tanh(x))


@wrong("b/dp m/tp d -> b/dp d")
def divided_value_split_again(x):
    """A part of each device's own part."""
    part = split(x * 2.0, "b/dp t d -> b/dp t/tp d")  # wrong: layout
    return lax.psum(part.sum(1), "tp")


divided_value_split_again.right(lambda x: lax.psum((x * 2.0).sum(1), "tp"))
divided_value_split_again.whole(lambda x: (x * 2.0).sum(1))


@wrong("b/dp s d -> b/dp s d")
def cumulative_sum_of_copies(x):
    """All blocks are equal, and each is added to those behind it."""
    y = spmd.cumsum(jnp.sin(x), "b/dp [t/tp] d")  # wrong: layout
    return lax.pmean(y, "tp")


cumulative_sum_of_copies.right(lambda x: spmd.cumsum(jnp.sin(x), "b/dp [s] d"))
cumulative_sum_of_copies.whole(lambda x: jnp.sin(x).cumsum(1))


@wrong("b/dp d/tp -> b/dp d/tp")
def annotated_wrongly(x):
    largest = spmd.annotate(jnp.abs(x).sum(1), "b/dp")  # wrong: partial or layout
    return x / largest[:, None]


@annotated_wrongly.right
def _(x):
    largest = spmd.annotate(lax.psum(jnp.abs(x).sum(1), "tp"), "b/dp")
    return x / largest[:, None]


annotated_wrongly.whole(lambda x: x / jnp.abs(x).sum(1)[:, None])


@wrong("b/dp d -> b/dp d")
def place_said_to_be_equal(x):
    place = spmd.annotate(lax.axis_index("tp").astype(x.dtype), "")  # wrong: layout
    return lax.pmean(x + place, "tp")


place_said_to_be_equal.right(lambda x: x)


@wrong("n/tp d -> n/tp d", n=40)
def sorted_within_a_block_by_string(x):
    return spmd.sort(x * 1.0, "[m] d")  # wrong: layout


sorted_within_a_block_by_string.right(lambda x: spmd.sort(x * 1.0, "[n/tp] d"))
sorted_within_a_block_by_string.whole(lambda x: jnp.sort(x, axis=0))
