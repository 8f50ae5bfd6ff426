"""Branches whose predicate may differ between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd import _compat
from spmd.errors import LayoutError, compose
from spmd.mode import current_frame

__all__ = ["cond"]


def cond(predicate: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any) -> Any:
    """`jax.lax.cond` that neither hangs nor loses gradients when the predicate differs between devices.

    A raw `lax.cond` whose predicate differs lets devices take different branches: a collective in one of them
    then waits for ever, and its gradient is wrong (jax#40823). Here a predicate that is equal by JAX's own type
    gives a `lax.cond`; any other runs both branches everywhere and selects.

    Communication: that of the branches; of both, where the predicate is typed varying. Backward likewise.

    Args:
      predicate: A boolean scalar.
      true_fn: The branch for True; both return the same structure, shapes and dtypes.
      false_fn: The branch for False.
      *operands: Their arguments.

    Returns:
      The result of one branch.

    Raises:
      LayoutError: If the predicate is no scalar.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> @spmd.kernel("n/x -> n/x", mesh=mesh)
      ... def relu_blocks(v):
      ...     return spmd.cond(v.sum() > 6, lambda v: v, lambda v: 0 * v, v)
      >>> print(relu_blocks(jnp.arange(8)))
      [0 0 0 0 4 5 6 7]
    """
    frame = current_frame("spmd.cond")
    shape = jnp.shape(predicate)
    if shape != ():
        raise LayoutError(
            compose(
                f"the predicate of cond is a scalar, and this one has shape {shape}.",
                call="cond(predicate, ...)",
            )
        )
    varying = frame.in_mesh_order(_compat.varying_axes(predicate)) if frame.explicit else ()

    def aligned(out: Any, other: Any) -> Any:
        """Both branches typed alike, as `lax.cond` wants them."""
        return jax.tree.map(lambda a, b: _compat.pvary(a, frame.in_mesh_order(_compat.varying_axes(b))), out, other)

    if not varying:
        if not frame.explicit:
            return jax.lax.cond(predicate, true_fn, false_fn, *operands)
        kinds = [jax.eval_shape(f, *operands) for f in (true_fn, false_fn)]

        def typed(fn: Callable[..., Any], other: Any) -> Callable[..., Any]:
            return lambda *args: aligned(fn(*args), other)

        return jax.lax.cond(predicate, typed(true_fn, kinds[1]), typed(false_fn, kinds[0]), *operands)
    yes, no = true_fn(*operands), false_fn(*operands)
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), yes, no)
