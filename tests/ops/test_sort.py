"""`sort`, `argsort` and `flip` along whole and divided dimensions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.inspect import collectives
from spmd.modes import MODES
from spmd.ops import argsort, flip, sort
from tests import simulator
from tests.ops.harness import backward_counts, close, make_mesh, mapped_and_scanned, pulled, run
from tests.sampler import Sampler, first_seed, seeds, share

MESH = {"dp": 2, "tp": 4}
SPECIAL = [np.nan, 0.0, -0.0, 3.0, np.inf, -np.inf, -1.0, np.nan, 2.0, 2.0, 0.0, -1.0, 7.0, -7.0, 2.0, 5.0]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "layout", share(["[s/tp]", "[s/tp/dp]", "[s/dp/tp]", "[s/tp] 3", "4 [s/tp/dp]", "b/dp [s/tp]"])
)
def test_ties_nans_and_gradients_are_those_of_jnp(layout: str, descending: bool) -> None:
    """Values with ties and NaNs; each equal element has its own gradient."""
    plain = layout.replace("[", "").replace("]", "")
    (axis,) = simulator.bracketed(layout)
    sampler = Sampler(3)
    rows = {"b": 8, "3": 3, "4": 4}.get(layout.replace("[s/tp]", "").strip().split("/")[0].split(" ")[0], 1)
    x = np.stack([sampler.rng.permutation(SPECIAL) for _ in range(rows)], 1 - axis).astype(np.float32)
    x = jnp.asarray(x if len(layout.split()) > 1 else x.reshape(-1))
    by = jnp.asarray(sampler.array(x.shape, whole=False))
    wanted = pulled(lambda x: jnp.sort(x, axis=axis, descending=descending), x, by=by)
    for mode in MODES if descending else ("explicit", "reference"):
        fn = run(lambda x: sort(x, layout, descending=descending), MESH, [plain], plain, mode)
        found = pulled(fn, x, by=by)
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1][0], wanted[1][0])


@pytest.mark.parametrize("dtype", share(["bfloat16", "int8", "uint32", "bool"]))
@pytest.mark.parametrize("layout", ["[s/tp/dp]", "8 [s/tp]"])
def test_dtypes(dtype: str, layout: str) -> None:
    shape = (24,) if " " not in layout else (8, 12)
    x = jnp.asarray(np.random.default_rng(0).integers(0, 5, shape)).astype(dtype)
    plain = layout.replace("[", "").replace("]", "")
    found = run(lambda x: sort(x, layout), MESH, [plain], plain)(x)
    close(found, jnp.sort(x))


@pytest.mark.parametrize("n", range(2, 9))
def test_the_network_sorts(n: int) -> None:
    """All sequences of zeros and ones, by the 0-1 principle, an element on each device; and its rounds are few."""
    bits = np.array(list(itertools.product([0.0, 1.0], repeat=n)), np.float32)[None]
    fn = run(jax.vmap(jax.vmap(lambda x: sort(x, "[s/a]"))), {"a": n}, ["k b s/a"], "k b s/a")
    np.testing.assert_array_equal(fn(bits), np.sort(bits))
    one = run(lambda x: sort(x, "[s/a]"), {"a": n}, ["s/a"], "s/a")
    t = (n - 1).bit_length()
    sent = collectives(one.lower(bits[0, 0]).compile(), mesh=make_mesh({"a": n})).counts
    assert sent == {"ppermute": t * (t + 1) // 2}


def test_on_three_and_five_devices() -> None:
    for n in (3, 5):
        x = jnp.asarray(np.random.default_rng(n).normal(size=7 * n).astype(np.float32))
        by = jnp.arange(7.0 * n)
        fn = run(lambda x: sort(x, "[s/a]"), {"a": n}, ["s/a"], "s/a")
        jax.tree.map(close, pulled(fn, x, by=by), pulled(jnp.sort, x, by=by))


# --- columns and payloads ------------------------------------------------------------------------------------

PLACES = [  # layouts, meshes and shapes: by columns, by rounds, by another dimension, not at all
    ("[s/a]", {"a": 4}, (80,)),
    ("[s/b/a]", {"a": 4, "b": 2}, (8 * 104,)),
    ("[s/a/b] 3", {"a": 2, "b": 3}, (6 * 54, 3)),
    ("2 [s/a]", {"a": 3}, (2, 36)),
    ("x/b [s/a]", {"a": 4, "b": 2}, (6, 80)),
    ("[s/a]", {"a": 4}, (28,)),
    ("[s/a/b]", {"a": 1, "b": 2}, (10,)),
    ("8 [s/a]", {"a": 4}, (8, 24)),
    ("[s] x/a", {"a": 2}, (9, 4)),
    ("[s/a] 5", {"a": 1}, (9, 5)),
]


@pytest.mark.parametrize("seed", seeds(3))
def test_payloads_follow_as_in_jnp(seed: int) -> None:
    """Values with ties and NaNs, a payload with more dimensions and one without; gradients of all."""
    sampler = Sampler(seed)
    layout, mesh, shape = sampler.choice(PLACES)
    plain, descending = layout.replace("[", "").replace("]", ""), bool(sampler.rng.integers(2))
    (axis,) = simulator.bracketed(layout)
    x = np.asarray(sampler.rng.choice(SPECIAL, size=shape), np.float32)
    rows = jnp.asarray(sampler.array((*shape, 2), whole=False))
    by = jnp.asarray(sampler.array(rows.shape, whole=False))

    def body(x, rows):
        key, moved = sort(x, layout, descending=descending, payload={"rows": rows, "x": x.astype("bfloat16")})
        return moved["rows"] + jnp.nan_to_num(key)[..., None], moved["x"], argsort(x, layout, descending=descending)

    def whole(x, rows):
        order = jnp.argsort(x, axis=axis, descending=descending, stable=True)
        moved = lambda y: jnp.take_along_axis(y, order.reshape(*shape, *[1] * (y.ndim - x.ndim)), axis)
        return moved(rows) + jnp.nan_to_num(moved(x))[..., None], moved(x.astype("bfloat16")), order

    first = lambda fn: lambda *args: fn(*args)[0]
    wanted, gradients = whole(x, rows), pulled(first(whole), x, rows, by=by)
    for mode in MODES if (seed - first_seed()) % 3 == 0 else ("explicit", "reference"):
        fn = run(body, mesh, [plain, f"{plain} d"], [f"{plain} d", plain, plain], mode)
        jax.tree.map(close, fn(x, rows), wanted)
        jax.tree.map(close, pulled(first(fn), x, rows, by=by), gradients)


@pytest.mark.parametrize("n", share([3, 4, 7]))
@pytest.mark.parametrize("descending", [False, True])
def test_columns_sort_zeros_and_ones(n: int, descending: bool) -> None:
    """The smallest blocks that columnsort sorts: what compares and exchanges without looking sorts all sequences if it
    sorts those of zeros and ones."""
    m = -(-2 * (n - 1) ** 2 // n) * n
    fn = run(lambda x: sort(x, "[s/a]", descending=descending), {"a": n}, ["s/a"], "s/a")
    assert collectives(fn.lower(jnp.ones(n * m, int)).compile(), mesh=make_mesh({"a": n})).counts["all_to_all"] == 2
    rng = np.random.default_rng(n)
    for _ in range(30):
        ones = rng.random(n)  # each block has its own share of ones
        x = (rng.random((n, m)) < ones[:, None]).reshape(-1).astype(int)
        np.testing.assert_array_equal(fn(x), np.sort(x)[::-1] if descending else np.sort(x))


def test_argsort_and_payloads_under_vmap_scan_and_remat() -> None:
    def one(row):
        moved = sort(jnp.sin(row), "[s/tp]", payload=row)[1]
        return moved + argsort(row, "[s/tp]", descending=True).astype(float)

    def whole(row):
        return row[jnp.argsort(jnp.sin(row))] + jnp.argsort(row, descending=True).astype(float)

    x = jnp.asarray(Sampler(10).array((3, 80), whole=False))
    by = jnp.asarray(Sampler(11).array((3, 80), whole=False))
    fn = run(mapped_and_scanned(one), MESH, ["t s/tp"], "t s/tp")
    jax.tree.map(close, pulled(fn, x, by=by), pulled(lambda x: 2 * jax.vmap(whole)(x), x, by=by))


# --- communication -------------------------------------------------------------------------------------------


def cost(body, layout: str, x) -> tuple[dict[str, int], int]:
    found = collectives(run(body, MESH, [layout], layout).lower(x).compile(), mesh=make_mesh(MESH))
    return found.counts, found.total_bytes


def test_what_is_sent() -> None:
    shard = 4 * 12 * 4  # 4 rows of 12 numbers
    body = lambda x: sort(x, "b/dp [s/tp]")
    x = jnp.ones((8, 48))
    assert cost(body, "b/dp s/tp", x) == ({"all_to_all": 2}, 2 * shard * 3 // 4)
    assert backward_counts(body, MESH, ["b/dp s/tp"], "b/dp s/tp", x) == {"all_to_all tp": 4 * 4}  # of 4 blocks each
    body = lambda x: sort(x, "b/dp [s/tp]")
    x = jnp.ones((6, 48))  # 3 rows: nothing that 4 devices could divide
    assert cost(body, "b/dp s/tp", x) == ({"ppermute": 3}, 3 * 3 * 12 * 4)
    # with a gradient the positions travel too, and the cotangents back
    assert backward_counts(body, MESH, ["b/dp s/tp"], "b/dp s/tp", x) == {"ppermute tp": 9}
    assert cost(lambda x: sort(x, "b/dp [s]"), "b/dp s", x) == ({}, 0)
    x = jnp.ones((4, 16))
    assert cost(lambda x: flip(x, "b/dp [s/tp]"), "b/dp s/tp", x) == ({"ppermute": 1}, 2 * 4 * 4)
    assert cost(lambda x: flip(x, "[b/dp] [s/tp]"), "b/dp s/tp", x) == ({"ppermute": 1}, 2 * 4 * 4)
    assert backward_counts(lambda x: flip(x, "[b/dp] [s/tp]"), MESH, ["b/dp s/tp"], "b/dp s/tp", x) == {
        "ppermute dp,tp": 2
    }


def test_what_columns_and_payloads_send() -> None:
    """The formulas of the docstring, for n = 4 and shards of 4 x 20 numbers."""
    shard, x = 4 * 3 * 20, jnp.ones((6, 80))
    lay, mark = "b/dp s/tp", "b/dp [s/tp]"
    columns = 2 * shard * 3 // 4 + shard
    both = {"all_to_all": 2, "ppermute": 2}
    assert cost(lambda x: sort(x, mark), lay, x) == (both, columns)
    # nobody needs the elements, or with a payload their positions, of the last permute
    assert cost(lambda x: argsort(x, mark), lay, x) == ({"all_to_all": 4, "ppermute": 3}, 2 * columns - shard // 2)
    pair = lambda x: sum(y.astype("float32") for y in sort(x, mark, payload=x.astype("int8")))
    assert cost(pair, lay, x) == ({"all_to_all": 6, "ppermute": 5}, 2 * columns - shard // 2 + columns // 4)
    # with a gradient the positions travel too, and the cotangents back
    assert backward_counts(lambda x: sort(x, mark), MESH, [lay], lay, x) == {"all_to_all tp": 6 * 4, "ppermute tp": 5}
    x, shard = jnp.ones((8, 48)), 4 * 4 * 12  # another dimension: there the elements, back the places
    assert cost(lambda x: argsort(x, mark), lay, x) == ({"all_to_all": 2}, 2 * shard * 3 // 4)


def test_memory_is_that_of_shards() -> None:
    """Never the whole: a few blocks, whatever the number of devices."""
    n = 2**16
    mesh = {"a": 8}
    fn = run(lambda x: sort(x, "[s/a]"), mesh, ["s/a"], "s/a")
    compiled = fn.lower(jnp.ones(n)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * (4 * n // 8)


# --- flip ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", share(["b/dp [s/tp]", "[b/dp] [s/tp]", "b [s/tp/dp]", "[(b c)/tp] s", "b {U:dp} [s/tp]"])
)
def test_flip_in_every_mode(layout: str) -> None:
    layout = layout if "{" not in layout else "b [s/tp] {U:dp}"
    plain = layout.replace("[", "").replace("]", "")
    x = jnp.asarray(Sampler(1).array((8, 16), whole=False))
    axes = tuple(i for i, w in enumerate(["(b" in layout or "[b" in layout, "[s" in layout]) if w)
    wanted = pulled(lambda x: jnp.flip(x, axes), x, by=x * x)
    for mode in ("explicit", "reference") if "{" in layout or "(" in layout else MODES:
        fn = run(lambda x: flip(x, layout, **({"c": 2} if "(" in layout else {})), MESH, [plain], plain, mode)
        if "{" in layout:
            close(fn(x), wanted[0], 1e-4)
        else:
            jax.tree.map(close, pulled(fn, x, by=x * x), wanted)


def test_under_vmap_scan_and_remat() -> None:
    one = lambda row: sort(flip(row, "[s/tp]") * 2, "[s/tp]")

    x = jnp.asarray(Sampler(10).array((3, 8), whole=False))
    plain = lambda x: 2 * jnp.sort(2 * x)
    by = jnp.asarray(Sampler(11).array((3, 8), whole=False))
    fn = run(mapped_and_scanned(one), MESH, ["t s/tp"], "t s/tp")
    jax.tree.map(close, pulled(fn, x, by=by), pulled(plain, x, by=by))


def test_the_comparison_can_fail() -> None:
    """Blocks sorted each by itself are noticed."""
    x = jnp.asarray(np.random.default_rng(0).permutation(16).astype(np.float32))
    wrong = run(jnp.sort, MESH, ["s/tp"], "s/tp")
    with pytest.raises(AssertionError):
        close(wrong(x), jnp.sort(x))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("shape", [(16,), (96,)])  # in rounds, and by columns
def test_complex_numbers_go_by_their_parts(shape: tuple[int], descending: bool) -> None:
    """Real parts first, as `jnp.sort` has it; NaN is the largest of each part."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, shape) + 1j * rng.integers(-2, 3, shape)
    x[3], x[7], x[8] = complex(1, np.nan), complex(np.nan, 1), complex(np.nan, np.nan)
    x = jnp.asarray(x, jnp.complex64)
    order = jnp.argsort(x, descending=descending)
    for mode in MODES:
        found = run(lambda x: sort(x, "[s/tp]", descending=descending), MESH, ["s/tp"], "s/tp", mode)(x)
        np.testing.assert_array_equal(found, jnp.sort(x, descending=descending))
        places = run(lambda x: argsort(x, "[s/tp]", descending=descending), MESH, ["s/tp"], "s/tp", mode)(x)
        np.testing.assert_array_equal(places, order)


def test_gradients_of_sorted_complex_numbers() -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16)), jnp.float32)
    x = jax.lax.complex(x[0], x[1])
    wanted = pulled(jnp.sort, x)
    found = pulled(run(lambda x: sort(x, "[s/tp]"), MESH, ["s/tp"], "s/tp"), x)
    jax.tree.map(lambda a, b: close(a, b), found, wanted)
