"""Which mesh? Every factorisation of a number of devices, excluded by a stated bound or traced and priced."""

from spmd._rooms import open_room
from spmd.searcher._meshes import Bound
from spmd.searcher._result import Search
from spmd.searcher._rows import Row

__all__ = ["Bound", "Row", "Search"]

open_room(globals())
