"""Frequencies of Fourier transforms: against NumPy, and as derivatives."""

import jax
import numpy as np
import pytest

import spmd
from spmd import fft
from spmd.modes import MODES
from tests.ops.harness import make_mesh

PENCIL = {"a": 2, "b": 4}


@pytest.mark.parametrize("n", [8, 12])
def test_frequencies(n: int) -> None:
    mesh = make_mesh({"a": 4})
    whole = spmd.kernel("-> k/a, j", mesh=mesh)(lambda: (fft.fftfreq("k/a", 0.5, k=n), fft.rfftfreq("j", n + 1, 0.25)))
    for mode in MODES:
        full, half = getattr(whole, mode)()
        np.testing.assert_allclose(full, np.fft.fftfreq(n, 0.5), rtol=1e-6)
        np.testing.assert_allclose(half, np.fft.rfftfreq(n + 1, 0.25), rtol=1e-6)


def test_a_derivative_by_frequencies() -> None:
    """What they are for: i k times the spectrum is the derivative."""
    mesh = make_mesh(PENCIL)
    n = 16
    x = np.arange(n) * 2 * np.pi / n
    u = np.sin(x)[:, None] * np.cos(2 * x)[None, :] + 0 * x[:, None]

    @spmd.kernel("x/a y/b -> x/a y/b", mesh=mesh)
    def along_x(u):
        k = fft.fftfreq("kx/a", x[1] / (2 * np.pi), kx=n)
        return fft.ifft(
            jax.lax.complex(0 * k, k)[:, None] * fft.fft(u, "x/a y/b -> kx/a y/b"), "kx/a y/b -> x/a y/b"
        ).real

    for mode in MODES:
        got = getattr(along_x, mode)(u.astype(np.float32))
        np.testing.assert_allclose(got, np.cos(x)[:, None] * np.cos(2 * x)[None, :], atol=1e-5)
