"""The layout language: strings that say shape, placement and communication.  Pure Python."""

from spmd.language._dims import Atom, Dim
from spmd.language._layout import Layout, axis_sizes
from spmd.language._mapping import AxisMapping
from spmd.language._pattern import Pattern

__all__ = ["Atom", "AxisMapping", "Dim", "Layout", "Pattern", "axis_sizes"]
