"""`take`: rows of a table by number, whether the rows are divided or not."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from spmd.comm import _lax
from spmd.comm._call import Call, Factor, Operand, open_call
from spmd.comm._marks import rearranged
from spmd.errors import not_one_of
from spmd.language import Atom, Layout
from spmd.ops._einops import factors_that_agree, marked_axes, owner_of_axes
from spmd.ops._reduce import finish, land, placed, plain_dims, right_names


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
    example, shown, given = 'take(table, ids, "[v/tp] d, b -> b d")', ("table", "ids"), (table, ids)
    call = open_call("take", pattern, names, arrays=given, inputs=2, example=example, also={}, shown=shown)
    plain_dims(call, *call.pattern.layouts)
    _apart(call)
    rows = call.operand(table, 0, name="the table")
    numbers = call.operand(ids, 1, name="ids")
    dim = _indexed(call, rows)
    _check_ids(call, [numbers])
    have = _factors(call, rows, numbers, dim)
    right = right_names(call, have)
    if missing := [n for n in have if n not in right]:
        gone = have[missing[0]]
        call.fail(f"take keeps every dimension, and {gone.name} is on the left only.", at=gone.span)
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
    return call.result(out, due=True)


def _rows(call: Call, table: Any, ids: Any, dim: int, key: Factor) -> Any:
    """The rows that lie here, and zeros for all others."""
    here, mine = nearby(call, _lax.at_least_int32(ids), key)
    found = jnp.take(table, jnp.clip(here, 0, key.local - 1), axis=dim, mode="clip")
    mask = mine.reshape((1,) * dim + ids.shape + (1,) * (table.ndim - dim - 1))
    return jnp.where(mask, found, jnp.zeros_like(found))


def nearby(call: Call, ids: Any, key: Factor) -> tuple[Any, Any]:
    """Return where the rows of these numbers, of at least 32 bits, are in this block of `key`, and whether they are in
    it."""
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
        call.fail(rule, got=[got], advice=advice)
    return dims[0]


def _check_ids(call: Call, numbers: list[Operand]) -> None:
    if fault := next((one.x.dtype for one in numbers if not jnp.issubdtype(one.x.dtype, jnp.integer)), None):
        call.fail(f"ids are integers, not {fault}.")
    if numbers[0].layout.unreduced:
        call.fail("ids must be complete numbers, and these are a partial sum: psum first.")


def _apart(call: Call) -> None:
    """Check that no dimension of the ids has the name of the one along which they count."""
    table, ids = call.pattern.inputs
    counted = {atom.name for dim in table.dims if dim.bracket for atom in dim.atoms}
    if clash := next((atom for atom in ids.atoms if atom.name in counted), None):
        rule = f"ids count along {clash.name} of the table, and have a dimension of that name: give it another name."
        call.fail(rule, at=clash.span)


def _factors(call: Call, rows: Operand, numbers: Operand, dim: int) -> dict[str, Factor]:
    """The factors of the result by name, after the checks that tie the two operands together."""
    have = factors_that_agree(call, [rows, numbers])
    owners = {axis: factor for factor in rows.factors for axis in factor.axes}
    for factor in numbers.factors:
        for axis in factor.axes if factor.name not in rows.names else ():
            if axis in owners or axis in rows.layout.unreduced:
                other = placed(owners[axis].name, owners[axis].axes) if axis in owners else f"{{U:{axis}}}"
                call.refuse(
                    f"axis {axis} divides ids and is used by the table: a device would look up its own numbers in "
                    "its own part of the table only.",
                    at=factor.span,
                    got=[f"the table: {other}", f"ids: {placed(factor.name, factor.axes)}"],
                    advice=f'all_gather(ids, "{numbers.layout.short} -> {numbers.layout.without(axis).short}") first, '
                    f"or gather the table",
                )
    return {name: factor for name, factor in have.items() if name != rows.names[dim]}


# --- `scatter_add`: rows are added where numbers say. The mirror of `take` --------------------------------------------


_EXAMPLE = 'scatter_add(rows, ids, "n/dp d, n/dp -> [v/dp] d", v=1024)'
Ids = Any  # integers, or a tuple of them


@overload
def scatter_add(
    rows: Any, ids: Ids, pattern: str, /, *, outside: Literal["count"] = "count", **names: Any
) -> tuple[jax.Array, jax.Array]: ...
@overload
def scatter_add(rows: Any, ids: Ids, pattern: str, /, *, outside: Literal["drop"], **names: Any) -> jax.Array: ...
def scatter_add(rows: Any, ids: Ids, pattern: str, /, *, outside: str = "count", **names: Any) -> Any:
    """Add rows to a table by number: `scatter_add(x, ids, "n/a d, n/a -> [v/a] d", v=1024)`.

    Row i is added at place `ids[i]` of the dimension in brackets, which counts in the whole table. The table begins
    with zeros. Each device adds its own rows, and the right side says what becomes of the parts, as in `einsum`. If an
    axis divides the rows, it is summed, or scattered onto the table or its features if it is their minor-most axis
    there, or left in `{U:}`. If it divides only the table, each device adds the rows that belong to its own block.

    Several dimensions may be in brackets, as those of a grid: `scatter_add(mass, (i, j), "n/a, n/a -> [x/a] [y]")`.

    Communication: none if no axis divides the rows. Otherwise, for a partial table of S bytes, a psum_scatter
    (S(n-1)/n bytes) or a psum (2S(n-1)/n); backward a psum_scatter costs an all-gather and a psum costs nothing. S does
    not depend on the number of rows: a few rows for a large table are cheaper with `exchange`, to their devices. The
    count is a psum of 4 bytes, if it is used. The gradient of rows that are equal by JAX's own type on an axis that
    divides the table costs one psum.

    Args:
      rows: What is added, of numbers. It has the dimensions of the ids and those of the table that are not in brackets.
      ids: Integers of any rank. If several dimensions are in brackets, a tuple with an array for each.
      pattern: `"rows, ids -> table"`, with one dimension or more of the table in brackets.
      outside: What becomes of rows whose number is not in the table. They are added nowhere. "count" also returns how
        many they are. "drop" does not.
      **names: Sizes or mesh axes of names in the pattern: the kernel's signature or a keyword says how large the
        bracketed dimensions are.

    Returns:
      The table. With `outside="count"` also the number of ids that are not in the table: a scalar, equal on all
      devices.

    Raises:
      CommunicationError: If a dimension has two placements, or the right side asks for a gather, a slice or a relayout.
      LayoutError: On a malformed pattern, numbers that are not integers, rows of booleans, or an unknown `outside`.
      SizeError: If the size of a dimension in brackets is not known.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> @spmd.kernel("n/a, n/a -> v/a, scalar", mesh=mesh, v=4)
      ... def histogram(weight, ids):
      ...     return spmd.scatter_add(weight, ids, "n/a, n/a -> [v/a]")
      >>> table, outside = histogram(jnp.ones(8), jnp.array([3, 0, 1, 3, 3, 9, 1, 0]))
      >>> print(table, outside)
      [2. 2. 0. 3.] 1
    """
    every = ids if isinstance(ids, tuple) else (ids,)
    also = {"outside": "drop"} if outside == "drop" else None
    shown, given = ("rows", "ids"), (rows, *every[:1])
    call = open_call("scatter_add", pattern, names, arrays=given, inputs=2, example=_EXAMPLE, also=also, shown=shown)
    if outside not in ("count", "drop"):
        call.fail(not_one_of("outside", outside, ("count", "drop")))
    plain_dims(call, *call.pattern.layouts)
    added = call.operand(rows, 0, name="rows")
    numbers = [call.operand(one, 1, name="ids") for one in every]
    have = factors_that_agree(call, [added, numbers[0]])
    owners = owner_of_axes(call, have, call.dst.names)
    keys = _keys(call, owners, added, numbers)
    rest = [name for name in added.names if name not in numbers[0].names]
    known = {name: have[name] for name in rest} | {key.name: key for key in keys}
    right = right_names(call, known)
    if missing := [name for name in known if name not in right]:
        gone = have[missing[0]]
        rule = (
            f"{gone.name} is a dimension of the rows that the ids do not have, so the table on the right must have it."
        )
        call.fail(rule, at=gone.span)
    summed = {axis: f"{placed(f.name, f.axes)} is added up" for f in numbers[0].factors for axis in f.axes}
    landing = land(call, known, marked_axes(call, [added], owners) | summed, right)
    with call.scope():
        table, lost = _table(call, added, numbers, keys, rest)
        table = finish(rearranged(table, [[name] for name in known], [[name] for name in right]), landing)
        lost = _lax.psum(lost, call.frame.in_mesh_order(summed)) if call.frame.explicit else lost
    table = call.result(table, call.dst.without_brackets(), due=True)
    return (table, call.result(lost, Layout("scalar"), due=True)) if outside == "count" else table


def _keys(call: Call, owners: dict[str, Factor], added: Operand, numbers: list[Operand]) -> tuple[Factor, ...]:
    """The dimensions of the table that the ids count, as large as the table is before its parts are summed: divided by
    the axes in front that divide no rows."""
    dst, first = call.dst, numbers[0]
    marked = [dim for dim in dst.dims if dim.bracket]
    if len(marked) != len(numbers) or any(len(dim.atoms) != 1 for dim in marked):
        rule = "scatter_add has an array of ids for each dimension of the table in brackets, which has one name."
        count = lambda n, what: f"{n} {what}{'s' * (n != 1)}"
        got = [count(len(numbers), "array") + " of ids", count(len(marked), "dimension") + " in brackets"]
        call.fail(rule, got=got, advice=f"as in {_EXAMPLE}")
    _check_ids(call, numbers)
    if added.x.dtype == jnp.bool_:
        call.fail("scatter_add adds numbers, and the rows are booleans.")
    if alone := [factor for factor in first.factors if factor.name not in added.names]:
        rule = f"{alone[0].name} is a dimension of the ids, so the rows must have it: each id belongs to one row."
        call.fail(rule, at=alone[0].span)
    atoms = [dim.atoms[0] for dim in marked]
    if both := [atom for atom in atoms if atom.name in (*added.names, *first.names)]:
        rule = f"{both[0].name} is in brackets, and it is on the left too: scatter_add has no batch dimensions."
        call.fail(rule, at=both[0].span, advice="jax.vmap over it")
    taken = {*owners, *added.layout.unreduced}
    return tuple(_key(call, atom, taken) for atom in atoms)


def _key(call: Call, atom: Atom, taken: set[str]) -> Factor:
    size = call.factor(atom).size
    axes = tuple(itertools.takewhile(lambda axis: axis not in taken, atom.axes or ()))
    return Factor(atom.name, axes, call.local(size, axes, atom.name, atom.span), size, True, atom.span)


def _table(call: Call, rows: Operand, numbers: list[Operand], keys: tuple[Factor, ...], rest: list[str]) -> Any:
    """This device's rows in a table of `rest` and `keys`, and how many of its ids are outside."""
    names = [*numbers[0].names, *rest]
    x = jnp.transpose(rows.x, [rows.names.index(name) for name in names])
    places, mine, inside = [], jnp.bool_(True), jnp.bool_(True)
    for number, key in zip(numbers, keys, strict=True):
        ids = _lax.at_least_int32(number.x)
        here, own = nearby(call, ids, key)
        places.append(here)
        mine &= own
        inside &= (ids >= 0) & (ids < key.size)
    shape, more = [key.local for key in keys], x.shape[numbers[0].x.ndim :]
    size = math.prod(shape)
    if size < jnp.iinfo(jnp.int32).max:  # one number for each place: XLA adds by several in up to six times the time
        places = [jnp.where(mine, place, 0).astype(jnp.int32) for place in places]
        places = [functools.reduce(lambda at, one: at * one[0] + one[1], zip(shape, places, strict=True), 0)]
    beyond = [size] if len(places) == 1 else shape
    at = tuple(jnp.where(mine, place, end) for place, end in zip(places, beyond, strict=True))  # no row is added there
    table = jnp.zeros([*beyond, *more], x.dtype).at[at].add(x, mode="drop").reshape(*shape, *more)
    order = [*range(len(keys), table.ndim), *range(len(keys))]
    return jnp.transpose(table, order), jnp.sum(~inside, dtype=jnp.int32)
