"""Partial sums: used before they are complete, or completed twice."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd import einsum, psum
from tests.checker.twins.registry import wrong

ROWS = "b/dp d/tp, d/tp f -> b/dp f"
BIAS = "b/dp d/tp, d/tp f, f -> b/dp f"
SCATTERED = "b/dp d/tp, d/tp f -> b/dp f/tp"


@wrong(BIAS, raw=True)
def bias_before_the_psum(x, w, bias):
    y = x @ w + bias[None]  # wrong: mixed
    return lax.psum(y, "tp")


bias_before_the_psum.right(lambda x, w, bias: lax.psum(x @ w, "tp") + bias[None])
bias_before_the_psum.whole(lambda x, w, bias: x @ w + bias[None])


@wrong(ROWS, raw=True)
def tanh_before_the_psum(x, w):
    return lax.psum(jnp.tanh(x @ w), "tp")  # wrong: nonlinear


tanh_before_the_psum.right(lambda x, w: jnp.tanh(lax.psum(x @ w, "tp")))
tanh_before_the_psum.whole(lambda x, w: jnp.tanh(x @ w))


@wrong(ROWS, raw=True)
def gate_before_the_psum(x, w):
    """Both factors are partial sums."""
    y = x @ w
    return lax.psum(y * jax.nn.sigmoid(y), "tp")  # wrong: nonlinear


@gate_before_the_psum.right
def _(x, w):
    y = lax.psum(x @ w, "tp")
    return y * jax.nn.sigmoid(y)


gate_before_the_psum.whole(lambda x, w: jax.nn.silu(x @ w))


@wrong("b/dp d/tp, d/tp f, b/dp f -> b/dp f")
def residual_before_the_psum(x, w, residual):
    y = residual + einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f {U:tp}")  # wrong: mixed
    return lax.psum(y, "tp")


residual_before_the_psum.right(lambda x, w, residual: residual + einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f"))
residual_before_the_psum.whole(lambda x, w, residual: residual + x @ w)


@wrong("b/dp d, d f -> b/dp f", raw=True)
def sum_of_copies(x, w):
    """Nothing is divided over tp: the sum is four times the product."""
    return lax.psum(lax.pcast(x @ w, "tp", to="varying"), "tp")  # wrong: copies


sum_of_copies.right(lambda x, w: lax.pmean(lax.pcast(x @ w, "tp", to="varying"), "tp"))
sum_of_copies.whole(lambda x, w: x @ w)


@wrong("b/dp d/tp, d/tp f -> b/dp f")
def sum_of_gathered_copies(x, w):
    full = lax.all_gather(x, "tp", axis=1, tiled=True)
    rows = lax.all_gather(w, "tp", axis=0, tiled=True)
    return lax.psum(full @ rows, "tp")  # wrong: copies


sum_of_gathered_copies.right(lambda x, w: lax.psum(x @ w, "tp"))


@wrong(ROWS)
def summed_twice(x, w):
    y = lax.psum(x @ w, "tp")
    return lax.psum(lax.pcast(y * 0.5, "tp", to="varying"), "tp")  # wrong: copies


summed_twice.right(lambda x, w: lax.psum(x @ w, "tp") * 0.5)


@wrong(SCATTERED)
def scatter_of_a_complete_sum(x, w):
    y = lax.pcast(lax.psum(x @ w, "tp"), "tp", to="varying")
    return lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)  # wrong: copies


scatter_of_a_complete_sum.right(lambda x, w: lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True))
scatter_of_a_complete_sum.whole(lambda x, w: x @ w)


@wrong(SCATTERED, unseen="a slice whose start differs between devices may take what other devices do not")
def block_of_a_partial_sum(x, w):
    """A slice instead of a psum_scatter."""
    y = x @ w
    return lax.dynamic_slice_in_dim(y, lax.axis_index("tp") * 2, 2, axis=1)  # wrong: partial


@block_of_a_partial_sum.right
def _(x, w):
    y = lax.psum(x @ w, "tp")
    return lax.dynamic_slice_in_dim(y, lax.axis_index("tp") * 2, 2, axis=1)


block_of_a_partial_sum.whole(lambda x, w: x @ w)


@wrong("b/dp s d/tp, d/tp -> b/dp s/tp")
def contraction_taken_for_a_row(x, w):
    """The scores over divided features are returned as if the sequence were divided."""
    return (x @ w)[:, :4]  # wrong: partial or layout


contraction_taken_for_a_row.right(lambda x, w: lax.psum_scatter(x @ w, "tp", scatter_dimension=1, tiled=True))


@wrong("b/dp d/tp, d/tp f, b/dp f -> b/dp f", raw=True)
def division_by_a_partial_sum(x, w, y):
    return lax.psum(y / (2.0 + (x @ w) ** 2), "tp")  # wrong: nonlinear


division_by_a_partial_sum.right(lambda x, w, y: y / (2.0 + lax.psum(x @ w, "tp") ** 2))


@wrong("b/dp s/tp d -> b/dp s/tp d", raw=True)
def norm_of_a_partial_sum(x):
    """The gradient's norm, of a sum over tokens that is not complete."""
    g = (x**2).sum((0, 1), keepdims=True)
    return x / jnp.sqrt(lax.psum(g**2, ("dp", "tp")).sum(2, keepdims=True))  # wrong: nonlinear


@norm_of_a_partial_sum.right
def _(x):
    g = lax.psum((x**2).sum((0, 1), keepdims=True), ("dp", "tp"))
    return x / jnp.sqrt((g**2).sum(2, keepdims=True))


@norm_of_a_partial_sum.whole
def _(x):
    g = (x**2).sum((0, 1), keepdims=True)
    return x / jnp.sqrt((g**2).sum(2, keepdims=True))


@wrong(ROWS, raw=True)
def largest_of_partial_sums(x, w):
    y = x @ w
    return lax.psum(y / jnp.abs(y).max(), "tp")  # wrong: nonlinear


@largest_of_partial_sums.right
def _(x, w):
    y = lax.psum(x @ w, "tp")
    return y / reduced_max(y)


def reduced_max(y):
    return lax.pmax(jnp.abs(lax.stop_gradient(y)).max(), "dp")


@wrong(ROWS)
def whole_numbers_of_a_partial_sum(x, w):
    """Rounded parts do not add up to the rounded sum."""
    return lax.psum((10.0 * (x @ w)).astype(jnp.int32), "tp")  # wrong: nonlinear


whole_numbers_of_a_partial_sum.right(lambda x, w: lax.psum(10.0 * (x @ w), "tp").astype(jnp.int32))
whole_numbers_of_a_partial_sum.whole(lambda x, w: (10.0 * (x @ w)).astype(jnp.int32))


@wrong(BIAS)
def mask_before_the_psum(x, w, bias):
    """Where the mask holds, four devices add the bias."""
    y = jnp.where(bias[None] > 0, bias[None], x @ w)  # wrong: mixed or nonlinear
    return lax.psum(y, "tp")


mask_before_the_psum.right(lambda x, w, bias: jnp.where(bias[None] > 0, bias[None], lax.psum(x @ w, "tp")))


@wrong("b/dp s/tp d, d f/tp, f/tp -> b/dp s f/tp")
def product_of_partial_sums(x, w, scale):
    """Two sums over the sequence, multiplied before either is complete."""
    a = x.sum(1, keepdims=True)
    b = (x**2).sum(1, keepdims=True)
    c = lax.psum(a * b, "tp")  # wrong: nonlinear
    return jnp.broadcast_to((c @ w) * scale[None, None], (x.shape[0], 16, w.shape[1]))


@product_of_partial_sums.right
def _(x, w, scale):
    a = lax.psum(x.sum(1, keepdims=True), "tp")
    b = lax.psum((x**2).sum(1, keepdims=True), "tp")
    return jnp.broadcast_to(((a * b) @ w) * scale[None, None], (x.shape[0], 16, w.shape[1]))


@wrong("b/dp d/tp, d/tp f -> b/dp f")
def declared_sum_used(x, w):
    """The string says that the value is a partial sum, and the next line forgets it."""
    y = einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f {U:tp}")
    return psum(jax.nn.relu(y), "b/dp f {U:tp} -> b/dp f")  # wrong: nonlinear


@declared_sum_used.right
def _(x, w):
    y = einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f {U:tp}")
    return jax.nn.relu(psum(y, "b/dp f {U:tp} -> b/dp f"))
