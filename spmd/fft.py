"""Fourier transforms of distributed arrays: dimensions with a new name are transformed."""

from spmd.ops._fft import fft, fftfreq, ifft, irfft, rfft, rfftfreq

__all__ = ["fft", "fftfreq", "ifft", "irfft", "rfft", "rfftfreq"]
