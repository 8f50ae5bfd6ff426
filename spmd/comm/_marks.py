"""How a value's layout is remembered: a note in the jaxpr, a constraint in auto mode, a tag on the tracer."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import einops
import jax
import jax.extend.source_info_util as source_info_util
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._jaxprs.facts import LayoutName, one_line
from spmd.language import Layout, axes_tuple
from spmd.modes import Frame, try_frame

layout_p = _compat.identity_primitive("spmd_layout")
assert_equal_p = _compat.identity_primitive("spmd_assert_equal")
order_p = _compat.identity_primitive("spmd_order")
names_p = _compat.identity_primitive("spmd_names")
kept_p = _compat.identity_primitive("spmd_kept", lasting=True)


def _retraced(cotangent: Any, *, what: str, role: str) -> Any:
    return fused_p.bind(cotangent, what=what, role=_BACK[role])


# Operands enter what is meant to be one kernel, and results leave it. Backward their cotangents leave and enter it.
_BACK = {"enter": "leave back", "leave": "enter back", "leave back": "enter", "enter back": "leave"}
fused_p = _compat.linear_primitive(
    "spmd_fused",
    abstract=lambda aval, **_: aval,
    run=lambda x, **_: x,
    transpose=_retraced,
)


class Known(NamedTuple):
    """What is remembered of a value: its layout, the call that said so, its name if it is a kernel's argument, and the
    line, as an equation has it."""

    layout: Layout
    origin: str
    name: str | None
    source_info: Any


_tags: dict[int, tuple[weakref.ref[Any], Known]] = {}


def tag(x: Any, layout: Layout, origin: str, name: str | None = None) -> Any:
    """Remember the layout of a value that `spmd` itself made. It is forgotten with the value."""
    key, known = id(x), Known(layout, origin, name, source_info_util.current())
    with contextlib.suppress(TypeError):  # a NumPy scalar or a Python number takes no weak reference
        _tags[key] = weakref.ref(x, lambda _: _tags.pop(key, None)), known
    return x


def known_as(old: Any, new: Any) -> Any:
    """Copy what is known of `old` to `new`, and return `new`."""
    known = tag_of(old)
    return new if known is None else tag(new, known.layout, known.origin, known.name)


def tag_of(x: Any) -> Known | None:
    """The layout that `spmd` gave this very value, and where. None for a value that other JAX code made.

    Under `grad` the value is the one that the tracer holds, if the tracer itself is unknown: so a kernel's argument is
    known in the function that is differentiated.
    """
    while x is not None:
        entry = _tags.get(id(x))
        if entry is not None and entry[0]() is x:
            return entry[1]
        x = _compat.primal(x)
    return None


def mark(
    x: Any,
    layout: Layout,
    text: str,
    *,
    role: str,
    frame: Frame,
    gone: tuple[str, ...] = (),
    name: str | None = None,
    due: bool = False,
) -> Any:
    """Leave a layout on a value: a note for the checks, a constraint in auto mode, a tag.

    No note is left if the operation's own collectives say as much. It is needed if a partial sum is left, if equal
    values are legal along a divided dimension, and if a verb moved nothing, because the result then needs a tag of its
    own. On whole arrays it is always left, because under `vmap` no tag is seen.

    Args:
      x: The value.
      layout: Its layout.
      text: The call, for messages.
      role: What the value is to the call: "argument", "result", "output" and so on.
      frame: The frame of the call.
      gone: Mesh axes that the operation took away. If the layout leaves out dimensions, it alone does not say so.
      name: What messages call the value, if it is an argument or a result of a kernel.
      due: Whether a note is needed in any case.
    """
    x = named(x, layout, text, role=role, frame=frame, name=name)
    if frame.mode == "auto" and (frame.constrain == "all" or role in ("argument", "output")):
        with jax.named_scope(LayoutName(one_line(text), layout)):  # what the compiler sends for it has no other name
            x = constrain(x, layout, frame)
    due = due or not frame.explicit or role != "result" or bool(layout.unreduced)
    if due or tag_of(x) is not None:
        said = {**({"gone": gone} if gone else {}), **({"value": name} if name else {})}
        x = layout_p.bind(x, layout=layout, call=text, role=role, **said)
    return tag(x, layout, text, name if role == "argument" else None)


def named(x: Any, layout: Layout, text: str, *, role: str, frame: Frame, name: str | None = None) -> Any:
    """Leave on a value what a string calls its dimensions, if some names have one size: a note for the checks.

    Where sizes differ, they tell what a dimension is. The checks follow names from the signature on, and a result
    needs no note, unless it has names that no operand has.

    Args:
      x: The value.
      layout: Its layout.
      text: The call, for messages.
      role: As for `mark`, or "made": it has these names from here on.
      frame: The frame of the call.
      name: As for `mark`.
    """
    if not frame.alike or role in ("argument", "result") or frame.alike.isdisjoint(layout.names):
        return x
    known = tag_of(x)
    if known is not None and [dim.names for dim in known.layout.dims] == [dim.names for dim in layout.dims]:
        return x
    return names_p.bind(x, layout=layout, call=text, role=role, of=frame.bound, value=name, known=known)


def ordered(x: Any, placement: str, axes: str | tuple[str, ...] | None, *, anew: bool = False) -> Any:
    """Say in which order the elements lie along a dimension that `axes` divide: `ordered(tokens, "zigzag", "cp")`.

    The check after the trace follows the order, and compares it with what is said later, and with that of what the
    value is combined with. In auto and reference mode, where arrays are whole, nothing is said.

    Args:
      x: The value, or a pytree of values.
      placement: The name of the order, one of `parallel.sequence.PLACEMENTS`.
      axes: The mesh axes that divide the dimension; None where it is whole.
      anew: Whether the order is made here; else the value must have come in this order.

    Returns:
      The same values.
    """
    frame = try_frame()
    if not axes or frame is None or not frame.explicit:
        return x

    say = lambda one: order_p.bind(one, axes=axes_tuple(axes), order=placement, anew=anew)
    return jax.tree.map(lambda one: known_as(one, say(one)), x)


def constrain(x: Any, layout: Layout, frame: Frame) -> Any:
    """`with_sharding_constraint` on the frame's mesh. What a spec cannot say stays unconstrained.

    A concrete mesh tells the compiler the devices, which arguments that live nowhere yet do not tell. If some of its
    axes are Explicit, the body runs in `auto_axes`, and only the mesh being traced has these axes as Auto. Where the
    kernel leaves axes to the compiler, a whole dimension is whole along the others, which no spec can say.
    """
    mesh: Any = frame.mesh
    if not isinstance(mesh, Mesh) or any(kind is not AxisType.Auto for kind in mesh.axis_types):
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    extra = x.ndim - sum(not d.ellipsis for d in layout.dims)
    entries: list[Any] = []
    for dim in layout.dims:
        if dim.ellipsis:
            entries += [P.UNCONSTRAINED] * extra
        elif dim.margin != (0, 0) or any(a.axes for a in dim.atoms[1:]):
            entries.append(P.UNCONSTRAINED)
        else:
            entries.append(dim.atoms[0].axes or (P.UNCONSTRAINED if frame.left else None))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*entries)))


def same_axes(a: Layout, b: Layout, *, marks: bool = True) -> bool | None:
    """Return whether two layouts divide each dimension alike. None if that cannot be told."""
    if a.has_ellipsis or b.has_ellipsis or len(a.dims) != len(b.dims):
        return None
    for da, db in zip(a.dims, b.dims, strict=True):
        if da.margin != db.margin:
            return None
        if da.axes != db.axes:
            return False
    return not marks or a.unreduced == b.unreduced


# --- rearranging the axes of an array on the device that has it: einops, for names that are not strings ---------------


Groups = Sequence[Sequence[Hashable]]


def rearranged(x: Any, have: Groups, want: Groups, sizes: Mapping[Hashable, int] | None = None) -> Any:
    """`einops.rearrange` where names are anything hashable, such as factors and mesh axes.

    Args:
      x: An array.
      have: For each of its axes the names that it is composed of, the major one first. No names for an axis of size 1.
      want: The same for the result, with the same names.
      sizes: The sizes of names. In each composed axis one may be unknown.
    """
    have, want = tuple(map(tuple, have)), tuple(map(tuple, want))
    pattern, known = _pattern(have, want)
    return einops.rearrange(x, pattern, **{known[name]: size for name, size in (sizes or {}).items()})


@functools.lru_cache(maxsize=4096)
def _pattern(have: tuple[Any, ...], want: tuple[Any, ...]) -> tuple[str, dict[Hashable, str]]:
    """The pattern in names of its own, because einops takes Python names without underscores at their ends."""
    fresh = {name: f"a{i}" for i, name in enumerate(name for group in have for name in group)}
    sides = (" ".join(_axis([fresh[name] for name in group]) for group in side) for side in (have, want))
    return " -> ".join(sides), fresh


def _axis(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"
