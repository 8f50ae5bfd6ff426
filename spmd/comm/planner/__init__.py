"""The planner: which steps take an array from one layout to another with the fewest bytes."""

from spmd.comm.planner._reshard import move, program, uneven
from spmd.comm.planner.plans import Plan, Step, plan

__all__ = ["Plan", "Step", "move", "plan", "program", "uneven"]
