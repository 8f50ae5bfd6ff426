"""Mixtures of experts."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import count, draw, foreign


def _routed(x, w_in, w_out, weights, ids):
    every = jnp.einsum("tef,efd->ted", jax.nn.silu(jnp.einsum("td,edf->tef", x, w_in)), w_out)
    chosen = jnp.take_along_axis(every, ids[..., None], axis=1)
    return (chosen * weights[..., None]).sum(1)


def _arguments():
    weights = jax.nn.softmax(draw(8, 2, seed="weights"))
    return draw(8, 6), draw(8, 6, 12), draw(8, 12, 6), weights, count(8, 2, most=8)


def _masked(x, w_in, w_out, weights, ids, first):
    """What the experts from `first` on add for tokens that chose them."""
    total = jnp.zeros_like(x)
    for i in range(w_in.shape[0]):
        y = jax.nn.silu(x @ w_in[i]) @ w_out[i]
        total += y * jnp.where(ids == first + i, weights, 0).sum(1)[:, None]
    return total


@foreign("jax-ml/jax-llm-examples qwen3/qwen3_jax/model.py:1024", _routed, expert=2, tensor=4)
def experts_summed_twice(mesh):
    specs = (P(), P("expert", None, "tensor"), P("expert", "tensor", None), P(), P())

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    def expert_fn(x, w_in, w_out, weights, ids):
        first = jax.lax.axis_index("expert") * w_in.shape[0]
        out = _masked(x, w_in, w_out, weights, ids, first)
        return jax.lax.psum(out, ("expert", "tensor"))

    return jax.jit(expert_fn), _arguments()


@foreign("jax-ml/jax-llm-examples qwen3/qwen3_jax/model.py:1016", _routed, expert=2, tensor=2)
def experts_scattered(mesh):
    specs = (P(), P("expert", None, "tensor"), P("expert", "tensor", None), P(), P())

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(None, "tensor"), check_vma=False)
    def expert_fn(x, w_in, w_out, weights, ids):
        first = jax.lax.axis_index("expert") * w_in.shape[0]
        out = _masked(x, w_in, w_out, weights, ids, first)
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
        return jax.lax.psum(out, "expert")

    return jax.jit(expert_fn), _arguments()


@foreign("sgl-project/sglang-jax python/sgl_jax/srt/layers/moe.py:684", _routed, expert=4)
def experts_combined(mesh):
    def combine(data):
        return jax.lax.psum(data, "expert")

    def forward(x, w_in, w_out, weights, ids):
        first = jax.lax.axis_index("expert") * w_in.shape[0]
        return combine(_masked(x, w_in, w_out, weights, ids, first))

    specs = (P(None), P("expert"), P("expert"), P(None), P(None))
    fn = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=P(None), check_vma=False)
    return jax.jit(fn), _arguments()


@foreign("AI-Hypercomputer/maxtext src/maxtext/layers/moe.py:1715", _routed, ep=4)
def experts_of_gathered_tokens(mesh):
    def wrapper(x, w_in, w_out, weights, ids):
        x, weights, ids = tuple(jax.lax.all_gather(z, axis_name="ep", tiled=True) for z in (x, weights, ids))
        first = jax.lax.axis_index("ep") * w_in.shape[0]
        output = _masked(x, w_in, w_out, weights, ids, first)
        return jax.lax.psum_scatter(output, "ep", scatter_dimension=0, tiled=True)

    specs = (P("ep"), P("ep"), P("ep"), P("ep"), P("ep"))
    fn = jax.shard_map(wrapper, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False)
    return jax.jit(fn), _arguments()


def _switched(x, w_in, w_out, ids):
    return _routed(x, w_in, w_out, jnp.ones((x.shape[0], 1)), ids[:, None])


@foreign("vllm-project/tpu-inference tpu_inference/layers/jax/moe/sparse_moe.py:73", _switched, ep=4)
def switch_with_capacity(mesh):
    """Each device sends a full slot to each expert, as the padded form of a ragged exchange does."""

    def local(x, w_in, w_out, ids):
        n, (t, d), e = lax.axis_size("ep"), x.shape, w_in.shape[0]
        slots = jax.nn.one_hot(ids, n * e)  # a token's place among those of its device
        place = (jnp.cumsum(slots, 0) * slots).sum(-1).astype(jnp.int32) - 1
        sent = jnp.zeros((n * e, t, d)).at[ids, place].set(x)
        got = lax.all_to_all(sent, "ep", split_axis=0, concat_axis=0, tiled=True)  # (n e) t d, of my experts
        got = got.reshape(n, e, t, d)
        out = jnp.einsum("netf,efd->netd", jax.nn.silu(jnp.einsum("netd,edf->netf", got, w_in)), w_out)
        back = lax.all_to_all(out.reshape(n * e, t, d), "ep", split_axis=0, concat_axis=0, tiled=True)
        return back[ids, place]

    specs = (P("ep"), P("ep"), P("ep"), P("ep"))
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False)
    return jax.jit(fn), (draw(16, 6), draw(8, 6, 4), draw(8, 4, 6), count(16, most=8))


def _sizes(ids):
    return jax.nn.one_hot(ids.reshape(4, -1), 8, dtype=jnp.int32).sum(1)


@foreign("AI-Hypercomputer/maxtext src/maxtext/layers/moe.py:1787", _sizes, ep=4)
def group_sizes(mesh):
    """How many tokens each device has for each expert, on all of them."""

    def wrapper(ids):
        sizes = jax.nn.one_hot(ids, 8, dtype=jnp.int32).sum(0)
        return jax.lax.all_gather(sizes, axis_name="ep")

    fn = jax.shard_map(wrapper, mesh=mesh, in_specs=P("ep"), out_specs=P(), check_vma=False)
    return jax.jit(fn), (count(16, most=8),)


def _top(logits):
    return tuple(jax.lax.top_k(logits, 2))  # a list, before JAX 0.11


@foreign("erfanzar/EasyDeL easydel/layers/moe/_communication_utils.py:716", _top, tp=4)
def distributed_top_k(mesh):
    def local(logits):
        values, ids = jax.lax.top_k(logits, 2)
        ids = ids + jax.lax.axis_index("tp") * logits.shape[-1]
        values_all = jax.lax.all_gather(values, "tp", axis=-1, tiled=True)
        ids_all = jax.lax.all_gather(ids, "tp", axis=-1, tiled=True)
        values, at = jax.lax.top_k(values_all, 2)
        return values, jnp.take_along_axis(ids_all, at, axis=-1)

    fn = jax.shard_map(local, mesh=mesh, in_specs=P(None, "tp"), out_specs=(P(None), P(None)), check_vma=False)
    return jax.jit(fn), (draw(6, 16),)


def _grouped_product(x, w_in, w_out):
    return jnp.einsum("etf,efd->etd", jax.nn.gelu(jnp.einsum("etd,edf->etf", x, w_in)), w_out)


@foreign("erfanzar/EasyDeL easydel/layers/moe/_moe_module.py:1130", _grouped_product, ep=2, tp=4)
def experts_by_columns(mesh):
    def local(x, w_in, w_out):
        h = jax.nn.gelu(jnp.einsum("etd,edf->etf", x, w_in))
        out = jnp.einsum("etf,efd->etd", h, w_out)
        return jax.lax.psum_scatter(out, "tp", scatter_dimension=2, tiled=True)

    specs = (P("ep"), P("ep", None, "tp"), P("ep", "tp", None))
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ep", None, "tp"))
    return jax.jit(fn), (draw(4, 5, 8), draw(4, 8, 16), draw(4, 16, 8))
