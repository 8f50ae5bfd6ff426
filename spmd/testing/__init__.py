"""Assertions about programs, for tests: what they send, how their parameters lie, that their modes agree, and that
they mean the same on any mesh.

Each raises `Mismatch`, an `AssertionError`, with what was expected and what was found side by side.
"""

from spmd._python.rooms import open_room
from spmd.testing._collectives import assert_collectives, assert_no_unwritten_collectives
from spmd.testing._meshes import assert_same_on_any_mesh
from spmd.testing._mismatch import Mismatch
from spmd.testing._modes import assert_modes_agree
from spmd.testing._sharded import assert_sharded

__all__ = [
    "Mismatch",
    "assert_collectives",
    "assert_modes_agree",
    "assert_no_unwritten_collectives",
    "assert_same_on_any_mesh",
    "assert_sharded",
]

open_room(globals())
