"""`rearrange` and `repeat`: einops on shards. They never communicate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd import _compat
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.comm._marks import mark, rearranged
from spmd.errors import LayoutError, did_you_mean
from spmd.language import Atom, Layout, verb_of
from spmd.ops._reduce import factors_by_name, placed, plain_dims, with_axes

Axes = tuple[str, ...]


def rearrange(x: Any, pattern: str, /, **names: Any) -> jax.Array:
    """Transpose, compose and decompose dimensions. Each name keeps its mesh axes.

    `rearrange(x, "b s (h k)/tp -> b h/tp s k", k=64)`. A composite is divided on its leading factor: `(h k)/tp` means
    `(h/tp k)`. With `c=axis_size("cp")` blocks become a dimension: `"b (c l)/cp d -> b c/cp l d"`. A `1` adds or
    removes a dimension of size one.

    Communication: none, forward and backward. A pattern that would need some is an error that names the verb.

    Args:
      x: The array.
      pattern: `"layout -> layout"`, the same names on both sides.
      **names: Sizes (`h=4`) or mesh axes (`tp="model"`, `tp=None` for no division) of names in the pattern.

    Returns:
      The array in the layout of the right side.

    Raises:
      CommunicationError: If a name has other axes on the right, with the verb that does that.
      LayoutError: On a malformed pattern, or if a name is on one side only.
      SizeError: If a factor's size cannot be found, or does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("s (h k)/tp -> h/tp s k", mesh=mesh, h=4)
      ... def heads(x):
      ...     return spmd.rearrange(x, "s (h k)/tp -> h/tp s k", h=4)
      >>> heads(jnp.zeros((5, 12))).shape
      (4, 5, 3)
    """
    call = open_call("rearrange", pattern, names, arrays=(x,), example='rearrange(x, "b/dp d -> d b/dp")', also={})
    operand, have = _open(call, x)
    dst = call.pattern.outputs[0]
    missing = [f for f in operand.factors if f.name not in _names(dst, have) and not _is_one(f)]
    if missing:
        gone = missing[0]
        call.fail(
            f"rearrange keeps every dimension, and {gone.name} is on the left only.",
            at=gone.span,
            advice=f"{call.paste(operand.layout, dst, name='reduce')}, where its sum is meant",
            error=LayoutError,
        )
    _check_new(call, dst, have, known=False)
    _check_axes(call, operand, dst, have)
    return call.result(rearranged(operand.x, _axes(operand), _dims(dst, have)))


def repeat(x: Any, pattern: str, /, **names: Any) -> jax.Array:
    """Repeat an array along new dimensions: `repeat(x, "b d -> b n d", n=4)`.

    A new dimension may be divided (`n/tp`). Each device then makes its own block only. The names of x keep their mesh
    axes, as in `rearrange`.

    Communication: none forward. Backward the gradient is summed over the new dimensions. For a divided one that is a
    psum over its axes, if x is equal by JAX's own type.

    Args:
      x: The array.
      pattern: `"layout -> layout"`. The right side has all names of the left side, and new ones.
      **names: Sizes of the new names, unless the kernel's signature binds them, or mesh axes.

    Returns:
      The array in the layout of the right side.

    Raises:
      CommunicationError: If a name of x has other axes on the right, with the verb that does that.
      SizeError: If the size of a new name is not known, or does not divide.
      LayoutError: On a malformed pattern.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=2)
      >>> @spmd.kernel("d -> h/tp d", mesh=mesh, h=4)
      ... def copies(x):
      ...     return spmd.repeat(x, "d -> h/tp d", h=4)
      >>> print(copies(jnp.arange(3)))
      [[0 1 2]
       [0 1 2]
       [0 1 2]
       [0 1 2]]
    """
    call = open_call("repeat", pattern, names, arrays=(x,), example='repeat(x, "b/dp d -> b/dp d e", e=2)', also={})
    operand, have = _open(call, x)
    dst = call.pattern.outputs[0]
    kept = _names(dst, have)
    missing = [f for f in operand.factors if f.name not in kept and not _is_one(f)]
    if missing:
        rule = f"repeat keeps every dimension, and {missing[0].name} is on the left only."
        call.fail(rule, at=missing[0].span, error=LayoutError)
    _check_new(call, dst, have, known=True)
    _check_axes(call, operand, dst, have)
    target = _targets(call, operand, dst, have)
    local = rearranged(operand.x, _axes(operand), [[f.name] if f.name in kept else [] for f in target])
    out = jnp.broadcast_to(local, tuple(f.local for f in target))
    new = [axis for f in target if f.name not in kept for axis in f.axes]
    if call.frame.explicit:
        out = _compat.pvary(out, call.frame.in_mesh_order(new))
    # The blocks of a divided new dimension are equal. In a composite one nothing shows that they are copies.
    return call.result(out, role="result" if not new else "created" if _closes(dst) else "copies")


# --- what both check ----------------------------------------------------------------------------------------


def _is_one(factor: Factor) -> bool:
    return factor.name == "1"


def _closes(layout: Layout) -> bool:
    """Return whether a composite dimension is divided."""
    return any(dim.composite and dim.axes for dim in layout.dims)


def _open(call: Call, x: Any) -> tuple[Operand, dict[str, Factor]]:
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    for layout in (src, dst):
        plain_dims(call, layout, literals=True)
    if src.has_ellipsis and not dst.has_ellipsis:
        call.fail(f"{call.name} keeps the dimensions of '...': write ... on the right too.", error=LayoutError)
    if (src.unreduced, src.reduced) != (dst.unreduced, dst.reduced):
        verb = "psum" if set(src.unreduced) - set(dst.unreduced) else "defer" if dst.reduced else "relayout"
        rule = f"{call.name} keeps the marks, which are those of the left side; that is a {verb}."
        marked = _marked(src, dst)
        call.fail(rule, fix=call.around(call.first(verb, src, marked), marked, dst))
    if call.frame.explicit and _closes(dst):  # copies may be blocks of a divided dimension, which only shows here
        x = mark(x, src, call.text, role="operand", frame=call.frame)
    operand = call.operand(x)
    names = [name for name in operand.names if name != "1"]
    if twice := [name for name in names if names.count(name) > 1]:
        call.fail(f"{twice[0]} stands for two dimensions on the left: name them.", error=LayoutError)
    return operand, factors_by_name(operand)


def _marked(src: Layout, dst: Layout) -> Layout:
    return Layout.from_dims(src.dims, unreduced=dst.unreduced, reduced=dst.reduced)


def _names(dst: Layout, have: Mapping[str, Factor]) -> list[str]:
    """The factors of the right side that the left side has, in order."""
    dots = [name for name in have if name.startswith("...")]
    names: list[str] = []
    for dim in dst.dims:
        names += dots if dim.ellipsis else [n for n in dim.names if n in have and n != "1"]
    return names


def _axes(operand: Operand) -> list[list[str]]:
    """Return what each axis of an operand is, for `rearranged`."""
    return [[] if _is_one(factor) else [factor.name] for factor in operand.factors]


def _dims(dst: Layout, have: Mapping[str, Factor]) -> list[list[str]]:
    """Return what each dimension of the right side is composed of."""
    dims: list[list[str]] = []
    for dim in dst.dims:
        dots = [[name] for name in have if name.startswith("...")]
        dims += dots if dim.ellipsis else [[n for n in dim.names if n != "1"]]
    return dims


def _check_new(call: Call, dst: Layout, have: Mapping[str, Factor], *, known: bool) -> None:
    """Names on the right that the left side does not have: none in rearrange, of known size in repeat."""
    for atom in dst.atoms:
        if atom.name in have or atom.name == "1":
            continue
        if not known:
            verb = "repeat makes new dimensions" if atom.named else f"repeat makes a dimension of {atom.name}"
            hint = did_you_mean(atom.name, [n for n in have if not n.startswith("...")])
            call.fail(
                f"{atom.name} is on the right only, and rearrange makes no new dimensions{hint or '.'}",
                at=atom.span,
                advice=f"{verb}",
                error=LayoutError,
            )


def _check_axes(call: Call, operand: Operand, dst: Layout, have: Mapping[str, Factor]) -> None:
    """Every name keeps its axes; a change is another verb's."""
    changes: dict[str, tuple[Axes, Axes]] = {}
    first: Atom | None = None
    for atom in dst.atoms:
        factor = have.get(atom.name)
        if factor is None or factor.axes == (atom.axes or ()):
            continue
        first = first or atom
        changes[atom.name] = (factor.axes, atom.axes or ())
    if first is None:
        return
    verb = verb_of(changes.values())
    one, two = changes[first.name]
    moved = with_axes(operand.layout, {name: axes for name, (_, axes) in changes.items()})
    before = call.first(verb, operand.layout, moved)
    call.fail(
        f"{call.name} never communicates: {placed(first.name, one)} on the left is {placed(first.name, two)} on "
        f"the right. That is {verb}.",
        at=first.span,
        got=[call.frame.describe()],
        fix=call.around(before, moved, dst),
    )


def _targets(call: Call, operand: Operand, dst: Layout, have: Mapping[str, Factor]) -> list[Factor]:
    """The factors of the right side, one per axis of the result before its composites are closed."""
    target: list[Factor] = []
    for dim in dst.dims:
        if dim.ellipsis:
            target += [f for f in operand.factors if f.name.startswith("...")]
        for atom in dim.atoms:
            target.append(have[atom.name] if atom.name in have else call.factor(atom))
    return target
