"""Assertions about programs, for tests: what they send, how their parameters lie, that their modes agree, and that
they mean the same on any mesh; and which placements of its arrays an operation allows.

Each raises `Mismatch`, an `AssertionError`, with what was expected and what was found side by side.
"""

from spmd._python.rooms import open_room
from spmd.testing._assertions import (
    Mismatch,
    assert_collectives,
    assert_modes_agree,
    assert_no_unwritten_collectives,
    assert_sharded,
)
from spmd.testing._meshes import assert_same_on_any_mesh
from spmd.testing._placements import Placement, Placements, check_rule

__all__ = [
    "Mismatch",
    "Placement",
    "Placements",
    "assert_collectives",
    "assert_modes_agree",
    "assert_no_unwritten_collectives",
    "assert_same_on_any_mesh",
    "assert_sharded",
    "check_rule",
]

open_room(globals())
