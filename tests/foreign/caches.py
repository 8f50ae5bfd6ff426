"""Caches of keys and values, and calls of Pallas on shards."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import count, draw, foreign


def _updated(cache, new, at):
    rows = jnp.arange(cache.shape[0])
    return cache.at[rows, at].set(new)


@foreign("erfanzar/EasyDeL easydel/caching/unified_attention/cache.py:203", _updated, dp=2, sp=4)
def cache_update(mesh):
    """A new row goes into the part of the cache that has its place."""

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("dp", "sp"), P("dp"), P("dp")), out_specs=P("dp", "sp"), check_vma=False
    )
    def update(cache, new, at):
        length = cache.shape[1]
        place = at - lax.axis_index("sp") * length
        mine = (place >= 0) & (place < length)
        rows, place = jnp.arange(cache.shape[0]), jnp.where(mine, place, 0)
        old = cache[rows, place]
        return cache.at[rows, place].set(jnp.where(mine[:, None], new, old))

    return jax.jit(update), (draw(4, 16, 3), draw(4, 3), count(4, most=16))


def _looked_up(pages, table):
    return pages[table].reshape(table.shape[0], -1, pages.shape[-1])


@foreign("erfanzar/EasyDeL easydel/operations/kernels/unified_attention.py:356", _looked_up, pages=4)
def page_lookup(mesh):
    """Pages are divided over devices; a request gathers its own from all of them."""

    def look(pages, table):
        n = pages.shape[0]
        at = table - lax.axis_index("pages") * n
        mine = (at >= 0) & (at < n)
        found = jnp.where(mine[..., None, None], pages[jnp.where(mine, at, 0)], 0)
        found = lax.psum(found.astype(jnp.float32), "pages").astype(pages.dtype)
        return found.reshape(table.shape[0], -1, pages.shape[-1])

    fn = jax.shard_map(look, mesh=mesh, in_specs=(P("pages"), P()), out_specs=P(), check_vma=False)
    return jax.jit(fn), (draw(8, 2, 3), count(3, 2, most=8))


def _gathered(x):
    return x


@foreign("vllm-project/tpu-inference tpu_inference/layers/common/cp_attention.py:326", _gathered, pcp=4)
def gather_of_new_keys(mesh):
    def local(x):
        return lax.all_gather(x, "pcp", axis=0, tiled=True)

    fn = jax.shard_map(local, mesh=mesh, in_specs=P("pcp"), out_specs=P(), check_vma=False)
    return jax.jit(fn), (draw(8, 4),)


def _gelu_kernel(x_ref, o_ref):
    o_ref[...] = jax.nn.gelu(x_ref[...])


def _row_product(x, w):
    return jax.nn.gelu(x) @ w


@foreign("sgl-project/sglang-jax python/sgl_jax/srt/kernels/fused_mlp.py:158", _row_product, dp=2, tp=4)
def pallas_then_sum(mesh):
    """A Pallas kernel on shards, and a sum of what follows."""

    def local(x, w):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        h = pl.pallas_call(_gelu_kernel, out_shape=shape, interpret=True)(x)
        return lax.psum(h @ w, "tp")

    fn = jax.shard_map(local, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp"), check_vma=False)
    return jax.jit(fn), (draw(4, 8), draw(8, 3))


def _scale_kernel(x_ref, s_ref, o_ref):
    o_ref[...] = x_ref[...] * s_ref[...]


@foreign("jax-ml/jax-llm-examples llama3/llama3_jax/ragged_attention.py:334", lambda x, s: x * s, tensor=4)
def pallas_alone(mesh):
    def local(x, scale):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(_scale_kernel, out_shape=shape, interpret=True)(x, scale)

    specs = (P(None, "tensor"), P(None, "tensor"))
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "tensor"), check_vma=False)
    return jax.jit(fn), (draw(4, 8), draw(1, 8, seed="scale"))


def _absmax(x):
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / scale) * scale


@foreign(
    "vllm-project/tpu-inference tpu_inference/kernels/experimental/fused_moe/gmm_fused_rs_nodedup.py:1960",
    _absmax,
    tp=4,
)
def quantized_with_a_common_scale(mesh):
    def local(x):
        most = lax.pmax(jnp.max(jnp.abs(x), axis=-1, keepdims=True), "tp")
        scale = most / 127
        return jnp.round(x / scale) * scale

    fn = jax.shard_map(local, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"))
    return jax.jit(fn), (draw(3, 8),)
