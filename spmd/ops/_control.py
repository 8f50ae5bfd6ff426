"""Branches whose predicate may differ between devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from spmd import _compat
from spmd._leaves import kind_of
from spmd.comm._keywords import check_array, misfit
from spmd.errors import LayoutError
from spmd.modes import current_frame

R = TypeVar("R")


def cond(predicate: Any, true_fn: Callable[..., R], false_fn: Callable[..., R], *operands: Any) -> R:
    """`jax.lax.cond` that neither hangs nor loses gradients when the predicate differs between devices.

    With a raw `lax.cond` whose predicate differs, devices take different branches. A collective in one of the branches
    then waits forever, and its gradient is wrong (jax#40823). Here a predicate that is equal by JAX's own type gives a
    `lax.cond`. Any other predicate runs both branches everywhere and selects, so the branch not taken must have finite
    derivatives too, as with `jnp.where`.

    Communication: that of the branch taken, or of both branches if the predicate is typed varying. Backward likewise.

    Args:
      predicate: A boolean scalar.
      true_fn: The branch for True; both return the same structure, shapes and dtypes.
      false_fn: The branch for False.
      *operands: Their arguments.

    Returns:
      The result of one branch.

    Raises:
      LayoutError: If the predicate is not a scalar.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> @spmd.kernel("n/x -> n/x", mesh=mesh)
      ... def relu_blocks(v):
      ...     with spmd.per_shard("each block decides for itself"):
      ...         return spmd.cond(v.sum() > 6, lambda v: v, lambda v: 0 * v, v)
      >>> print(relu_blocks(jnp.arange(8)))
      [0 0 0 0 4 5 6 7]
    """
    frame = current_frame("spmd.cond")
    for branch in (true_fn, false_fn):
        if not callable(branch):
            rule = f"the branches of cond are functions, and this one is {kind_of(branch)}."
            raise LayoutError(rule, call="cond(predicate, true_fn, false_fn, *operands)")
    for what, value in [("the predicate", predicate), *(("an operand", x) for x in jax.tree.leaves(operands))]:
        check_array(value, what, misfit("cond(predicate, true_fn, false_fn, *operands)"))
    shape = jnp.shape(predicate)
    if shape != ():
        raise LayoutError(
            f"the predicate of cond is a scalar, and this one has shape {shape}.",
            call="cond(predicate, ...)",
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
    _check_alike(yes, no)
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), yes, no)


def _check_alike(yes: Any, no: Any) -> None:
    """Both branches return the same structure, shapes and dtypes, as `lax.cond` demands. A selection would broadcast
    without a word."""
    if jax.tree.structure(yes) != jax.tree.structure(no):
        got = [f"true_fn: {jax.tree.structure(yes)}", f"false_fn: {jax.tree.structure(no)}"]
        raise LayoutError("the branches of cond return the same structure.", call="cond(predicate, ...)", got=got)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(yes)]
    wrong = []
    for path, a, b in zip(paths, jax.tree.leaves(yes), jax.tree.leaves(no), strict=True):
        weak = any(isinstance(x, (bool, int, float, complex)) or getattr(x, "weak_type", False) for x in (a, b))
        kinds = [f"{jnp.result_type(x)}[{','.join(map(str, jnp.shape(x)))}]" for x in (a, b)]
        if jnp.shape(a) != jnp.shape(b) or (kinds[0] != kinds[1] and not weak):
            wrong.append(f"result{path}: {kinds[0]} from true_fn, {kinds[1]} from false_fn")
    if wrong:
        rule = "the branches of cond return the same shapes and dtypes."
        raise LayoutError(rule, call="cond(predicate, ...)", got=wrong)
