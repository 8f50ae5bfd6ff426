"""JAX's own errors that come out of a kernel's body, told again with a sentence that helps.

Only `_jax_errors` reads what such an error says.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd import _compat, _jax_errors
from spmd._jax_errors import Carry
from spmd._notebook import shown_file
from spmd.errors import MeshError, ModeError, ReplicationError, SpmdError, did_you_mean
from spmd.kernels._signature import Signature
from spmd.modes import Frame


@contextlib.contextmanager
def translated(signature: Signature, frame: Frame, held: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Turn what JAX says of unknown axes, carries and types into errors of this package. What it says of shapes gets a
    note of what the body holds, which the caller tells line by line."""
    try:
        yield
    except SpmdError as error:
        error.fault = error.fault if error.fault.layers else replace(error.fault, layers=_layers(error))
        raise
    except (AssertionError, NameError, TypeError, ValueError, KeyError) as error:
        better = _better(error, signature, frame)
        if better is None:
            if frame.explicit and _jax_errors.of_shapes(error):
                error.add_note(_shards(signature, frame, held()))
            raise
        raise better from error


_MOST = 8  # arguments that a note lists; a model has hundreds


def _shards(signature: Signature, frame: Frame, held: Sequence[str]) -> str:
    """The shapes that a body sees are those of shards, which nobody can tell from JAX's message."""
    more = [f"and {len(held) - _MOST} more"] if len(held) > _MOST else []
    head = f"In the body of the kernel {signature.name}, on one device of {frame.describe()}:"
    return "\n- ".join([head, *held[:_MOST], *more])


def _better(error: Exception, signature: Signature, frame: Frame) -> SpmdError | None:
    fact = _jax_errors.told(error)
    if fact is None:
        return None
    where = _user_line(error)
    got = [f"at {where}"] if where else []
    shown: dict[str, Any] = {"call": signature.text, "source": signature.source}
    if fact.kind == "axis":
        unknown = (axis for axis in _jax_errors.named_axes(error) if axis not in frame.axis_names)
        return _unbound(fact.axis or next(unknown, None), got, shown, frame)
    if fact.kind == "carry":
        return _carry(fact.carries, got, shown, frame)
    if fact.kind == "branches":
        rule = "the branches give values of different types: equal on an axis in one, varying on it in another."
        fix = "spmd.cond(predicate, true_fn, false_fn, *operands)"
        return ReplicationError(rule, **shown, got=[*got, frame.describe()], fix=fix)
    if fact.kind == "placement":
        rule = "jax.device_put, reshard and with_sharding_constraint place whole arrays, and these are shards."
        advice = 'annotate(x, "b/dp d") to state a layout, relayout(x, "b/dp d -> b d/dp") to change it'
        return ModeError(rule, **shown, got=got, advice=advice)
    rule = "a Pallas call in a kernel must say on which mesh axes its results vary, and this one does not."
    kind = "manual_axis_type=jax.typeof(x).manual_axis_type"
    advice = f'spmd.opaque(fn, "in -> out"), with out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype, {kind})'
    return ModeError(rule, **shown, got=got, advice=advice)


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
    advice = (
        'start it with spmd.zeros("<its layout>"), typed varying on exactly the axes of its layout; where it becomes a '
        f'gathered copy, also on those of the mark in spmd.zeros("<its layout> {{R:{axes}}}")'
    )
    return ReplicationError(rule, **shown, got=[*lines, *got, frame.describe()], advice=advice)


def carried_axes(error: Exception) -> frozenset[str]:
    """The axes on which the carry of a loop varies after one step, and not before it; none of another error."""
    fact = _jax_errors.told(error.__cause__) if isinstance(error.__cause__, Exception) else None
    return frozenset() if fact is None else frozenset().union(*(one.varying for one in fact.carries))


def _layers(error: SpmdError) -> tuple[str, ...]:
    """The functions of `spmd.nn` and `spmd.parallel` that an error comes from, innermost first: the user called those,
    and not the verb that failed."""
    found: list[str] = []
    for here, _ in traceback.walk_tb(error.__traceback__):
        name = here.f_code.co_name
        if here.f_globals.get("__name__", "").startswith(_ROOMS):
            rooms = (room for room in _ROOMS if name in getattr(sys.modules.get(room), "__all__", ()))
            found += [f"{room.removeprefix('spmd.')}.{name}" for room in rooms]
    own = found and (error.fault.call or "").startswith(f"{found[-1].partition('.')[2]}(")
    return tuple(reversed(found[:-1] if own else found))


_ROOMS = ("spmd.nn", "spmd.parallel")
_HERE = str(Path(__file__).parents[1]) + os.sep


def _user_line(error: BaseException) -> str | None:
    """The innermost line that is neither JAX's nor ours."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        written = shown_file(entry.filename)
        if not written.startswith((_HERE, "<")) and not _compat.in_jax(entry.filename):
            return f"{written}:{entry.lineno}"
    return None
