"""`take`: rows of whole and divided tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from spmd.ops import take
from tests import simulator
from tests.ops.harness import backward_counts, close, counts, frame, pulled, run
from tests.sampler import Sampler, share

MESH = {"dp": 2, "tp": 4}

PATTERNS = (
    "[v/tp] d, b/dp s -> b/dp s d",
    "[v/tp] d, b/dp s -> b/dp s/tp d",
    "[v/tp] d, b/dp s -> b/dp s d/tp",
    "[v/tp] d, b/dp s -> b/dp s d {U:tp}",
    "[v/dp/tp] d, b s -> s d/tp b",
    "[v] d/tp, b/dp s -> b/dp s d/tp",
    "[v] d, b/dp s/tp -> b/dp s/tp d",
    "d [v/tp], b s -> s d b",
    "[v/dp] d {U:tp}, b s -> b/tp s d",
    "[v/tp] (h k), b/dp s -> b/dp h s k",
)


def whole(table: jax.Array, ids: jax.Array, pattern: str) -> jax.Array:
    """The global meaning: zeros outside the table."""
    rows, _ = simulator.split_pattern(pattern)[0]
    (axis,) = simulator.bracketed(rows)
    inside = (ids >= 0) & (ids < table.shape[axis])
    clear = lambda names: " ".join(n for dim in simulator.read(names).dims for n, _ in dim)
    found = jnp.moveaxis(table, axis, 0)[jnp.where(inside, ids, 0)] * inside[..., None].astype(table.dtype)
    if "(h k)" in pattern:
        return found.reshape(*found.shape[:2], 2, -1).transpose(0, 2, 1, 3)
    names = ["b", "s", "d"]
    return found.transpose([names.index(n) for n in clear(simulator.split_pattern(pattern)[1][0]).split()])


@pytest.mark.parametrize("pattern", share(PATTERNS))
def test_values_and_gradients_in_every_mode(pattern: str) -> None:
    inputs, (output,) = simulator.split_pattern(pattern)
    sampler = Sampler(3)
    (axis,) = simulator.bracketed(inputs[0])
    table = jnp.asarray(sampler.array((8, 16) if axis else (16, 8), whole=False))
    ids = np.asarray(sampler.rng.integers(-3, 20, (4, 8)), np.int32)
    weights = jnp.asarray(sampler.array(whole(table, ids, pattern).shape))
    known = {"h": 2} if "(h k)" in pattern else {}
    plain = [i.replace("[", "").replace("]", "") for i in inputs]
    expected = pulled(lambda t, i: whole(t, i, pattern), table, ids, by=weights)
    for mode in MODES if pattern == PATTERNS[0] else ("explicit", "reference"):
        fn = run(lambda t, i: take(t, i, pattern, **known), MESH, plain, output, mode)
        jax.tree.map(lambda a, b: close(a, b, 1e-4), pulled(fn, table, ids, by=weights), expected)


@pytest.mark.parametrize(
    ("pattern", "forward", "both"),
    [
        ("[v/tp] d, b/dp s -> b/dp s d", {"psum tp": 1}, {"psum tp": 1, "psum dp": 1}),
        (
            "[v/tp] d, b/dp s -> b/dp s/tp d",
            {"psum_scatter tp": 1},
            {"psum_scatter tp": 1, "all_gather tp": 1, "psum dp": 1},
        ),
        ("[v] d/tp, b/dp s -> b/dp s d/tp", {}, {"psum dp": 1}),
    ],
)
def test_the_collectives_are_exactly_those_of_the_string(pattern: str, forward: dict, both: dict) -> None:
    inputs, (output,) = simulator.split_pattern(pattern)
    plain = [i.replace("[", "").replace("]", "") for i in inputs]
    table, ids = jnp.ones((16, 8)), jnp.zeros((4, 8), jnp.int32)
    assert counts(lambda t, i: take(t, i, pattern), MESH, plain, output, table, ids) == forward
    forward_only = lambda t: take(t, jnp.zeros((2, 8), jnp.int32) + _differs(), pattern)
    assert backward_counts(forward_only, MESH, plain[:1], output, table) == both


def _differs() -> jax.Array:
    return jax.lax.axis_index("dp").astype(jnp.int32)


@pytest.mark.parametrize("dtype", share(["int8", "uint8", "uint32", "int16"]))
def test_small_integers_reach_all_rows(dtype: str) -> None:
    table = jnp.arange(1200.0).reshape(600, 2)
    ids = jnp.asarray([0, 1, 100, 127]).astype(dtype)
    for mode in ("explicit", "reference"):
        found = run(lambda t, i: take(t, i, "[v/tp] d, s -> s d"), MESH, ["v/tp d", "s"], "s d", mode)(table, ids)
        close(found, table[np.asarray(ids).astype(int)])


def test_under_vmap_scan_and_jvp() -> None:
    one = lambda t, i: take(t, i, "[v/tp] d, s -> s d")

    def body(t, i):  # i: b s
        _, scanned = jax.lax.scan(jax.checkpoint(lambda c, row: (c, one(t, row))), 0, i)
        _, tangent = jax.jvp(lambda t: one(t, i[0]), (t,), (t,))
        return jax.vmap(one, in_axes=(None, 0))(t, i) + scanned + tangent[None]

    table, ids = jnp.arange(16.0).reshape(8, 2), jnp.asarray([[0, 5, 7], [1, 1, 2]])
    fn = run(body, MESH, ["v/tp d", "b s"], "b s d")
    expected = lambda t: 2 * t[ids] + t[ids[0]][None]
    compare = lambda a, b: close(a, b, 1e-4)
    jax.tree.map(compare, pulled(fn, table, ids), pulled(lambda t, i: expected(t), table, ids))


BATCHED = (
    "b/dp [v] d, b/dp n -> b/dp n d",
    "b/dp [v/tp] d, b/dp n -> b/dp n d",
    "b/dp [v/tp] d, b/dp n -> b/dp n/tp d",
    "d [v/tp] b/dp, n b/dp -> b/dp d n {U:tp}",
    "b [v/dp] d/tp, n d/tp b -> d/tp b/dp n",
    "b/tp/dp [v] d, b/tp/dp -> d b/tp/dp",
)


def rows_of_each(table: jax.Array, ids: jax.Array, pattern: str) -> jax.Array:
    """The global meaning in plain JAX, where the result's dimensions are of the indices: zeros outside the table."""
    (rows, indices), (output,) = simulator.split_pattern(pattern)
    (axis,) = simulator.bracketed(rows)
    names, of_ids = (list(simulator.read(one).names) for one in (rows, indices))
    letters = "".join
    one = jax.nn.one_hot(ids, table.shape[axis], dtype=table.dtype)
    out = letters(simulator.read(output).names)
    return jnp.einsum(f"{letters(names)},{letters(of_ids)}{names[axis]}->{out}", table, one, precision="highest")


@pytest.mark.parametrize("pattern", share(BATCHED))
def test_a_table_for_each_row_of_a_batch(pattern: str) -> None:
    """Values against the simulator, gradients against plain JAX, in every mode; numbers outside give zeros."""
    inputs, (output,) = simulator.split_pattern(pattern)
    sampler, sizes = Sampler(5), {"b": 8, "v": 8, "d": 4, "n": 12}
    shapes = [[sizes[name] for name in simulator.read(one).names] for one in inputs]
    table = jnp.asarray(sampler.array(tuple(shapes[0]), whole=False))
    ids = jnp.asarray(sampler.rng.integers(-3, 11, shapes[1]), jnp.int32)
    plain = [i.replace("[", "").replace("]", "") for i in inputs]
    wanted = simulator.take(np.asarray(table), np.asarray(ids), pattern)
    close(rows_of_each(table, ids, pattern), wanted)
    weights = jnp.asarray(sampler.array(wanted.shape))
    expected = pulled(lambda t, i: rows_of_each(t, i, pattern), table, ids, by=weights)
    for mode in MODES if pattern == BATCHED[1] else ("explicit", "auto", "reference"):
        fn = run(lambda t, i: take(t, i, pattern), MESH, plain, output, mode)
        jax.tree.map(lambda a, b: close(a, b, 1e-4), pulled(fn, table, ids, by=weights), expected)


def test_it_is_a_vmap_of_take() -> None:
    """As `jnp.take_along_axis` over two dimensions of the batch, and under vmap, scan and jvp."""
    table, ids = np.arange(2 * 3 * 8.0).reshape(2, 3, 8), np.arange(2 * 3 * 5).reshape(2, 3, 5) % 8
    table, ids = jnp.asarray(table), jnp.asarray(ids, jnp.int32)
    pattern = "a/dp c [v/tp], a/dp c n -> a/dp c n"
    one = lambda t, i: take(t, i, pattern)

    def body(t, i):
        scanned = jax.lax.scan(jax.checkpoint(lambda c, _: (c, one(t, i))), 0, None, length=1)[1]
        tangent = jax.jvp(lambda t: one(t, i), (t,), (t,))[1]
        return one(t, i) + scanned[0] + tangent + jax.vmap(one, (None, 0))(t, i[None])[0]

    fn = run(body, MESH, ["a/dp c v/tp", "a/dp c n"], "a/dp c n")
    expected = pulled(lambda t, i: 4 * jnp.take_along_axis(t, i, -1), table, ids)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), pulled(fn, table, ids), expected)


@pytest.mark.parametrize(
    ("pattern", "forward", "both", "size"),
    [
        ("b/dp [v] d, b/dp n -> b/dp n d", {}, {}, 0),
        ("b/dp [v/tp] d, b/dp n -> b/dp n d", {"psum tp": 1}, {"psum tp": 1}, 2),
        (
            "b/dp [v/tp] d, b/dp n -> b/dp n/tp d",
            {"psum_scatter tp": 1},
            {"psum_scatter tp": 1, "all_gather tp": 1},
            1,
        ),
    ],
)
def test_an_axis_of_the_batch_sends_nothing(pattern: str, forward: dict, both: dict, size: int) -> None:
    """The psum of the axis that divides the rows, of S bytes of result: 2S(n-1)/n, a psum_scatter half of it."""
    inputs, (output,) = simulator.split_pattern(pattern)
    plain = [i.replace("[", "").replace("]", "") for i in inputs]
    table, ids = jnp.ones((4, 16, 8)), jnp.zeros((4, 8), jnp.int32)
    one = lambda t, i: take(t, i, pattern)
    assert counts(one, MESH, plain, output, table, ids) == forward
    assert backward_counts(lambda t: one(t, jnp.zeros((2, 8), jnp.int32)), MESH, plain[:1], output, table) == both
    fn = run(one, MESH, plain, output)
    report = spmd.inspect.collectives(jax.jit(fn).lower(table, ids).compile(), mesh=frame(MESH).mesh)
    assert sum(row.total_bytes for row in report) == size * (4 // 2 * 8 * 8 * 4) * 3 // 4
