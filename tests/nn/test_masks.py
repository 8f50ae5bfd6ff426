"""Masks of attention: who sees whom, written out in NumPy, pair by pair."""

import itertools

import numpy as np
import pytest

import spmd
from spmd import nn
from spmd.modes import MODES

Q_AT, K_AT = np.array([[0, 3, 5], [6, 2, 1]]), np.array([[0, 1, 5, -1], [2, 7, 6, 3]])
Q_OF, K_OF = np.array([[0, 0, 1], [1, 1, 0]]), np.array([[0, 1, 1, 0], [1, 0, 1, 1]])


def seen(row: int, q: int, k: int, causal: bool, window: int | None, segments: bool) -> bool:
    ahead = Q_AT[row, q] - K_AT[row, k]
    return bool(
        K_AT[row, k] >= 0
        and (not causal or ahead >= 0)
        and (window is None or abs(ahead) < window)
        and (not segments or Q_OF[row, q] == K_OF[row, k])
    )


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_every_pair(causal, window, segments):
    """Queries divided over one axis, keys over another; a key at a negative position is seen by nobody."""
    options = {"causal": causal, "window": window}
    of = lambda *x: {"segments": x} if segments else {}
    kernel = spmd.kernel("b s/x, b t/y, b s/x, b t/y -> b s/x t/y", mesh=spmd.make_mesh(x=3, y=2))(
        lambda q, k, q_of, k_of: nn.attention_mask((q, k), **options, **of(q_of, k_of))
    )
    wanted = np.zeros((2, 3, 4), bool)
    for at in itertools.product(*map(range, wanted.shape)):
        wanted[at] = seen(*at, causal, window, segments)
    assert wanted.any() and not wanted.all()
    for mode in MODES:
        np.testing.assert_array_equal(getattr(kernel, mode)(Q_AT, K_AT, Q_OF, K_OF), wanted)


def test_nothing_asked_for_is_no_mask():
    assert nn.attention_mask() is None
