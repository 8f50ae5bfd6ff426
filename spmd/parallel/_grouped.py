"""Products of rows with the matrices of their groups: `jax.lax.ragged_dot`, and on GPUs a loop over tiles of rows.

XLA for GPUs multiplies every row with every matrix: with 16 groups an H200 does a twelfth of what it does in one large
product. A tile has rows of one group, and is multiplied with the matrix of that group alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat, custom_vjp
from spmd.nn.dtypes import wide

# JAX's ragged_dot has no vmap in which one operand is not mapped, and none of a vmap. Here the mapped products are one
# product of all groups. Each has the rows of its own groups only, if what is left over belongs to its last group.


@custom_vjp
def grouped(x: Any, w: Any, counts: Any) -> Any:
    """Multiply each row of `"r d"` with the matrix of its group, `"g d f"`: the first `counts[0]` with the first.

    Rows behind all groups are zeros. What becomes of them in the result is undefined.
    """
    return _product(x, w, counts)


def _grouped_bwd(kept: Any, cotangent: Any) -> Any:
    x, w, counts = kept
    return grouped(cotangent, jnp.swapaxes(w, 1, 2), counts), contracted(x, cotangent, counts), None


grouped.defvjp(lambda *kept: (grouped(*kept), kept), _grouped_bwd)


@custom_vjp
def contracted(x: Any, y: Any, counts: Any) -> Any:
    """Sum the outer products of the rows of `"r d"` and `"r f"` for each group: `"g d f"`."""
    return _contraction(x, y, counts)


def _contracted_bwd(kept: Any, cotangent: Any) -> Any:
    x, y, counts = kept
    return grouped(y, jnp.swapaxes(cotangent, 1, 2), counts), grouped(x, cotangent, counts), None


contracted.defvjp(lambda *kept: (contracted(*kept), kept), _contracted_bwd)


# --- in tiles -----------------------------------------------------------------------------------------------------

_UNROLLED = 4  # rounds of the loop at once: a round of its own costs a GPU as much as half a tile


class _Tiles(NamedTuple):
    """Tiles of `size` rows each, enough for any counts.

    Attributes:
      group: The group of each.
      start: Its first row; behind all rows if it is not needed.
      rows: How many of its rows are of its group. Those of the last group end with the tiles.
    """

    group: Any
    start: Any
    rows: Any


def _size(rows: int, groups: int) -> int:
    """Return the rows of a tile: at most half of what a group has on average, so that few are filled in vain."""
    return 1 << min(10, max(4, (rows // (2 * groups)).bit_length() - 1))


def _tiles(counts: Any, rows: int, size: int) -> _Tiles:
    tiles = -(-counts // size)
    last = jnp.cumsum(tiles, dtype=counts.dtype)  # the number of tiles up to each group
    number = jnp.arange(rows // size + counts.shape[0], dtype=counts.dtype)
    group = jnp.sum(number[:, None] >= last[None], axis=1, dtype=counts.dtype)
    needed, group = group < counts.shape[0], jnp.minimum(group, counts.shape[0] - 1)
    end = jnp.cumsum(counts, dtype=counts.dtype)[group]
    start = end - counts[group] + (number - (last - tiles)[group]) * size
    return _Tiles(group, jnp.where(needed, start, rows), jnp.where(needed, end - start, 0))


def _empty(shape: tuple[int, ...], dtype: Any, *like: Any) -> Any:
    """Zeros, of a type that a loop can carry into which the others go."""
    axes = sorted(frozenset().union(*map(_compat.varying_axes, like)))
    return _compat.pvary(jnp.zeros(shape, dtype), axes)


def in_tiles(x: Any, w: Any, counts: Any) -> Any:
    """Compute `grouped`. A tile may reach into the next group, whose tiles come later and overwrite it."""
    rows, size = x.shape[0], _size(x.shape[0], w.shape[0])
    x = jnp.pad(x, ((0, size), (0, 0)))

    def multiply(out: Any, tile: _Tiles) -> tuple[Any, None]:
        here = lax.dynamic_slice_in_dim(x, tile.start, size) @ lax.dynamic_index_in_dim(w, tile.group, keepdims=False)
        return lax.dynamic_update_slice_in_dim(out, here, tile.start, 0), None

    out = _empty((rows + size, w.shape[2]), jnp.result_type(x, w), x, w, counts)
    return lax.scan(multiply, out, _tiles(counts, rows, size), unroll=_UNROLLED)[0][:rows]


def sums_in_tiles(x: Any, y: Any, counts: Any) -> Any:
    """Compute `contracted`. The sum of a group is at least float32, until its last tile."""
    rows, size = x.shape[0], _size(x.shape[0], counts.shape[0])
    dtype, shape = jnp.result_type(x, y), (x.shape[1], y.shape[1])
    x, y = (jnp.pad(rows_, ((0, size), (0, 0))) for rows_ in (x, y))
    number = jnp.arange(size, dtype=counts.dtype)[:, None]

    def add(carry: tuple[Any, Any, Any], tile: _Tiles) -> tuple[Any, None]:
        sums, total, before = carry
        own = jnp.where(number < tile.rows, lax.dynamic_slice_in_dim(x, tile.start, size), jnp.zeros((), x.dtype))
        here = lax.dynamic_slice_in_dim(y, tile.start, size)
        more = jnp.einsum("zd,zf->df", own, here, preferred_element_type=total.dtype)
        total = jnp.where(tile.group == before, total, jnp.zeros((), total.dtype)) + more
        sums = lax.dynamic_update_index_in_dim(sums, total.astype(dtype), tile.group, 0)
        return (sums, total, tile.group), None

    tiles = _tiles(counts, rows, size)
    sums, total = (_empty(*one, x, y, counts) for one in (((counts.shape[0], *shape), dtype), (shape, wide(x))))
    return lax.scan(add, (sums, total, tiles.group[0]), tiles, unroll=_UNROLLED)[0][0]


# --- where there is a kernel for it, and mapped ---------------------------------------------------------------------

_ROWS = (((0,), (0,)), ((), ()))
_BY_GROUP = lax.RaggedDotDimensionNumbers(_ROWS, lhs_ragged_dimensions=(0,), rhs_group_dimensions=())


@jax.custom_batching.custom_vmap
def _ragged(x: Any, w: Any, counts: Any) -> Any:
    return lax.ragged_dot(x, w, counts)


@jax.custom_batching.custom_vmap
def _ragged_sums(x: Any, y: Any, counts: Any) -> Any:
    return lax.ragged_dot_general(x, y, counts, _BY_GROUP)


@jax.custom_batching.custom_vmap
def _product(x: Any, w: Any, counts: Any) -> Any:
    return (in_tiles if _compat.runs_on_gpu() else _ragged)(x, w, counts)


@jax.custom_batching.custom_vmap
def _contraction(x: Any, y: Any, counts: Any) -> Any:
    return (sums_in_tiles if _compat.runs_on_gpu() else _ragged_sums)(x, y, counts)


def _products(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
    x, w, counts = _flat(n, mapped, args)
    return _ragged(x, w, counts).reshape(n, x.shape[0] // n, w.shape[-1]), True


def _contractions(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
    x, y, counts = _flat(n, mapped, args)
    return _ragged_sums(x, y, counts).reshape(n, -1, x.shape[-1], y.shape[-1]), True


_ragged.def_vmap(_products)
_product.def_vmap(_products)
_ragged_sums.def_vmap(_contractions)
_contraction.def_vmap(_contractions)


def _flat(n: int, mapped: Any, args: Any) -> tuple[Any, ...]:
    """Put the mapped arrays one after another. The last group of each has the rows that are left over, too."""
    x, other, counts = (a if own else jnp.broadcast_to(a, (n, *a.shape)) for a, own in zip(args, mapped, strict=True))
    rest = x.shape[1] - jnp.sum(counts, axis=1, dtype=counts.dtype)
    counts = counts.at[:, -1].add(rest)
    return tuple(a.reshape(-1, *a.shape[2:]) for a in (x, other, counts))
