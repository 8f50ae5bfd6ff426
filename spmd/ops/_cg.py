"""`cg`: the solution of a linear system by conjugate gradients, of vectors that are divided over devices."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _lax
from spmd.ops._system import Apply, Steps, inner, plus, system, typed, varying

T = TypeVar("T")


def cg(
    apply: Apply,
    b: T,
    layout: str,
    /,
    *,
    x0: T | None = None,
    precondition: Apply | None = None,
    tol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    **names: Any,
) -> tuple[T, jax.Array]:
    """Solve `apply(x) = b` by conjugate gradients: `x, steps = cg(apply, b, "x/a y/b")`.

    `apply` is linear, symmetric (Hermitian for complex numbers) and positive definite. It takes and returns an array of
    this layout, and communicates as it likes, for example by `stencil.halo`. All dimensions together are one vector,
    and so are all arrays if `b` is a pytree of them, such as the components of a flow.
    The steps end when the length of the residual b - apply(x) is at most the larger of `tol` times that of b and
    `atol`. `jax.scipy.sparse.linalg.cg` means the same on one device. In a kernel its inner products are of shards.

    The gradient is that of the solution, not of the steps: one more system of the same kind, solved to the same
    tolerance. `apply` may close over arrays, which get gradients too.

    Communication: forward one psum of a number first, and in each step two psums of a number and what `apply` sends. A
    psum of S bytes over n devices sends 2S(n-1)/n. With `precondition`, the second psum has two numbers. With
    `x0` one psum and one `apply` more before the steps. Backward the same again, and what the transpose of `apply`
    sends for the arrays that it closes over.

    Args:
      apply: The linear function.
      b: The right side, an array or a pytree of arrays of this layout, all of one type of real or complex numbers.
        Their sizes may differ, in dimensions that are `_` or have no name of the kernel's signature: `"_/a _"`.
      layout: The layout of `b`, of all its arrays, and of the solution.
      x0: Where the steps begin. Zeros if it is not given.
      precondition: A function like `apply`, close to its inverse.
      tol: The length of the residual, in units of that of `b`.
      atol: The length of the residual that is small enough whatever `b` is.
      maxiter: The largest number of steps. Ten times the size of `b` if it is not given.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      `(x, steps)`: the solution, as b is, and the number of steps, int32, equal on all devices. If they are
      `maxiter`, the residual may still be larger than was asked for.

    Raises:
      LayoutError: On a malformed layout, or if `b` is a partial sum, of integers or of several types, or another
        structure than what the functions return.
      SizeError: If `x0`, or what `apply` returns, does not have the shape and type of `b`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("x/a -> x/a, scalar", mesh=mesh)
      ... def solve(b):
      ...     def apply(u):  # u - u''
      ...         return 3 * u - spmd.roll(u, "[x/a]", 1) - spmd.roll(u, "[x/a]", -1)
      ...     return spmd.linalg.cg(apply, b, "x/a")
      >>> u, steps = solve(jnp.ones(8))
      >>> print(u, steps)
      [1. 1. 1. 1. 1. 1. 1. 1.] 1

    References:
      M. R. Hestenes and E. Stiefel, Methods of conjugate gradients for solving linear systems, Journal of Research of
      the National Bureau of Standards 49, 1952.
    """
    known = system("cg", layout, b, apply, precondition, x0, names)
    call, apply, precondition, b, x0 = known.call, known.apply, known.precondition, known.b, known.x0
    most = 10 * known.size if maxiter is None else maxiter
    steps = _Steps(apply, precondition, known.axes, most, tol, atol)
    how: dict[str, Any] = {"symmetric": not any(map(jnp.iscomplexobj, jax.tree.leaves(b))), "has_aux": True}

    def transposed(_: Apply, b: Any) -> tuple[Any, Any]:  # of a Hermitian function: its conjugate
        x, count = steps.run(_conjugate(b), None)
        return _conjugate(x), count

    with call.scope():
        solved: Any = lax.custom_linear_solve(apply, b, lambda _, b: steps.run(b, x0), transposed, **how)
        x, count = solved
        return known.vector(x), known.scalar(count)


def _conjugate(x: Any) -> Any:
    return jax.tree.map(jnp.conj, x)


class _Steps(Steps):
    """The steps, with inner products of whole vectors."""

    def dots(self, *pairs: tuple[Any, Any]) -> list[Any]:
        """The inner products, which are real, by one sum over the devices."""
        return list(_lax.psum(jnp.stack([inner(x, y).real for x, y in pairs]), self.axes))

    def measured(self, r: Any) -> tuple[Any, Any, Any]:
        """What the preconditioner makes of a residual, its product with it, and the residual's own length squared."""
        if self.precondition is None:
            [length] = self.dots((r, r))
            return r, length, length
        z = self.precondition(r)
        return z, *self.dots((r, z), (r, r))

    def run(self, b: Any, x0: Any) -> tuple[Any, Any]:
        """The solution and the number of steps."""
        x, r = self.begin(b, x0)
        z, product, length = self.measured(r)
        whole = length if x0 is None else self.dots((b, b))[0]
        small = jnp.maximum(self.tol**2 * whole, self.atol**2)
        like = jax.tree.leaves(b)[0].dtype

        def more(state: Any) -> Any:
            *_, length, step = state
            return (length > small) & (step < self.most)

        def step(state: Any) -> Any:
            x, r, p, product, _, step = state
            along = self.apply(p)
            far = (product / self.dots((p, along))[0]).astype(like)
            x, r = plus(x, p, far), plus(r, along, -far)
            z, after, length = self.measured(r)
            return x, r, plus(z, p, (after / product).astype(like)), after, length, step + 1

        x, *_, count = lax.while_loop(more, step, (x, r, z, product, length, jnp.int32(0)))
        return x, typed(count, varying(b))  # JAX wants all results of a solve to be of one type
