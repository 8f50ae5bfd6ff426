"""Gradients inside a kernel: of local means and copies, scaled or summed once too often, or not summed."""

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import reduce
from tests.checker.twins.registry import wrong

STEP = "d f, b/dp d -> d f"
WIDE = {"dp": 8}


def square(w, x):
    return (jnp.sin(x @ w) ** 2).mean()


@wrong(STEP)
def gradient_of_a_local_mean(w, x):
    """JAX adds the devices' gradients up: twice too much."""
    return jax.grad(lambda w: (jnp.sin(x @ w) ** 2).mean())(w)  # wrong: gradient


gradient_of_a_local_mean.right(lambda w, x: jax.grad(lambda w: lax.pmean(square(w, x), "dp"))(w))
gradient_of_a_local_mean.whole(lambda w, x: jax.grad(square)(w, x))


@wrong(STEP)
def step_on_a_local_mean(w, x):
    g = jax.grad(lambda w: (jnp.sin(x @ w) ** 2).mean())(w)  # wrong: gradient
    return w - 0.1 * g


step_on_a_local_mean.right(
    lambda w, x: w - 0.1 * spmd.grad(lambda w: reduce(jnp.sin(x @ w) ** 2, "b/dp f -> scalar", "mean"))(w)
)
step_on_a_local_mean.whole(lambda w, x: w - 0.1 * jax.grad(square)(w, x))


@wrong(STEP)
def gradient_of_a_copied_loss(w, x):
    """Every device has the loss of all rows, and JAX differentiates the sum of these copies."""

    def loss(w):
        rows = lax.all_gather(x, "dp", tiled=True)
        return (jnp.sin(rows @ w) ** 2).mean()

    return jax.grad(loss)(w)  # wrong: gradient


gradient_of_a_copied_loss.right(
    lambda w, x: jax.grad(lambda w: lax.pmean(square(w, lax.all_gather(x, "dp", tiled=True)), "dp"))(w)
)
gradient_of_a_copied_loss.whole(lambda w, x: jax.grad(square)(w, x))


@wrong(STEP)
def gradient_summed_again(w, x):
    """JAX has added it up already, because w is equal on all devices."""
    g = jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w)
    return lax.psum(lax.pcast(g, "dp", to="varying"), "dp")  # wrong: copies


gradient_summed_again.right(lambda w, x: jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w))
gradient_summed_again.whole(lambda w, x: jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w))


@wrong(STEP)
def clipped_before_the_sum(w, x):
    """The weight varies by type, so each device has the gradient of its own rows."""
    v = lax.pcast(w, "dp", to="varying")
    g = jax.grad(lambda v: (jnp.sin(x @ v) ** 2).sum())(v)
    return lax.psum(jnp.clip(g, -0.5, 0.5), "dp")  # wrong: nonlinear


@clipped_before_the_sum.right
def _(w, x):
    v = lax.pcast(w, "dp", to="varying")
    g = jax.grad(lambda v: (jnp.sin(x @ v) ** 2).sum())(v)
    return jnp.clip(lax.psum(g, "dp"), -0.5, 0.5)


clipped_before_the_sum.whole(lambda w, x: jnp.clip(jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w), -0.5, 0.5))


@wrong(STEP, mesh=WIDE, b=16)
def second_moment_of_parts(w, x):
    """An optimizer's square of a gradient that is not yet summed."""
    v = lax.pcast(w, "dp", to="varying")
    g = jax.grad(lambda v: (jnp.sin(x @ v) ** 2).sum())(v)
    return lax.psum(g**2, "dp")  # wrong: nonlinear


@second_moment_of_parts.right
def _(w, x):
    v = lax.pcast(w, "dp", to="varying")
    g = jax.grad(lambda v: (jnp.sin(x @ v) ** 2).sum())(v)
    return lax.psum(g, "dp") ** 2


second_moment_of_parts.whole(lambda w, x: jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w) ** 2)


@wrong("d/dp f, d/dp f -> d/dp f")
def norm_of_a_block(w, g):
    """Clipped by the norm of a block of the gradient instead of all of it."""
    return w - g / jnp.maximum(1.0, jnp.linalg.norm(g))  # wrong: nonlinear


norm_of_a_block.right(lambda w, g: w - g / jnp.maximum(1.0, jnp.sqrt(lax.psum((g**2).sum(), "dp"))))
norm_of_a_block.whole(lambda w, g: w - g / jnp.maximum(1.0, jnp.linalg.norm(g)))


@wrong("d/tp f, b/dp d/tp -> d/tp f")
def loss_on_a_partial_product(w, x):
    def loss(w):
        return lax.pmean((jnp.sin(x @ w) ** 2).mean(), "dp")  # wrong: nonlinear

    return jax.grad(loss)(w)


loss_on_a_partial_product.right(
    lambda w, x: jax.grad(lambda w: lax.pmean((jnp.sin(lax.psum(x @ w, "tp")) ** 2).mean(), "dp"))(w)
)


@wrong(STEP, unseen="what a loop adds up has no single factor")
def mean_of_micro_batches(w, x):
    """The mean over steps, and a sum over devices."""

    def step(total, rows):
        return total + jax.grad(lambda v: (jnp.sin(rows[None] @ v) ** 2).mean())(v), None

    v = lax.pcast(w, "dp", to="varying")
    total, _ = lax.scan(step, jnp.zeros_like(v), x)
    return lax.psum(total / x.shape[0], "dp")  # wrong: numbers


@mean_of_micro_batches.right
def _(w, x):
    def step(total, rows):
        return total + jax.grad(lambda v: (jnp.sin(rows[None] @ v) ** 2).mean())(v), None

    v = lax.pcast(w, "dp", to="varying")
    total, _ = lax.scan(step, jnp.zeros_like(v), x)
    return lax.pmean(total / x.shape[0], "dp")


mean_of_micro_batches.whole(lambda w, x: jax.grad(square)(w, x))
