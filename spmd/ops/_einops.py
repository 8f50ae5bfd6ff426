"""Einops on shards: `rearrange` and `repeat` never communicate, and the string of `einsum` says what it sends."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from spmd import _compat
from spmd._trees.arguments import explained
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.comm._lax import once
from spmd.comm._marks import mark, rearranged
from spmd.errors import Fix, LayoutError, did_you_mean, if_possible
from spmd.language import Atom, Layout, verb_of
from spmd.ops._reduce import Landing, factors_by_name, finish, land, placed, plain_dims, right_names, with_axes

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
    return _moved("rearrange", x, pattern, names, 'rearrange(x, "b/dp d -> d b/dp")')


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
    return _moved("repeat", x, pattern, names, 'repeat(x, "b/dp d -> b/dp d e", e=2)')


# --- what both do -------------------------------------------------------------------------------------------


def _moved(who: str, x: Any, pattern: str, names: dict[str, Any], example: str) -> jax.Array:
    """The array with its factors where the right side has them, repeated along those that it does not have."""
    call = open_call(who, pattern, names, arrays=(x,), example=example, also={})
    operand, have = _open(call, x)
    _check_names(call, operand, have)
    _check_axes(call, operand, have)
    target = _targets(call, operand, have)
    named = lambda factors: [[f.name] if f.name in have and f.name != "1" else [] for f in factors]
    local = rearranged(operand.x, named(operand.factors), named(target))
    out = jnp.broadcast_to(local, tuple(f.local for f in target))
    new = [axis for f in target if f.name not in have for axis in f.axes]
    if call.frame.explicit:
        out = _compat.pvary(out, call.frame.in_mesh_order(new))
    # The blocks of a divided new dimension are equal. In a composite one nothing shows that they are copies.
    return call.result(out, role="result" if not new else "created" if _closes(call.dst) else "copies")


def _closes(layout: Layout) -> bool:
    """Return whether a composite dimension is divided."""
    return any(dim.composite and dim.axes for dim in layout.dims)


def _open(call: Call, x: Any) -> tuple[Operand, dict[str, Factor]]:
    src, dst = call.src, call.dst
    plain_dims(call, src, dst, literals=True)
    if src.has_ellipsis and not dst.has_ellipsis:
        call.fail(f"{call.name} keeps the dimensions of '...': write ... on the right too.")
    if (src.unreduced, src.reduced) != (dst.unreduced, dst.reduced):
        verb = "psum" if set(src.unreduced) - set(dst.unreduced) else "defer" if dst.reduced else "relayout"
        rule = f"{call.name} keeps the marks, which are those of the left side; that is a {verb}."
        marked = Layout.from_dims(src.dims, unreduced=dst.unreduced, reduced=dst.reduced)
        call.refuse(rule, fix=call.around(call.first(verb, src, marked), marked, dst))
    if call.frame.explicit and _closes(dst):  # copies may be blocks of a divided dimension, which only shows here
        x = mark(x, src, call.text, role="operand", frame=call.frame)
    operand = call.operand(x)
    names = [name for name in operand.names if name != "1"]
    if twice := [name for name in names if names.count(name) > 1]:
        call.fail(f"{twice[0]} stands for two dimensions on the left: name them.")
    return operand, factors_by_name(operand)


def _check_names(call: Call, operand: Operand, have: Mapping[str, Factor]) -> None:
    """All names of the left side are on the right, and in `rearrange` no others."""
    right = {"1", *[atom.name for atom in call.dst.atoms]}
    if gone := [f for f in operand.factors if f.name not in right and not f.name.startswith("...")]:
        sums = call.paste(operand.layout, call.dst, name="reduce")
        rule = f"{call.name} keeps every dimension, and {gone[0].name} is on the left only."
        advice = f"{sums}, where its sum is meant" if call.name == "rearrange" else None
        call.fail(rule, at=gone[0].span, advice=advice)
    new = [atom for atom in call.dst.atoms if atom.name not in have and atom.name != "1"]
    if new and call.name == "rearrange":
        name = new[0].name
        hint = did_you_mean(name, [n for n in have if not n.startswith("...")])
        rule = f"{name} is on the right only, and rearrange makes no new dimensions{hint or '.'}"
        advice = "repeat makes new dimensions" if new[0].named else f"repeat makes a dimension of {name}"
        call.fail(rule, at=new[0].span, advice=advice)


@if_possible
def _divided(text: str) -> Layout:
    """The layout of a text, where it is one: a factor behind a whole one is not divided."""
    return Layout(text)


def _check_axes(call: Call, operand: Operand, have: Mapping[str, Factor]) -> None:
    """Every name keeps its axes; a change is another verb's."""
    changes: dict[str, tuple[Axes, Axes]] = {}
    first: Atom | None = None
    for atom in call.dst.atoms:
        factor = have.get(atom.name)
        if factor is None or factor.axes == (atom.axes or ()):
            continue
        first = first or atom
        changes[atom.name] = (factor.axes, atom.axes or ())
    if first is None:
        return
    verb = verb_of(changes.values())
    one, two = changes[first.name]
    moved = _divided(with_axes(operand.layout, {name: axes for name, (_, axes) in changes.items()}))
    before, short = (None, None) if moved is None else (call.way(call.src, moved), call.no_room(call.src, moved))
    call.refuse(
        f"{call.name} never communicates: {placed(first.name, one)} on the left is {placed(first.name, two)} on "
        f"the right. That is {verb}.",
        at=first.span,
        got=[*([short] if short else []), call.frame.describe()],
        fix=None if moved is None or before is None else call.around(before, moved, call.dst),
    )


def _targets(call: Call, operand: Operand, have: Mapping[str, Factor]) -> list[Factor]:
    """The factors of the right side, one per axis of the result before its composites are closed."""
    target: list[Factor] = []
    for dim in call.dst.dims:
        if dim.ellipsis:
            target += [f for f in operand.factors if f.name.startswith("...")]
        for atom in dim.atoms:
            target.append(have[atom.name] if atom.name in have else call.factor(atom))
    return target


# --- `einsum`: products and sums. The string says what becomes of the partial sums -----------------------------------


@explained
def einsum(*operands: Any, preferred_element_type: Any = None, precision: Any = None, **names: Any) -> jax.Array:
    """Multiply arrays and sum over the dimensions that the right side leaves out.

    `einsum(x, w, "b/dp s d, d f/tp -> b/dp s f/tp")`. A dimension in several operands has one placement. If a summed
    dimension is divided, it leaves a partial sum on its axes. The right side says what becomes of the partial sum:

    - if the axis is absent, the parts are added up (`"b f/tp, f/tp d -> b d"`);
    - if it is an extra, minor-most axis of an output dimension, they are added up and scattered (`"... -> b/tp d"`);
    - if it is in the mark, they are left as a partial sum (`"... -> b d {U:tp}"`).

    It never gathers and never slices. Write those as lines of their own.

    Communication: forward, for a local product of S bytes over n devices, either nothing, a psum (2S(n-1)/n bytes) or
    a psum_scatter (S(n-1)/n bytes). With several axes the scatter comes first. Backward a scatter costs an all-gather
    and a psum costs nothing. The gradient of an operand that is equal by JAX's own type, where the others are divided,
    costs a psum.

    Args:
      *operands: The arrays, one for each layout on the left side, then the pattern `"layout, layout -> layout"`. A
        composite dimension `(h k)/tp` is opened on the left and closed on the right.
      preferred_element_type: The dtype to accumulate in and to return, as in `jnp.einsum`. The psum has it too.
      precision: As in `jnp.einsum`.
      **names: Sizes (`h=4`) or mesh axes (`tp="model"`, `tp=None` for no division) of names in the pattern.

    Returns:
      The array of the right side.

    Raises:
      CommunicationError: If a dimension has two placements, an axis has two dimensions, or the right side asks
        for a gather, a slice or a relayout.
      LayoutError: On a malformed pattern, or a name on the right that is not on the left.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> @spmd.kernel("b f/tp, f/tp d -> b d", mesh=mesh)
      ... def down(h, w):
      ...     return spmd.einsum(h, w, "b f/tp, f/tp d -> b d")
      >>> print(down(jnp.ones((2, 8)), jnp.ones((8, 3))))
      [[8. 8. 8.]
       [8. 8. 8.]]
    """
    if not operands:
        raise LayoutError('einsum takes arrays, then the pattern: einsum(x, w, "b d, d f -> b f").')
    *arrays, pattern = operands
    call = open_call(
        "einsum",
        pattern,
        names,
        arrays=arrays,
        inputs=None,
        example='einsum(x, y, "b/dp d, d f -> b/dp f")',
        also={} if preferred_element_type is None and precision is None else None,
    )
    plain_dims(call, *call.pattern.layouts)
    _check_dots(call, arrays)
    opened = [call.operand(x, i) for i, x in enumerate(arrays)]
    have = factors_that_agree(call, opened)
    owners = owner_of_axes(call, have, call.dst.names)
    right = right_names(call, have)
    partial = marked_axes(call, opened, owners)
    partial |= {
        axis: f"{placed(n, f.axes)} is summed over" for n, f in have.items() if n not in right for axis in f.axes
    }
    landing = land(call, have, partial, right)
    with call.scope():
        out = _product(
            *(o.x for o in opened),
            subscripts=_subscripts(call, opened, right),
            dtype=preferred_element_type,
            precision=precision,
            landing=landing,
        )
    return call.result(out)


@once("subscripts", "dtype", "precision", "landing")
def _product(*arrays: Any, subscripts: str, dtype: Any, precision: Any, landing: Landing) -> Any:
    """The product of blocks, and what becomes of its partial sums."""
    out = jnp.einsum(subscripts, *arrays, preferred_element_type=dtype, precision=precision)
    return finish(out, landing)


def factors_that_agree(call: Call, opened: Sequence[Operand]) -> dict[str, Factor]:
    """The factors by name. Each has one placement in all operands."""
    have: dict[str, Factor] = {}
    first: dict[str, int] = {}
    for i, operand in enumerate(opened):
        for factor in operand.factors:
            known = have.setdefault(factor.name, factor)
            at = first.setdefault(factor.name, i)
            if known.axes == factor.axes:
                continue
            one, two = placed(factor.name, known.axes), placed(factor.name, factor.axes)
            call.refuse(
                f"a dimension has the same slashes in all operands, and {factor.name} is {one} in operand {at} and "
                f"{two} in operand {i}.",
                at=factor.span,
                got=[f'operand {n}: "{opened[n].layout.short}"' for n in (at, i)],
                **_agree(call, opened, factor.name, (at, i)),
            )
    return have


def _agree(call: Call, opened: Sequence[Operand], name: str, pair: tuple[int, int]) -> dict[str, Any]:
    """The fix that places a dimension of one operand as the other has it, if the right side allows that."""
    first, second = (opened[n].factors[opened[n].names.index(name)].axes for n in pair)
    right = next((atom.axes or () for atom in call.dst.atoms if atom.name == name), None)
    sides = (pair[0], first, second), (pair[1], second, first)
    # Cutting a whole dimension into blocks costs nothing, so that comes before a gather. The right side says whether
    # they are summed.
    for cuts in (True, False):
        for index, have, wanted in sides:
            few, many, used = (have, wanted, opened[index].layout) if cuts else (wanted, have, call.dst)
            fits = many[: len(few)] == few and not {*many[len(few) :]} & {*used.axis_names}
            if right in (None, wanted) and fits:
                return {"fix": _placed_as(call, opened, name, index, wanted)}
    return {"advice": f"relayout one of them: {placed(name, first)} and {placed(name, second)} are to be the same"}


def _placed_as(call: Call, opened: Sequence[Operand], name: str, index: int, wanted: tuple[str, ...]) -> Any:
    layout = opened[index].layout
    dims = [
        replace(dim, atoms=tuple(replace(a, axes=wanted) if a.name == name else a for a in dim.atoms))
        for dim in layout.dims
    ]
    moved = Layout.from_dims(dims, layout.unreduced, layout.reduced)
    plain, there = layout.without_brackets(), moved.without_brackets()
    first = call.way(plain, there, index=index)
    inputs = ", ".join((moved if i == index else one.layout).short for i, one in enumerate(opened))
    return call.around(first, inputs, call.dst, index=index)


def _check_dots(call: Call, arrays: Sequence[Any]) -> None:
    counts = {
        i: jnp.ndim(x) - len(layout.dims) + 1
        for i, (x, layout) in enumerate(zip(arrays, call.pattern.inputs, strict=True))
        if layout.has_ellipsis
    }
    if len(set(counts.values())) > 1:
        got = [f"operand {i}: {n} dimension{'s' * (n != 1)} in ..." for i, n in counts.items()]
        call.fail("... stands for the same dimensions in every operand that has it.", got=got)


def owner_of_axes(call: Call, have: Mapping[str, Factor], kept: Sequence[str]) -> dict[str, Factor]:
    """Return which factor each mesh axis divides: one in the whole call."""
    owners: dict[str, Factor] = {}
    for factor in have.values():
        for axis in factor.axes:
            known = owners.setdefault(axis, factor)
            if known is factor:
                continue
            pair = [f"contracted {f.name}" if f.name not in kept else f.name for f in (known, factor)]
            call.refuse(
                f"axis {axis} divides both {' and '.join(sorted(pair, key=lambda p: ' ' not in p))}: a device "
                f"would hold products of unequal blocks only.",
                at=factor.span,
                got=[f"{placed(f.name, f.axes)}" for f in (known, factor)] + [call.frame.describe()],
                advice=f"gather one of them over {axis} first: all_gather",
            )
    return owners


def marked_axes(call: Call, opened: Sequence[Operand], owners: Mapping[str, Factor]) -> dict[str, str]:
    """The axes on which one operand is a partial sum already; the others must be equal there."""
    partial: dict[str, str] = {}
    for i, operand in enumerate(opened):
        for axis in operand.layout.unreduced:
            if axis in partial:
                rule = (
                    f"the product of two partial sums on {axis} is not a partial sum: psum one of the operands first."
                )
                other = next(n for n, one in enumerate(opened) if axis in one.layout.unreduced)
                small = min(other, i, key=lambda n: opened[n].x.size)
                call.refuse(rule, got=[partial[axis], f"operand {i} is {{U:{axis}}}"], fix=call.summed_first(small))
            if axis in owners:
                factor = owners[axis]
                call.refuse(
                    f"operand {i} is a partial sum on {axis}, and {axis} divides {factor.name} in another: each part "
                    f"would meet one block of {factor.name} only.",
                    at=factor.span,
                    got=[f'operand {i}: "{operand.layout.short}"', placed(factor.name, factor.axes)],
                    fix=_summed_and_gathered(call, i, factor),
                )
            partial[axis] = f"operand {i} is {{U:{axis}}}"
    return partial


@if_possible
def _summed_and_gathered(call: Call, index: int, factor: Factor) -> Any:
    """The call of an operand that a psum has completed. Where the right side has a dimension whole that is divided in
    another, a gather follows."""
    right = _divided(with_axes(call.dst, {factor.name: factor.axes})) or call.dst
    summed: Any = call.summed_first(index, right)
    return summed if right == call.dst else Fix("all_gather", (summed,), f"{right.short} -> {call.dst.short}")


def _subscripts(call: Call, opened: Sequence[Operand], right: Sequence[str]) -> str:
    names = dict.fromkeys([name for operand in opened for name in operand.names])
    if len(names) > len(string.ascii_letters):
        call.fail(f"einsum takes up to {len(string.ascii_letters)} dimensions in all.")
    letters = dict(zip(names, string.ascii_letters, strict=False))
    *left, out = ["".join(map(letters.__getitem__, one)) for one in [*(operand.names for operand in opened), right]]
    return f"{','.join(left)}->{out}"
