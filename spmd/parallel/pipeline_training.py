"""A pipeline that makes its gradients in its forward pass: forward and backward steps of a stage in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import _compat, axis_size, iota, repeat, scope, typeof
from spmd.errors import LayoutError, ReplicationError
from spmd.modes import current_frame
from spmd.nn.norm import wide
from spmd.parallel._layer import SplitStage, differentiable
from spmd.parallel.layouts import checked_axes
from spmd.parallel.pipelining import (
    Axes,
    Tree,
    check_result,
    check_stages,
    deferred,
    micro_batches,
    on_one_stage,
    passed_on,
    without_keys,
)
from spmd.parallel.schedule import Order, PipelineSchedule, Tick, Ticks, check_order

_CALL = "pipeline_loss(stage, loss, params, head, x, targets, ...)"


def pipeline_loss(
    stage: Callable[[Any, Any], Any],
    loss: Callable[[Any, Any, Any], Any],
    params: Tree,
    head: Tree,
    x: Tree,
    targets: Tree,
    *,
    pp: Axes,
    data: Axes = None,
    repeats: int | None = None,
    order: Order = "1f1b",
) -> jax.Array:
    """The sum of `loss(head, y, target)` over micro-batches, y being x after all stages, by 1F1B or ZB-H1.

    `pipeline` keeps something of all m micro-batches until the backward pass begins. Here the last stage begins the
    backward pass of a micro-batch as soon as it has its loss, and each stage takes forward and backward steps in turn
    (1F1B). A stage then keeps at most p micro-batches on p devices, whatever m is. So if the loss is differentiated,
    the forward pass computes the gradients, and the backward pass multiplies them by the cotangent.

    Each tick is a step of each device, as in `pipeline_schedule(p, m, v, order)`. A device takes its own branch of a
    `lax.switch`, and waits for its neighbours in each tick. So a tick takes the time of its longest step. With "1f1b"
    and one stage on each device, this is nearly always a backward step, which computes the stage again. With
    "eager-1f1b", and with several rounds, a tick has only forward or only backward steps, so that nobody waits for a
    longer step, and a stage keeps up to 2p - 1 inputs. With "zb-h1" a backward step is cut in two, one for
    the gradient of the input and one for those of the weights, and nothing is computed again. The three kinds of steps
    take about the same time if the stage is made of products.

    `stage` sees the parameters and micro-batch of one stage, as in `pipeline`. `loss` sees the head, a micro-batch
    after the last stage, and its target, and runs on the last device only. Neither may use pp in its strings, nor close
    over values that have a gradient.

    Layouts: params, x and repeats as in `pipeline`. Each leaf of targets `"m ..."`, equal on pp. The head is any tree,
    equal on pp. `loss` returns a scalar, this device's part of a sum over the axes of `data`, and complete on all
    others.

    Communication, for micro-batches of B bytes on a device and T = 2(v m + p - 1) ticks, or 3m + p - 1 with "zb-h1" and
    at least p micro-batches: with gradients, two collective-permutes in each tick, 2TB bytes (leaves without a gradient
    go forward only), and a psum of the loss. After the last tick, a psum over pp of the gradient of x, 2mB(p-1)/p
    bytes, unless x is a gathered copy on pp, and of the head's, 2H(p-1)/p bytes for H bytes of it. If parameters are
    equal on axes that divide x or targets, their gradients are summed once, after the last tick. `stage` and `loss`
    communicate in their steps. What a stage gathers of its parameters is gathered again in a backward step. With
    "zb-h1" this is the one for the input, unless the weights' gradients need it, too. Without gradients there are
    v m + p - 1 ticks of a forward step and one permute each.

    Memory with gradients: at most p - 1 inputs (2p - 2 if eager, about (v + 1) p with v rounds), what one stage
    keeps for its own derivative, sums of gradients in float32 or wider, x and its gradient. `jax.checkpoint` inside
    the stage makes the second less. With "zb-h1" what `jax.vjp` keeps of a stage is kept for p micro-batches, without
    what is made of parameters alone, and for as many what the gradient of the input leaves to those of the weights.

    Args:
      stage: `stage(params, x)` to the next x, of the same shapes and dtypes.
      loss: `loss(head, y, target)` to a scalar.
      params: The parameters of all stages, a tree. It may have integers.
      head: What `loss` needs beside them, such as the weights of the last layer; None for nothing.
      x: The micro-batches, a tree. It may have integers and keys of `jax.random`.
      targets: What belongs to each micro-batch in `loss`, a tree. It has no gradient.
      pp: The mesh axis of the stages, several axes, or None for one device.
      data: The mesh axes over which `loss` is a partial sum.
      repeats: The number of stages on each device; by default one, without the dimension v. With several, the number
        of micro-batches is a multiple of p.
      order: "1f1b", "eager-1f1b", or "zb-h1" for one stage on each device.

    Returns:
      The complete sum. Reverse-mode differentiation, once.

    Raises:
      SizeError: If the number of stages of the parameters is not that of the devices, or the numbers of micro-batches
        differ, or are not a multiple of p in several rounds, or "zb-h1" has several rounds.
      LayoutError: If the order is unknown, `stage` returns other shapes or dtypes than it gets, or `loss` returns no
        floating scalar.
      ReplicationError: If JAX types all parameters equal along pp, or the loss is a partial sum on other axes than
        those of `data`.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(pp=4)
      >>> @spmd.kernel("p/pp d, d, m b d, m b -> scalar", mesh=mesh)
      ... def total(w, head, x, targets):
      ...     stage = lambda w, x: x * w[None]
      ...     loss = lambda head, y, target: ((y @ head - target) ** 2).sum()
      ...     return spmd.parallel.pipeline_loss(stage, loss, w, head, x, targets, pp="pp")
      >>> args = jnp.ones((4, 3)), jnp.ones(3), jnp.ones((6, 2, 3)), jnp.ones((6, 2))
      >>> print(total(*args), jax.grad(total, 1)(*args))
      48.0 [48. 48. 48.]

    References:
      Narayanan et al., "PipeDream", https://arxiv.org/abs/1806.03377, and "Efficient Large-Scale Language Model
      Training on GPU Clusters", https://arxiv.org/abs/2104.04473, section 2.2; Zhuang et al., "On Optimizing the
      Communication of Model Parallelism", https://arxiv.org/abs/2211.05322, for eager 1F1B; Qi et al., "Zero Bubble
      Pipeline Parallelism", https://arxiv.org/abs/2401.10241, for ZB-H1
    """
    over = checked_axes(data, "data", _CALL)
    microbatches = micro_batches({"x": x, "targets": targets}, _CALL, "x and targets")
    schedule = PipelineSchedule(axis_size(pp) if pp else 1, microbatches, repeats or 1, order)
    check_stages(params, pp, schedule.stages, repeats, _CALL)
    check_order(schedule, ("1f1b", "eager-1f1b", "zb-h1"), _CALL)
    stage, x, keys = without_keys(on_one_stage(stage, pp), x)
    of_keys = on_one_stage(lambda head, y, target: loss(head, keys(y), target), pp)
    plan = _Plan(stage, of_keys, pp, over, repeats, schedule)
    targets = lax.stop_gradient(targets)
    params, head = deferred(params, (x, targets)), deferred(head, (x, targets))
    if not pp or not current_frame("pipeline_loss").explicit:
        return _in_turn(plan, params, head, x, targets)
    return _with_gradients(plan, params, *_on_stages((head, x, targets), plan))


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is not an array."""

    stage: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any, Any], Any]
    pp: Axes
    data: tuple[str, ...]
    repeats: int | None
    schedule: PipelineSchedule

    def of_round(self, params: Tree, turn: Any) -> Tree:
        """The parameters of a round, `"p/pp ..."`."""
        return params if self.repeats is None else _at(params, turn, 0)

    def added(self, sums: list[Any], gradients: list[Any], turn: Any) -> list[Any]:
        """The sums of all rounds with the gradients of one added."""
        before = self.of_round(sums, turn)
        after = [_sum(a, b) for a, b in zip(before, gradients, strict=True)]
        return after if self.repeats is None else _put(sums, after, turn, 0)

    def stages(self, w: Tree, x: Tree) -> Tree:
        """The stage of each device, of parameters and input `"p/pp ..."`."""
        out = jax.vmap(self.stage)(w, x)
        check_result(x, out, _CALL)
        return out

    def part(self, head: Tree, y: Tree, target: Tree) -> jax.Array:
        """The loss of a micro-batch."""
        value = self.loss(head, y, target)
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            got = [f"{jnp.result_type(value)}{list(jnp.shape(value))}"]
            raise LayoutError("loss returns a floating scalar.", call=_CALL, got=got)
        return value


# --- one device, or the compiler ----------------------------------------------------------------------------------


def _in_turn(plan: _Plan, params: Tree, head: Tree, x: Tree, targets: Tree) -> jax.Array:
    """One stage after another, one micro-batch after another."""
    fold = lambda w: w if plan.repeats is None else w.reshape(-1, *w.shape[2:])
    stages = jax.tree.map(fold, params)

    @jax.checkpoint
    def one(batch: Any) -> jax.Array:
        x, target = batch
        y = lax.scan(lambda x, w: (plan.stage(w, x), None), x, stages)[0]
        return plan.part(head, y, target)

    return _complete(lax.map(one, (x, targets)).sum(keepdims=True), plan, divided=False)


# --- devices of their own -----------------------------------------------------------------------------------------


def _value(plan: _Plan, params: Tree, head: Tree, x: Tree, targets: Tree) -> jax.Array:
    """Without gradients there are forward steps alone."""
    plan = replace(plan, schedule=replace(plan.schedule, order="forward"))
    return _run(plan, params, head, x, targets)[0]


def _forward(plan: _Plan, params: Tree, head: Tree, x: Tree, targets: Tree) -> tuple[jax.Array, Tree]:
    value, sums, dx = _run(plan, params, head, x, targets)
    gradients = _like(params, sums.params), _like(head, sums.head), _like(x, dx)
    return value, (gradients, jax.tree.map(lambda _: None, targets))


def _backward(plan: _Plan, kept: Tree, cotangent: Any) -> tuple[Tree, ...]:
    gradients, nothing = kept
    scaled = jax.tree.map(lambda one: one * cotangent.astype(one.dtype), gradients)
    return *scaled, nothing


_with_gradients = spmd.custom_vjp(_value, nondiff_argnums=(0,))
_with_gradients.defvjp(_forward, _backward)


class _Sums(NamedTuple):
    """What the steps of one device add up. The first dimension is that of the stages, as of all else in a tick."""

    params: list[Any]
    head: list[Any]
    value: Any


class _Left(NamedTuple):
    """What the steps of one device leave for one another, or the places for it, along a new first dimension."""

    kept: list[Any]
    delayed: list[Any]


def _run(plan: _Plan, params: Tree, head: Tree, x: Tree, targets: Tree) -> tuple[jax.Array, _Sums, list[Any]]:
    """The loss, and the gradients of params, head and x, in the ticks of the schedule."""
    ticks = Ticks.of(plan.schedule)
    here = _here(plan)[0]
    differentiated = plan.schedule.order != "forward"
    floats = _floats(x) if differentiated else []
    inputs = jax.tree.map(lambda one: _zeros(one, (1, ticks.inputs, *one.shape[2:])), x)
    cotangents = [_zeros(one, (1, ticks.cotangents, *one.shape[2:])) for one in floats]
    dx = [_zeros(one, one.shape) for one in floats]
    value = jax.eval_shape(jax.vmap(plan.part), head, _at(x, 0), _at(targets, 0))
    split = _split(plan, params, x) if plan.schedule.order == "zb-h1" else None
    sums = _Sums(_accumulators(params), _accumulators(head), _zeros(value, (1,), wide(value)))
    places = _Left([], []) if split is None else _nothing_left(split, (ticks.kept,), (ticks.delayed,))

    def tick(carry: Any, now: Any) -> tuple[Any, None]:
        inputs, cotangents, dx, sums, places = carry
        step = Tick(*lax.dynamic_index_in_dim(now, here, 0, keepdims=False))
        new, old = _at(x, step.microbatch), _at(inputs, step.input)
        given = jax.tree.map(lambda a, b: jnp.where(step.input < 0, a, b), new, old)
        own = plan, step, params, head, _at(targets, step.microbatch)
        steps = _Whole(*own) if split is None else _Cut(*own, split, places)
        branches = steps.branches(differentiated)
        out, back, sums, left = lax.switch(step.kind, branches, given, _at(cotangents, step.cotangent), sums)
        kept = _put(places.kept, left.kept, step.put_kept, 0)
        delayed = _put(places.delayed, left.delayed, step.put_delayed, 0)
        inputs = _put(inputs, passed_on(out, plan.pp), step.put_input)
        if differentiated:
            dx = _put(dx, back, step.put_x)
            if split is not None:  # of the loss, after a forward step
                cotangents = _put(cotangents, back, step.put_own)
            cotangents = _put(cotangents, passed_on(back, plan.pp, -1), step.put_cotangent)
        return (inputs, cotangents, dx, sums, _Left(kept, delayed)), None

    (_, _, dx, sums, _), _ = lax.scan(tick, (inputs, cotangents, dx, sums, places), jnp.asarray(ticks.table))
    return _complete(sums.value, plan, divided=True).astype(value.dtype), sums, dx


def _split(plan: _Plan, params: Tree, x: Tree) -> SplitStage:
    """The stage in three parts, for leaves of its parameters and of its input."""
    weights, given = plan.of_round(params, 0), _at(x, 0)
    whole = lambda tree, leaves: jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def stage(w: list[Any], leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves(plan.stages(whole(weights, w), whole(given, leaves)))

    return SplitStage.trace(stage, jax.tree.leaves(weights), jax.tree.leaves(given))


@dataclass(frozen=True, eq=False)
class _Whole:
    """What a device may do in a tick. A backward step computes the stage again.

    Each branch returns what goes to the next device, what goes to the device before it, the sums, and what is left.
    What is left goes to its place outside: a branch that returned the places would copy all of them.
    """

    plan: _Plan
    step: Any
    params: Tree
    head: Tree
    target: Tree

    def branches(self, differentiated: bool) -> list[Callable[..., Any]]:
        """The branches in the order of `_ticks`."""
        if differentiated:
            return [self.nothing, self.forward, self.backward, self.loss]
        return [self.nothing, self.forward, self.nothing, self.valued]

    @property
    def _weights(self) -> Tree:
        return self.plan.of_round(self.params, self.step.round)

    def _stage(self, floats: list[Any], given: list[Any], x: Tree) -> Tree:
        return self.plan.stages(_like(self._weights, floats, keep=True), _like(x, given, keep=True))

    def _left(self) -> _Left:
        return _Left([], [])

    def nothing(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        return _none_of(x), _none_of(cotangent), sums, self._left()

    def forward(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        return self._stage(_floats(self._weights), _floats(x), x), _none_of(cotangent), sums, self._left()

    def backward(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        run = lambda floats, given: _floats(self._stage(floats, given, x))
        dw, back = jax.vjp(run, _floats(self._weights), _floats(x))[1](cotangent)
        return _none_of(x), back, self._with_weights(sums, dw), self._left()

    def _part(self, floats: list[Any], given: list[Any], of_head: list[Any], x: Tree) -> Any:
        y = self._stage(floats, given, x)
        return jax.vmap(self.plan.part)(_like(self.head, of_head, keep=True), y, self.target)

    def valued(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        value = self._part(_floats(self._weights), _floats(x), _floats(self.head), x)
        return _none_of(x), _none_of(cotangent), sums._replace(value=_sum(sums.value, value)), self._left()

    def loss(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        run = lambda floats, given, of_head: self._part(floats, given, of_head, x)
        value, pull = jax.vjp(run, _floats(self._weights), _floats(x), _floats(self.head))
        dw, back, dh = pull(_typed(jnp.ones_like(value), value))
        return _none_of(x), back, self._with_loss(self._with_weights(sums, dw), value, dh), self._left()

    def _with_weights(self, sums: _Sums, dw: list[Any]) -> _Sums:
        return sums._replace(params=self.plan.added(sums.params, dw, self.step.round))

    def _with_loss(self, sums: _Sums, value: Any, dh: list[Any]) -> _Sums:
        added = [_sum(total, one) for total, one in zip(sums.head, dh, strict=True)]
        return sums._replace(head=added, value=_sum(sums.value, value))


@dataclass(frozen=True, eq=False)
class _Cut(_Whole):
    """The same with a backward step in two. A forward step leaves what they need, and the last one has the loss."""

    split: SplitStage
    places: _Left

    def branches(self, differentiated: bool) -> list[Callable[..., Any]]:
        return [self.nothing, self.forward, self.backward, self.loss, self.of_weights]

    def _left(self) -> _Left:
        return _nothing_left(self.split)

    def forward(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        y, kept = self.split.forward(jax.tree.leaves(self._weights), jax.tree.leaves(x))
        whole = jax.tree.unflatten(jax.tree.structure(x), y)
        return whole, _none_of(cotangent), sums, self._left()._replace(kept=kept)

    def loss(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        y, _, _, left = self.forward(x, cotangent, sums)

        def part(given: list[Any], of_head: list[Any]) -> Any:
            head = _like(self.head, of_head, keep=True)
            return jax.vmap(self.plan.part)(head, _like(y, given, keep=True), self.target)

        value, pull = jax.vjp(part, _floats(y), _floats(self.head))
        back, dh = pull(_typed(jnp.ones_like(value), value))
        return _none_of(x), back, self._with_loss(sums, value, dh), left

    def backward(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        kept = _at(self.places.kept, self.step.kept, 0)
        back, delayed = self.split.of_input(jax.tree.leaves(self._weights), kept, cotangent)
        return _none_of(x), back, sums, self._left()._replace(delayed=delayed)

    def of_weights(self, x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        kept, delayed = _at(self.places.kept, self.step.kept, 0), _at(self.places.delayed, self.step.delayed, 0)
        dw = self.split.of_weights(jax.tree.leaves(self._weights), kept, delayed)
        return _none_of(x), _none_of(cotangent), self._with_weights(sums, dw), self._left()


def _nothing_left(split: SplitStage, kept: tuple[int, ...] = (), delayed: tuple[int, ...] = ()) -> _Left:
    """Zeros for what the steps leave, or for so many places."""
    frame = current_frame("pipeline_loss")
    zero = lambda one, places: _compat.pvary(
        jnp.zeros((*places, *one.shape), one.dtype), frame.in_mesh_order(_compat.varying_type(one))
    )
    return _Left([zero(one, kept) for one in split.kept], [zero(one, delayed) for one in split.crossing])


# --- trees and types ----------------------------------------------------------------------------------------------


def _floats(tree: Tree) -> list[Any]:
    """The leaves that have a gradient."""
    return [one for one in jax.tree.leaves(tree) if differentiable(one)]


def _like(tree: Tree, floats: list[Any], *, keep: bool = False) -> Tree:
    """A tree with these as the leaves that have a gradient. The others are None, or stay if `keep`."""
    those = iter(floats)
    new = lambda one: next(those).astype(one.dtype) if differentiable(one) else one if keep else None
    return jax.tree.map(new, tree)


def _at(tree: Tree, i: Any, dim: int = 1) -> Tree:
    """Element i of each leaf along a dimension; the first for -1."""
    return jax.tree.map(lambda one: lax.dynamic_index_in_dim(one, jnp.maximum(i, 0), dim, keepdims=False), tree)


def _put(places: Tree, new: Tree, at: Any, dim: int = 1) -> Tree:
    """The same places with something new in one of them, or in none for -1."""

    def leaf(old: Any, one: Any) -> Any:
        one = jnp.where(at < 0, _at(old, at, dim), one)
        return lax.dynamic_update_index_in_dim(old, one, jnp.maximum(at, 0), dim)

    return jax.tree.map(leaf, places, new)


def _accumulators(tree: Tree) -> list[Any]:
    return [_zeros(one, one.shape, wide(one)) for one in _floats(tree)]


def _sum(total: Any, one: Any) -> Any:
    return total + one.astype(total.dtype)


def _zeros(like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    return _typed(jnp.zeros(shape, dtype or like.dtype), like)


def _none_of(tree: Tree) -> Tree:
    return jax.tree.map(lambda one: _zeros(one, one.shape), tree)


def _typed(x: Any, like: Any) -> Any:
    """An array that is equal everywhere, as JAX types another one."""
    return _compat.pvary(x, current_frame("pipeline_loss").in_mesh_order(_compat.varying_axes(like)))


# --- the strings --------------------------------------------------------------------------------------------------


@scope(mapping=None)
def _here(plan: _Plan) -> Any:
    return iota("p/pp", p=plan.schedule.stages, pp=plan.pp)


@scope(mapping=None)
def _on_stages(tree: Tree, plan: _Plan) -> Tree:
    """Copies for all stages, whose gradients are summed over pp once."""
    return jax.tree.map(lambda one: repeat(one, "... -> p/pp ...", p=plan.schedule.stages, pp=plan.pp), tree)


def _complete(value: Any, plan: _Plan, *, divided: bool) -> jax.Array:
    """The sum of all devices' parts, `"p/pp"` if divided, none of which JAX may type as equal on an axis of `data`."""
    frame = current_frame("pipeline_loss")
    over = set(frame.renamed(plan.data))
    found = _compat.varying_axes(value) - set(frame.renamed(plan.pp))
    wrong = {axis for axis in found ^ over if frame.axis_size(axis) > 1}
    if frame.explicit and wrong:
        rule = "loss returns this device's part of a sum over the axes of data, complete on all others."
        got = [
            f"the loss: {typeof(value)}",
            f"data={plan.data}",
            f"they differ on {', '.join(frame.in_mesh_order(wrong))}",
        ]
        advice = 'reduce(x, "<layout> -> {U:dp}") in the loss, and data="dp"'
        raise ReplicationError(rule, call=_CALL, got=got, advice=advice)
    return _total(value, plan, divided)


@scope(mapping=None)
def _total(value: Any, plan: _Plan, divided: bool) -> jax.Array:
    names: dict[str, Any] = {"pp": plan.pp} if divided else {}
    dim = "p/pp" if divided else "p"
    if plan.data:
        value = spmd.psum(value, f"{dim} {{U:{','.join(plan.data)}}} -> {dim}", **names)
    return spmd.reduce(value, f"{dim} -> scalar", **names)
