"""Rotary positions: scalings of the frequencies, and both orders of the features."""

import math

import jax.numpy as jnp
import numpy as np

from spmd import nn
from tests.nn.dense import plain_rotary

RNG = np.random.default_rng(5)


def normal(*shape):
    return np.asarray(RNG.normal(size=shape), np.float32)


def test_rotary_scalings():
    """Against the formulas, frequency by frequency."""
    plain = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    assert np.allclose(nn.rotary_frequencies(8), plain)
    assert np.allclose(nn.rotary_frequencies(8, scaling="linear", factor=4.0), plain / 4)
    base = 10_000.0 * 4.0 ** (8 / 6)
    ntk = nn.rotary_frequencies(8, scaling="ntk", factor=4.0)
    assert np.allclose(ntk, base ** (-np.arange(0, 8, 2) / 8)) and np.isclose(ntk[-1], plain[-1] / 4)
    options = {"scaling": "llama3", "factor": 8.0, "original_length": 64, "low": 1.0, "high": 4.0}
    expected = []
    for f in plain:
        length = 2 * math.pi / f
        smooth = (64 / length - 1) / 3
        kept = f if length < 64 / 4 else f / 8 if length > 64 else (1 - smooth) * f / 8 + smooth * f
        expected.append(kept)
    assert np.allclose(nn.rotary_frequencies(8, **options), expected)
    assert len({round(e / f, 3) for e, f in zip(expected, plain, strict=True)}) == 3  # all three cases occur


def test_rotary_pairs():
    """Interleaved features are the others, reordered; features beyond the frequencies stay."""
    x, at, turn = normal(2, 5, 3, 6), jnp.arange(5), nn.rotary_frequencies(6)
    halves = np.array([0, 3, 1, 4, 2, 5])  # of each pair, where it stands in the other order
    one = nn.rotary_embedding(x, at, turn)
    two = nn.rotary_embedding(x[..., halves], at, turn, interleaved=True)
    assert np.allclose(one, plain_rotary(x, np.arange(5)), atol=1e-5)
    assert np.allclose(one[..., halves], two, atol=1e-5)
    part = nn.rotary_embedding(x, at, nn.rotary_frequencies(4))
    assert np.allclose(part[..., :4], plain_rotary(x[..., :4], np.arange(5)), atol=1e-5)
    assert np.array_equal(part[..., 4:], x[..., 4:])
    rows = nn.rotary_embedding(x, jnp.stack([at, at + 3]), turn)
    assert np.allclose(rows[1], nn.rotary_embedding(x, at + 3, turn)[1], atol=1e-5)
