"""The planner: which steps take an array from one layout to another with the fewest bytes."""

from spmd.comm.planner._moves import matchings
from spmd.comm.planner._run import corner, move, program, uneven

__all__ = ["corner", "matchings", "move", "program", "uneven"]
