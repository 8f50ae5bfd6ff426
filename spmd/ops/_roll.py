"""`roll` and `flip`, along dimensions in brackets."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _lax
from spmd._leaves import not_int
from spmd.comm._call import Call, Factor
from spmd.comm.permute import roll_p
from spmd.errors import LayoutError
from spmd.language import Layout
from spmd.ops._along import Along, along

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
    one = along("roll", x, layout, names, linear=True, example='roll(x, "b/dp [d]", 1)')
    if fault := next((d for d in one.operand.layout.dims if d.bracket and len(d.atoms) > 1), None):
        rule = f"roll works along a dimension with one name, and this one has {len(fault.atoms)}."
        one.call.fail(rule, at=fault.span, advice="rearrange it into dimensions of their own first", error=LayoutError)
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
                call.fail(f"shift, the number of elements, is an integer, not {one.dtype}.", error=LayoutError)
        elif fault := not_int("shift, the number of elements,", one):
            call.fail(fault, error=LayoutError)
    if len(shifts) != count:
        rule = f"shift has one int for each of the {count} dimensions in brackets, not {len(shifts)}."
        call.fail(rule, advice="one int, for all of them", error=LayoutError)
    return tuple(_scalar(call, one) if isinstance(one, jax.Array) else one for one in shifts)


def _scalar(call: Call, shift: Any) -> Any:
    """A traced shift, which the checker is told to be equal on all devices."""
    return _lax.at_least_int32(call.fork().operand(shift, layout=Layout("scalar"), name="the shift").x)


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
    return one.result(
        whole=flipped,
        divided=lambda: _lax.ppermute(
            flipped(), one.axes, dict(one.call.frame.sizes), [(i, n - 1 - i) for i in range(n)]
        ),
    )
