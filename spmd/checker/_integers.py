"""The integers that each device holds, where they depend on shapes and on `axis_index` only.

`axis_index("dp") * 4 + arange(4)` is another array on each device, and a known one: a `Table`. Tables that are blocks
of one whole array have a layout (`blocks_of`). A slice that starts at one has one too (`starts_of`).

Values that come from data have no table. Large ones have none either, unless they grow evenly along their dimensions,
as positions do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sizes = Mapping[str, int]  # of the mesh axes, in mesh order
Blocks = tuple[tuple[str, ...], ...]

MOST_ON_ONE = 4096  # entries that a table has for one device
MOST_ENTRIES = 65536  # entries for all devices, also while a table is made


class Unknown(Exception):
    """A value that is not known, or is too large to follow."""


@dataclass(frozen=True)
class Table:
    """An array on each device: entries, and even steps along dimensions.

    Equal arrays are equal tables: `axes` are those along which the values differ, and a dimension that has a step has
    one entry.

    Attributes:
      axes: The mesh axes along which the values differ, in mesh order.
      shape: The shape on one device.
      steps: By how much the values grow along each dimension, 0 where they are constant or listed one by one.
      dtype: What the entries are.
      counts: The shape of `entries`.
      data: The entries, as bytes.

    Example:
      >>> constant(np.array([[1, 3, 5], [2, 4, 6]])).steps
      (1, 2)
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: np.dtype
    counts: tuple[int, ...]
    data: bytes

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """The entries: a dimension for each axis, then those of the array, of size 1 where it has a step or is
        constant."""
        return np.frombuffer(self.data, self.dtype).reshape(self.counts)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.shape, self.steps, self.data))

    @property
    def values(self) -> np.ndarray | None:
        """All values, with a dimension for each of `axes` in front. None if they are too many."""
        try:
            return dense(self)
        except Unknown:
            return None


def constant(value: Any) -> Table | None:
    """The table of a number or an array that is the same on each device, if it is small enough."""
    if isinstance(value, jax.core.Tracer) or math.prod(np.shape(value)) > MOST_ENTRIES:
        return None
    if isinstance(value, jax.Array) and not (value.is_fully_addressable and is_followed(value.dtype)):
        return None
    found = np.asarray(value, getattr(value, "dtype", None))
    try:
        return table_of((), found, found.shape) if is_followed(found.dtype) else None
    except Unknown:
        return None


# --- making and reading tables ---------------------------------------------------------------------------------


def is_followed(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and (dtype.kind in "biuf" or dtype == jnp.bfloat16)


def table_of(
    axes: Sequence[str], entries: np.ndarray, shape: Sequence[int], steps: Sequence[int] | None = None
) -> Table:
    """The table of these entries, whose dimensions have size 1 where the values are equal, or grow evenly."""
    if entries.size > MOST_ENTRIES or not is_followed(entries.dtype):
        raise Unknown
    differ = [i for i in range(len(axes)) if entries.shape[i] > 1 and not alike_along(entries, i)]
    if len(differ) < len(axes):
        entries = entries[tuple(slice(None) if i in differ else 0 for i in range(len(axes)))]
        axes = [axes[i] for i in differ]
    given = steps or (0,) * len(shape)
    found = [wrapped_step(step, entries.dtype) if n > 1 else 0 for step, n in zip(given, shape, strict=True)]
    for dim in range(len(shape)):
        at = len(axes) + dim
        if entries.shape[at] > 1 and (step := _step(entries, at)) is not None:
            entries, found[dim] = first_along(entries, at), step
    if entries[(0,) * len(axes)].size > MOST_ON_ONE:
        raise Unknown
    return Table(tuple(axes), tuple(shape), tuple(found), entries.dtype, entries.shape, entries.tobytes())


def first_along(entries: np.ndarray, at: int) -> np.ndarray:
    return entries[(slice(None),) * at + (slice(1),)]


def alike_along(entries: np.ndarray, at: int) -> bool:
    return bool((entries == first_along(entries, at)).all())


def _step(entries: np.ndarray, at: int) -> int | None:
    """By how much the entries grow along a dimension, if evenly and everywhere alike."""
    if entries.dtype.kind not in "iu":
        return 0 if alike_along(entries, at) else None
    grown = np.diff(entries, axis=at)
    step = grown.flat[0] if grown.size else 0
    return int(step) if (grown == step).all() else None


def wrapped_step(step: int, dtype: np.dtype) -> int:
    """A step modulo the range of the type: what an array adds to its entries is the same."""
    if not step:
        return 0
    bits = 8 * dtype.itemsize
    step &= (1 << bits) - 1
    return step - (1 << bits) if dtype.kind == "i" and step >> (bits - 1) else step


def spread(table: Table, dims: Sequence[int]) -> np.ndarray:
    """The entries, those along `dims` one by one where they have a step."""
    entries, lead = table.entries, len(table.axes)
    dims = [d for d in dims if table.steps[d]]
    if entries.size * math.prod(table.shape[d] for d in dims) > MOST_ENTRIES:
        raise Unknown
    for d in dims:
        ramp = np.arange(table.shape[d]).astype(table.dtype) * np.asarray(table.steps[d]).astype(table.dtype)
        entries = entries + ramp.reshape((1,) * (lead + d) + (-1,) + (1,) * (len(table.shape) - d - 1))
    return entries


def dense(table: Table, dims: Sequence[int] | None = None) -> np.ndarray:
    """The entries, all of those along `dims`, or along all dimensions."""
    lead, rank = len(table.axes), len(table.shape)
    dims = range(rank) if dims is None else dims
    entries = spread(table, dims)
    shape = list(entries.shape)
    for d in dims:
        shape[lead + d] = table.shape[d]
    if math.prod(shape) > MOST_ENTRIES:
        raise Unknown
    return np.broadcast_to(entries, shape)


def axes_together(tables: Sequence[Table], sizes: Sizes) -> tuple[str, ...]:
    """The axes along which any of the tables differs."""
    first = tables[0].axes
    if all(table.axes == first for table in tables):
        return first
    return tuple(axis for axis in sizes if any(axis in table.axes for table in tables))


def led(entries: np.ndarray, table: Table, axes: Sequence[str]) -> np.ndarray:
    """Entries of a table with a dimension in front for each of `axes`, of size 1 along the others."""
    if table.axes == axes:
        return entries
    lead = len(table.axes)
    sizes = dict(zip(table.axes, entries.shape, strict=False))
    return entries.reshape([sizes.get(axis, 1) for axis in axes] + list(entries.shape[lead:]))


def is_listed(table: Table, dim: int) -> bool:
    return table.entries.shape[len(table.axes) + dim] > 1


def is_constant(table: Table, dim: int) -> bool:
    """Whether the values of each device are constant along a dimension."""
    return not table.steps[dim] and not is_listed(table, dim)


def cut_out(table: Table, starts: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> Table:
    """The elements from `starts`, every so many."""
    where, from_start = [slice(None)] * len(table.axes), 0
    for dim, (start, stride, count) in enumerate(zip(starts, strides, shape, strict=True)):
        from_start += table.steps[dim] * start
        end = start + stride * count
        where.append(slice(start, end if end >= 0 else None, stride) if is_listed(table, dim) else slice(None))
    entries = table.entries[tuple(where)]
    if from_start:
        entries = entries + np.asarray(wrapped_step(from_start, table.dtype)).astype(table.dtype)
    return table_of(table.axes, entries, shape, [s * by for s, by in zip(table.steps, strides, strict=True)])


# --- layouts ---------------------------------------------------------------------------------------------------


def blocks_of(table: Table, sizes: Sizes) -> Blocks | None:
    """Which axes divide each dimension, if the table is one block of a whole array that grows evenly.

    `axis_index("dp") * 4 + arange(4)` is block by block an `arange`, and so its dimension is divided over dp.

    Args:
      table: Integers on each device.
      sizes: The sizes of the mesh axes.

    Returns:
      For each dimension the axes that divide it, major one first. None where the values differ in another way, or
      where more than one answer is right.
    """
    stride = _strides(table)
    if stride is None or any(is_listed(table, d) for d in range(len(table.shape))):
        return None
    blocks: list[tuple[str, ...]] = []
    for step, size in zip(table.steps, table.shape, strict=True):
        found: list[str] = []
        wanted = step * size
        while wanted and (matching := [axis for axis in stride if stride[axis] == wanted]):
            [axis, *others] = matching
            if others:
                return None
            found.insert(0, axis)
            wanted *= sizes[axis]
        blocks.append(tuple(found))
    if sorted(axis for block in blocks for axis in block) != sorted(stride):
        return None
    return tuple(blocks)


def _strides(table: Table) -> dict[str, int] | None:
    """By how much the values grow from device to device along each axis, if evenly."""
    if table.dtype.kind not in "iu":
        return None
    found = {}
    for at, axis in enumerate(table.axes):
        grown = np.diff(table.entries.astype(np.int64), axis=at)
        if (grown != grown.flat[0]).any():
            return None
        found[axis] = int(grown.flat[0])
    return found


def starts_of(table: Table, size: int, sizes: Sizes) -> tuple[str, ...] | None:
    """The axes, major one first, of which the starts number the blocks: `size` times the block's index.

    Args:
      table: Where each device starts, a scalar.
      size: How long its block is.
      sizes: The sizes of the mesh axes.

    Returns:
      The axes, which divide a dimension of `size` times their devices. None if the starts are others.
    """
    stride = _strides(table)
    if stride is None or table.shape or int(table.entries.flat[0]) != 0:
        return None
    found: list[str] = []
    wanted = size
    while len(found) < len(stride):
        axis = next((axis for axis in stride if stride[axis] == wanted), None)
        if axis is None:
            return None
        found.insert(0, axis)
        wanted *= sizes[axis]
    return tuple(found)


def rows_of(table: Table, whole: int, sizes: Sizes) -> tuple[str, ...] | None:
    """The axes that divide the rows which a `take` of `whole` rows gives, if each device takes its own block.

    Args:
      table: The rows that each device takes, `offset + arange`; further dimensions have size 1.
      whole: How many rows there are.
      sizes: The sizes of the mesh axes.

    Returns:
      The axes, major one first. None if other rows are taken, or not all of them.
    """
    long = [d for d, n in enumerate(table.shape) if n > 1]
    if table.data == b"" or len(long) > 1 or any(is_listed(table, d) or table.steps[d] != 1 for d in long):
        return None
    size = math.prod(table.shape)
    start = table_of(table.axes, table.entries.reshape(table.counts[: len(table.axes)]), ())
    axes = starts_of(start, size, sizes)
    return axes if axes is not None and size * math.prod(sizes[axis] for axis in axes) == whole else None


def counts(table: Table, dim: int) -> bool:
    """Whether each device counts 0, 1, 2... along a dimension, and only along that one."""
    shape, first = table.shape, table.entries
    if table.axes or first.size != 1 or first.item() != 0 or shape[dim] < 2 or table.dtype.kind not in "iu":
        return False
    return table.steps[dim] == 1 and not any(step for d, step in enumerate(table.steps) if d != dim)


def all_differ(table: Table, axes: Sequence[str]) -> bool | None:
    """Whether no two devices along `axes` hold the same integers. None if there are too many to tell."""
    if not set(axes) <= set(table.axes):
        return False
    values = table.values
    if values is None:
        return None
    values = np.moveaxis(values, [table.axes.index(axis) for axis in axes], range(len(axes)))
    devices = math.prod(values.shape[: len(axes)])
    others = math.prod(values.shape[len(axes) : len(table.axes)])
    rows = values.reshape(devices, others, -1)
    return all(len(np.unique(rows[:, i], axis=0)) == devices for i in range(others))


def flat(table: Table) -> Table | None:
    """The same integers in one dimension."""
    values = table.values
    return (
        None
        if values is None
        else table_of(table.axes, values.reshape(*values.shape[: len(table.axes)], -1), (math.prod(table.shape),))
    )


def row_of(table: Table, at: int) -> Table:
    """One row of an array: `x[at]`."""
    cut = cut_out(table, [at] + [0] * (len(table.shape) - 1), [1] * len(table.shape), [1, *table.shape[1:]])
    lead = len(cut.axes)
    entries = cut.entries.reshape(cut.counts[:lead] + cut.counts[lead + 1 :])
    return table_of(cut.axes, entries, cut.shape[1:], cut.steps[1:])


def by_rounds(table: Table | np.ndarray, axis: str) -> Table | None:
    """The rows of an array, `x[i]` in round i of a loop, with the rounds as another axis behind those of the mesh."""
    if not math.prod(table.shape):  # of a loop that does not run
        return None
    try:
        if isinstance(table, np.ndarray):
            return table_of((axis,), table, table.shape[1:])
        return table_of((*table.axes, axis), dense(table, [0]), table.shape[1:], table.steps[1:])
    except Unknown:
        return None
