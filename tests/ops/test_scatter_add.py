"""`scatter_add`: rows added to whole and divided tables, against the simulator, which adds them one by one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from spmd.ops import scatter_add
from tests import simulator
from tests.ops.harness import backward_counts, close, counts, make_mesh, pulled, run
from tests.sampler import Sampler, seeds, share

MESH = {"dp": 2, "tp": 4}


def sample(sampler: Sampler) -> tuple[dict[str, int], str, dict[str, int]]:
    """A mesh, a pattern and sizes: each axis divides rows, table, features or nothing."""
    mesh = sampler.mesh()
    left: dict[str, list[str]] = {name: [] for name in "nsd"}
    right: dict[str, list[str]] = {name: [] for name in "vwd"}
    keys, marked = sampler.choice(["v", "vw"]), []
    for axis in sampler.rng.permutation(list(mesh)):
        name = sampler.choice(["n", "n", "s", "d", "table", ""])
        if name == "table":  # these divide no rows, and are in front
            right[sampler.choice(keys)].append(str(axis))
        elif name:
            left[name].append(str(axis))
    right["d"] += left["d"]
    for axis in (*left["n"], *left["s"]):
        fate = sampler.choice([*keys, *keys, "d", "sum", "mark"])
        if fate == "mark":
            marked.append(axis)
        elif fate != "sum":
            right[fate].append(axis)
    word = lambda name, axes: "/".join([name, *axes])
    order = [str(name) for name in sampler.rng.permutation([*keys, "d"])]
    placed = lambda name: f"[{word(name, right[name])}]" if name in keys else word(name, right[name])
    out = " ".join(map(placed, order)) + (f" {{U:{','.join(a for a in mesh if a in marked)}}}" if marked else "")
    rows = " ".join(word(str(name), left[str(name)]) for name in sampler.rng.permutation(list("nsd")))
    ids = " ".join(word(name, left[name]) for name in "ns")
    pattern = f"{rows}, {ids} -> {out}"
    plain = out.replace("[", "").replace("]", "")
    return mesh, pattern, sampler.sizes([*"nsd", *keys], mesh, [rows, ids, plain])


def keys_of(pattern: str) -> list[str]:
    """The names in brackets, in the order of their ids."""
    _, (out,) = simulator.split_pattern(pattern)
    return [simulator.read(out).names[i] for i in simulator.bracketed(out)]


def layouts(pattern: str) -> tuple[list[str], str]:
    (rows, ids), (out,) = simulator.split_pattern(pattern)
    return [rows, *[ids] * len(keys_of(pattern))], out.replace("[", "").replace("]", "")


def arrays(sampler: Sampler, pattern: str, sizes: dict[str, int], dtype: Any = "float32") -> tuple:
    """Rows and ids, some of which are not in the table."""
    (rows, ids), _ = simulator.split_pattern(pattern)
    shape = lambda layout: tuple(sizes[name] for name in simulator.read(layout).names)
    draw = lambda key: np.asarray(sampler.rng.integers(-2, sizes[key] + 2, size=shape(ids)), np.int32)
    return sampler.array(shape(rows), dtype), tuple(map(draw, keys_of(pattern)))


def added(x: Any, ids: Any, pattern: str, sizes: dict[str, int]) -> Any:
    keys = keys_of(pattern)
    return scatter_add(x, tuple(ids) if len(keys) > 1 else ids[0], pattern, **{key: sizes[key] for key in keys})


def plain(x: Any, ids: Any, pattern: str, sizes: dict[str, int]) -> Any:
    """The same in plain JAX on whole arrays."""
    (rows, _), (out,) = simulator.split_pattern(pattern)
    keys = keys_of(pattern)
    here = jnp.stack([(i >= 0) & (i < sizes[key]) for i, key in zip(ids, keys, strict=True)]).all(0)
    x = x.transpose([simulator.read(rows).names.index(name) for name in "nsd"]) * here[..., None].astype(x.dtype)
    clipped = tuple(jnp.clip(i, 0, sizes[key] - 1) for i, key in zip(ids, keys, strict=True))
    table = jnp.zeros([*(sizes[key] for key in keys), sizes["d"]], x.dtype).at[clipped].add(x)
    return table.transpose([[*keys, "d"].index(name) for name in simulator.read(out).names])


@pytest.mark.parametrize("seed", seeds(3))
def test_values_and_gradients_in_every_mode(seed: int) -> None:
    sampler = Sampler(seed)
    mesh, pattern, sizes = sample(sampler)
    rows, ids = arrays(sampler, pattern, sizes)
    ins, out = layouts(pattern)
    wanted, outside = simulator.scatter_add(rows, ids, pattern, sizes)
    weights = jnp.asarray(sampler.array(wanted.shape))
    expected = pulled(lambda x, *i: plain(x, i, pattern, sizes), jnp.asarray(rows), *map(jnp.asarray, ids), by=weights)
    close(expected[0], wanted)
    body = lambda x, *i: added(x, i, pattern, sizes)
    for mode in MODES if seed % 3 == 0 else ("explicit", "reference"):
        fn = run(body, mesh, ins, [out, "scalar"], mode)
        first = lambda *args, fn=fn: fn(*args)[0]
        found = pulled(first, jnp.asarray(rows), *map(jnp.asarray, ids), by=weights)
        jax.tree.map(lambda a, b: close(a, b, 1e-4), found, expected)
        assert int(fn(rows, *ids)[1]) == outside


@pytest.mark.parametrize(
    ("field", "waves"), share([("x/dp y/tp z", "kx ky/dp kz/tp"), ("x/dp/tp y z", "kx ky/dp/tp kz")])
)
def test_a_power_spectrum_is_binned_where_it_lies(field: str, waves: str) -> None:
    """Partial sums in each bin, and one psum of the bins beside the transform's own."""
    n, bins = 8, 5

    def power(u: Any) -> Any:
        f = spmd.fft.fft(u, f"{field} -> {waves}")
        along = (spmd.fft.fftfreq(word, 1 / n) for word in waves.split())
        k = spmd.meshgrid(*along, f"{', '.join(waves.split())} -> {waves}", sparse=True)
        shell = jnp.round(jnp.sqrt(sum(one**2 for one in k))).astype(jnp.int32)
        terms = jnp.stack([abs(f) ** 2, jnp.ones(f.shape)])
        return scatter_add(terms, shell, f"c {waves}, {waves} -> c [r]", outside="drop")

    run = spmd.kernel(f"{field} -> c r", mesh=make_mesh(MESH), r=bins, **dict.fromkeys(("kx", "ky", "kz"), n))(power)
    x = Sampler(0).array((n, n, n), whole=False)
    k = np.fft.fftfreq(n, 1 / n)
    shell = np.round(np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)).astype(int).ravel()
    squares = abs(np.fft.fftn(x)).ravel() ** 2
    wanted = [np.bincount(shell, weight, n)[:bins] for weight in (squares, np.ones_like(squares))]
    for mode in MODES:
        close(getattr(run, mode)(x), jnp.asarray(wanted, jnp.float32), 1e-4)
    sums = [one for one in spmd.inspect.collectives(run, x) if one.kind == "psum"]
    assert sum(one.total_bytes for one in sums) == 2 * (2 * bins * 4) * 7 / 8


@pytest.mark.parametrize(("n", "d"), [(8, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize(
    ("pattern", "ins", "out"),
    [
        ("n/dp d, n/dp -> [v/dp] d", ["n/dp d", "n/dp"], "v/dp d"),
        ("n/dp d, n/dp -> [v/tp] d", ["n/dp d", "n/dp"], "v/tp d"),
        ("n/dp d/tp, n/dp -> [v] d/tp", ["n/dp d/tp", "n/dp"], "v d/tp"),
    ],
)
def test_no_rows_and_rows_of_nothing(pattern: str, ins: list[str], out: str, n: int, d: int) -> None:
    """The ids of rows of width 0 are counted as all others are."""
    d = 4 if d and "d/tp" in pattern else d
    ids = np.arange(n, dtype=np.int32)  # 4 and above are not in the table
    for mode in MODES:
        fn = run(lambda x, i: scatter_add(x, i, pattern, v=4), MESH, ins, [out, "scalar"], mode)
        table, outside = fn(np.ones((n, d), np.float32), ids)
        np.testing.assert_array_equal(table, np.zeros((4, d), np.float32), strict=True)
        assert int(outside) == np.sum(ids >= 4)


def test_the_comparison_can_fail() -> None:
    table, outside = simulator.scatter_add(np.arange(3.0), [np.array([1, 1, 4])], "n, n -> [v]", {"v": 3})
    assert table.tolist() == [0, 1, 0] and outside == 1


@pytest.mark.parametrize(
    ("pattern", "forward", "both", "sent"),
    share(
        [
            ("n/dp d, n/dp -> [v/dp] d", {"psum_scatter dp": 1}, {"psum_scatter dp": 1, "all_gather dp": 1}, 512 // 2),
            ("n/dp d, n/dp -> [v] d", {"psum dp": 1}, {"psum dp": 1}, 2 * 512 // 2),
            (
                "n/dp d, n/dp -> [v/tp/dp] d",
                {"psum_scatter dp": 1},
                {"psum_scatter dp": 1, "all_gather dp": 1, "psum tp": 1},
                64,
            ),
            ("n/dp d/tp, n/dp -> [v/dp] d/tp", {"psum_scatter dp": 1}, {"psum_scatter dp": 1, "all_gather dp": 1}, 64),
            ("n d, n -> [v/dp] d", {}, {"psum dp": 1}, 0),
        ]
    ),
)
def test_collectives_and_bytes_are_those_of_the_string(pattern: str, forward: dict, both: dict, sent: int) -> None:
    """The formulas of the docstring. A table of 16 x 8 float32 has 512 bytes."""
    (rows, ids), (out,) = simulator.split_pattern(pattern)
    out = out.replace("[", "").replace("]", "")
    x, numbers = jnp.ones((8, 8)), jnp.zeros(8, jnp.int32)
    body = lambda x, i: scatter_add(x, i, pattern, v=16, outside="drop")
    assert counts(body, MESH, [rows, ids], out, x, numbers) == forward
    compiled = run(body, MESH, [rows, ids], out).lower(x, numbers).compile()
    assert spmd.inspect.collectives(compiled, mesh=make_mesh(MESH)).total_bytes == sent
    n = numbers.size // math.prod(MESH[axis] for axis in spmd.Layout(ids).axes)
    assert backward_counts(lambda x: body(x, jnp.zeros(n, int)), MESH, [rows], out, x) == both


def test_the_count_is_sent_only_if_it_is_used() -> None:
    body = lambda x, i: scatter_add(x, i, "n/dp d, n/dp -> [v/dp] d", v=16)
    x, numbers = jnp.ones((8, 8)), jnp.zeros(8, jnp.int32)
    ins = ["n/dp d", "n/dp"]
    assert counts(lambda *args: body(*args)[0], MESH, ins, "v/dp d", x, numbers) == {"psum_scatter dp": 1}
    compiled = run(body, MESH, ins, ["v/dp d", "scalar"]).lower(x, numbers).compile()
    assert spmd.inspect.collectives(compiled, mesh=make_mesh(MESH)).counts == {"psum_scatter": 1, "psum": 1}


@pytest.mark.parametrize("dtype", share(["int8", "uint8", "uint32"]))
def test_small_integers_reach_all_rows(dtype: str) -> None:
    ids = jnp.asarray([0, 1, 100, 127]).astype(dtype)
    body = lambda x, i: scatter_add(x, i, "n/dp, n/dp -> [v/tp/dp]", v=600)
    for mode in ("explicit", "reference"):
        table, outside = run(body, MESH, ["n/dp", "n/dp"], ["v/tp/dp", "scalar"], mode)(jnp.ones(4), ids)
        assert np.flatnonzero(np.asarray(table)).tolist() == [0, 1, 100, 127] and int(outside) == 0


def test_several_numbers_are_one_and_of_several_types() -> None:
    """XLA adds by one number for each row. Those of types that differ, and of a table beyond int32, are right too."""
    ids = np.asarray([0, 3, 1, -1, 200], np.int16), np.asarray([1, 0, 1, 2, 1], np.uint32)
    body = lambda x, i, j: scatter_add(x, (i, j), "n, n -> [v/dp] [w]", v=4, w=3, outside="drop")
    fn = run(body, MESH, ["n"] * 3, "v/dp w")
    wanted = np.zeros((4, 3), np.float32)
    np.add.at(wanted, ([0, 3, 1], [1, 0, 1]), [1, 2, 3])
    close(fn(jnp.arange(1.0, 6.0), *ids), wanted)
    assert "scatter_dims_to_operand_dims = [0]," in fn.lower(np.ones(5, np.float32), *ids).as_text()
    huge = lambda x, i: scatter_add(x, (i, i), "n, n -> [v] [w]", v=2**16, w=2**16, outside="drop")[3, 3]
    jaxpr = str(jax.make_jaxpr(run(huge, MESH, ["n", "n"], "scalar", "reference"))(np.ones(2), np.ones(2, int)))
    assert "scatter_dims_to_operand_dims=(0, 1)" in jaxpr


def test_rows_of_any_type() -> None:
    ids, dtypes = jnp.asarray([3, 0, 1, 3, 3, 9, 1, -1]), ("bfloat16", "float16", "int32", "complex64", "uint8")
    body = lambda i, *xs: [scatter_add(x, i, "n/tp, n/tp -> [v/tp]", v=4, outside="drop") for x in xs]
    for mode in MODES:
        fn = run(body, MESH, ["n/tp"] * 6, ["v/tp"] * 5, mode)
        for found in fn(ids, *(jnp.arange(1, 9).astype(dtype) for dtype in dtypes)):
            close(found, jnp.asarray([2, 10, 0, 10]).astype(found.dtype))


def test_a_partial_sum_of_rows() -> None:
    """Parts of rows are added like rows, and the sum of the tables is the table of the sums."""
    body = lambda x, i: scatter_add(x, i, "n d {U:tp}, n -> [v/dp] d/tp", v=4, outside="drop")
    x, ids = jnp.asarray(Sampler(1).array((6, 8))), jnp.asarray([3, 0, 1, 3, 2, 2])
    close(run(body, MESH, ["n d {U:tp}", "n"], "v/dp d/tp")(x, ids), jnp.zeros((4, 8)).at[ids].add(x))


def test_under_vmap_scan_and_jvp() -> None:
    one = lambda x, i: scatter_add(x, i, "s/dp d, s/dp -> [v/tp] d", v=8, outside="drop")

    def body(x, i):  # x: b s d, i: b s
        _, scanned = jax.lax.scan(jax.checkpoint(lambda c, both: (c, one(*both))), 0, (x, i))
        _, tangent = jax.jvp(lambda x: one(x, i[0]), (x[0],), (x[1],))
        return jax.vmap(one)(x, i) + scanned + tangent[None]

    x, ids = jnp.arange(16.0).reshape(2, 4, 2), jnp.asarray([[0, 5, 7, 0], [1, 1, 2, 9]])
    fn = run(body, MESH, ["b s/dp d", "b s/dp"], "b v/tp d")
    whole = jax.vmap(lambda x, i: jnp.zeros((8, 2)).at[i].add(x, mode="drop"))
    expected = lambda x: 2 * whole(x, ids) + whole(x[1:], ids[:1])
    compare = lambda a, b: close(a, b, 1e-4)
    jax.tree.map(compare, pulled(fn, x, ids), pulled(lambda x, i: expected(x), x, ids))


def test_it_is_the_transpose_of_take() -> None:
    x, ids = jnp.asarray(Sampler(0).array((8, 3))), np.asarray(Sampler(1).rng.integers(-2, 12, 8), np.int32)

    @spmd.kernel("n/dp d, n/dp -> v/dp d", mesh=make_mesh(MESH), v=8)
    def adds(x, ids):
        return scatter_add(x, ids, "n/dp d, n/dp -> [v/dp] d", outside="drop")

    looked_up = lambda table: spmd.kernel("v d, n -> n d", mesh=make_mesh(MESH))(
        lambda t, i: spmd.take(t, i, "[v] d, n -> n d")
    )(table, ids)
    [back] = jax.vjp(looked_up, jnp.zeros((8, 3)))[1](x)
    close(adds(x, ids), back)
