"""What the solvers of linear systems share: the right side, read and checked, and how its vector is divided."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

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
      calls: The same for each array of the right side, which has its own sizes.
      lies: The layout of the right side.
      apply: The function; see `_held`.
      precondition: The same, or None.
      b: The right side, an array or a pytree of arrays, with the type that a solution has: it varies wherever what the
        functions return does.
      x0: Where the steps begin, typed alike, or None.
      axes: The mesh axes that divide the vector. None if each device has it whole.
      size: How many elements the whole vector has.
    """

    call: Call
    calls: tuple[Call, ...]
    lies: Layout
    apply: Apply
    precondition: Apply | None
    b: Any
    x0: Any
    axes: tuple[str, ...]
    size: int

    def vector(self, x: Any) -> Any:
        """A vector like the right side, as a result."""
        leaves, tree = jax.tree.flatten(x)
        return tree.unflatten([own.result(x, self.lies) for own, x in zip(self.calls, leaves, strict=True)])

    def scalar(self, x: Any) -> jax.Array:
        """A number that all devices have alike, as a result."""
        return self.call.result(_lax.to_invarying(x, varying(self.b)), Layout("scalar"))


def system(
    name: str,
    layout: str,
    b: Any,
    apply: Apply,
    precondition: Apply | None,
    x0: Any,
    names: Mapping[str, Any],
) -> System:
    """Read a call."""
    example = f'{name}(apply, b, "x/a y")'
    call = open_call(f"linalg.{name}", layout, names, arrays=(b,), arrow=False, example=example, shown=("b",))
    [lies] = call.pattern.inputs
    plain_dims(call, lies, unnamed=True, literals=True)
    if lies.unreduced:
        call.fail("the right side is complete: the steps divide by its length.", fix=call.summed_first())
    leaves = jax.tree.leaves(b)
    if not leaves:
        call.fail("b has at least one array.", got=[f"b: {b!r}"], error=LayoutError)
    calls = tuple(call.fork() for _ in leaves)
    operands = [own.operand(leaf) for own, leaf in zip(calls, leaves, strict=True)]
    kinds = sorted({str(operand.x.dtype) for operand in operands})
    if fault := next((kind for kind in kinds if not jnp.issubdtype(kind, jnp.inexact)), None):
        call.fail(f"{name} solves for real or complex numbers, and b is of {fault}.", error=LayoutError)
    if len(kinds) > 1:
        call.fail("b is one vector: all its arrays have one type.", got=[", ".join(kinds)], error=LayoutError)
    axes = tuple(axis for factor in operands[0].factors for axis in factor.axes) if call.frame.explicit else ()
    size = sum(math.prod(factor.size for factor in operand.factors) for operand in operands)
    b = _typed(call, {"apply(b)": apply, "precondition(b)": precondition}, jax.tree.map(jnp.asarray, b), x0)
    held = (_held(apply, b), precondition and _held(precondition, b))
    return System(call, calls, lies, *held, b, typed(x0, varying(b)), axes, size)


def _held(fn: Apply, like: Any) -> Apply:
    """`fn`, closing over arrays that JAX types as varying where its argument does. It takes them as what they were.

    `lax.custom_linear_solve` gives all its arrays one type. A function in it that has taken one of them for another, as
    any does that works with an array that is whole, then fails in a `shard_map`, forward or backward.
    """
    traced, shape = jax.make_jaxpr(fn, return_shape=True)(like)
    axes, tree = varying(like), jax.tree.structure(shape)
    more = [tuple(axis for axis in axes if axis not in _compat.varying_axes(x)) for x in traced.consts]
    less = [tuple(axis for axis in _compat.varying_axes(x) if axis not in axes) for x in traced.consts]
    alike = zip(traced.consts, more, less, strict=True)
    held = [_lax.retype(_compat.pvary(jnp.asarray(x), added), hidden, "hidden") for x, added, hidden in alike]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # so that a transpose keeps the arrays, not their other types
    def run(held: Any, x: Any) -> Any:
        were = zip(held, more, less, strict=True)
        consts = [_lax.to_invarying(_lax.retype(x, hidden, "shown"), added) for x, added, hidden in were]
        return tree.unflatten(jaxpr_as_fun(traced.replace(consts=consts))(*jax.tree.leaves(x)))

    return functools.partial(run, held)


def _typed(call: Call, functions: Mapping[str, Apply | None], b: Any, x0: Any) -> Any:
    made = {name: jax.eval_shape(fn, b) for name, fn in functions.items() if fn is not None}
    for name, y in (made if x0 is None else made | {"x0": x0}).items():
        if jax.tree.structure(y) != jax.tree.structure(b):
            got = [f"{name}: {jax.tree.structure(y)}", f"b: {jax.tree.structure(b)}"]
            call.fail(f"{name} has the structure of b.", got=got, error=LayoutError)
        for own, like in zip(jax.tree.leaves(y), jax.tree.leaves(b), strict=True):
            if (jnp.shape(own), jnp.result_type(own)) != (like.shape, like.dtype):
                got = [f"{name}: {jnp.result_type(own)}{list(jnp.shape(own))}", f"b: {like.dtype}{list(like.shape)}"]
                call.fail(f"{name} has the shape and type of b.", got=got, error=SizeError)
    varies = {axis for y in jax.tree.leaves(made) for axis in _compat.varying_type(y)} | {*varying(b)}
    return typed(b, tuple(varies))


# --- vectors: arrays, and pytrees of arrays -------------------------------------------------------------------------


def varying(x: Any) -> tuple[str, ...]:
    """The mesh axes along which a vector varies by JAX's own type."""
    return tuple({axis for leaf in jax.tree.leaves(x) for axis in _compat.varying_axes(leaf)})


def typed(x: Any, axes: tuple[str, ...]) -> Any:
    return jax.tree.map(lambda leaf: _compat.pvary(leaf, axes), x)


def plus(x: Any, y: Any, times: Any = 1) -> Any:
    """x + times y."""
    return jax.tree.map(lambda x, y: x + times * y, x, y)


def inner(x: Any, y: Any) -> Any:
    """The inner product of what this device has."""
    parts = jax.tree.map(lambda x, y: jnp.vdot(x, y, precision=lax.Precision.HIGHEST), x, y)
    return sum(jax.tree.leaves(parts)[1:], jax.tree.leaves(parts)[0])


@dataclass(frozen=True)
class Steps:
    """What the steps of all solvers know.

    Attributes:
      apply: The linear function.
      precondition: A function close to its inverse, or None.
      axes: The mesh axes that divide the vector.
      most: The largest number of steps.
      tol: The length of the residual at the end, in units of that of the right side.
      atol: The same, as a number.
    """

    apply: Apply
    precondition: Apply | None
    axes: tuple[str, ...]
    most: int
    tol: float
    atol: float

    def begin(self, b: Any, x0: Any) -> tuple[Any, Any]:
        """Where the steps begin, typed as the solution, and the residual there."""
        if x0 is None:
            return typed(jax.tree.map(jnp.zeros_like, b), varying(b)), b
        return typed(jax.tree.map(jnp.asarray, x0), varying(b)), plus(b, self.apply(x0), -1)
