"""Fully sharded data parallelism: weights rest divided, and a layer gathers them just before use, backward too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import Layout
from spmd.errors import LayoutError, ReplicationError, SizeError, check_one_of
from spmd.nn.norm import wide
from spmd.parallel._layer import SAVE, Layer, differentiable, without_integers
from spmd.parallel.layouts import Axes, Move, checked_axes, is_array, laid_out, moves, paths, text_of

# --- weights -----------------------------------------------------------------------------------------------------

# Fully sharded data parallelism: parameters rest divided and are gathered just before use.

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
    if not differentiable(w):  # no gradient to defer; equal integers and keys stay equal
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
    for path, leaf, layout in laid_out(tree, layouts, call):
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


# --- layers ------------------------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class _Plan:
    """The facts for both passes: the traced layer, how each weight of a layer travels, and in which dtype; for a stack
    of layers also how each weight of all of them does."""

    moves: tuple[Move, ...]
    dtype: Any
    stacked: tuple[Move, ...] | None = None
    prefetch: bool = False
    layer: Any = None

    def gather(self, weights: Any, *, again: bool = False, after: Any = None) -> list[Any]:
        pairs = zip(weights, self.moves, strict=True)
        return [gather_leaf(w, m, self.dtype, again=again, after=after) for w, m in pairs]

    def scatter(self, gradients: Any, weights: Any) -> list[Any]:
        """The gradients of gathered weights in their layouts at rest, not yet summed over the copies."""
        trio = zip(gradients, weights, self.moves, strict=True)
        return [scatter_leaf(m, g.astype(w.dtype)) if differentiable(w) else None for g, w, m in trio]


def fsdp(
    layer: Callable[P, R],
    at_rest: Any,
    compute: Any,
    *,
    dtype: Any = None,
    data: str | Axes | None = None,
    save: str = "activations",
) -> Callable[P, R]:
    """A layer that gathers its weights just before use, and again in its backward pass.

    `layer(weights, *args)` takes weights in the layouts `compute`; the result takes them in the layouts at rest. The
    forward pass keeps nothing that depends only on weights: neither gathered weights nor casts, transposes or copies of
    them. `jax.checkpoint` does not do this: it decides by operation and not by origin. In code without a scan XLA also
    merges its second gather with the first, and so keeps the gathered weights after all. Here the second gather travels
    as integers, so that it is not equal to the first for any compiler, and it waits for the layer's cotangent at an
    optimization barrier. XLA's CPU backend drops barriers, so it gathers early in code without a scan; in `scan_layers`
    it cannot.

    Communication: that of `gather`, and in the backward pass one more all-gather per gathered leaf. Each gradient is
    reduced once per call, in the dtype of its parameter.

    Memory: the activations that `layer` needs are kept for the backward pass ("activations"), or only its arguments,
    and the layer is computed again ("inputs").

    Args:
      layer: A function `layer(weights, *args)`. Values that it closes over are differentiated too.
      at_rest: The layouts of the weights at rest, as in `gather`.
      compute: The layouts of the weights in use.
      dtype: The dtype to which floating weights are cast before they travel.
      data: The mesh axes that divide the data, as in `gather`.
      save: "activations" or "inputs".

    Returns:
      A function of the weights at rest and the other arguments of `layer`. Reverse-mode differentiation only.

    Raises:
      LayoutError: If layouts and weights do not fit, or `save` is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(dp=4)
      >>> layer = parallel.fsdp(lambda w, x: spmd.einsum(x, w, "b/dp d, d f -> b/dp f"), "d/dp f", "d f")
      >>> kernel = spmd.kernel("d/dp f, b/dp d -> b/dp f", mesh=mesh)(layer)
      >>> w, x = jnp.ones((4, 2)), jnp.ones((8, 4))
      >>> both = lambda w, x, g: jax.vjp(kernel, w, x)[1](g)
      >>> spmd.inspect.collectives(both, w, x, jnp.ones((8, 2)), mesh=mesh).counts
      {'all_gather': 1, 'psum_scatter': 1}

    References:
      Zhao et al., PyTorch FSDP, https://arxiv.org/abs/2304.11277 (reshard after forward)
    """
    call = "fsdp(layer, at_rest, compute)"
    check_one_of("save", save, SAVE, call, fix='save="activations"')

    @functools.wraps(layer)
    def gathering(params: Any, *args: Any) -> Any:
        weights, found, body = _flat(layer, params, moves(params, at_rest, compute, data, call))
        plan = _Plan(found, dtype)
        traced, consts = Layer.trace(body, plan.gather, weights, args, (), save)
        return _layers(replace(plan, layer=traced), consts, weights, (), args)

    return cast("Callable[P, R]", gathering)


def scan_layers(
    layer: Callable[..., Any],
    params: Any,
    x: T,
    *shared: Any,
    at_rest: Any,
    compute: Any,
    dtype: Any = None,
    data: str | Axes | None = None,
    save: str = "activations",
    prefetch: bool = False,
) -> T:
    """`x = layer(weights, x, *shared)` for each layer of a stack. Weights are gathered layer by layer.

    A scan over the first dimension of the parameters. No gathered weight outlives its layer: the backward pass gathers
    each weight again, last layer first. With `prefetch` each iteration, forward and backward, gathers the weights of
    the next one while it computes. They travel in the loop's carry, and nothing in the iteration waits for them.

    Communication, for L layers whose gathered leaves have S bytes each in `dtype`, and S' in their own dtype: forward,
    L all-gathers per leaf of S(n-1)/n; backward, the same and L reduce-scatters of S'(n-1)/n. `prefetch` adds one
    all-gather per leaf and direction, in the last iteration. The sums over the other axes of `data`, for hybrid
    sharding and for leaves that rest whole, are one all-reduce per leaf for all layers together. Gradients of floats in
    `shared`, and of floats that the layer closes over, are summed in each layer, if they are equal and x is divided. To
    sum them once, `spmd.defer` these values first.

    Memory: parameters at rest, one gathered layer (two with `prefetch`), and for each layer its activations
    ("activations") or the value of `x` before it ("inputs", which computes each layer again).

    Args:
      layer: A function `layer(weights, x, *shared)` to the next x, of the same types.
      params: The parameters of all layers, stacked along the first dimension of each leaf.
      x: The value that goes from layer to layer, a pytree.
      *shared: Further arguments, the same for each layer.
      at_rest: The layouts of `params` at rest, with the first dimension: `"l d/dp f/tp"`.
      compute: Their layouts in use, with the first dimension: `"l d f/tp"`.
      dtype: The dtype to which floating weights are cast before they travel.
      data: The mesh axes that divide the data, as in `gather`.
      save: "activations" or "inputs".
      prefetch: Whether each iteration gathers for the next one.

    Returns:
      The x after the last layer. Reverse-mode differentiation only.

    Raises:
      LayoutError: If layouts and parameters do not fit, or the first dimension is divided.
      SizeError: If the first dimensions differ.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> from spmd import parallel
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("l d/dp f, b/dp d -> b/dp d", mesh=mesh)
      ... def stack(w, x):
      ...     def layer(w, x):
      ...         return x + jnp.tanh(spmd.einsum(x, w, "b/dp d, d f -> b/dp f"))
      ...     return parallel.scan_layers(layer, w, x, at_rest="l d/dp f", compute="l d f", prefetch=True)
      >>> report = spmd.inspect.collectives(stack, jnp.ones((3, 8, 8)), jnp.ones((4, 8)))
      >>> report.counts  # three layers, and one at the edge
      {'all_gather': 4}
    """
    call = "scan_layers(layer, params, x, ...)"
    check_one_of("save", save, SAVE, call, fix='save="activations"')
    weights, stacked, body = _flat(layer, params, moves(params, at_rest, compute, data, call))
    _check_stack(params, stacked, call)
    plan = _Plan(tuple(move.inner() for move in stacked), dtype, stacked, prefetch)
    turn = functools.wraps(body)(lambda weights, *given: (body(weights, *given),))  # x as a tuple, as in `fsdp`
    traced, consts = Layer.trace(turn, plan.gather, [w[0] for w in weights], (x,), shared, save)
    return _layers(replace(plan, layer=traced), consts, weights, shared, (x,))[0]


# --- checks and parts for both ------------------------------------------------------------------------------


def _check_stack(params: Any, stacked: tuple[Move, ...], call: str) -> None:
    named = [(path, leaf) for path, leaf in zip(paths(params), jax.tree.leaves(params), strict=True) if is_array(leaf)]
    divided = [
        path for (path, leaf), move in zip(named, stacked, strict=True) if not leaf.shape or move.rest[0] or move.use[0]
    ]
    if divided:
        rule = "the first dimension of each parameter counts the layers and is whole."
        raise LayoutError(rule, call=call, got=divided, advice='"l d/dp f", with l undivided')
    sizes = [f"{path}: {leaf.shape[0]} layers" for path, leaf in named]
    if len({leaf.shape[0] for _, leaf in named}) != 1:
        rule = "all parameters are stacks of the same number of layers."
        raise SizeError(rule, call=call, got=sizes or ["no parameters"])


def _flat(layer: Any, params: Any, found: list[Move | None]) -> tuple[list[Any], tuple[Move, ...], Any]:
    """The arrays among the parameters, their moves, and the layer as a function of the arrays alone."""
    leaves, structure = jax.tree.flatten(params)

    @functools.wraps(layer)
    def body(weights: list[Any], *args: Any) -> Any:
        given = iter(weights)
        merged = [leaf if m is None else next(given) for leaf, m in zip(leaves, found, strict=True)]
        return layer(jax.tree.unflatten(structure, merged), *args)

    weights = [leaf for leaf, move in zip(leaves, found, strict=True) if move is not None]
    return weights, tuple(move for move in found if move is not None), body


# --- one layer, or a stack --------------------------------------------------------------------------------------


def _turns(plan: _Plan, weights: Any, turn: Any, carry: Any, xs: Any, *, after: Any = None) -> Any:
    """A scan over the layers that passes on each layer's gathered weights: `turn(gathered, carry, x) -> carry, y`. In a
    backward pass it goes backwards, and weights are gathered again, those of one layer alone not before `after`."""
    back = after is not None
    if plan.stacked is None:
        return turn(plan.gather(weights, again=back, after=after), carry, xs)
    if not plan.prefetch:

        def plain(carry: Any, now: Any) -> Any:
            own, x = now
            return turn(plan.gather(own, again=back), carry, x)

        return lax.scan(plain, carry, (weights, xs), reverse=back)
    count = weights[0].shape[0]

    def layer(i: Any) -> list[Any]:
        return plan.gather([lax.dynamic_index_in_dim(w, i, keepdims=False) for w in weights], again=back)

    def ahead(held: Any, now: Any) -> Any:
        carry, gathered = held
        i, x = now
        coming = layer(jnp.maximum(i - 1, 0) if back else jnp.minimum(i + 1, count - 1))
        carry, y = turn(gathered, carry, x)
        return (carry, coming), y

    start = (carry, layer(count - 1 if back else 0))
    (carry, _), ys = lax.scan(ahead, start, (jnp.arange(count), xs), reverse=back)
    return carry, ys


def _run(plan: _Plan, consts: Any, weights: Any, shared: Any, x: Any) -> Any:
    return _turns(plan, weights, lambda w, x, _: (plan.layer(consts, w, shared, x), None), x, None)[0]


def _forward(plan: _Plan, consts: Any, weights: Any, shared: Any, x: Any) -> Any:
    def turn(gathered: Any, x: Any, _: Any) -> Any:
        return plan.layer.forward(consts, gathered, shared, x)

    out, kept = _turns(plan, weights, turn, x, None)
    return out, (consts, weights, shared, kept)


def _backward(plan: _Plan, given: Any, cotangent: Any) -> Any:
    consts, weights, shared, kept = given
    still = (consts, shared)

    def turn(gathered: Any, carry: Any, kept: Any) -> Any:
        cotangent, totals = carry
        d_consts, d_weights, d_shared, d_x = plan.layer.backward(consts, gathered, shared, kept, cotangent)
        found = without_integers((d_consts, d_shared), still)
        found = found if plan.stacked is None else jax.tree.map(jnp.add, totals, found)
        return (d_x, found), plan.scatter(d_weights, weights)

    totals = without_integers(jax.tree.map(jnp.zeros_like, still), still)
    (d_x, (d_consts, d_shared)), partial = _turns(plan, weights, turn, (cotangent, totals), kept, after=cotangent)
    pairs = zip(partial, plan.stacked or plan.moves, strict=True)
    done = [None if g is None else sum_leaf(m, g) for g, m in pairs]
    return d_consts, done, d_shared, jax.tree.map(lambda ct: None if ct.dtype == jax.dtypes.float0 else ct, d_x)


_layers = spmd.custom_vjp(_run, nondiff_argnums=(0,))
_layers.defvjp(_forward, _backward)


# --- gradient accumulation: micro-batches in a loop, one gather before it and one reduction after it ------------------


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
        (_no_sum(mark), _no_sum(mark)),
        [jnp.zeros_like(gathered[i], wide(gathered[i])) for i in moving],
    )
    ((value, count), gradients), _ = lax.scan(micro, start, micro_batches)
    value = _summed(value, axes)
    done: list[Any] = [None] * len(leaves)
    scale = 1 / _summed(count, axes) if mean else None
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
def _no_sum(mark: str) -> Any:
    return spmd.zeros(mark)


def _check_batches(micro_batches: Any, call: str) -> None:
    shapes = [tuple(getattr(x, "shape", ())) for x in jax.tree.leaves(micro_batches)]
    counts = {shape[:1] for shape in shapes}
    if len(counts) != 1 or () in counts:
        rule = "the first dimension of each array of micro_batches counts the micro-batches."
        raise SizeError(rule, call=call, got=[f"shape {shape}" for shape in shapes] or ["no arrays"])
