"""Operations along the dimensions in brackets, as in `softmax(x, "b h q [k/tp]")`.

Such an operation says what it does if these dimensions are whole on each device, and what it does, with its
collectives, if they are divided. This module does the rest. It reads the pattern, checks and opens the array, takes one
of the two ways, and gives the result its layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd._trees.leaves import not_int
from spmd.comm import _lax
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.comm.collectives import roll_p
from spmd.language import Atom, Dim, Layout, Pattern
from spmd.ops._reduce import factors_by_name, inexact, placed, plain_dims


@dataclass(frozen=True)
class Along:
    """A call that has been read, with its array and the factors in brackets.

    Attributes:
      call: The call.
      operand: Its array, with one axis per factor.
    """

    call: Call
    operand: Operand

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Which of these axes are in brackets."""
        return tuple(i for i, factor in enumerate(self.operand.factors) if factor.bracket)

    @property
    def x(self) -> Any:
        """The array, with one axis per factor."""
        return self.operand.x

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors in brackets."""
        return tuple(self.operand.factors[i] for i in self.dims)

    @property
    def dim(self) -> int:
        """The axis in brackets, of an operation that has one."""
        [dim] = self.dims
        return dim

    @property
    def factor(self) -> Factor:
        """Its factor."""
        return self.operand.factors[self.dim]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide these dimensions, in mesh order. None if each device has them whole."""
        return self.call.frame.in_mesh_order([a for f in self.factors if f.local < f.size for a in f.axes])

    def traded(
        self, fn: Callable[..., tuple[Any, ...]], given: Sequence[Any], dim: int, axes: tuple[str, ...]
    ) -> tuple[Any, ...] | None:
        """A function of arrays that have a divided dimension whole, because the devices divide another one meanwhile.

        Communication: an all-to-all of each array there, and one of each result back.

        Args:
          fn: The function, to a tuple.
          given: Its arrays, which begin with the dimensions of the operand.
          dim: The divided dimension.
          axes: The mesh axes that divide it.

        Returns:
          The results, divided as before. None if the devices divide no other dimension of the operand.
        """
        n = self.call.frame.axis_size(axes)
        other = next((i for i, m in enumerate(self.x.shape) if i != dim and m % n == 0), None)
        if other is None:
            return None
        there = [_lax.all_to_all(y, axes, split=other, concat=dim) for y in given]
        return tuple(_lax.all_to_all(y, axes, split=dim, concat=other) for y in fn(*there))

    def result(
        self,
        whole: Callable[[], Any],
        divided: Callable[[], Any],
        layout: Layout | Callable[[Any], Layout] | None = None,
    ) -> Any:
        """The result of the operation.

        Args:
          whole: Computes it if each device has the dimensions whole.
          divided: Computes it if they are divided.
          layout: Its layout, or a function to it from each array of the result. The default is that of the array.
        """
        layout = self.operand.layout.without_brackets() if layout is None else layout
        with self.call.scope():
            out = divided() if self.axes else whole()

        def lies(y: Any) -> Any:
            own = layout(y) if callable(layout) else layout
            # An axis of size 1 divides nothing, and yet JAX types the result varying along it.
            gone = tuple(a for factor in self.factors for a in factor.axes if a not in own.axes)
            return self.call.result(_lax.to_invarying(y, gone), own, due=bool(self.axes))

        return jax.tree.map(lies, out)


def along(
    name: str,
    x: Any,
    pattern: Any,
    names: Mapping[str, Any],
    *,
    most: int | None = None,
    linear: bool = False,
    ordered: bool = False,
    arrow: bool = False,
    alone: bool = False,
    example: str | None = None,
) -> Along:
    """Read a call, and check what holds for every operation along dimensions in brackets.

    Args:
      name: The operation.
      x: The array.
      pattern: The user's string.
      names: The user's keywords.
      most: How many dimensions may be in brackets. None for any number.
      linear: Whether the operation is linear. Only then may the array be a partial sum.
      ordered: Whether it compares elements, which complex numbers do not allow.
      arrow: Whether the pattern may say the result too.
      alone: Whether each dimension in brackets has one name. If only one dimension may be there, it has.
      example: A correct call, for messages.
    """
    arrow = pattern.arrow if isinstance(pattern, Pattern) else arrow and "->" in str(pattern)
    example = example or f'{name}(x, "b/dp [d]")'
    call = open_call(name, pattern, names, arrays=(x,), arrow=arrow, example=example)
    [src] = call.pattern.inputs
    plain_dims(call, src, unnamed=True, literals=True)
    if not linear:
        call.complete(f"{name} of a partial sum is not {name} of its parts: psum first.")
    one = Along(call, call.operand(x))
    if alone or most == 1:
        _check_ungrouped(call)
    dims = one.dims
    if not dims or (most is not None and len(dims) > most):
        last = src.dims[-1].short if src.dims else "k"
        call.fail(
            f"{name.rpartition('.')[2]} works along the {'one dimension' if most == 1 else 'dimensions'} in brackets.",
            got=[f"{len(dims)} in brackets" if dims else "no brackets"],
            advice=f"as in [{last}]" if not dims else "one pair of brackets around one dimension",
        )
    if ordered and jnp.issubdtype(one.x.dtype, jnp.complexfloating):
        call.fail(f"{name} needs numbers that are ordered, and the array is {one.x.dtype}.")
    return one


def _check_ungrouped(call: Call) -> None:
    """Check that each dimension in brackets has one name. One name does for `[(x y)/a]`, which is one dimension, unless
    an axis divides a factor inside of it."""
    sides = call.pattern.inputs, call.pattern.outputs
    dim = next((dim for side in sides[0] for dim in side.dims if dim.bracket and len(dim.atoms) > 1), None)
    if dim is None:
        return
    name, fix, advice = (
        "".join(atom.name for atom in dim.atoms),
        None,
        "rearrange it into dimensions of their own first",
    )
    if name.isidentifier() and not any(atom.axes for atom in dim.atoms[1:]) and name not in call.pattern.names:
        one = replace(dim, composite=False, atoms=(replace(dim.atoms[0], name=name),))
        named = lambda side: Layout.from_dims([one if d == dim else d for d in side.dims]).short
        fix, advice = f'"{" -> ".join(", ".join(map(named, side)) for side in sides if side)}"', None
        if bound := [key for key in dim.names if key in call.given]:
            fix, advice = None, f"{fix}, without {', '.join(f'{key}=' for key in bound)}"
    rule = f"{call.name.rpartition('.')[2]} works along dimensions with one name, and this one has {len(dim.atoms)}."
    call.fail(rule, at=dim.span, fix=fix, advice=advice)


def one_unnamed(layout: Layout) -> Layout:
    """The layout with an unnamed whole dimension in the place of the first one in brackets, and no other brackets."""
    at = next(i for i, dim in enumerate(layout.dims) if dim.bracket)
    plain = layout.without_brackets().dims
    return Layout.from_dims([*plain[:at], Dim((Atom("_"),)), *plain[at + 1 :]])


# --- `roll` and `flip`, along dimensions in brackets ------------------------------------------------------------------


Shift = int | jax.Array


def roll(x: Any, layout: str, /, shift: Shift | tuple[Shift, ...] = 1, **names: Any) -> jax.Array:
    """`jnp.roll` of the whole array along the dimensions in brackets: `roll(x, "b [s/cp] d", 1)`.

    Element i goes to place i + shift. What leaves at one end comes in at the other. `spmd.shift` rolls by whole blocks.

    Communication: none if a dimension is whole, or is rolled by a multiple of its size. If it is divided, a shift of q
    blocks and r elements takes two collective-permutes: one by q blocks, of what stays together, and one by q + 1, of
    the r elements that cross a border. Either is left out if it is empty or goes nowhere. Together they send at most a
    shard's bytes, and r / local of them if the shift is smaller than a block. Backward the reverse roll.

    A traced shift is not known when the collectives are chosen. If n, the number of devices, divides the local size of
    another dimension, that one is divided instead and then back: two all-to-alls, together 2S(n-1)/n bytes for a shard
    of S bytes. Otherwise a collective-permute of the shard for each binary digit of n - 1, and one more: S bytes each.
    Backward the same.

    Args:
      x: The array.
      layout: Its layout, with one or more dimensions in brackets.
      shift: How many elements, an int of any size and sign, or a traced scalar that is equal on all devices. For
        several dimensions one for all, or a tuple with one for each.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The array, in the same layout.

    Raises:
      LayoutError: On a malformed layout, one without brackets, or a shift that is not an integer.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: spmd.roll(x, "[s/cp]", 3))(jnp.arange(8)))
      [5 6 7 0 1 2 3 4]
    """
    one = along("roll", x, layout, names, linear=True, alone=True, example='roll(x, "b/dp [d]", 1)')
    shifts = _shifts(one.call, shift, len(one.dims))

    def rolled() -> Any:
        out = one.x
        for dim, factor, by in zip(one.dims, one.factors, shifts, strict=True):
            if not factor.size:
                continue
            by = by % factor.size
            if not isinstance(by, int):
                out = _by_traced(one, out, dim, factor, by)
            elif by and factor.local < factor.size:
                out = _divided(one.call, out, dim, factor, by)
            elif by:
                out = roll_p.bind(out, by=by, axis=dim)
        return out

    return one.result(rolled, rolled)


def _divided(call: Call, x: Any, dim: int, factor: Factor, by: int) -> Any:
    """Two pieces of each block travel: one lands in one block, and the rest in the next."""
    n = factor.size // factor.local
    blocks, rest = divmod(by, factor.local)
    stays = lax.slice_in_dim(x, 0, factor.local - rest, axis=dim)
    stays = _sent(call, stays, factor.axes, blocks % n, n)
    if not rest:
        return stays
    crosses = lax.slice_in_dim(x, factor.local - rest, factor.local, axis=dim)
    crosses = _sent(call, crosses, factor.axes, (blocks + 1) % n, n)
    return lax.concatenate([crosses, stays], dim)


def _by_traced(one: Along, x: Any, dim: int, factor: Factor, by: Any) -> Any:
    """A roll whose collectives are the same for all shifts."""
    call, n = one.call, factor.size // factor.local
    if n == 1:
        return jnp.roll(x, by, axis=dim)
    if (found := one.traded(lambda x: (jnp.roll(x, by, axis=dim),), (x,), dim, factor.axes)) is not None:
        return found[0]
    blocks, rest = by // factor.local, by % factor.local
    for digit in range((n - 1).bit_length()):
        moved = _sent(call, x, factor.axes, (1 << digit) % n, n)
        x = jnp.where((blocks >> digit) % 2 == 1, moved, x)
    both = lax.concatenate([_sent(call, x, factor.axes, 1, n), x], dim)
    return lax.dynamic_slice_in_dim(both, factor.local - rest, factor.local, axis=dim)


def _sent(call: Call, x: Any, axes: tuple[str, ...], by: int, n: int) -> Any:
    return _lax.ppermute(x, axes, dict(call.frame.sizes), [(i, (i + by) % n) for i in range(n)]) if by else x


def _shifts(call: Call, shift: Any, count: int) -> tuple[Any, ...]:
    shifts = shift if isinstance(shift, tuple) else (shift,) * count
    for one in shifts:
        if isinstance(one, jax.Array):
            if not jnp.issubdtype(one.dtype, jnp.integer):
                call.fail(f"shift, the number of elements, is an integer, not {one.dtype}.")
        elif fault := not_int("shift, the number of elements,", one):
            call.fail(fault)
    if len(shifts) != count:
        rule = f"shift has one int for each of the {count} dimensions in brackets, not {len(shifts)}."
        call.fail(rule, advice="one int, for all of them")
    # the checker is told that a traced shift is equal on all devices
    scalar = lambda one: call.fork().operand(one, layout=Layout("scalar"), name="the shift").x
    return tuple(_lax.at_least_int32(scalar(one)) if isinstance(one, jax.Array) else one for one in shifts)


def flip(x: Any, layout: str, /, **names: Any) -> jax.Array:
    """`jnp.flip` of the whole array along the dimensions in brackets: `flip(x, "b [s/cp] d")`.

    Communication: none if these dimensions are whole. If they are divided, one collective-permute of the shard, even if
    they are several. Backward the same.

    Args:
      x: The array.
      layout: Its layout, with one or more dimensions in brackets.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The array, in the same layout.

    Raises:
      LayoutError: On a malformed layout, or one without brackets.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: spmd.flip(x, "[s/cp]"))(jnp.arange(8)))
      [7 6 5 4 3 2 1 0]
    """
    one = along("flip", x, layout, names, linear=True)
    flipped = functools.partial(jnp.flip, one.x, one.dims)
    # Blocks that several dimensions number change places as those of one do: the first with the last.
    n = one.call.frame.axis_size(one.axes)
    pairs = [(i, n - 1 - i) for i in range(n)]
    return one.result(flipped, lambda: _lax.ppermute(flipped(), one.axes, one.call.mesh, pairs))


# --- `softmax`, `argmax`, `argmin` and `cumsum` ----------------------------------------------------------------------


Axes = tuple[str, ...]


def softmax(x: Any, layout: str, /, *, where: Any = None, **names: Any) -> jax.Array:
    """Softmax along the dimensions in brackets: `softmax(x, "b h q [k/tp]")` is over all of k.

    Communication: none if these dimensions are whole. If they are divided, forward a pmax and a psum of the result
    without them, each 2S(n-1)/n bytes for S bytes; backward one psum of the same size.

    Args:
      x: The array.
      layout: Its layout, with one or more dimensions in brackets.
      where: Booleans that broadcast to x. Where they are False the probability is zero, and the element takes no part.
        A score of -inf has the probability zero too. But a row of nothing else is NaN, as in `jax.nn.softmax`, and a
        row where all are False is zero.
      **names: Sizes (`h=4`) or mesh axes (`tp="model"`, `tp=None` for no division) of names in the layout.

    Returns:
      The probabilities, in the same layout.

    Raises:
      LayoutError: On a malformed layout, or one without brackets.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> print(spmd.kernel("k/tp -> k/tp", mesh=mesh)(lambda x: spmd.softmax(x, "[k/tp]"))(jnp.zeros(8)))
      [0.125 0.125 0.125 0.125 0.125 0.125 0.125 0.125]
    """
    one = along("softmax", x, layout, names)
    mask = None if where is None else _mask(one, where, jnp.shape(x))
    value = inexact(one.x)
    ours = jnp.iscomplexobj(value)  # of which JAX has no gradient
    whole = lambda: jax.nn.softmax(value, axis=one.dims, where=mask)
    alone = lambda: _divided_softmax(value, mask, one.dims, ())
    return one.result(alone if ours else whole, lambda: _divided_softmax(value, mask, one.dims, one.axes))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _divided_softmax(x: Any, mask: Any, dims: tuple[int, ...], axes: Axes) -> Any:
    seen = x if mask is None else jnp.where(mask, x, jnp.full_like(x, -jnp.inf))
    powers = jnp.exp(seen - _lax.pmax(jnp.max(seen.real, axis=dims, keepdims=True), axes).astype(x.dtype))
    out = powers / _lax.psum(jnp.sum(powers, axis=dims, keepdims=True), axes)
    return out if mask is None else jnp.where(mask, out, jnp.zeros_like(out))


@_divided_softmax.defjvp
def _divided_softmax_jvp(dims: tuple[int, ...], axes: Axes, primals: Any, tangents: Any) -> Any:
    """Needs the result alone: the backward pass keeps nothing else, and a row that is all masked gives no NaN."""
    x, mask = primals
    out = _divided_softmax(x, mask, dims, axes)
    seen = lambda y: y if mask is None else jnp.where(mask, y, jnp.zeros_like(y))  # also where the others are NaN
    weighted = seen(out * tangents[0])
    return out, seen(weighted - out * _lax.psum(jnp.sum(weighted, axis=dims, keepdims=True), axes))


def _mask(one: Along, where: Any, shape: tuple[int, ...]) -> Any:
    """The mask, with one axis per factor as the array."""
    try:
        mask = jnp.broadcast_to(where, shape)
    except ValueError:
        rule = f"where has shape {jnp.shape(where)}, which does not broadcast to {shape}, the shape of x here."
        one.call.fail(rule)
    if mask.dtype != jnp.bool_:
        one.call.fail(f"where is an array of booleans, not of {mask.dtype}.")
    return mask.reshape(one.x.shape)


def argmax(x: Any, pattern: str, /, **names: Any) -> jax.Array:
    """The position of the largest element along the dimension in brackets, counted in the whole of it.

    `argmax(x, "b [v/tp]")`, or with the result spelled out: `argmax(x, "b [v/tp] -> b")`. The first of equals wins,
    whichever device it lies on, and NaN counts as the largest, as in `jnp.argmax`. It has no gradient.

    Communication: none if the dimension is whole. If it is divided, a pmax and a pmin of the result, each 2S(n-1)/n
    bytes for S bytes of int32.

    Args:
      x: The array.
      pattern: Its layout with one dimension in brackets. `-> layout` may follow, with the others in any order.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      Positions, int32 or what `jnp.argmax` gives under `jax_enable_x64`, equal on the axes of that dimension.

    Raises:
      CommunicationError: If the right side places a dimension otherwise.
      LayoutError: On a malformed pattern.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> best = spmd.kernel("b v/tp -> b", mesh=mesh)(lambda x: spmd.argmax(x, "b [v/tp]"))
      >>> print(best(jnp.eye(8)[2:5]))
      [2 3 4]
    """
    return _place_of("argmax", x, pattern, names)


def argmin(x: Any, pattern: str, /, **names: Any) -> jax.Array:
    """The position of the smallest element along the dimension in brackets, counted in the whole of it.

    `argmin(x, "b [v/tp]")`, or with the result spelled out: `argmin(x, "b [v/tp] -> b")`. The first of equals wins,
    whichever device it lies on, and NaN counts as the smallest, as in `jnp.argmin`. It has no gradient.

    Communication: that of `argmax`.

    Args:
      x: The array.
      pattern: Its layout with one dimension in brackets. `-> layout` may follow, with the others in any order.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      Positions as in `argmax`.

    Raises:
      CommunicationError: If the right side places a dimension otherwise.
      LayoutError: On a malformed pattern.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> least = spmd.kernel("b v/tp -> b", mesh=mesh)(lambda x: spmd.argmin(x, "b [v/tp]"))
      >>> print(least(-jnp.eye(8)[2:5]))
      [2 3 4]
    """
    return _place_of("argmin", x, pattern, names)


def _place_of(name: str, x: Any, pattern: str, names: Any) -> jax.Array:
    """`argmax` and `argmin`: the least place of those whose key is the largest."""
    example, least = f'{name}(x, "b/dp [d] -> b/dp")', name == "argmin"
    one = along(name, x, pattern, names, most=1, ordered=True, arrow=True, example=example)
    layout, order = _kept(one, name)
    value = lax.stop_gradient(one.x)
    local = (jnp.argmin if least else jnp.argmax)(value, axis=one.dim).astype(jnp.int32)
    dtype = jnp.result_type(int)  # that of jnp, though what is sent is int32 where that is enough

    def divided() -> Any:
        best = jnp.squeeze(jnp.take_along_axis(value, jnp.expand_dims(local, one.dim), one.dim), one.dim)
        key, start = _order_key(best, least=least), one.call.start(one.factor)
        place = local.astype(start.dtype) + start
        last = jnp.full_like(place, np.iinfo(place.dtype).max)
        first = _lax.pmin(jnp.where(key == _lax.pmax(key, one.axes), place, last), one.axes)
        return first.transpose(order).astype(dtype)

    return one.result(lambda: local.transpose(order).astype(dtype), divided, layout)


def _order_key(x: Any, *, least: bool = False) -> Any:
    """Integers in the order of `x`, or in the reverse if the least is looked for. pmax compares them reliably: all NaNs
    are largest either way, and the two zeros are equal."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ~x if least else x
    wide, word = (x, jnp.int64) if x.dtype == jnp.float64 else (x.astype(jnp.float32), jnp.int32)
    # Floats of one sign have the order of their bits; for negative numbers it runs backwards.
    bits = lax.bitcast_convert_type(jnp.where(wide == 0, jnp.zeros_like(wide), wide), word)
    largest = jnp.asarray(jnp.iinfo(word).max, word)
    bits = jnp.where(bits < 0, bits ^ largest, bits)
    return jnp.where(jnp.isnan(wide), largest, ~bits if least else bits)


def _kept(one: Along, who: str) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the result, without the dimension in brackets, and the order of the axes that are left."""
    call, operand = one.call, one.operand
    rest = [name for i, name in enumerate(operand.names) if i != one.dim]
    if not call.pattern.outputs:
        kept = [d for d in operand.layout.dims if not d.bracket]
        return Layout.from_dims(kept), tuple(range(len(rest)))
    [dst] = call.pattern.outputs
    plain_dims(call, dst, literals=True)
    dots = [name for name in rest if name.startswith("...")]
    names = [n for d in dst.dims for n in (dots if d.ellipsis else d.names)]
    if sorted(names) != sorted(rest):
        shown = ", ".join(n for n in rest if not n.startswith("...")) or "scalar"
        rule = f"{who} keeps the dimensions that are not in brackets: {shown}."
        call.fail(rule, got=[f"right: {dst.short}"])
    have = factors_by_name(operand)
    for atom in dst.atoms:
        factor = have[atom.name]
        if factor.axes != (atom.axes or ()):
            left, right = placed(factor.name, factor.axes), placed(factor.name, atom.axes or ())
            rule = f"{who} keeps the placement of the other dimensions: {left} on the left is {right} on the right."
            call.refuse(rule, at=atom.span, advice="all_gather, split or relayout the result in a line of its own")
    return dst, tuple(rest.index(name) for name in names)


def cumsum(x: Any, layout: str, /, *, reverse: bool = False, **names: Any) -> jax.Array:
    """The running sum along the dimension in brackets: `cumsum(x, "b [s/cp] d")`, over all of s.

    Communication: none if the dimension is whole. If it is divided, forward one all-gather of the blocks' totals,
    S(n-1)/n bytes for n totals of S bytes together; backward a psum_scatter of the same bytes.

    Args:
      x: The array.
      layout: Its layout, with one dimension in brackets.
      reverse: Whether to sum from the end.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The running sums, in the same layout and with the dtype of `jnp.cumsum`.

    Raises:
      LayoutError: On a malformed layout, or one without brackets.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: spmd.cumsum(x, "[s/cp]"))(jnp.arange(8)))
      [ 0  1  3  6 10 15 21 28]
    """
    one = along("cumsum", x, layout, names, most=1, linear=True)
    value = one.x.astype(jnp.result_type(int)) if one.x.dtype == jnp.bool_ else one.x
    sums = lax.cumsum(value, axis=one.dim, reverse=reverse)
    return one.result(whole=lambda: sums, divided=lambda: sums + _before(one, sums, reverse))


def _before(one: Along, sums: Any, reverse: bool) -> Any:
    """The total of the blocks that come before this one."""
    dim, axes = one.dim, one.factor.axes
    edge = 0 if reverse else sums.shape[dim] - 1
    total = lax.slice_in_dim(sums, edge, edge + 1, axis=dim)
    totals = _lax.all_gather(total, axes, dim, "varying")
    place, here = lax.broadcasted_iota(jnp.int32, totals.shape, dim), _lax.axis_index(axes, one.call.mesh)
    counted = jnp.where(place > here if reverse else place < here, totals, jnp.zeros_like(totals))
    return jnp.sum(counted, axis=dim, keepdims=True, dtype=sums.dtype)
