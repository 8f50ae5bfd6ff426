"""What is done to each block and undone again is right; what stays done is not."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd import all_gather
from tests.checker.twins.registry import wrong

ROWS = "s/tp d, d f -> s/tp f"


@wrong(ROWS)
def tokens_left_in_the_order_of_experts(x, w):
    """Each device sorts its own tokens by their experts, and they do not go back."""
    expert = (x @ w[:, :3]).argmax(1)
    order = jnp.argsort(expert)  # wrong: pending
    return x[order] @ w * (1.0 + expert[order, None].astype(x.dtype))


@tokens_left_in_the_order_of_experts.right
def _(x, w):
    expert = (x @ w[:, :3]).argmax(1)
    order = jnp.argsort(expert)
    y = x[order] @ w * (1.0 + expert[order, None].astype(x.dtype))
    scattered = jnp.zeros_like(y).at[order].set(y)
    return 0.5 * scattered + 0.5 * y[jnp.argsort(order)]


@wrong(ROWS)
def statistics_of_two_batches_at_once(x, w):
    """Two batches run as one, which is normalized over the rows of each device."""
    both = jnp.concatenate([x, 0.5 * x]) @ w  # wrong: pending
    both = both - both.mean(0, keepdims=True)
    with_it, without = jnp.split(both, 2)
    return without + 2.0 * (with_it - without)


@statistics_of_two_batches_at_once.right
def _(x, w):
    both = jnp.concatenate([x, 0.5 * x]) @ w
    both = both - lax.pmean(both.mean(0, keepdims=True), "tp")
    with_it, without = jnp.split(both, 2)
    return without + 2.0 * (with_it - without)


@wrong(ROWS)
def sum_over_rows_of_two_batches(x, w):
    """What is done between the join and the split is not undone."""
    both = jnp.cumsum(jnp.concatenate([x, 0.5 * x]) @ w, axis=0)  # wrong: pending
    return both[: len(x)] - both[len(x) :]


@sum_over_rows_of_two_batches.right
def _(x, w):
    both = jnp.cumsum(jnp.concatenate([x, 0.5 * x]) @ w, axis=1)
    return both[: len(x)] - both[len(x) :]


@wrong(ROWS)
def padded_rows_kept_at_the_end(x, w):
    """Rows are padded before and behind, and the first ones are kept."""
    rows = jnp.pad(x, ((2, -len(x) % 3 + 1), (0, 0)))  # wrong: pending
    return jnp.tanh(rows @ w)[: len(x)]


@padded_rows_kept_at_the_end.right
def _(x, w):
    rows = jnp.pad(x, ((2, -len(x) % 3 + 1), (0, 0)))
    return jnp.tanh(rows @ w)[2 : 2 + len(x)]


@wrong(ROWS)
def row_after_row_with_the_one_before(x, w):
    """The first row of a block follows the last one of the block before."""

    def step(i, y):
        return y.at[i].set(jnp.tanh(x[i] @ w) + x[jnp.maximum(i - 1, 0)] @ w)  # wrong: pending

    return lax.fori_loop(0, len(x), step, lax.pcast(jnp.zeros((len(x), w.shape[1])), "tp", to="varying"))


@row_after_row_with_the_one_before.right
def _(x, w):
    def step(i, y):
        return y.at[i].set(jnp.tanh(x[i] @ w) + x[i] @ w)

    return lax.fori_loop(0, len(x), step, lax.pcast(jnp.zeros((len(x), w.shape[1])), "tp", to="varying"))


@wrong("s/tp d, s/tp -> scalar")
def labels_of_a_block_in_the_gathered_rows(x, labels):
    """A device's own count of its labels picks the first rows of all devices."""
    scores = all_gather(jax.nn.log_softmax(x), "s/tp d -> s d")
    picked = scores[jnp.arange(len(labels)), labels % x.shape[1]]  # wrong: disagree
    return lax.pmean(-picked.mean(), "tp")


@labels_of_a_block_in_the_gathered_rows.right
def _(x, labels):
    scores = jax.nn.log_softmax(x)
    picked = scores[jnp.arange(len(labels)), labels % x.shape[1]]
    return lax.pmean(-picked.mean(), "tp")


@wrong("s/tp d, s/tp -> scalar")
def sum_of_means_of_picked_scores(x, labels):
    scores = jax.nn.log_softmax(x)
    return lax.psum(-scores[jnp.arange(len(labels)), labels % x.shape[1]].mean(), "tp")  # wrong: disagree


@sum_of_means_of_picked_scores.right
def _(x, labels):
    scores = jax.nn.log_softmax(x)
    return lax.pmean(-scores[jnp.arange(len(labels)), labels % x.shape[1]].mean(), "tp")


@wrong("b/dp n/tp -> b/dp")
def mean_of_squared_means(x):
    """The squares of the means are averaged without the variances around them."""
    mean = x.mean(-1)
    return lax.pmean(x.var(-1) + (0.5 * mean) ** 2, "tp") - lax.pmean(mean, "tp") ** 2  # wrong: nonlinear


@mean_of_squared_means.right
def _(x):
    mean = x.mean(-1)
    return lax.pmean(x.var(-1) + mean**2, "tp") - lax.pmean(mean, "tp") ** 2


mean_of_squared_means.whole(lambda x: x.var(-1))
