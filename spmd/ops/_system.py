"""What the solvers of linear systems share: the right side, read and checked, and how its vector is divided."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd._jaxprs.traces import FlatProgram
from spmd.comm import _lax
from spmd.comm._call import Call, open_call
from spmd.errors import SizeError
from spmd.language import Layout
from spmd.ops._reduce import plain_dims

Apply = Callable[[Any], Any]


@dataclass(frozen=True)
class System:
    """A call of a solver.

    Attributes:
      call: The call.
      calls: The same for each array of the right side, which has its own sizes.
      apply: The function; see `_held`.
      precondition: The same, or None.
      b: The right side, an array or a pytree of arrays, with the type that a solution has: it varies wherever what the
        functions return does.
      x0: Where the steps begin, typed alike, or None.
      axes: The mesh axes that divide the vector. None if each device has it whole.
      size: How many elements the whole vector has.
      tol: The length of the residual at the end, in units of that of the right side.
      atol: The same, as a number.
      maxiter: The largest number of steps, if the caller says it.
    """

    call: Call
    calls: tuple[Call, ...]
    apply: Apply
    precondition: Apply | None
    b: Any
    x0: Any
    axes: tuple[str, ...]
    size: int
    tol: float = 1e-5
    atol: float = 0.0
    maxiter: int | None = None

    @property
    def most(self) -> int:
        """Return the largest number of steps."""
        return 10 * self.size if self.maxiter is None else self.maxiter

    def run(self, b: Any, x0: Any) -> tuple[Any, tuple[Any, ...]]:
        """The solution, and numbers that all devices have alike: what a solver does."""
        raise NotImplementedError

    def begin(self, b: Any, x0: Any) -> tuple[Any, Any]:
        """Return where the steps begin, typed as the solution, and the residual there."""
        if x0 is None:
            return typed(jax.tree.map(jnp.zeros_like, b), varying(b)), b
        return typed(jax.tree.map(jnp.asarray, x0), varying(b)), plus(b, self.apply(x0), -1)

    def solved(self, transposed: Callable[[Apply, Any], Any], **how: Any) -> tuple[Any, ...]:
        """The results of the call, with the gradient of the solution."""
        with self.call.scope():
            steps = lambda _, b: self.run(b, self.x0)
            found: Any = lax.custom_linear_solve(self.apply, self.b, steps, transposed, has_aux=True, **how)
            x, numbers = found
            return self.vector(x), *map(self.scalar, numbers)

    def vector(self, x: Any) -> Any:
        """A vector like the right side, as a result."""
        leaves, tree = jax.tree.flatten(x)
        return tree.unflatten([own.result(x, own.src) for own, x in zip(self.calls, leaves, strict=True)])

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
    solver: type[System] = System,
    **how: Any,
) -> System:
    """Read a call. `how` is what only this solver is told."""
    example = f'{name}(apply, b, "x/a y")'
    call = open_call(f"linalg.{name}", layout, names, arrays=(b,), arrow=False, example=example, shown=("b",))
    plain_dims(call, call.src, unnamed=True, literals=True)
    call.complete("the right side is complete: the steps divide by its length.")
    leaves = jax.tree.leaves(b)
    if not leaves:
        call.fail("b has at least one array.", got=[f"b: {b!r}"])
    calls = tuple(call.fork() for _ in leaves)
    operands = [own.operand(leaf) for own, leaf in zip(calls, leaves, strict=True)]
    kinds = sorted({str(operand.x.dtype) for operand in operands})
    if fault := next((kind for kind in kinds if not jnp.issubdtype(kind, jnp.inexact)), None):
        call.fail(f"{name} solves for real or complex numbers, and b is of {fault}.")
    if len(kinds) > 1:
        call.fail("b is one vector: all its arrays have one type.", got=[", ".join(kinds)])
    axes = tuple(axis for factor in operands[0].factors for axis in factor.axes) if call.frame.explicit else ()
    size = sum(math.prod(factor.size for factor in operand.factors) for operand in operands)
    b = _typed(call, {"apply(b)": apply, "precondition(b)": precondition}, jax.tree.map(jnp.asarray, b), x0)
    held = (_held(apply, b), precondition and _held(precondition, b))
    return solver(call, calls, *held, b, typed(x0, varying(b)), axes, size, **how)


def _held(fn: Apply, like: Any) -> Apply:
    """`fn`, closing over arrays that JAX types as varying where its argument does. It takes them as what they were.

    `lax.custom_linear_solve` gives all its arrays one type. A function in it that has taken one of them for another, as
    any does that works with an array that is whole, then fails in a `shard_map`, forward or backward.
    """
    program, axes = FlatProgram.of(fn, like), varying(like)
    consts = program.jaxpr.consts
    more = [tuple(axis for axis in axes if axis not in _compat.varying_axes(x)) for x in consts]
    less = [tuple(axis for axis in _compat.varying_axes(x) if axis not in axes) for x in consts]
    alike = zip(consts, more, less, strict=True)
    held = [_lax.retype(_compat.pvary(jnp.asarray(x), added), hidden, "hidden") for x, added, hidden in alike]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # so that a transpose keeps the arrays, not their other types
    def run(held: Any, x: Any) -> Any:
        were = zip(held, more, less, strict=True)
        again = [_lax.to_invarying(_lax.retype(one, hidden, "shown"), added) for one, added, hidden in were]
        return program.given(again)(x)

    return functools.partial(run, held)


def _typed(call: Call, functions: Mapping[str, Apply | None], b: Any, x0: Any) -> Any:
    made = {name: jax.eval_shape(fn, b) for name, fn in functions.items() if fn is not None}
    for name, y in (made if x0 is None else made | {"x0": x0}).items():
        if jax.tree.structure(y) != jax.tree.structure(b):
            got = [f"{name}: {jax.tree.structure(y)}", f"b: {jax.tree.structure(b)}"]
            call.fail(f"{name} has the structure of b.", got=got)
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


# --- `cg`: the solution of a linear system by conjugate gradients, of vectors that are divided over devices -----------


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
    how = {"tol": tol, "atol": atol, "maxiter": maxiter}
    known = system("cg", layout, b, apply, precondition, x0, names, _Conjugate, **how)

    def transposed(_: Apply, b: Any) -> tuple[Any, Any]:  # of a Hermitian function: its conjugate
        x, count = known.run(jax.tree.map(jnp.conj, b), None)
        return jax.tree.map(jnp.conj, x), count

    x, count = known.solved(transposed, symmetric=not any(map(jnp.iscomplexobj, jax.tree.leaves(b))))
    return x, count


class _Conjugate(System):
    """The steps of `cg`, with inner products of whole vectors."""

    def dots(self, *pairs: tuple[Any, Any]) -> list[Any]:
        """The inner products, which are real, by one sum over the devices."""
        return list(_lax.psum(jnp.stack([inner(x, y).real for x, y in pairs]), self.axes))

    def measured(self, r: Any) -> tuple[Any, Any, Any]:
        """Return what the preconditioner makes of a residual, its product with it, and the residual's own length
        squared."""
        if self.precondition is None:
            [length] = self.dots((r, r))
            return r, length, length
        z = self.precondition(r)
        return z, *self.dots((r, z), (r, r))

    def run(self, b: Any, x0: Any) -> tuple[Any, tuple[Any, ...]]:
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
        return x, typed((count,), varying(b))  # JAX wants all results of a solve to be of one type


# --- `gmres`: the solution of any linear system by generalised minimal residuals, of vectors divided over devices -----


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
    how = {"tol": tol, "atol": atol, "maxiter": maxiter, "restart": restart}
    known = system("gmres", layout, b, apply, precondition, x0, names, _Restarted, **how)
    if restart < 1:
        got = [f"restart={restart}"]
        known.call.fail("gmres takes at least one step before it restarts.", got=got, error=SizeError)

    def transposed(apply: Apply, b: Any) -> tuple[Any, Any]:
        return replace(known, apply=apply, precondition=_transposed(known.precondition, b)).run(b, None)

    x, count, length = known.solved(transposed)
    return x, count, length


def _transposed(fn: Apply | None, like: Any) -> Apply | None:
    """The transpose of a linear function: a preconditioner of a transposed system."""
    if fn is None:
        return None
    pull = jax.linear_transpose(fn, like)
    return lambda x: pull(x)[0]


@dataclass(frozen=True)
class _Restarted(System):
    """The steps of `gmres`, with inner products of whole vectors."""

    restart: int = 20

    def length(self, r: Any) -> Any:
        """The length of a vector."""
        return jnp.sqrt(_lax.psum(inner(r, r).real, self.axes))

    def close_to_inverse(self, x: Any) -> Any:
        return x if self.precondition is None else self.precondition(x)

    def run(self, b: Any, x0: Any) -> tuple[Any, tuple[Any, ...]]:
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
        """Return how far to go from where the residual is r, by the best of `restart` directions, and the steps till
        then.

        Column k of the Hessenberg matrix is turned into one of a triangle as soon as it is known: `turn` is the product
        of the rotations, and its first column says how long the residual is.
        """
        m, dtype = max(1, min(self.restart, self.size)), jax.tree.leaves(r)[0].dtype
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
        """Return what is left of w without its parts along the vectors, those parts, and the square of w's length
        before."""
        both = jax.tree.map(lambda every, one: jnp.concatenate([every, one[None]]), vectors, w)
        products = _lax.psum(jax.vmap(inner, (0, None))(both, w), self.axes)
        return plus(w, _combined(products[:-1], vectors), -1), products[:-1], products[-1].real


def _combined(weights: Any, vectors: Any) -> Any:
    return jax.tree.map(lambda every: jnp.tensordot(weights, every, 1, precision=lax.Precision.HIGHEST), vectors)


def _noise(x: Any) -> float:
    """Return what is left of a number of size 1 that ought to be nothing."""
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
