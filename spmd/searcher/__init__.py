"""Which mesh? Every factorisation of a number of devices, excluded by a stated bound or traced and priced."""

from spmd._python.rooms import open_room
from spmd.searcher._result import Bound, Row, Search

__all__ = ["Bound", "Row", "Search"]

open_room(globals())
