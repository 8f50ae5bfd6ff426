"""JAX's own errors that come out of a kernel's body, told again with a sentence that helps.

Only `_jaxprs.errors` reads what such an error says.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd import comm, ops
from spmd._jaxprs import errors as jax_errors
from spmd._jaxprs.errors import Carry
from spmd._jaxprs.facts import layers_of
from spmd._jaxprs.lines import is_outside, line_of_error
from spmd.errors import LayoutError, MeshError, ModeError, ReplicationError, SpmdError, did_you_mean, if_possible
from spmd.kernels._signature import Signature
from spmd.language import Layout
from spmd.modes import Frame


@contextlib.contextmanager
def translated(signature: Signature, frame: Frame, held: Callable[[], Sequence[Held]]) -> Iterator[None]:
    """Turn what JAX says of unknown axes, carries and types into errors of this package. What it says of shapes gets a
    note of what the body holds, which the caller tells."""
    try:
        yield
    except SpmdError as error:
        error.fault = error.fault if error.fault.layers else replace(error.fault, layers=_layers(error))
        raise
    except (AssertionError, NameError, TypeError, ValueError, LookupError) as error:
        better = _better(error, signature, frame)
        if better is None:
            if frame.explicit and jax_errors.of_shapes(error):
                error.add_note(_shards(signature, frame, held()))
            raise
        raise better from error


_MOST = 8  # arguments that a note lists; a model has hundreds


class Held(NamedTuple):
    """What a body holds of an argument: its name, and the shape and layout of the shard."""

    path: str
    shape: tuple[int, ...]
    layout: Layout


def _shards(signature: Signature, frame: Frame, held: Sequence[Held]) -> str:
    """The shapes that a body sees are those of shards, which nobody can tell from JAX's message."""
    head = f"In the body of the kernel {signature.name}, on one device of {frame.describe()}:"
    lines = [f'{path} has shape {shape}: a shard of "{layout.short}"' for path, shape, layout in held[:_MOST]]
    more = [f"and {len(held) - _MOST} more"] if len(held) > _MOST else []
    return "\n- ".join([head, *lines, *more, *_of_two_sizes(held), *_captured(signature.fn)])


def _of_two_sizes(held: Sequence[Held]) -> list[str]:
    """The dimensions that one argument has whole and another divided."""
    first: dict[str, tuple[int, str]] = {}
    told: dict[str, str] = {}
    for path, shape, layout in held:
        for dim, size in zip(layout.dims, shape, strict=False):
            if dim.ellipsis or dim.composite or not dim.atoms[0].named:
                break  # what follows `...` is not counted out here
            name, here = dim.names[0], f'{size} in {path}, "{dim.short}"'
            known, there = first.setdefault(name, (size, here))
            if known != size:
                told.setdefault(name, f"{name} is {there}, and {here}: write it with the same slashes in both")
    return list(told.values())


def _captured(fn: Callable[..., Any]) -> list[str]:
    """The arrays that a body takes from around it: no layout divides them."""
    try:
        outside = inspect.getclosurevars(fn)
    except TypeError:  # no function of Python
        return []
    loaded = {one.argval for one in dis.get_instructions(fn) if one.opname == "LOAD_GLOBAL"}  # and no attributes
    arrays = {**{name: x for name, x in outside.globals.items() if name in loaded}, **outside.nonlocals}
    return [
        f"{name} has shape {np.shape(x)}: it is not an argument, so no layout divides it"
        for name, x in arrays.items()
        if isinstance(x, (np.ndarray, jax.Array)) and np.ndim(x)
    ][:_MOST]


def _better(error: Exception, signature: Signature, frame: Frame) -> SpmdError | None:
    fact = jax_errors.told(error)
    if fact is None:
        return None
    where = line_of_error(error)
    got = [f"at {where}"] if where else []
    shown: dict[str, Any] = {"call": signature.text, "source": signature.source}
    if fact.kind == "axis":
        unknown = (axis for axis in jax_errors.named_axes(error) if axis not in frame.axis_names)
        return _unbound(fact.axis or next(unknown, None), got, shown, frame)
    if fact.kind in ("carry", "branches") and jax_errors.made_by_library(error):
        what = {"carry": "a loop", "branches": "branches"}[fact.kind]
        rule = f"the function called here has {what} that JAX refuses where values vary along a mesh axis."
        advice = 'spmd.opaque(fn, "in -> out") around it, with the layouts of its arguments and results'
        return ReplicationError(rule, **shown, got=[*got, frame.describe()], advice=advice)
    if fact.kind == "carry":
        return _carry(fact.carries, got, shown, frame)
    if fact.kind == "branches":
        rule = "the branches give values of different types: equal on an axis in one, varying on it in another."
        fix = "spmd.cond(predicate, true_fn, false_fn, *operands)"
        return ReplicationError(rule, **shown, got=[*got, frame.describe()], fix=fix)
    if fact.kind == "mapped":
        return ReplicationError(_MAPPED, **shown, got=[*got, frame.describe()], advice=_UNNAMED)
    if fact.kind == "mixed":
        return _mixed(fact, got, shown, frame)
    if fact.kind == "placement":
        rule = "jax.device_put, reshard and with_sharding_constraint place whole arrays, and these are shards."
        advice = 'annotate(x, "b/dp d") to state a layout, relayout(x, "b/dp d -> b d/dp") to change it'
        return ModeError(rule, **shown, got=got, advice=advice)
    if fact.kind == "decision":
        rule = "Python decides by a value (if, while, and, or, bool), and it is known when the kernel runs only."
        advice = "spmd.cond(predicate, true_fn, false_fn, *operands); jnp.where(predicate, a, b) computes both"
        return ModeError(rule, **shown, got=[*got, frame.describe()], advice=advice)
    if fact.kind in _OF_VALUES:
        rule, advice = _OF_VALUES[fact.kind]
        return ModeError(rule, **shown, got=[*got, frame.describe()], advice=advice)
    if fact.kind in ("layout", "pattern"):
        rule = f"{fact.axis} takes a string after its arrays. It names their dimensions and the mesh axes."
        advice = "the layout before, and behind an arrow that after" if fact.kind == "pattern" else "the layout"
        return LayoutError(rule, **shown, got=got, advice=_example(f"{fact.axis}") or advice)
    rule = "a Pallas call in a kernel must say on which mesh axes its results vary, and this one does not."
    advice = 'spmd.opaque(fn, "in -> out") around a function that calls it, which says it for the call'
    return ModeError(rule, **shown, got=got, advice=advice)


@contextlib.contextmanager
def derived(signature: Signature, frame: Frame) -> Iterator[None]:
    """Turn what JAX says of the types of a body that it derives, after the trace, into the same error."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, SpmdError) or not jax_errors.mapped_loop(error):
            raise
        shown: dict[str, Any] = {"call": signature.text, "source": signature.source}
        raise ReplicationError(_MAPPED, **shown, got=[frame.describe()], advice=_UNNAMED) from error


_MAPPED = "jax.vmap(..., spmd_axis_name=...) gives values in this loop other types than the loop had."
_UNNAMED = (
    "jax.vmap without spmd_axis_name: the strings inside do not mention the dimension that it maps.\n"
    'A carry starts with jnp.zeros_like of a row, or with spmd.zeros("<its layout> {R:<the axes of the rows>}").\n'
    "For the gradient of each row by weights that all share, with dp for the axes of the rows: before the vmap\n"
    'w = spmd.defer(w, "<its layout> -> <its layout> {R:dp}"), and in it spmd.grad(fn, loss="{U:dp}")(w)'
)


@if_possible
def _example(verb: str) -> str | None:
    """What an operation says itself where it is given no string."""
    function = getattr(comm, verb, None) or getattr(ops, verb)
    given = [0.0 for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    try:
        function(*given[:-1])  # and no names
    except LayoutError as error:
        return error.fault.advice


_LATER = "and it is known when the kernel runs only."
_OF_VALUES: dict[str, tuple[str, str]] = {
    "numpy": (
        f"NumPy takes the value of an array (np.asarray, np.sin), {_LATER}",
        "jnp in place of np; or jax.pure_callback around what only NumPy can do",
    ),
    "number": (
        f"Python or a shape takes the value of an array (float, int, .item(), range, an index), {_LATER}",
        "leave it an array, x * y.sum(); what is known before is an argument in static=(...); jnp.nonzero takes size=",
    ),
    "selection": (
        f"the size of the result is the number of elements that a mask selects, {_LATER}",
        "jnp.where(mask, x, 0) keeps the size; jnp.nonzero(mask, size=n) gives the first n positions",
    ),
    "memory": (
        "an operation takes arrays of one memory, and some of these lie in the host's (pinned_host).",
        "jax.device_put(x, jax.memory.Space.Device) in the body brings x to the device",
    ),
}


def _mixed(fact: Any, got: list[str], shown: dict[str, Any], frame: Frame) -> SpmdError:
    """A reduction over axes of which the value varies on some only: on the others its copies would be counted."""
    varies, equal = ", ".join(fact.varying), ", ".join(fact.equal)
    rule = (
        f"a jax.lax reduction over {varies}, {equal} of a value that differs along {varies} and is equal along {equal}."
    )
    names = [f'"{axes[0]}"' if len(axes) == 1 else str(tuple(axes)) for axes in (fact.varying, fact.equal)]
    advice = (
        f"lax.psum(x, {names[0]}) sums what differs; "
        f'lax.pcast(x, {names[1]}, to="varying") before it counts the copies too'
    )
    return ReplicationError(rule, **shown, got=[*got, frame.describe()], advice=advice)


def _unbound(axis: str | None, got: list[str], shown: dict[str, Any], frame: Frame) -> SpmdError:
    """A collective of `jax.lax` over an axis that is not bound: of another mesh, or in a body on whole arrays."""
    if not frame.explicit and (axis in frame.axis_names or axis is None):
        rule = (
            f"a raw jax.lax collective needs the per-shard view, and in {frame.mode} mode the body sees whole arrays."
        )
        advice = 'an spmd operation, or spmd.local(fn, "in -> out") around the raw code'
        return ModeError(rule, **shown, got=got, advice=advice)
    name = f" {axis!r}" if axis else ""
    hint = did_you_mean(axis, frame.axis_names) if axis else ""
    rule = f"a jax.lax collective names a mesh axis{name} that this kernel's mesh does not have{hint or '.'}"
    return MeshError(rule, **shown, got=[*got, frame.describe()])


def _carry(carries: Sequence[Carry], got: list[str], shown: dict[str, Any], frame: Frame) -> SpmdError:
    rule = (
        "a loop's carry starts with a type that one step changes: it is equal on an axis "
        "where the loop makes it vary (or the reverse)."
    )
    lines = [f"{one.name}: {one.before} before the loop, {one.after} after one step" for one in carries]
    axes = ",".join(frame.in_mesh_order({axis for one in carries for axis in one.varying})) or "..."
    zeros = (
        'a carry that adds up from zero starts with spmd.zeros("<its layout>"), typed varying on exactly the axes of'
    )
    scalar = carries and all(one.is_scalar for one in carries)
    row = f', or belongs to a row under jax.vmap: spmd.zeros("{{R:{axes}}}")' if scalar else ""
    marks = f"{{U:{axes}}} where it becomes a partial sum, {{R:{axes}}} where it becomes a gathered copy{row}"
    advice = [f"{zeros} its layout, and of its mark: {marks}", f"in the step, psum over {axes} what is a term of a sum"]
    if not all(one.constant for one in carries):  # spmd.zeros, or a value that lies somewhere, has begun it
        advice.reverse()
    return ReplicationError(rule, **shown, got=[*lines, *got, frame.describe()], advice=";\n".join(advice))


def carried_axes(error: Exception) -> frozenset[str]:
    """The axes on which the carry of a loop varies after one step, and not before it; none of another error."""
    fact = jax_errors.told(error.__cause__) if isinstance(error.__cause__, Exception) else None
    return frozenset() if fact is None else frozenset().union(*(one.varying for one in fact.carries))


def hint_at(error: Exception) -> None:
    """Say what to write where JAX refuses a rule that does not know of a copy which the kernel made invarying."""
    fact = jax_errors.told(error)
    if fact is not None and fact.kind == "rule":
        error.add_note(
            "A gathered copy that leaves the kernel is typed invarying. spmd.custom_vjp knows that.\n"
            'With jax.custom_vjp say to="invarying" at the gathers of the function and of its forward rule: the\n'
            "backward rule is then given the whole cotangent, and not a part of it."
        )


def _layers(error: SpmdError) -> tuple[str, ...]:
    """The layers that an error comes from, innermost first."""
    found = layers_of(here.f_code for here, _ in traceback.walk_tb(error.__traceback__))
    own = found and (error.fault.call or "").startswith(f"{found[-1].partition('.')[2]}(")
    return tuple(reversed(found[:-1] if own else found))


def shorten(error: BaseException | None) -> None:
    """Take the frames of this package and of JAX out of the traceback of an error that leaves a kernel, and of those
    that led to it. An error that is not of this package keeps what follows the user's last line. One without a line of
    the user's may be a fault of ours, and keeps everything."""
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    while error is not None:
        frames: list[types.TracebackType] = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        outside = [is_outside(one.tb_frame.f_code.co_filename) for one in frames]
        ours = isinstance(error, SpmdError)
        last = max((i for i, one in enumerate(outside) if one), default=-1)
        if ours or last >= 0:
            kept = [f for i, f in enumerate(frames) if outside[i] or (not ours and i > last)]
            for one, after in zip(kept, [*kept[1:], None], strict=False):
                one.tb_next = after
            error.__traceback__ = kept[0] if kept else None
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
