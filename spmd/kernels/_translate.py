"""JAX's own errors that reach a kernel's body, with the sentence that helps."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd import _compat
from spmd._notebook import shown_file
from spmd.errors import MeshError, ModeError, ReplicationError, did_you_mean
from spmd.kernels._signature import Signature
from spmd.modes import Frame

__all__ = ["translated"]


@contextlib.contextmanager
def translated(signature: Signature, frame: Frame) -> Iterator[None]:
    """Turn what JAX says of unknown axes, carries and types into errors of this package."""
    try:
        yield
    except (AssertionError, NameError, TypeError, ValueError, KeyError) as error:
        better = _better(error, signature, frame)
        if better is None:
            raise
        raise better from error


def _better(error: Exception, signature: Signature, frame: Frame) -> Exception | None:
    text = str(error)
    where = _user_line(error)
    got = [f"at {where}"] if where else []
    shown: dict[str, Any] = {"call": signature.text, "source": signature.source}
    if "manual axis types do not match" in text:
        if "carry" in text:
            return _carry(text, got, shown, frame)
        if text.startswith(("cond branches", "switch branches")):
            rule = "the branches give values of different types: equal on an axis in one, varying on it in another."
            fix = "spmd.cond(predicate, true_fn, false_fn, *operands)"
            return ReplicationError(rule, **shown, got=[*got, frame.describe()], fix=fix)
    if "should be of type `Manual`" in text:
        rule = "jax.device_put, reshard and with_sharding_constraint place whole arrays, and these are shards."
        advice = 'annotate(x, "b/dp d") to state a layout, relayout(x, "b/dp d -> b d/dp") to change it'
        return ModeError(rule, **shown, got=got, advice=advice)
    if "`manual_axis_type` on `jax.ShapeDtypeStruct` must not be" in text:
        rule = "a Pallas call in a kernel says on which mesh axes its results vary, and this one does not."
        kind = "manual_axis_type=jax.typeof(x).manual_axis_type"
        advice = f'spmd.opaque(fn, "in -> out"), with out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype, {kind})'
        return ModeError(rule, **shown, got=got, advice=advice)
    unbound = re.search(r"[Uu]nbound axis name:? ?'?(\w+)?", text)
    empty = isinstance(error, AssertionError) and not text and _in_jax(error)
    if unbound or empty:
        axis = (unbound.group(1) if unbound else None) or _named_axis(error, frame)
        if not frame.explicit and (axis in frame.axis_names or axis is None):
            rule = (
                f"a raw jax.lax collective needs the per-shard view, and in {frame.mode} mode "
                f"the body sees whole arrays."
            )
            return ModeError(
                rule,
                **shown,
                got=got,
                advice='an spmd operation, or spmd.local(fn, "in -> out") around the raw code',
            )
        name = f" {axis!r}" if axis else ""
        hint = did_you_mean(axis, frame.axis_names) if axis else ""
        rule = f"a jax.lax collective names a mesh axis{name} that this kernel's mesh does not have{hint or '.'}"
        return MeshError(rule, **shown, got=[*got, frame.describe()])
    return None


def _carry(text: str, got: list[str], shown: dict[str, Any], frame: Frame) -> ReplicationError:
    facts = re.findall(
        r"[Tt]he input carry (?:component )?(\S+) has type (\S+)\s+but[^;]*?component has type (\S+?),? so the manual",
        text,
    )
    lines = [
        f"{name}: {before.rstrip(',')} before the loop, {after.rstrip(',')} after one step"
        for name, before, after in facts
    ]
    rule = (
        "a loop's carry starts with another type than one step gives it: it is equal on an axis "
        "where the loop makes it vary (or the reverse)."
    )
    marks = [set(re.findall(r"\w+", found)) for _, _, after in facts for found in re.findall(r"V:\(?([\w,]+)", after)]
    axes = ",".join(frame.in_mesh_order(set().union(*marks))) or "..."
    advice = (
        'start it with spmd.zeros("<its layout>"), typed varying on exactly the axes of its layout; where it becomes a '
        f'gathered copy, also on those of the mark in spmd.zeros("<its layout> {{R:{axes}}}")'
    )
    return ReplicationError(rule, **shown, got=[*lines, *got, frame.describe()], advice=advice)


def _named_axis(error: BaseException, frame: Frame) -> str | None:
    """The axis that a collective was given, where JAX asserts without a word: read off its own frames."""
    for here, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _compat.in_jax(here.f_code.co_filename):
            return None
        for name in ("axis_name", "axes", "axis_names", "axis"):
            value = here.f_locals.get(name)
            for axis in value if isinstance(value, (tuple, list, set, frozenset)) else (value,):
                if isinstance(axis, str) and axis not in frame.axis_names:
                    return axis
    return None


_HERE = str(Path(__file__).parents[1]) + os.sep


def _in_jax(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _compat.in_jax(frames[-1].filename)


def _user_line(error: BaseException) -> str | None:
    """The innermost line that is neither JAX's nor ours."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        written = shown_file(entry.filename)
        if not written.startswith((_HERE, "<")) and not _compat.in_jax(entry.filename):
            return f"{written}:{entry.lineno}"
    return None
