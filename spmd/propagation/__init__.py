"""The compiler's choice in strings: where it lets each value lie, and what it sends for that."""

from spmd._python.rooms import open_room
from spmd.propagation._costs import Constraint, Cost
from spmd.propagation._moves import Move
from spmd.propagation._propagation import Open, Propagation, propagate

__all__ = ["Constraint", "Cost", "Move", "Open", "Propagation", "propagate"]

open_room(globals())
