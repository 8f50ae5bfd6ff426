"""`cho_solve`: systems of a matrix whose triangle by `cholesky` is known, its rows divided over devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat, _lax
from spmd.comm._call import Factor, open_call
from spmd.errors import LayoutError
from spmd.ops._along import Along
from spmd.ops._cholesky import Blocks, square
from spmd.ops._partial_sums import plain_dims
from spmd.ops._qr import adjoint, product

_EXAMPLE = 'cho_solve(l, b, "[n/a] [m], [n/a] k")'


def cho_solve(lower: Any, b: Any, layouts: str, /, **names: Any) -> jax.Array:
    """Solve l @ l^H @ x = b for a triangle l of `cholesky`: `x = cho_solve(l, b, "[n/a] [m], [n/a] k")`.

    In the layout of l the brackets say what counts rows and columns, as in `cholesky`. In that of b they say what
    counts rows, divided as those of l. The other dimensions of b are right sides, divided as they like over other axes.
    Only the lower triangle of l is read. Many matrices are solved under `jax.vmap`.

    The devices take turns, first from the first to the last, then back: each solves for its own rows what the others
    have left. The gradient takes one more solve, and no step is stored.

    Communication: none if the rows are whole. If they are divided over n devices, forward 2(n-1) psums of S bytes,
    where S is the size of b on a device. Each sends 2S(n-1)/n bytes. Backward the same again, and for the gradient of l
    two psum_scatters to S and two all-gathers of S, S(n-1) bytes each. If other axes divide b, one psum over them of
    l's gradient.

    Args:
      lower: The triangle, of float32, float64 or complex numbers.
      b: The right sides, of the same type.
      layouts: The layouts of l and of b.
      **names: Sizes or mesh axes of names in the layouts.

    Returns:
      x, in the layout of b.

    Raises:
      LayoutError: On malformed layouts, not two dimensions of l in brackets and one of b, columns that are divided,
        rows that are divided differently, or other numbers.
      SizeError: If there are not as many columns as rows.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=2)
      >>> @spmd.kernel("n/a m, n/a -> n/a", mesh=mesh)
      ... def solve(x, b):
      ...     return spmd.linalg.cho_solve(spmd.linalg.cholesky(x, "[n/a] [m]"), b, "[n/a] [m], [n/a]")
      >>> print(solve(jnp.array([[4.0, 2.0], [2.0, 10.0]]), jnp.array([6.0, 12.0])).round(3))
      [1. 1.]
    """
    matrix, right, rows = _read(lower, b, layouts, names)
    call = matrix.call
    with call.scope():
        first = jnp.moveaxis(right.x, right.dim, 0)
        x = _solution(Blocks.of(matrix, rows), jnp.moveaxis(matrix.x, matrix.dims, (0, 1)), first)
        return call.result(jnp.moveaxis(x, 0, right.dim), right.operand.layout.without_brackets())


def _read(lower: Any, b: Any, layouts: str, names: Mapping[str, Any]) -> tuple[Along, Along, Factor]:
    """The triangle, the right sides, and the rows that both have, of a call that can be."""
    shown = ("l", "b")
    call = open_call(
        "linalg.cho_solve",
        layouts,
        names,
        arrays=(lower, b),
        inputs=2,
        arrow=False,
        example=_EXAMPLE,
        shown=shown,
    )
    ones: list[Along] = []
    for i, (x, layout) in enumerate(zip((lower, b), call.pattern.inputs, strict=True)):
        plain_dims(call, layout, unnamed=True, literals=True)
        if layout.unreduced:
            rule = "cho_solve of a partial sum is not cho_solve of its parts: psum first."
            call.fail(rule, fix=call.summed_first(i))
        operand = call.operand(x, i, name=shown[i])
        ones.append(Along(call, operand, tuple(j for j, f in enumerate(operand.factors) if f.bracket)))
    matrix, right = ones
    rows = square(matrix, "cho_solve", "solves", _EXAMPLE)
    if matrix.x.ndim > 2:
        other = next(f for f in matrix.operand.factors if not f.bracket)
        rule = f"cho_solve takes one matrix, and l also has the dimension {other.name}."
        call.fail(rule, at=other.span, advice="for many matrices, jax.vmap", error=LayoutError)
    if len(right.dims) != 1 or (right.factor.name, right.factor.axes) != (rows.name, rows.axes):
        rule = "the brackets of b are around the rows of l, divided as there."
        call.fail(rule, advice=f"as in {_EXAMPLE}", error=LayoutError)
    if right.x.dtype != matrix.x.dtype:
        got = [f"l: {matrix.x.dtype}", f"b: {right.x.dtype}"]
        call.fail("l and b have one type.", got=got, error=LayoutError)
    return matrix, right, rows


def _solution(own: Blocks | None, lower: Any, b: Any) -> Any:
    """Of a triangle, and right sides whose rows come first."""
    flat = b.reshape(b.shape[0], -1)
    if own is None:
        return jax.scipy.linalg.cho_solve((lower, True), flat).reshape(b.shape)
    lower = own.triangle(lower)
    lies = tuple(_compat.varying_axes(lower) | _compat.varying_axes(b))  # the type of the solution
    lower, flat = _compat.pvary(lower, lies), _compat.pvary(flat, lies)

    def apply(x: Any) -> Any:
        x = _lax.psum_scatter(product(adjoint(lower), x), own.axes, 0)
        return product(lower, _lax.all_gather(x, own.axes, 0, "varying"))

    def transposed(_: Any, b: Any) -> Any:  # of a Hermitian matrix: its conjugate
        return _in_turns(own, lower, b.conj()).conj()

    solved: Any = lax.custom_linear_solve(apply, flat, lambda _, b: _in_turns(own, lower, b), transposed)
    return solved.reshape(b.shape)


def _in_turns(own: Blocks, lower: Any, b: Any) -> Any:
    """The solution: each device's rows when its turn comes, with the triangle and then with its adjoint."""
    mine, last, diagonal = own.mine, own.parts - 1, own.diagonal(lower)
    solve = functools.partial(lax.linalg.triangular_solve, diagonal, left_side=True, lower=True)

    def down(b: Any, j: Any) -> tuple[Any, None]:
        found = _lax.psum(jnp.where(mine == j, solve(b), 0), own.axes)
        return jnp.where(mine > j, b - product(own.columns(lower, j), found), b), None

    def up(x: Any, j: Any) -> tuple[Any, None]:
        known = jnp.where(mine > j, product(adjoint(own.columns(lower, j)), x), 0)
        left = x - _lax.psum(known, own.axes)
        return jnp.where(mine == j, solve(left, transpose_a=True, conjugate_a=True), x), None

    steps = jnp.arange(last, dtype=jnp.int32)
    x = solve(lax.scan(down, b, steps)[0])
    x = jnp.where(mine == last, solve(x, transpose_a=True, conjugate_a=True), x)
    return lax.scan(up, x, steps, reverse=True)[0]
