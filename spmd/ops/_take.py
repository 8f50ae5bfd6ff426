"""`take`: rows of a table by number, whether the rows are divided or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd import _lax
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.comm._local import rearranged
from spmd.errors import LayoutError
from spmd.ops._einsum import factors_that_agree
from spmd.ops._partial_sums import finish, land, placed, plain_dims, right_names


def take(table: Any, ids: Any, pattern: str, /, **names: Any) -> jax.Array:
    """Look up rows by number: `take(e, ids, "[v/tp] d, b/dp s -> b/dp s d")`.

    The brackets say which dimension of the table the integers count. If the rows are divided, each device looks up its
    own, and the right side says what becomes of the parts, as in `einsum`: without tp a psum, with `s/tp` a
    psum_scatter, and `{U:tp}` leaves a partial sum. A number outside the table gives zeros, in every mode.

    A dimension that the table and ids share is a batch dimension: `take(x, ids, "b/dp [s] d, b/dp n -> b/dp n d")`
    looks up the numbers of each b in the table of that b. It has one placement in both.

    Communication: none if the rows are whole. If they are divided, forward a psum (2S(n-1)/n bytes) or psum_scatter
    (S(n-1)/n) of the result; backward a psum costs nothing and a psum_scatter costs an all-gather. The gradient of a
    table that is equal by JAX's own type on an axis that divides ids costs one psum. An axis that divides a batch
    dimension sends nothing.

    Args:
      table: The table. One of its dimensions, at any position, is in brackets.
      ids: Integers of any rank. An axis of the table divides none of their dimensions but the shared ones.
      pattern: `"table, ids -> result"`. The result has the dimensions of ids and those of the table, without the
        bracketed one, in any order. Those that both have it has once.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      The rows.

    Raises:
      CommunicationError: If one axis divides both in different dimensions, a shared dimension has two placements, or
        the right side asks for a gather, a slice or a relayout.
      LayoutError: On a malformed pattern, or numbers that are not integers.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> @spmd.kernel("v/tp d, s -> s d", mesh=mesh)
      ... def embed(table, ids):
      ...     return spmd.take(table, ids, "[v/tp] d, s -> s d")
      >>> print(embed(jnp.arange(16.0).reshape(8, 2), jnp.array([6, 0, 3])))
      [[12. 13.]
       [ 0.  1.]
       [ 6.  7.]]
    """
    call = open_call(
        "take",
        pattern,
        names,
        arrays=(table, ids),
        inputs=2,
        example='take(table, ids, "[v/tp] d, b -> b d")',
        also={},
        shown=("table", "ids"),
    )
    for layout in (*call.pattern.inputs, *call.pattern.outputs):
        plain_dims(call, layout)
    _apart(call)
    rows = call.operand(table, 0, name="the table")
    numbers = call.operand(ids, 1, name="ids")
    dim = _indexed(call, rows)
    have = _factors(call, rows, numbers, dim)
    right = right_names(call, call.pattern.outputs[0], have)
    if missing := [n for n in have if n not in right]:
        gone = have[missing[0]]
        call.fail(f"take keeps every dimension, and {gone.name} is on the left only.", at=gone.span, error=LayoutError)
    key = rows.factors[dim]
    partial = {axis: f"the table is {{U:{axis}}}" for axis in rows.layout.unreduced}
    partial |= {axis: f"the rows {placed(key.name, key.axes)} are looked up where they lie" for axis in key.axes}
    landing = land(call, have, partial, right)
    shared = [name for name in rows.names if name in numbers.names]
    of_table, of_ids = (tuple(name for name in operand.names if name not in shared) for operand in (rows, numbers))
    at = of_table.index(key.name)
    made = [*shared, *of_table[:at], *of_ids, *of_table[at + 1 :]]
    look_up = lambda table, ids: _rows(call, table, ids, at, key)
    for i in reversed(range(len(shared))):  # within the vmap of the names before it, which are gone there
        places = [[n for n in names if n not in shared[:i]].index(shared[i]) for names in (rows.names, numbers.names)]
        look_up = jax.vmap(look_up, tuple(places))
    with call.scope():
        out = look_up(rows.x, numbers.x)
        out = rearranged(out, [[name] for name in made], [[name] for name in right])
        out = finish(out, landing)
    return call.result(out)


def _rows(call: Call, table: Any, ids: Any, dim: int, key: Factor) -> Any:
    """The rows that lie here, and zeros for all others."""
    here, mine = nearby(call, _lax.at_least_int32(ids), key)
    found = jnp.take(table, jnp.clip(here, 0, key.local - 1), axis=dim, mode="clip")
    mask = mine.reshape((1,) * dim + ids.shape + (1,) * (table.ndim - dim - 1))
    return jnp.where(mask, found, jnp.zeros_like(found))


def nearby(call: Call, ids: Any, key: Factor) -> tuple[Any, Any]:
    """Where the rows of these numbers, of at least 32 bits, are in this block of `key`, and whether they are in it."""
    start: Any = 0
    if call.frame.explicit and key.axes:
        start = call.start(key)
        ids = ids.astype(start.dtype) if start.dtype.itemsize > ids.dtype.itemsize else ids
        start = start.astype(ids.dtype)
    here = ids - start
    return here, (here >= 0) & (here < key.local) & (ids >= 0)


def _indexed(call: Call, rows: Operand) -> int:
    dims = [i for i, factor in enumerate(rows.factors) if factor.bracket]
    if len(dims) != 1:
        rule = "take looks up along the one dimension of the table that is in brackets."
        got = f"{len(dims)} dimensions in brackets"
        advice = 'as in "[v/tp] d, b s -> b s d"' if not dims else "a pair of brackets around one name"
        call.fail(rule, got=[got], advice=advice, error=LayoutError)
    return dims[0]


def _apart(call: Call) -> None:
    """Check that no dimension of the ids has the name of the one along which they count."""
    table, ids = call.pattern.inputs
    counted = {atom.name for dim in table.dims if dim.bracket for atom in dim.atoms}
    if clash := next((atom for atom in ids.atoms if atom.name in counted), None):
        rule = f"ids count along {clash.name} of the table, and have a dimension of that name: give it another name."
        call.fail(rule, at=clash.span, error=LayoutError)


def _factors(call: Call, rows: Operand, numbers: Operand, dim: int) -> dict[str, Factor]:
    """The factors of the result by name, after the checks that tie the two operands together."""
    if not jnp.issubdtype(numbers.x.dtype, jnp.integer):
        call.fail(f"ids are integers, not {numbers.x.dtype}.", error=LayoutError)
    if numbers.layout.unreduced:
        call.fail("ids are complete: a partial sum of numbers points to no row.", error=LayoutError)
    have = factors_that_agree(call, [rows, numbers])
    owners = {axis: factor for factor in rows.factors for axis in factor.axes}
    for factor in numbers.factors:
        for axis in factor.axes if factor.name not in rows.names else ():
            if axis in owners or axis in rows.layout.unreduced:
                other = placed(owners[axis].name, owners[axis].axes) if axis in owners else f"{{U:{axis}}}"
                call.fail(
                    f"axis {axis} divides ids and is used by the table: a device would look up its own numbers in "
                    "its own part of the table only.",
                    at=factor.span,
                    got=[f"the table: {other}", f"ids: {placed(factor.name, factor.axes)}"],
                    advice=f'all_gather(ids, "{numbers.layout.short} -> {numbers.layout.without(axis).short}") first, '
                    f"or gather the table",
                )
    return {name: factor for name, factor in have.items() if name != rows.names[dim]}
