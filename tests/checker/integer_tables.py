"""What each device holds of a body's integers: by tables, and by running it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._walker import Domain, equations, walk
from spmd.checker import _integer_rules as integer_rules
from spmd.checker import _integers as integers
from spmd.checker._integers import Table

MESHES = ({"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 3, "c": 2}, {"a": 4, "b": 1})
INTEGERS = ("int32", "int32", "int32", "int8", "uint8", "int16", "uint32")


class Tables(Domain):
    """The table of each value of a body."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def constant(self, var: Any, value: Any) -> Table | None:
        return integers.constant(value)

    def step(self, eqn: Any, operands: Any) -> Any:
        return integer_rules.evaluate(eqn, operands, self.sizes)

    def join(self, one: Any, other: Any) -> Any:
        return one if one == other else None

    def sliced(self, value: Any, operand: Any) -> Any:
        return None

    def stacked(self, value: Any, result: Any) -> Any:
        return None


def tables_of(body: Callable[[], Any], sizes: dict[str, int]) -> list[Table | None]:
    """The tables of what a body without arguments returns on each device."""
    traced = jax.make_jaxpr(mapped(body, sizes))()
    [eqn] = [eqn for eqn in equations(traced) if eqn.primitive.name == "shard_map"]
    return [table and inner(table) for table in walk(eqn.params["jaxpr"], [], Tables(sizes))]


def inner(table: Table) -> Table:
    """A table without the dimension of size 1 that `mapped` puts in front."""
    lead = len(table.axes)
    counts = table.counts[:lead] + table.counts[lead + 1 :]
    return dataclasses.replace(table, shape=table.shape[1:], steps=table.steps[1:], counts=counts)


def table_of(body: Callable[[], Any], sizes: dict[str, int]) -> Table:
    """The table of the one result of a body."""
    [table] = tables_of(lambda: [body()], sizes)
    assert table is not None
    return table


def mapped(body: Callable[[], Any], sizes: dict[str, int]) -> Callable[[], Any]:
    """The results of a body on each device, stacked in mesh order."""
    axes = tuple(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), axes, (jax.sharding.AxisType.Auto,) * len(axes))
    return jax.shard_map(
        lambda: [_compat.pvary(x, axes)[None] for x in body()], mesh=mesh, in_specs=(), out_specs=P(axes)
    )


def on_each_device(table: Table, sizes: dict[str, int]) -> np.ndarray:
    """The values of a table as `mapped` stacks them."""
    values = table.values
    assert values is not None
    lead = [sizes[axis] if axis in table.axes else 1 for axis in sizes]
    values = np.broadcast_to(values.reshape(*lead, *table.shape), (*sizes.values(), *table.shape))
    return values.reshape(math.prod(sizes.values()), *table.shape)


def index(*axes: str) -> Any:
    return lax.axis_index(axes)
