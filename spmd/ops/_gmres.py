"""`gmres`: the solution of any linear system by generalised minimal residuals, of vectors divided over devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _lax
from spmd.errors import SizeError
from spmd.ops._system import Apply, Steps, inner, plus, system, typed, varying

T = TypeVar("T")


def gmres(
    apply: Apply,
    b: T,
    layout: str,
    /,
    *,
    x0: T | None = None,
    precondition: Apply | None = None,
    tol: float = 1e-5,
    atol: float = 0.0,
    restart: int = 20,
    maxiter: int | None = None,
    **names: Any,
) -> tuple[T, jax.Array, jax.Array]:
    """Solve `apply(x) = b` for any linear `apply`: `x, steps, residual = gmres(apply, b, "x/a y/b")`.

    `apply` is linear and can be inverted. It takes and returns an array of this layout, and communicates as it likes,
    for example by `stencil.halo`. All dimensions together are one vector, and so are all arrays if `b` is a pytree of
    them, such as the components of a flow. If `apply` is symmetric (Hermitian) and positive definite, `cg` takes fewer
    operations and less memory.

    The steps end when the length of the residual b - apply(x) is at most the larger of `tol` times that of b and
    `atol`. They also end at a restart that has not made it smaller, because all further ones would be the same.
    `jax.scipy.sparse.linalg.gmres` solves the same system on one device. Its `maxiter` counts restarts,
    and with a preconditioner its tolerance is that of what this makes of the residual. In a kernel its inner products
    are of shards.

    The gradient is that of the solution, not of the steps: one system with the transpose of `apply`, solved to the same
    tolerance. `apply` may close over arrays, which get gradients too.

    Memory: `restart` arrays like b.

    Communication: forward one psum of a number first, in each step two psums of `restart` + 1 numbers and what `apply`
    sends, and at each restart one psum of a number and one `apply`. A psum of S bytes over n devices sends 2S(n-1)/n.
    With `x0` one psum and one `apply` more before the steps. Backward the same again, and what the transpose of
    `apply` sends for the arrays that it closes over.

    Args:
      apply: The linear function.
      b: The right side, an array or a pytree of arrays of this layout, all of one type of real or complex numbers.
        Their sizes may differ, in dimensions that are `_` or have no name of the kernel's signature: `"_/a _"`.
      layout: The layout of `b`, of all its arrays, and of the solution.
      x0: Where the steps begin. Zeros if it is not given.
      precondition: A linear function like `apply`, close to its inverse. It is applied first: the residual is that of
        `apply` alone.
      tol: The length of the residual, in units of that of `b`.
      atol: The length of the residual that is small enough whatever `b` is.
      restart: After how many steps the directions are forgotten and begun anew.
      maxiter: The largest number of steps, not of restarts. Ten times the size of `b` if it is not given.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      `(x, steps, residual)`: the solution, as b is; the number of steps, int32; and the length of b - apply(x),
      a real number without a gradient. Both numbers are equal on all devices. The residual is larger than was asked for
      if the steps ended early.

    Raises:
      LayoutError: On a malformed layout, or if `b` is a partial sum, of integers or of several types, or another
        structure than what the functions return.
      SizeError: If `x0`, or what `apply` returns, does not have the shape and type of `b`, or `restart` is below 1.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a -> x/a, scalar, scalar", mesh=mesh)
      ... def solve(b):
      ...     def apply(u):  # u + u', against the wind
      ...         return 2 * u - spmd.roll(u, "[x/a]", 1)
      ...     return spmd.linalg.gmres(apply, b, "x/a")
      >>> u, steps, residual = solve(jnp.ones(8))
      >>> print(u.round(3), steps, residual < 1e-6)
      [1. 1. 1. 1. 1. 1. 1. 1.] 1 True

    References:
      Y. Saad and M. H. Schultz, GMRES: A generalized minimal residual algorithm for solving nonsymmetric linear
      systems, SIAM Journal on Scientific and Statistical Computing 7, 1986. Each new direction is made orthogonal to
      the others twice, each time with one sum: L. Giraud, J. Langou and M. Rozloznik, The loss of orthogonality in the
      Gram-Schmidt orthogonalization process, Computers and Mathematics with Applications 50, 2005.
    """
    known = system("gmres", layout, b, apply, precondition, x0, names)
    call, apply, precondition, b, x0 = known.call, known.apply, known.precondition, known.b, known.x0
    if restart < 1:
        call.fail("gmres takes at least one step before it restarts.", got=[f"restart={restart}"], error=SizeError)
    most = 10 * known.size if maxiter is None else maxiter
    steps = _Steps(apply, precondition, known.axes, most, tol, atol, max(1, min(restart, known.size)))

    def transposed(apply: Apply, b: Any) -> tuple[Any, Any]:
        return replace(steps, apply=apply, precondition=_transposed(precondition, b)).run(b, None)

    with call.scope():
        solved: Any = lax.custom_linear_solve(apply, b, lambda _, b: steps.run(b, x0), transposed, has_aux=True)
        x, (count, length) = solved
        return known.vector(x), known.scalar(count), known.scalar(length)


def _transposed(fn: Apply | None, like: Any) -> Apply | None:
    """The transpose of a linear function: a preconditioner of a transposed system."""
    if fn is None:
        return None
    pull = jax.linear_transpose(fn, like)
    return lambda x: pull(x)[0]


@dataclass(frozen=True)
class _Steps(Steps):
    """The steps, with inner products of whole vectors."""

    restart: int

    def length(self, r: Any) -> Any:
        """The length of a vector."""
        return jnp.sqrt(_lax.psum(inner(r, r).real, self.axes))

    def close_to_inverse(self, x: Any) -> Any:
        return x if self.precondition is None else self.precondition(x)

    def run(self, b: Any, x0: Any) -> tuple[Any, Any]:
        """The solution, the number of steps and the length of the residual."""
        x, r = self.begin(b, x0)
        length = self.length(r)
        whole = length if x0 is None else self.length(b)
        small = jnp.maximum(self.tol * whole, self.atol)

        def more(state: Any) -> Any:
            _, _, length, before, step = state
            return (length > small) & (length < before) & (step < self.most)

        def cycle(state: Any) -> Any:
            x, r, length, _, step = state
            moved, step = self.cycle(r, length, small, step)
            there = plus(x, moved)
            after = plus(b, self.apply(there), -1)
            now = self.length(after)
            x, r = jax.tree.map(lambda new, old: jnp.where(now < length, new, old), (there, after), (x, r))
            return x, r, jnp.minimum(now, length), length, step

        state = (x, r, length, jnp.full_like(length, jnp.inf), jnp.int32(0))
        x, _, length, _, count = lax.while_loop(more, cycle, state)
        return x, typed((count, length), varying(b))

    def cycle(self, r: Any, length: Any, small: Any, step: Any) -> tuple[Any, Any]:
        """How far to go from where the residual is r, by the best of `restart` directions, and the steps till then.

        Column k of the Hessenberg matrix is turned into one of a triangle as soon as it is known: `turn` is the product
        of the rotations, and its first column says how long the residual is.
        """
        m, dtype = self.restart, jax.tree.leaves(r)[0].dtype
        first = lambda r: jnp.zeros((m, *r.shape), dtype).at[0].set(r / length.astype(dtype))
        vectors = typed(jax.tree.map(first, r), varying(r))
        alike = lambda x: typed(x.astype(dtype), varying(length))
        turn, triangle = alike(jnp.eye(m + 1)), alike(jnp.eye(m))

        def more(state: Any) -> Any:
            *_, left, k = state
            return (left > small) & (k < m) & (step + k < self.most)

        def direction(state: Any) -> Any:
            vectors, turn, triangle, _, k = state
            w = self.apply(self.close_to_inverse(jax.tree.map(lambda every: every[k], vectors)))
            w, column = self.orthogonal(vectors, w, k)
            column = jnp.matmul(turn, column, precision=lax.Precision.HIGHEST)
            turn, pivot = _rotated(turn, column, k)
            triangle = triangle.at[:, k].set(column[:m].at[k].set(pivot))
            left = abs(turn[k + 1, 0]) * length
            vectors = jax.tree.map(lambda every, one: every.at[k + 1].set(one, mode="drop"), vectors, w)
            return vectors, turn, triangle, left, k + 1

        state = (vectors, turn, triangle, length, jnp.int32(0))
        vectors, turn, triangle, _, k = lax.while_loop(more, direction, state)
        diagonal = jnp.diagonal(triangle)
        seen = (jnp.arange(m, dtype=jnp.int32) < k) & (diagonal != 0)
        triangle = triangle + jnp.diag(jnp.where(diagonal == 0, 1, 0).astype(dtype))
        right = jnp.where(seen, turn[:m, 0] * length.astype(dtype), 0)
        far = jax.scipy.linalg.solve_triangular(triangle, right)
        return self.close_to_inverse(_combined(far, vectors)), step + k

    def orthogonal(self, vectors: Any, w: Any, k: Any) -> tuple[Any, Any]:
        """The part of w that is orthogonal to the vectors, of length 1, and w's column of the Hessenberg matrix.

        One sum over the devices takes all inner products and the length. The second time, what is taken away is small
        beside w, so that the length is that before less what is taken away.
        """
        w, column, first = self.less(vectors, w)
        w, more, square = self.less(vectors, w)
        square = square - jnp.sum(abs(more) ** 2)
        whole = square > _noise(column) ** 2 * first  # otherwise w is a combination of the vectors
        length = jnp.sqrt(jnp.where(whole, square, 1)).astype(column.dtype)
        column = jnp.concatenate([column + more, jnp.zeros_like(column[:1])])
        w = jax.tree.map(lambda w: jnp.where(whole, w / length, 0), w)
        return w, column.at[k + 1].set(jnp.where(whole, length, 0))

    def less(self, vectors: Any, w: Any) -> tuple[Any, Any, Any]:
        """What is left of w without its parts along the vectors, those parts, and the square of w's length before."""
        both = jax.tree.map(lambda every, one: jnp.concatenate([every, one[None]]), vectors, w)
        products = _lax.psum(jax.vmap(inner, (0, None))(both, w), self.axes)
        return plus(w, _combined(products[:-1], vectors), -1), products[:-1], products[-1].real


def _combined(weights: Any, vectors: Any) -> Any:
    return jax.tree.map(lambda every: jnp.tensordot(weights, every, 1, precision=lax.Precision.HIGHEST), vectors)


def _noise(x: Any) -> float:
    """What is left of a number of size 1 that ought to be nothing."""
    return 16 * float(jnp.finfo(x.dtype).eps)


def _rotated(turn: Any, column: Any, k: Any) -> tuple[Any, Any]:
    """The rotations with one more, which makes the pair at k of a column into (pivot, 0); its second one is a length.

    The pivot is 0, and the steps end, if `apply` makes of this direction what it makes of the others together.
    """
    top, below = column[k], column[k + 1]
    size = jnp.sqrt(abs(top) ** 2 + abs(below) ** 2)
    some = size > _noise(column) * jnp.linalg.norm(column)
    pivot = jnp.where(some, size, 1).astype(turn.dtype)
    c, s = jnp.where(some, top / pivot, 1), jnp.where(some, below / pivot, 0)
    high, low = turn[k], turn[k + 1]
    turned = turn.at[k].set(c.conj() * high + s * low)
    return turned.at[k + 1].set(c * low - s * high), jnp.where(some, pivot, 0)
