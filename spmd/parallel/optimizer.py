"""Optimizers inside a kernel: the norm of a tree of shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import spmd
from spmd import Layout
from spmd.errors import LayoutError
from spmd.nn.dtypes import wide
from spmd.parallel._parameter_moves import Axes, layout_leaves, paths

__all__ = ["ClipByGlobalNorm", "clip_by_global_norm", "global_norm"]


def global_norm(tree: Any, layouts: Any) -> jax.Array:
    """The root of the sum of squares of all elements of a tree of shards, each element counted once.

    Inside a kernel a leaf is one device's shard. A leaf is summed over the axes that divide it, and not over the axes
    along which it is equal. Outside kernels arrays are whole, and `optax.global_norm` is right.

    Layouts: each leaf as `layouts` says; the result is a scalar, equal on every axis.

    Communication: one all-reduce of a float32 for each distinct set of axes among the leaves, 8(n-1)/n bytes per device
    over n devices. Leaves with the same set share it, and whole leaves need none. Backward none.

    Args:
      tree: Gradients, or any other complete arrays. Partial sums are an error, because their squares do not give that
        of the sum.
      layouts: Their layouts: a tree like `tree`, a prefix of one, a layout for all, or a function from the tree.

    Returns:
      The norm, float32.

    Raises:
      LayoutError: If layouts and tree do not fit, or a layout has a mark.
      ReplicationError: If a leaf differs along an axis that its layout does not name.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(ep=2, dp=2)
      >>> layouts = {"experts": "e/ep d/dp", "router": "d"}
      >>> @spmd.kernel(in_layouts=(layouts,), out_layouts="scalar", mesh=mesh)
      ... def norm(gradients):
      ...     return parallel.global_norm(gradients, layouts)
      >>> print(norm({"experts": jnp.ones((4, 8)), "router": 2 * jnp.ones(8)}))
      8.0

    References:
      Pascanu et al., https://arxiv.org/abs/1211.5063
    """
    call = "global_norm(tree, layouts)"
    sums: dict[Axes, list[Any]] = {}
    leaves = jax.tree.leaves(tree)
    for path, leaf, layout in zip(paths(tree), leaves, layout_leaves(tree, layouts, call), strict=True):
        if layout is None:
            continue
        if layout.unreduced or layout.reduced:
            rule = "the norm is that of complete values, but a mark says that this one is not complete."
            advice = f'psum(x, "{layout.short} -> {Layout.from_dims(layout.dims).short}") of the leaf, and its layout'
            raise LayoutError(rule, call=call, got=[f'{path}: "{layout.short}"'], advice=advice)
        axes = tuple(sorted(layout.axes))
        sums.setdefault(axes, []).append(_squares(leaf, layout))
    total = jnp.zeros((), jnp.float32)
    for axes, parts in sums.items():
        total = total + _summed(sum(parts[1:], parts[0]), axes)
    return jnp.sqrt(total)


@spmd.scope(mapping=None)
def _squares(leaf: Any, layout: Layout) -> Any:
    """This device's part of the sum of squares. The annotation lets the check compare leaf and layout."""
    leaf = spmd.annotate(leaf, str(layout))
    size = jnp.abs(leaf)
    return jnp.sum(jnp.square(size.astype(wide(size)))).astype(jnp.float32)


@spmd.scope(mapping=None)
def _summed(part: Any, axes: Axes) -> Any:
    return spmd.psum(part, f"{{U:{','.join(axes)}}} -> scalar") if axes else part


class ClipByGlobalNorm(NamedTuple):
    """The result of `clip_by_global_norm`: a gradient transformation of optax's form."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]


def clip_by_global_norm(max_norm: float, layouts: Any) -> ClipByGlobalNorm:
    """Scale gradients down so that their global norm is at most `max_norm`, inside a kernel.

    This is `optax.clip_by_global_norm` with the norm of `global_norm`. You can chain it with optax's transformations,
    all others of which work element by element or on their own shards. Outside kernels optax's own is right.

    Communication: that of `global_norm`.

    Args:
      max_norm: The largest norm.
      layouts: The layouts of the gradients, as in `global_norm`.

    Returns:
      A pair of functions: `init(params)`, the empty state, and `update(updates, state, params=None)`, the clipped
      updates and the state.

    Raises:
      LayoutError: In `update`, as in `global_norm`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> clip = parallel.clip_by_global_norm(1.0, "d/dp")
      >>> @spmd.kernel("d/dp -> d/dp", mesh=spmd.make_mesh(dp=4))
      ... def clipped(gradient):
      ...     return clip.update(gradient, clip.init(gradient))[0]
      >>> print(clipped(jnp.ones(16)))
      [0.25 0.25 0.25 0.25 0.25 0.25 0.25 0.25 0.25 0.25 0.25 0.25 0.25 0.25
       0.25 0.25]

    References:
      https://optax.readthedocs.io/en/latest/api/transformations.html
    """

    def init(params: Any) -> tuple[()]:
        return ()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates, layouts)
        scale = jnp.where(norm < max_norm, jnp.float32(1.0), max_norm / norm)  # NaN if the norm is NaN
        return jax.tree.map(lambda x: (x.astype(wide(x)) * scale.astype(wide(x))).astype(x.dtype), updates), state

    return ClipByGlobalNorm(init, update)
