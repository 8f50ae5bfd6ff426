"""Layers that gather their weights, and gather them again in the backward pass: one layer, or a stack in a scan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd.errors import LayoutError, SizeError, not_one_of
from spmd.parallel._rematerialize import (
    SAVE,
    Axes,
    Layer,
    Move,
    differentiable,
    is_array,
    moves,
    paths,
    without_integers,
)
from spmd.parallel.weights import gather_leaf, scatter_leaf, sum_leaf

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Plan:
    """The facts for both passes: the traced layer, how each weight travels, and in which dtype."""

    layer: Layer
    moves: tuple[Move, ...]
    dtype: Any
    prefetch: bool = False

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
    _check_save(save, call)

    @functools.wraps(layer)
    def gathering(params: Any, *args: Any) -> Any:
        weights, found, body = _flat(layer, params, moves(params, at_rest, compute, data, call))
        plan = _Plan(None, found, dtype)  # type: ignore[arg-type]
        traced, consts = Layer.trace(body, plan.gather, weights, args, (), save)
        return _one(_Plan(traced, found, dtype), consts, weights, args)

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
    _check_save(save, call)
    weights, stacked, body = _flat(layer, params, moves(params, at_rest, compute, data, call))
    _check_stack(params, stacked, call)
    inner = tuple(move.inner() for move in stacked)
    first = [w[0] for w in weights]
    traced, consts = Layer.trace(body, _Plan(None, inner, dtype).gather, first, (x,), shared, save)  # type: ignore[arg-type]
    plan = _Plan(traced, inner, dtype, prefetch)
    return _stack(plan, stacked, consts, weights, shared, x)


# --- checks and parts for both ------------------------------------------------------------------------------


def _check_save(save: Any, call: str) -> None:
    if save not in SAVE:
        raise LayoutError(not_one_of("save", save, SAVE), call=call, fix='save="activations"')


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


# --- one layer ----------------------------------------------------------------------------------------------


def _one_run(plan: _Plan, consts: Any, weights: Any, x: Any) -> Any:
    return plan.layer(consts, plan.gather(weights), (), x)


def _one_forward(plan: _Plan, consts: Any, weights: Any, x: Any) -> Any:
    out, kept = plan.layer.forward(consts, plan.gather(weights), (), x)
    return out, (consts, weights, x, kept)


def _one_backward(plan: _Plan, given: Any, cotangent: Any) -> Any:
    consts, weights, x, kept = given
    gathered = plan.gather(weights, again=True, after=cotangent)
    d_consts, d_weights, _, d_x = plan.layer.backward(consts, gathered, (), kept, cotangent)
    partial = plan.scatter(d_weights, weights)
    done = [None if g is None else sum_leaf(m, g) for g, m in zip(partial, plan.moves, strict=True)]
    return without_integers(d_consts, consts), done, without_integers(d_x, x)


_one = spmd.custom_vjp(_one_run, nondiff_argnums=(0,))
_one.defvjp(_one_forward, _one_backward)


# --- a stack ------------------------------------------------------------------------------------------------


def _turns(plan: _Plan, weights: Any, turn: Any, carry: Any, xs: Any, *, back: bool = False) -> Any:
    """A scan over the layers that passes on each layer's gathered weights: `turn(gathered, carry, x) -> carry, y`."""
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


def _stack_run(plan: _Plan, stacked: Any, consts: Any, weights: Any, shared: Any, x: Any) -> Any:
    return _turns(plan, weights, lambda w, x, _: (plan.layer(consts, w, shared, (x,)), None), x, None)[0]


def _stack_forward(plan: _Plan, stacked: Any, consts: Any, weights: Any, shared: Any, x: Any) -> Any:
    def turn(gathered: Any, x: Any, _: Any) -> Any:
        return plan.layer.forward(consts, gathered, shared, (x,))

    out, kept = _turns(plan, weights, turn, x, None)
    return out, (consts, weights, shared, kept)


def _stack_backward(plan: _Plan, stacked: Any, given: Any, cotangent: Any) -> Any:
    consts, weights, shared, kept = given
    still = (consts, shared)

    def turn(gathered: Any, carry: Any, kept: Any) -> Any:
        cotangent, totals = carry
        d_consts, d_weights, d_shared, (d_x,) = plan.layer.backward(consts, gathered, shared, kept, cotangent)
        found = without_integers((d_consts, d_shared), still)
        return (d_x, jax.tree.map(jnp.add, totals, found)), plan.scatter(d_weights, weights)

    totals = without_integers(jax.tree.map(jnp.zeros_like, still), still)
    (d_x, (d_consts, d_shared)), partial = _turns(plan, weights, turn, (cotangent, totals), kept, back=True)
    done = [None if g is None else sum_leaf(m, g) for g, m in zip(partial, stacked, strict=True)]
    return d_consts, done, d_shared, d_x


_stack = spmd.custom_vjp(_stack_run, nondiff_argnums=(0, 1))
_stack.defvjp(_stack_forward, _stack_backward)
