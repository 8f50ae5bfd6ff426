"""Random bodies of a `shard_map`: chains of moves that mean the same on every mesh, over all that the checker knows.

A move takes values of a pool and adds one, of which it says how it lies. A right move says so truly. A wrong one is a
mistake that somebody could make, and says what was meant. So a body of right moves is a right program, and one with a
wrong move usually is not. `truth.py` compares what the checker infers with what the devices hold.

A body is traced twice, on its mesh and on a mesh of ones, by the same choices. Whatever it asks of sizes it asks of
`Body`, so that both traces have the same equations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import spmd
from tests.checker.harness import mark
from tests.checker.random_functions import (
    ALONG,
    ALONG_LINEAR,
    CURVED,
    CURVED_PAIRS,
    LINEAR,
    LINEAR_PAIRS,
    MATRICES,
    REDUCERS,
)
from tests.sampler import Choices

Axes = tuple[str, ...]
Dim = tuple[tuple[int, Axes], ...]  # whole sizes, and the axes that divide each, as nested factors
LARGEST = 6000  # elements of a whole array
STEPS = 6
OWN_SIZE = "own size"


class Lies(NamedTuple):
    """How a value really lies: the factors of each dimension, and the axes along which it is a term of a sum."""

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()

    @property
    def held(self) -> list[str]:
        """All its axes; a value that lies somehow has each of them once."""
        return [*self.partial, *(a for dim in self.dims for a in axes_of(dim))]

    @property
    def size(self) -> int:
        return math.prod(map(size_of, self.dims))

    def put(self, d: int, *dims: Dim, partial: frozenset[str] | None = None) -> Lies:
        """The same with other dimensions in place of one."""
        return Lies((*self.dims[:d], *dims, *self.dims[d + 1 :]), self.partial if partial is None else partial)

    @property
    def text(self) -> str:
        """A layout that says so, where strings can."""
        leading = all(not axes or all(a for _, a in dim[:i]) for dim in self.dims for i, (_, axes) in enumerate(dim))
        marks = f" {{U:{','.join(sorted(self.partial))}}}" if self.partial else ""
        return str(self) if leading else f"...{marks}"

    def __str__(self) -> str:
        words = [" ".join(f"f{i}_{j}/" + "/".join(a) if a else f"f{i}_{j}" for j, (_, a) in enumerate(dim))
                 for i, dim in enumerate(self.dims)]  # fmt: skip
        words = [f"({word})" if len(dim) > 1 else word for word, dim in zip(words, self.dims, strict=True)]
        marks = [f"{{U:{','.join(sorted(self.partial))}}}"] if self.partial else []
        return " ".join([*words, *marks]) or "scalar"


def axes_of(dim: Dim) -> Axes:
    return tuple(a for _, axes in dim for a in axes)


def size_of(dim: Dim) -> int:
    return math.prod(n for n, _ in dim)


def whole(n: int) -> Dim:
    return ((n, ()),)


class Value(NamedTuple):
    x: Any
    lies: Lies


class Cut(NamedTuple):
    """A value, a dimension of it, and a mesh axis that does not divide it yet.

    Attributes:
      v: The value.
      d: The dimension.
      axis: The axis, which can be the innermost that divides the dimension.
      size: Elements of a block.
      lies: How the value lies when it is cut so.
    """

    v: Value
    d: int
    axis: str
    size: int
    lies: Lies


class Body:
    """One trace of a body.

    Args:
      rng: The choices.
      mesh: The sizes of the axes that the choices look at.
      here: Their sizes in this trace: the same, or ones.
    """

    def __init__(self, rng: Choices, mesh: Mapping[str, int], here: Mapping[str, int]) -> None:
        self.rng, self.mesh, self.here = rng, mesh, here
        self.pool: list[Value] = []

    def count(self, axes: Sequence[str]) -> int:
        """Over how many devices these axes divide here."""
        return math.prod(self.here[a] for a in axes)

    def parts(self, axes: Sequence[str]) -> int:
        """Over how many they divide on the mesh of the choices."""
        return math.prod(self.mesh[a] for a in axes)

    def some(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options) if options else None

    def chance(self, parts: int) -> bool:
        return self.rng.below(parts) == parts - 1

    def value(self, wanted: Callable[[Lies], bool] = lambda lies: True) -> Value | None:
        """A value that lies as wanted; the last ones are drawn more often."""
        fitting = [v for v in self.pool if wanted(v.lies)]
        return None if not fitting else fitting[-1] if self.chance(2) else self.some(fitting)

    def dim(self, lies: Lies, wanted: Callable[[Dim], bool] = lambda dim: True) -> int | None:
        """A dimension that is not nested, and as wanted."""
        return self.some([d for d, dim in enumerate(lies.dims) if len(dim) == 1 and wanted(dim)])

    def free(self, lies: Lies) -> list[str]:
        return [a for a in self.mesh if a not in lies.held]

    def divisible(self, dim: Dim, axes: Sequence[str]) -> bool:
        """Whether these axes can divide a dimension, besides those that do."""
        return size_of(dim) % self.parts((*axes_of(dim), *axes)) == 0

    def cut(self, wanted: Callable[[Dim], bool] = lambda dim: True) -> Cut | None:
        """A dimension as wanted, of a value that is equal along an axis which could divide it."""
        v = self.value()
        axis, d = (self.some(self.free(v.lies)), self.dim(v.lies, wanted)) if v else (None, None)
        if not v or axis is None or d is None or not self.divisible(v.lies.dims[d], (axis,)):
            return None
        [(n, axes)] = v.lies.dims[d]
        return Cut(v, d, axis, v.x.shape[d] // self.here[axis], v.lies.put(d, ((n, (*axes, axis)),)))

    def index(self, axes: Sequence[str]) -> Any:
        """Which block of a dimension divided over these axes this device has."""
        at: Any = jnp.int32(0)
        for a in axes:
            at = at * self.here[a] + lax.axis_index(a)
        return at

    def positions(self, dim: Dim) -> Any:
        """Where the elements of a dimension that is not nested are in the whole."""
        [(n, axes)] = dim
        n //= self.count(axes)
        return jnp.arange(n, dtype=jnp.int32) + n * self.index(axes)

    def equal(self, v: Value) -> Any:
        """A number that all devices have, made from a complete value."""
        axes = tuple(a for a in self.mesh if a in v.lies.held)
        return lax.psum(v.x.sum(), axes) if axes else v.x.sum()

    def again(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same function. It makes the same choices each time that it is traced."""
        drawn: list[int] | None = None

        def run(*args: Any) -> Any:
            nonlocal drawn
            rng = self.rng
            before = len(rng.drawn)
            if drawn is not None:
                self.rng = Choices(rng.seed, drawn)
            out = fn(*args)
            drawn, self.rng = rng.drawn[before:] if drawn is None else drawn, rng
            return out

        return run

    def varying(self, x: Any) -> Any:
        missing = tuple(a for a in self.mesh if a not in jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x


Made = tuple[Any, Lies] | None
Move = Callable[[Body], Made]


def undivided(dim: Dim) -> bool:
    return not axes_of(dim)


def divided(dim: Dim) -> bool:
    return bool(axes_of(dim))


def complete(lies: Lies) -> bool:
    return not lies.partial


def anything(_: Any) -> bool:
    return True


def of_value(wanted: Callable[[Lies], bool]) -> Callable[[Callable[[Body, Value], Made]], Move]:
    """Make a move of `move(b, v)`, where `v` is a value that lies as wanted."""

    def decorate(move: Callable[[Body, Value], Made]) -> Move:
        @functools.wraps(move)
        def drawn(b: Body) -> Made:
            v = b.value(wanted)
            return v and move(b, v)

        return drawn

    return decorate


def of_dim(
    wanted: Callable[[Dim], bool], of: Callable[[Lies], bool] = anything
) -> Callable[[Callable[[Body, Value, int], Made]], Move]:
    """Make a move of `move(b, v, d)`, where `d` is a dimension as wanted of a value that lies so."""

    def decorate(move: Callable[[Body, Value, int], Made]) -> Move:
        @functools.wraps(move)
        def drawn(b: Body) -> Made:
            v = b.value(of)
            d = v and b.dim(v.lies, wanted)
            return None if not v or d is None else move(b, v, d)

        return drawn

    return decorate


def of_own_size(move: Move) -> Move:
    """A move whose equations ask for the sizes of the mesh, so that on one device they give something else."""

    @functools.wraps(move)
    def named(b: Body) -> Made:
        with jax.named_scope(OWN_SIZE):
            made = move(b)
            return made and (lax.optimization_barrier(made[0]), made[1])  # some give the operand itself

    return named


# --- right moves: elementwise ---------------------------------------------------------------------------------


def curved(b: Body) -> Made:
    v = b.value(complete)
    return v and (b.some(CURVED)(v.x), v.lies)


def linear(b: Body) -> Made:
    v = b.value()
    return v and (b.some(LINEAR)(v.x), v.lies)


def paired(b: Body) -> Made:
    """Two values that lie alike."""
    v = b.value()
    other = v and b.some([u for u in b.pool if u.lies == v.lies])
    return v and (b.some(LINEAR_PAIRS if v.lies.partial else LINEAR_PAIRS + CURVED_PAIRS)(v.x, other.x), v.lies)


def broadcast_onto(b: Body, u: Value, lies: Lies) -> Any:
    """A value whose dimensions are among those of another one, as that has them; None if they are not."""
    places, rest = [], list(enumerate(lies.dims))
    for dim in u.lies.dims:
        while rest and rest[0][1] != dim:
            rest.pop(0)
        if not rest:
            return None
        places.append(rest.pop(0)[0])
    shape = [math.prod(n // b.count(axes) for n, axes in dim) for dim in lies.dims]
    return lax.broadcast_in_dim(u.x, shape, places)


def scaled(b: Body) -> Made:
    """A product with a complete value of as many dimensions or fewer."""
    v, u = b.value(), b.value(complete)
    if not v or not u:
        return None
    wide = broadcast_onto(b, u, v.lies)
    return None if wide is None else (b.some([lax.mul, lambda x, y: x / (2.5 + lax.sin(y))])(v.x, wide), v.lies)


@of_value(anything)
def selected(b: Body, v: Value) -> Made:
    same = [u for u in b.pool if u.lies == v.lies]
    plain = [u for u in b.pool if u.lies.dims == v.lies.dims and not u.lies.partial]
    u, mask = b.some(same), b.some(plain)
    if b.chance(2) or not mask:
        return jnp.where(mask_of(b, v.lies) if b.chance(2) else jnp.bool_(True), v.x, u.x), v.lies
    return jnp.where(mask.x > 0.1, v.x, u.x), v.lies


def mask_of(b: Body, lies: Lies) -> Any:
    """True at every third place of the whole, along one dimension."""
    d = b.dim(lies)
    if d is None or set(axes_of(lies.dims[d])) & lies.partial:
        return jnp.bool_(True)
    at = b.positions(lies.dims[d]) % 3 == 0
    shape = [math.prod(n // b.count(axes) for n, axes in dim) for dim in lies.dims]
    return lax.broadcast_in_dim(at, shape, (d,))


@of_dim(anything, of=complete)
def placed(b: Body, v: Value, d: int) -> Made:
    """Positions in the whole, added."""
    at = 0.1 * b.positions(v.lies.dims[d]).astype(jnp.float32)
    return v.x + lax.broadcast_in_dim(at, v.x.shape, (d,)), v.lies


# --- right moves: shapes ----------------------------------------------------------------------------------------


@of_value(lambda lies: len(lies.dims) > 1)
def transposed(b: Body, v: Value) -> Made:
    order = [int(d) for d in b.rng.permutation(len(v.lies.dims))]
    return v.x.transpose(order), Lies(tuple(v.lies.dims[d] for d in order), v.lies.partial)


@of_value(lambda lies: len(lies.dims) > 1)
def merged(b: Body, v: Value) -> Made:
    d = b.rng.below(len(v.lies.dims) - 1)
    shape = (*v.x.shape[:d], v.x.shape[d] * v.x.shape[d + 1], *v.x.shape[d + 2 :])
    dims = (*v.lies.dims[:d], (*v.lies.dims[d], *v.lies.dims[d + 1]), *v.lies.dims[d + 2 :])
    return v.x.reshape(shape), Lies(dims, v.lies.partial)


@of_value(lambda lies: any(len(dim) > 1 for dim in lies.dims))
def unmerged(b: Body, v: Value) -> Made:
    d = b.some([d for d, dim in enumerate(v.lies.dims) if len(dim) > 1])
    factors = v.lies.dims[d]
    here = [n // b.count(axes) for n, axes in factors]
    shape = (*v.x.shape[:d], *here, *v.x.shape[d + 1 :])
    return v.x.reshape(shape), v.lies.put(d, *((factor,) for factor in factors))


@of_dim(lambda dim: size_of(dim) > 1)
def cut_in_two(b: Body, v: Value, d: int) -> Made:
    """One dimension as two; the axes stay with the first."""
    [(n, axes)] = v.lies.dims[d]
    first = b.some([k for k in range(2, n) if n % k == 0 and k % b.parts(axes) == 0])
    if not first:
        return None
    here = (first // b.count(axes), n // first)
    return v.x.reshape(*v.x.shape[:d], *here, *v.x.shape[d + 1 :]), v.lies.put(d, ((first, axes),), whole(n // first))


@of_value(lambda lies: len(lies.dims) < 4)
def widened(b: Body, v: Value) -> Made:
    """A new dimension, constant."""
    d, n = b.rng.below(len(v.lies.dims) + 1), b.some([1, 2, 3])
    dims = (*v.lies.dims[:d], whole(n), *v.lies.dims[d:])
    lies = Lies(dims, v.lies.partial)
    return None if lies.size > LARGEST else (jnp.repeat(jnp.expand_dims(v.x, d), n, d), lies)


@of_value(lambda lies: any(dim == whole(1) for dim in lies.dims))
def narrowed(b: Body, v: Value) -> Made:
    """A dimension of one element goes."""
    d = b.some([d for d, dim in enumerate(v.lies.dims) if dim == whole(1)])
    return jnp.squeeze(v.x, d), v.lies.put(d)


def repeated(b: Body) -> Made:
    """A dimension that is not divided, longer: tiled, stacked, joined, padded."""
    v = b.value()
    d = v and b.dim(v.lies, undivided)
    if d is None or v.lies.size > LARGEST // 2:
        return None
    n = size_of(v.lies.dims[d])
    tile = lambda x: jnp.tile(x, [2 if i == d else 1 for i in range(x.ndim)])
    join = lambda x: jnp.concatenate([x, 2.0 * x], d)
    stack = lambda x: jnp.stack([x, -x], d).reshape(*x.shape[:d], 2 * n, *x.shape[d + 1 :])
    pad = lambda x: jnp.pad(x, [(1, n - 1) if i == d else (0, 0) for i in range(x.ndim)])
    rows = lambda x: jnp.stack([*jnp.unstack(x, axis=d), *jnp.unstack(-x, axis=d)], axis=d)
    return b.some([tile, join, stack, pad, rows])(v.x), v.lies.put(d, whole(2 * n))


@of_dim(anything, of=lambda lies: lies.size <= LARGEST // 2)
def tiled_block(b: Body, v: Value, d: int) -> Made:
    """Copies of a divided dimension one after another: nested factors."""
    return jnp.tile(v.x, [2 if i == d else 1 for i in range(v.x.ndim)]), v.lies.put(d, ((2, ()), *v.lies.dims[d]))


@of_dim(undivided)
def along(b: Body, v: Value, d: int) -> Made:
    return b.some(ALONG_LINEAR if v.lies.partial else ALONG_LINEAR + ALONG)(v.x, d), v.lies


def every_second(b: Body) -> Made:
    """Every second element of a dimension, where each block has as many."""
    v = b.value()
    d = v and b.dim(v.lies, lambda dim: size_of(dim) % (2 * b.parts(axes_of(dim))) == 0)
    if d is None:
        return None
    [(n, axes)] = v.lies.dims[d]
    cut = (*[slice(None)] * d, slice(b.some([0, 1]), None, 2))
    return v.x[cut], v.lies.put(d, ((n // 2, axes),))


def matrices(b: Body) -> Made:
    """Linear algebra of the last two dimensions."""
    fits = lambda lies: complete(lies) and len(lies.dims) > 1 and all(map(undivided, lies.dims[-2:]))
    v = b.value(fits)
    if not v:
        return None
    x, fn = v.x, b.some(MATRICES)
    n = x.shape[-2]
    square = jnp.matmul(x, jnp.swapaxes(x, -1, -2)) * 0.1 + jnp.broadcast_to(5.0 * jnp.eye(n), (*x.shape[:-1], n))
    out = fn(square, x)
    return None if out is None else (lax.sin(out), v.lies.put(len(v.lies.dims) - 1))


# --- right moves: sums and products -------------------------------------------------------------------------------


@of_value(lambda lies: bool(lies.dims))
def summed(b: Body, v: Value) -> Made:
    d = b.rng.below(len(v.lies.dims))
    dim = v.lies.dims[d]
    return lax.reduce_sum(v.x, (d,)) / size_of(dim), v.lies.put(d, partial=v.lies.partial | {*axes_of(dim)})


def reduced(b: Body) -> Made:
    v = b.value(complete)
    d = v and b.dim(v.lies, undivided)
    return None if d is None else (b.some(REDUCERS)(v.x, d).astype(jnp.float32), v.lies.put(d))


@of_value(lambda lies: complete(lies) and bool(lies.dims))
def extreme(b: Body, v: Value) -> Made:
    """The largest or smallest of a divided dimension, and whether any or all are positive."""
    d = b.rng.below(len(v.lies.dims))
    axes, flag = axes_of(v.lies.dims[d]), lambda x: x.astype(jnp.int32)
    found, finish = b.some(
        [
            (lambda x: x.max(d), lax.pmax),
            (lambda x: x.min(d), lax.pmin),
            (lambda x: flag((x > 0.3).any(d)), lax.pmax),
            (lambda x: flag((x > -0.3).all(d)), lax.pmin),
        ]
    )
    out = found(v.x)
    return (finish(out, axes) if axes else out).astype(jnp.float32), v.lies.put(d)


def product(b: Body) -> Made:
    """`dot_general` over some of the dimensions that two values share, others being a batch."""
    v, u = b.value(), b.value()
    if not v or not u:
        return None
    shared = [(i, u.lies.dims.index(dim)) for i, dim in enumerate(v.lies.dims) if dim in u.lies.dims]
    shared = [(i, j) for n, (i, j) in enumerate(shared) if j not in [k for _, k in shared[:n]]]
    contract = b.rng.sample(shared, b.rng.below(min(2, len(shared)) + 1))
    batch = [pair for pair in shared if pair not in contract and (divided(v.lies.dims[pair[0]]) or b.chance(2))]
    left = [i for i in range(len(v.lies.dims)) if i not in [k for k, _ in contract + batch]]
    right = [j for j in range(len(u.lies.dims)) if j not in [k for _, k in contract + batch]]
    dims = [v.lies.dims[i] for i, _ in batch] + [v.lies.dims[i] for i in left] + [u.lies.dims[j] for j in right]
    gone = [a for i, _ in contract for a in axes_of(v.lies.dims[i])]
    lies = Lies(tuple(dims), v.lies.partial | u.lies.partial | {*gone})
    held = [*v.lies.partial, *u.lies.partial, *gone, *(a for dim in dims for a in axes_of(dim))]
    if lies.size > LARGEST or len(dims) > 4 or len(held) > len({*held}):
        return None
    numbers = tuple(([i for i, _ in pairs], [j for _, j in pairs]) for pairs in (contract, batch))
    count = math.prod(size_of(v.lies.dims[i]) for i, _ in contract)
    return lax.dot_general(v.x, u.x, numbers) / math.sqrt(count), lies


def convolved(b: Body) -> Made:
    """Rows of windows: features are contracted with those of another value."""
    fits = lambda lies: len(lies.dims) == 3 and undivided(lies.dims[2]) and len(lies.dims[2]) == 1
    v, u = b.value(fits), b.value(lambda lies: len(lies.dims) == 2)
    if not v or not u or len(v.lies.dims[1]) > 1:
        return None
    groups = b.chance(4)
    window = jnp.asarray([0.5, 1.0, -0.25], jnp.float32)[: b.some([3, 1])]
    how = {"window_strides": (1,), "padding": "SAME"}
    if groups:
        kernel = jnp.tile(window, (v.x.shape[1], 1, 1))
        out = lax.conv_general_dilated(v.x, b.varying(kernel), feature_group_count=v.x.shape[1], **how)
        return out, v.lies
    if u.lies.dims[1] != v.lies.dims[1]:
        return None
    gone = axes_of(v.lies.dims[1])
    lies = Lies((v.lies.dims[0], u.lies.dims[0], v.lies.dims[2]), v.lies.partial | u.lies.partial | {*gone})
    held = [*v.lies.partial, *u.lies.partial, *gone, *(a for dim in lies.dims for a in axes_of(dim))]
    if lies.size > LARGEST or len(held) > len({*held}):
        return None
    kernel = u.x[:, :, None] * jnp.broadcast_to(window, (*u.x.shape, len(window)))
    return lax.conv_general_dilated(v.x, kernel, **how) / size_of(v.lies.dims[1]), lies


# --- right moves: indices -----------------------------------------------------------------------------------------


def own_block(b: Body) -> Made:
    """A slice that starts where this device's block does."""
    cut = b.cut()
    if not cut:
        return None
    how = b.some([lax.dynamic_slice_in_dim, dynamic_index])
    return how(cut.v.x, lax.axis_index(cut.axis) * cut.size, cut.size, cut.d), cut.lies


def dynamic_index(x: Any, start: Any, size: int, d: int) -> Any:
    return jnp.take(x, start + jnp.arange(size, dtype=jnp.int32), axis=d, mode="clip")


def looked_up(b: Body) -> Made:
    """Rows of a table, which data choose."""
    v, u = b.value(complete), b.value(lambda lies: bool(lies.dims) and lies.dims[0] == whole(size_of(lies.dims[0])))
    if not v or not u:
        return None
    lies = Lies((*v.lies.dims, *u.lies.dims[1:]), u.lies.partial)
    if lies.size > LARGEST or len(lies.dims) > 4 or len(lies.held) > len({*lies.held}):
        return None
    rows = (jnp.abs(lax.sin(v.x)) * size_of(u.lies.dims[0])).astype(jnp.int32)
    return jnp.take(u.x, rows, axis=0, mode=b.some(["clip", "fill"]), fill_value=0), lies


def looked_up_by_row(b: Body) -> Made:
    """Each row of a table by its own indices."""
    v = b.value(lambda lies: len(lies.dims) > 1 and lies.dims[1] == whole(size_of(lies.dims[1])))
    u = v and b.value(lambda lies: complete(lies) and lies.dims[:1] == v.lies.dims[:1])
    if not v or not u:
        return None
    lies = Lies((*u.lies.dims, *v.lies.dims[2:]), v.lies.partial)
    if lies.size > LARGEST or len(lies.dims) > 4 or len(lies.held) > len({*lies.held}):
        return None
    at = (jnp.abs(lax.sin(u.x)) * size_of(v.lies.dims[1])).astype(jnp.int32)
    return jax.vmap(lambda row, i: jnp.take(row, i, axis=0, mode="clip"))(v.x, at), lies


def at_a_place(b: Body) -> Made:
    """An element along a dimension that is not divided, where an equal number says; or another value there."""
    v, u = b.value(), b.value(complete)
    d = v and b.dim(v.lies, undivided)
    if d is None or not u:
        return None
    n = size_of(v.lies.dims[d])
    at = b.varying((jnp.abs(lax.sin(b.equal(u))) * n).astype(jnp.int32))
    row = lax.dynamic_slice_in_dim(v.x, at, 1, d)
    if b.chance(2):
        return lax.dynamic_update_slice_in_dim(v.x, 2.0 * row, jnp.int32(n // 2), d), v.lies
    return row, v.lies.put(d, whole(1))


def counted_by_row(b: Body) -> Made:
    """Sums by keys, for each row by itself."""
    v = b.value(lambda lies: complete(lies) and len(lies.dims) == 2)
    u = v and b.value(lambda lies: lies.dims == v.lies.dims)
    if not v or not u:
        return None
    keys = (jnp.abs(lax.sin(v.x)) * 5).astype(jnp.int32)
    sums = jax.vmap(lambda row, at: b.varying(jnp.zeros(5, jnp.float32)).at[at].add(row))(u.x, keys)
    return sums, Lies((v.lies.dims[0], whole(5)), u.lies.partial | {*axes_of(v.lies.dims[1])})


def counted(b: Body) -> Made:
    """Sums by keys that data choose: what the devices add up are terms of a sum."""
    v = b.value(lambda lies: complete(lies) and len(lies.dims) == 1)
    u = v and b.value(lambda lies: complete(lies) and lies.dims[:1] == v.lies.dims)
    if not u:
        return None
    keys = (jnp.abs(lax.sin(v.x)) * 7).astype(jnp.int32)
    zeros = b.varying(jnp.zeros((7, *u.x.shape[1:]), jnp.float32))
    return zeros.at[keys].add(u.x), Lies((whole(7), *u.lies.dims[1:]), frozenset(axes_of(v.lies.dims[0])))


def written(b: Body) -> Made:
    """Some rows of a dimension that is not divided are written over, or added to."""
    v = b.value()
    d = v and b.dim(v.lies, lambda dim: undivided(dim) and size_of(dim) > 1)
    u = None if d is None else b.some([u for u in b.pool if u.lies == v.lies.put(d)])
    if not u:
        return None
    at = (*[slice(None)] * d, b.some([0, 1]))
    options = [lambda: v.x.at[at].add(u.x), lambda: v.x.at[at].set(u.x), lambda: v.x.at[at].subtract(u.x)]
    options += [lambda: lax.dynamic_update_slice_in_dim(v.x, jnp.expand_dims(u.x, d), 1, d)]
    if complete(v.lies):
        options += [lambda: v.x.at[at].multiply(u.x), lambda: v.x.at[at].min(u.x), lambda: v.x.at[at].max(u.x)]
    return b.some(options)(), v.lies


@of_dim(divided)
def overwritten(b: Body, v: Value, d: int) -> Made:
    """A block of zeros gets this device's block: terms of a sum that is the whole."""
    [(n, axes)] = v.lies.dims[d]
    shape = (*v.x.shape[:d], v.x.shape[d] * b.count(axes[-1:]), *v.x.shape[d + 1 :])
    start = lax.axis_index(axes[-1]) * v.x.shape[d]
    out = lax.dynamic_update_slice_in_dim(b.varying(jnp.zeros(shape, jnp.float32)), v.x, start, d)
    return out, v.lies.put(d, ((n, axes[:-1]),), partial=v.lies.partial | {axes[-1]})


# --- right moves: collectives ---------------------------------------------------------------------------------------


@of_value(lambda lies: bool(lies.partial))
def completed(b: Body, v: Value) -> Made:
    axes = tuple(a for a in b.mesh if a in v.lies.partial)
    axes = axes if b.chance(2) else axes[:1]
    return lax.psum(v.x, axes), Lies(v.lies.dims, v.lies.partial - {*axes})


@of_dim(anything, of=lambda lies: bool(lies.partial))
def scattered(b: Body, v: Value, d: int) -> Made:
    over = several(b, [a for a in b.mesh if a in v.lies.partial])
    [(n, axes)] = v.lies.dims[d]
    if not b.divisible(v.lies.dims[d], over):
        return None
    out = lax.psum_scatter(v.x, over, scatter_dimension=d, tiled=True)
    return out, v.lies.put(d, ((n, (*axes, *over)),), partial=v.lies.partial - {*over})


def several(b: Body, axes: Sequence[str]) -> Axes:
    """All of these axes, or one."""
    return tuple(axes) if b.chance(2) else (b.some(axes),)


@of_dim(divided)
def gathered(b: Body, v: Value, d: int) -> Made:
    [(n, axes)] = v.lies.dims[d]
    over = axes if b.chance(2) else axes[-1:]
    to = b.some(["varying", "invarying"])
    return lax.all_gather(v.x, over, axis=d, tiled=True, to=to), v.lies.put(d, ((n, axes[: -len(over)]),))


def exchanged(b: Body) -> Made:
    v = b.value()
    d = v and b.dim(v.lies, divided)
    e = None if d is None else b.some([e for e, dim in enumerate(v.lies.dims) if e != d and len(dim) == 1])
    if e is None:
        return None
    [(n, axes)], [(m, others)] = v.lies.dims[d], v.lies.dims[e]
    over = axes if b.chance(2) else axes[-1:]
    if not b.divisible(v.lies.dims[e], over):
        return None
    out = lax.all_to_all(v.x, over, e, d, tiled=True)
    return out, v.lies.put(d, ((n, axes[: -len(over)]),)).put(e, ((m, (*others, *over)),))


def ring(b: Body, *axes: str, up: int = 1) -> list[tuple[int, int]]:
    n = b.count(axes)
    return [(i, (i + up) % n) for i in range(n)]


@of_own_size
@of_dim(divided)
def rolled(b: Body, v: Value, d: int) -> Made:
    """A roll by one: the last element of each block goes to the next device."""
    axes, size = axes_of(v.lies.dims[d]), v.x.shape[d]
    last = lax.ppermute(lax.slice_in_dim(v.x, size - 1, size, axis=d), axes, ring(b, *axes))
    return jnp.concatenate([last, lax.slice_in_dim(v.x, 0, size - 1, axis=d)], d), v.lies


@of_own_size
@of_dim(divided)
def with_neighbours(b: Body, v: Value, d: int) -> Made:
    """Each element and those around it: both neighbours send the edges of their blocks."""
    axes, size = axes_of(v.lies.dims[d]), v.x.shape[d]
    most = size_of(v.lies.dims[d]) // b.parts(axes)  # the same margins on all meshes
    low, high = (min(most, 1 + b.rng.below(3)) for _ in range(2))
    before = lax.ppermute(lax.slice_in_dim(v.x, size - low, size, axis=d), axes, ring(b, *axes))
    after = lax.ppermute(lax.slice_in_dim(v.x, 0, high, axis=d), axes, ring(b, *axes, up=-1))
    wide = jnp.concatenate([before, v.x, after], d)
    taken = [b.rng.below(low + high + 1) for _ in range(2)]
    return sum(lax.slice_in_dim(wide, at, at + size, axis=d) for at in taken), v.lies


def passed_around(b: Body) -> Made:
    """What is equal along an axis stays so."""
    v = b.value()
    if not v or not b.free(v.lies):
        return None
    axes = several(b, b.free(v.lies))
    return lax.ppermute(v.x, axes, ring(b, *axes)), v.lies


@of_value(lambda lies: bool(lies.partial))
def ring_sum(b: Body, v: Value) -> Made:
    """A sum by as many steps of a ring as there are other devices."""
    axis = b.some([a for a in b.mesh if a in v.lies.partial])

    def once(carry: Any, _: Any) -> Any:
        total, moving = carry
        moving = lax.ppermute(moving, axis, ring(b, axis))
        return (total + moving, moving), None

    out = lax.scan(once, (v.x, v.x), None, length=b.here[axis] - 1)[0][0]
    return spmd.assert_equal(out, axis, "a ring adds all terms up"), Lies(v.lies.dims, v.lies.partial - {axis})


@of_own_size
@of_value(lambda lies: bool(lies.partial))
def listed(b: Body, v: Value) -> Made:
    """Terms of a sum, gathered along a dimension of their own, and added there."""
    axis = b.some([a for a in b.mesh if a in v.lies.partial])
    out = lax.all_gather(v.x, axis, axis=0)
    return out.sum(0), Lies(v.lies.dims, v.lies.partial - {axis})


@of_own_size
@of_value(lambda lies: complete(lies) and bool(lies.dims))
def averaged(b: Body, v: Value) -> Made:
    """A mean of the means of the blocks, by `pmean`."""
    d = b.rng.below(len(v.lies.dims))
    axes = axes_of(v.lies.dims[d])
    mean = v.x.mean(d)
    return (lax.pmean(mean, axes) if axes else mean), v.lies.put(d)


# --- right moves: control flow and derivatives ------------------------------------------------------------------


@of_value(lambda lies: bool(lies.dims))
def mapped(b: Body, v: Value) -> Made:
    """Row after row, and maybe within a row element after element: each by itself."""
    fn = b.some(LINEAR if v.lies.partial else CURVED)
    by_row = [lambda x: lax.map(fn, x), jax.vmap(fn), lambda x: lax.scan(lambda c, row: (c, fn(row)), 0, x)[1]]
    twice = lambda x: lax.map(lambda row: lax.map(fn, row), x)
    again = lambda x: lax.map(lambda row: lax.fori_loop(0, 2, lambda _, c: fn(c), row), x)
    return b.some(by_row + ([twice, again] if len(v.lies.dims) > 1 else []))(v.x), v.lies


@of_value(lambda lies: bool(lies.dims) and complete(lies))
def carried(b: Body, v: Value) -> Made:
    """A sum over rows, row by row, completed at once."""
    zero, axes = b.varying(jnp.zeros(v.x.shape[1:], jnp.float32)), axes_of(v.lies.dims[0])
    total = lax.scan(lambda c, row: (c + row, None), zero, v.x)[0] / size_of(v.lies.dims[0])
    return (lax.psum(total, axes) if axes else total), v.lies.put(0)


@of_value(lambda lies: complete(lies) and bool(lies.dims) and lies.dims[0] == whole(size_of(lies.dims[0])))
def recurrent(b: Body, v: Value) -> Made:
    """A recurrence along a dimension that is not divided."""
    step = lambda c, row: (c + 0.1 * lax.sin(c) + row, c - row)  # numbers that fade away would be ties
    start = b.varying(jnp.zeros(v.x.shape[1:], jnp.float32))
    return lax.scan(step, start, v.x, reverse=b.chance(2))[1], v.lies


@of_value(anything)
def looped(b: Body, v: Value) -> Made:
    """A `while` of a few rounds, or of as many as an equal value says."""
    fn = function_of(b, v)
    if b.chance(2) or not complete(v.lies):
        return lax.fori_loop(0, 2, lambda _, c: fn(c), v.x), v.lies
    total = b.varying(jnp.abs(lax.sin(b.equal(v))))
    test = lambda c: c[0] < 2.0
    return lax.while_loop(test, lambda c: (c[0] * 1.5 + 0.1, fn(c[1])), (total, v.x))[1], v.lies


def function_of(b: Body, v: Value) -> Any:
    """A function of single elements. It may need another value, which lies alike and is made outside of it."""
    u = b.some([u for u in b.pool if u.lies == v.lies])
    ones, pairs = (LINEAR, LINEAR_PAIRS) if v.lies.partial else (CURVED, LINEAR_PAIRS + CURVED_PAIRS)
    if b.chance(2):
        fn = b.some(pairs)
        return lambda x: fn(x, u.x)
    return b.some(ones)


@of_value(complete)
def settled(b: Body, v: Value) -> Made:
    """A `while` until a weight of the whole is small, which a collective in its test says."""
    test = lambda c: b.equal(Value(c[0] * lax.abs(c[1]), v.lies)) > 0.3
    once = lambda c: (c[0] * 0.5, c[1] + 0.3 * lax.sin(c[1]))  # those that come together would be ties
    return lax.while_loop(test, once, (b.varying(jnp.ones(())), lax.sin(v.x)))[1], v.lies


@of_value(lambda lies: complete(lies) and bool(lies.dims))
def until_each_is_large(b: Body, v: Value) -> Made:
    """After `vmap` each row of a `while` goes on for as long as it needs."""
    grow = lambda x: lax.while_loop(lambda c: c < 2.0, lambda c: c * 1.5 + 0.1, x)
    fn = grow
    for _ in v.lies.dims:
        fn = jax.vmap(fn)
    return fn(lax.abs(lax.sin(v.x))), v.lies


def decided(b: Body) -> Made:
    """A branch, chosen by a value that is equal everywhere."""
    v = b.value()
    u = v and b.some([u for u in b.pool if complete(u.lies)])
    if not u:
        return None
    total = b.equal(u)
    one, two = b.some(LINEAR), function_of(b, v)
    if b.chance(2):
        which = (jnp.abs(lax.sin(total)) * 3).astype(jnp.int32)
        return lax.switch(which, [one, two, lambda x: x], v.x), v.lies
    return lax.cond(total > 0.1, one, two, v.x), v.lies


@of_value(lambda lies: complete(lies) and bool(lies.dims) and len(lies.dims[0]) == 1)
def chosen_here(b: Body, v: Value) -> Made:
    """A branch that each device of a divided dimension chooses for itself, row by row by hand."""
    one, two = b.some(LINEAR), b.some(CURVED)
    return lax.map(lambda row: lax.cond(row.sum() > 0.1, one, two, row) if row.ndim == 0 else two(row), v.x), v.lies


def with_rule(fn: Any) -> Any:
    out = jax.custom_jvp(lambda x: fn(x))
    out.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return out


def with_backward(fn: Any) -> Any:
    out = jax.custom_vjp(lambda x: fn(x))
    out.defvjp(lambda x: (fn(x), None), lambda _, g: (g,))
    return out


CALLS: list[Callable[[Any], Any]] = [
    jax.jit,
    jax.checkpoint,
    with_rule,
    with_backward,
    lambda fn: lambda x: lax.custom_linear_solve(lambda y: 2.0 * y, fn(x), lambda _, y: 0.5 * y, symmetric=True),
    lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.everything_saveable),
    lambda fn: lambda x: checkpoint_name(fn(x), "kept"),
]


@of_value(anything)
def wrapped(b: Body, v: Value) -> Made:
    """Calls: remat, `jit`, rules of one's own, a solver."""
    return b.some(CALLS)(function_of(b, v))(v.x), v.lies


SMOOTH: list[Callable[[Any], Any]] = [lax.sin, jnp.tanh, lambda x: x * x, jax.nn.gelu]


def with_own_derivative(fn: Any) -> Any:
    """A rule that is written by hand, and true."""
    out = jax.custom_vjp(lambda x: fn(x))
    out.defvjp(lambda x: (fn(x), x), lambda x, g: jax.vjp(fn, x)[1](g))
    return out


# Ways to a function of single elements that derivatives go back on.
ROUTES: list[Callable[[Any], Any]] = [
    lambda fn: fn,
    jax.jit,
    jax.checkpoint,
    lambda fn: jax.checkpoint(fn, policy=jax.checkpoint_policies.everything_saveable),
    with_own_derivative,
    lambda fn: lambda x: lax.scan(lambda c, _: (fn(c) * 0.9, c), x, None, length=2)[0],
    lambda fn: lambda x: lax.scan(jax.checkpoint(lambda c, _: (fn(c) * 0.9, None)), x, None, length=2)[0],
    lambda fn: lambda x: lax.fori_loop(0, 2, lambda _, c: fn(c), x),
    lambda fn: lambda x: lax.map(fn, x) if x.ndim else fn(x),
    lambda fn: lambda x: jax.vmap(fn)(x) if x.ndim else fn(x),
    lambda fn: lambda x: lax.cond(jnp.bool_(True), fn, lambda x: 0.5 * x, x),
    lambda fn: lambda x: lax.switch(jnp.int32(1), [lambda x: x, jax.checkpoint(fn)], x),
    lambda fn: lambda x: lax.reduce_precision(fn(x), 8, 23),
]


@of_value(complete)
def derivative(b: Body, v: Value) -> Made:
    """Of a function of single elements, summed over all of them."""
    axes, fn = tuple(a for a in b.mesh if a in v.lies.held), b.some(ROUTES)(b.some(SMOOTH))
    if b.chance(2) and axes:
        return jax.grad(lambda x: lax.psum(fn(x).sum(), axes))(v.x), v.lies
    once = jax.grad(lambda x: fn(x).sum())
    return (jax.grad(lambda x: once(x).sum()) if b.chance(2) else once)(v.x), v.lies


def pulled_back(b: Body) -> Made:
    """What is linear in a cotangent or a tangent, which may be a term of a sum."""
    v = b.value(complete)
    u = v and b.some([u for u in b.pool if u.lies.dims == v.lies.dims])
    if not v or not u:
        return None
    route, fn = b.some(ROUTES), b.some(SMOOTH)
    if route is not with_own_derivative and b.chance(2):
        return jax.jvp(route(fn), (v.x,), (u.x,))[1], u.lies
    return jax.vjp(route(fn), v.x)[1](u.x)[0], u.lies


@of_dim(divided, of=lambda lies: complete(lies) and any(map(divided, lies.dims)))
def pulled_through_a_collective(b: Body, v: Value, d: int) -> Made:
    """The derivative of a collective: another one, which goes back."""
    axis, fn, size = axes_of(v.lies.dims[d])[-1], b.some(SMOOTH), v.x.shape[d]
    gather = lambda x, to: lax.all_gather(x, axis, axis=d, tiled=True, to=to)
    away = lambda x: lax.ppermute(x, axis, ring(b, axis))
    there = lambda x, pass_on: jax.vjp(pass_on, x)[1](fn(pass_on(x)))[0]

    def of_own_block(x: Any) -> Any:
        zeros, cotangent = jax.vjp(lambda x: gather(x, "varying"), x)
        own = lax.dynamic_update_slice_in_dim(0.0 * zeros, fn(x), lax.axis_index(axis) * size, d)
        return cotangent(own)[0]

    options = [
        lambda x: jax.grad(lambda x: fn(gather(x, "invarying")).sum())(x),
        of_own_block,
        lambda x: there(x, away),
    ]
    e = b.some([e for e, dim in enumerate(v.lies.dims) if e != d and len(dim) == 1 and b.divisible(dim, (axis,))])
    if e is not None:
        options.append(lambda x: there(x, lambda x: lax.all_to_all(x, axis, e, d, tiled=True)))
    return b.some(options)(v.x), v.lies


@of_value(lambda lies: bool(lies.partial))
def pulled_through_a_sum(b: Body, v: Value) -> Made:
    """The derivative with respect to a term of a sum, which all terms share."""
    axis, fn = b.some([a for a in b.mesh if a in v.lies.partial]), b.some(SMOOTH)
    lies = Lies(v.lies.dims, v.lies.partial - {axis})
    d = b.dim(v.lies, lambda dim: b.divisible(dim, (axis,)))
    if lies.partial:
        return None
    if d is not None and b.chance(2):
        scatter = lambda x: lax.psum_scatter(x, axis, scatter_dimension=d, tiled=True)
        return jax.grad(lambda x: fn(scatter(x)).sum())(v.x), lies
    return jax.grad(lambda x: fn(lax.psum(x, axis)).sum())(v.x), lies


def gradient_of_a_product(b: Body) -> Made:
    """With respect to a matrix that the rows of a divided dimension share: a partial sum."""
    v, u = b.value(lambda lies: len(lies.dims) == 2), b.value(lambda lies: len(lies.dims) == 2 and complete(lies))
    if not v or not u or v.lies.dims[0] != u.lies.dims[0]:
        return None
    lies = Lies((u.lies.dims[1], v.lies.dims[1]), v.lies.partial | {*axes_of(u.lies.dims[0])})
    held = [*axes_of(lies.dims[0]), *axes_of(lies.dims[1]), *v.lies.partial, *axes_of(u.lies.dims[0])]
    if lies.size > LARGEST or len(held) > len({*held}):
        return None
    zero = b.varying(jnp.zeros((u.x.shape[1], v.x.shape[1]), jnp.float32))
    [out] = jax.vjp(lambda w: u.x @ w, zero)[1](v.x)
    return out / size_of(u.lies.dims[0]), lies


@of_value(lambda lies: complete(lies) and all(map(undivided, lies.dims)))
def noisy(b: Body, v: Value) -> Made:
    """Noise where no axis divides: it is the same everywhere."""
    return v.x + noise(b, v.x.shape), v.lies


def noise(b: Body, shape: tuple[int, ...]) -> Any:
    return b.some(NOISE)(jax.random.key(3), shape)


NOISE: list[Callable[..., Any]] = [
    jax.random.normal,
    lambda key, shape: jax.random.uniform(jax.random.fold_in(key, 1), shape),
    lambda key, shape: jax.random.normal(jax.random.split(key, 2)[1], shape),
    lambda key, shape: jax.random.normal(jax.random.wrap_key_data(jax.random.key_data(key) + jnp.uint32(1)), shape),
    lambda key, shape: jax.random.normal(jax.random.key(jnp.int32(5)), shape),
]


# --- right moves: our own verbs -----------------------------------------------------------------------------------


@of_value(lambda lies: bool(lies.dims) and all(len(dim) == 1 for dim in lies.dims))
def verb(b: Body, v: Value) -> Made:
    """Changes of layout by strings."""
    options: list[tuple[Callable[..., Any], Lies]] = []
    for d, [(n, axes)] in enumerate(v.lies.dims):
        if axes:
            options.append((spmd.all_gather, v.lies.put(d, ((n, axes[:-1]),))))
        for a in b.free(v.lies):
            if n % b.parts((*axes, a)) == 0:
                options.append((spmd.split, v.lies.put(d, ((n, (*axes, a)),))))
                if complete(v.lies):
                    options.append((split_of_equal(a), v.lies.put(d, ((n, (*axes, a)),))))
        for a in v.lies.partial:
            if n % b.parts((*axes, a)) == 0:
                options.append((spmd.psum_scatter, v.lies.put(d, ((n, (*axes, a)),), partial=v.lies.partial - {a})))
    for a in sorted(v.lies.partial):
        options.append((spmd.psum, Lies(v.lies.dims, v.lies.partial - {a})))
    picked = b.some(options)
    return picked and (picked[0](v.x, f"{v.lies} -> {picked[1]}"), picked[1])


def split_of_equal(axis: str) -> Callable[..., Any]:
    """A block of what JAX types invarying."""
    return lambda x, pattern: spmd.split(lax.pmax(x, axis), pattern)


def relaid(b: Body) -> Made:
    """Any change of layout."""
    v = b.value(lambda lies: complete(lies) and bool(lies.dims) and all(len(dim) == 1 for dim in lies.dims))
    lies = v and moved(b, v.lies)
    return None if not v or lies == v.lies else (spmd.relayout(v.x, f"{v.lies} -> {lies}"), lies)


def moved(b: Body, lies: Lies) -> Lies:
    """The same axes, each dividing some dimension or none."""
    dims: list[Dim] = [whole(size_of(dim)) for dim in lies.dims]
    for axis in b.rng.sample(lies.held, len(lies.held)):
        d = b.rng.below(len(dims))
        [(n, axes)] = dims[d]
        if n % b.parts((*axes, axis)) == 0:
            dims[d] = ((n, (*axes, axis)),)
    return Lies(tuple(dims))


@of_value(lambda lies: complete(lies) and bool(lies.dims) and all(len(dim) == 1 for dim in lies.dims))
def along_by_strings(b: Body, v: Value) -> Made:
    """Operations along a dimension that may be divided."""
    d = b.rng.below(len(v.lies.dims))
    words = str(v.lies).split()
    text = " ".join(f"[{word}]" if i == d else word for i, word in enumerate(words))
    less = " ".join(words[:d] + words[d + 1 :]) or "scalar"
    kinds: list[tuple[Callable[[Any], Any], Lies]] = [
        (lambda x: spmd.softmax(x, text), v.lies),
        (lambda x: spmd.cumsum(x, text), v.lies),
        (lambda x: spmd.roll(x, text, 1), v.lies),
        (lambda x: spmd.reduce(x, f"{' '.join(words)} -> {less}", b.some(["sum", "mean", "max", "min", "logsumexp"])),
         v.lies.put(d)),
        (lambda x: spmd.argmax(x, text).astype(jnp.float32), v.lies.put(d)),
    ]  # fmt: skip
    run, lies = b.some(kinds)
    return run(v.x), lies


def contracted_by_strings(b: Body) -> Made:
    fits = lambda lies: complete(lies) and len(lies.dims) == 2 and all(len(dim) == 1 for dim in lies.dims)
    v, u = b.value(fits), b.value(fits)
    if not v or not u or v.lies.dims[1] != u.lies.dims[1]:
        return None
    (m, k), (n, _) = v.lies.dims, u.lies.dims
    if len({*axes_of(m), *axes_of(n)}) < len(axes_of(m) + axes_of(n)):
        return None
    word = lambda name, dim: "/".join((name, *axes_of(dim)))
    free = [a for a in axes_of(k) if a not in (*axes_of(m), *axes_of(n))]
    lies = Lies((m, n))
    if b.chance(2) and len(free) == 1 and size_of(m) % b.parts((*axes_of(m), *free)) == 0:
        lies = Lies((((size_of(m), (*axes_of(m), *free)),), n))
    text = f"{word('m', m)} {word('k', k)}, {word('n', n)} {word('k', k)} -> {word('m', lies.dims[0])} {word('n', n)}"
    return spmd.einsum(v.x, u.x, text) / size_of(k), lies


# --- right moves: other types of elements, and moves inside of others -------------------------------------------

KINDS: list[Callable[[Any], Any]] = [
    lambda x: x.astype(jnp.bfloat16),
    lambda x: (lax.sin(x) * 9.0).astype(jnp.int32),
    lambda x: (lax.sin(x) * 9.0).astype(jnp.int8),
    lambda x: lax.abs(lax.sin(x) * 9.0).astype(jnp.uint32),
    lambda x: x > 0.1,
    lambda x: lax.complex(x, 0.5 * x),
    lambda x: x.astype(jnp.float16),
]
ANY_KIND: tuple[Move, ...] = (
    transposed, merged, unmerged, cut_in_two, widened, narrowed, tiled_block, every_second, own_block, gathered,
    exchanged, rolled, passed_around,
)  # fmt: skip


def of_another_kind(b: Body) -> Made:
    """A move of whole numbers, truth values, complex numbers or short floats."""
    v, pool = b.value(complete), b.pool
    if not v:
        return None
    b.pool = [Value(b.some(KINDS)(v.x), v.lies)]
    made = b.some(ANY_KIND)(b)
    b.pool = pool
    if not made:
        return None
    x, lies = made
    return (lax.real(x) + 2.0 * lax.imag(x) if jnp.iscomplexobj(x) else x.astype(jnp.float32)), lies


@of_value(lambda lies: complete(lies) and bool(lies.dims))
def summed_as_whole_numbers(b: Body, v: Value) -> Made:
    """Counts, which are completed at once or later."""
    d = b.rng.below(len(v.lies.dims))
    axes, count = axes_of(v.lies.dims[d]), lax.reduce_sum((v.x > 0.1).astype(jnp.int32), (d,))
    if b.chance(2) and axes:
        return lax.psum(count, axes).astype(jnp.float32), v.lies.put(d)
    return count.astype(jnp.float32), v.lies.put(d, partial=frozenset(axes))


def doubled(xs: Sequence[Any]) -> list[Any]:
    return [jnp.stack([x, 0.5 * x]) for x in xs]


# Where a function of values can be called. Loops and batches give a new leading dimension.
PLACES: list[Callable[[Body, Any, Sequence[Any]], Any]] = [
    lambda b, fn, xs: jax.jit(fn)(*xs),
    lambda b, fn, xs: jax.checkpoint(fn)(*xs),
    lambda b, fn, xs: with_backward(lambda xs: fn(*xs))(xs),
    lambda b, fn, xs: lax.cond(b.equal(b.pool[0]) > 0.1, fn, lambda *xs: 0.5 * fn(*xs), *xs),
    lambda b, fn, xs: lax.fori_loop(0, 2, lambda _, c: fn(*xs), 0.0 * fn(*xs)),
    lambda b, fn, xs: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, fn(*xs)), (0, 0.0 * fn(*xs)))[1],
]
ROWS: list[Callable[[Any, Sequence[Any]], Any]] = [
    lambda fn, xs: jax.vmap(fn)(*doubled(xs)),
    lambda fn, xs: lax.map(lambda row: fn(*row), doubled(xs)),
    lambda fn, xs: lax.scan(lambda c, k: (c, k * fn(*xs)), 0, jnp.asarray([1.0, 0.5], jnp.float32))[1],
]


def enclosed(b: Body) -> Made:
    """Another move inside of a branch, a loop, a batch or a call."""
    pool, move, found = b.pool, b.some(ENCLOSED), {}

    def inside(*xs: Any) -> Any:
        b.pool = [Value(x, v.lies) for x, v in zip(xs, pool, strict=True)]
        made = move(b)
        b.pool = pool
        x, found["lies"] = made or (xs[-1], None)
        return b.varying(x.astype(jnp.float32))

    xs, fn = [v.x for v in pool], b.again(inside)
    rows = b.chance(3)
    out = b.some(ROWS)(fn, xs) if rows else b.some(PLACES)(b, fn, xs)
    lies = found["lies"]
    if lies is None or lies.size > LARGEST // 2 or len(lies.dims) > 3:
        return None
    return out, Lies((whole(2), *lies.dims), lies.partial) if rows else lies


ENCLOSED: tuple[Move, ...] = (
    curved, linear, paired, scaled, selected, placed, transposed, merged, unmerged, cut_in_two, widened, narrowed,
    repeated, tiled_block, every_second, along, matrices, summed, reduced, extreme, product, convolved, own_block, looked_up, counted,
    written, overwritten, completed, scattered, gathered, exchanged, rolled, passed_around, ring_sum, listed, averaged,
    mapped, carried, recurrent, looped, decided, chosen_here, wrapped, derivative, gradient_of_a_product, noisy, verb, relaid,
    along_by_strings, contracted_by_strings, settled, until_each_is_large, looked_up_by_row, at_a_place,
    counted_by_row, pulled_back, pulled_through_a_collective, pulled_through_a_sum, of_another_kind,
    summed_as_whole_numbers, with_neighbours,
)  # fmt: skip
OFTEN: tuple[Move, ...] = (completed, scattered, gathered, exchanged, ring_sum, listed, pulled_through_a_sum)
RIGHT: tuple[Move, ...] = (*ENCLOSED, *OFTEN, *[enclosed] * 6)

# --- wrong moves --------------------------------------------------------------------------------------------------


def curved_too_early(b: Body) -> Made:
    """Curved everywhere: of numbers above zero, `abs` is none."""
    v = b.value(lambda lies: bool(lies.partial))
    return v and (lax.sin(b.some(CURVED)(v.x)), v.lies)


def product_of_partial_sums(b: Body) -> Made:
    v = b.value(lambda lies: bool(lies.partial))
    other = v and b.some([u for u in b.pool if u.lies == v.lies])
    return other and (v.x * other.x, v.lies)


def mixed_up(b: Body) -> Made:
    """A complete value is added to a partial sum."""
    v = b.value(lambda lies: bool(lies.partial))
    other = v and b.some([u for u in b.pool if u.lies == Lies(v.lies.dims)])
    return other and (v.x + other.x, v.lies)


@of_own_size
def along_a_piece(b: Body) -> Made:
    v = b.value(complete)
    d = v and b.dim(v.lies, divided)
    return None if d is None else (b.some(ALONG_LINEAR + ALONG)(v.x, d), v.lies)


@of_own_size
def reduced_a_piece(b: Body) -> Made:
    v = b.value(complete)
    d = v and b.dim(v.lies, divided)
    return None if d is None else (b.some(REDUCERS)(v.x, d).astype(jnp.float32), v.lies.put(d))


@of_own_size
@of_dim(divided, of=complete)
def reduced_by_another(b: Body, v: Value, d: int) -> Made:
    """A maximum of a piece, and then not the reduction that completes it."""
    finish = b.some([lax.psum, lax.pmean, lax.pmin, lax.pmax])
    return finish(b.some(REDUCERS)(v.x, d).astype(jnp.float32), axes_of(v.lies.dims[d])), v.lies.put(d)


def summed_copies(b: Body) -> Made:
    v = b.value()
    axis = v and b.some(b.free(v.lies))
    return axis and (lax.psum(v.x, axis), v.lies)


def summed_blocks(b: Body) -> Made:
    """Blocks are added up as if they were terms."""
    v = b.value()
    d = v and b.dim(v.lies, divided)
    return None if d is None else (lax.psum(v.x, axes_of(v.lies.dims[d])[-1]), v.lies)


@of_own_size
def largest_of_blocks(b: Body) -> Made:
    v = b.value()
    axis = v and b.some(v.lies.held)
    return axis and (b.some([lax.pmax, lax.pmin, lax.pmean])(v.x, axis), Lies(v.lies.dims, v.lies.partial - {axis}))


def never_completed(b: Body) -> Made:
    v = b.value(lambda lies: bool(lies.partial))
    return v and (v.x * 1.0, Lies(v.lies.dims))


@of_dim(lambda dim: len(axes_of(dim)) > 1)
def gathered_in_another_order(b: Body, v: Value, d: int) -> Made:
    [(n, axes)] = v.lies.dims[d]
    if b.chance(2):
        return lax.all_gather(v.x, axes[::-1], axis=d, tiled=True), v.lies.put(d, whole(n))
    return lax.all_gather(v.x, axes[0], axis=d, tiled=True), v.lies.put(d, ((n, axes[1:]),))


def scattered_copies(b: Body) -> Made:
    cut = b.cut()
    return cut and (lax.psum_scatter(cut.v.x, cut.axis, scatter_dimension=cut.d, tiled=True), cut.lies)


@of_dim(anything, of=lambda lies: bool(lies.partial))
def exchanged_partial_sums(b: Body, v: Value, d: int) -> Made:
    """An `all_to_all` in place of a `psum_scatter`."""
    axis = b.some(sorted(v.lies.partial))
    [(n, axes)] = v.lies.dims[d]
    if n % b.parts((*axes, axis)):
        return None
    out = lax.all_to_all(v.x, axis, d, d, tiled=True)
    size = v.x.shape[d] // b.here[axis]
    return lax.slice_in_dim(out, 0, size, axis=d), v.lies.put(d, ((n, (*axes, axis)),), partial=v.lies.partial - {axis})


def another_block(b: Body) -> Made:
    """Own blocks, counted from the other end."""
    cut = b.cut()
    if not cut:
        return None
    start = (b.here[cut.axis] - 1 - lax.axis_index(cut.axis)) * cut.size
    return lax.dynamic_slice_in_dim(cut.v.x, start, cut.size, cut.d), cut.lies


def outer_block(b: Body) -> Made:
    """A block within the blocks of another axis, called the outer one."""
    cut = b.cut(divided)
    if not cut:
        return None
    [(n, axes)] = cut.v.lies.dims[cut.d]
    out = lax.dynamic_slice_in_dim(cut.v.x, lax.axis_index(cut.axis) * cut.size, cut.size, cut.d)
    return out, cut.v.lies.put(cut.d, ((n, (cut.axis, *axes)),))


def merged_blocks(b: Body) -> Made:
    """Two dimensions as one, which is called divided though its second part is."""
    v = b.value()
    if not v or len(v.lies.dims) < 2:
        return None
    d = b.some([d for d in range(1, len(v.lies.dims)) if divided(v.lies.dims[d])])
    if d is None:
        return None
    one, two = v.lies.dims[d - 1 : d + 1]
    shape = (*v.x.shape[: d - 1], v.x.shape[d - 1] * v.x.shape[d], *v.x.shape[d + 1 :])
    dim: Dim = ((size_of(one) * size_of(two), (*axes_of(one), *axes_of(two))),)
    return v.x.reshape(shape), Lies((*v.lies.dims[: d - 1], dim, *v.lies.dims[d + 1 :]), v.lies.partial)


@of_own_size
@of_dim(divided, of=complete)
def local_positions(b: Body, v: Value, d: int) -> Made:
    at = 0.1 * jnp.arange(v.x.shape[d], dtype=jnp.float32)
    return v.x + lax.broadcast_in_dim(at, v.x.shape, (d,)), v.lies


@of_own_size
def local_noise(b: Body) -> Made:
    v = b.value(lambda lies: complete(lies) and any(map(divided, lies.dims)))
    return v and (v.x + noise(b, v.x.shape), v.lies)


def moved_blocks(b: Body) -> Made:
    v = b.value()
    axis = v and b.some(v.lies.held)
    return axis and (lax.ppermute(v.x, axis, ring(b, axis)), v.lies)


@of_own_size
@of_dim(divided)
def edge_of_the_wrong_side(b: Body, v: Value, d: int) -> Made:
    axes, size = axes_of(v.lies.dims[d]), v.x.shape[d]
    edge = lax.slice_in_dim(v.x, size - 1, size, axis=d) if b.chance(2) else lax.slice_in_dim(v.x, 0, 1, axis=d)
    edge = lax.ppermute(edge, axes, ring(b, *axes, up=b.some([1, -1])))
    return jnp.concatenate([edge, lax.slice_in_dim(v.x, 0, size - 1, axis=d)], d), v.lies


@of_value(lambda lies: complete(lies) and bool(lies.dims) and divided(lies.dims[0]))
def recurrent_over_pieces(b: Body, v: Value) -> Made:
    start = b.varying(jnp.zeros(v.x.shape[1:], jnp.float32))
    carry, rows = lax.scan(lambda c, row: (jnp.tanh(c) * 0.5 + row, c - row), start, v.x)
    return (rows, v.lies) if b.chance(2) else (carry, v.lies.put(0))


def decided_by_a_piece(b: Body) -> Made:
    v = b.value()
    u = v and b.value(lambda lies: bool(lies.held))
    if not u:
        return None
    return lax.cond(lax.sin(5.0 * u.x.sum()) > 0.1, b.some(LINEAR), lambda x: 0.0 * x, v.x), v.lies


def contracted_and_forgotten(b: Body) -> Made:
    made = product(b)
    return made and (made[0], Lies(made[1].dims))


@of_own_size
def mean_of_a_piece(b: Body) -> Made:
    v = b.value(complete)
    d = v and b.dim(v.lies, divided)
    return None if d is None else (v.x.mean(d), v.lies.put(d))


def softmax_of_a_piece(b: Body) -> Made:
    v = b.value(complete)
    d = v and b.dim(v.lies, divided)
    return None if d is None else (jax.nn.softmax(v.x, d), v.lies)


WRONG: tuple[Move, ...] = (
    curved_too_early, product_of_partial_sums, mixed_up, along_a_piece, reduced_a_piece, reduced_by_another,
    summed_copies, summed_blocks, largest_of_blocks, never_completed, gathered_in_another_order, scattered_copies,
    exchanged_partial_sums, another_block, outer_block, merged_blocks, local_positions, local_noise, moved_blocks,
    recurrent_over_pieces, decided_by_a_piece, contracted_and_forgotten, mean_of_a_piece, softmax_of_a_piece,
    edge_of_the_wrong_side,
)  # fmt: skip


# --- a body ---------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What is drawn before a body is traced."""

    mesh: dict[str, int]
    args: tuple[Lies, ...]
    wrong: int | None  # the step that is a wrong move
    often: tuple[Move, ...] = ()  # right moves that are drawn half of the time


def drawn_mesh(rng: Choices) -> dict[str, int]:
    """One to three axes of sizes 1 to 4, at most eight devices."""
    names = ("dp", "tp", "cp")[: rng.choice([2, 2, 1, 3])]
    while True:
        mesh = {name: rng.choice([2, 4, 3, 1]) for name in names}
        if math.prod(mesh.values()) <= 8:
            return mesh


def drawn(rng: Choices) -> Plan:
    """A mesh, arguments that lie somehow, and whether there is a mistake."""
    mesh = drawn_mesh(rng)
    unit = math.prod(mesh.values())
    sizes = [unit * k for k in (1, 2, 3, 5)] if unit > 3 else [unit * k for k in (2, 3, 4, 5)]
    args = []
    for _ in range(3):
        rank = rng.choice([2, 3, 1])
        dims: list[Dim] = [whole(n) for n in rng.sample(sizes, rank)]
        for axis in rng.sample(list(mesh), len(mesh)):
            d = rng.below(rank + 1)
            if d < rank:
                [(n, axes)] = dims[d]
                dims[d] = ((n, (*axes, axis)),)
        lies = Lies(tuple(dims))
        args.append(lies if lies.size <= LARGEST else Lies(lies.dims[:2]))
    wrong = rng.below(STEPS) if rng.below(3) == 2 else None
    return Plan(mesh, tuple(args), wrong)


class Trace(NamedTuple):
    jaxpr: Any  # of the body
    lies: list[Lies]  # of the values that it marks, in order
    steps: list[str]  # the names of the moves
    mistake: str  # the name of the wrong one, if it was made


def traced(rng: Choices, plan: Plan, here: Mapping[str, int]) -> Trace:
    """The jaxpr of a body on a mesh of these sizes."""
    found: dict[str, Any] = {}

    def body(*args: Any) -> tuple[()]:
        b = Body(rng, plan.mesh, here)
        b.pool = [Value(b.varying(x), lies) for x, lies in zip(args, plan.args, strict=True)]
        steps, mistake = [], ""
        for i in range(STEPS):
            wrong = plan.wrong is not None and plan.wrong <= i and not mistake
            done = attempted(b, WRONG if wrong else RIGHT + plan.often * len(RIGHT))
            if done is not None:
                steps.append(done)
                mistake = done if wrong else mistake
        for k, v in enumerate(b.pool):
            mark(v.x, v.lies.text, call=f'v{k}("{v.lies.text}")')
        found.update(lies=[v.lies for v in b.pool], steps=steps, mistake=mistake)
        return ()

    mesh = jax.sharding.AbstractMesh(tuple(here.values()), tuple(here), axis_types=(jax.sharding.AxisType.Auto,) * len(here))  # fmt: skip
    specs = tuple(jax.sharding.PartitionSpec(*(axes_of(dim) or None for dim in lies.dims)) for lies in plan.args)
    args = [jax.ShapeDtypeStruct(tuple(map(size_of, lies.dims)), jnp.float32) for lies in plan.args]
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=())
    return Trace(jax.make_jaxpr(run)(*args), **found)


def attempted(b: Body, moves: Sequence[Move]) -> str | None:
    """One move that fits; its name."""
    for _ in range(6):
        move = b.some(moves)
        made = move(b)
        if made is not None:
            x, lies = made
            b.pool.append(Value(b.varying(lax.convert_element_type(x, jnp.float32)), lies))
            return move.__name__
    return None


def arguments(seed: int, plan: Plan, moved: bool = False) -> list[np.ndarray]:
    """The numbers of the arguments, whole; if `moved`, not around 0, but each row and column around another number."""
    rng = np.random.default_rng(seed)
    found = []
    for lies in plan.args:
        x = rng.normal(size=[size_of(dim) for dim in lies.dims])
        for d, n in enumerate(x.shape if moved else ()):
            level = rng.uniform(-2, 2) + rng.uniform(0, 3) * rng.uniform(-1, 1, n)
            x += np.expand_dims(level, [e for e in range(x.ndim) if e != d])
        found.append(x)
    return found
