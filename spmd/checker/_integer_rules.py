"""What an equation makes of tables of integers: NumPy, for all devices at once."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import spmd.checker._permutations as permutations
from spmd._recent import Recent
from spmd.checker._integers import (
    MOST_ENTRIES,
    MOST_ON_ONE,
    Sizes,
    Table,
    Unknown,
    axes_together,
    constant,
    cut_out,
    dense,
    is_followed,
    is_listed,
    led,
    spread,
    table_of,
    wrapped_step,
)
from spmd.checker._table import groups

Rule = Callable[[Any, Sequence[Table], Sizes], Any]  # an equation to the table of its result, or a list of them

_EVALUATED = Recent(1024)  # the layers of a model ask for the same positions and masks
_KEPT = 1 << 14  # the bytes of a table that is kept for them


def evaluate(eqn: Any, operands: Sequence[Table | None], sizes: Sizes) -> Sequence[Table | None]:
    """What an equation gives on each device: a table for each result, or None.

    Args:
      eqn: An equation of a jaxpr that holds no other jaxpr.
      operands: What its operands are.
      sizes: The sizes of the mesh axes, in mesh order.

    Returns:
      A table or None for each result. Inside a loop, what the loop slices has no table: it is another value in each
      step.
    """
    rule = _RULES.get(eqn.primitive.name)
    if rule is _same:
        return operands
    known = [table for table in operands if table is not None]
    if rule is None or len(known) < len(operands):
        return [None] * len(eqn.outvars)
    try:
        key = (rule, *known, eqn.outvars[0].aval.shape, *eqn.params.items(), *sizes.items())
        found = _EVALUATED.get(key)
    except TypeError:  # a parameter has no hash
        return _evaluated(rule, eqn, known, sizes)
    if found is None:
        found = _evaluated(rule, eqn, known, sizes)
        if all(table is None or len(table.data) <= _KEPT for table in (*known, *found)):
            _EVALUATED[key] = found
    return found


def _evaluated(rule: Rule, eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Sequence[Table | None]:
    if all(0 in var.aval.shape for var in eqn.outvars):  # no rule need say what is in there
        return [constant(np.zeros(var.aval.shape, var.aval.dtype)) for var in eqn.outvars]
    try:
        with np.errstate(all="ignore"):
            found = rule(eqn, tables, sizes)
    except Unknown:
        return [None] * len(eqn.outvars)
    return found if isinstance(found, list) else [found]


# --- rules: elementwise ----------------------------------------------------------------------------------------


def _elementwise(fn: Callable[..., Any], *, linear: bool = False) -> Rule:
    """The rule of a function of single elements. Along a dimension in which all operands are constant, the result is
    too. A linear function of integers works on steps as it does on entries."""

    def rule(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
        shape = eqn.outvars[0].aval.shape
        axes, rank = axes_together(tables, sizes), len(shape)
        keeps = linear and tables[0].dtype.kind in "iu"
        arrays = [table for table in tables if table.shape]
        listed = [d for d in range(rank) if any(is_listed(t, d) or (t.steps[d] and not keeps) for t in arrays)]
        operands = []
        for table in tables:
            entries = led(spread(table, listed) if table.shape else table.entries, table, axes)
            operands.append(entries if table.shape else entries.reshape(entries.shape + (1,) * rank))
        if math.prod(map(max, zip(*(entries.shape for entries in operands), strict=True))) > MOST_ENTRIES:
            raise Unknown
        found = np.asarray(fn(*operands))
        if not keeps:
            return table_of(axes, found, shape)
        steps = [0 if d in listed else fn(*(t.steps[d] if t.shape else 0 for t in tables)) for d in range(rank)]
        return table_of(axes, found, shape, steps)

    return rule


def _exactly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results on floats are kept only where they are exact, whatever a compiler makes of them."""

    def run(*operands: Any) -> Any:
        dtype = getattr(operands[0], "dtype", None)
        if dtype is None or dtype.kind in "biu":
            return fn(*operands)
        return _kept(fn(*(x.astype(np.float64) for x in operands)), dtype)

    return run


def _kept(wide: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats in another type, if it holds them exactly and they are short enough for a computation to be exact."""
    found = wide.astype(dtype)
    if not ((wide.astype(np.float32) == wide) & (found.astype(np.float64) == wide)).all():
        raise Unknown
    return found


def _mul(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    for table, other in (tables, tables[::-1]):
        whole = table.shape == eqn.outvars[0].aval.shape
        if whole and any(table.steps) and other.entries.size == 1 and not any((*other.axes, *other.steps)):
            by = int(other.entries.item())
            entries = table.entries * other.entries.reshape(())
            return table_of(table.axes, entries, table.shape, [s * by for s in table.steps])
    return _product(eqn, tables, sizes)


_product = _elementwise(_exactly(operator.mul))


def _div(x: Any, y: Any) -> Any:
    if x.dtype.kind not in "iu":
        return _exact_quotient(x, y)
    _refuse_division(x, y)
    quotient = x // y
    return (quotient + ((quotient * y != x) & ((x < 0) != (y < 0)))).astype(x.dtype)  # lax rounds towards zero


def _exact_quotient(x: Any, y: Any) -> Any:
    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    if not (x64 / y64 * y64 == x64).all():
        raise Unknown
    return _kept(x64 / y64, x.dtype)


def _rem(x: Any, y: Any) -> Any:
    _refuse_division(x, y)
    return np.fmod(x, y)


def _refuse_division(x: Any, y: Any) -> None:
    """Each backend decides what these give."""
    if (y == 0).any() or (x.dtype.kind == "i" and ((y == -1) & (x == np.iinfo(x.dtype).min)).any()):
        raise Unknown


def _shift(fn: Callable[..., Any], view: str = "") -> Callable[..., Any]:
    def run(x: Any, by: Any) -> Any:
        bits = 8 * x.dtype.itemsize
        if (by < 0).any() or (by >= bits).any():
            raise Unknown
        kind = np.dtype(f"{view or x.dtype.kind}{x.dtype.itemsize}")
        return fn(x.astype(kind), by.astype(kind)).astype(x.dtype)

    return run


def _select(which: Any, *cases: Any) -> Any:
    if (which < 0).any() or (which >= len(cases)).any():
        raise Unknown
    found = cases[0]
    for i, case in enumerate(cases[1:], 1):
        found = np.where(which == i, case, found)
    return found


def _power(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    exponent = eqn.params["y"]
    if not 0 < exponent <= 16:
        raise Unknown
    return _elementwise(_exactly(lambda x: functools.reduce(operator.mul, [x] * exponent)))(eqn, tables, sizes)


def _round(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    to_even = int(eqn.params["rounding_method"]) == 1
    return _elementwise(_exactly(np.round if to_even else lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x)))(
        eqn, tables, sizes
    )


def _convert(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    [table], dtype = tables, eqn.params["new_dtype"]
    if not is_followed(dtype):
        raise Unknown
    if table.dtype.kind in "iu" and dtype.kind in "iu" and any(table.steps):
        grown = [step * (n - 1) for step, n in zip(table.steps, table.shape, strict=True)]
        low = int(table.entries.min()) + sum(min(0, g) for g in grown)
        high = int(table.entries.max()) + sum(max(0, g) for g in grown)
        if all(np.iinfo(t).min <= low and high <= np.iinfo(t).max for t in (table.dtype, dtype)):
            return table_of(table.axes, table.entries.astype(dtype), table.shape, table.steps)
    return _elementwise(functools.partial(_cast, dtype=dtype))(eqn, tables, sizes)


def _cast(x: Any, dtype: np.dtype) -> Any:
    if dtype.kind == "b":
        return x != 0
    if dtype.kind not in "iu":
        return _kept(x.astype(np.float64), dtype)
    if x.dtype.kind not in "biu":
        x = np.trunc(x.astype(np.float64))
        if not ((x >= np.iinfo(dtype).min) & (x <= np.iinfo(dtype).max)).all():
            raise Unknown
    return x.astype(dtype)


# --- rules: shapes ---------------------------------------------------------------------------------------------


def _iota(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    shape, dim, dtype = eqn.params["shape"], eqn.params["dimension"], eqn.params["dtype"]
    if dtype.kind in "iu":
        return table_of((), np.zeros((1,) * len(shape), dtype), shape, [int(d == dim) for d in range(len(shape))])
    if shape[dim] > MOST_ON_ONE or not is_followed(dtype):
        raise Unknown
    counts = [n if d == dim else 1 for d, n in enumerate(shape)]
    return table_of((), _kept(np.arange(shape[dim], dtype=np.float64), dtype).reshape(counts), shape)


def _axis_index(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    [axis] = _names(eqn, sizes)
    return table_of((axis,), np.arange(sizes[axis], dtype=eqn.outvars[0].aval.dtype), ())


def _same(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> list[Table]:
    return list(tables)


def _broadcast(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    [table], shape = tables, eqn.params["shape"]
    lead = len(table.axes)
    counts, steps = [1] * len(shape), [0] * len(shape)
    for dim, to in enumerate(eqn.params["broadcast_dimensions"]):
        counts[to], steps[to] = table.counts[lead + dim], table.steps[dim]
    return table_of(table.axes, table.entries.reshape([*table.counts[:lead], *counts]), shape, steps)


def _transpose(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    [table], order = tables, eqn.params["permutation"]
    lead = len(table.axes)
    entries = table.entries.transpose([*range(lead), *(lead + d for d in order)])
    return table_of(table.axes, entries, [table.shape[d] for d in order], [table.steps[d] for d in order])


def _reshape(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    [table], shape = tables, eqn.outvars[0].aval.shape
    if (eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape") or 0 in shape:
        raise Unknown
    counts, steps, listed = [1] * len(shape), [0] * len(shape), []
    for olds, news in groups(table.shape, shape):
        step = _common_step(table, olds)
        for new in reversed(news):
            if step is None:
                counts[new] = shape[new]
            else:
                steps[new], step = step, step * shape[new]
        listed += olds if step is None else []
    entries = dense(table, listed)
    return table_of(table.axes, entries.reshape([*entries.shape[: len(table.axes)], *counts]), shape, steps)


def _common_step(table: Table, dims: Sequence[int]) -> int | None:
    """The step along dimensions that are merged into one, if there is one step."""
    dims = [d for d in dims if table.shape[d] > 1]
    if any(is_listed(table, d) for d in dims):
        return None
    for outer, inner in itertools.pairwise(dims):
        if table.steps[outer] != wrapped_step(table.steps[inner] * table.shape[inner], table.dtype):
            return None
    return table.steps[dims[-1]] if dims else 0


def _slice(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    return cut_out(tables[0], starts, strides or (1,) * len(starts), eqn.outvars[0].aval.shape)


def _rev(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    [table], dims = tables, eqn.params["dimensions"]
    starts = [n - 1 if d in dims else 0 for d, n in enumerate(table.shape)]
    return cut_out(table, starts, [-1 if d in dims else 1 for d in range(len(table.shape))], table.shape)


def _dynamic_slice(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    table, *at = tables
    cut = eqn.params["slice_sizes"]
    if any(is_listed(table, d) and n != table.shape[d] for d, n in enumerate(cut)):
        return _block_of(eqn, tables, sizes)
    axes = axes_together(tables, sizes)
    entries = led(table.entries, table, axes)
    for d, start in enumerate(at):
        if table.steps[d]:
            first = np.clip(start.entries.astype(np.int64), 0, table.shape[d] - cut[d]) * table.steps[d]
            first = led(first.astype(table.dtype), start, axes)
            entries = entries + first.reshape(first.shape + (1,) * len(cut))
    return table_of(axes, entries, cut, table.steps)


# --- rules: listed one by one ----------------------------------------------------------------------------------


def _listing(fn: Callable[..., Any]) -> Rule:
    """A rule on all values, with a dimension for each axis in front: `fn(parameters, number of axes, *arrays)`."""

    def rule(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> list[Table]:
        axes = axes_together(tables, sizes) if tables else ()
        devices = [sizes[axis] for axis in axes]
        if math.prod(devices) * max(var.aval.size for var in (*eqn.invars, *eqn.outvars)) > MOST_ENTRIES:
            raise Unknown
        arrays = [np.broadcast_to(led(dense(t), t, axes), (*devices, *t.shape)) for t in tables]
        found = fn(eqn.params, len(axes), *arrays)
        return [table_of(axes, x, x.shape[len(axes) :]) for x in (found if isinstance(found, list) else [found])]

    return rule


def _each(fn: Callable[..., Any]) -> Rule:
    """A rule on the values of one device: `fn(parameters, *arrays)`, with a list of results."""

    def run(params: Any, lead: int, *arrays: np.ndarray) -> list[np.ndarray]:
        devices = arrays[0].shape[:lead]
        found = [fn(params, *(x[at] for x in arrays)) for at in np.ndindex(devices)]
        return [np.stack(x).reshape((*devices, *x[0].shape)) for x in zip(*found, strict=True)]

    return _listing(run)


def _reduction(fn: np.ufunc) -> Rule:
    def run(params: Any, lead: int, x: np.ndarray) -> Any:
        axes = tuple(lead + d for d in params["axes"])
        if 0 in x.shape or (fn is np.multiply and x.dtype.kind not in "iu"):
            raise Unknown
        return _summed(x, axes) if fn is np.add else fn.reduce(x, axis=axes, dtype=x.dtype)

    return _listing(run)


def _summed(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """A sum. A sum of floats counts only if it is exact in any order."""
    if x.dtype.kind in "iu":
        return np.add.reduce(x, axis=axes, dtype=x.dtype)
    wide = x.astype(np.float64)
    if not (wide == np.floor(wide)).all() or np.abs(wide).sum(axes).max(initial=0) > 2 ** min(
        24, jnp.finfo(x.dtype).nmant + 1
    ):
        raise Unknown
    return wide.sum(axes).astype(x.dtype)


def _cumulative(fn: np.ufunc) -> Rule:
    def run(params: Any, lead: int, x: np.ndarray) -> Any:
        at = lead + params["axis"]
        if fn in (np.add, np.multiply) and x.dtype.kind not in "iu":
            raise Unknown
        x = np.flip(x, at) if params["reverse"] else x
        found = fn.accumulate(x, axis=at, dtype=x.dtype)
        return np.flip(found, at) if params["reverse"] else found

    return _listing(run)


def _first_of(fn: Callable[..., Any]) -> Rule:
    def run(params: Any, lead: int, x: np.ndarray) -> Any:
        [dim] = params["axes"]
        return fn(x, axis=lead + dim).astype(params["index_dtype"])

    return _listing(run)


def _split(params: Any, lead: int, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(params["sizes"])[:-1], axis=lead + params["axis"])


def _tile(params: Any, lead: int, x: np.ndarray) -> np.ndarray:
    return np.tile(x, (1,) * lead + tuple(params["reps"]))


def _pad(params: Any, x: np.ndarray, value: np.ndarray) -> list[np.ndarray]:
    for dim, (low, high, inside) in enumerate(params["padding_config"]):
        shape = list(x.shape)
        shape[dim] = max(0, low) + max(0, high) + max(0, x.shape[dim] * (inside + 1) - inside)
        padded = np.full(shape, value)
        padded[(slice(None),) * dim + (slice(max(0, low), shape[dim] - max(0, high), inside + 1),)] = x
        x = padded[(slice(None),) * dim + (slice(max(0, -low), shape[dim] - max(0, -high)),)]
    return [x]


def _block(params: Any, x: np.ndarray, *starts: np.ndarray) -> list[np.ndarray]:
    cut = params["slice_sizes"]
    first = [min(max(0, int(s)), n - size) for s, n, size in zip(starts, x.shape, cut, strict=True)]
    return [x[tuple(slice(s, s + size) for s, size in zip(first, cut, strict=True))]]


def _update(params: Any, x: np.ndarray, block: np.ndarray, *starts: np.ndarray) -> list[np.ndarray]:
    x = x.copy()
    first = [min(max(0, int(s)), n - size) for s, n, size in zip(starts, x.shape, block.shape, strict=True)]
    x[tuple(slice(s, s + size) for s, size in zip(first, block.shape, strict=True))] = block
    return [x]


def _sort(params: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    dim, keys = params["dimension"], arrays[: params["num_keys"]]
    if not params["is_stable"] and len(keys) < len(arrays):
        raise Unknown
    order = np.lexsort(keys[::-1], axis=dim)
    return [np.take_along_axis(x, order, axis=dim) for x in arrays]


def _gather(params: Any, x: np.ndarray, indices: np.ndarray) -> list[np.ndarray]:
    how, cut = params["dimension_numbers"], params["slice_sizes"]
    batch = indices.shape[:-1]
    first = np.zeros((*batch, x.ndim), np.int64)
    first[..., list(how.start_index_map)] = indices
    for dim, at in zip(how.operand_batching_dims, how.start_indices_batching_dims, strict=True):
        first[..., dim] = np.arange(batch[at]).reshape([-1 if d == at else 1 for d in range(len(batch))])
    room = np.array(x.shape) - cut
    if "CLIP" in str(params["mode"]):
        first = np.clip(first, 0, room)
    elif (first < 0).any() or (first > room).any():
        raise Unknown
    window = [d for d in range(x.ndim) if d not in how.collapsed_slice_dims and d not in how.operand_batching_dims]
    where = []
    for d in range(x.ndim):
        inside = [cut[d] if w == d else 1 for w in window]
        offsets = np.arange(cut[d]).reshape(inside) if d in window else np.zeros(inside, int)
        where.append(first[..., d].reshape(batch + (1,) * len(window)) + offsets)
    return [np.moveaxis(x[tuple(where)], range(len(batch), len(batch) + len(window)), how.offset_dims)]


_block_of = _each(_block)


# --- rules: between devices ------------------------------------------------------------------------------------


def _names(eqn: Any, sizes: Sizes) -> tuple[str, ...]:
    """The mesh axes of a collective."""
    names = eqn.params.get("axis_name", eqn.params.get("axes"))
    names = names if isinstance(names, tuple) else (names,)
    if eqn.params.get("axis_index_groups") is not None or any(name not in sizes for name in names):
        raise Unknown
    return names


def _collective(fn: Callable[..., Any]) -> Rule:
    """The rule of a collective: `fn(parameters, axis, array)`.

    The array has a dimension `axis` for the devices that communicate, in the order of their axes, the first one being
    the major one. Devices that do not communicate are in front of it. The result has it where these devices differ.
    """

    def rule(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
        [table], names, aval = tables, _names(eqn, sizes), eqn.outvars[0].aval
        if table.shape == aval.shape and all(sizes[name] == 1 for name in names):
            return table
        axes, rest, entries = _gathered(table, dense(table), names, sizes, aval.size)
        found = fn(eqn.params, len(rest), entries)
        if found.ndim > len(rest) + len(aval.shape):
            return table_of(axes, _scattered(found, axes, names, sizes), aval.shape)
        return table_of(rest, found, aval.shape)

    return rule


def _gathered(
    table: Table, entries: np.ndarray, names: Sequence[str], sizes: Sizes, result: int
) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
    """The entries with one dimension for all devices along `names`, behind those of the other axes."""
    axes = tuple(axis for axis in sizes if axis in table.axes or axis in names)
    rest = tuple(axis for axis in axes if axis not in names)
    counts = tuple(sizes[axis] for axis in axes)
    local = entries.shape[len(table.axes) :]
    if math.prod(counts) * max(math.prod(local), result) > MOST_ENTRIES:
        raise Unknown
    entries = np.broadcast_to(led(entries, table, axes), (*counts, *local))
    order = [axes.index(axis) for axis in (*rest, *names)]
    entries = entries.transpose([*order, *range(len(axes), entries.ndim)])
    return axes, rest, entries.reshape(*entries.shape[: len(rest)], math.prod(sizes[n] for n in names), *local)


def _scattered(entries: np.ndarray, axes: Sequence[str], names: Sequence[str], sizes: Sizes) -> np.ndarray:
    """The entries with a dimension for each axis again, in mesh order."""
    order = [*(axis for axis in axes if axis not in names), *names]
    local = entries.shape[len(axes) - len(names) + 1 :]
    entries = entries.reshape(*(sizes[axis] for axis in order), *local)
    return entries.transpose([*(order.index(axis) for axis in axes), *range(len(axes), entries.ndim)])


def _ppermute(eqn: Any, tables: Sequence[Table], sizes: Sizes) -> Table:
    [table], names = tables, _names(eqn, sizes)
    names = tuple(name for name in sizes if name in names)  # JAX numbers devices in mesh order, whatever was asked for
    count = math.prod(sizes[name] for name in names)
    if any(max(pair) >= count for pair in eqn.params["perm"]):
        raise Unknown  # numbers of devices that this mesh does not have
    source = permutations.sends(eqn.params["perm"], count)
    complete = None not in source
    entries = table.entries if complete else dense(table)
    axes, rest, entries = _gathered(table, entries, names, sizes, 1)
    found = entries.take([0 if i is None else i for i in source], axis=len(rest))
    if not complete:
        found[(slice(None),) * len(rest) + ([i is None for i in source],)] = 0
    return table_of(axes, _scattered(found, axes, names, sizes), table.shape, table.steps if complete else None)


def _all_gather(params: Any, at: int, x: np.ndarray) -> np.ndarray:
    dim = at + params["all_gather_dimension"]
    x = np.moveaxis(x, at, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :]) if params["tiled"] else x


def _psum_scatter(params: Any, at: int, x: np.ndarray) -> np.ndarray:
    dim, count = at + params["scatter_dimension"], x.shape[at]
    x = _summed(x, (at,))
    if params["tiled"]:
        x = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    return np.moveaxis(x, dim, at)


def _all_to_all(params: Any, at: int, x: np.ndarray) -> np.ndarray:
    cut, join, count = at + 1 + params["split_axis"], at + 1 + params["concat_axis"], x.shape[at]
    if params["tiled"]:
        x = x.reshape(*x.shape[:cut], count, -1, *x.shape[cut + 1 :])
    x = np.moveaxis(np.moveaxis(x, cut, at), at + 1, join)  # the receiver in front, and the sender before what it sent
    return x.reshape(*x.shape[:join], -1, *x.shape[join + 2 :]) if params["tiled"] else x


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("pvary", "copy", "copy_p", "stop_gradient", "name", "optimization_barrier", "spmd_fused"), _same),
    **dict.fromkeys(("reshard", "sharding_constraint", "spmd_assert_equal", "spmd_layout", "spmd_retype"), _same),
    "spmd_block": lambda eqn, tables, sizes: tables[0],
    **dict.fromkeys(("add", "add_any"), _elementwise(_exactly(operator.add), linear=True)),
    "sub": _elementwise(_exactly(operator.sub), linear=True),
    "neg": _elementwise(operator.neg, linear=True),
    "mul": _mul,
    "div": _elementwise(_div),
    "rem": _elementwise(_rem),
    "sign": _elementwise(np.sign),
    "abs": _elementwise(np.abs),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "clamp": _elementwise(lambda low, x, high: np.minimum(np.maximum(low, x), high)),
    "integer_pow": _power,
    "square": _elementwise(_exactly(lambda x: x * x)),
    "floor": _elementwise(np.floor),
    "ceil": _elementwise(np.ceil),
    "round": _round,
    **{name: _elementwise(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "xor": _elementwise(np.bitwise_xor),
    "not": _elementwise(np.invert),
    "shift_left": _elementwise(_shift(np.left_shift)),
    "shift_right_arithmetic": _elementwise(_shift(np.right_shift, "i")),
    "shift_right_logical": _elementwise(_shift(np.right_shift, "u")),
    "is_finite": _elementwise(np.isfinite),
    "select_n": _elementwise(_select),
    "convert_element_type": _convert,
    "iota": _iota,
    "axis_index": _axis_index,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "rev": _rev,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _each(_update),
    "gather": _each(_gather),
    "sort": _each(_sort),
    "pad": _each(_pad),
    "concatenate": _listing(lambda p, lead, *xs: np.concatenate(xs, lead + int(p["dimension"]))),
    "stack": _listing(lambda p, lead, *xs: np.stack(xs, lead + p["axis"])),
    "tile": _listing(_tile),
    "split": _listing(_split),
    "unstack": _listing(lambda p, lead, x: list(np.moveaxis(x, lead + p["axis"], 0))),
    "reduce_sum": _reduction(np.add),
    "reduce_prod": _reduction(np.multiply),
    "reduce_max": _reduction(np.maximum),
    "reduce_min": _reduction(np.minimum),
    "reduce_and": _reduction(np.bitwise_and),
    "reduce_or": _reduction(np.bitwise_or),
    "reduce_xor": _reduction(np.bitwise_xor),
    "cumsum": _cumulative(np.add),
    "cumprod": _cumulative(np.multiply),
    "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
    "argmax": _first_of(np.argmax),
    "argmin": _first_of(np.argmin),
    **dict.fromkeys(("psum", "psum_invariant"), _collective(lambda p, at, x: _summed(x, (at,)))),
    "pmax": _collective(lambda p, at, x: x.max(at)),
    "pmin": _collective(lambda p, at, x: x.min(at)),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _collective(_all_gather)),
    "reduce_scatter": _collective(_psum_scatter),
    "all_to_all": _collective(_all_to_all),
    "ppermute": _ppermute,
}
