"""The arrays that each device holds, where only shapes, constants and `axis_index` decide them.

`axis_index("dp") * 4 + arange(4)` is another array on each device, and a known one: a `Table`. The simulator computes
what an equation makes of tables. Tables that are blocks of one whole array have a layout (`blocks_of`). A slice that
starts at one has one too (`rows_of`). Values that come from data have no table, and large ones have none either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd._jaxprs.walker import COMMUNICATES, Equation, axes_of
from spmd._trees.leaves import is_key_type
from spmd.checker._primitives import NUMPY, NotSimulated, compute
from spmd.checker._simulator import Simulator, held_number

Sizes = Mapping[str, int]  # of the mesh axes, in mesh order

MOST = 1 << 18  # numbers that a table has, for all devices together


@dataclass(frozen=True, eq=False)
class Table:
    """An array on each device.

    Attributes:
      axes: The mesh axes along which the arrays differ, in mesh order.
      values: The numbers, with a dimension in front for each of `axes`.
    """

    axes: tuple[str, ...]
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one device."""
        return self.values.shape[len(self.axes) :]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        some = self.values.reshape(-1)[:: max(1, self.values.size // 64)]
        return hash((self.axes, self.values.shape, self.values.dtype, some.tobytes()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table) or self._hash != other._hash or self.axes != other.axes:
            return False
        return self.values.dtype == other.values.dtype and np.array_equal(self.values, other.values)


def table_of(values: np.ndarray, sizes: Sizes) -> Table | None:
    """The table of values that have a dimension in front for each mesh axis; None if they are too many."""
    if values.size > MOST or values.dtype.kind not in "biuf":
        return None
    axes = []
    for i, axis in reversed(list(enumerate(sizes))):
        if values.shape[i] > 1 and not _alike(values, i):
            axes.append(axis)
        else:
            values = values.take(0, i)
    return Table(tuple(axes[::-1]), values)


def constant(value: Any) -> Table | None:
    """The table of a number or an array that is the same on each device."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, jax.core.Tracer) or math.prod(np.shape(value)) > MOST or (dtype and is_key_type(dtype)):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return table_of(held_number(value), {})


def evaluate(eqn: Equation, operands: Sequence[Table | None], sizes: Sizes) -> Sequence[Table | None]:
    """Return what an equation gives on each device: a table for each result, or None.

    Args:
      eqn: An equation that holds no jaxpr.
      operands: What its operands are.
      sizes: The sizes of the mesh axes, in mesh order.
    """
    name, unknown = eqn.primitive.name, [None] * len(eqn.outvars)
    rule = Simulator.rules.get(name)
    numbers = all(hasattr(v.aval, "shape") and not is_key_type(v.aval.dtype) for v in eqn.outvars)
    if None in operands or (rule is None and name not in NUMPY) or not numbers or name.startswith("random_"):
        return unknown
    machine = Simulator(MOST)
    machine.sizes = dict(sizes)
    given = [_led(table, sizes) for table in operands if table is not None]
    if _numbers_of(eqn, operands, sizes) > MOST:
        return unknown
    try:
        with np.errstate(all="ignore"):
            outs = rule(machine, eqn, given) if rule else compute(eqn, machine.lead, given, {})
    except NotSimulated:
        return unknown
    return [table_of(np.asarray(out), sizes) for out in outs]


def _numbers_of(eqn: Equation, operands: Sequence[Table | None], sizes: Sizes) -> int:
    """Return how many numbers all devices together hold of a result, or of what a collective brings together."""
    together = eqn.primitive.name in COMMUNICATES
    differ = {*(axes_of(eqn) if together else ())}.union(*(table.axes for table in operands if table is not None))
    devices = math.prod(n for axis, n in sizes.items() if axis in differ)
    return devices * max(math.prod(v.aval.shape) for v in (*eqn.outvars, *(eqn.invars if together else ())))


def _led(table: Table, sizes: Sizes) -> np.ndarray:
    """The values with a dimension in front for each mesh axis."""
    here = dict(zip(table.axes, table.values.shape, strict=False))
    return table.values.reshape([*(here.get(axis, 1) for axis in sizes), *table.shape])


def _alike(values: np.ndarray, at: int) -> bool:
    return bool((values == values.take([0], at)).all())


def is_constant(table: Table, dim: int) -> bool:
    """Return whether the values of each device are constant along a dimension."""
    return not table.values.size or _alike(table.values, len(table.axes) + dim)


def is_alike(table: Table) -> bool:
    """Return whether each device has one number, as many times as its array has elements."""
    each = table.values.reshape(*table.values.shape[: len(table.axes)], -1)
    return bool((each == each[..., :1]).all())


def column_of(table: Table, at: int) -> Table:
    """One column of an array: `x[..., at]`."""
    return Table(table.axes, table.values[..., at])


def by_rounds(table: Table | np.ndarray, axis: str) -> Table | None:
    """The rows of an array, `x[i]` in round i of a loop, with the rounds as another axis behind those of the mesh."""
    if isinstance(table, np.ndarray):
        return table_of(table, {axis: len(table)}) if table.size else None
    sizes = dict(zip((*table.axes, axis), table.values.shape, strict=False))
    return table_of(table.values, sizes) if table.values.size else None


# --- layouts ---------------------------------------------------------------------------------------------------


def _strides(table: Table) -> tuple[int, list[int]] | None:
    """The first number, and by how much the numbers grow along each axis and then each dimension, if evenly."""
    values = table.values
    if values.dtype.kind not in "iu" or not values.size:
        return None
    values = values.astype(np.int64)
    first, grown, found = int(values.flat[0]), np.zeros((1,) * values.ndim, np.int64), []
    for at, n in enumerate(values.shape):
        step = int(values[(0,) * at + (1,) + (0,) * (values.ndim - at - 1)]) - first if n > 1 else 0
        found.append(step)
        grown = grown + step * np.arange(n).reshape([-1 if i == at else 1 for i in range(values.ndim)])
    return (first, found) if np.array_equal(values, first + grown) else None


def _axes_from(steps: dict[str, int], size: int, sizes: Sizes) -> list[str] | None:
    """The axes, major one first, along which numbers grow by blocks of `size`; None where two of them may be the next
    one."""
    found: list[str] = []
    while size and (matching := [axis for axis in steps if steps[axis] == size]):
        if len(matching) > 1:
            return None
        found.insert(0, matching[0])
        size *= sizes[matching[0]]
    return found


def blocks_of(table: Table, sizes: Sizes) -> tuple[tuple[str, ...], ...] | None:
    """Return which axes divide each dimension, if the table is one block of a whole array that grows evenly.

    `axis_index("dp") * 4 + arange(4)` is block by block an `arange`, and so its dimension is divided over dp.

    Args:
      table: Integers on each device.
      sizes: The sizes of the mesh axes.

    Returns:
      For each dimension the axes that divide it, major one first. None where the values differ in another way, or
      where more than one answer is right.
    """
    found = _strides(table)
    if found is None:
        return None
    steps = dict(zip(table.axes, found[1], strict=False))
    blocks = [_axes_from(steps, step * n, sizes) for step, n in zip(found[1][len(steps) :], table.shape, strict=True)]
    if None in blocks or sorted(axis for block in blocks for axis in block or ()) != sorted(steps):
        return None
    return tuple(tuple(block or ()) for block in blocks)


def rows_of(table: Table, whole: int, sizes: Sizes, length: int = 1) -> tuple[str, ...] | None:
    """The axes of which each device takes its own block of `whole` rows.

    Args:
      table: Where each device begins to take rows: one place, or as many as it takes single rows.
      whole: How many rows there are.
      sizes: The sizes of the mesh axes.
      length: How many rows it takes from each place on.

    Returns:
      The axes, major one first. None if other rows are taken, or not all of them.
    """
    lead = len(table.axes)
    values = table.values.reshape(*table.values.shape[:lead], -1, 1) + np.arange(length)
    rows = values.shape[lead] * length
    found = _strides(Table(table.axes, values.reshape(*values.shape[:lead], rows)))
    several = [n for n in (*table.shape, length) if n > 1]
    if found is None or found[0] != 0 or len(several) > 1 or (several and found[1][-1] != 1):
        return None
    axes = _axes_from(dict(zip(table.axes, found[1], strict=False)), rows, sizes)
    if axes is None or len(axes) < lead or rows * math.prod(sizes[axis] for axis in axes) != whole:
        return None
    return tuple(axes)
