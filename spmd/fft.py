"""Fourier transforms of distributed arrays: dimensions with a new name are transformed."""

from spmd.ops._fft import fft, ifft, irfft, rfft
from spmd.ops._fft_freq import fftfreq, rfftfreq

__all__ = ["fft", "fftfreq", "ifft", "irfft", "rfft", "rfftfreq"]
