"""Linear algebra of divided arrays: a tall matrix in factors, and systems that a function applies."""

from spmd.ops._cg import cg
from spmd.ops._gmres import gmres
from spmd.ops._qr import qr

__all__ = ["cg", "gmres", "qr"]
