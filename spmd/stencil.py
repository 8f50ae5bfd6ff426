"""Neighbours on other devices: halos, stencils, differences, convolutions."""

from spmd.ops._halo import halo
from spmd.ops._stencil import convolve, diff, stencil

__all__ = ["convolve", "diff", "halo", "stencil"]
