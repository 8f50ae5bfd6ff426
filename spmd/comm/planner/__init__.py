"""The planner: which steps take an array from one layout to another with the fewest bytes."""

from spmd.comm.planner._run import move, program, uneven

__all__ = ["move", "program", "uneven"]
