"""Means of unequal means, and other statistics that do not average."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd import all_gather, reduce
from tests.checker.twins.registry import wrong

MASKED = "n/tp, n/tp -> scalar"
WHOLE = "b/dp n/tp -> b/dp"


@wrong(MASKED)
def mean_of_masked_means(x, mask):
    """Blocks have different numbers of tokens."""
    return lax.pmean((x * mask).sum() / mask.sum(), "tp")  # wrong: nonlinear


mean_of_masked_means.right(lambda x, mask: lax.psum((x * mask).sum(), "tp") / lax.psum(mask.sum(), "tp"))
mean_of_masked_means.whole(lambda x, mask: (x * mask).sum() / mask.sum())


@wrong("b/dp n/tp, b/dp n/tp -> scalar")
def mean_over_one_axis_first(x, mask):
    """Complete along tp, and then a mean of means along dp."""
    total, count = lax.psum((x * mask).sum(), "tp"), lax.psum(mask.sum(), "tp")
    return lax.pmean(total / count, "dp")  # wrong: nonlinear


mean_over_one_axis_first.right(
    lambda x, mask: lax.psum((x * mask).sum(), ("dp", "tp")) / lax.psum(mask.sum(), ("dp", "tp"))
)
mean_over_one_axis_first.whole(lambda x, mask: (x * mask).sum() / mask.sum())


@wrong(WHOLE)
def mean_of_variances(x):
    """The variance between blocks is lost."""
    return lax.pmean(x.var(-1), "tp")  # wrong: mixed or nonlinear or pending


@mean_of_variances.right
def _(x):
    mean = lax.pmean(x.mean(-1, keepdims=True), "tp")
    return lax.pmean(((x - mean) ** 2).mean(-1), "tp")


mean_of_variances.whole(lambda x: x.var(-1))


@wrong(WHOLE)
def mean_of_deviations(x):
    return lax.pmean(jnp.sqrt((x**2).mean(-1)), "tp")  # wrong: nonlinear


mean_of_deviations.right(lambda x: jnp.sqrt(lax.pmean((x**2).mean(-1), "tp")))
mean_of_deviations.whole(lambda x: jnp.sqrt((x**2).mean(-1)))


@wrong(WHOLE)
def mean_of_logsumexps(x):
    return lax.pmean(jax.nn.logsumexp(x, axis=-1), "tp")  # wrong: nonlinear or pending


mean_of_logsumexps.right(lambda x: reduce(x, "b/dp n/tp -> b/dp", "logsumexp"))
mean_of_logsumexps.whole(lambda x: jax.nn.logsumexp(x, axis=-1))


@wrong(WHOLE)
def geometric_mean_of_sums(x):
    return jnp.exp(lax.pmean(jnp.log((x**2).sum(-1)), "tp"))  # wrong: nonlinear


geometric_mean_of_sums.right(lambda x: lax.psum((x**2).sum(-1), "tp"))
geometric_mean_of_sums.whole(lambda x: (x**2).sum(-1))


@wrong(WHOLE)
def mean_of_norms(x):
    return lax.pmean(jnp.linalg.norm(x, axis=-1), "tp")  # wrong: nonlinear


mean_of_norms.right(lambda x: jnp.sqrt(lax.psum((x**2).sum(-1), "tp")))
mean_of_norms.whole(lambda x: jnp.linalg.norm(x, axis=-1))


@wrong(WHOLE)
def mean_of_medians(x):
    return lax.pmean(jnp.median(x, axis=-1), "tp")  # wrong: pending


mean_of_medians.right(lambda x: jnp.median(all_gather(x, "b/dp n/tp -> b/dp n", to="invarying"), axis=-1))
mean_of_medians.whole(lambda x: jnp.median(x, axis=-1))


@wrong(WHOLE)
def mean_of_maxima(x):
    return lax.pmean(x.max(-1), "tp")  # wrong: pending


mean_of_maxima.right(lambda x: reduce(x, "b/dp n/tp -> b/dp", "max"))
mean_of_maxima.whole(lambda x: x.max(-1))


@wrong(WHOLE)
def sum_divided_by_the_local_count(x):
    """Four times the mean: the count is that of a block."""
    return lax.psum(x.sum(-1), "tp") / x.shape[1]  # wrong: numbers


sum_divided_by_the_local_count.right(lambda x: lax.psum(x.sum(-1), "tp") / (x.shape[1] * lax.axis_size("tp")))
sum_divided_by_the_local_count.whole(lambda x: x.mean(-1))


@wrong(WHOLE)
def sum_of_means(x):
    return lax.psum(x.mean(-1), "tp")  # wrong: numbers


sum_of_means.right(lambda x: lax.pmean(x.mean(-1), "tp"))
sum_of_means.whole(lambda x: x.mean(-1))


@wrong(WHOLE)
def mean_of_sums(x):
    return lax.pmean(x.sum(-1), "tp")  # wrong: numbers


mean_of_sums.right(lambda x: lax.psum(x.sum(-1), "tp"))
mean_of_sums.whole(lambda x: x.sum(-1))


@wrong("b/dp n/tp, b/dp n/tp -> b/dp")
def cosine_of_blocks(x, y):
    cos = (x * y).sum(-1) / jnp.sqrt((x**2).sum(-1) * (y**2).sum(-1))  # wrong: nonlinear
    return lax.pmean(cos, "tp")


@cosine_of_blocks.right
def _(x, y):
    xy, xx, yy = (lax.psum((a * b).sum(-1), "tp") for a, b in ((x, y), (x, x), (y, y)))
    return xy / jnp.sqrt(xx * yy)


cosine_of_blocks.whole(lambda x, y: (x * y).sum(-1) / jnp.sqrt((x**2).sum(-1) * (y**2).sum(-1)))
