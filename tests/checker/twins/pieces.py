"""Plain JAX on a piece: a function of the whole dimension, called on a part of it."""

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import all_gather, einsum, reduce, split
from tests.checker.twins.registry import wrong

ROWS = "b/dp s d/tp -> b/dp s d/tp"


def whole_rows(x):
    return all_gather(x, "b/dp s d/tp -> b/dp s d")


def my_part(y):
    return split(y, "b/dp s d -> b/dp s d/tp")


@wrong(ROWS)
def mean(x):
    return x - x.mean(-1, keepdims=True)  # wrong: mixed or pending


mean.right(lambda x: x - lax.pmean(x.mean(-1, keepdims=True), "tp"))
mean.whole(lambda x: x - x.mean(-1, keepdims=True))


@wrong(ROWS)
def softmax(x):
    return jax.nn.softmax(x, axis=-1)  # wrong: pending or nonlinear


@softmax.right
def _(x):
    top = lax.pmax(lax.stop_gradient(x).max(-1, keepdims=True), "tp")
    e = jnp.exp(x - top)
    return e / lax.psum(e.sum(-1, keepdims=True), "tp")


softmax.whole(lambda x: jax.nn.softmax(x, axis=-1))


@wrong(ROWS)
def log_softmax(x):
    return jax.nn.log_softmax(x, axis=-1)  # wrong: pending or nonlinear


log_softmax.right(lambda x: x - reduce(x, "b/dp s d/tp -> b/dp s 1", "logsumexp"))
log_softmax.whole(lambda x: jax.nn.log_softmax(x, axis=-1))


@wrong(ROWS)
def norm(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # wrong: nonlinear


norm.right(lambda x: x / jnp.sqrt(lax.psum((x**2).sum(-1, keepdims=True), "tp")))
norm.whole(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True))


@wrong(ROWS)
def variance(x):
    return x / jnp.sqrt(x.var(-1, keepdims=True) + 1.0)  # wrong: mixed or nonlinear or pending


@variance.right
def _(x):
    mean = reduce(x, "b/dp s d/tp -> b/dp s 1", "mean")
    return x / jnp.sqrt(reduce((x - mean) ** 2, "b/dp s d/tp -> b/dp s 1", "mean") + 1.0)


variance.whole(lambda x: x / jnp.sqrt(x.var(-1, keepdims=True) + 1.0))


@wrong(ROWS)
def logsumexp(x):
    return x * jax.nn.logsumexp(x, axis=-1, keepdims=True)  # wrong: pending or nonlinear


logsumexp.right(lambda x: x * reduce(x, "b/dp s d/tp -> b/dp s 1", "logsumexp"))
logsumexp.whole(lambda x: x * jax.nn.logsumexp(x, axis=-1, keepdims=True))


@wrong(ROWS)
def largest(x):
    return x / jnp.abs(x).max(-1, keepdims=True)  # wrong: pending


largest.right(lambda x: x / reduce(jnp.abs(x), "b/dp s d/tp -> b/dp s 1", "max"))
largest.whole(lambda x: x / jnp.abs(x).max(-1, keepdims=True))


@wrong(ROWS)
def cumulative_sum(x):
    return x.cumsum(-1)  # wrong: pending


cumulative_sum.right(lambda x: spmd.cumsum(x, "b/dp s [d/tp]"))
cumulative_sum.whole(lambda x: x.cumsum(-1))


@wrong(ROWS)
def sort(x):
    return jnp.sort(x, axis=-1)  # wrong: pending


sort.right(lambda x: spmd.sort(x, "b/dp s [d/tp]"))
sort.whole(lambda x: jnp.sort(x, axis=-1))


@wrong("b/dp s v/tp -> b/dp s v/tp")
def argmax(x):
    return x * (jnp.argmax(x, axis=-1, keepdims=True) % 2).astype(x.dtype)  # wrong: pending


@argmax.right
def _(x):
    best = spmd.argmax(x, "b/dp s [v/tp]")
    return x * (best[..., None] % 2).astype(x.dtype)


argmax.whole(lambda x: x * (jnp.argmax(x, axis=-1, keepdims=True) % 2).astype(x.dtype))


@wrong(
    "b/dp s v/tp -> b/dp s",
    unseen="a maximum over devices completes a maximum, and of places nobody knows what they count",
)
def winners_of_each_device(x):
    """The maximum of all is right, and its place is that within the winner's block."""
    top = lax.stop_gradient(x).max(-1)
    best = lax.pmax(top, "tp")
    place = jnp.argmax(x, axis=-1)
    return lax.pmax(jnp.where(top == best, place, -1), "tp")  # wrong: pending


@winners_of_each_device.right
def _(x):
    top = lax.stop_gradient(x).max(-1)
    best = lax.pmax(top, "tp")
    place = jnp.argmax(x, axis=-1) + lax.axis_index("tp") * x.shape[-1]
    return lax.pmax(jnp.where(top == best, place, -1), "tp")


winners_of_each_device.whole(lambda x: jnp.argmax(x, axis=-1))


@wrong("b/dp s v/tp -> b/dp s v/tp")
def top_k(x):
    """Everything below the third best of the whole vocabulary is to go."""
    return jnp.where(x >= lax.top_k(x, 3)[0][..., -1:], x, 0.0)  # wrong: pending


@top_k.right
def _(x):
    mine = lax.top_k(x, 3)[0]
    best = lax.top_k(lax.all_gather(mine, "tp", axis=2, tiled=True), 3)[0]
    return jnp.where(x >= best[..., -1:], x, 0.0)


top_k.whole(lambda x: jnp.where(x >= lax.top_k(x, 3)[0][..., -1:], x, 0.0))


@wrong(ROWS)
def roll(x):
    return jnp.roll(x, 2, axis=-1)  # wrong: pending


roll.right(lambda x: spmd.roll(x, "b/dp s [d/tp]", 2))
roll.whole(lambda x: jnp.roll(x, 2, axis=-1))


@wrong(ROWS)
def flip(x):
    return jnp.flip(x, axis=-1)  # wrong: pending


flip.right(lambda x: spmd.flip(x, "b/dp s [d/tp]"))
flip.whole(lambda x: jnp.flip(x, axis=-1))


@wrong("b/dp n/tp -> b/dp n/tp")
def median(x):
    return x - jnp.median(x, axis=-1, keepdims=True)  # wrong: pending


median.right(lambda x: x - jnp.median(all_gather(x, "b/dp n/tp -> b/dp n"), axis=-1, keepdims=True))
median.whole(lambda x: x - jnp.median(x, axis=-1, keepdims=True))


@wrong(ROWS)
def interpolate(x):
    """Values at places that are counted along the whole dimension."""
    places = jnp.array([0, 2, 1])
    return x * jnp.take(x, places, axis=-1)  # wrong: pending or disagree


@interpolate.right
def _(x):
    start = lax.axis_index("tp") * 3
    places = jnp.tile(jnp.array([0, 2, 1]), 4)
    return x * jnp.take(whole_rows(x), lax.dynamic_slice_in_dim(places, start, 3), axis=-1)


interpolate.whole(lambda x: x * jnp.take(x, jnp.tile(jnp.array([0, 2, 1]), 4), axis=-1))


@wrong(ROWS)
def first_feature(x):
    return x * x[..., :1]  # wrong: pending


first_feature.right(lambda x: x * whole_rows(x)[..., :1])
first_feature.whole(lambda x: x * x[..., :1])


@wrong(ROWS)
def batch_statistics(x):
    """The mean over features is complete, that over the batch is forgotten."""
    mean = lax.pmean(x.mean((0, 2), keepdims=True), "tp")
    return x - mean  # wrong: mixed


batch_statistics.right(lambda x: x - lax.pmean(x.mean((0, 2), keepdims=True), ("dp", "tp")))
batch_statistics.whole(lambda x: x - x.mean((0, 2), keepdims=True))


@wrong("b/dp s/tp d, d f -> b/dp s/tp f")
def split_hides_an_axis(x, w):
    """The features of each device's own tokens are split, as if all had the same tokens."""
    part = split(x, "... d -> ... d/tp")  # wrong: hidden
    return einsum(part, split(w, "d f -> d/tp f"), "... d/tp, d/tp f -> ... f")


@split_hides_an_axis.right
def _(x, w):
    part = split(all_gather(x, "b/dp s/tp d -> b/dp s d"), "b/dp s d -> b/dp s d/tp")
    return einsum(part, split(w, "d f -> d/tp f"), "b/dp s d/tp, d/tp f -> b/dp s/tp f")
