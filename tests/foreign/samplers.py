"""Samples of a divided vocabulary, and other uses of keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import count, draw, foreign

KEY = jax.random.key(3)


def _rows(key, logits, noise):
    """Sampling with noise of its own for each row: what is meant. The published ones draw it per shard of the batch."""
    top, tokens = jax.lax.top_k(logits, 4)
    return jnp.take_along_axis(tokens, jnp.argmax(top + noise(key, top.shape), -1)[..., None], -1)[..., 0]


def _gumbel(key, logits):
    return _rows(key, logits, jax.random.gumbel)


def _uniform(key, probs):
    top, tokens = jax.lax.top_k(probs, 4)
    below = jnp.cumsum(top, -1) / top.sum(-1)[..., None]
    at = jnp.argmax(jax.random.uniform(key, top.shape[:-1])[..., None] <= below, -1)
    return jnp.take_along_axis(tokens, at[..., None], -1)[..., 0]


def _top(logits, axis):
    """The four largest of a divided vocabulary, with their numbers, on every device."""
    top, tokens = jax.lax.top_k(logits, 4)
    tokens = tokens + logits.shape[-1] * jax.lax.axis_index(axis)
    top = jax.lax.all_gather(top, axis, axis=-1, tiled=True)
    tokens = jax.lax.all_gather(tokens, axis, axis=-1, tiled=True)
    top, at = jax.lax.top_k(top, 4)
    return top, jnp.take_along_axis(tokens, at, -1)


@foreign(
    "jax-ml/jax-llm-examples gemma4/gemma4_jax/model.py:1494", _gumbel, finds=("noise",), stays=1, mapped=True, x=2, z=4
)
def gumbel_sample(mesh):
    """Its key is equal on all devices, so each part of the batch gets the same noise."""
    spec = P("x", "z")

    def sample(key, logits):
        top, tokens = _top(logits, "z")
        at = jnp.argmax(top + jax.random.gumbel(key, top.shape, top.dtype), axis=-1)
        token = jnp.take_along_axis(tokens, at[..., None], -1)[..., 0]
        return jax.lax.pmax(token, "z")

    fn = jax.shard_map(sample, mesh=mesh, in_specs=(P(), spec), out_specs=P("x"))
    return jax.jit(fn), (KEY, draw(8, 32))


@foreign(
    "jax-ml/jax-llm-examples gpt_oss/gpt_oss_jax/model.py:1135",
    _uniform,
    finds=("noise",),
    stays=1,
    mapped=True,
    x=2,
    z=4,
)
def binomial_sample(mesh):
    """The same, with uniform numbers."""

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("x", "z")), out_specs=P("x"))
    def sample(key, probs):
        top, tokens = _top(probs, "z")
        below = jnp.cumsum(top, axis=-1) / jnp.sum(top, axis=-1)[..., None]
        at = jnp.argmax(jax.random.uniform(key, top.shape[:-1])[..., None] <= below, axis=-1)
        return jax.lax.pmax(jnp.take_along_axis(tokens, at[..., None], -1)[..., 0], "z")

    return jax.jit(sample), (KEY, jax.nn.softmax(draw(8, 32)))


def _greedy(logits):
    return jnp.argmax(logits, -1)


@foreign("jax-ml/jax-llm-examples gemma4/gemma4_jax/model.py:1501", _greedy, stays=2, tp=4)
def greedy(mesh):
    """The largest of a divided vocabulary; the first of several."""

    def local(logits):
        most = jnp.max(logits, axis=-1)
        at = jnp.argmax(logits, axis=-1) + jax.lax.axis_index("tp") * logits.shape[-1]
        whole = jax.lax.pmax(most, "tp")
        return jax.lax.pmin(jnp.where(most == whole, at, 2**30), "tp")

    fn = jax.shard_map(local, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(), check_vma=False)
    return jax.jit(fn), (draw(6, 32),)


def _dropped(x):
    return jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape[1:]), x, 0)


@foreign("google/flax flax/linen/stochastic.py:105", _dropped, dp=4)
def dropout_of_features(mesh):
    """One mask of features for the whole batch: equal keys are meant."""

    def local(x):
        kept = jax.random.bernoulli(KEY, 0.5, x.shape[1:])
        return jnp.where(kept, x, 0)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))), (draw(8, 5),)


def _embedded(table, ids):
    return table[ids]


@foreign("kingoflolz/mesh-transformer-jax mesh_transformer/layers.py:193", _embedded, tp=4)
def vocabulary_embedding(mesh):
    def local(table, ids):
        rows = table.shape[0]
        at = ids - jax.lax.axis_index("tp") * rows
        mine = (at >= 0) & (at < rows)
        return jax.lax.psum(jnp.where(mine[..., None], table[jnp.where(mine, at, 0)], 0), "tp")

    fn = jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
    return jax.jit(fn), (draw(16, 5), count(3, 4, most=16))


def _loss(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1).mean()


@foreign("kingoflolz/mesh-transformer-jax mesh_transformer/layers.py:575", _loss, dp=2, tp=4)
def vocabulary_loss(mesh):
    def local(logits, labels):
        most = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "tp")
        shifted = logits - most[:, None]
        total = jax.lax.psum(jnp.exp(shifted).sum(-1), "tp")
        at = labels - jax.lax.axis_index("tp") * logits.shape[-1]
        mine = (at >= 0) & (at < logits.shape[-1])
        own = jnp.take_along_axis(shifted, jnp.where(mine, at, 0)[:, None], -1)[:, 0]
        own = jax.lax.psum(jnp.where(mine, own, 0), "tp")
        return jax.lax.pmean(jnp.mean(jnp.log(total) - own), "dp")

    fn = jax.shard_map(local, mesh=mesh, in_specs=(P("dp", "tp"), P("dp")), out_specs=P())
    return jax.jit(fn), (draw(8, 16), count(8, most=16))
