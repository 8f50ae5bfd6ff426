"""`qr`: a tall matrix, its rows divided over devices, as the product of orthonormal columns and a triangle."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd.comm import _lax
from spmd.comm._call import Factor
from spmd.errors import SizeError
from spmd.ops._along import Along, along, one_unnamed

_EXAMPLE = 'qr(x, "[m/dp] [n]")'


def qr(x: Any, layout: str, /, **names: Any) -> tuple[jax.Array, jax.Array]:
    """The QR decomposition of a tall matrix: `q, r = qr(x, "[m/a] [n]")`.

    The first dimension in brackets counts rows, and the second columns. The columns of q are orthonormal, r is an upper
    triangle, and q @ r is x. The diagonal of r is real and not negative, on every mesh, which makes both unique if the
    columns of x are independent. The other dimensions are a batch of matrices.

    Each device decomposes its own rows. The triangles of all devices are gathered, and each device decomposes them once
    more. Rows are never gathered, unless a block has fewer of them than columns.

    Communication: none if the rows are whole. If they are divided over n devices, forward one all-gather of the
    triangles. It sends S(n-1) bytes, where S is the size of a triangle, or of a block if that has fewer rows than
    columns. Backward one psum of a square of columns x columns elements.

    Args:
      x: The array, of float32, float64 or complex numbers.
      layout: Its layout, with rows and columns in brackets. Only the rows may be divided.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      `(q, r)`. q has the layout of x. In r the rows are as many as the columns, and whole, equal on their former axes.

    Raises:
      LayoutError: On a malformed layout, not two dimensions in brackets, columns that are divided, or other numbers.
      SizeError: If there are more columns than rows.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> factors = spmd.kernel("m/a n -> m/a n, k n", mesh=mesh)(lambda x: spmd.linalg.qr(x, "[m/a] [n]"))
      >>> q, r = factors(jnp.ones((4, 1)))
      >>> print(q.ravel().round(3), r.round(3))
      [0.5 0.5 0.5 0.5] [[2.]]

    References:
      J. Demmel, L. Grigori, M. Hoemmen and J. Langou, Communication-optimal parallel and sequential QR and LU
      factorizations, SIAM Journal on Scientific Computing 34, 2012: TSQR, with all triangles in one step.
    """
    one = along("linalg.qr", x, layout, names, alone=True, example=_EXAMPLE)
    rows, columns = _rows_and_columns(one)
    if rows.size < columns.size:
        rule = f"qr decomposes a tall matrix, and this one has {rows.size} rows and {columns.size} columns."
        one.call.fail(rule, at=rows.span, error=SizeError)
    call, where = one.call, tuple(one.dims)
    axes = rows.axes if one.axes else ()
    with call.scope():
        q, r = _decomposed(jnp.moveaxis(one.x, where, (-2, -1)), axes, dict(call.frame.sizes))
        q, r = (jnp.moveaxis(y, (-2, -1), where) for y in (q, r))
        r = _lax.to_invarying(r, rows.axes)
    return call.result(q, one.operand.layout.without_brackets()), call.result(r, one_unnamed(one.operand.layout))


def _rows_and_columns(one: Along) -> tuple[Factor, Factor]:
    """The dimensions of a matrix, in a call that can be: the rows may be divided, and the columns are whole."""
    if len(one.dims) != 2:
        got = [f"{len(one.dims)} in brackets"]
        one.call.fail("qr takes rows and columns in brackets.", got=got, advice=f"as in {_EXAMPLE}")
    rows, columns = one.factors
    if columns.axes:
        rule = f"only rows are divided, the first dimension in brackets, and {columns.name} is divided too."
        one.call.fail(rule, at=columns.span, advice="all_gather or relayout it before")
    if one.x.dtype not in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128):
        one.call.fail(f"qr decomposes float32, float64 or complex numbers, not {one.x.dtype}.")
    return rows, columns


def _decomposed(x: Any, axes: tuple[str, ...], sizes: dict[str, int]) -> tuple[Any, Any]:
    """q and r of the last two dimensions, the former divided over `axes`.

    The gradient is that of the whole matrix: a block alone may have columns that depend on each other.
    """
    if not x.shape[-1]:  # XLA gathers no empty arrays
        return x, _lax.to_invarying(x[..., :0, :], axes)
    factors = jax.custom_jvp(lambda x: _factors(x, axes, sizes))

    @factors.defjvp
    def _(given: tuple[Any], tangents: tuple[Any]) -> Any:  # as in JAX, with a sum over the rows of all devices
        [x], [dx] = given, tangents
        q, r = factors(x)
        dx = lax.linalg.triangular_solve(r, dx)
        inner = _lax.psum(_product(_adjoint(q), dx), axes)
        below = jnp.tril(inner, -1)
        turned = below - _adjoint(below)
        if jnp.iscomplexobj(inner):  # its diagonal turns, and that of r stays real
            turned += jnp.triu(jnp.tril(inner - inner.conj())) / 2
        return (q, r), (_product(q, turned - inner) + dx, _product(inner - turned, r))

    return factors(x)


def _factors(x: Any, axes: tuple[str, ...], sizes: dict[str, int]) -> tuple[Any, Any]:
    m, n = x.shape[-2:]
    q: Any = None
    r = x
    if m > n or not axes:
        q, r = jnp.linalg.qr(x)
    if axes:
        high, r = jnp.linalg.qr(_lax.all_gather(r, axes, r.ndim - 2, "invarying"))
        mine = min(m, n)
        start = _lax.axis_index(axes, sizes) * mine
        part = lax.dynamic_slice_in_dim(_compat.pvary(high, axes), start, mine, -2)
        q = part if q is None else _product(q, part)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    size = abs(diagonal)
    sign = jnp.where(size > 0, diagonal / jnp.where(size > 0, size, 1).astype(r.dtype), 1)
    return q * sign[..., None, :], r * sign.conj()[..., None]


def _product(a: Any, b: Any) -> Any:
    """A product of matrices, to all digits."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _adjoint(x: Any) -> Any:
    """The conjugate transpose of matrices."""
    return jnp.swapaxes(x, -1, -2).conj()
