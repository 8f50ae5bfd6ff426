"""Means, norms, histograms and steps of training over a divided batch."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import count, draw, foreign


def _normed(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


@foreign("sgl-project/sglang-jax python/sgl_jax/srt/layers/layernorm.py:126", _normed, dp=4)
def batch_norm(mesh):
    def stats(x, axis_name):
        mus = (x.mean(0), (x * x).mean(0))
        mean, square = lax.pmean(jnp.stack(mus, axis=0), axis_name)
        return mean, jnp.maximum(0.0, square - mean**2)

    def norm(x):
        mean, var = stats(x, "dp")
        return (x - mean) / jnp.sqrt(var + 1e-5)

    fn = jax.shard_map(norm, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    return jax.jit(fn), (draw(16, 5),)


def _histogram(x, edges):
    inside = (x.flatten()[None] >= edges[:-1, None]) & (x.flatten()[None] < edges[1:, None])
    return inside.astype(x.dtype).sum(1)


@foreign("stanford-crfm/levanter src/levanter/tracker/histogram.py:119", _histogram, data=2, model=4)
def histogram(mesh):
    def single(a, edges, reduce_mesh):
        a = a.flatten()
        inside = ((a[None] >= edges[:-1, None]) & (a[None] < edges[1:, None])).astype(a.dtype)
        counts = inside.sum(axis=1, dtype=a.dtype)
        if len(reduce_mesh):
            counts = jax.lax.psum(counts, axis_name=reduce_mesh)
        return counts

    mapped = jax.shard_map(
        partial(single, reduce_mesh=("data", "model")),
        mesh=mesh,
        in_specs=(P("data", "model"), P()),
        out_specs=P(),
    )
    return jax.jit(mapped), (draw(8, 8), jnp.linspace(-2, 2, 7))


@foreign("netket/netket netket/jax/sharding/fixed_sharding_decorator.py:183", lambda x: jnp.tanh(x).sum(0), S=4)
def summed_samples(mesh):
    @partial(jax.shard_map, mesh=mesh, in_specs=P("S"), out_specs=P())
    def local(x):
        res = jax.vmap(jnp.tanh)(x).sum(axis=0)
        return jax.lax.psum(res, axis_name="S")

    return jax.jit(local), (draw(8, 3),)


def _covariance(x):
    centred = x - x.mean(0)
    return centred.T @ centred / x.shape[0]


@foreign("netket/netket netket/_src/ngd/srt_onthefly.py:156", _covariance, S=4)
def covariance(mesh):
    def local(x):
        centred = x - lax.pmean(x.mean(0), "S")
        return lax.pmean(centred.T @ centred / x.shape[0], "S")

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("S"), out_specs=P())), (draw(12, 4),)


def _training(w, x, y):
    loss = lambda w: ((jnp.tanh(x @ w) - y) ** 2).mean()
    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


@foreign("google/flax examples/imagenet/train.py:146", _training, stays=2, mapped=True, batch=4)
def data_parallel_step(mesh):
    """Gradients in the body are those of local means; the mean of them is taken over the devices."""

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=(P(), P()), check_vma=False)
    def step(w, x, y):
        loss = lambda w: ((jnp.tanh(x @ w) - y) ** 2).mean()
        value, gradient = jax.value_and_grad(loss)(w)
        gradient = lax.pmean(gradient, "batch")
        return w - 0.1 * gradient, lax.pmean(value, "batch")

    return jax.jit(step), (draw(5, 3), draw(8, 5), draw(8, 3))


@foreign(
    "google/flax flax/nnx/nn/normalization.py:115",
    lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6),
    tp=4,
)
def divided_rms_norm(mesh):
    def norm(x):
        square = lax.psum(jnp.sum(x * x, -1, keepdims=True), "tp") / (x.shape[-1] * lax.axis_size("tp"))
        return x * lax.rsqrt(square + 1e-6)

    fn = jax.shard_map(norm, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"))
    return jax.jit(fn), (draw(3, 8),)


def _clipped(grads):
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)


@foreign("kingoflolz/mesh-transformer-jax mesh_transformer/util.py:32", _clipped, fsdp=4)
def clip_divided_gradients(mesh):
    def clip(grads):
        square = sum((g**2).sum() for g in jax.tree.leaves(grads))
        norm = jnp.sqrt(lax.psum(square, "fsdp"))
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)

    specs = {"w": P("fsdp"), "v": P(None, "fsdp")}
    fn = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=specs)
    return jax.jit(fn), ({"w": draw(8, 3), "v": draw(2, 8)},)


def _variance_by_tree(trees):
    return jax.tree.map(lambda x: x.mean(0), trees)


@foreign("google/flax flax/jax_utils.py:79", _variance_by_tree, dp=4)
def mean_of_a_tree(mesh):
    def means(tree):
        return jax.tree.map(lambda x: lax.pmean(x.mean(0), axis_name="dp"), tree)

    fn = jax.shard_map(means, mesh=mesh, in_specs=({"a": P("dp"), "b": P("dp")},), out_specs={"a": P(), "b": P()})
    return jax.jit(fn), ({"a": draw(8, 3), "b": draw(8, 2, 5)},)


@foreign(
    "sgl-project/sglang-jax python/sgl_jax/srt/utils/jax_utils.py:207", lambda a: a.min(0), stays=1, own=True, device=4
)
def least_memory(mesh):
    """The least of what the devices have; each has one number."""

    def least(a):
        return jax.lax.pmin(a[0], axis_name="device")

    return jax.jit(jax.shard_map(least, mesh=mesh, in_specs=P("device"), out_specs=P())), (draw(4),)


def _pairwise(x):
    return ((x[:, None] - x[None]) ** 2).sum(-1)


@foreign("jax-ml/jax docs/notebooks/shard_map.md:1099", _pairwise, i=4)
def pairwise_distances(mesh):
    def local(x):
        every = lax.all_gather(x, "i", tiled=True)
        return ((x[:, None] - every[None]) ** 2).sum(-1)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("i"), out_specs=P("i"))), (draw(8, 3),)


def _krylov(a, b):
    return jnp.linalg.solve(a @ a.T + 8 * jnp.eye(8), b)


@foreign("netket/netket netket/optimizer/qgt/qgt_onthefly_logic.py:116", _krylov, r=4)
def conjugate_gradients(mesh):
    def solve(rows, b):
        def product(v):
            return rows @ lax.all_gather(v, "r", tiled=True)

        def dot(u, v):
            return lax.psum(jnp.vdot(u, v), "r")

        def step(_, carry):
            x, r, p, rr = carry
            ap = product(p)
            alpha = rr / dot(p, ap)
            x, r = x + alpha * p, r - alpha * ap
            new = dot(r, r)
            return x, r, r + new / rr * p, new

        x = jnp.zeros_like(b)
        return lax.fori_loop(0, 8, step, (x, b, b, dot(b, b)))[0]

    fn = jax.shard_map(solve, mesh=mesh, in_specs=(P("r"), P("r")), out_specs=P("r"), check_vma=False)
    inner = lambda a, b: fn(a @ a.T + 8 * jnp.eye(8), b)
    return jax.jit(inner), (draw(8, 8), draw(8))


def _side_by_side(q, k, v):
    """For each of four blocks of features: those of q, of k and of v."""
    blocks = [jnp.split(x, 4, axis=-1) for x in (q, k, v)]
    return jnp.concatenate([part for block in zip(*blocks, strict=True) for part in block], axis=-1)


@foreign(
    "AI-Hypercomputer/maxtext src/maxtext/models/qwen3.py:700",
    _side_by_side,
    mapped=True,
    asks=("pending",),
    data=2,
    tp=4,
)
def joined_on_each_shard(mesh):
    """The convolution's weights lie in the same order, so nothing is sent."""
    fn = jax.shard_map(
        lambda q, k, v: jnp.concatenate([q, k, v], axis=-1),
        mesh=mesh,
        in_specs=(P("data", "tp"),) * 3,
        out_specs=P("data", "tp"),
        check_vma=False,
    )
    return jax.jit(fn), (draw(6, 8), draw(6, 8, seed="k"), draw(6, 16))


def _rows_of_ranks(hidden, index):
    blocks, places = hidden.reshape(4, -1, hidden.shape[-1]), index.reshape(4, -1)
    return jax.vmap(lambda rows, place: rows[place])(blocks, places).reshape(-1, hidden.shape[-1])


@foreign(
    "vllm-project/tpu-inference tpu_inference/spec_decode/jax/dflash.py:355",
    _rows_of_ranks,
    mapped=True,
    asks=("pending",),
    attn_dp=4,
)
def rows_by_own_indices(mesh):
    """Each rank counts its rows from 0."""

    def own(hidden, index):
        return hidden[index]

    spec = P("attn_dp")
    fn = jax.shard_map(own, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return jax.jit(fn), (draw(16, 3), count(8, most=4))
