"""Attention beyond the registry: rows that see nothing, and positions."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import nn
from spmd.modes import MODES
from tests.nn.dense import dense_result

RNG = np.random.default_rng(5)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_query_that_sees_nothing_gets_zeros(implementation):
    """And its gradients are zeros, not NaN."""
    q, k, v = normal(2, 5, 4, 3), normal(2, 5, 2, 3), normal(2, 5, 2, 3)
    mask = jnp.asarray(np.arange(5) != 2)[None, None, :, None] & jnp.ones((1, 1, 1, 5), bool)
    attend = lambda q, k, v: nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)
    kernel = spmd.kernel("b s h k, b s g k, b s g k -> b s h k", mesh=spmd.make_mesh(x=1))(attend)
    out, pull = jax.vjp(kernel, q, k, v)
    assert not out[:, 2].any() and out[:, 1].all()
    for gradient in pull(jnp.ones_like(out)):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_hides_keys(masked):
    """-inf in a bias is a softmax without these keys; a query that sees none is NaN, as in JAX, and zero by a mask."""
    q, k, v = normal(2, 5, 4, 3), normal(2, 5, 4, 3), normal(2, 5, 4, 3)
    hidden = RNG.random((4, 5, 5)) < 0.4
    hidden[..., 0], hidden[1, 2] = False, True
    bias = np.where(hidden, -np.inf, normal(4, 5, 5)).astype(np.float32)
    mask = RNG.random((1, 4, 5, 5)) < 0.6 if masked else np.ones((1, 4, 5, 5), bool)
    mask[:, :, 3] = not masked

    def plain(q, k, v, bias, mask):
        scores = jnp.einsum("bshk,bthk->bhst", q, k) / jnp.sqrt(jnp.float32(3)) + bias[None]
        seen = jnp.broadcast_to(mask, scores.shape)
        return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, where=seen), v)

    layouts = ("b/dp s h/tp k",) * 3 + ("h/tp s t", "1 h/tp s t")
    kernel = spmd.kernel(in_layouts=layouts, out_layouts="b/dp s h/tp k", mesh=spmd.make_mesh(dp=2, tp=2))(
        lambda q, k, v, bias, mask: nn.dot_product_attention(q, k, v, bias=bias, mask=mask if masked else None, tp="tp")
    )

    def both(fn, *args):
        out, pull = jax.vjp(lambda *args: fn(*args, mask), *args)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    wanted = jax.jit(functools.partial(both, plain))(q, k, v, bias)
    assert np.isnan(wanted[0]).any() and np.isfinite(wanted[0]).any()
    for mode in MODES:
        found = jax.jit(functools.partial(both, getattr(kernel, mode)))(q, k, v, bias)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_program_for_cudnn_can_be_planned_and_tested_without_a_gpu():
    """On a mesh of CPUs it gives the same numbers, and on one of no devices the same plan."""
    q, k, v = normal(2, 5, 4, 3), normal(2, 5, 2, 3), normal(2, 5, 2, 3)

    def layer(implementation, mesh):
        attend = lambda *args: nn.dot_product_attention(*args, causal=True, implementation=implementation)
        return spmd.kernel("b s h k, b s g k, b s g k -> b s h k", mesh=mesh)(attend)

    here, nowhere = spmd.make_mesh(x=1), spmd.make_mesh(x=1, abstract=True)
    np.testing.assert_array_equal(layer("cudnn", here)(q, k, v), layer(None, here)(q, k, v))
    plans = [spmd.explain(layer(one, nowhere), q, k, v, hardware="h100") for one in ("cudnn", None)]
    assert plans[0].time == plans[1].time and plans[0].memory == plans[1].memory
    assert plans[0].time.kernels == ("attention",)


@pytest.mark.parametrize("causal", [False, True])
def test_what_cudnn_is_asked_for(causal):
    """cuDNN has windows that look back, and none that look ahead: these are a mask. Seen on an H200."""
    q, k, v = normal(2, 7, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 8)
    asked = []

    def cudnn(q, k, v, *, is_causal, local_window_size, implementation, **known):
        assert implementation == "cudnn"
        asked.append((is_causal, local_window_size))
        return plain(q, k, v, is_causal=is_causal, local_window_size=local_window_size, implementation="xla", **known)

    def attend(implementation, mesh):
        body = lambda *args: nn.dot_product_attention(*args, causal=causal, window=3, implementation=implementation)
        return spmd.kernel("b s h k, b s g k, b s g k -> b s h k", mesh=mesh)(body)

    plain, mesh, narrow = jax.nn.dot_product_attention, spmd.make_mesh(x=1), [x.astype(jnp.bfloat16) for x in (q, k, v)]
    with (
        mock.patch("spmd._compat.runs_on_gpu", return_value=True),
        mock.patch("jax.nn.dot_product_attention", cudnn),
    ):
        found = attend("cudnn", mesh)(*narrow)
    assert asked == [(True, (2, 0)) if causal else (False, None)]
    np.testing.assert_allclose(found.astype(jnp.float32), attend(None, mesh)(q, k, v), atol=0.05)


def test_positions_say_what_stands_where():
    """A permuted sequence, queries that are fewer than keys, and keys that are padding."""
    q, k, v = normal(2, 6, 4, 3), normal(2, 6, 2, 3), normal(2, 6, 2, 3)
    truth = dense_result(q, k, v, causal=True)
    order = np.array([3, 0, 5, 1, 4, 2])
    kernel = spmd.kernel("b s h k, b t g k, b t g k, s, b t -> b s h k", mesh=spmd.make_mesh(x=1))(
        lambda q, k, v, *at: nn.dot_product_attention(q, k, v, causal=True, positions=at)
    )
    at = jnp.broadcast_to(jnp.asarray(order)[None], (2, 6))
    assert np.allclose(
        kernel(q[:, order], k[:, order], v[:, order], jnp.asarray(order), at), truth[:, order], atol=1e-5
    )
    last = kernel(q[:, 4:], k, v, jnp.array([4, 5]), jnp.broadcast_to(jnp.arange(6)[None], (2, 6)))
    assert np.allclose(last, truth[:, 4:], atol=1e-5)
    padded = jnp.array([[0, 1, 2, 3, -1, -1]] * 2)
    short = kernel(q[:, 3:4], k, v, jnp.array([5]), padded)
    assert np.allclose(short, dense_result(q[:, 3:4], k[:, :4], v[:, :4]), atol=1e-5)
