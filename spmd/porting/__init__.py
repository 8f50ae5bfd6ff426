"""Raw `shard_map` programs as kernels: the user's own text, with its collectives as verbs."""

from spmd._python.rooms import open_room
from spmd.porting._port import Port, Said, port

__all__ = ["Port", "Said", "port"]

open_room(globals())
