"""Seeing what a program does: its collectives as written and as compiled, with axes, bytes, lines and cost."""

from spmd._python.rooms import open_room
from spmd.checker import Finding, Findings
from spmd.comm.plans import Plan, Step
from spmd.drawing import Picture
from spmd.inspect._collectives import Collective, CollectiveReport, collectives
from spmd.inspect._explanation import Explanation
from spmd.inspect._hints import Hint
from spmd.inspect._match import Communication
from spmd.inspect._records import Boundary, Constraint, Island, PerShard, Written, WrittenCollective
from spmd.inspect._written import Memory, Time

__all__ = [
    "Boundary",
    "Collective",
    "CollectiveReport",
    "Communication",
    "Constraint",
    "Explanation",
    "Finding",
    "Findings",
    "Hint",
    "Island",
    "Memory",
    "PerShard",
    "Picture",
    "Plan",
    "Step",
    "Time",
    "Written",
    "WrittenCollective",
    "collectives",
]

open_room(globals())
