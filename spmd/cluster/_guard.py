"""Guards of numbers: copies that have to be equal are compared bit for bit, and numbers have to be finite."""

from __future__ import annotations

from typing import Any

from spmd._processes.copies import different_copies
from spmd.cluster._checkpoints import check_finite, checked, named
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
    if wrong := different_copies(leaves):
        rule = (
            "copies that are equal by their layout differ: a bit has flipped, or the devices computed different things."
        )
        advice = "restore the last checkpoint, without that host if it happens again"
        raise SpmdError(rule, call=call, got=wrong, advice=advice)
    check_finite(leaves, call)
