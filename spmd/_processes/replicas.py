"""Arrays of the host that every process gives whole: how they reach the devices of all, and whether they are equal."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmd._processes.agreement import disagreements
from spmd._processes.copies import different_copies
from spmd.errors import PlacementError
from spmd.mesh import outside_trace, processes_of

_on = [False]  # whether `cluster.initialize(check=True)` asked for it


def compare_replicas(on: bool) -> None:
    """Say whether arrays that every process gives whole are compared from now on."""
    _on[0] = on


def compared(mesh: Any) -> bool:
    """Return whether `initialize(check=True)` asked for arrays on this mesh to be compared."""
    return _on[0] and takes_part(mesh)


def takes_part(mesh: Any) -> bool:
    """Return whether all processes have devices in a mesh, and there are several: only then can they compare
    anything."""
    return isinstance(mesh, Mesh) and 1 < len(processes_of(mesh)) == jax.process_count()


def check_replicas(values: Iterable[tuple[str, Any]], mesh: Any, call: str) -> None:
    """Compare what every process gives whole, if `initialize(check=True)` asked for it.

    Communication: an all-gather of 32 bytes for all values together.

    Raises:
      PlacementError: With the values that differ, and the ranks.
    """
    if not compared(mesh) or not outside_trace():
        return
    found = {path: fingerprint(x) for path, x in _apart(values) if _is_local(x)}
    if found and (wrong := disagreements(found)):
        rule = "every process gives the whole array, and not all give the same one."
        raise PlacementError(rule, call=call, got=wrong, advice=_SAME)


def check_parts(arrays: Sequence[tuple[str, Any]], call: str) -> None:
    """Compare what the processes have made arrays of: the global shapes, and blocks that several hold copies of.

    Communication: an all-gather of 32 bytes, and one of 4 bytes for each array and device.

    Raises:
      PlacementError: With the arrays and blocks that differ, and the ranks.
    """
    arrays = _apart(arrays)
    if wrong := disagreements({path: f"{x.dtype.name}{list(x.shape)}" for path, x in arrays}):
        rule = "the parts of the processes do not make up one array: each process has another global shape."
        raise PlacementError(rule, call=call, got=wrong, advice=_ROWS)
    if wrong := different_copies(dict(arrays)):
        rule = "processes that hold copies of one block have given different ones."
        raise PlacementError(rule, call=call, got=wrong, advice=_ROWS)


def _apart(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Values with names of their own: keys of a tree may have one repr."""
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for name, x in named:
        counts[name] += 1
        found.append((f"{name} ({counts[name]})" if counts[name] > 1 else name, x))
    return found


_ROWS = "each process reads the rows of spmd.cluster.my_rows(layout, shape)"
_SAME = "make it from what is equal in all processes, not from the rank, the time or a file of one host"


def fingerprint(x: Any) -> str:
    """Dtype, shape and a hash of the elements: `float32[8, 4] #5f3a09c1d2e4`."""
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(x) if is_key else x)
    digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()
    return f"{x.dtype if is_key else array.dtype}{list(np.shape(x))} #{digest[:16]}"


def _is_local(x: Any) -> bool:
    """Return whether a value lies in this process alone, so that the others have one of their own."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return x.is_fully_addressable if isinstance(x, jax.Array) else True


def put(x: Any, sharding: Any) -> Any:
    """`jax.device_put`, but for devices of several processes, each of which gives the whole array: there JAX would
    compare them by sending all of it to all (for 16 MiB 205 ms, and 4 without)."""
    if sharding.is_fully_addressable or not _is_local(x) or not outside_trace():
        return jax.device_put(x, sharding)
    whole = x if isinstance(x, jax.Array) else np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
    return jax.make_array_from_callback(whole.shape, sharding, lambda where: whole[where])
