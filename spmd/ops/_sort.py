"""`sort`, along a dimension in brackets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd import _lax
from spmd.ops._along import Along, along

Held = tuple[Any, ...]  # the keys of one device's block: the elements and, if ties matter, their first places


def sort(x: Any, layout: str, *, descending: bool = False, **names: Any) -> jax.Array:
    """The elements in order along the dimension in brackets: `sort(x, "[s/cp] d")`.

    The order is that of `jnp.sort`: NaNs are the largest, and `descending` is the reverse. The gradient of a sorted
    element goes to the place that it came from. Equal elements keep their order, also as in `jnp.sort`.

    Communication: none if the dimension is whole. If it is divided over n devices, and n divides the local size of
    another dimension, that one is divided instead and then back: two all-to-alls, together 2S(n-1)/n bytes for a shard
    of S bytes. Otherwise Batcher's merge exchange of whole blocks: t(t+1)/2 rounds for n up to 2^t, each a
    collective-permute of a shard, and with gradients of the elements' int32 positions too. Memory is a few shards,
    never the whole. Backward the reverse, with the elements' bytes.

    Args:
      x: The array, of numbers or booleans.
      layout: Its layout, with one dimension in brackets.
      descending: Whether the largest comes first.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The sorted array, in the same layout.

    Raises:
      LayoutError: On a malformed layout, not exactly one bracket, or complex numbers.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> x = jnp.array([5, 2, 7, 1, 8, 3, 6, 4])
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: spmd.sort(x, "[s/cp]"))(x))
      [1 2 3 4 5 6 7 8]

    References:
      K. E. Batcher, Sorting networks and their applications, AFIPS 1968; D. E. Knuth, The Art of Computer Programming
      3, 5.2.2 algorithm M, and exercise 5.3.4-38 for blocks in the place of elements.
    """
    one = along("sort", x, layout, names, most=1, ordered=True)
    dim, axes = one.dim, one.factor.axes

    def divided() -> Any:
        n = one.call.frame.axis_size(axes)
        taker = next((i for i, m in enumerate(one.x.shape) if i != dim and m % n == 0), None)
        if taker is None:
            return _Network(one, n, descending).run(one.x)
        whole = _lax.all_to_all(one.x, axes, split=taker, concat=dim)
        return _lax.all_to_all(jnp.sort(whole, axis=dim, descending=descending), axes, split=dim, concat=taker)

    return one.result(lambda: jnp.sort(one.x, axis=dim, descending=descending), divided)


class _Network:
    """Merge exchange: each comparator gives one device the lower half of two blocks and the other the upper half."""

    def __init__(self, one: Along, n: int, descending: bool) -> None:
        self.one, self.dim, self.n, self.descending = one, one.dim, n, descending
        self.axes, self.sizes = one.factor.axes, dict(one.call.frame.sizes)

    def run(self, x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.ordered((x,))
        ordered = jax.custom_jvp(lambda x: self.ordered((x,)))
        # Equal elements are told apart only if each has a gradient of its own.
        ordered.defjvp(lambda xs, ts: jax.jvp(lambda x: self.ordered((x, self.places(x))), xs, ts))
        return ordered(x)

    def places(self, x: Any) -> Any:
        """Where each element was in the whole dimension."""
        start = self.one.call.start(self.one.factor)
        return lax.broadcasted_iota(start.dtype, x.shape, self.dim) + start

    def ordered(self, held: Held) -> Any:
        here = _lax.axis_index(self.axes, self.sizes)
        at = (lambda i: self.n - 1 - i) if self.descending else (lambda i: i)
        held = self.inside(held)
        for comparators in rounds(self.n):
            pairs = [(at(i), at(j)) for i, j in comparators]
            both = [*pairs, *((j, i) for i, j in pairs)]
            lows, highs = (np.isin(np.arange(self.n), side) for side in zip(*pairs, strict=True))
            # Both blocks ascend. So of element i of one block and element i from the end of the other, the lower one
            # belongs to the lower half.
            theirs = tuple(jnp.flip(_lax.ppermute(y, self.axes, self.sizes, both), self.dim) for y in held)
            low, high = (jnp.asarray(side)[here] for side in (lows, highs))
            swap = (low & _before(theirs, held)) | (high & _before(held, theirs))
            held = self.inside(tuple(jnp.where(swap, b, a) for a, b in zip(held, theirs, strict=True)))
        return jnp.flip(held[0], self.dim) if self.descending else held[0]

    def inside(self, held: Held) -> Held:
        """One block in order."""
        return tuple(lax.sort(held, dimension=self.dim, num_keys=len(held)))


def _before(a: Held, b: Held) -> Any:
    """Whether an element of `a` is lower than that of `b`. NaN is above all, and of equals the first is the lower."""
    lower = _lower(a[0], b[0])
    return lower | (~_lower(b[0], a[0]) & (a[1] < b[1])) if len(a) > 1 else lower


def _lower(a: Any, b: Any) -> Any:
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
