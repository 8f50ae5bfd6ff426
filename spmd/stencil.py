"""Neighbours on other devices: halos and deposits, stencils, differences, convolutions."""

from spmd._python.rooms import open_room
from spmd.ops._halo import deposit, halo
from spmd.ops._stencil import convolve, diff, stencil

__all__ = ["convolve", "deposit", "diff", "halo", "stencil"]

open_room(globals())
