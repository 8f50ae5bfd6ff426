"""The communicating verbs. Each is exactly one kind of collective, or an error that names the right verb."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import jax.numpy as jnp

import spmd.comm._lax as _lax
from spmd import _compat
from spmd._trees.leaves import not_int
from spmd.accelerators import Hardware
from spmd.comm._call import Call, Operand, To, open_call
from spmd.comm._marks import same_axes
from spmd.comm._planned import Prefer, axes_after, check_prefer, planned
from spmd.errors import Fix
from spmd.language import Layout, slashed, turned, verb_for, with_axes_of

T = TypeVar("T")
Axes = tuple[str, ...]
Changes = list[tuple[int, Axes, Axes]]  # the position of each factor that changes, the axes lost and those gained


# --- what changes between two layouts -----------------------------------------------------------------------


def _slashes(call: Call, src: Layout, dst: Layout) -> str | None:
    """Advice where one side has a mesh axis as a dimension."""
    rank = min(len(src.dims), len(dst.dims))
    sides = [slashed(one, call.mesh, rank) or one.short for one in (src, dst)]
    return None if sides == [src.short, dst.short] else f'a mesh axis stands behind a slash: "{" -> ".join(sides)}"'


def check_sides(call: Call) -> None:
    """Check what holds for every verb: both sides have the same dimensions, they differ, and no new partial sum
    appears."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    if [dim.names for dim in src.dims] != [dim.names for dim in dst.dims]:
        fix = None if turned(src, dst) is None else call.way(src, dst, **dict(call.also or {}))
        advice = None if fix else _slashes(call, src, dst) or "rearrange, repeat or reduce first"
        call.fail(
            f"{call.name} keeps the dimensions and their order: both sides name the same ones.",
            got=[f"left: {src.short}", f"right: {dst.short}"],
            fix=fix,
            advice=advice,
        )
    if call.written.inputs == call.written.outputs:
        rule = f"both sides of the string are the same, so {call.name} has nothing to do."
        _same_sides(call, src, rule)
    new = call.frame.in_mesh_order(set(dst.unreduced) - set(src.unreduced))
    if new:
        mark = f"{{U:{','.join(new)}}}"
        call.refuse(
            f"no verb makes a complete value a partial sum, as {mark} on the right says.",
            at=call.mark_span("{U:", last=True),
            got=[call.frame.describe()],
            advice=f'leave out {mark}; einsum and reduce leave partial sums, "b/dp d -> d {{U:dp}}"',
        )


def _same_sides(call: Call, src: Layout, rule: str) -> NoReturn:
    """Complain of two equal sides. Where the array is divided otherwise, the left one is not how it lies."""
    [known] = call.held if len(call.held) == 1 else [None]
    have = None if known is None else known.layout
    if have is None or same_axes(have, src, marks=False) is not False:
        left = ', or write on the left how the array lies, as in "d/tp -> d"' if call.name == "all_gather" else ""
        call.refuse(rule, advice=f"leave the line out{_unmarked(call, src)}{left}")
    wanted = with_axes_of(have, src)
    fix = None if wanted is None else call.way(have, Layout.from_dims(wanted))
    call.refuse(rule, got=[f'the array holds "{have.short}"'], fix=fix)


def _unmarked(call: Call, src: Layout) -> str:
    """More advice for a psum without a mark on the left: it may be the mark that is forgotten, and not the line."""
    free = [axis for axis in call.mesh if axis not in src.axis_names]
    if call.name != "psum" or src.unreduced or not free:
        return ""
    marked = Layout.from_dims(src.dims, free[-1:], src.reduced).short
    return f'; or "{marked} -> {src.short}", where the array is a partial sum over {free[-1]}'


def _check_pair(call: Call, verb: str) -> bool:
    """Return whether the call moves anything. If another verb is meant, or margins change, that is an error.

    Margins may stand where nothing moves, because blocks that overlap cannot be put side by side.
    """
    check_sides(call)
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    needed = verb_for(src, dst)
    if needed not in (verb, "nothing"):
        call.refuse(
            _why(needed, verb, src, dst),
            at=_fault(src, dst),
            got=[call.frame.describe()],
            fix=call.way(src, dst, **dict(call.also or {})),
        )
    for a, b in zip(src.dims, dst.dims, strict=True):
        if (any(a.margin) or any(b.margin)) and (a.margin, a.axes) != (b.margin, b.axes):
            rule = f"{call.name} keeps the margins of a dimension and its axes: what lies in them is copies."
            advice = "cut the margins off first; stencil.halo makes new ones"
            call.fail(rule, at=(a if any(a.margin) else b).span, advice=advice)
    return needed != "nothing"


def _why(needed: str, verb: str, src: Layout, dst: Layout) -> str:
    rules = {
        "all_gather": "an axis that only leaves a dimension is an all_gather",
        "split": "an axis that a dimension only gains, with no partial sum on the left, is a local slice: split",
        "psum": "a {U:} mark that only disappears is a psum",
        "psum_scatter": "a {U:} mark that becomes a division is a psum_scatter",
        "all_to_all": "an axis that goes from one dimension to another is an all_to_all",
        "defer": "a {R:} mark that appears is a defer",
        "relayout": "a collective adds or removes only the last axes of a dimension, and makes one kind of change",
    }
    return f'{rules[needed]}; "{src.short}" to "{dst.short}" is {needed}, not {verb}.'


def _fault(src: Layout, dst: Layout) -> tuple[int, int] | None:
    for a, b in zip(src.dims, dst.dims, strict=True):
        if [x.axes for x in a.atoms] != [x.axes for x in b.atoms]:
            return a.span
    return None


def _changes(call: Call, operand: Operand) -> Changes:
    """Return what the right side changes; every dimension divides by the axes that it gains."""
    out = []
    after = axes_after(operand, call.dst)
    for i, (factor, axes) in enumerate(zip(operand.factors, after, strict=True)):
        if factor.axes != axes:
            keep = len(axes) if factor.axes[: len(axes)] == axes else len(factor.axes)
            call.local(factor.size, (*factor.axes[:keep], *axes[keep:]), factor.name, factor.span)
            out.append((i, factor.axes[keep:], axes[keep:]))
    return out


_EXAMPLES = {
    "all_gather": 'all_gather(x, "b/dp d -> b d")',
    "psum": 'psum(x, "b d {U:dp} -> b d")',
    "psum_scatter": 'psum_scatter(x, "b d {U:dp} -> b/dp d")',
    "all_to_all": 'all_to_all(x, "b/dp d -> b d/dp")',
    "split": 'split(x, "b d -> b/dp d")',
    "defer": 'defer(x, "d -> d {R:dp}")',
}


def _verb(
    name: str,
    x: T,
    pattern: str,
    binds: dict[str, Any],
    move: Callable[[Call, Any, Changes], Any],
    *,
    to: str | None = None,
    prefer: Prefer | None = None,
    hardware: str | Hardware | None = None,
) -> T:
    """Open the call once, check it, and run `move` on each leaf (its identity where no axis is divided), or the steps
    of a plan if the call says what to prefer."""
    also = {} if to is None else {"to": to}
    call = open_call(name, pattern, binds, arrays=(x,), example=_EXAMPLES[name], also=also)
    if name == "all_gather":
        call.type_copies(to)
    moves = _check_pair(call, name)
    profile = check_prefer(call.text, prefer or "collectives", hardware)
    told = prefer or ("latency" if profile else None)

    def leaf(own: Call, operand: Operand) -> Any:
        if told and moves and call.frame.explicit:
            return planned(own, operand, told, profile)
        changes = _changes(own, operand)
        return move(own, operand.x, changes) if moves and call.frame.explicit else operand.x

    return call.each(x, leaf, margins=True)


# --- the verbs ----------------------------------------------------------------------------------------------


def all_gather(x: T, pattern: str, /, *, to: To | None = None, **names: Any) -> T:
    """Make divided dimensions whole: every device gets the other devices' blocks.

    The axes that leave are the minor-most of their dimension (`"b/dp/tp -> b/dp"`). Several dimensions may lose axes in
    one call, with one all-gather each.

    Communication: forward an all-gather for each dimension that changes. A device receives S(n-1)/n bytes for a result
    of S bytes over n devices. Backward a reduce-scatter of the same bytes if the result is used with divided data, and
    nothing if it leaves the kernel whole.

    Args:
      x: An array or a pytree of arrays of this layout.
      pattern: `"layout -> layout"`.
      to: JAX's type of the result. "varying" gives a gathered copy, whose cotangent is a partial sum: backward is the
        reduce-scatter. "invarying" gives a value that can leave the kernel whole: backward is a local slice, and each
        use of the result by divided data costs an all-reduce. Left out, the result is varying, and invarying where a
        copy leaves the kernel or is a loop's carry, if no other use of it pays for that.
      **names: Sizes (`h=4`) or mesh axes (`tp="model"`, `tp=None` for no division) of names in the pattern.

    Returns:
      The array with those dimensions whole.

    Raises:
      CommunicationError: If another verb is meant. The message has its name and the line to paste.
      ReplicationError: If `to` is left out, the copy leaves the kernel, and another use pays. It has both prices.
      LayoutError: On a malformed pattern.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> whole = spmd.kernel("n/x -> n", mesh=mesh)(lambda v: spmd.all_gather(v, "n/x -> n"))
      >>> print(whole(jnp.arange(8)))
      [0 1 2 3 4 5 6 7]

    References:
      https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """

    def move(call: Call, x: Any, changes: Changes) -> Any:
        for i, lost, _ in changes:
            x = _lax.all_gather(x, lost, i, call.to)
        return x

    return _verb("all_gather", x, pattern, names, move, to=to)


def psum(
    x: T,
    pattern: str,
    /,
    *,
    prefer: Prefer | None = None,
    hardware: str | Hardware | None = None,
    **names: Any,
) -> T:
    """Add up partial sums: `"d {U:tp} -> d"`.

    Communication: forward an all-reduce over the marked axes, 2S(n-1)/n bytes per device for S bytes. Backward nothing,
    because the cotangent of every part is that of the sum. With `prefer` or `hardware` forward the steps of a plan: if
    other axes hold copies of the terms, each device adds up a slice, and the slices are gathered.

    Args:
      x: An array or a pytree of arrays. Each device holds a part of the sum.
      pattern: `"layout {U:axes} -> layout"`.
      prefer: As in `relayout`. Left out, it is one all-reduce, or the fastest plan if there is a profile.
      hardware: A profile, or the name of a preset: see `spmd.accelerators.hardware`.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The sum, equal on those axes by JAX's own type.

    Raises:
      CommunicationError: If another verb is meant, or if the value is equal on the axis, since the sum would then count
        it once per device.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> total = spmd.kernel("n/x -> scalar", mesh=mesh)(lambda v: spmd.psum(v.sum(), "{U:x} -> scalar"))
      >>> print(total(jnp.arange(8)))
      28
    """

    def move(call: Call, x: Any, changes: Changes) -> Any:
        return _lax.psum(x, call.frame.in_mesh_order(set(call.src.unreduced) - set(call.dst.unreduced)))

    return _verb("psum", x, pattern, names, move, prefer=prefer, hardware=hardware)


def psum_scatter(x: T, pattern: str, /, **names: Any) -> T:
    """Add up partial sums and keep one block of the result: `"s d {U:tp} -> s/tp d"`.

    Communication: forward a reduce-scatter, S(n-1)/n bytes per device for an operand of S bytes. Backward an
    all-gather of the same bytes.

    Args:
      x: An array or a pytree of arrays. Each device holds a part of the sum.
      pattern: `"layout {U:axes} -> layout"`. Each marked axis becomes the minor-most of a dimension.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      This device's block of the sum.

    Raises:
      CommunicationError: If another verb is meant, or the value is equal on the axis.
      SizeError: If a dimension does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> @spmd.kernel("k/x n -> n/x", mesh=mesh)
      ... def column_sums(a):
      ...     return spmd.psum_scatter(a.sum(0), "n {U:x} -> n/x")
      >>> print(column_sums(jnp.ones((8, 4))))
      [8. 8. 8. 8.]
    """

    def move(call: Call, x: Any, changes: Changes) -> Any:
        for i, _, gained in changes:
            x = _lax.psum_scatter(x, gained, i)
        return x

    return _verb("psum_scatter", x, pattern, names, move)


def all_to_all(x: T, pattern: str, /, **names: Any) -> T:
    """Move the division from one dimension to another: `"b s/tp h -> b s h/tp"`.

    Communication: forward one all-to-all per pair of dimensions, S(n-1)/n bytes per device for a shard of S
    bytes over n devices. Backward the reverse, the same bytes.

    Args:
      x: An array or a pytree of arrays of this layout.
      pattern: `"layout -> layout"`. The axes that move are minor-most on both sides.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The array in the new layout.

    Raises:
      CommunicationError: If another verb is meant.
      SizeError: If a dimension does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> swap = spmd.kernel("a/x b -> a b/x", mesh=mesh)(lambda v: spmd.all_to_all(v, "a/x b -> a b/x"))
      >>> bool((swap(jnp.arange(32.0).reshape(8, 4)) == jnp.arange(32.0).reshape(8, 4)).all())
      True
    """

    def move(call: Call, x: Any, changes: Changes) -> Any:
        for i, lost, _ in changes:
            if lost:
                j = next(j for j, _, gained in changes if gained == lost)
                x = _lax.all_to_all(x, lost, split=j, concat=i)
        return x

    return _verb("all_to_all", x, pattern, names, move)


def split(x: T, pattern: str, /, **names: Any) -> T:
    """Keep this device's block of a value that every device holds whole: `"b s d -> b s/tp d"`.

    Communication: none forward. Backward one all-gather (S(n-1)/n bytes for S bytes whole) if the value is equal by
    JAX's own type, and none if it is a gathered copy. A plain slice would cost a full all-reduce.

    Args:
      x: An array or a pytree of arrays, equal on the axes that the right side adds.
      pattern: `"layout -> layout"`. The new axes are minor-most.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      This device's block.

    Raises:
      CommunicationError: If another verb is meant.
      SizeError: If a dimension does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> blocks = spmd.kernel("n -> n/x", mesh=mesh)(lambda v: spmd.split(v, "n -> n/x"))
      >>> print(blocks(jnp.arange(8)))
      [0 1 2 3 4 5 6 7]
    """

    def move(call: Call, x: Any, changes: Changes) -> Any:
        for i, _, gained in changes:
            for axis in gained:
                x = _lax.slice_block(x, axis, i, call.frame.axis_size(axis))
        return x

    return _verb("split", x, pattern, names, move)


def defer(x: T, pattern: str, /, **names: Any) -> T:
    """Leave the reduction of a replicated value's gradient for later: `"d -> d {R:dp}"`.

    Use `defer` on replicated values before a loop over micro-batches. The gradients inside the loop are then partial
    sums (`{U:dp}`). Add them up in the loop, and reduce them once after it, by one `psum`.

    Communication: none, forward and backward. If the whole is differentiated from outside, it costs one all-reduce, as
    for any replicated value.

    Args:
      x: An array or a pytree of arrays, equal on those axes.
      pattern: `"layout -> layout {R:axes}"`.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The same values, typed varying on those axes.

    Raises:
      CommunicationError: If another verb is meant.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("d, b/dp d -> d", mesh=mesh)
      ... def gradient(w, x):
      ...     w = spmd.defer(w, "d -> d {R:dp}")
      ...     g = spmd.grad(lambda w: (x * w[None]).sum(), loss="{U:dp}")(w)
      ...     return spmd.psum(g, "d {U:dp} -> d")
      >>> print(gradient(jnp.ones(3), jnp.ones((8, 3))))
      [8. 8. 8.]
    """

    def move(call: Call, x: Any, changes: Changes) -> Any:
        return _compat.pvary(x, call.frame.in_mesh_order(call.dst.reduced))

    return _verb("defer", x, pattern, names, move)


# --- permute -----------------------------------------------------------------------------------------------------

# Permutations of the blocks of a divided dimension.


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
    call = open_call("ppermute", layout, names, arrays=(x,), arrow=False, example=example)
    try:
        pairs = [(operator.index(i), operator.index(j)) for i, j in perm]
    except (TypeError, ValueError):
        call.fail(
            "perm is a sequence of pairs of Python ints, (from block, to block).",
            advice=f"as in {call.text.removesuffix(')')}, [(0, 1), (1, 0)])",
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
    call = open_call("shift", layout, names, arrays=(x,), arrow=False, example=example, also=also)
    if fault:
        call.fail(fault)

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
            call.refuse(
                f"there are {blocks} blocks, numbered 0 to {blocks - 1}, and perm sends {what} {outside[0]}.",
                got=[call.frame.describe()],
            )
        twice = [i for i in places if places.count(i) > 1]
        if twice:
            call.refuse(f"perm sends {what} block {twice[0]} twice.", got=[call.frame.describe()])
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
        )
    if len(marked[0].atoms) != 1:
        call.fail(
            f"{call.name} moves the blocks of a dimension with one name, and this one has {len(marked[0].atoms)}.",
            at=marked[0].span,
            advice="rearrange it into dimensions of their own first",
        )
    axes = marked[0].axes
    blocks = call.frame.axis_size(axes) if axes else 1
    perm = pairs(blocks)

    def leaf(_: Call, operand: Operand) -> Any:
        if all(a == b for a, b in perm) and len(perm) == blocks:
            return operand.x
        if not perm:
            return jnp.zeros_like(operand.x)
        if not call.frame.explicit:
            return _global(operand, blocks, perm)
        return _lax.ppermute(operand.x, axes, call.mesh, perm) if axes else operand.x

    return call.each(x, leaf, layout.without_brackets())


def _global(operand: Operand, blocks: int, perm: list[tuple[int, int]]) -> Any:
    """The permutation on a whole array. A roll is a primitive of its own, because compilers turn a roll into one
    permute, and the transpose that JAX would derive for it into two."""
    x = operand.x
    shape, i = x.shape, next(i for i, f in enumerate(operand.factors) if f.bracket)
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


roll_p = _compat.linear_primitive(
    "spmd_roll",
    abstract=lambda x, **_: x,
    run=lambda x, *, by, axis: jnp.roll(x, by, axis=axis),
    transpose=lambda cotangent, *, by, axis: roll_p.bind(cotangent, by=-by, axis=axis),
    along="axis",
)
