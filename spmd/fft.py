"""Fourier, cosine and sine transforms of distributed arrays: dimensions with a new name are transformed."""

from spmd._python.rooms import open_room
from spmd.ops._fft import dct, dst, fft, idct, idst, ifft, irfft, rfft
from spmd.ops._fft_walls import fftfreq, rfftfreq

__all__ = ["dct", "dst", "fft", "fftfreq", "idct", "idst", "ifft", "irfft", "rfft", "rfftfreq"]

open_room(globals())
