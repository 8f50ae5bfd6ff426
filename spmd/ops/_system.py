"""What the solvers of linear systems share: the right side, read and checked, and how its vector is divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmd import _compat, _lax
from spmd.comm._call import Call, open_call
from spmd.errors import LayoutError, SizeError
from spmd.language import Layout
from spmd.ops._partial_sums import plain_dims

Apply = Callable[[Any], Any]


@dataclass(frozen=True)
class System:
    """A call of a solver.

    Attributes:
      call: The call.
      lies: The layout of the right side.
      b: The right side, with the type that a solution has: it varies wherever what the functions return does.
      axes: The mesh axes that divide the vector. None if each device has it whole.
      size: How many elements the whole vector has.
    """

    call: Call
    lies: Layout
    b: jax.Array
    axes: tuple[str, ...]
    size: int

    def scalar(self, x: Any) -> jax.Array:
        """A number that all devices have alike, as a result."""
        return self.call.result(_lax.to_invarying(x, tuple(_compat.varying_axes(self.b))), Layout("scalar"))


def system(
    name: str,
    layout: str,
    b: Any,
    functions: Mapping[str, Apply | None],
    x0: Any,
    names: Mapping[str, Any],
) -> System:
    """Read a call: `functions` by the names that messages give to what they return."""
    example = f'{name}(apply, b, "x/a y")'
    call = open_call(f"linalg.{name}", layout, names, arrays=(b,), arrow=False, example=example, shown=("b",))
    [lies] = call.pattern.inputs
    plain_dims(call, lies, unnamed=True, literals=True)
    if lies.unreduced:
        call.fail("the right side is complete: the steps divide by its length.", fix=call.summed_first())
    operand = call.operand(b)
    if not jnp.issubdtype(operand.x.dtype, jnp.inexact):
        call.fail(f"{name} solves for real or complex numbers, and b is of {operand.x.dtype}.", error=LayoutError)
    axes = tuple(axis for factor in operand.factors for axis in factor.axes) if call.frame.explicit else ()
    size = math.prod(factor.size for factor in operand.factors)
    return System(call, lies, _typed(call, functions, jnp.asarray(b), x0), axes, size)


def _typed(call: Call, functions: Mapping[str, Apply | None], b: Any, x0: Any) -> Any:
    made = {name: jax.eval_shape(fn, b) for name, fn in functions.items() if fn is not None}
    for name, y in (made if x0 is None else made | {"x0": x0}).items():
        if (jnp.shape(y), jnp.result_type(y)) != (b.shape, b.dtype):
            got = [f"{name}: {jnp.result_type(y)}{list(jnp.shape(y))}", f"b: {b.dtype}{list(b.shape)}"]
            call.fail(f"{name} has the shape and type of b.", got=got, error=SizeError)
    return _compat.pvary(b, tuple(axis for y in made.values() for axis in _compat.varying_type(y)))
