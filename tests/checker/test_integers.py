"""Integers per device: layouts are read from tables as from arrays."""

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

from spmd._walker import equations, walk
from spmd.checker import _integers as integers
from spmd.checker import _permutations as permutations
from tests.checker.integer_tables import Tables, index, mapped, on_each_device, table_of, tables_of
from tests.sampler import seeds

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
    assert integers.blocks_of(table_of(body, MESH), MESH) == expected


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
    found = integers.blocks_of(table, sizes)
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
    assert integers.starts_of(table_of(body, MESH), 3, MESH) == expected


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
    assert integers.rows_of(table_of(body, MESH), 12, MESH) == expected


def test_one_row_for_each_device() -> None:
    assert integers.rows_of(table_of(lambda: index("b")[None], MESH), 4, MESH) == ("b",)
    assert integers.rows_of(table_of(lambda: index("b"), MESH), 4, MESH) == ("b",)
    assert integers.rows_of(table_of(lambda: index("b"), MESH), 5, MESH) is None


def test_the_starts_that_plain_indexing_makes_are_seen() -> None:
    """`dynamic_slice_in_dim` adds the length to negative starts before it slices."""
    traced = jax.make_jaxpr(
        mapped(lambda: [lax.dynamic_slice_in_dim(jnp.ones((12, 5)) * 1.5, index("b") * 3, 3)], MESH)
    )()
    seen = []

    class Starts(Tables):
        def step(self, eqn: Any, operands: Any) -> Any:
            if eqn.primitive.name == "dynamic_slice":
                seen.extend(integers.starts_of(start, 3, MESH) for start in operands[1:2])
            return super().step(eqn, operands)

    [eqn] = [eqn for eqn in equations(traced) if eqn.primitive.name == "shard_map"]
    walk(eqn.params["jaxpr"], [], Starts(MESH))
    assert seen == [("b",)]


@pytest.mark.parametrize("step", range(4))
def test_the_block_of_a_ring(step: int) -> None:
    """The block that a device holds after so many turns, as rings write it and as it was sent."""
    up = [(i, (i + 1) % 4) for i in range(4)]

    def sent() -> Any:
        block = index("b")
        for _ in range(step):
            block = lax.ppermute(block, "b", up)
        return block

    said, held = table_of(lambda: (index("b") - step) % 4, MESH), table_of(sent, MESH)
    assert said == held
    assert hash(said) == hash(held)
    blocks = said.entries.ravel().tolist()
    assert blocks == [(i - step) % 4 for i in range(4)]
    assert permutations.moves(blocks).shift == (step if step < 3 else -1)


# --- tables ----------------------------------------------------------------------------------------------------


def test_equal_arrays_are_equal_tables() -> None:
    ways = [
        lambda: index("b") * 3 + arange(3),
        lambda: lax.dynamic_slice_in_dim(arange(12), index("b") * 3, 3),
        lambda: (arange(3)[None] + index("b") * 3 + index("a") * 0)[0],
        lambda: jnp.flip(jnp.flip(arange(3)) + 3 * index("b")),
        lambda: jnp.where(index("b") >= 0, arange(3), 7) + 3 * index("b"),
    ]
    tables = [table_of(way, MESH) for way in ways]
    assert len(set(tables)) == 1
    assert tables[0].axes == ("b",)


def test_large_arrays_have_a_table_only_if_they_grow_evenly() -> None:
    large, small = 100_000, 100
    assert table_of(lambda: index("b") * large + arange(large), MESH).values is None
    assert tables_of(lambda: [(index("b") * large + arange(large)) % 7], MESH) == [None]
    assert table_of(lambda: (index("b") * small + arange(small)) % 7, MESH).values is not None
    assert tables_of(lambda: [arange(200)[:, None] >= arange(200)[None]], MESH) == [None]
    assert integers.constant(np.ones((300, 300))) is None


def test_what_has_no_table() -> None:
    tables = tables_of(
        lambda: [
            lax.div(arange(3), arange(3)),  # what a division by zero gives is left to the backend
            arange(3).astype("float32") / 3,  # not exact
            jnp.sin(arange(3).astype("float32")),
            jax.random.bits(jax.random.key(0), (3,)),
            arange(3).astype("complex64"),
            arange(3).at[index("b")].set(5),
        ],
        MESH,
    )
    assert tables == [None] * 6


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
    assert tables_of(lambda: [none("int32", 0, 3).max(0, initial=7)], MESH) == [None]


def test_constants() -> None:
    traced: list[Any] = []
    assert integers.constant(3) == integers.constant(np.asarray(3))
    table = integers.constant(jnp.arange(5, dtype="int32"))
    assert table is not None
    assert (table.shape, table.steps, table.axes) == ((5,), (1,), ())
    assert integers.constant(jax.random.key(0)) is None
    jax.make_jaxpr(lambda x: traced.append(integers.constant(x)) or x)(1)
    assert traced == [None]
