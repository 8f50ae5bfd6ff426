"""Random arrays that do not depend on the mesh: `jax.random`'s bits, each device drawing its shard."""

from spmd._python.rooms import open_room
from spmd.ops._random import bernoulli, normal, truncated_normal, uniform

__all__ = ["bernoulli", "normal", "truncated_normal", "uniform"]

open_room(globals())
