"""Linear algebra of divided arrays: matrices in factors, and systems that a function applies or a matrix has."""

from spmd._rooms import open_room
from spmd.ops._cg import cg
from spmd.ops._cho_solve import cho_solve
from spmd.ops._cholesky import cholesky
from spmd.ops._gmres import gmres
from spmd.ops._qr import qr

__all__ = ["cg", "cho_solve", "cholesky", "gmres", "qr"]

open_room(globals())
