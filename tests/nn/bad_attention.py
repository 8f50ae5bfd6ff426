"""Wrong calls of attention, of masks, of rotary positions and of caches."""

from __future__ import annotations

from unittest import mock

import jax.numpy as jnp
import numpy as np

import spmd
from spmd import nn
from tests.errors.registry import bad, fixed

HEADS = "b s h k, b s g k -> b s h k"


def run(mesh, body, signature=HEADS, q=(2, 8, 4, 2), k=(2, 8, 2, 2)):
    return spmd.kernel(signature, mesh=mesh)(body)(jnp.ones(q), jnp.ones(k))


bad(
    key_heads_that_serve_unequally=lambda mesh: run(
        mesh, lambda q, k: nn.dot_product_attention(q, k, k), q=(2, 8, 5, 2)
    ),
    causal_and_not_as_many_queries=lambda mesh: run(
        mesh, lambda q, k: nn.dot_product_attention(q[:, :3], k, k, causal=True)
    ),
    a_soft_cap_in_a_kernel_without=lambda mesh: run(
        mesh, lambda q, k: nn.dot_product_attention(q, k, k, softcap=5.0, implementation="cudnn")
    ),
)


@fixed
def a_soft_cap_in_a_kernel_without_fixed(mesh, fix):
    out = run(mesh, lambda q, k: nn.dot_product_attention(q, k, k, softcap=5.0, **fix()))
    np.testing.assert_allclose(out, np.ones((2, 8, 4, 2)), rtol=1e-6)


@bad
def a_kernel_for_other_dtypes(mesh):
    with mock.patch("spmd._compat.runs_on_gpu", return_value=True):
        run(mesh, lambda q, k: nn.dot_product_attention(q, k, k, implementation="cudnn"))


@fixed
def a_kernel_for_other_dtypes_fixed(mesh, fix):
    out = run(mesh, lambda q, k: nn.dot_product_attention(q, k, k, **fix()))
    np.testing.assert_allclose(out, np.ones((2, 8, 4, 2)), rtol=1e-6)


bad(
    a_mask_that_is_added=lambda mesh: run(
        mesh, lambda q, k: nn.dot_product_attention(q, k, k, mask=jnp.zeros((8, 8)), causal=True)
    ),
    a_window_of_nothing=lambda mesh: run(mesh, lambda q, k: nn.dot_product_attention(q, k, k, window=0, causal=True)),
    a_mask_with_half_a_window=lambda mesh: nn.attention_mask((jnp.arange(4), jnp.arange(4)), window=1.5),
)


@bad
def decoding_with_a_flat_cap(mesh):
    cached = lambda q, k: nn.cached_attention(q, nn.kv_cache(2, 8, 2, 2), jnp.zeros((2, 8), int), softcap=0.0)
    run(mesh, cached)


bad(
    key_heads_somehow=lambda mesh: run(mesh, lambda q, k: nn.dot_product_attention(q, k, k, kv_heads="hole")),
)


@bad
def a_layer_over_cp_without_a_ring(mesh):
    layouts = ("b s/dp d", "d h k")
    body = lambda x, w: nn.multi_head_attention(x, w, w, w, jnp.ones((4, 2, 3)), cp="dp")
    spmd.kernel(in_layouts=layouts, out_layouts="b s/dp d", mesh=mesh)(body)(jnp.ones((2, 8, 3)), jnp.ones((3, 4, 2)))


@bad
def a_layer_with_options_for_nobody(mesh):
    attend = lambda q, k, v: v
    body = lambda x, w: nn.multi_head_attention(x, w, w, w, jnp.ones((4, 2, 3)), attend=attend, causal=True)
    spmd.kernel("b s d, d h k -> b s d", mesh=mesh)(body)(jnp.ones((2, 8, 3)), jnp.ones((3, 4, 2)))


@bad
def a_layer_with_positions_that_turn_nothing(mesh):
    body = lambda x, w: nn.multi_head_attention(x, w, w, w, jnp.ones((4, 2, 3)), positions=jnp.arange(8))
    spmd.kernel("b s d, d h k -> b s d", mesh=mesh)(body)(jnp.ones((2, 8, 3)), jnp.ones((3, 4, 2)))


bad(
    more_turns_than_features=lambda mesh: nn.rotary_embedding(
        jnp.ones((2, 3, 4)), jnp.arange(2), nn.rotary_frequencies(6)
    ),
    an_odd_number_of_features=lambda mesh: nn.rotary_frequencies(7),
    an_unknown_scaling=lambda mesh: nn.rotary_frequencies(8, scaling="lama3"),
)


@bad
def tokens_divided_otherwise(mesh):
    def body(q, k):
        cache = nn.kv_cache(2, 8, 2, 2)
        return nn.kv_cache_append(cache, k, k, jnp.zeros((2, 8), jnp.int32), tokens="zigzag")["k"]

    run(mesh, body, "b s h k, b s g k -> b s g k")
