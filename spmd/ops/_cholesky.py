"""`cholesky`: a positive definite matrix, its rows divided over devices, as a triangle and its adjoint."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat, _lax
from spmd.comm._call import Factor
from spmd.errors import SizeError
from spmd.ops._along import Along, along
from spmd.ops._qr import adjoint, product, rows_and_columns

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
    one = along("linalg.cholesky", x, layout, names, example=_EXAMPLE)
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
        """What device j has, on all devices."""
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
    """What l @ l^H changes by if the triangle does. Only derivatives of derivatives compute it."""
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
