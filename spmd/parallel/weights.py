"""Fully sharded data parallelism: parameters rest divided and are gathered just before use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import Layout
from spmd.errors import LayoutError
from spmd.nn.dtypes import wide
from spmd.parallel._rematerialize import Axes, Move, layout_leaves, moves, paths, text_of

T = TypeVar("T")


def gather(params: T, at_rest: Any, compute: Any, *, dtype: Any = None, data: str | Axes | None = None) -> T:
    """Move parameters from their layouts at rest to those in use. The gradient goes back once, in their dtype.

    Layouts: each leaf comes in the layout `at_rest` and goes out in the layout `compute`. Along `data` the results are
    copies whose gradients are partial sums, so a use of a weight does not cost a reduction of its own.

    Communication, for a leaf of S bytes (in `dtype`) on n devices along the gathered axes: forward, one all-gather,
    S(n-1)/n per device. Backward, in the parameter's own dtype (S' bytes): one reduce-scatter over the gathered axes,
    S'(n-1)/n, then one all-reduce of the shard over the m devices of the other `data` axes, 2(S'/n)(m-1)/m. This is the
    order of hybrid sharding (HSDP): the replicated part is summed last, when it is small. A leaf that is whole at rest
    has one all-reduce over `data`, 2S'(m-1)/m. Layouts that differ in other ways go through `spmd.relayout`.

    Memory: the gathered copies are kept for the backward pass; `fsdp` and `scan_layers` gather again instead.

    2-byte floats travel as 16-bit integers, which no compiler widens. XLA's CPU backend would gather them as float32.

    Reverse-mode differentiation only.

    Args:
      params: The parameters, a pytree of any kind.
      at_rest: Their layouts at rest: a tree like `params`, a prefix of one, a layout for all, or a function from the
        tree to one of these.
      compute: Their layouts in use, in the same form and with the same dimensions.
      dtype: The dtype to which floating leaves are cast before they travel, such as `jnp.bfloat16`. By default their
        own.
      data: The mesh axes that divide the data. By default the axes over which something is gathered.

    Returns:
      The parameters in use.

    Raises:
      LayoutError: If layouts and parameters do not fit.
      MeshError: If a gathered axis is not among `data`.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("d/dp f, b/dp d -> scalar", mesh=mesh)
      ... def loss(w, x):
      ...     w = parallel.gather(w, "d/dp f", "d f")
      ...     return spmd.reduce(spmd.einsum(x, w, "b/dp d, d f -> b/dp f"), "b/dp f -> scalar")
      >>> gradient = jax.grad(loss)(jnp.ones((4, 2)), jnp.ones((8, 4)))
      >>> print(gradient[0], spmd.inspect.collectives(loss, jnp.ones((4, 2)), jnp.ones((8, 4))).counts)
      [8. 8.] {'all_gather': 1, 'psum': 1}

    References:
      Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054; Zhao et al., PyTorch FSDP,
      https://arxiv.org/abs/2304.11277
    """
    leaves, structure = jax.tree.flatten(params)
    found = moves(params, at_rest, compute, data, "gather(params, at_rest, compute)")
    return jax.tree.unflatten(structure, [gather_leaf(w, m, dtype) for w, m in zip(leaves, found, strict=True)])


def reduce_gradients(gradients: T, at_rest: Any, compute: Any, *, data: str | Axes | None = None) -> T:
    """The reverse of `gather`, for gradients that are partial sums: completes them, in the layouts at rest.

    For reductions that are deferred to the end of a loop over micro-batches; `accumulate` does all of this.

    Communication: the backward pass of `gather`, in the dtype of the gradients: per leaf one reduce-scatter over
    the gathered axes, then one all-reduce of the shard over the other `data` axes.

    Args:
      gradients: The gradients in use, partial sums on `data`: the gradients with respect to the result of `gather`.
      at_rest: The layouts of the parameters at rest.
      compute: The layouts of the parameters in use.
      data: The mesh axes that divide the data, as in `gather`.

    Returns:
      The gradients at rest.

    Raises:
      LayoutError: If layouts and gradients do not fit.
      MeshError: If a gathered axis is not among `data`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp d -> d/dp", mesh=mesh)
      ... def column_sums(x):
      ...     return parallel.reduce_gradients(x.sum(0), "d/dp", "d")
      >>> print(column_sums(jnp.ones((8, 4))))
      [8. 8. 8. 8.]
    """
    leaves, structure = jax.tree.flatten(gradients)
    call = "reduce_gradients(gradients, at_rest, compute)"
    found = moves(gradients, at_rest, compute, data, call, "gradients")
    done = [x if m is None else reduce_leaf(m, x) for x, m in zip(leaves, found, strict=True)]
    return jax.tree.unflatten(structure, done)


# --- one leaf -----------------------------------------------------------------------------------------------


def gather_leaf(w: Any, move: Move | None, dtype: Any, *, again: bool = False, after: Any = None) -> Any:
    """One gathered parameter.

    `again` is for a backward pass, where the compiler must not reuse the first gather. The gather then waits for the
    values `after`.
    """
    if move is None:
        return w
    if not jnp.issubdtype(w.dtype, jnp.inexact):  # no gradient to defer; equal integers and keys stay equal
        return _moved(replace(move, copies=()), w)
    name = jnp.dtype(dtype or w.dtype).name
    return _copied(move, name, w, again, after) if again else _gathered(move, name, w.dtype.name, w)


@spmd.scope(mapping=None)
def _moved(move: Move, w: Any, after: Any = None) -> Any:
    w = _defers(move, w)
    if after is not None and move.rest != move.use:
        held, _ = lax.optimization_barrier((w, after))
        # jax 0.10 types all results of a barrier as varying if any operand is, and no cast undoes that
        w = held if jax.typeof(held) == jax.typeof(w) else w
    return _gathers(move, w)


def _defers(move: Move, w: Any) -> Any:
    rest = text_of(move.names, move.rest)
    return spmd.defer(w, f"{rest} -> {text_of(move.names, move.rest, reduced=move.copies)}") if move.copies else w


def _gathers(move: Move, w: Any) -> Any:
    if move.rest == move.use:
        return w
    rest, use = (text_of(move.names, axes, reduced=move.copies) for axes in (move.rest, move.use))
    return spmd.all_gather(w, f"{rest} -> {use}") if move.tiled else spmd.relayout(w, f"{rest} -> {use}")


def _copied(move: Move, dtype: str, w: Any, again: bool, after: Any = None) -> Any:
    """The gather of a floating array, cast first; as bits to keep its width or to differ from another gather.

    In straight-line code XLA merges the gather of the backward pass with the equal one of the forward pass, and keeps
    the gathered weights in between. On CPU it drops optimization barriers before that. Gathers of unsigned and of
    signed integers are not equal.
    """
    w = w.astype(dtype)
    size = w.dtype.itemsize
    if move.rest == move.use or jnp.issubdtype(w.dtype, jnp.complexfloating) or not (again or size < 4):
        return _moved(move, w, after)
    bits = jnp.dtype(f"{'int' if again else 'uint'}{8 * size}")
    return lax.bitcast_convert_type(_moved(move, lax.bitcast_convert_type(w, bits), after), w.dtype)


def reduce_leaf(move: Move, gradient: Any) -> Any:
    """Completes the gradient of one gathered parameter, a partial sum on its gathered axes and on its copies."""
    return sum_leaf(move, scatter_leaf(move, gradient))


# The transposes of `_gathers` and `_defers` are derived by JAX, not written. Whether a gradient is a sum depends on its
# terms, and a term that is equal on all devices, such as that of a regularizer, also belongs to the sum.


@spmd.scope(mapping=None)
def scatter_leaf(move: Move, gradient: Any) -> Any:
    """The first half: sums and divides what was gathered. A partial sum remains on the copies."""
    if move.rest == move.use:
        return gradient
    resting = _defers(move, _nothing(move, gradient, move.use))
    return jax.vjp(lambda w: _gathers(move, w), resting)[1](gradient)[0]


@spmd.scope(mapping=None)
def sum_leaf(move: Move, gradient: Any) -> Any:
    """The second half: sums over the copies."""
    resting = _nothing(move, gradient, move.rest)
    return jax.vjp(lambda w: _defers(move, w), resting)[1](gradient)[0] if move.copies else gradient


def _nothing(move: Move, like: Any, axes: tuple[Axes, ...]) -> Any:
    """Zeros like the parameter at rest; `like` is divided over `axes`."""
    sizes = {}
    for name, own, local in zip(move.names, axes, like.shape, strict=True):
        parts = math.prod(spmd.axis_size(axis) for axis in own)
        held = spmd.local_size("/".join(("n", *own)), n=parts)  # one block, or all of it if arrays are whole
        sizes[name] = local * parts // held
    return spmd.zeros(text_of(move.names, move.rest), dtype=like.dtype, **sizes)


def _gather(move: Move, dtype: str, own: str, w: Any) -> Any:
    return _copied(move, dtype, w, again=False)


_gathered = spmd.custom_vjp(_gather, nondiff_argnums=(0, 1, 2))
_gathered.defvjp(
    lambda move, dtype, own, w: (_copied(move, dtype, w, again=False), None),
    lambda move, dtype, own, _, cotangent: (reduce_leaf(move, cotangent.astype(own)),),
)


# --- optimizers inside a kernel: the norm of a tree of shards ---------------------------------------------------------


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
