"""A pipeline that makes its gradients in its forward pass: forward and backward steps of a stage in turn (1F1B)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd
from spmd import LayoutError, ReplicationError, SizeError, _compat, axis_size, iota, repeat, scope, typeof
from spmd._leaves import not_int
from spmd.modes import current_frame
from spmd.parallel._one_f_one_b import Work, before
from spmd.parallel._parameter_moves import checked_axes
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
from spmd.parallel.schedule import PipelineSchedule, check_multiple

__all__ = ["pipeline_loss"]

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
) -> jax.Array:
    """The sum of `loss(head, y, target)` over micro-batches, y being x after all stages, by 1F1B.

    `pipeline` keeps something of all m micro-batches until the backward pass begins. Here the last stage begins the
    backward pass of a micro-batch as soon as it has its loss, and each stage takes forward and backward steps in turn
    (1F1B). A stage then keeps at most p micro-batches on p devices, whatever m is. So the gradients are made in the
    forward pass, where the loss is differentiated at all, and the backward pass multiplies them by the cotangent.

    Each tick is a forward or a backward step, as in `pipeline_schedule(p, m, v, "1f1b")`. A device takes its own branch
    of a `lax.switch`, and waits for its neighbours in each tick. A tick thus takes the time of a backward step,
    as long as some stage is in one.

    `stage` sees the parameters and micro-batch of one stage, as in `pipeline`, and computes it again in its backward
    step. `loss` sees the head, a micro-batch after the last stage, and its target, and runs on the last device only.
    Neither may use pp in its strings, nor close over values that have a gradient.

    Layouts: params, x and repeats as in `pipeline`. Each leaf of targets `"m ..."`, equal on pp. The head is any tree,
    equal on pp. `loss` returns a scalar, this device's part of a sum over the axes of `data`, and complete on all
    others.

    Communication, for micro-batches of B bytes on a device and T = 2(v m + p - 1) ticks: with gradients, two
    collective-permutes in each tick, 2TB bytes (leaves without a gradient go forward only), and a psum of the loss.
    After the last tick, a psum over pp of the gradient of x, 2mB(p-1)/p bytes, unless x is a gathered copy on pp, and
    of the head's, 2H(p-1)/p bytes for H bytes of it. If parameters are equal on axes that divide x or targets, their
    gradients are summed once, after the last tick. `stage` and `loss` communicate in their steps. Without gradients,
    the pipeline is `pipeline`, and the loss follows it.

    Memory with gradients: at most p - 1 micro-batches that are kept (with v rounds, about (v + 1) p), what one stage
    keeps for its own derivative, sums of gradients in float32 or wider, x and its gradient. `jax.checkpoint` inside
    the stage makes the second less.

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

    Returns:
      The complete sum. Reverse-mode differentiation, once.

    Raises:
      SizeError: If the number of stages of the parameters is not that of the devices, or the numbers of micro-batches
        differ, or are not a multiple of p in several rounds.
      LayoutError: If `stage` returns other shapes or dtypes than it gets, or `loss` returns no floating scalar.
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
      Training on GPU Clusters", https://arxiv.org/abs/2104.04473, section 2.2
    """
    if repeats is not None and (fault := not_int("repeats", repeats, 1, "None")):
        raise SizeError(fault, call=_CALL, advice="as in repeats=2")
    over = checked_axes(data, "data", _CALL)
    microbatches = micro_batches({"x": x, "targets": targets}, _CALL, "x and targets")
    schedule = PipelineSchedule(axis_size(pp) if pp else 1, microbatches, repeats or 1, "1f1b")
    check_stages(params, pp, schedule.stages, repeats, _CALL)
    check_multiple(schedule.stages, microbatches, schedule.repeats, _CALL)
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
    """Without gradients: backward steps are empty, but for the loss."""
    return _run(plan, params, head, x, targets, differentiated=False)[0]


def _forward(plan: _Plan, params: Tree, head: Tree, x: Tree, targets: Tree) -> tuple[jax.Array, Tree]:
    value, sums, dx = _run(plan, params, head, x, targets, differentiated=True)
    gradients = _like(params, sums.params), _like(head, sums.head), _like(x, dx)
    return value, (gradients, jax.tree.map(lambda _: None, targets))


def _backward(plan: _Plan, kept: Tree, cotangent: Any) -> tuple[Tree, ...]:
    gradients, nothing = kept
    scaled = jax.tree.map(lambda one: one * cotangent.astype(one.dtype), gradients)
    return *scaled, nothing


_with_gradients = spmd.custom_vjp(_value, nondiff_argnums=(0,))
_with_gradients.defvjp(_forward, _backward)


class _Sums(NamedTuple):
    """What all backward steps add up. The first dimension, also of all else in a tick, is that of the stages."""

    params: list[Any]
    head: list[Any]
    value: Any


def _run(
    plan: _Plan, params: Tree, head: Tree, x: Tree, targets: Tree, *, differentiated: bool
) -> tuple[jax.Array, _Sums, list[Any]]:
    """The loss, and the gradients of params, head and x, in the ticks of the schedule."""
    steps, kept, returned = _program(plan.schedule)
    here = _here(plan)[0]
    inputs = jax.tree.map(lambda one: _zeros(one, (1, kept, *one.shape[2:])), x)
    cotangents = [_zeros(one, (1, returned, *one.shape[2:])) for one in _floats(x)]
    dx = [_zeros(one, one.shape) for one in _floats(x)]
    value = jax.eval_shape(jax.vmap(plan.part), head, _at(x, 0), _at(targets, 0))
    sums = _Sums(_accumulators(params), _accumulators(head), _zeros(value, (1,), _wide(value)))

    def tick(carry: Any, now: Any) -> tuple[Any, None]:
        inputs, cotangents, dx, sums = carry
        step = _Step(*lax.dynamic_index_in_dim(now, here, 0, keepdims=False))
        new, old = _at(x, step.microbatch), _at(inputs, step.input)
        given = jax.tree.map(lambda a, b: jnp.where(step.input < 0, a, b), new, old)
        branches = _branches(plan, step.round, params, head, _at(targets, step.microbatch), differentiated)
        out, back, sums = lax.switch(step.kind, branches, given, _at(cotangents, step.cotangent), sums)
        dx = _put(dx, back, step.put_x)
        inputs = _put(inputs, passed_on(out, plan.pp), step.put_input)
        cotangents = _put(cotangents, passed_on(back, plan.pp, -1), step.put_cotangent)
        return (inputs, cotangents, dx, sums), None

    (_, _, dx, sums), _ = lax.scan(tick, (inputs, cotangents, dx, sums), jnp.asarray(steps))
    return _complete(sums.value, plan, divided=True).astype(value.dtype), sums, dx


def _branches(
    plan: _Plan, turn: Any, params: Tree, head: Tree, target: Tree, differentiated: bool
) -> list[Callable[..., Any]]:
    """Nothing, a forward step, a backward step, and a backward step that begins with the loss.

    Each returns what goes to the next device, what goes to the device before it, and the sums.
    """

    def stage(floats: list[Any], given: list[Any], x: Tree) -> Tree:
        w, x = _like(plan.of_round(params, turn), floats, keep=True), _like(x, given, keep=True)
        out = jax.vmap(plan.stage)(w, x)
        check_result(x, out, _CALL)
        return out

    def own() -> list[Any]:
        return _floats(plan.of_round(params, turn))

    def nothing(x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        return _none_of(x), _none_of(cotangent), sums

    def forward(x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        return stage(own(), _floats(x), x), _none_of(cotangent), sums

    def backward(x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        _, pull = jax.vjp(lambda floats, given: _floats(stage(floats, given, x)), own(), _floats(x))
        dw, back = pull(cotangent)
        return _none_of(x), back, sums._replace(params=plan.added(sums.params, dw, turn))

    def part(floats: list[Any], given: list[Any], of_head: list[Any], x: Tree) -> Any:
        return jax.vmap(plan.part)(_like(head, of_head, keep=True), stage(floats, given, x), target)

    def valued(x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        value = part(own(), _floats(x), _floats(head), x)
        return _none_of(x), _none_of(cotangent), sums._replace(value=_sum(sums.value, value))

    def loss(x: Tree, cotangent: list[Any], sums: _Sums) -> Any:
        value, pull = jax.vjp(lambda of, given, of_head: part(of, given, of_head, x), own(), _floats(x), _floats(head))
        dw, back, dh = pull(_typed(jnp.ones_like(value), value))
        dh = [_sum(total, one) for total, one in zip(sums.head, dh, strict=True)]
        return _none_of(x), back, _Sums(plan.added(sums.params, dw, turn), dh, _sum(sums.value, value))

    return [nothing, forward, backward, loss] if differentiated else [nothing, forward, nothing, valued]


# --- the program --------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One tick of one device. A place of -1 is none; an input without a place is a micro-batch of x."""

    kind: Any
    microbatch: Any
    round: Any
    input: Any
    cotangent: Any
    put_input: Any
    put_cotangent: Any
    put_x: Any


def _program(schedule: PipelineSchedule) -> tuple[np.ndarray, int, int]:
    """The steps `"tick stage entry"`, and how many places a device has for inputs and for cotangents."""
    stages, rounds = schedule.stages, schedule.repeats
    when = {
        (work, stage): tick
        for stage in range(stages)
        for tick in range(schedule.ticks)
        if (work := schedule.work(tick, stage)) is not None
    }
    found = [[_Step(0, 0, 0, *[-1] * 5) for _ in range(stages)] for _ in range(schedule.ticks)]
    inputs, puts, kept = _places(when, schedule, "F")
    cotangents, puts_back, returned = _places(when, schedule, "B")
    for (work, stage), tick in when.items():
        last = (stage, work.round) == (stages - 1, rounds - 1)  # its forward step is a part of its backward step
        kind = int(not last) if work.part == "F" else 2 + last
        places = inputs.get((work._replace(part="F"), stage), -1), cotangents.get((work, stage), -1)
        put_x = work.microbatch if work.part == "B" and (stage, work.round) == (0, 0) else -1
        found[tick][stage] = _Step(kind, work.microbatch, work.round, *places, -1, -1, put_x)
    for name, those in (("put_input", puts), ("put_cotangent", puts_back)):
        for (tick, stage), place in those.items():
            found[tick][stage] = found[tick][stage]._replace(**{name: place})
    return np.asarray(found, np.int32), kept, returned


def _places(
    when: dict[tuple[Work, int], int], schedule: PipelineSchedule, part: str
) -> tuple[dict[tuple[Work, int], int], dict[tuple[int, int], int], int]:
    """Where a device keeps what comes from another, from the tick in which it comes to its backward step.

    Returns:
      The place for each step, the place for each tick and stage in which something comes, and how many there are.
    """
    coming = []
    for step in when:
        source = before(*step, schedule.stages, schedule.repeats)
        if step[0].part == part and source is not None and source[0].part == part:
            coming.append((when[source], step))
    places: dict[tuple[Work, int], int] = {}
    puts: dict[tuple[int, int], int] = {}
    free: dict[int, list[int]] = {}  # for each stage and place, the tick in which it is read last
    for tick, (work, stage) in sorted(coming):
        until = free.setdefault(stage, [])
        place = next((i for i, end in enumerate(until) if end <= tick), len(until))
        until[place : place + 1] = [when[work._replace(part="B"), stage]]
        places[work, stage] = puts[tick, stage] = place
    return places, puts, max(map(len, free.values()), default=1)


# --- trees and types ----------------------------------------------------------------------------------------------


def _floats(tree: Tree) -> list[Any]:
    """The leaves that have a gradient."""
    return [one for one in jax.tree.leaves(tree) if jnp.issubdtype(one.dtype, jnp.inexact)]


def _like(tree: Tree, floats: list[Any], *, keep: bool = False) -> Tree:
    """A tree with these as the leaves that have a gradient. The others are None, or stay if `keep`."""
    those = iter(floats)
    leaves, structure = jax.tree.flatten(tree)
    found = []
    for one in leaves:
        floating = jnp.issubdtype(one.dtype, jnp.inexact)
        found.append(next(those).astype(one.dtype) if floating else one if keep else None)
    return structure.unflatten(found)


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
    return [_zeros(one, one.shape, _wide(one)) for one in _floats(tree)]


def _wide(x: Any) -> Any:
    """The dtype in which arrays like this are added up."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.float32


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
