"""Every table that an equation makes is what the devices hold."""

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

from spmd import _compat
from spmd.checker import _integer_rules as integer_rules
from tests.checker.integer_tables import INTEGERS, MESHES, index, mapped, on_each_device, tables_of
from tests.sampler import seeds

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
    "rem": (integer_rules._elementwise(np.mod), lambda: lax.rem(lax.axis_index("a") - 2, jnp.int32(3))),
    "div": (integer_rules._elementwise(np.floor_divide), lambda: lax.div(lax.axis_index("a") - 2, jnp.int32(3))),
    "argmax": (integer_rules._RULES["argmin"], lambda: jnp.argmax(jnp.arange(3) * lax.axis_index("a"))),
    "ppermute": (
        lambda eqn, tables, sizes: tables[0],
        lambda: lax.ppermute(lax.axis_index("a"), "a", [(0, 1), (1, 0)]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, body = WRONG[name]
    compare(lambda: [body()], {"a": 4})
    monkeypatch.setitem(integer_rules._RULES, name, rule)
    with pytest.raises(AssertionError, match="value 0"):
        compare(lambda: [body()], {"a": 4})
