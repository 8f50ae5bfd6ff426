"""Permutations of the blocks of a divided dimension."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import spmd.comm._lax as _lax
from spmd import _compat
from spmd._trees.leaves import not_int
from spmd.comm._call import Call, Operand, open_call
from spmd.errors import Fix, LayoutError
from spmd.language import Layout

T = TypeVar("T")


def ppermute(x: T, layout: str, /, perm: Sequence[tuple[int, int]], **names: Any) -> T:
    """Send blocks of the bracketed dimension to other places: `ppermute(x, "b [s/cp] d", [(0, 1), (1, 0)])`.

    The global meaning is a permutation of the dimension's blocks, of which each device along its axes has one. A place
    that nothing is sent to gets zeros. With several axes (`[s/a/b]`) blocks are numbered with the first axis as the
    major one.

    Communication: forward one collective-permute, at most a shard's bytes per device. Backward the reverse.

    Args:
      x: An array or a pytree of arrays of this layout.
      layout: The layout. The dimension whose blocks move is in brackets.
      perm: Pairs `(from block, to block)`. No block occurs twice on either side.
      **names: Sizes or mesh axes of names in the layout. With `cp=None` the whole is one block.

    Returns:
      The array with its blocks moved.

    Raises:
      LayoutError: If not exactly one dimension is bracketed, or a pair is out of range or repeated.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> swap = spmd.kernel("n/x -> n/x", mesh=mesh)(
      ...     lambda v: spmd.ppermute(v, "[n/x]", [(0, 3), (3, 0), (1, 1), (2, 2)]))
      >>> print(swap(jnp.arange(8)))
      [6 7 2 3 4 5 0 1]
    """
    example = 'ppermute(x, "[b/dp] d", [(0, 1), (1, 0)])'
    call = open_call("ppermute", layout, names, arrays=(x,), arrow=False, outputs=None, example=example)
    try:
        pairs = [(operator.index(i), operator.index(j)) for i, j in perm]
    except (TypeError, ValueError):
        call.fail(
            "perm is a sequence of pairs of Python ints, (from block, to block).",
            advice=f"as in {call.text.removesuffix(')')}, [(0, 1), (1, 0)])",
            error=LayoutError,
        )
    return _permute(call, x, lambda blocks: _checked(call, pairs, blocks))


def shift(x: T, layout: str, /, by: int = 1, *, wrap: bool = True, **names: Any) -> T:
    """Roll the blocks of the bracketed dimension: block i goes to place i + by.

    The global meaning is `jnp.roll` by whole blocks. With `wrap=False` the blocks that leave are dropped, and zeros
    come in.

    Communication: forward one collective-permute, a shard's bytes per device, or none if nothing moves. Backward the
    reverse.

    Args:
      x: An array or a pytree of arrays of this layout.
      layout: The layout. The dimension whose blocks move is in brackets: `"b [c/cp] l h d"`.
      by: How many places, negative for the other direction.
      wrap: Whether what leaves at one end comes in at the other.
      **names: Sizes or mesh axes of names in the layout. With `cp=None` the whole is one block.

    Returns:
      The array with its blocks moved.

    Raises:
      LayoutError: If not exactly one dimension is bracketed.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> roll = spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: spmd.shift(v, "[n/x]", 1))
      >>> print(roll(jnp.arange(8)))
      [6 7 0 1 2 3 4 5]
    """
    fault = not_int("by, the number of blocks,", by)
    also = None if fault else {"by": by}
    if also and not wrap:
        also["wrap"] = wrap
    example = 'shift(x, "[b/dp] d", 1)'
    call = open_call("shift", layout, names, arrays=(x,), arrow=False, outputs=None, example=example, also=also)
    if fault:
        call.fail(fault, error=LayoutError)

    def pairs(blocks: int) -> list[tuple[int, int]]:
        if wrap:
            return [(i, (i + by) % blocks) for i in range(blocks)]
        return [(i, i + by) for i in range(blocks) if 0 <= i + by < blocks]

    return _permute(call, x, pairs)


def _bracketed(call: Call, layout: Layout) -> Fix | None:
    """The line to paste if one dimension is divided: the call with that dimension in brackets."""
    dims = [replace(d, bracket=False) for d in layout.dims]
    divided = [i for i, d in enumerate(dims) if d.axes and len(d.atoms) == 1]
    if len(divided) != 1:
        return None
    [i] = divided
    dims[i] = replace(dims[i], bracket=True)
    return call.paste(Layout.from_dims(dims))


def _checked(call: Call, perm: list[tuple[int, int]], blocks: int) -> list[tuple[int, int]]:
    sources, targets = [i for i, _ in perm], [j for _, j in perm]
    for what, places in (("from", sources), ("to", targets)):
        outside = [i for i in places if not 0 <= i < blocks]
        if outside:
            call.fail(
                f"there are {blocks} blocks, numbered 0 to {blocks - 1}, and perm sends {what} {outside[0]}.",
                got=[call.frame.describe()],
            )
        twice = [i for i in places if places.count(i) > 1]
        if twice:
            call.fail(f"perm sends {what} block {twice[0]} twice.", got=[call.frame.describe()])
    return perm


def _permute(call: Call, x: T, pairs: Any) -> T:
    [layout] = call.pattern.inputs
    marked = [d for d in layout.dims if d.bracket]
    if len(marked) != 1:
        fix = _bracketed(call, layout)
        call.fail(
            f"{call.name} moves the blocks of one dimension: put it in brackets.",
            fix=fix,
            advice=None if fix else f'as in {call.name}(x, "[b/dp] d", ...)',
            error=LayoutError,
        )
    if len(marked[0].atoms) != 1:
        call.fail(
            f"{call.name} moves the blocks of a dimension with one name, and this one has {len(marked[0].atoms)}.",
            at=marked[0].span,
            advice="rearrange it into dimensions of their own first",
            error=LayoutError,
        )
    axes = marked[0].axes
    blocks = call.frame.axis_size(axes) if axes else 1
    perm = pairs(blocks)
    plain = layout.without_brackets()

    def leaf(value: Any) -> Any:
        own = call.fork()
        operand = own.operand(value)
        i = next(i for i, f in enumerate(operand.factors) if f.bracket)
        if all(a == b for a, b in perm) and len(perm) == blocks:
            out = operand.x
        elif not perm:
            out = jnp.zeros_like(operand.x)
        elif call.frame.explicit:
            with call.scope():
                out = _lax.ppermute(operand.x, axes, dict(call.frame.sizes), perm) if axes else operand.x
        else:
            with call.scope():
                out = _global(operand, i, blocks, perm)
        return own.result(out, plain)

    return jax.tree.map(leaf, x)


def _global(operand: Operand, i: int, blocks: int, perm: list[tuple[int, int]]) -> Any:
    """The permutation on a whole array. A roll is a primitive of its own, because compilers turn a roll into one
    permute, and the transpose that JAX would derive for it into two."""
    x = operand.x
    shape = x.shape
    cut = x.reshape(*shape[:i], blocks, shape[i] // blocks, *shape[i + 1 :])
    by = (perm[0][1] - perm[0][0]) % blocks
    source = {j: k for k, j in perm}
    if all((j - k) % blocks == by for k, j in perm):
        moved = roll_p.bind(cut, by=by, axis=i)
    else:
        moved = jnp.take(cut, jnp.array([source.get(j, 0) for j in range(blocks)]), axis=i)
    if len(perm) < blocks:
        filled = jnp.array([j in source for j in range(blocks)]).reshape((blocks,) + (1,) * (len(shape) - i))
        moved = jnp.where(filled, moved, jnp.zeros((), x.dtype))
    return moved.reshape(shape)


def _roll_batch(args: Any, dims: Any, *, by: int, axis: int) -> Any:
    [x], [batch] = args, dims
    return roll_p.bind(x, by=by, axis=axis + 1 if batch <= axis else axis), batch


roll_p = _compat.linear_primitive(
    "spmd_roll",
    abstract=lambda x, **_: x,
    run=lambda x, *, by, axis: jnp.roll(x, by, axis=axis),
    transpose=lambda cotangent, *, by, axis: roll_p.bind(cotangent, by=-by, axis=axis),
    batch=_roll_batch,
)
