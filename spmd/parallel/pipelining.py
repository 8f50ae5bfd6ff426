"""Pipeline parallelism: a dimension of stages, a `vmap` over it, and a shift by one stage in each step of a scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd
from spmd import axis_size, defer, iota, reduce, repeat, scope, shift, typeof
from spmd._trees.leaves import is_array, is_key, not_int
from spmd.errors import Fix, LayoutError, ReplicationError, SizeError, not_one_of
from spmd.language import Axes
from spmd.modes import current_frame
from spmd.parallel._layer import differentiable
from spmd.parallel.layouts import paths
from spmd.parallel.schedule import PipelineSchedule

Tree = Any
T = TypeVar("T")

_CALL = "pipeline(stage, params, x, ...)"


def pipeline(
    stage: Callable[[Any, Any], Any],
    params: Tree,
    x: T,
    *,
    pp: Axes,
    repeats: int | None = None,
    save: str | Callable[..., Any] = "inputs",
    result: str = "whole",
) -> T:
    """`x = stage(params[i], x)` for each stage i in turn, stages on different devices, micro-batches one after another.

    In each tick every device applies its stage to the micro-batch that it has, and passes the result on to the next
    device. All devices run one program: the stages are a dimension, `jax.vmap` maps over it, and `shift` moves along
    it, in a `lax.scan` over the ticks of `pipeline_schedule(p, m, v)`. The derivative of the scan runs backward with
    the same schedule, so all forward ticks come before all backward ticks (GPipe). With `repeats=v` each device has v
    stages, with the numbers s, p + s, 2p + s, ..., and each micro-batch goes round v times. This is the same work in v
    times as many, shorter ticks, with a bubble v times smaller.

    `stage` sees the parameters and micro-batch of one stage. Strings in it do not mention the dimension of the stages,
    and may use all other mesh axes. `stage` also runs in idle ticks, where a device with a program of its own would
    wait. It then works on real micro-batches, and the result is thrown away. This takes the time of the bubble, but
    uses energy.

    Layouts: each leaf of params `"p/pp ..."`, with repeats `"v p/pp ..."`, for p devices of pp: a stack of layers in
    order, reshaped. Each leaf of x, and of the result of `stage`, `"m ..."` for any number m of micro-batches, equal on
    pp. The result is the same. With `result="partial"` it is `"m ... {U:pp}"`: one device holds it, and it is zero on
    all others.

    Embedding and head belong outside the pipeline, with their data divided over pp as well, so that no device computes
    them twice: `all_gather(x, "m b/dp/pp s d -> m b/dp s d")` before the pipeline, and
    `psum_scatter(y, "m b/dp s d {U:pp} -> m b/dp/pp s d")` after it.

    Communication, for micro-batches of B bytes on a device and T ticks: forward, T collective-permutes, T B bytes, and
    for the result a psum over pp, 2mB(p-1)/p bytes (none with "partial"). Backward, also T permutes, and a psum of the
    gradient of x of the same size, unless x is a gathered copy (or deferred) on pp. If parameters are equal on axes
    that divide x, their gradients are summed once, after the last tick: 2W(n-1)/n bytes for W bytes of parameters.
    `stage` communicates in each tick. If it gathers weights that rest divided (FSDP), it gathers them T times, unless
    the compiler finds that they are the same in all ticks. Gathered outside, they are gathered once.

    Memory: m + 2 micro-batches on each device. For the backward pass, "inputs" keeps the input of each tick, T
    micro-batches, and computes the stage again. "activations" keeps all that JAX keeps of a stage in each tick,
    including copies and casts of weights. A policy of `jax.checkpoint`, such as
    `jax.checkpoint_policies.dots_saveable`, keeps what it says.

    Args:
      stage: `stage(params, x)` to the next x, of the same shapes and dtypes.
      params: The parameters of all stages, a tree. It may have integers.
      x: The micro-batches, a tree. It may have integers and keys of `jax.random`.
      pp: The mesh axis of the stages, several axes, or None for one device.
      repeats: The number of stages on each device; by default one, without the dimension v.
      save: "inputs", "activations" or a policy.
      result: "whole" or "partial".

    Returns:
      The micro-batches after the last stage. Reverse-mode differentiation only.

    Raises:
      SizeError: If the number of stages of the parameters is not that of the devices, or the leaves of x have different
        numbers of micro-batches.
      LayoutError: If `stage` returns other shapes or dtypes than it gets, or an option is unknown.
      ReplicationError: If JAX types all parameters equal along pp, so that all stages are one.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(pp=4)
      >>> @spmd.kernel("p/pp d f, m b d -> m b d", mesh=mesh)
      ... def stack(w, x):
      ...     def stage(w, x):
      ...         return spmd.einsum(x, w, "b d, d f -> b f")
      ...     return spmd.parallel.pipeline(stage, w, x, pp="pp")
      >>> w, x = 2 * jnp.stack([jnp.eye(3)] * 4), jnp.ones((5, 2, 3))
      >>> print(stack(w, x)[4], spmd.inspect.collectives(stack, w, x).counts)
      [[16. 16. 16.]
       [16. 16. 16.]] {'ppermute': 8, 'psum': 1}

    References:
      Huang et al., "GPipe", https://arxiv.org/abs/1811.06965; Xu et al., "GSPMD", https://arxiv.org/abs/2105.04663
      (section 3.3) for stages as a vectorized dimension; Narayanan et al., https://arxiv.org/abs/2104.04473, for
      interleaved stages
    """
    _check_options(save, result)
    schedule = PipelineSchedule(axis_size(pp) if pp else 1, micro_batches(x), repeats or 1)
    check_stages(params, pp, schedule.stages, repeats)
    stage, x, keys = without_keys(on_one_stage(stage, pp), x)
    params = deferred(params, x)
    run = _one_stage(stage, repeats, save)
    here, given, held = _start(x, pp, schedule)

    def tick(carry: Any, now: Any) -> tuple[Any, None]:
        given, held = carry
        number, put, take = now
        turn = jnp.clip((number - here) // schedule.stride, 0, schedule.repeats - 1)
        out = jax.vmap(run, in_axes=(0 if repeats is None else 1, 0, 0))(params, turn, given)
        check_result(given, out)
        # The stage before this one worked on it.
        arrived = passed_on(out, pp)
        held, fresh = _exchanged(held, arrived, put, take)
        given = jax.tree.map(lambda new, old: jnp.where(_along(here == 0, old), new, old), fresh, arrived)
        return (given, held), None

    (_, held), _ = lax.scan(tick, (given, held), _slots(schedule))
    return keys(_finished(held, here, pp, result))


def on_one_stage(fn: Callable[..., Any], pp: Axes) -> Callable[..., Any]:
    """A function that sees one stage: what differs along pp are stages, and not copies that disagree."""

    def run(*args: Any) -> Any:
        frame = current_frame("pipeline")
        with frame.replace(stages=(*frame.stages, *frame.renamed(pp))).enter():
            return fn(*args)

    return run


def without_keys(stage: Callable[..., Any], x: Tree) -> tuple[Callable[..., Any], Tree, Callable[[Tree], Tree]]:
    """Replaces keys of `jax.random` by their integers, which can be selected and summed.

    Returns the stage, which still sees keys, the micro-batches, and a function that restores the keys.
    """
    leaves, structure = jax.tree.flatten(x)
    kinds = [jax.random.key_impl(one) if is_key(one) else None for one in leaves]

    def integers(tree: Tree) -> Tree:
        return jax.tree.map(lambda one: jax.random.key_data(one) if is_key(one) else one, tree)

    def keys(tree: Tree) -> Tree:
        pairs = zip(structure.flatten_up_to(tree), kinds, strict=True)
        found = [one if kind is None else jax.random.wrap_key_data(one, impl=kind) for one, kind in pairs]
        return structure.unflatten(found)

    if not any(map(is_key, leaves)):
        return stage, x, lambda tree: tree
    return lambda params, x: integers(stage(params, keys(x))), integers(x), keys


def _slots(schedule: PipelineSchedule) -> tuple[Any, ...]:
    """For each tick: its number, where the first stage puts what comes back, and what it takes for the next tick.

    A micro-batch has one place, before its first round, between rounds and after the last one. In idle ticks the first
    stage takes a copy of the first micro-batch from a separate place, and puts what comes back into another place,
    which is never read.
    """
    ticks = np.arange(schedule.ticks, dtype=np.int32)
    begun = ticks - (schedule.stages - 1)
    put, take = (np.minimum(one % schedule.stride, schedule.microbatches) for one in (begun, ticks + 1))
    put = np.where((begun < 0) | (put == schedule.microbatches), schedule.microbatches + 1, put)
    take = np.where(ticks + 1 >= schedule.stride * schedule.repeats, schedule.microbatches, take)
    return tuple(jnp.asarray(one, jnp.int32) for one in (ticks, put, take))


def _exchanged(held: Tree, arrived: Tree, put: Any, take: Any) -> tuple[Tree, Tree]:
    """The places with what arrived put in, and what is taken out."""
    leaves, structure = jax.tree.flatten(held)
    pairs = zip(leaves, structure.flatten_up_to(arrived), strict=True)
    rule = lambda one: _exchange if differentiable(one) else _exchange_run
    found = [rule(old)(old, new, put, take) for old, new in pairs]
    return structure.unflatten([one for one, _ in found]), structure.unflatten([one for _, one in found])


def _exchange_run(held: Any, arrived: Any, put: Any, take: Any) -> tuple[Any, Any]:
    held = lax.dynamic_update_index_in_dim(held, arrived, put, 1)
    return held, lax.dynamic_index_in_dim(held, take, 1, keepdims=False)


def _exchange_backward(places: Any, cotangents: Any) -> tuple[Any, ...]:
    """The cotangent of what is taken replaces what is in its place, since the place is not read again before a put.

    The derived rule would add the cotangent to the place, and set the place to zero after use. The order of these is
    not fixed, which costs two copies of all places in each tick.
    """
    (put, take), (held, fresh) = places, cotangents
    held = lax.dynamic_update_index_in_dim(held, fresh, take, 1)
    return held, lax.dynamic_index_in_dim(held, put, 1, keepdims=False), None, None


_exchange = spmd.custom_vjp(_exchange_run)
_exchange.defvjp(lambda *given: (_exchange_run(*given), given[2:]), _exchange_backward)


def _one_stage(stage: Callable[[Any, Any], Any], repeats: int | None, save: Any) -> Callable[..., Any]:
    """`stage` with the parameters of its round, and what is kept of it for the backward pass."""

    def run(params: Tree, turn: Any, x: Tree) -> Tree:
        if repeats is not None:
            params = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, turn, 0, keepdims=False), params)
        return stage(params, x)

    if save == "activations":
        return run
    return jax.checkpoint(run, prevent_cse=False, policy=None if save == "inputs" else save)


# --- the strings ------------------------------------------------------------------------------------------------


@scope(mapping=None)
def _start(x: Tree, pp: Axes, schedule: PipelineSchedule) -> tuple[Any, Tree, Tree]:
    """The numbers of the stages, what each works on first, and the places of all micro-batches.

    All begin with micro-batch 0. Idle stages also work on real data, because a stage may divide by a value that is
    never zero in real data.
    """
    names = {"p": schedule.stages, "pp": pp}
    held = jax.tree.map(lambda one: repeat(one, "m ... -> p/pp m ...", **names), x)
    held = jax.tree.map(lambda one: jnp.concatenate([one, one[:, :1], one[:, :1]], axis=1), held)
    nothing = jax.tree.map(lambda one: jnp.zeros_like(one[:, 0]), held)
    put, take = (jnp.int32(place) for place in (schedule.microbatches + 1, 0))
    held, given = _exchanged(held, nothing, put, take)
    return iota("p/pp", **names), given, held


@scope(mapping=None)
def passed_on(x: Tree, pp: Axes, by: int = 1) -> Tree:
    """Return what lies on each device, `by` devices further on."""
    return shift(x, "[p/pp] ...", by, pp=pp)


@scope(mapping=None)
def _finished(held: Tree, here: Any, pp: Axes, result: str) -> Tree:
    """After the last tick the first stage has everything."""
    mark = " {U:pp}" if result == "partial" and pp else ""

    def leaf(one: Any) -> Any:
        own = jnp.where(_along(here == 0, one[:, :-2]), one[:, :-2], jnp.zeros((), one.dtype))
        return reduce(own, f"p/pp m ... -> m ...{mark}", pp=pp)

    return jax.tree.map(leaf, held)


@scope(mapping=None)
def deferred(params: Tree, x: Tree) -> Tree:
    """Parameters made varying where the data is, so that their gradients are summed after the loop, not in it."""
    axes = {axis for one in jax.tree.leaves(x) for axis in typeof(one).varying}

    def leaf(w: Any) -> Any:
        # those without a gradient stay equal
        missing = ",".join(sorted(axes - set(typeof(w).varying))) if differentiable(w) else ""
        return defer(w, f"... -> ... {{R:{missing}}}") if missing else w

    return jax.tree.map(leaf, params)


def _along(mask: Any, x: Any) -> Any:
    """A mask over the stages beside an array that has more dimensions."""
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


# --- arguments --------------------------------------------------------------------------------------------------


def _check_options(save: Any, result: Any) -> None:
    for name, value, known in (("save", save, ("inputs", "activations")), ("result", result, ("whole", "partial"))):
        if value not in known and not (name == "save" and callable(value)):
            rule = not_one_of(name, value, known, "a policy of jax.checkpoint" if name == "save" else "")
            raise LayoutError(rule, call=_CALL, fix=f'{name}="{known[0]}"')


def micro_batches(x: Tree, call: str = _CALL, what: str = "x") -> int:
    named = list(zip(paths(x), jax.tree.leaves(x), strict=True))
    counts = {leaf.shape[0] if is_array(leaf) and leaf.shape else 0 for _, leaf in named}
    if len(counts) != 1 or 0 in counts:
        rule = f"the first dimension of each array of {what} counts the micro-batches."
        got = [f"{path}: shape {leaf.shape}" if is_array(leaf) else f"{path}: no array" for path, leaf in named]
        raise SizeError(
            rule, call=call, got=got or ["no arrays"], advice='as in rearrange(x, "(m b) ... -> m b ...", m=8)'
        )
    return counts.pop()


@scope(mapping=None)
def check_stages(params: Tree, pp: Axes, stages: int, repeats: int | None, call: str = _CALL) -> None:
    if repeats is not None and (fault := not_int("repeats", repeats, 1, "None")):
        raise SizeError(fault, call=call, advice="as in repeats=2")
    at = 0 if repeats is None else 1
    layout = "p/pp ..." if repeats is None else "v p/pp ..."
    wrong = []
    for path, leaf in zip(paths(params), jax.tree.leaves(params), strict=True):
        if not is_array(leaf) or leaf.ndim <= at:
            wrong.append(f"{path}: not an array of rank {at + 1} or more")
        elif spmd.size(leaf, layout.replace("p/pp", "[p/pp]"), pp=pp) != stages or leaf.shape[:at] != (repeats,)[:at]:
            wrong.append(f"{path}: shape {leaf.shape} here")
    if wrong:
        rounds = "" if repeats is None else f" and {repeats} rounds"
        rule = f'parameters have the layout "{layout}", one stage on each of the {stages} devices of pp{rounds}.'
        advice = "give several layers of a stage a dimension of their own, and scan over it in the stage: "
        raise SizeError(rule, call=call, got=wrong, advice=f'{advice}"{layout.replace("...", "l ...")}"')
    _check_own(params, pp, layout, call)


def _check_own(params: Tree, pp: Axes, layout: str, call: str) -> None:
    """Check that the devices do not all have one stage, as JAX types it. No layout tells where each has one stage."""
    axes = {pp} if isinstance(pp, str) else set(pp or ())
    manual = axes.intersection(jax.sharding.get_abstract_mesh().manual_axes)
    kinds = [typeof(leaf) for leaf in jax.tree.leaves(params)]
    if manual and kinds and all(manual.isdisjoint(kind.varying) for kind in kinds):
        rule = f'parameters have the layout "{layout}", and here every device of pp has the same: all stages are one.'
        got = [f"{path}: {kind}" for path, kind in zip(paths(params), kinds, strict=True)]
        advice = (
            'divide them in the signature of the kernel, "p/pp ...", or split(w, "p ... -> p/pp ..."); '
            'jax.lax.pcast(w, pp, to="varying") if one stage for all is meant'
        )
        raise ReplicationError(rule, call=call, got=got, advice=advice)


def check_result(given: Tree, out: Tree, call: str = _CALL) -> None:
    """Check that the next stage can take what this one returns, with the same JAX types, as a loop requires."""
    before, after = ([typeof(leaf) for leaf in jax.tree.leaves(tree)] for tree in (given, out))
    kinds = [[(one.shape, one.dtype, one.varying) for one in kind] for kind in (before, after)]
    if jax.tree.structure(given) == jax.tree.structure(out) and kinds[0] == kinds[1]:
        return
    more = {axis for one in after for axis in one.varying} - {axis for one in before for axis in one.varying}
    rule = "a stage returns what it gets: the same tree, shapes, dtypes, and axes along which JAX types it as varying."
    fix = Fix("defer", pattern=f"... -> ... {{R:{','.join(sorted(more))}}}") if more else None
    got = [f"{name}: {', '.join(map(str, kind))}" for name, kind in (("it gets", before), ("it returns", after))]
    raise LayoutError(rule, call=call, got=got, fix=fix)
