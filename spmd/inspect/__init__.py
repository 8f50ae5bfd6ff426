"""Seeing what a program does: its collectives as written and as compiled, with axes, bytes, lines and cost."""

from spmd._python.rooms import open_room
from spmd.inspect._collectives import Collective, CollectiveReport, collectives
from spmd.inspect._explanation import Explanation
from spmd.inspect._hints import Hint
from spmd.inspect._match import Communication
from spmd.inspect._records import Boundary, Constraint, Island, PerShard, Written, WrittenCollective
from spmd.inspect._roofline import Memory, Time

__all__ = [
    "Boundary",
    "Collective",
    "CollectiveReport",
    "Communication",
    "Constraint",
    "Explanation",
    "Hint",
    "Island",
    "Memory",
    "PerShard",
    "Time",
    "Written",
    "WrittenCollective",
    "collectives",
]

open_room(globals())
