"""Gradient accumulation: micro-batches in a loop, one reduction after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd.errors import LayoutError, ReplicationError, SizeError
from spmd.nn.norm import wide
from spmd.parallel._rematerialize import Axes, checked_axes, differentiable, is_array, moves
from spmd.parallel.fully_sharded import gather_leaf, reduce_leaf

T = TypeVar("T")


def accumulate(
    loss_fn: Callable[..., Any],
    params: T,
    micro_batches: Any,
    *,
    at_rest: Any,
    compute: Any,
    data: str | Axes,
    dtype: Any = None,
    mean: bool = False,
) -> tuple[jax.Array, T]:
    """Loss and gradient over micro-batches, with one gather before the loop and one reduction after it.

    Before the loop the parameters are gathered, and those that rest whole are deferred. In the loop the gradients of
    each micro-batch, partial sums on `data`, are added up in float32. After the loop each leaf is reduced once, in
    float32: reduce-scattered if it rests divided, all-reduced if it is whole.

    Communication, for leaves of S bytes in `dtype` and S' in float32, over n devices: one all-gather S(n-1)/n and one
    reduce-scatter S'(n-1)/n, whatever the number of micro-batches. For a whole leaf, one all-reduce 2S'(n-1)/n.
    `loss_fn` adds its own.

    Memory: all parameters gathered, and float32 accumulators of the same size, as in ZeRO-2. To hold only one gathered
    layer (ZeRO-3), let `loss_fn` gather layer by layer, and differentiate it with `spmd.value_and_grad`.

    Args:
      loss_fn: A function `loss_fn(params, micro_batch)` that returns this device's part of the sum of the losses of a
        micro-batch: a partial sum on each axis of `data`, complete on all others. With `mean` it returns a pair of this
        sum and the number of its terms (both are partial sums).
      params: The parameters at rest.
      micro_batches: A pytree of arrays whose first dimension counts the micro-batches.
      at_rest: The layouts of the parameters at rest, as in `gather`.
      compute: Their layouts in use.
      data: The mesh axes that divide the data, including the axes of `at_rest` that are gathered.
      dtype: The dtype to which floating parameters are cast before they travel.
      mean: Divide loss and gradient by the number of terms on all devices and in all micro-batches. This is the mean
        over all tokens. A mean of means would weight tokens unequally.

    Returns:
      The complete loss, and the gradient in the layouts and dtypes of the parameters at rest, with None for leaves that
      are not floating.

    Raises:
      LayoutError: If layouts and parameters do not fit.
      MeshError: If a gathered axis is not among `data`.
      SizeError: If the numbers of micro-batches differ.
      ReplicationError: If the loss is not a partial sum on an axis of `data`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("d/dp, n b/dp d -> scalar, d/dp", mesh=mesh)
      ... def step(w, xs):
      ...     def loss(w, x):
      ...         return spmd.reduce((x * w[None]) ** 2, "b/dp d -> {U:dp}")
      ...     return parallel.accumulate(loss, w, xs, at_rest="d/dp", compute="d", data="dp")
      >>> value, gradient = step(jnp.ones(4), jnp.ones((3, 8, 4)))
      >>> print(value, gradient, spmd.inspect.collectives(step, jnp.ones(4), jnp.ones((3, 8, 4))).counts)
      96.0 [48. 48. 48. 48.] {'all_gather': 1, 'psum': 1, 'psum_scatter': 1}
    """
    call = "accumulate(loss_fn, params, micro_batches, ...)"
    axes = checked_axes(data, "data", call)
    if not axes:
        rule = "data names at least one mesh axis that divides the batch."
        raise LayoutError(rule, call=call, advice='data="dp", or plain spmd.value_and_grad')
    _check_batches(micro_batches, call)
    leaves, structure = jax.tree.flatten(params)
    found = moves(params, at_rest, compute, axes, call)
    gathered = [gather_leaf(w, m, dtype) for w, m in zip(leaves, found, strict=True)]
    moving = [i for i, w in enumerate(leaves) if is_array(w) and differentiable(w)]
    mark = f"{{U:{','.join(axes)}}}"

    def loss(floats: Any, batch: Any) -> Any:
        given = dict(zip(moving, floats, strict=True))
        out = loss_fn(jax.tree.unflatten(structure, [given.get(i, w) for i, w in enumerate(gathered)]), batch)
        value, count = _pair(out, mean, call)
        _check_partial(value, axes, call)
        return value, jnp.asarray(count, jnp.float32)

    def micro(totals: Any, batch: Any) -> tuple[Any, None]:
        found = spmd.value_and_grad(loss, loss=mark, has_aux=True)([gathered[i] for i in moving], batch)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, found), None

    start = (
        (_nothing(mark), _nothing(mark)),
        [jnp.zeros_like(gathered[i], wide(gathered[i])) for i in moving],
    )
    ((value, count), gradients), _ = lax.scan(micro, start, micro_batches)
    value = _total(value, mark)
    done: list[Any] = [None] * len(leaves)
    scale = 1 / _total(count, mark) if mean else None
    for i, gradient in zip(moving, gradients, strict=True):
        move = found[i]
        assert move is not None
        reduced = reduce_leaf(move, gradient)
        done[i] = (reduced if scale is None else reduced * scale).astype(leaves[i].dtype)
    return value if scale is None else value * scale, jax.tree.unflatten(structure, done)


def _pair(out: Any, mean: bool, call: str) -> tuple[Any, Any]:
    if mean != (isinstance(out, tuple) and len(out) == 2):
        rule = "with mean=True loss_fn returns a sum of losses and the number of its terms; otherwise only the sum."
        got = [f"mean={mean}", "a pair" if isinstance(out, tuple) else "one value"]
        raise LayoutError(rule, call=call, got=got, fix=f"mean={not mean}")
    return out if mean else (out, 0.0)


def _check_partial(value: Any, axes: Axes, call: str) -> None:
    """Raise if JAX's type says, where there are manual axes, that a sum is complete already."""
    kind, manual = spmd.typeof(value), jax.sharding.get_abstract_mesh().manual_axes
    complete = [axis for axis in axes if axis in manual and axis not in (*kind.varying, *kind.unreduced)]
    if complete:
        over = ", ".join(complete)
        rule = f"loss_fn returns this device's part of a sum, but on {over} it is complete: each device would add it."
        advice = f'reduce(x, "<layout> -> {{U:{",".join(axes)}}}") as the last step of loss_fn'
        raise ReplicationError(rule, call=call, got=[f"the loss: {kind}"], advice=advice)


@spmd.scope(mapping=None)
def _nothing(mark: str) -> Any:
    return spmd.zeros(mark)


@spmd.scope(mapping=None)
def _total(x: Any, mark: str) -> Any:
    return spmd.psum(x, f"{mark} -> scalar")


def _check_batches(micro_batches: Any, call: str) -> None:
    shapes = [tuple(getattr(x, "shape", ())) for x in jax.tree.leaves(micro_batches)]
    counts = {shape[:1] for shape in shapes}
    if len(counts) != 1 or () in counts:
        rule = "the first dimension of each array of micro_batches counts the micro-batches."
        raise SizeError(rule, call=call, got=[f"shape {shape}" for shape in shapes] or ["no arrays"])
