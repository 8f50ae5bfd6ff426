"""Attention written out on whole arrays, for the references of the attention layers: no spmd, no online softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def dense_attention(
    q, k, v, *, positions=None, causal=False, window=None, segments=None, mask=None, bias=None, softcap=None
):
    """q "b s h k", k "b t g k", v "b t g j"; segments "b s", mask "b h s t", bias "h s t". Masks are made in NumPy."""
    rows, heads = q.shape[-2] // k.shape[-2], q.shape[-2]
    k, v = jnp.repeat(k, rows, axis=-2), jnp.repeat(v, rows, axis=-2)
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / np.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias[None]
    s, t = scores.shape[-2:]
    at = np.arange(s) if positions is None else np.asarray(positions)
    ahead = at[:, None] - (np.arange(t) if positions is None else at)[None]
    seen = np.ones((q.shape[0], heads, s, t), bool)
    if causal:
        seen &= (ahead >= 0)[None, None]
    if window is not None:
        seen &= (np.abs(ahead) < window)[None, None]
    if mask is not None:
        seen = seen & mask
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    # Of what is seen only: with the largest of all, what is seen may vanish, and its gradient is 0/0. It comes from
    # outside the derivative because it may differ from itself where it is compiled twice.
    top = jax.lax.stop_gradient(jnp.where(seen, scores, -np.inf).max(-1, keepdims=True))
    powers = jnp.where(seen, jnp.exp(jnp.where(seen, scores - jnp.maximum(top, -1e30), 0.0)), 0.0)
    total = powers.sum(-1, keepdims=True)
    return jnp.einsum("bhst,bthj->bshj", powers / jnp.where(total == 0, 1.0, total), v)


def dense_result(q, k, v, **options):
    """`dense_attention` in NumPy, by one program: without it, JAX compiles a program for each of its steps."""
    return np.asarray(jax.jit(functools.partial(dense_attention, **options))(q, k, v))


def placed_order(length, blocks, placement):
    """Which token stands where, by cutting and dealing."""
    tokens = np.arange(length)
    if placement == "zigzag":
        chunks = np.split(tokens, 2 * blocks)
        return np.concatenate([np.concatenate([chunks[c], chunks[2 * blocks - 1 - c]]) for c in range(blocks)])
    if placement == "striped":
        return np.concatenate([tokens[c::blocks] for c in range(blocks)])
    return tokens


def plain_rotary(x, positions, theta=10_000.0):
    """By complex numbers: x "b s h k", pairs i and i + k/2."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.asarray(positions)[:, None] * theta ** (-np.arange(half) / half))[None, :, None]
    both = jax.lax.complex(x[..., :half], x[..., half:]) * turn.astype(np.complex64)
    return jnp.concatenate([both.real, both.imag], axis=-1)
