"""Rows that are counted: in `logits[jnp.arange(n), labels]` each device counts the rows of its own block.

JAX puts the indices of several dimensions side by side, a column for each. A column of 0, 1, 2... picks all rows of a
dimension in order, and so it fits a block as well as the whole. The rows that are picked lie as this dimension does,
and as the other columns do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

import spmd.checker._integers as integers
from spmd._jaxprs import shape_of
from spmd.checker._source import called_in_jax
from spmd.checker._state import Dim, State, axes_of_dim, free, hidden, size_of, unify


def fitted(walk: Any, eqn: Any, operands: Sequence[State]) -> Sequence[State]:
    """The columns, as they are put side by side. One that counts fits a divided one; `counted` says what it must be."""
    aval = eqn.outvars[0].aval
    columns = eqn.params["dimension"] == aval.ndim - 1 and aval.shape[-1] == len(operands) and aval.dtype.kind in "iu"
    if not columns or not called_in_jax(eqn, "_index_to_gather"):
        return operands
    walk.columns[eqn.outvars[0]] = operands
    out = list(operands)
    for d in range(aval.ndim - 1):
        count = [i for i, one in enumerate(operands) if _counts(one, d)]
        divided = any(axes_of_dim(one.dims[d]) for one in operands)
        for i in count if divided else ():
            dims = out[i].dims
            out[i] = out[i]._replace(dims=(*dims[:d], free(aval.shape[d]), *dims[d + 1 :]))
    return out


def varied(walk: Any, eqn: Any, operands: Sequence[State]) -> Sequence[State]:
    """JAX makes indices vary where they meet an array that does. Their columns stay."""
    [atom] = eqn.invars
    if walk.columns and not isinstance(atom, Literal) and atom in walk.columns:
        walk.columns[eqn.outvars[0]] = walk.columns[atom]
    return walk.step(eqn, operands)


def counting(walk: Any, eqn: Any) -> list[bool]:
    """For each operand of a concatenation whether it is a column that counts: of a whole it counts further."""
    columns = walk.columns.get(eqn.outvars[0], ())
    return [any(_counts(one, d) for d in range(len(one.dims))) for one in columns] or [False] * len(eqn.invars)


def _counts(column: State, d: int) -> bool:
    return column.table is not None and integers.counts(column.table, d)


def counted(
    walk: Any, eqn: Any, operands: Sequence[State], picked: Sequence[int]
) -> tuple[dict[int, int], dict[int, Dim]]:
    """What is counted among the dimensions that indices pick from.

    Args:
      walk: The walk.
      eqn: A gather or a scatter.
      operands: The states of what is indexed, of the indices, and of updates.
      picked: The dimension that each column picks from.

    Returns:
      For each dimension that is counted, the dimension of the indices that counts it; and how those lie.
    """
    array, columns = operands[0], walk.columns.get(eqn.invars[1], ())
    before, rows = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])[:-1]
    found: dict[int, int] = {}
    dims: dict[int, Dim] = {}
    if len(columns) != len(picked):
        return found, dims
    for i, n in enumerate(rows):
        if not any(_counts(one, i) for one in columns):
            continue
        all_of_it = [_counts(one, i) and before[d] == n for one, d in zip(columns, picked, strict=True)]
        found.update((d, i) for d, every in zip(picked, all_of_it, strict=True) if every)
        given = [
            (array.dims[d], array) if every else (one.dims[i], one)
            for one, d, every in zip(columns, picked, all_of_it, strict=True)
        ]
        dims[i] = _together(walk, eqn, operands, given)
    return found, dims


def _together(walk: Any, eqn: Any, operands: Sequence[State], given: Sequence[tuple[Dim, State]]) -> Dim:
    (dim, first), *rest = given
    unknown = first.different
    for other, state in rest:
        both = unify(dim, other, unknown, state.different)
        if both is None:
            walk.disagree(eqn, operands, [(dim, other)])
            return hidden(size_of(dim))
        dim, unknown = both, unknown | state.different
    return dim
