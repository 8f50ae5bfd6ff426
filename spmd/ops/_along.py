"""Operations along the dimensions in brackets, as in `softmax(x, "b h q [k/tp]")`.

Such an operation says what it does if these dimensions are whole on each device, and what it does, with its
collectives, if they are divided. This module does the rest. It reads the pattern, checks and opens the array, takes one
of the two ways, and gives the result its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from spmd import _lax
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.errors import LayoutError
from spmd.language import Layout, Pattern
from spmd.ops._partial_sums import plain_dims


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
