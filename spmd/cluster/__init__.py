"""Programs of many processes: on one machine, on a cluster of hosts, on a pod.

The engine is JAX's: `jax.distributed`, and the collectives of its backends. What is here starts the processes, and
checks early what JAX accepts in silence or reports after minutes.
"""

from spmd._python.rooms import open_room
from spmd.cluster._checkpoints import Checkpoints, Restored, checkpoints, guard
from spmd.cluster._data import Batches, batches, my_rows
from spmd.cluster._fields import read_zarr, write_zarr
from spmd.cluster._recorder import goodput, remake, stragglers
from spmd.cluster._start import initialize, same_program, stopping

__all__ = [
    "Batches",
    "Checkpoints",
    "Restored",
    "batches",
    "checkpoints",
    "goodput",
    "guard",
    "initialize",
    "my_rows",
    "read_zarr",
    "remake",
    "same_program",
    "stopping",
    "stragglers",
    "write_zarr",
]

open_room(globals())
