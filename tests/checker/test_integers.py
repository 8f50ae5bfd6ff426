"""Integers per device: every table is what the devices hold, and layouts are read from tables as from arrays."""

from __future__ import annotations

import dataclasses
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
from spmd._walker import Domain, equations, walk
from spmd.checker import _integers as integers
from spmd.checker._integers import Moves, Table
from tests.sampler import seeds

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
        return integers.evaluate(eqn, operands, self.sizes)

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


# --- random programs -------------------------------------------------------------------------------------------


class Program:
    """A random program on integers that depend on the device."""

    def __init__(self, seed: int, steps: int = 60) -> None:
        self.seed, self.steps = seed, steps
        self.sizes = dict(random.Random(seed).choice(MESHES))

    def __call__(self) -> list[Any]:
        self.dice = random.Random(self.seed)
        self.values = [lax.axis_index(axis) for axis in self.sizes]
        self.values += [jnp.arange(4, dtype="float32") / 4, index(*self.sizes).astype("bfloat16") / 2]
        self.values += [jnp.arange(4, dtype="int32"), lax.broadcasted_iota("int32", (2, 4), 1), jnp.ones((3,), "int32")]
        while len(self.values) < self.steps:
            ways = (self.unary, self.floats, self.binary, self.binary, self.shaped, self.indexed, self.sent)
            found = self.dice.choice(ways)()
            for x in found if isinstance(found, (list, tuple)) else [found]:
                self.values.append(x if x.size <= 64 else x.reshape(-1)[:12])
        return self.values

    # --- operands ---

    def any(self, *, rank: int = 0, kinds: str = "biufV") -> Any:
        fit = [x for x in self.values if x.ndim >= rank and x.dtype.kind in kinds and x.size]
        return self.dice.choice(fit) if fit else jnp.arange(6, dtype="int32").reshape(2, 3)

    def integer(self, rank: int = 0) -> Any:
        return self.any(rank=rank, kinds="iu")

    def pair(self) -> tuple[Any, Any]:
        x = self.integer()
        fit = [y for y in self.values if y.dtype.kind in "iu" and (y.shape == x.shape or y.ndim == 0)]
        return x, jnp.broadcast_to(self.dice.choice(fit).astype(x.dtype), x.shape)

    def names(self) -> tuple[str, ...]:
        count = self.dice.randint(1, len(self.sizes))
        return tuple(self.dice.sample(list(self.sizes), count))

    # --- operations ---

    def unary(self) -> Any:
        x, k = self.any(), self.dice.randint(-3, 5)
        if x.dtype.kind == "b":
            return self.dice.choice((jnp.logical_not, lambda x: x.astype("int32"), lambda x: x.astype("float32")))(x)
        if x.dtype.kind in "fV":
            return x * jnp.asarray(k, x.dtype)
        ways = (
            lambda x: x + jnp.asarray(k).astype(x.dtype),
            lambda x: x * jnp.asarray(k).astype(x.dtype),
            lambda x: -x,
            jnp.abs,
            jnp.sign,
            jnp.invert,
            lambda x: x**2,
            lambda x: x**3,
            lambda x: jnp.clip(x, jnp.asarray(1, x.dtype), jnp.asarray(5, x.dtype)),
            lambda x: x.astype(self.dice.choice(INTEGERS)),
            lambda x: x.astype(self.dice.choice(INTEGERS)),
            lambda x: x.astype(self.dice.choice(("bool", "float32", "bfloat16"))),
            lambda x: lax.clamp(jnp.asarray(1, x.dtype), x, jnp.asarray(4, x.dtype)),
            jnp.square,
            lambda x: lax.optimization_barrier(lax.stop_gradient(jnp.copy(x))),
            lambda x: x << jnp.asarray(self.dice.randint(0, 7), x.dtype),
            lambda x: x >> jnp.asarray(self.dice.randint(0, 7), x.dtype),
            lambda x: lax.shift_right_logical(x, jnp.asarray(3, x.dtype)),
            lambda x: x // jnp.asarray(self.dice.choice((2, 3, 5)), x.dtype),
            lambda x: x % jnp.asarray(self.dice.choice((2, 3, 4)), x.dtype),
        )
        return self.dice.choice(ways)(x)

    def floats(self) -> Any:
        x = self.any(kinds="fV")
        ways = (
            jnp.floor,
            jnp.ceil,
            jnp.round,
            lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
            jnp.isfinite,
            lambda x: x * 2,
            lambda x: x / 2,
            lambda x: x + x[..., :1] if x.ndim else x - 1,
            lambda x: -jnp.abs(x),
            lambda x: jnp.clip(x, -9, 9) >= 2,
            lambda x: jnp.sum(few(x), dtype=x.dtype),
            lambda x: x.astype("int32"),
            lambda x: jnp.where(x > 1, x, jnp.full_like(x, -jnp.inf)),
        )
        return self.dice.choice(ways)(x)

    def binary(self) -> Any:
        x, y = self.pair()
        safe = jnp.where(y == 0, jnp.ones_like(y), y)
        ways = (
            *(lambda f=f: f(x, y) for f in (jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum)),
            *(lambda f=f: f(x, y) for f in (jnp.add, jnp.subtract)),
            *(lambda f=f: f(x, y) for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)),
            *(lambda f=f: f(x, y) for f in (jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor)),
            *(lambda f=f: f(x, safe) for f in (jnp.floor_divide, jnp.mod, lax.div, lax.rem)),
            lambda: jnp.where(x > y, x, y * y),
            lambda: lax.select_n(jnp.clip(lax.convert_element_type(x, "int32"), 0, 2), x, y, x + y),
        )
        return self.dice.choice(ways)()

    def shaped(self) -> Any:
        x = self.any(rank=1)
        dim, shape = self.dice.randrange(x.ndim), x.shape
        small = x.astype("int32")
        ways = (
            lambda: x[None],
            lambda: x.reshape(-1),
            lambda: x.reshape(-1, 2) if x.size % 2 == 0 else x.reshape(1, -1),
            lambda: jnp.broadcast_to(x[..., None], (*shape, 3)),
            lambda: x.T,
            lambda: jnp.squeeze(x[:1], 0),
            lambda: lax.slice_in_dim(x, shape[dim] // 2, shape[dim], axis=dim),
            lambda: lax.slice_in_dim(x, 0, shape[dim], 2, axis=dim),
            lambda: jnp.flip(x, dim),
            lambda: jnp.concatenate([x, jnp.flip(x, dim)], dim),
            lambda: jnp.stack([x, x], dim),
            lambda: jnp.tile(x, (2,) + (1,) * (x.ndim - 1)),
            lambda: lax.pad(x, jnp.zeros((), x.dtype), [(self.dice.randint(-1, 2), 1, 1)] + [(0, 0, 0)] * (x.ndim - 1)),
            lambda: small.sum(dim),
            lambda: small.max(dim),
            lambda: small.prod(dim),
            lambda: jnp.cumprod(small, dim),
            lambda: jnp.unstack(x, axis=dim)[-2:],
            lambda: small.min(),
            lambda: (small > 2).any(dim),
            lambda: (small > 2).all(dim),
            lambda: jnp.cumsum(small, dim),
            lambda: lax.cummax(small, dim, reverse=True),
            lambda: lax.cummin(small, dim),
            lambda: lax.reduce_xor(small, (dim,)),
            lambda: jnp.roll(x, 1, dim),
            lambda: jnp.split(x, [1], dim),
        )
        return self.dice.choice(ways)()

    def indexed(self) -> Any:
        x, i = self.any(rank=1, kinds="biu"), self.any(kinds="iu").astype("int32")
        # XLA merges a dynamic slice of a dynamic slice, and forgets to clamp the starts (openxla/xla#49121).
        x = lax.optimization_barrier(x)
        at, count = jnp.ravel(i)[0] % 3, x.shape[0]
        ways = (
            lambda: lax.dynamic_slice_in_dim(x, at, max(1, count // 2), 0),
            lambda: lax.dynamic_slice_in_dim(x, at - 2, 1, x.ndim - 1),
            lambda: lax.dynamic_update_slice_in_dim(x, x[:1], at, 0),
            lambda: x[at],
            lambda: jnp.take(x, i % count, axis=0, mode="clip"),
            lambda: jnp.take(x, i, axis=x.ndim - 1, mode="clip"),
            lambda: jnp.take_along_axis(x, jnp.argsort(x, axis=0), axis=0),
            lambda: jnp.sort(x, axis=0),
            lambda: jnp.argsort(x, axis=-1),
            lambda: jnp.argmax(x, axis=0),
            lambda: jnp.argmin(x, axis=-1),
            lambda: x[::-1][: count // 2 + 1],
        )
        return self.dice.choice(ways)()

    def sent(self) -> Any:
        x, names = few(self.any(kinds="iuf")), self.names()
        x, count = _compat.pvary(x, tuple(self.sizes)), math.prod(self.sizes[n] for n in names)
        block = jnp.broadcast_to(x.reshape(-1)[:1], (count,)) + jnp.arange(count).astype(x.dtype)
        dim = self.dice.randint(0, x.ndim)
        ordered = tuple(n for n in self.sizes if n in names)
        ways = (
            lambda: lax.ppermute(x, ordered, [(i, (i + 1) % count) for i in range(count)]),
            lambda: lax.ppermute(x, ordered, list(enumerate(self.dice.sample(range(count), count)))[1:]),
            lambda: lax.psum(x, names),
            lambda: lax.pmax(x, names),
            lambda: lax.pmin(x, names),
            lambda: lax.all_gather(x, names, axis=dim),
            lambda: lax.all_gather(x[None], names, axis=self.dice.randint(0, x.ndim), tiled=True),
            lambda: lax.all_gather(x, names, axis=dim, to="invarying"),
            lambda: lax.psum_scatter(block, names),
            lambda: lax.psum_scatter(jnp.stack([block, block], 1), names, tiled=True),
            lambda: lax.all_to_all(block, names, 0, 0),
            lambda: lax.all_to_all(jnp.stack([block, block]), names, 1, 0),
            lambda: lax.all_to_all(jnp.stack([block, block]), names, 1, 0, tiled=True),
            lambda: lax.axis_index(names),
        )
        return self.dice.choice(ways)()


def few(x: Any) -> Any:
    """Floats whose sums are exact in any order."""
    return x if x.dtype.kind in "iu" else jnp.clip(jnp.floor(x), -2, 2)


def compare(body: Callable[[], Any], sizes: dict[str, int]) -> tuple[int, int]:
    """Compare all tables with what the devices hold; how many were known, and how many values there are."""
    tables = tables_of(body, sizes)
    held = jax.jit(mapped(body, sizes))()
    for i, (table, x) in enumerate(zip(tables, held, strict=True)):
        if table is not None:
            assert table.dtype == x.dtype
            np.testing.assert_array_equal(on_each_device(table, sizes), np.asarray(x), f"value {i}")
    return sum(table is not None for table in tables), len(tables)


@pytest.mark.parametrize("seed", seeds())
def test_every_table_is_what_the_devices_hold(seed: int) -> None:
    program = Program(seed)
    known, count = compare(program, program.sizes)
    assert known > count / 2  # what is not known are floats that are not exact, and what comes of them


WRONG: dict[str, tuple[Any, Callable[[], Any]]] = {
    "rem": (integers._elementwise(np.mod), lambda: lax.rem(lax.axis_index("a") - 2, jnp.int32(3))),
    "div": (integers._elementwise(np.floor_divide), lambda: lax.div(lax.axis_index("a") - 2, jnp.int32(3))),
    "argmax": (integers._RULES["argmin"], lambda: jnp.argmax(jnp.arange(3) * lax.axis_index("a"))),
    "ppermute": (
        lambda eqn, tables, sizes: tables[0],
        lambda: lax.ppermute(lax.axis_index("a"), "a", [(0, 1), (1, 0)]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, body = WRONG[name]
    compare(lambda: [body()], {"a": 4})
    monkeypatch.setitem(integers._RULES, name, rule)
    with pytest.raises(AssertionError, match="value 0"):
        compare(lambda: [body()], {"a": 4})


# --- layouts ---------------------------------------------------------------------------------------------------

MESH = {"a": 2, "b": 4}


def index(*axes: str) -> Any:
    return lax.axis_index(axes)


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
    assert integers.moves(blocks).shift == (step if step < 3 else -1)


PERMUTATIONS: list[tuple[list[tuple[int, int]], int, Moves]] = [
    ([(0, 1), (1, 2), (2, 3), (3, 0)], 4, Moves(1, True, False, ())),
    ([(0, 1), (1, 2), (2, 3)], 4, Moves(1, False, False, (0,))),
    ([(1, 0), (2, 1), (3, 2)], 4, Moves(-1, False, False, (3,))),
    ([(1, 0), (2, 1), (3, 2), (0, 3)], 4, Moves(-1, True, False, ())),
    ([(0, 2), (1, 3), (2, 0), (3, 1)], 4, Moves(2, True, False, ())),
    ([(0, 3), (1, 2), (2, 1), (3, 0)], 4, Moves(None, False, True, ())),
    ([(0, 1), (1, 0), (2, 3), (3, 2)], 4, Moves(None, False, False, ())),
    ([(0, 0), (1, 1)], 2, Moves(0, False, False, ())),
    ([(0, 1), (1, 0)], 2, Moves(1, True, True, ())),
    ([(1, 0)], 2, Moves(-1, False, True, (1,))),
    ([], 2, Moves(None, False, False, (0, 1))),
]


@pytest.mark.parametrize("case", range(len(PERMUTATIONS)))
def test_what_a_permutation_does(case: int) -> None:
    perm, count, expected = PERMUTATIONS[case]
    assert integers.moves(integers.sends(perm, count)) == expected


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
