"""What devices hold where shapes and `axis_index` decide it: as an array has it, and layouts are read from it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._jaxprs.walker import Domain, equations, walk
from spmd.checker import _tables as tables
from spmd.checker._tables import Table
from tests.sampler import seeds


class Tables(Domain):
    """The table of each value of a body."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def constant(self, var: Any, value: Any) -> Table | None:
        return tables.constant(value)

    def step(self, eqn: Any, operands: Any) -> Any:
        return tables.evaluate(eqn, operands, self.sizes)

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
    return Table(table.axes, table.values.squeeze(len(table.axes)))


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
    lead = [sizes[axis] if axis in table.axes else 1 for axis in sizes]
    values = np.broadcast_to(table.values.reshape(*lead, *table.shape), (*sizes.values(), *table.shape))
    return values.reshape(math.prod(sizes.values()), *table.shape)


def index(*axes: str) -> Any:
    return lax.axis_index(axes)


# --- layouts ---------------------------------------------------------------------------------------------------

MESH = {"a": 2, "b": 4}


def arange(n: int) -> Any:
    return jnp.arange(n, dtype="int32")


BLOCKS: list[tuple[Callable[[], Any], Any]] = [
    (lambda: index("b") * 3 + arange(3), (("b",),)),
    (lambda: index("a", "b") * 3 + arange(3), (("a", "b"),)),
    (lambda: index("b", "a") * 3 + arange(3), (("b", "a"),)),
    (lambda: arange(3) + 3 * (index("a") * 4 + index("b")) + 100, (("a", "b"),)),
    (lambda: lax.broadcasted_iota("int32", (3, 2), 1) + index("b") * 2, ((), ("b",))),
    (lambda: ((index("a") * 3 + arange(3)) * 8)[:, None] + (index("b") * 2 + arange(2))[None], (("a",), ("b",))),
    (lambda: 23 - (index("a", "b") * 3 + arange(3)), (("a", "b"),)),
    (lambda: 2 * (index("b") * 3 + arange(3)), (("b",),)),
    (lambda: lax.dynamic_slice_in_dim(arange(12), index("b") * 3, 3), (("b",),)),
    (lambda: lax.dynamic_slice_in_dim(arange(120_000), index("b") * 30_000, 30_000), (("b",),)),
    (lambda: (index("b") * 30_000 + arange(30_000)).reshape(300, 100), (("b",), ())),
    (lambda: (index("b") * 6 + arange(6)).reshape(2, 3), (("b",), ())),
    (lambda: arange(24).reshape(4, 6)[index("b")], (("b",),)),
    (lambda: lax.all_gather(index("a", "b") * 3 + arange(3), "b", tiled=True), (("a",),)),
    (lambda: lax.psum_scatter(arange(8), "b", tiled=True), (("b",),)),
    (lambda: lax.all_gather(index("b") * 3 + arange(3), "b", tiled=True), ((),)),
    (lambda: index("b") * 3 + arange(3) - index("b") * 3, ((),)),
    (lambda: arange(3), ((),)),  # the same positions everywhere
    (lambda: index("b") * 2 + arange(3), None),  # blocks that overlap
    (lambda: index("b") * 4 + arange(3), None),  # blocks with gaps
    (lambda: jnp.flip(index("b") * 3 + arange(3)), None),  # reversed inside each block
    (lambda: (3 - index("b")) * 3 + arange(3), None),  # the blocks in reverse order
    (lambda: index("b") + 4 * arange(3), None),  # dealt out like cards
    (lambda: lax.ppermute(index("b") * 3 + arange(3), "b", [(i, (i + 1) % 4) for i in range(4)]), None),
    (lambda: index("b") + jnp.zeros(3, "int32"), None),
    (lambda: index("b") * 3 + arange(3)[:, None] + arange(3)[None], None),  # both dimensions fit
    (lambda: index("a"), None),
]


@pytest.mark.parametrize("case", range(len(BLOCKS)))
def test_blocks_of_a_whole_array(case: int) -> None:
    body, expected = BLOCKS[case]
    assert tables.blocks_of(table_of(body, MESH), MESH) == expected


@pytest.mark.parametrize("seed", seeds())
def test_blocks_are_those_that_a_shard_map_cuts(seed: int) -> None:
    """Random evenly growing arrays, cut by random specs: the layout found is the spec, or one that cuts alike."""
    dice = random.Random(seed)
    sizes = {"a": 2, "b": 2, "c": 2}
    axes = dice.sample(list(sizes), dice.randint(0, 3))
    cut = dice.randint(0, len(axes))
    spec = (tuple(axes[:cut]), tuple(axes[cut:]))
    local = [dice.randint(2, 4), dice.randint(2, 4)]
    shape = [n * math.prod(sizes[axis] for axis in part) for n, part in zip(local, spec, strict=True)]
    steps = dice.randint(-9, 9) or 1, dice.randint(-9, 9) or 1

    def body() -> Any:
        rows, columns = (
            index(*part) * n + arange(n) if part else arange(n) for n, part in zip(local, spec, strict=True)
        )
        return rows[:, None] * steps[0] + columns[None] * steps[1]

    table = table_of(body, sizes)
    assert table.shape == tuple(local)
    whole = np.arange(shape[0])[:, None] * steps[0] + np.arange(shape[1])[None] * steps[1]
    found = tables.blocks_of(table, sizes)
    strides, ends = _strides(spec, local, steps, sizes)
    if len(set(strides)) == len(axes) and set(ends).isdisjoint(strides):  # otherwise another spec cuts alike
        assert found == spec
    if found is not None:
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (jax.sharding.AxisType.Auto,) * 3)
        blocks = jax.device_put(whole, jax.sharding.NamedSharding(mesh, P(*found))).addressable_shards
        held = on_each_device(table, sizes)
        for block in blocks:
            np.testing.assert_array_equal(block.data, held[mesh.devices.ravel().tolist().index(block.device)])


def _strides(spec: Any, local: Any, steps: Any, sizes: Any) -> tuple[list[int], list[int]]:
    """By how much the values grow along each axis, and along an axis that would come before those of each dimension."""
    found, ends = [], []
    for part, n, step in zip(spec, local, steps, strict=True):
        grown = n * step
        for axis in reversed(part):
            found.append(grown)
            grown *= sizes[axis]
        ends.append(grown)
    return found, ends


STARTS: list[tuple[Callable[[], Any], Any]] = [
    (lambda: index("b") * 3, ("b",)),
    (lambda: index("b", "a") * 3, ("b", "a")),
    (lambda: index("a") * 12 + index("b") * 3, ("a", "b")),
    (lambda: lax.axis_index("a") * 0, ()),
    (lambda: index("b") * 2, None),
    (lambda: index("b") * 3 + 1, None),
    (lambda: (index("b") + 1) % 4 * 3, None),
    (lambda: (3 - index("b")) * 3, None),
    (lambda: index("a") * 3 + index("b") * 3, None),
]


@pytest.mark.parametrize("case", range(len(STARTS)))
def test_starts_of_blocks(case: int) -> None:
    body, expected = STARTS[case]
    whole = 3 * math.prod(MESH[axis] for axis in (("b",) if expected is None else expected))
    assert tables.rows_of(table_of(body, MESH), whole, MESH, 3) == expected


ROWS: list[tuple[Callable[[], Any], Any]] = [
    (lambda: index("b") * 3 + arange(3), ("b",)),
    (lambda: (index("b") * 3 + arange(3))[:, None], ("b",)),
    (lambda: arange(12), ()),
    (lambda: arange(3), None),
    (lambda: index("a") * 3 + arange(3), None),  # half of them
    (lambda: index("a", "b") * 3 + arange(3), None),  # some do not exist
    (lambda: index("b") * 3 + arange(3) + 1, None),
    (lambda: 3 * arange(3) + index("b"), None),
    (lambda: (index("b") * 3 + arange(3))[:, None] + arange(1)[None], ("b",)),
    (lambda: jnp.zeros((0,), "int32"), None),
]


@pytest.mark.parametrize("case", range(len(ROWS)))
def test_rows_that_each_device_takes(case: int) -> None:
    body, expected = ROWS[case]
    assert tables.rows_of(table_of(body, MESH), 12, MESH) == expected


def test_one_row_for_each_device() -> None:
    assert tables.rows_of(table_of(lambda: index("b")[None], MESH), 4, MESH) == ("b",)
    assert tables.rows_of(table_of(lambda: index("b"), MESH), 4, MESH) == ("b",)
    assert tables.rows_of(table_of(lambda: index("b"), MESH), 5, MESH) is None


def test_the_starts_that_plain_indexing_makes_are_seen() -> None:
    """`dynamic_slice_in_dim` adds the length to negative starts before it slices."""
    traced = jax.make_jaxpr(
        mapped(lambda: [lax.dynamic_slice_in_dim(jnp.ones((12, 5)) * 1.5, index("b") * 3, 3)], MESH)
    )()
    seen = []

    class Starts(Tables):
        def step(self, eqn: Any, operands: Any) -> Any:
            if eqn.primitive.name == "dynamic_slice":
                seen.extend(tables.rows_of(start, 12, MESH, 3) for start in operands[1:2])
            return super().step(eqn, operands)

    [eqn] = [eqn for eqn in equations(traced) if eqn.primitive.name == "shard_map"]
    walk(eqn.params["jaxpr"], [], Starts(MESH))
    assert seen == [("b",)]


# --- tables ----------------------------------------------------------------------------------------------------


def test_equal_arrays_are_equal_tables() -> None:
    ways = [
        lambda: index("b") * 3 + arange(3),
        lambda: lax.dynamic_slice_in_dim(arange(12), index("b") * 3, 3),
        lambda: (arange(3)[None] + index("b") * 3 + index("a") * 0)[0],
        lambda: jnp.flip(jnp.flip(arange(3)) + 3 * index("b")),
        lambda: jnp.where(index("b") >= 0, arange(3), 7) + 3 * index("b"),
    ]
    found = [table_of(way, MESH) for way in ways]
    assert len(set(found)) == 1
    assert found[0].axes == ("b",)


def test_large_arrays_have_no_table() -> None:
    large = tables.MOST // 4
    assert tables_of(lambda: [index("b") * large + arange(large)], MESH) != [None]
    assert tables_of(lambda: [index("b") * (large + 1) + arange(large + 1)], MESH) == [None]
    assert tables.constant(np.ones(tables.MOST + 1)) is None


def test_what_has_no_table() -> None:
    """Nothing is asked of JAX here, which would compile it."""
    found = tables_of(
        lambda: [
            jax.random.bits(jax.random.key(0), (3,)),
            arange(3).astype("complex64"),
            lax.igamma(jnp.ones(3), jnp.ones(3)),
        ],
        MESH,
    )
    assert found == [None] * 3


def test_what_is_empty() -> None:
    """A collective of nothing, whatever its rule does with what it gets; and what is made of nothing."""
    none = lambda dtype, *shape: index("a", "b").astype(dtype) + jnp.zeros(shape, dtype)
    ways = [
        lambda: lax.psum(none("float32", 8, 0), "b"),
        lambda: lax.psum_scatter(none("float32", 8, 0), "b", tiled=True),
        lambda: lax.psum_scatter(none("int32", 0, 8), "b", scatter_dimension=1, tiled=True),
        lambda: lax.all_gather(none("int32", 2, 0), "b", tiled=True),
        lambda: lax.all_to_all(none("int32", 8, 0), "b", 0, 0, tiled=True),
        lambda: lax.ppermute(none("int32", 0, 3), "b", [(0, 1)]),
        lambda: none("float32", 3, 0).sum(0),
        lambda: jnp.argmax(none("int32", 3, 0), axis=0),
    ]
    for table in tables_of(lambda: [way() for way in ways], MESH):
        assert table is not None
        assert 0 in table.shape and table.axes == ()
    left = table_of(lambda: jnp.concatenate([none("int32", 0), index("b") + arange(3)]), MESH)
    assert left == table_of(lambda: index("b") + arange(3), MESH)
    assert table_of(lambda: none("int32", 0, 3).max(0, initial=7), MESH).values.tolist() == [7, 7, 7]


def test_constants() -> None:
    traced: list[Any] = []
    assert tables.constant(3) == tables.constant(np.asarray(3))
    table = tables.constant(jnp.arange(5, dtype="int32"))
    assert table is not None
    assert (table.shape, table.axes) == ((5,), ())
    assert tables.constant(jax.random.key(0)) is None
    jax.make_jaxpr(lambda x: traced.append(tables.constant(x)) or x)(1)
    assert traced == [None]
