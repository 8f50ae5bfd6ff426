"""`sort` and `argsort`, along a dimension in brackets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd._trees.arguments import explained
from spmd._trees.leaves import not_int
from spmd.comm import _lax
from spmd.errors import SizeError
from spmd.language import Atom, Dim, Layout
from spmd.ops._along import Along, along, one_unnamed

T = TypeVar("T")
Held = tuple[Any, ...]  # one device's block of keys (the elements and, if ties matter, their places) and of payload


@overload
def sort(x: Any, layout: str, /, *, descending: bool = ..., payload: None = None, **names: Any) -> jax.Array: ...
@overload
def sort(x: Any, layout: str, /, *, descending: bool = ..., payload: T, **names: Any) -> tuple[jax.Array, T]: ...
@explained
def sort(x: Any, layout: str, /, *, descending: bool = False, payload: Any = None, **names: Any) -> Any:
    """The elements in order along the dimension in brackets: `sort(x, "[s/cp] d")`.

    The order is that of `jnp.sort`: NaNs are the largest, and `descending` is the reverse. The gradient of a sorted
    element goes to the place that it came from, also of equal ones. A payload moves with the elements, as rows of
    particles do with the numbers of their cells. With it equal elements keep their order, if `descending` too, as in
    `argsort`. Without it, zeros of both signs, which are equal, may come in another order if blocks are exchanged.

    Communication: none if the dimension is whole. If it is divided over n devices, and n divides the local size of
    another dimension, that one is divided instead and then back: two all-to-alls, together 2S(n-1)/n bytes for a shard
    of S bytes. Otherwise, for n > 2, if a block has m elements, n divides m, and m is at least 2(n-1)^2, by columnsort:
    two all-to-alls and two collective-permutes of half a shard, together 2S(n-1)/n + S bytes. Otherwise Batcher's merge
    exchange of whole blocks: t(t+1)/2 rounds for n up to 2^t, each a collective-permute of a shard. In both, with
    gradients or a payload the elements' int32 positions travel too, but not in the last permute. Each array of a
    payload travels as the elements do, with its own bytes. Memory is a few shards, never the whole. Backward the
    reverse, with the elements' bytes. Every device has as many elements after a sort as before.

    Args:
      x: The array, of numbers or booleans. Complex numbers go by their real parts, then by their imaginary parts.
      layout: Its layout, with one dimension in brackets.
      descending: Whether the largest comes first.
      payload: An array or a pytree of arrays that are put in the same order. They have the dimensions of `x`, and may
        have more behind them, which are whole.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The sorted array, in the same layout. With a payload the pair of both.

    Raises:
      LayoutError: On a malformed layout, or not exactly one bracket.
      SizeError: If the payload does not have the sizes of the array.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> x = jnp.array([5, 2, 7, 1, 8, 3, 6, 4])
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: spmd.sort(x, "[s/cp]"))(x))
      [1 2 3 4 5 6 7 8]
      >>> @spmd.kernel("s/cp, s/cp -> s/cp, s/cp", mesh=mesh)
      ... def both(x, y):
      ...     return spmd.sort(x, "[s/cp]", payload=y)
      >>> print(both(x, x * 10)[1])
      [10 20 30 40 50 60 70 80]

    References:
      K. E. Batcher, Sorting networks and their applications, AFIPS 1968; D. E. Knuth, The Art of Computer Programming
      3, 5.2.2 algorithm M, and exercise 5.3.4-38 for blocks in the place of elements. T. Leighton, Tight bounds on the
      complexity of parallel sorting, IEEE Transactions on Computers C-34, 1985, for columnsort.
    """
    one = along("sort", x, layout, names, most=1)
    if payload is None:
        alone = lambda x: (jnp.sort(x, axis=one.dim, descending=descending),)
        [found] = _sorted(one, (one.x,), alone, lambda blocks: (blocks.run(one.x),), descending)
        return found
    leaves, tree = jax.tree.flatten(payload)
    behind = [
        one.call.fork().operand(leaf, layout=_behind(one, jnp.ndim(leaf) - jnp.ndim(x)), name="the payload").x
        for leaf in leaves
    ]

    def whole(x: Any, *payload: Any) -> Held:
        order = _lax.argsort(x, one.dim, descending=descending)
        return tuple(_picked(y, order, one.dim) for y in (x, *payload))

    def blocks(blocks: _Blocks) -> Held:
        key, _, *rest = blocks.ordered((one.x, blocks.places(one.x, stable=True), *behind), 2)
        return (key, *rest)

    found, *rest = _sorted(one, (one.x, *behind), whole, blocks, descending)
    return found, jax.tree.unflatten(tree, rest)


def argsort(x: Any, layout: str, /, *, descending: bool = False, **names: Any) -> jax.Array:
    """The places of the elements in order, along the dimension in brackets: `argsort(x, "[s/cp] d")`.

    The places count in the whole dimension. Equal elements keep their order, also if `descending`, as in `jnp.argsort`.
    `sort(x, layout, payload=...)` puts other arrays in this order. For the first k places `top_k` sends less.

    Communication: that of `sort` with gradients: the elements and their int32 positions travel. If another dimension is
    divided instead, the first all-to-all sends the elements, and the second one the positions. The places have no
    gradient.

    Args:
      x: The array, of numbers or booleans. Complex numbers go by their real parts, then by their imaginary parts.
      layout: Its layout, with one dimension in brackets.
      descending: Whether the largest comes first.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The places, int32 or what `jnp.argsort` gives under `jax_enable_x64`, in the same layout.

    Raises:
      LayoutError: On a malformed layout, or not exactly one bracket.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> x = jnp.array([5, 2, 7, 1, 8, 3, 6, 4])
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: spmd.argsort(x, "[s/cp]"))(x))
      [3 1 5 7 0 6 2 4]
    """
    one = along("argsort", x, layout, names, most=1)
    x = lax.stop_gradient(one.x)
    one.call.index_dtype(one.factor.size, one.factor.name, one.factor.span)  # whether they can be counted
    dtype = jnp.result_type(int)
    whole = lambda x: (_lax.argsort(x, one.dim, descending=descending).astype(dtype),)
    blocks = lambda blocks: (blocks.decoded(blocks.ordered((x, blocks.places(x, stable=True)), 2)[1]).astype(dtype),)
    return _sorted(one, (x,), whole, blocks, descending)[0]


def _sorted(
    one: Along, given: Held, whole: Callable[..., Held], blocks: Callable[[_Blocks], Held], descending: bool
) -> Held:
    """The result of a call.

    Args:
      one: The call.
      given: Its arrays.
      whole: Makes the results of arrays whose dimension is whole.
      blocks: Makes them of blocks.
      descending: Whether the largest comes first.
    """

    def divided() -> Held:
        traded = one.traded(whole, given, one.dim, one.factor.axes)
        return blocks(_Blocks(one, descending)) if traded is None else traded

    return one.result(lambda: whole(*given), divided, lambda y: _behind(one, y.ndim - one.x.ndim).without_brackets())


def _behind(one: Along, more: int) -> Layout:
    """The layout of the array, with some more dimensions behind it."""
    layout = one.operand.layout
    return Layout.from_dims([*layout.dims, *[Dim((Atom("_"),))] * more]) if more > 0 else layout


def _picked(x: Any, order: Any, dim: int) -> Any:
    """The elements, or the rows behind them, in this order."""
    order = order.reshape(*order.shape, *[1] * (x.ndim - order.ndim))
    return jnp.take_along_axis(x, order, dim, mode="promise_in_bounds")


class _Blocks:
    """The sort of blocks that no other dimension can take over. A block is sorted, exchanged, and sorted again."""

    def __init__(self, one: Along, descending: bool) -> None:
        self.one, self.dim, self.descending = one, one.dim, descending
        self.axes, self.sizes = one.factor.axes, dict(one.call.frame.sizes)
        self.n = one.call.frame.axis_size(self.axes)

    def run(self, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.ordered((x,), 1)[0]
        ordered = jax.custom_jvp(lambda x: self.ordered((x,), 1)[0])
        # Equal elements are told apart only if each has a gradient of its own.
        ordered.defjvp(lambda xs, ts: jax.jvp(lambda x: self.ordered((x, self.places(x)), 2)[0], xs, ts))
        return ordered(x)

    def places(self, x: Any, *, stable: bool = False) -> Any:
        """Return where each element was in the whole dimension. With `stable` so that equal ones keep their order if
        the largest comes first."""
        start = self.one.call.start(self.one.factor)
        places = lax.broadcasted_iota(start.dtype, x.shape, self.dim) + start
        return self.decoded(places) if stable else places

    def decoded(self, places: Any) -> Any:
        """The places that `stable` ones stand for, and the reverse."""
        return ~places if self.descending else places

    def ordered(self, held: Held, keys: int) -> Held:
        """All blocks in order of so many keys."""
        held, m = self.inside(held, keys), self.one.factor.local
        by_columns = self.n > 2 and m % self.n == 0 and m >= 2 * (self.n - 1) ** 2
        held = self.by_columns(held, keys) if by_columns else self.by_rounds(held, keys)
        return tuple(jnp.flip(y, self.dim) for y in held) if self.descending else held

    def inside(self, held: Held, keys: int) -> Held:
        """One block in order."""
        if len(held) == keys:
            return tuple(lax.sort(held, dimension=self.dim, num_keys=keys))
        here = lax.broadcasted_iota(jnp.int32, held[0].shape, self.dim)
        *first, order = lax.sort((*held[:keys], here), dimension=self.dim, num_keys=keys)
        return (*first, *(_picked(y, order, self.dim) for y in held[keys:]))

    def at(self, i: int) -> int:
        """Return which block has the i-th part of the order. If the largest comes first, blocks ascend towards the
        front."""
        return self.n - 1 - i if self.descending else i

    def sent(self, y: Any, pairs: list[tuple[int, int]]) -> Any:
        return _lax.ppermute(y, self.axes, self.sizes, [(self.at(i), self.at(j)) for i, j in pairs])

    # Merge exchange: each comparator gives one device the lower half of two blocks and the other the upper half.

    def by_rounds(self, held: Held, keys: int) -> Held:
        here = _lax.axis_index(self.axes, self.sizes)
        for pairs in rounds(self.n):
            lows, highs = (np.isin(np.arange(self.n), list(map(self.at, side))) for side in zip(*pairs, strict=True))
            # Both blocks ascend. So of element i of one block and element i from the end of the other, the lower one
            # belongs to the lower half.
            theirs = tuple(jnp.flip(self.sent(y, [*pairs, *((j, i) for i, j in pairs)]), self.dim) for y in held)
            low, high = (jnp.asarray(side)[here] for side in (lows, highs))
            swap = (low & _before(theirs[:keys], held[:keys])) | (high & _before(held[:keys], theirs[:keys]))
            held = self.inside(tuple(_chosen(swap, b, a) for a, b in zip(held, theirs, strict=True)), keys)
        return held

    # Columnsort: the blocks are the columns of a matrix. It is transposed and back, which leaves each element at most
    # half a block from its place. Then the upper half of each block is sorted with the lower half of the next.

    def by_columns(self, held: Held, keys: int) -> Held:
        n, m, dim = self.n, self.one.factor.local, self.dim
        held = self.inside(tuple(self.dealt(y, (m // n, n), 1) for y in held), keys)
        held = self.inside(tuple(self.dealt(y, (n, m // n), 0) for y in held), keys)
        here, half = _lax.axis_index(self.axes, self.sizes), m // 2
        part = lambda y, start, stop: lax.slice_in_dim(y, start, stop, axis=dim)
        up = [(i, i + 1) for i in range(n - 1)]
        lower = [part(y, 0, m - half) for y in held]
        upper = [part(y, m - half, m) for y in held]
        both = [lax.concatenate([self.sent(b, up), a], dim) for a, b in zip(lower, upper, strict=True)]
        merged = self.inside(tuple(both), keys)
        back = [self.sent(part(y, 0, half), [(j, i) for i, j in up]) for y in merged]
        lower = [jnp.where(here == self.at(0), a, part(y, half, m)) for a, y in zip(lower, merged, strict=True)]
        upper = [jnp.where(here == self.at(n - 1), b, y) for b, y in zip(upper, back, strict=True)]
        return tuple(lax.concatenate([a, b], dim) for a, b in zip(lower, upper, strict=True))

    def dealt(self, y: Any, shape: tuple[int, int], split: int) -> Any:
        """A block whose dimension is a matrix of this shape, dealt out along `split`. In what order it arrives does not
        matter, because it is sorted then."""
        y = jnp.flip(y, self.dim) if self.descending else y
        matrix = y.reshape(*y.shape[: self.dim], *shape, *y.shape[self.dim + 1 :])
        out = _lax.all_to_all(matrix, self.axes, split=self.dim + split, concat=self.dim + 1 - split)
        return out.reshape(y.shape)


def _chosen(mask: Any, a: Any, b: Any) -> Any:
    return jnp.where(mask.reshape(*mask.shape, *[1] * (a.ndim - mask.ndim)), a, b)


def _before(a: Held, b: Held) -> Any:
    """Return whether an element of `a` is lower than that of `b`. NaN is above all, and equals go by what comes
    next."""
    lower = _lower(a[0], b[0])
    return lower | (~_lower(b[0], a[0]) & _before(a[1:], b[1:])) if len(a) > 1 else lower


def _lower(a: Any, b: Any) -> Any:
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        return _before((a.real, a.imag), (b.real, b.imag))
    return (a < b) | (jnp.isnan(b) & ~jnp.isnan(a)) if jnp.issubdtype(a.dtype, jnp.inexact) else a < b


def rounds(n: int) -> Iterator[list[tuple[int, int]]]:
    """The comparators of merge exchange on n places, disjoint within a round: Knuth's algorithm M."""
    top = 1 << max(n - 1, 1).bit_length() - 1  # the largest power of two below n
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            if found := [(i, i + d) for i in range(n - d) if i & p == r]:
                yield found
            if q == p:
                break
            q, r, d = q // 2, p, q - p
        p //= 2


# --- `top_k`: the largest elements along a dimension in brackets ------------------------------------------------------


def top_k(x: Any, layout: str, /, k: int, **names: Any) -> tuple[jax.Array, jax.Array]:
    """The k largest elements along the dimension in brackets, and where they are: `top_k(x, "b s [e]", 2)`.

    The largest comes first. The first of equals wins, whichever device it lies on, as in `jax.lax.top_k`. The gradient
    of a value goes to the element that it came from. Positions have no gradient.

    Communication: none if the dimension is whole. If it is divided over n devices, forward one all-gather of values and
    one of positions. Each device contributes its own m = min(k, local size) candidates, so the gathers receive
    m (n - 1) elements and as many int32 for each row. Backward nothing.

    Args:
      x: The array.
      layout: Its layout, with one dimension in brackets.
      k: How many, a Python int from 1 to the global size of that dimension.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      `(values, positions)`. In both that dimension has size k and is whole, equal on its former axes; the other
      dimensions stay. Positions are int32 and count in the whole dimension.

    Raises:
      LayoutError: On a malformed layout, one without brackets, or a k that is not an int.
      SizeError: If k is larger than the dimension.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> best = spmd.kernel("v/tp -> k, k", mesh=mesh)(lambda x: spmd.top_k(x, "[v/tp]", 3))
      >>> values, positions = best(jnp.array([1.0, 5, 0, 2, 5, 3, 4, 1]))
      >>> print(values, positions)
      [5. 5. 4.] [1 4 6]
    """
    one = along("top_k", x, layout, names, most=1, ordered=True, example='top_k(x, "b/dp [d]", 2)')
    dim, factor = one.dim, one.factor
    if fault := not_int("k, the number of elements,", k):
        one.call.fail(fault)
    if not 1 <= k <= factor.size:
        rule = f"k is from 1 to the size of {factor.name}, {factor.size}, not {k}."
        one.call.fail(rule, at=factor.span, got=[one.call.frame.describe()], error=SizeError)

    def divided() -> Any:
        values, positions = _last(one.x, min(k, factor.local), dim)
        start = one.call.start(factor)
        positions = positions.astype(start.dtype) + start
        # Blocks arrive in the order of their positions, so of equals the earlier candidate is the earlier element.
        values, positions = (_lax.all_gather(y, factor.axes, dim, "invarying") for y in (values, positions))
        values, chosen = _last(values, k, dim)
        return values, jnp.take_along_axis(positions, chosen, axis=dim)

    return one.result(lambda: _last(one.x, k, dim), divided, one_unnamed(one.operand.layout))


def _last(x: Any, k: int, dim: int) -> tuple[Any, Any]:
    """`lax.top_k` along any dimension."""
    values, positions = lax.top_k(jnp.moveaxis(x, dim, -1), k)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(positions, -1, dim)
