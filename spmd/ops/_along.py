"""Operations along the dimensions in brackets, as in `softmax(x, "b h q [k/tp]")`.

Such an operation says what it does if these dimensions are whole on each device, and what it does, with its
collectives, if they are divided. This module does the rest. It reads the pattern, checks and opens the array, takes one
of the two ways, and gives the result its layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd._trees.leaves import not_int
from spmd.comm import _lax
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.comm.permute import roll_p
from spmd.errors import LayoutError
from spmd.language import Layout, Pattern
from spmd.ops._reduce import plain_dims


@dataclass(frozen=True)
class Along:
    """A call that has been read, with its array and the factors in brackets.

    Attributes:
      call: The call.
      operand: Its array, with one axis per factor.
      dims: Which of these axes are in brackets.
    """

    call: Call
    operand: Operand
    dims: tuple[int, ...]

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
            return self.call.result(_lax.to_invarying(y, gone), own)

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
      example: A correct call, for messages.
    """
    arrow = pattern.arrow if isinstance(pattern, Pattern) else arrow and "->" in str(pattern)
    example = example or f'{name}(x, "b/dp [d]")'
    call = open_call(name, pattern, names, arrays=(x,), arrow=arrow, example=example)
    [src] = call.pattern.inputs
    plain_dims(call, src, unnamed=True, literals=True)
    if src.unreduced and not linear:
        rule = f"{name} of a partial sum is not {name} of its parts: psum first."
        call.fail(rule, fix=call.summed_first())
    operand = call.operand(x)
    dims = tuple(i for i, factor in enumerate(operand.factors) if factor.bracket)
    if not dims or (most is not None and len(dims) > most):
        last = operand.layout.dims[-1].short if operand.layout.dims else "k"
        call.fail(
            f"{name.rpartition('.')[2]} works along the {'one dimension' if most == 1 else 'dimensions'} in brackets.",
            got=[f"{len(dims)} in brackets" if dims else "no brackets"],
            advice=f"as in [{last}]" if not dims else "one pair of brackets around one dimension",
            error=LayoutError,
        )
    if ordered and jnp.issubdtype(operand.x.dtype, jnp.complexfloating):
        call.fail(f"{name} needs numbers that are ordered, and the array is {operand.x.dtype}.", error=LayoutError)
    return Along(call, operand, dims)


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
