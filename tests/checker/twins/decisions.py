"""Decisions from a shard: a condition, a choice, a loop that ends when one block says so."""

import jax.numpy as jnp
from jax import lax

from tests.checker.twins.registry import wrong

BLOCKS = "n/tp d -> n/tp d"


@wrong(BLOCKS)
def clipped_by_a_block(x):
    """Where the block is large, it is made smaller."""
    return lax.cond((x**2).sum() > 300.0, lambda v: 0.1 * v, lambda v: v, x)  # wrong: nonlinear or pending


clipped_by_a_block.right(lambda x: lax.cond(lax.psum((x**2).sum(), "tp") > 300.0, lambda v: 0.1 * v, lambda v: v, x))
clipped_by_a_block.whole(lambda x: jnp.where((x**2).sum() > 300.0, 0.1 * x, x))


@wrong(BLOCKS)
def skipped_by_a_block(x):
    """A step is left out if any number of the gradient is too large: of this block, that is."""
    fine = (jnp.abs(x) < 2.8).all()  # wrong: pending
    return jnp.where(fine, x, 0.0)


@skipped_by_a_block.right
def _(x):
    bad = lax.pmax((jnp.abs(lax.stop_gradient(x)) >= 2.8).any().astype(jnp.int32), "tp")
    return jnp.where(bad == 0, x, 0.0)


skipped_by_a_block.whole(lambda x: jnp.where((jnp.abs(x) < 2.8).all(), x, 0.0))


@wrong("n/tp d -> n/tp d", no_gradient="JAX has no reverse mode of while_loop")
def halved_until_a_block_is_small(x):
    """Each block is halved as often as it needs."""
    return lax.while_loop(lambda v: jnp.abs(v).max() > 0.3, lambda v: v * 0.9, x)  # wrong: pending


@halved_until_a_block_is_small.right
def _(x):
    largest = lambda v: lax.pmax(jnp.abs(v).max(), "tp")
    return lax.while_loop(lambda c: c[1] > 0.3, lambda c: (c[0] * 0.9, largest(c[0] * 0.9)), (x, largest(x)))[0]


halved_until_a_block_is_small.whole(lambda x: lax.while_loop(lambda v: jnp.abs(v).max() > 0.3, lambda v: v * 0.9, x))


def relaxed(change, x):
    """Steps until the largest change is small."""

    def step(carry):
        new = carry[0] - 0.1 * (carry[0] - jnp.tanh(x))
        return new, change(new - carry[0])

    return lax.while_loop(lambda c: c[1] > 0.05, step, (x, change(x)))[0]


@wrong(BLOCKS, no_gradient="JAX has no reverse mode of while_loop")
def iterations_counted_by_a_block(x):
    """The residual of the block decides."""
    return relaxed(lambda v: jnp.abs(v).max(), x)  # wrong: pending


iterations_counted_by_a_block.right(lambda x: relaxed(lambda v: lax.pmax(jnp.abs(v).max(), "tp"), x))
iterations_counted_by_a_block.whole(lambda x: relaxed(lambda v: jnp.abs(v).max(), x))


@wrong("n/tp d -> n/tp d")
def branch_by_the_first_row(x):
    """Ascending or descending is decided by the ends of the block."""
    return lax.cond(x[0, 0] > x[-1, 0], lambda v: -v, lambda v: v, x)  # wrong: pending


@branch_by_the_first_row.right
def _(x):
    rows = lax.all_gather(x[:, 0], "tp", tiled=True)
    return lax.cond(rows[0] > rows[-1], lambda v: -v, lambda v: v, x)


branch_by_the_first_row.whole(lambda x: jnp.where(x[0, 0] > x[-1, 0], -x, x))


@wrong("b/dp d/tp -> b/dp d/tp")
def outliers_by_local_statistics(x):
    """What is far from the block's own mean goes."""
    far = jnp.abs(x - x.mean(-1, keepdims=True)) > 1.0  # wrong: mixed or nonlinear
    return jnp.where(far, 0.0, x)


@outliers_by_local_statistics.right
def _(x):
    far = jnp.abs(x - lax.pmean(x.mean(-1, keepdims=True), "tp")) > 1.0
    return jnp.where(far, 0.0, x)


outliers_by_local_statistics.whole(lambda x: jnp.where(jnp.abs(x - x.mean(-1, keepdims=True)) > 1.0, 0.0, x))


@wrong("b/dp e/tp, b/dp e/tp -> b/dp e/tp")
def routed_to_the_best_of_a_block(scores, x):
    """One expert is to be chosen of all, and every device chooses one of its own."""
    best = scores == scores.max(-1, keepdims=True)  # wrong: pending
    return jnp.where(best, x, 0.0)


@routed_to_the_best_of_a_block.right
def _(scores, x):
    best = scores == lax.pmax(lax.stop_gradient(scores).max(-1, keepdims=True), "tp")
    return jnp.where(best, x, 0.0)


routed_to_the_best_of_a_block.whole(lambda scores, x: jnp.where(scores == scores.max(-1, keepdims=True), x, 0.0))


@wrong("m d, n/tp d -> m d")
def switch_by_a_shard(w, x):
    """The choice differs between devices, and their mean is none of the choices."""
    pick = (x.sum() * 7.0).astype(jnp.int32) % 3  # wrong: nonlinear
    return lax.pmean(lax.switch(pick, [jnp.sin, jnp.cos, jnp.tanh], w), "tp")


@switch_by_a_shard.right
def _(w, x):
    pick = (lax.psum(x.sum(), "tp") * 7.0).astype(jnp.int32) % 3
    return lax.switch(pick, [jnp.sin, jnp.cos, jnp.tanh], w)
