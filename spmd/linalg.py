"""Linear algebra of divided arrays: matrices in factors, and systems that a function applies or a matrix has."""

from spmd._python.rooms import open_room
from spmd.ops._qr import qr
from spmd.ops._system import cg, gmres

__all__ = ["cg", "gmres", "qr"]

open_room(globals())
