"""Results that leave the kernel as something else: a block or a partial sum as the whole, copies as blocks."""

import jax.numpy as jnp
from jax import lax

from spmd import all_gather, reduce, relayout, split
from tests.checker.twins.registry import wrong


@wrong("b/dp d -> d")
def sum_of_a_block(x):
    return x.sum(0)  # wrong: partial


sum_of_a_block.right(lambda x: lax.psum(x.sum(0), "dp"))
sum_of_a_block.whole(lambda x: x.sum(0))


@wrong("b/dp d -> scalar")
def mean_of_a_block(x):
    return x.mean()  # wrong: partial


mean_of_a_block.right(lambda x: lax.pmean(x.mean(), "dp"))
mean_of_a_block.whole(lambda x: x.mean())


@wrong("b/dp d -> d")
def maximum_of_a_block(x):
    return x.max(0)  # wrong: pending


maximum_of_a_block.right(lambda x: reduce(x, "b/dp d -> d", "max"))
maximum_of_a_block.whole(lambda x: x.max(0))


@wrong("n/dp d, n/dp f -> d f")
def product_over_a_divided_dimension(x, y):
    return x.T @ y  # wrong: partial


product_over_a_divided_dimension.right(lambda x, y: lax.psum(x.T @ y, "dp"))
product_over_a_divided_dimension.whole(lambda x, y: x.T @ y)


@wrong("b/dp d -> b/dp d/tp")
def copies_as_blocks(x):
    """Each device returns the first features."""
    return lax.pcast(x[:, :3], "tp", to="varying")  # wrong: layout


copies_as_blocks.right(lambda x: split(x, "b/dp d -> b/dp d/tp"))
copies_as_blocks.whole(lambda x: x)


@wrong("b/dp d/tp, d/tp f -> b/dp f/tp")
def complete_product_as_blocks(x, w):
    """The sum is right, and every device returns the same part of it."""
    return lax.pcast(lax.psum(x @ w, "tp")[:, :2], "tp", to="varying")  # wrong: layout


complete_product_as_blocks.right(lambda x, w: split(lax.psum(x @ w, "tp"), "b/dp f -> b/dp f/tp"))
complete_product_as_blocks.whole(lambda x, w: x @ w)


@wrong("b/dp s/tp d -> b/dp d")
def pooled_without_a_sum(x):
    return x.sum(1)  # wrong: partial


pooled_without_a_sum.right(lambda x: lax.psum(x.sum(1), "tp"))
pooled_without_a_sum.whole(lambda x: x.sum(1))


@wrong("b/dp n/tp -> b/dp")
def norm_of_a_part(x):
    return jnp.linalg.norm(x, axis=1)  # wrong: nonlinear


norm_of_a_part.right(lambda x: jnp.sqrt(lax.psum((x**2).sum(1), "tp")))
norm_of_a_part.whole(lambda x: jnp.linalg.norm(x, axis=1))


@wrong("b/dp d/tp -> b/tp d", b=16)
def block_of_another_axis(x):
    """Gathered, and still divided over dp."""
    full = all_gather(x, "b/dp d/tp -> b/dp d")
    return full[: x.shape[0] // 2]  # wrong: layout or pending


block_of_another_axis.right(lambda x: relayout(x, "b/dp d/tp -> b/tp d", to="invarying"))
block_of_another_axis.whole(lambda x: x)


@wrong("d f, b/dp d -> d f")
def gradient_of_own_rows(w, x):
    """A product of cotangents and rows by hand; JAX has no part in it that could add up."""
    y = jnp.sin(x @ w)
    return x.T @ y  # wrong: partial


gradient_of_own_rows.right(lambda w, x: lax.psum(x.T @ jnp.sin(x @ w), "dp"))
gradient_of_own_rows.whole(lambda w, x: x.T @ jnp.sin(x @ w))


@wrong("b/dp n/tp -> b/dp n/tp, b/dp")
def one_of_two_results(x):
    """The first is right, the second is a part of the sum."""
    total = x.sum(1)  # wrong: partial
    return 2.0 * x, total


one_of_two_results.right(lambda x: (2.0 * x, lax.psum(x.sum(1), "tp")))
one_of_two_results.whole(lambda x: (2.0 * x, x.sum(1)))


@wrong("b/dp s/tp d -> b/dp s/tp d, scalar")
def block_mean_as_a_loss(x):
    """Right along dp alone."""
    loss = lax.pmean((x**2).mean(), "dp")  # wrong: partial
    return x - 0.1 * x, loss


block_mean_as_a_loss.right(lambda x: (x - 0.1 * x, lax.pmean((x**2).mean(), ("dp", "tp"))))
block_mean_as_a_loss.whole(lambda x: (x - 0.1 * x, (x**2).mean()))
