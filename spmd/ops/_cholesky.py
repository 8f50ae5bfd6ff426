"""`cholesky`: a positive definite matrix, its rows divided over devices, as a triangle and its adjoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd.comm import _lax
from spmd.comm._call import Factor, open_call
from spmd.errors import SizeError
from spmd.ops._along import Along, along, check_ungrouped, one_unnamed
from spmd.ops._reduce import plain_dims

# --- `qr`: a tall matrix, its rows divided over devices, as the product of orthonormal columns and a triangle ---------


_QR = 'qr(x, "[m/dp] [n]")'


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
    one = along("linalg.qr", x, layout, names, alone=True, example=_QR)
    rows, columns = rows_and_columns(one, "qr", "decomposes", _QR)
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


def rows_and_columns(one: Along, name: str, does: str, example: str) -> tuple[Factor, Factor]:
    """The dimensions of a matrix, in a call that can be: the rows may be divided, and the columns are whole."""
    if len(one.dims) != 2:
        got = [f"{len(one.dims)} in brackets"]
        one.call.fail(f"{name} takes rows and columns in brackets.", got=got, advice=f"as in {example}")
    rows, columns = one.factors
    if columns.axes:
        rule = f"only rows are divided, the first dimension in brackets, and {columns.name} is divided too."
        one.call.fail(rule, at=columns.span, advice="all_gather or relayout it before")
    if one.x.dtype not in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128):
        one.call.fail(f"{name} {does} float32, float64 or complex numbers, not {one.x.dtype}.")
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
        inner = _lax.psum(product(adjoint(q), dx), axes)
        below = jnp.tril(inner, -1)
        turned = below - adjoint(below)
        if jnp.iscomplexobj(inner):  # its diagonal turns, and that of r stays real
            turned += jnp.triu(jnp.tril(inner - inner.conj())) / 2
        return (q, r), (product(q, turned - inner) + dx, product(inner - turned, r))

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
        q = part if q is None else product(q, part)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    size = abs(diagonal)
    sign = jnp.where(size > 0, diagonal / jnp.where(size > 0, size, 1).astype(r.dtype), 1)
    return q * sign[..., None, :], r * sign.conj()[..., None]


def product(a: Any, b: Any) -> Any:
    """A product of matrices, to all digits."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def adjoint(x: Any) -> Any:
    """The conjugate transpose of matrices."""
    return jnp.swapaxes(x, -1, -2).conj()


_EXAMPLE = 'cholesky(x, "[n/a] [m]")'


def cholesky(x: Any, layout: str, /, **names: Any) -> jax.Array:
    """The lower triangle l with l @ l^H = x: `l = cholesky(x, "[n/a] [m]")`.

    The first dimension in brackets counts rows, and the second columns, as many as rows. x is symmetric (Hermitian for
    complex numbers) and positive definite. Only its lower triangle is read, and only that has a gradient, which counts
    an element and its mirror image together. The other dimensions are a batch of matrices.

    The matrix is never gathered as a whole. There is a step for each device. It sends the square of its block on the
    diagonal to all. Each finds its own rows of the triangle in these columns, and gathers those of all, to take what
    they explain from the columns that are left. Each device holds 1/n of the matrix and the columns of one step. Its
    arithmetic is at most 4/n of that of one device alone, because all rows wait for the last one, and the steps of a
    loop take as long as its first one. There are log2(n) loops, each of half of the steps that are left: the program
    grows with the logarithm of n.

    Communication: none if the rows are whole. If they are divided over n devices, forward n-1 times one psum of S
    bytes, where S is the size of a square of 1/n of the rows and columns, 2S(n-1)/n bytes, and one all-gather to nS,
    S(n-1) bytes. Backward n-1 times one such all-gather, one psum_scatter to S, S(n-1) bytes, and one psum of S. A
    `jax.jvp` sends three times what the forward pass does.

    Args:
      x: The array, of float32, float64 or complex numbers.
      layout: Its layout, with rows and columns in brackets. Only the rows may be divided.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      l, in the layout of x, with zeros above the diagonal. If x is not positive definite, l has NaN.

    Raises:
      LayoutError: On a malformed layout, not two dimensions in brackets, columns that are divided, or other numbers.
      SizeError: If there are not as many columns as rows.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=2)
      >>> triangle = spmd.kernel("n/a m -> n/a m", mesh=mesh)(lambda x: spmd.linalg.cholesky(x, "[n/a] [m]"))
      >>> print(triangle(jnp.array([[4.0, 2.0], [2.0, 10.0]])))
      [[2. 0.]
       [1. 3.]]

    References:
      I. Murray, Differentiation of the Cholesky decomposition, arXiv:1602.07527, 2016: the gradient, in blocks.
    """
    one = along("linalg.cholesky", x, layout, names, alone=True, example=_EXAMPLE)
    rows = square(one, "cholesky", "decomposes", _EXAMPLE)
    call, where = one.call, tuple(one.dims)
    with call.scope():
        matrix = jnp.moveaxis(one.x, where, (-2, -1))
        own = Blocks.of(one, rows)
        lower = whole(matrix) if own is None else _divided(own, matrix)
        return call.result(jnp.moveaxis(lower, (-2, -1), where), one.operand.layout.without_brackets())


def square(one: Along, name: str, does: str, example: str) -> Factor:
    """The rows of a square matrix, in a call that can be."""
    rows, columns = rows_and_columns(one, name, does, example)
    if rows.size != columns.size:
        rule = f"{name} takes a square matrix, and this one has {rows.size} rows and {columns.size} columns."
        one.call.fail(rule, at=rows.span, error=SizeError)
    return rows


def whole(x: Any) -> Any:
    """The triangle of a matrix that one device holds, with the gradient in the lower triangle."""
    lower = jnp.tril(x, -1)
    diagonal = jnp.tril(jnp.triu(x)).real.astype(x.dtype)
    return lax.linalg.cholesky(lower + adjoint(lower) + diagonal, symmetrize_input=False)


@dataclass(frozen=True)
class Blocks:
    """The rows of a matrix in blocks of `size`, one for each of the `parts` devices along `axes`."""

    axes: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    parts: int
    size: int

    @classmethod
    def of(cls, one: Along, rows: Factor) -> Blocks | None:
        """None if each device has all rows."""
        if not one.axes:
            return None
        return cls(rows.axes, tuple(one.call.frame.sizes), rows.size // rows.local, rows.local)

    @property
    def mine(self) -> Any:
        """The number of this device's block."""
        return _lax.axis_index(self.axes, dict(self.sizes))

    def columns(self, x: Any, j: Any) -> Any:
        """This device's rows of the columns of block j."""
        return lax.dynamic_slice_in_dim(x, j * self.size, self.size, -1)

    def diagonal(self, x: Any) -> Any:
        """This device's block of the diagonal."""
        return self.columns(x, self.mine)

    def triangle(self, x: Any) -> Any:
        """The lower triangle of the whole matrix."""
        column = jnp.arange(x.shape[-1], dtype=jnp.int32)
        row = self.mine * self.size + jnp.arange(self.size, dtype=jnp.int32)
        return jnp.where(column[None] <= row[:, None], x, 0)

    def sent(self, x: Any, j: Any) -> Any:
        """Return what device j has, on all devices."""
        return _lax.psum(jnp.where(self.mine == j, x, 0), self.axes)

    def gathered(self, x: Any) -> Any:
        """The rows of all devices."""
        return _lax.all_gather(x, self.axes, x.ndim - 2, "invarying")

    def split(self, columns: Any, j: Any, first: int) -> tuple[Any, Any]:
        """Of the columns of block j: the block on the diagonal, and the rows of all blocks beyond `first`. Those that
        are not below block j are zeros."""
        rows = self.gathered(columns)
        top = lax.dynamic_slice_in_dim(rows, j * self.size, self.size, -2)
        below = rows[..., (first + 1) * self.size :, :]
        at = first + 1 + jnp.arange(below.shape[-2], dtype=jnp.int32) // self.size
        return top, jnp.where((at > j)[:, None], below, 0)

    def summed_below(self, x: Any, first: int) -> Any:
        """This device's block of what all devices have parts of, the rows beyond block `first`: their sum, or else
        zeros."""
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [((first + 1) * self.size, 0), (0, 0)])
        return _lax.psum_scatter(x, self.axes, x.ndim - 2)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The first and the number of steps of each loop, for all blocks but the last. A loop does as much in each step
        as in its first one, and the next loop half of that: the program grows with the logarithm of `parts`."""
        found, first = [], 0
        while (left := self.parts - first) > 1:
            found.append((first, left // 2))
            first += left // 2
        return found


def _divided(own: Blocks, x: Any) -> Any:
    """The triangle, with derivatives of its own: a gradient by JAX's would keep the columns of all steps.

    A change of the triangle and the change of x that it makes are one linear system. One way it is solved by JAX's own
    derivative of the steps, and the other way by steps in the other order.
    """
    forward = functools.partial(_forward, own)
    fn = jax.custom_jvp(forward)

    @fn.defjvp
    def _(given: tuple[Any], changes: tuple[Any]) -> tuple[Any, Any]:
        [x], [change] = given, changes
        lower = fn(x)

        def apply(change: Any) -> Any:
            return _squared(own, lower, change)

        def solve(_: Any, change: Any) -> Any:
            return jax.jvp(forward, (x,), (change,))[1]

        def transposed(_: Any, cotangent: Any) -> Any:
            return _backward(own, lower, cotangent.conj()).conj()

        solved: Any = lax.custom_linear_solve(apply, change, solve, transposed)
        return lower, solved

    return fn(_compat.pvary(x, own.axes))


def _squared(own: Blocks, lower: Any, change: Any) -> Any:
    """Return what l @ l^H changes by if the triangle does. Only derivatives of derivatives compute it."""
    change = own.triangle(change)

    def columns(_: None, j: Any) -> tuple[None, Any]:
        rows, changed = (own.sent(y, j) for y in (lower, change))
        return None, product(change, adjoint(rows)) + product(lower, adjoint(changed))

    return own.triangle(_side_by_side(lax.scan(columns, None, jnp.arange(own.parts, dtype=jnp.int32))[1]))


def _side_by_side(columns: Any) -> Any:
    """The columns of blocks, which a loop has put into a dimension in front."""
    blocks, *batch, size = columns.shape
    return jnp.moveaxis(columns, 0, -2).reshape(*batch, blocks * size)


def _forward(own: Blocks, x: Any) -> Any:
    found: list[Any] = []
    later = x
    for first, count in own.runs:
        steps = jnp.arange(first, first + count, dtype=jnp.int32)
        later, columns = lax.scan(functools.partial(_explained, own, first), later, steps)
        found.append(_side_by_side(columns))
        later = later[..., count * own.size :]
    one = jnp.eye(own.size, dtype=x.dtype)
    last = own.mine == own.parts - 1  # the others have nothing there that could be decomposed
    found.append(jnp.where(last, whole(jnp.where(last, later, one)), 0))
    return jnp.concatenate(found, -1)


def _explained(own: Blocks, first: int, later: Any, j: Any) -> tuple[Any, Any]:
    """A step: of the columns from block `first` on, what those of block j explain is taken away; and j's triangle.

    Each device solves for its own rows, and then gathers those of all.
    """
    columns = own.columns(later, j - first)
    top = whole(own.sent(columns, j))
    mine = lax.linalg.triangular_solve(top, columns, lower=True, transpose_a=True, conjugate_a=True)
    mine = jnp.where(own.mine > j, mine, 0)
    below = own.gathered(mine)[..., (first + 1) * own.size :, :]
    beyond = later[..., own.size :] - product(mine, adjoint(below))
    later = jnp.concatenate([later[..., : own.size], beyond], -1)
    return later, jnp.where(own.mine == j, top, mine)


def _backward(own: Blocks, lower: Any, cotangent: Any) -> Any:
    """The steps in the other order; each device's rows of the gradient grow from the last columns to the first."""
    last = own.parts - 1
    found = jnp.where(own.mine == last, _of_diagonal(own.diagonal(lower), own.columns(cotangent, last)), 0)
    for first, count in reversed(own.runs):
        found = jnp.pad(found, [(0, 0)] * (found.ndim - 1) + [(count * own.size, 0)])
        steps = jnp.arange(first, first + count, dtype=jnp.int32)
        step = functools.partial(_returned, own, first, lower, cotangent)
        found = lax.scan(step, found, steps, reverse=True)[0]
    return found


def _returned(own: Blocks, first: int, lower: Any, cotangent: Any, found: Any, j: Any) -> tuple[Any, None]:
    """A step backward: the gradient of the columns from block `first` on, those of j with it, zeros before them."""
    rows = own.columns(lower, j)
    top, below = own.split(rows, j, first)
    beyond = found[..., own.size :]
    here = own.columns(cotangent, j) - product(beyond, below)
    here -= own.summed_below(product(adjoint(beyond), rows), first)
    solved = lax.linalg.triangular_solve(top, here, lower=True)
    rows_below = jnp.where(own.mine > j, solved, 0)
    of_top = _lax.psum(jnp.where(own.mine == j, here, -product(adjoint(rows_below), rows)), own.axes)
    here = jnp.where(own.mine == j, _of_diagonal(top, of_top), rows_below)
    return lax.dynamic_update_slice_in_dim(found, here, (j - first) * own.size, -1), None


def _of_diagonal(top: Any, cotangent: Any) -> Any:
    """The gradient of `whole` where its result is `top`, in the lower triangle."""
    inner = product(adjoint(top), jnp.tril(cotangent))
    inner = jnp.tril(inner, -1) + jnp.tril(jnp.triu(inner)) / 2
    solve = functools.partial(lax.linalg.triangular_solve, top, lower=True)
    full = solve(solve(inner, left_side=True, transpose_a=True, conjugate_a=True))
    both = full + adjoint(full)
    return jnp.tril(both, -1) + jnp.tril(jnp.triu(both)).real.astype(top.dtype) / 2


# --- `cho_solve`: systems of a matrix whose triangle by `cholesky` is known, its rows divided over devices ------------


_SOLVE = 'cho_solve(l, b, "[n/a] [m], [n/a] k")'


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
    shown, given = ("l", "b"), (lower, b)
    how: dict[str, Any] = {"arrays": given, "inputs": 2, "arrow": False, "shown": shown}
    call = open_call("linalg.cho_solve", layouts, names, example=_SOLVE, **how)
    plain_dims(call, *call.pattern.inputs, unnamed=True, literals=True)
    check_ungrouped(call)
    for i in range(2):
        call.complete("cho_solve of a partial sum is not cho_solve of its parts: psum first.", i)
    matrix, right = (Along(call, call.operand(x, i, name=shown[i])) for i, x in enumerate(given))
    rows = square(matrix, "cho_solve", "solves", _SOLVE)
    if matrix.x.ndim > 2:
        other = next(f for f in matrix.operand.factors if not f.bracket)
        rule = f"cho_solve takes one matrix, and l also has the dimension {other.name}."
        call.fail(rule, at=other.span, advice="for many matrices, jax.vmap")
    if len(right.dims) != 1 or (right.factor.name, right.factor.axes) != (rows.name, rows.axes):
        rule = "the brackets of b hold the rows of l, and the same mesh axes divide them."
        call.fail(rule, advice=f"as in {_SOLVE}")
    if right.x.dtype != matrix.x.dtype:
        got = [f"l: {matrix.x.dtype}", f"b: {right.x.dtype}"]
        call.fail("l and b have one type.", got=got)
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
