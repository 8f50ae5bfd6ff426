"""Sequences on several devices: rings, exchanges of heads, merged attention."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import draw, foreign


def _attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def _causal(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), v)


def _qkv(heads=4):
    return tuple(draw(2, 8, heads, 4, seed=one) for one in "qkv")


@foreign("haoliuhl/ringattention ringattention/ringattention_jax.py:47", _attention, sp=4)
def ring_attention(mesh):
    def ring(q, k, v):
        axis_name = "sp"
        axis_size = lax.psum(1, axis_name)
        b, s, h, d = q.shape

        def scan_kv_block(carry, _):
            prev_max, numerator, denominator, k, v = carry
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / d**0.5
            new_max = jnp.maximum(prev_max, scores.max(-1))
            weights = jnp.exp(scores - new_max[..., None])
            correction = jnp.exp(prev_max - new_max)
            numerator = numerator * correction.transpose(0, 2, 1)[..., None] + jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            denominator = denominator * correction + weights.sum(-1)
            turn = [(i, (i + 1) % axis_size) for i in range(axis_size)]
            k, v = (lax.ppermute(x, axis_name, perm=turn) for x in (k, v))
            return (new_max, numerator, denominator, k, v), None

        start = (jnp.full((b, h, s), -1e30), jnp.zeros((b, s, h, d)), jnp.zeros((b, h, s)), k, v)
        (_, numerator, denominator, _, _), _ = lax.scan(scan_kv_block, start, xs=jnp.arange(0, axis_size))
        return numerator / denominator.transpose(0, 2, 1)[..., None]

    spec = P(None, "sp")
    fn = jax.shard_map(ring, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    return jax.jit(fn), _qkv()


@foreign("haoliuhl/ringattention ringattention/ringattention_jax.py:36", _causal, dp=2, sp=4)
def causal_ring_attention(mesh):
    spec = P("dp", "sp")

    @partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    def ring(q, k, v):
        size, me = lax.axis_size("sp"), lax.axis_index("sp")
        b, s, h, d = q.shape
        rows = me * s + jnp.arange(s)

        def body(i, carry):
            most, above, below, k, v = carry
            columns = (me - i) % size * s + jnp.arange(s)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / d**0.5
            scores = jnp.where(rows[:, None] >= columns, scores, -1e30)
            new = jnp.maximum(most, scores.max(-1))
            weights, old = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            above = above * old.transpose(0, 2, 1)[..., None] + jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            below = below * old + weights.sum(-1)
            k, v = lax.ppermute((k, v), "sp", [(j, (j + 1) % size) for j in range(size)])
            return new, above, below, k, v

        start = (jnp.full((b, h, s), -1e30), jnp.zeros((b, s, h, d)), jnp.zeros((b, h, s)), k, v)
        _, above, below, _, _ = lax.fori_loop(0, size, body, start)
        return above / below.transpose(0, 2, 1)[..., None]

    return jax.jit(ring), _qkv()


@foreign("AI-Hypercomputer/maxtext src/maxtext/kernels/attention/ulysses_attention.py:207", _attention, sp=4)
def ulysses(mesh):
    axis = "sp"

    def to_heads(tensor):
        return jax.lax.all_to_all(tensor, axis, split_axis=2, concat_axis=1, tiled=True)

    def to_sequence(tensor):
        return jax.lax.all_to_all(tensor, axis, split_axis=1, concat_axis=2, tiled=True)

    def attend(q, k, v):
        return to_sequence(_attention(to_heads(q), to_heads(k), to_heads(v)))

    spec = P(None, axis, None, None)
    fn = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    return jax.jit(fn), _qkv()


def _masked(q, k, v, segments):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(same, scores, -1e30), axis=-1), v)


@foreign("AI-Hypercomputer/maxtext src/maxtext/kernels/attention/usp_attention.py:75", _masked, sp=4)
def gathered_segments(mesh):
    def attend(q, k, v, segments):
        q, k, v = (lax.all_to_all(t, "sp", split_axis=2, concat_axis=1, tiled=True) for t in (q, k, v))
        segments = jax.lax.all_gather(segments, "sp", axis=1, tiled=True)
        out = _masked(q, k, v, segments)
        return lax.all_to_all(out, "sp", split_axis=1, concat_axis=2, tiled=True)

    spec = P(None, "sp")
    fn = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    return jax.jit(fn), (*_qkv(), jnp.arange(16).reshape(2, 8) // 3)


@foreign("AI-Hypercomputer/maxtext src/maxtext/layers/attention_op.py:2048", _attention, context=4)
def gathered_keys(mesh):
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "context"),) * 3, out_specs=P(None, "context"))
    def attend(q, k, v):
        k = lax.all_gather(k, "context", axis=1, tiled=True)
        v = lax.all_gather(v, "context", axis=1, tiled=True)
        return _attention(q, k, v)

    return jax.jit(attend), _qkv()


@foreign("vllm-project/tpu-inference tpu_inference/layers/common/cp_attention.py:118", _attention, dcp=4)
def decode_over_a_divided_cache(mesh):
    """All heads attend to the part of the cache that a device has; then heads are exchanged and merged."""

    def reduced(o, lse, axis, axis_size):
        t, h, d = o.shape
        o = lax.all_to_all(o, axis, split_axis=1, concat_axis=0, tiled=True)
        lse = lax.all_to_all(lse, axis, split_axis=1, concat_axis=0, tiled=True)
        o, lse = o.reshape(axis_size, t, h // axis_size, d), lse.reshape(axis_size, t, h // axis_size)
        out_lse = jax.nn.logsumexp(lse, axis=0)
        return (o * jnp.exp(lse - out_lse)[..., None]).sum(0)

    def attend(q, k, v):
        q = lax.all_gather(q[0], "dcp", axis=1, tiled=True)
        scores = jnp.einsum("qhd,khd->qhk", q, k[0]) / q.shape[-1] ** 0.5
        lse = jax.nn.logsumexp(scores, axis=-1)
        o = jnp.einsum("qhk,khd->qhd", jnp.exp(scores - lse[..., None]), v[0])
        return reduced(o, lse, "dcp", lax.axis_size("dcp"))[None]

    specs = (P(None, None, "dcp"), P(None, "dcp"), P(None, "dcp"))
    fn = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(None, None, "dcp"), check_vma=False)
    return jax.jit(fn), (draw(1, 3, 4, 4), draw(1, 8, 4, 4), draw(1, 8, 4, 4, seed="v"))


def _merged(q, k, v):
    return _attention(q[:, None], k, v)[:, 0]


@foreign("erfanzar/EasyDeL easydel/operations/kernels/ragged_page_attention.py:711", _merged, sp=4)
def flash_decode(mesh):
    """The softmax of one query over a divided cache, its maximum first."""

    def attend(q, k, v):
        scores = jnp.einsum("bhd,bkhd->bhk", q, k) / q.shape[-1] ** 0.5
        most = lax.pmax(lax.stop_gradient(jnp.max(scores, axis=-1)), "sp")
        weights = jnp.exp(scores - most[..., None])
        below = lax.psum(weights.sum(-1), "sp")
        above = lax.psum(jnp.einsum("bhk,bkhd->bhd", weights, v), "sp")
        return above / below[..., None]

    fn = jax.shard_map(attend, mesh=mesh, in_specs=(P(), P(None, "sp"), P(None, "sp")), out_specs=P())
    return jax.jit(fn), (draw(2, 4, 4), draw(2, 8, 4, 4), draw(2, 8, 4, 4, seed="v"))
