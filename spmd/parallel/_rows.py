"""Rows that move one to one: tokens to places and back, and products of rows with the matrices of their groups.

The gradients here are written out. A row goes to one place, so the transpose of a gather is a gather too. JAX would
make a scatter, which adds in the hardware's order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd import custom_vjp


class Moves(NamedTuple):
    """A one-to-one map between choices and places. In front are the same dimensions as of the rows that move.

    Attributes:
      place: The place of each choice.
      kept: Whether each choice has a place.
      choice: The choice in each place.
      filled: Whether each place has a choice.
    """

    place: Any
    kept: Any
    choice: Any
    filled: Any

    def inverse(self) -> Moves:
        """The map from places to choices."""
        return Moves(self.choice, self.filled, self.place, self.kept)


def _picked(x: Any, index: Any, valid: Any) -> Any:
    """The rows of `"... r d"` by index, zeros where the index is not valid."""
    pick = lambda rows, numbers: rows.at[numbers].get(mode="promise_in_bounds", wrap_negative_indices=False)
    for _ in range(index.ndim - 1):
        pick = jax.vmap(pick)
    return jnp.where(valid[..., None], pick(x, index), jnp.zeros((), x.dtype))


def _no_gradient(moves: Moves) -> Moves:
    return Moves(*(None for _ in moves))


@custom_vjp
def dispatched(group: Any, moves: Moves) -> Any:
    """The tokens `"... t d"` in their places. Choice i is one of token i % t."""
    return _picked(group, moves.choice % group.shape[-2], moves.filled)


def _dispatched_fwd(group: Any, moves: Moves) -> Any:
    return dispatched(group, moves), (moves, jnp.arange(group.shape[-2]))


def _dispatched_bwd(kept: Any, cotangent: Any) -> Any:
    moves, tokens = kept
    chosen = _picked(cotangent, moves.place, moves.kept)
    by_choice = (*chosen.shape[:-2], -1, tokens.size, chosen.shape[-1])
    return jnp.sum(jnp.reshape(chosen, by_choice), axis=-3), _no_gradient(moves)


dispatched.defvjp(_dispatched_fwd, _dispatched_bwd)


@custom_vjp
def collected(results: Any, moves: Moves) -> Any:
    """The contents of the places, `"... p d"`, for each choice."""
    return _picked(results, moves.place, moves.kept)


def _collected_bwd(moves: Moves, cotangent: Any) -> Any:
    return _picked(cotangent, moves.choice, moves.filled), _no_gradient(moves)


collected.defvjp(lambda results, moves: (collected(results, moves), moves), _collected_bwd)


# --- products ---------------------------------------------------------------------------------------------------

# JAX's ragged_dot has no vmap in which one operand is not mapped, and none of a vmap. Here the mapped products are one
# product of all groups. Each has the rows of its own groups only, if what is left over belongs to its last group.


@custom_vjp
def grouped(x: Any, w: Any, counts: Any) -> Any:
    """Each row `"r d"` times the matrix of its group, `"g d f"`: the first `counts[0]` rows times the first matrix.

    Rows behind all groups are zeros. What becomes of them in the result is undefined.
    """
    return _product(x, w, counts)


def _grouped_bwd(kept: Any, cotangent: Any) -> Any:
    x, w, counts = kept
    return grouped(cotangent, jnp.swapaxes(w, 1, 2), counts), contracted(x, cotangent, counts), None


grouped.defvjp(lambda *kept: (grouped(*kept), kept), _grouped_bwd)


@custom_vjp
def contracted(x: Any, y: Any, counts: Any) -> Any:
    """For each group the sum over its rows of the outer product of `"r d"` and `"r f"`: `"g d f"`."""
    return _contraction(x, y, counts)


def _contracted_bwd(kept: Any, cotangent: Any) -> Any:
    x, y, counts = kept
    return grouped(y, jnp.swapaxes(cotangent, 1, 2), counts), grouped(x, cotangent, counts), None


contracted.defvjp(lambda *kept: (contracted(*kept), kept), _contracted_bwd)


@jax.custom_batching.custom_vmap
def _product(x: Any, w: Any, counts: Any) -> Any:
    return jax.lax.ragged_dot(x, w, counts)


@_product.def_vmap
def _products(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
    x, w, counts = _flat(n, mapped, args)
    return _product(x, w, counts).reshape(n, x.shape[0] // n, w.shape[-1]), True


_ROWS = (((0,), (0,)), ((), ()))
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(_ROWS, lhs_ragged_dimensions=(0,), rhs_group_dimensions=())


@jax.custom_batching.custom_vmap
def _contraction(x: Any, y: Any, counts: Any) -> Any:
    return jax.lax.ragged_dot_general(x, y, counts, _BY_GROUP)


@_contraction.def_vmap
def _contractions(n: int, mapped: Any, *args: Any) -> tuple[Any, bool]:
    x, y, counts = _flat(n, mapped, args)
    return _contraction(x, y, counts).reshape(n, -1, x.shape[-1], y.shape[-1]), True


def _flat(n: int, mapped: Any, args: Any) -> tuple[Any, ...]:
    """The mapped arrays one after another. The last group of each has the rows that are left over, too."""
    x, other, counts = (a if own else jnp.broadcast_to(a, (n, *a.shape)) for a, own in zip(args, mapped, strict=True))
    rest = x.shape[1] - jnp.sum(counts, axis=1, dtype=counts.dtype)
    counts = counts.at[:, -1].add(rest)
    return tuple(a.reshape(-1, *a.shape[2:]) for a in (x, other, counts))
