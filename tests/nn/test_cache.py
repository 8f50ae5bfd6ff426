"""Decoding with a cache: rows of any length, prompts read by rings, windows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import nn, parallel
from tests.nn.dense import dense_result
from tests.sampler import rare

RNG = np.random.default_rng(5)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


CACHE = {"k": "b/dp t/cp g/tp k", "v": "b/dp t/cp g/tp k", "positions": "b/dp t/cp"}
MESH = {"dp": 2, "cp": 2, "tp": 2}
AXES = {"cp": "cp", "tp": "tp"}


def test_rows_of_different_lengths():
    """Prompts of 3 and 5 tokens, padded; then each row goes on from its own end, a step jitted with the cache donated."""
    mesh = spmd.make_mesh(**MESH)
    lengths, total = np.array([3, 5]), 8
    q, k, v = normal(2, total, 4, 3), normal(2, total, 2, 3), normal(2, total, 2, 3)
    truth = dense_result(q, k, v, causal=True)

    @spmd.kernel(in_layouts=("b/dp s g/tp k", "b/dp s g/tp k", "b/dp s"), out_layouts=CACHE, mesh=mesh, t=total)
    def prefill(k, v, at):
        cache = nn.kv_cache(2, total, 2, 3, dp="dp", **AXES)
        return nn.kv_cache_append(cache, k, v, at, **AXES)

    layouts = (CACHE, "b/dp s h/tp k", "b/dp s g/tp k", "b/dp s g/tp k", "b/dp s")

    @functools.partial(jax.jit, donate_argnums=0)
    @spmd.kernel(in_layouts=layouts, out_layouts=(CACHE, "b/dp s h/tp k"), mesh=mesh)
    def step(cache, q, k, v, at):
        cache = nn.kv_cache_append(cache, k, v, at, **AXES)
        return cache, nn.cached_attention(q, cache, at, **AXES)

    at = np.where(np.arange(5) < lengths[:, None], np.arange(5), -1)
    cache = prefill(k[:, :5], v[:, :5], jnp.asarray(at))
    for i in range(3):
        at = lengths + i
        rows = [x[np.arange(2), at][:, None] for x in (q, k, v)]
        cache, out = step(cache, *rows, jnp.asarray(at)[:, None])
        assert np.allclose(out[:, 0], truth[np.arange(2), at], atol=1e-5)
    ended = jnp.full((2, 1), -1)
    before = np.asarray(cache["positions"])
    cache, out = step(cache, *rows, ended)
    assert not out.any() and np.array_equal(cache["positions"], before)


@rare
def test_a_prompt_read_by_a_ring_fills_the_cache_where_it_lies():
    """Striped tokens go into striped slots without communication; what follows is decoded over them."""
    mesh = spmd.make_mesh(cp=4)
    total, prompt = 16, 12
    q, k, v = normal(2, total, 4, 3), normal(2, total, 2, 3), normal(2, total, 2, 3)
    truth = dense_result(q, k, v, causal=True)
    order = parallel.sequence_order(prompt, 4, "striped")

    def read(q, k, v):
        cache = nn.kv_cache(2, total, 2, 3, cp="cp")
        at = jnp.broadcast_to(parallel.sequence_positions(prompt, "striped", cp="cp")[None], q.shape[:2])
        out = parallel.ring_attention(q, k, v, cp="cp", causal=True, placement="striped")
        return out, nn.kv_cache_append(cache, k, v, at, cp="cp", tokens="striped")

    striped = ("b s/cp h k", "b s/cp g k", "b s/cp g k")
    layouts = {"k": "b t/cp g k", "v": "b t/cp g k", "positions": "b t/cp"}
    reading = spmd.kernel(in_layouts=striped, out_layouts=(striped[0], layouts), mesh=mesh, t=total)(read)
    args = [x[:, order] for x in (q, k, v)]
    out, cache = reading(*args)
    assert np.allclose(out, truth[:, order], atol=1e-5)
    assert spmd.inspect.collectives(reading, *args).counts == {"ppermute": 6}  # those of the ring

    def decode(cache, q, k, v):
        def step(cache, token):
            *token, at = token
            q, k, v = (x[:, None] for x in token)
            at = jnp.broadcast_to(at[None, None], (2, 1))
            cache = nn.kv_cache_append(cache, k, v, at, cp="cp")
            return cache, nn.cached_attention(q, cache, at, cp="cp")[:, 0]

        tokens = (*(jnp.moveaxis(x, 1, 0) for x in (q, k, v)), jnp.arange(prompt, total))
        return jnp.moveaxis(jax.lax.scan(step, cache, tokens)[1], 0, 1)

    whole = ("b s h k", "b s g k", "b s g k")
    decoding = spmd.kernel(in_layouts=(layouts, *whole), out_layouts="b s h k", mesh=mesh)(decode)
    args = cache, *(x[:, prompt:] for x in (q, k, v))
    for run in (decoding, decoding.auto, decoding.reference):
        assert np.allclose(run(*args), truth[:, prompt:], atol=1e-5)


@rare
def test_a_window_is_a_ring_buffer():
    """A cache of four slots serves a sequence of any length with a window of four."""
    q, k, v = normal(1, 11, 2, 3), normal(1, 11, 2, 3), normal(1, 11, 2, 3)
    cut = functools.partial(spmd.kernel, mesh=spmd.make_mesh(cp=2))

    @cut("b s h k, b s h k, b s h k -> b s h k")
    def decode(q, k, v):
        cache, out = nn.kv_cache(1, 4, 2, 3, cp="cp"), []
        for i in range(11):
            at, one = jnp.full((1, 1), i), slice(i, i + 1)
            cache = nn.kv_cache_append(cache, k[:, one], v[:, one], at, cp="cp")
            out.append(nn.cached_attention(q[:, one], cache, at, window=4, cp="cp"))
        return jnp.concatenate(out, axis=1)

    truth = dense_result(q, k, v, causal=True, window=4)
    assert np.allclose(decode(q, k, v), truth, atol=1e-5)

    @cut("b s h k, b s h k, b s h k -> b 1 h k, b t/cp", t=4)
    def after_a_prompt(q, k, v):  # of nine tokens, whose last four stay, in any order
        cache, order = nn.kv_cache(1, 4, 2, 3, cp="cp"), jnp.array([[3, 8, 0, 7, 1, 6, 5, 2, 4]])
        cache = nn.kv_cache_append(cache, k[:, order[0]], v[:, order[0]], order, cp="cp")
        held = cache["positions"]
        at = jnp.full((1, 1), 9)
        cache = nn.kv_cache_append(cache, k[:, 9:10], v[:, 9:10], at, cp="cp")
        return nn.cached_attention(q[:, 9:10], cache, at, window=4, cp="cp"), held

    out, held = after_a_prompt(q, k, v)
    assert sorted(held[0].tolist()) == [5, 6, 7, 8]
    assert np.allclose(out, truth[:, 9:10], atol=1e-5)
