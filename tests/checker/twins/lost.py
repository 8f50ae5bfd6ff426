"""Layouts that are lost after the first operation: gathered in another order than they were divided."""

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import all_gather, reduce
from tests.checker.twins.registry import wrong


def gathered(w):
    """The whole of what is divided over tp first, then dp."""
    return all_gather(w, "m/tp/dp d -> m d", to="invarying")


def whole(w):
    return all_gather(w, "m/dp/tp d -> m d", to="invarying")


@wrong("m/dp/tp d -> m d")
def after_a_product(w):
    return all_gather(w * 1.0, "m/tp/dp d -> m d", to="invarying")  # wrong: layout


after_a_product.right(lambda w: whole(w * 1.0))
after_a_product.whole(lambda w: w)


@wrong("m/dp/tp d -> m d")
def after_a_cast(w):
    half = w.astype(jnp.bfloat16)
    return all_gather(half, "m/tp/dp d -> m d", to="invarying").astype(jnp.float32)  # wrong: layout


after_a_cast.right(lambda w: whole(w.astype(jnp.bfloat16)).astype(jnp.float32))


@wrong("l m/dp/tp d -> m d")
def after_an_index(w):
    return all_gather(w[0], "m/tp/dp d -> m d", to="invarying")  # wrong: layout


after_an_index.right(lambda w: whole(w[0]))
after_an_index.whole(lambda w: w[0])


@wrong("l m/dp/tp d, b d -> b d")
def in_a_scan(w, x):
    def layer(h, w):
        w = all_gather(w, "m/tp/dp d -> m d", to="invarying")  # wrong: layout
        return jnp.tanh(h + (w * jnp.arange(32.0)[:, None]).sum(0, keepdims=True)), None

    return lax.scan(layer, x, w)[0]


@in_a_scan.right
def _(w, x):
    def layer(h, w):
        return jnp.tanh(h + (whole(w) * jnp.arange(32.0)[:, None]).sum(0, keepdims=True)), None

    return lax.scan(layer, x, w)[0]


@wrong("m/dp/tp d, b/dp m -> b/dp d")
def under_a_checkpoint(w, x):
    def layer(w, x):
        w = all_gather(w, "m/tp/dp d -> m d")  # wrong: layout
        return jnp.tanh(x @ w)

    return lax.pmean(jax.checkpoint(layer)(w, x), "tp")


@under_a_checkpoint.right
def _(w, x):
    layer = lambda w, x: jnp.tanh(x @ all_gather(w, "m/dp/tp d -> m d"))
    return lax.pmean(jax.checkpoint(layer)(w, x), "tp")


under_a_checkpoint.whole(lambda w, x: jnp.tanh(x @ w))


@wrong("m/dp/tp d -> m d")
def under_a_jit(w):
    return jax.jit(lambda w: all_gather(w, "m/tp/dp d -> m d", to="invarying"))(w)  # wrong: layout


under_a_jit.right(lambda w: jax.jit(whole)(w))


@wrong("m/dp/tp d, b/dp m -> m/dp/tp d")
def under_a_gradient(w, x):
    """As in a training step: the weight is an argument of the loss, no more of the kernel."""

    def loss(w):
        w = all_gather(w, "m/tp/dp d -> m d")  # wrong: layout
        return reduce(jnp.sin(x @ w), "b/dp d -> scalar", "mean")

    return spmd.grad(loss)(w)


@under_a_gradient.right
def _(w, x):
    loss = lambda w: reduce(jnp.sin(x @ all_gather(w, "m/dp/tp d -> m d")), "b/dp d -> scalar", "mean")
    return spmd.grad(loss)(w)


under_a_gradient.whole(lambda w, x: jax.grad(lambda w: jnp.sin(x @ w).mean())(w))


@wrong("m/dp/tp d -> m d")
def through_a_tuple(w):
    """A tree of layers, mapped and zipped as optimizers do."""
    tree = jax.tree.map(jnp.tanh, {"in": w, "out": (2 * w,)})
    return all_gather(tree["out"][0], "m/tp/dp d -> m d", to="invarying")  # wrong: layout


@through_a_tuple.right
def _(w):
    tree = jax.tree.map(jnp.tanh, {"in": w, "out": (2 * w,)})
    return whole(tree["out"][0])
