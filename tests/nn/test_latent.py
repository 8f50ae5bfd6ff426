"""Attention with latents: decoding agrees with the whole sequence, and what is kept is small."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import nn
from tests.nn.cases_latent import INS, LATENT, PLAIN, ROTARY, TURN, VALUE, dense_latent, weights_of
from tests.sampler import rare

B, S, D, H = 2, 5, 6, 4
SHAPES = (D, H, PLAIN + ROTARY), (D, LATENT + ROTARY), (LATENT, H, PLAIN), (LATENT, H, VALUE), (H, VALUE, D), (LATENT,)
WEIGHTS = tuple(text.replace("/sp", "") for text in INS[1:])
MESH = spmd.make_mesh(dp=2, tp=2)


def arguments():
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((B, S, D), *SHAPES)]


@rare
def test_decoding_token_by_token_agrees_with_the_whole_sequence() -> None:
    """Absorbed, in a scan, over a cache that is divided over the batch; positions differ between rows."""
    x, *weights = arguments()

    @spmd.kernel(in_layouts=("b/dp s d", WEIGHTS), out_layouts=("b/dp s d", "b/dp s d"), mesh=MESH)
    def both(x, weights):
        held = weights_of(*weights)
        whole = nn.latent_attention(x, held, **TURN, tp="tp")
        cache = nn.kv_cache(B, 8, 1, LATENT + ROTARY, values=False, dp="dp")

        def step(cache, token):
            x, at = token
            at = jnp.full((x.shape[0], 1), at)
            y, cache = nn.cached_latent_attention(x[:, None], held, cache, at, **TURN, tp="tp")
            return cache, y[:, 0]

        out = jax.lax.scan(step, cache, (jnp.moveaxis(x, 1, 0), jnp.arange(S, dtype=jnp.int32)))[1]
        return whole, jnp.moveaxis(out, 0, 1)

    plain = dense_latent(x, *weights)
    for run in (both, both.auto, both.reference):
        for found in run(x, tuple(weights)):
            np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)


def test_the_cache_keeps_one_latent_and_one_rotary_key_for_each_token() -> None:
    layouts = {"k": "b/dp t g z", "positions": "b/dp t"}
    new = lambda: nn.kv_cache(B, 8, 1, LATENT + ROTARY, jnp.bfloat16, values=False, dp="dp")
    cache = spmd.kernel(in_layouts=(), out_layouts=layouts, mesh=MESH)(new)()
    assert cache["k"].addressable_shards[0].data.nbytes == 2 * (LATENT + ROTARY) * 8 * B // 2


def test_queries_can_come_from_something_smaller() -> None:
    x, query, *weights = arguments()
    down = np.random.default_rng(1).normal(size=(D, 3)).astype(np.float32)
    small = np.einsum("bsd,da->bsa", x, down)

    @spmd.kernel(in_layouts=("b/dp s d", "b/dp s a", ("a h/tp q", *WEIGHTS[1:])), out_layouts="b/dp s d", mesh=MESH)
    def layer(x, small, weights):
        return nn.latent_attention(x, weights_of(*weights), queries_from=small, **TURN, tp="tp")

    found = layer(x, small, (query[:3], *weights))
    np.testing.assert_allclose(
        found, dense_latent(x, np.einsum("da,ahq->dhq", down, query[:3]), *weights), rtol=1e-4, atol=1e-4
    )
