"""Guards of numbers: copies that have to be equal are compared bit for bit, and numbers have to be finite."""

from __future__ import annotations

import collections
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd._processes.agreement import anywhere, everyone, gathered
from spmd._processes.replicas import block_text
from spmd.cluster._checkpoints import by_device, checked, checksums, named, not_finite
from spmd.errors import SpmdError, is_int


def guard(step: int, state: Any, *, every: int = 100) -> None:
    """Look after the numbers of a state: copies that are equal by its layouts are equal in every bit, and all numbers
    are finite.

    A bit that has flipped in the memory of one device otherwise stays unseen: copies drift apart, and each process
    trains on with its own. Call it at each step; it looks at every hundredth.

    Communication: at these steps an all-gather of 4 bytes for each array and device, and one of 32 bytes.

    Args:
      step: The number of the step, the same in all processes.
      state: A pytree of arrays, gradients and losses among them.
      every: At which multiples of steps it looks.

    Raises:
      SpmdError: Copies differ, with host, device and array, and whether most of them agree; or numbers are not finite,
        with the ranks and arrays.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> w = spmd.shard(jnp.ones(8), "d", mesh=spmd.make_mesh(dp=8))
      >>> spmd.cluster.guard(100, {"w": w})
    """
    call = f"guard({step!r}, state)"
    if not is_int(step, 0) or not is_int(every, 1):
        raise SpmdError(f"step and every are integers, not {step!r} and {every!r}.", call=call)
    if step % every:
        return
    leaves = checked(named(state, call), call)
    if wrong := _differences(leaves):
        rule = (
            "copies that are equal by their layout differ: a bit has flipped, or the devices computed different things."
        )
        advice = "restore the last checkpoint, without that host if it happens again"
        raise SpmdError(rule, call=call, got=wrong, advice=advice)
    [unsound] = anywhere(", ".join(not_finite(leaves)[:5]))
    if unsound:
        raise SpmdError(
            "numbers of the state are not finite.", call=call, got=[unsound], advice="restore(...) goes back"
        )


def _differences(leaves: Mapping[str, jax.Array]) -> list[str]:
    """The blocks of which devices hold different copies, and on which of them."""
    most = max(collections.Counter(one.process_index for one in jax.devices()).values())
    sums = by_device(checksums, leaves)
    mine = [[one.id, *(sums.get(one, {}).get(path, 0) for path in leaves)] for one in jax.local_devices()]
    whole = gathered(np.array([*mine, *mine[:1] * (most - len(mine))], np.uint32))
    row_of = {int(row[0]): row[1:] for row in whole.reshape(-1, 1 + len(leaves))}
    found: list[tuple[str, dict[Any, int]]] = []
    for leaf, (path, x) in enumerate(leaves.items()):
        copies: dict[str, dict[Any, int]] = collections.defaultdict(dict)
        for device, where in x.sharding.devices_indices_map(x.shape).items():
            copies[path + block_text(where, x.shape)][device] = int(row_of[device.id][leaf])
        found += [(block, sums) for block, sums in copies.items() if len(set(sums.values())) > 1]
    hosts = everyone(socket.gethostname()) if found else []
    return [_odd(*one, hosts) for one in found]


def _odd(block: str, sums: Mapping[Any, int], hosts: Sequence[str]) -> str:
    """Return who has other copies of a block than most."""
    counts = collections.Counter(sums.values()).most_common()
    clear = len(counts) == 1 or counts[0][1] > counts[1][1]
    odd = [device for device, value in sums.items() if not clear or value != counts[0][0]]
    shown = ", ".join(f"device {one.id} (rank {one.process_index} on {hosts[one.process_index]})" for one in odd[:8])
    others = f"differs from {counts[0][1]} equal copies" if clear else "have different copies, and no majority is right"
    return f"{block}: {shown} {others}"
