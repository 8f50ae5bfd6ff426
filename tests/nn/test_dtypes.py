"""Dtypes: float64 goes through all layers, and comes out as float64."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import nn
from tests.sampler import rare


@rare
def test_wider_numbers_stay_wide():
    """Of float64 no layer keeps float32's digits only."""
    rng = np.random.default_rng(20)
    x, table, k = rng.normal(size=(2, 4, 6)), rng.normal(size=(8, 6)), rng.normal(size=(2, 4, 2, 6))
    with jax.enable_x64(True):
        turn, at, labels = nn.rotary_frequencies(6), jnp.arange(4), np.array([[1, 2, 7, 0]] * 2)

        def body(x, table, k):
            y = nn.layer_norm(nn.rms_norm(x, jnp.ones(6)), jnp.ones(6))
            q = nn.rotary_embedding(k, at, turn)
            mixed = nn.dot_product_attention(q, k, k, causal=True)
            ring = spmd.parallel.ring_attention(q, k, k, cp=None, causal=True)
            w = jnp.ones((8, 6, 3))
            routed = spmd.parallel.router(y, table.T, k=2)
            experts, _ = spmd.parallel.moe(y, routed, w, w, jnp.swapaxes(w, 1, 2), capacity_factor=None)
            clip = spmd.parallel.clip_by_global_norm(1e9, "...")
            loss = nn.linear_cross_entropy(y, table, labels, chunks=2)
            return [*clip.update([y, mixed, ring, experts], ())[0], loss]

        run = spmd.kernel(in_layouts=("b s d", "v d", "b s g k"), out_layouts="...", mesh=spmd.make_mesh(x=1))(body)
        found = run(x, table, k)
        truth = body_in_numpy(x, table, k, labels)
        for a, b in zip(found, truth, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def losses_of(dtype, tokens):
    """The loss of a mean over tokens, and its gradients by x and the table, in a dtype; the truth in float32."""
    x, table = (
        jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate([(tokens, 8), (32, 8)])
    )
    labels = jax.random.randint(jax.random.key(2), (tokens,), 0, 32)

    def ours(x, table):
        return nn.linear_cross_entropy(x, table, labels, chunks=4)

    def scored(x, table):
        return nn.cross_entropy(nn.unembedding(x, table), labels)

    loss, both = (spmd.kernel("s d, v d -> scalar", mesh=spmd.make_mesh(x=1))(one) for one in (ours, scored))
    whole = (x.astype(jnp.float32), table.astype(jnp.float32))
    with jax.default_matmul_precision("highest"):
        truth = jax.grad(both, argnums=(0, 1))(*whole)
    return [jax.grad(one, argnums=(0, 1)) for one in (loss, both)], (x, table), truth


def test_gradients_of_scores_multiply_in_the_dtype_of_the_operands():
    """float32 has half the speed of bfloat16 or less. Scores and losses are float32 all the same."""
    gradients, args, truth = losses_of(jnp.bfloat16, 64)
    for gradient in gradients:
        products = re.findall(r"dot_general.*: \((.*)\) -> (.*)", jax.jit(gradient).lower(*args).as_text())
        assert all("f32" not in operands for operands, _ in products)
        assert sorted({"f32" in result for _, result in products}) == [False, True]  # gradients, scores
        for a, b in zip(gradient(*args), truth, strict=True):
            assert a.dtype == jnp.bfloat16
            assert np.linalg.norm(a.astype(np.float32) - b) < 6e-3 * np.linalg.norm(b)


@rare
def test_gradients_of_scores_in_float16_do_not_underflow():
    """A mean over many tokens has slopes that float16 does not hold."""
    gradients, args, truth = losses_of(jnp.float16, 2**14)
    for gradient in gradients:
        a, b = gradient(*args)[1].astype(np.float32), np.asarray(truth[1])
        assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)


def body_in_numpy(x, table, k, labels):
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    turn = np.exp(1j * np.arange(4)[:, None] * 1e4 ** (-np.arange(0, 6, 2) / 6))[None, :, None]
    turned = (k[..., :3] + 1j * k[..., 3:]) * turn
    scores = np.einsum("bshk,bthk->bhst", np.concatenate([turned.real, turned.imag], -1), k) / np.sqrt(6)
    powers = np.exp(scores) * np.tril(np.ones((4, 4)))
    mixed = np.einsum("bhst,bthk->bshk", powers / powers.sum(-1, keepdims=True), k)
    hidden = y.sum(-1, keepdims=True)
    experts = np.broadcast_to(3 * hidden / (1 + np.exp(-hidden)) * hidden, y.shape)
    logits = y @ table.T
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return [y, mixed, mixed, experts, losses.mean()]
