"""`reduce`: reductions of the whole array over dimensions that may be divided."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp

from spmd import _compat
from spmd._trees.arguments import explained
from spmd.comm import _lax
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.errors import Fix, LayoutError, did_you_mean, not_one_of
from spmd.language import Atom, Layout

# --- what becomes of partial sums: the part of `einsum`, `reduce` and `take` that reads the right side ----------------
#
# An operation that works along divided dimensions leaves a part of its result on each device. The right side says what
# becomes of the parts. If the axis is absent, they are reduced. If it is an extra minor-most axis of an output
# dimension, they are reduced and scattered onto it. If it is in `{U:axis}`, they are left. Nothing else may change:
# what was whole stays whole.


@dataclass(frozen=True, slots=True)
class Landing:
    """What becomes of the partial axes: those of each `(position, axes)` are scattered, others summed, others left."""

    scatters: tuple[tuple[int, Axes], ...]
    sums: Axes
    left: Axes

    @property
    def all_axes(self) -> Axes:
        """The axes that are reduced, scattered or not."""
        return (*self.sums, *(axis for _, axes in self.scatters for axis in axes))


def placed(name: str, axes: Iterable[str]) -> str:
    """Return how a factor is written: `b/dp/fsdp`."""
    return "/".join((name, *axes))


# --- what a pattern may contain -----------------------------------------------------------------------------


def plain_dims(call: Call, *layouts: Layout, unnamed: bool = False, literals: bool = False) -> None:
    """Complain about dimensions that mean nothing to the operation: margins, `_`, literal sizes."""
    for layout in layouts:
        call.no_margins(layout)
        for atom in layout.atoms:
            if (atom.name == "_" and not unnamed) or (atom.size is not None and not literals):
                what = "an unnamed dimension" if atom.name == "_" else f"the literal size {atom.name}"
                rule = f"{call.name} follows dimensions by their names, and {what} has none: name it."
                call.fail(rule, at=atom.span)


def right_names(call: Call, have: Mapping[str, Any]) -> list[str]:
    """The factors of the right side, one per array axis, without literal 1s."""
    dst = call.dst
    if dst.reduced:
        call.fail(
            f"{{R:{','.join(dst.reduced)}}} is made by defer, not by {call.name}.",
            at=call.mark_span("{R:", last=True),
        )
    dots = [name for name in have if name.startswith("...")]
    if dots and not dst.has_ellipsis:
        rule = f"{call.name} keeps the dimensions of '...', since the pattern does not say how they are placed."
        call.fail(rule, advice="name them, or write ... on the right too")
    names: list[str] = []
    for dim in dst.dims:
        if dim.ellipsis:
            names += dots
        for atom in dim.atoms:
            if atom.size == 1:
                continue
            if atom.name not in have:
                known = [name for name in have if not name.startswith(("_", "..."))]
                hint = did_you_mean(atom.name, known)
                rule = f"{atom.name} is on the right and not on the left{hint or '.'}"
                call.fail(rule, at=atom.span, got=[f"on the left: {', '.join(known) or 'no names'}"])
            names.append(atom.name)
    return names


# --- reading the right side ---------------------------------------------------------------------------------


def land(
    call: Call, have: Mapping[str, Factor], partial: Mapping[str, str], names: Sequence[str], *, linear: bool = True
) -> Landing:
    """Read off the right side what becomes of each partial axis.

    Args:
      call: The call. Its operands are open already.
      have: The factors of the left side by name.
      partial: The axes along which the local result is a part, each with the reason, for messages.
      names: The factors of the right side, one per array axis.
      linear: Whether partial results may be left (`{U:}`), as for sums.
    """
    atoms = {atom.name: atom for atom in call.dst.atoms}
    scatters: list[tuple[int, Axes]] = []
    gone: set[str] = set()
    for position, name in enumerate(names):
        if name not in atoms:  # one of "..."
            continue
        before, after = have[name].axes, atoms[name].axes or ()
        if before == after:
            continue
        _check_step(call, atoms[name], before, after, have, partial)
        gained = after[len(before) :]
        call.local(have[name].size, after, name, atoms[name].span)
        scatters.append((position, gained))
        gone.update(gained)
    left = call.dst.unreduced
    _check_left(call, partial, linear)
    if not call.frame.explicit:  # whole arrays have no parts
        return Landing((), (), ())
    gone.update(left)
    return Landing(tuple(scatters), call.frame.in_mesh_order(set(partial) - gone), call.frame.in_mesh_order(left))


def _check_step(
    call: Call, atom: Atom, before: Axes, after: Axes, have: Mapping[str, Factor], partial: Mapping[str, str]
) -> None:
    """An output dimension may gain minor-most axes that carry partial results, and nothing else."""
    one, two = placed(atom.name, before), placed(atom.name, after)
    if after == before[: len(after)]:
        lost = "/".join(before[len(after) :])
        rule = (
            f"{call.name} never gathers: {one} on the left is {two} on the right. Gather {lost} in a line of its own."
        )
        _refuse(call, atom, rule, partial, _in_two_lines(call, {atom.name: before}, "all_gather"))
    if before != after[: len(before)]:
        rule = (
            f"{call.name} adds axes at the end of a dimension only: {one} on the left cannot become {two}. "
            "That is a relayout."
        )
        axes = {name: have[name].axes for name in call.dst.names if name in have}
        _refuse(call, atom, rule, partial, _in_two_lines(call, axes, "relayout"))
    for axis in after[len(before) :]:
        if axis in partial:
            continue
        owner = next((f for f in have.values() if axis in f.axes), None)
        verb = "split" if owner is None else "relayout"
        why = "nothing is a partial sum along it" if owner is None else f"it divides {owner.name} on the left"
        rule = f"{axis} on {two} has nothing to scatter: {why}. That is a {verb}."
        axes = {n: have[n].axes for n in (atom.name, *([] if owner is None else [owner.name]))}
        _refuse(call, atom, rule, partial, _in_two_lines(call, axes, verb))


def _refuse(call: Call, atom: Atom, rule: str, partial: Mapping[str, str], fix: Fix | None) -> NoReturn:
    call.refuse(rule, at=atom.span, got=_got(call, partial), fix=fix)


def _in_two_lines(call: Call, axes: Mapping[str, Axes], verb: str) -> Fix | None:
    """The operation without the change of layout, and the verb that then makes the change."""
    first = call.paste(", ".join(layout.short for layout in call.pattern.inputs), with_axes(call.dst, axes))
    bare = call.dst.without_brackets()
    return None if first is None else Fix(verb, (first,), f"{with_axes(bare, axes)} -> {bare.short}")


def _check_left(call: Call, partial: Mapping[str, str], linear: bool) -> None:
    for axis in call.dst.unreduced:
        at = call.mark_span("{U:", last=True)
        if not linear:
            call.refuse("only sums and means can be left partial: the parts of anything else do not add up.", at=at)
        if axis not in partial:
            call.refuse(
                f"{{U:{axis}}} on the right, and the result is not a partial sum on {axis}.",
                at=at,
                got=_got(call, partial),
                advice=f"leave {axis} out of the mark",
            )


def _got(call: Call, partial: Mapping[str, str]) -> list[str]:
    shown = [f"partial sum on {axis}: {why}" for axis, why in partial.items()]
    return [*(shown or ["no partial sum"]), call.frame.describe()]


def with_axes(layout: Layout, axes: Mapping[str, Axes]) -> str:
    """The layout's text with other axes on some names, for pasting. It is never checked."""
    parts = []
    for dim in layout.dims:
        inside = " ".join(placed(atom.name, axes.get(atom.name, atom.axes or ())) for atom in dim.atoms)
        inside = "..." if dim.ellipsis else f"({inside})" if dim.composite else inside
        parts.append(f"[{inside}]" if dim.bracket else inside)
    if layout.unreduced:
        parts.append(f"{{U:{','.join(layout.unreduced)}}}")
    return " ".join(parts) or "scalar"


# --- running it ---------------------------------------------------------------------------------------------


def finish(x: Any, landing: Landing) -> Any:
    """Scatter first, so that the sum travels in blocks. Runs in the call's `scope`."""
    for position, axes in landing.scatters:
        x = _lax.psum_scatter(x, axes, position)
    x = _lax.psum(x, landing.sums) if landing.sums else x
    # A partial sum is typed varying even if all operands were equal (zeros), because carries of loops need that.
    return _compat.pvary(x, landing.left) if landing.left else x


def factors_by_name(operand: Operand) -> dict[str, Factor]:
    """An operand's factors by name."""
    return {factor.name: factor for factor in operand.factors}


Axes = tuple[str, ...]
Dims = tuple[int, ...]

Op = Literal["sum", "mean", "max", "min", "prod", "any", "all", "logsumexp"]
LINEAR = ("sum", "mean")


@explained
def reduce(x: Any, pattern: str, /, op: Op = "sum", **names: Any) -> jax.Array:
    """Reduce the dimensions that the right side leaves out, over the whole array.

    `reduce(x, "b/dp s d -> s d", "mean")` is the mean over all of b, whatever divides it. The right side says what
    becomes of the axes of a reduced dimension, as in `einsum`. If the axis is absent, the result is complete. If it is
    an extra minor-most axis of an output dimension, each device keeps its block. With `{U:axis}`, sums and means are
    left partial. A `1` on the right keeps a dimension of size one.

    With `-> scalar` the result is equal by JAX's own type on every mesh axis that the right side does not mark. If x is
    a gathered copy, a mean over the copies makes it so. Such a scalar can leave a kernel and be a loss. Inside
    `lax.map`, `scan` or `vmap` over a divided dimension each device has rows of its own, and a scalar is that of its
    row. Where the rest of the body takes it as equal, and x is not known to be a copy, the call is an error.

    Communication: forward one psum (or pmax, pmin) of the result over the reduced axes, 2S(n-1)/n bytes for S bytes. A
    logsumexp has two, a prod has an all-gather, and a scattered sum or mean has a psum_scatter, S(n-1)/n bytes.
    Backward a psum costs nothing and a psum_scatter costs an all-gather. The gradients of max and min count their ties
    with one more psum.

    Args:
      x: The array.
      pattern: `"layout -> layout"`. A sum or mean takes `{U:axis}` on both sides.
      op: "sum", "mean" (divides by the global count), "max", "min" (ties share the gradient equally, as in `jnp.max`),
        "prod", "any", "all" or "logsumexp". If an element is NaN, so is the result. Only max and min over a divided
        dimension are then inf and -inf, because collectives drop NaN. A `jnp.max` in auto mode drops it (XLA on CPU).
      **names: Sizes (`h=4`) or mesh axes (`tp="model"`, `tp=None` for no division) of names in the pattern.

    Returns:
      The array of the right side, with the dtype that jnp gives.

    Raises:
      CommunicationError: If the right side asks for a gather, a slice or a relayout.
      LayoutError: On a malformed pattern or an unknown op.
      ReplicationError: If a mean over copies would make the result equal, and x is not known to be a copy.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=2)
      >>> @spmd.kernel("b/dp d/tp -> d/tp, scalar", mesh=mesh)
      ... def stats(x):
      ...     return spmd.reduce(x, "b/dp d/tp -> d/tp", "mean"), spmd.reduce(x, "b/dp d/tp -> scalar", "max")
      >>> mean, largest = stats(jnp.arange(8.0).reshape(4, 2))
      >>> print(mean, largest)
      [3. 4.] 7.0
    """
    if isinstance(op, str) and "->" in op and pattern in RUN:
        fix = Fix("reduce", ("x",), op, {} if pattern == "sum" else {"op": pattern})
        raise LayoutError("the pattern comes before the operation.", call="reduce(x, ...)", fix=fix)
    also = {} if op == "sum" else {"op": op} if isinstance(op, str) else None
    call = open_call("reduce", pattern, names, arrays=(x,), example='reduce(x, "b/dp d -> d", "mean")', also=also)
    if not isinstance(op, str) or op not in RUN:
        advice = _SQUARES if op in ("var", "std") else None
        call.fail(not_one_of("op", op, RUN), advice=advice)
    plain_dims(call, call.src, unnamed=True, literals=True)
    plain_dims(call, call.dst, literals=True)
    operand = call.operand(x)
    have = factors_by_name(operand)
    right = right_names(call, have)
    if op not in LINEAR:
        call.complete(f"{op} of a partial sum is not {op} of its parts: psum first.")
    partial = {axis: f"the operand is {{U:{axis}}}" for axis in call.src.unreduced}
    partial |= {a: f"{placed(n, f.axes)} is reduced" for n, f in have.items() if n not in right for a in f.axes}
    landing = land(call, have, partial, right, linear=op in LINEAR)
    if op in ("max", "min") and jnp.issubdtype(operand.x.dtype, jnp.complexfloating):
        call.fail(f"{op} needs numbers that are ordered, and the array is {operand.x.dtype}.")
    # A scalar is reduced over the axes on which the array is a gathered copy too, so that JAX types it equal.
    closes = call.frame.explicit and call.dst.is_scalar
    loose = _compat.varying_axes(operand.x) - {*landing.all_axes, *landing.left, *call.frame.stages} if closes else ()
    operand, copies = call.closing(operand, x, call.frame.in_mesh_order(loose))
    job = _Job(call, operand, right, landing, copies)
    with call.scope():
        out = RUN[op](operand.x, job)
    return call.result(out)


_SQUARES = 'two means: m = reduce(x, "...", "mean"), and that of (x - m) ** 2, where 1 stands for what is reduced'


# --- the operations -----------------------------------------------------------------------------------------


class _Job:
    """The work: the array axes to reduce, the order of the rest, and what becomes of the mesh axes."""

    def __init__(self, call: Call, operand: Operand, right: list[str], landing: Landing, copies: tuple[str, ...]):
        self.frame, self.landing = call.frame, landing
        self.dims = tuple(i for i, name in enumerate(operand.names) if name not in right)
        kept = [name for name in operand.names if name in right]
        self.order = tuple(kept.index(name) for name in right)
        count = math.prod(operand.factors[i].size for i in self.dims)
        self.divisor = count if count < 2**31 else float(count)  # an int beyond int32 is not a number for JAX
        self.axes = call.frame.in_mesh_order(landing.all_axes)
        self.copies = copies
        # whether the compiler divides what is reduced
        self.compiled = call.frame.mode == "auto" and any(operand.factors[i].axes for i in self.dims)
        self.copy_count = call.frame.axis_size(self.copies)
        self.every = (*self.axes, *self.copies)

    def place(self, x: Any) -> Any:
        """The axes of a local result in the order of the right side."""
        return x if self.order == tuple(range(len(self.order))) else x.transpose(self.order)

    def land_sum(self, x: Any) -> Any:
        """Sum over the partial axes. Copies are averaged in the same all-reduce."""
        x = self.place(x)
        if self.copies:
            if jnp.issubdtype(x.dtype, jnp.inexact):
                x = x / self.copy_count
                return _compat.pvary(_lax.psum(x, (*self.landing.sums, *self.copies)), self.landing.left)
            x = _lax.pmax(jax.lax.stop_gradient(x), self.copies)  # a mean of integers could overflow
        return finish(x, self.landing)

    def land_whole(self, x: Any) -> Any:
        """Keep this device's block of a result that every device has whole."""
        x = self.place(x)
        for position, axes in self.landing.scatters:
            for axis in axes:
                x = _lax.slice_block(x, axis, position, self.frame.axis_size(axis))
        return x


def _sum(x: Any, job: _Job) -> Any:
    return job.land_sum(jnp.sum(x, axis=job.dims))


def _mean(x: Any, job: _Job) -> Any:
    if x.dtype in (jnp.float16, jnp.bfloat16):
        # In 16 bits the sum could overflow, and it loses more bits than the mean. So divide first, as jnp.mean does.
        part = jnp.sum(x, axis=job.dims, dtype=jnp.float32) / job.divisor
        return job.land_sum(part.astype(x.dtype))
    return job.land_sum(jnp.sum(inexact(x), axis=job.dims)) / job.divisor


def inexact(x: Any) -> Any:
    """Numbers with fractions: integers and booleans become JAX's default float."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jax.eval_shape(jnp.exp, x).dtype)


def _extreme(name: str, x: Any, job: _Job) -> Any:
    local, _, most = _EXTREMES[name]
    if not job.every:
        return job.land_whole(local(_heard(x, most) if job.compiled else x, axis=job.dims))
    if x.dtype == jnp.bool_:
        return _logical("any" if name == "max" else "all", x, job)
    run = _global_extreme if jnp.issubdtype(x.dtype, jnp.inexact) else _primal_extreme
    return job.land_whole(run(x, name, job.dims, job.every))


def _primal_extreme(x: Any, name: str, dims: Dims, axes: Axes) -> Any:
    local, collective, most = _EXTREMES[name]
    return collective(_heard(jax.lax.stop_gradient(local(x, axis=dims)), most), axes)


_EXTREMES = {"max": (jnp.max, _lax.pmax, jnp.inf), "min": (jnp.min, _lax.pmin, -jnp.inf)}


def _heard(x: Any, most: float) -> Any:
    """An infinity for NaN: a compiled maximum of devices may drop NaN, and no infinity."""
    return jnp.where(jnp.isnan(x), jnp.asarray(most, x.dtype), x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


_global_extreme = jax.custom_jvp(_primal_extreme, nondiff_argnums=(1, 2, 3))


@_global_extreme.defjvp
def _extreme_jvp(name: str, dims: Dims, axes: Axes, primals: Any, tangents: Any) -> Any:
    """As for `jnp.max` of the whole array: all positions that attain the extreme share the gradient equally."""
    (x,), (tangent,) = primals, tangents
    out = _global_extreme(x, name, dims, axes)
    attains = (x == jnp.expand_dims(out, dims)).astype(x.dtype if x.dtype == jnp.float64 else jnp.float32)
    ties = _lax.psum(jnp.sum(attains, axis=dims), axes)
    share = attains / jnp.expand_dims(ties, dims)
    total = jnp.sum(tangent * share.astype(tangent.dtype), axis=dims)
    return out, _lax.psum(total, axes)


def _logical(name: str, x: Any, job: _Job) -> Any:
    local, collective = (jnp.any, _lax.pmax) if name == "any" else (jnp.all, _lax.pmin)
    out = local(x, axis=job.dims)
    if job.every:  # collectives reduce numbers
        out = collective(out.astype(jnp.int32), job.every) != 0
    return job.land_whole(out)


def _prod(x: Any, job: _Job) -> Any:
    out = jnp.prod(x, axis=job.dims)
    if job.axes:
        # Gather and multiply, because the gradient of a product needs the other factors, zeros among them.
        out = jnp.prod(_lax.all_gather(out[None], job.axes, 0, "invarying"), axis=0)
    if job.copies:
        mean = jnp.issubdtype(out.dtype, jnp.inexact)
        out = _lax.psum(out / job.copy_count, job.copies) if mean else _lax.pmax(out, job.copies)
    return job.land_whole(out)


def _logsumexp(x: Any, job: _Job) -> Any:
    x = inexact(x)
    if not job.every:
        return job.land_whole(jax.scipy.special.logsumexp(x, axis=job.dims))
    top = _lax.pmax(jax.lax.stop_gradient(jnp.max(x.real, axis=job.dims)), job.every)
    top = jnp.where(jnp.isfinite(top), top, jnp.zeros_like(top)).astype(x.dtype)
    total = _lax.psum(jnp.sum(jnp.exp(x - jnp.expand_dims(top, job.dims)), axis=job.dims) / job.copy_count, job.every)
    return job.land_whole(jnp.log(total) + top)


RUN: dict[Op, Callable[[Any, _Job], Any]] = {
    "sum": _sum,
    "mean": _mean,
    "max": functools.partial(_extreme, "max"),
    "min": functools.partial(_extreme, "min"),
    "prod": _prod,
    "any": functools.partial(_logical, "any"),
    "all": functools.partial(_logical, "all"),
    "logsumexp": _logsumexp,
}
