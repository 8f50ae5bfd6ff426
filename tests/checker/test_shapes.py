"""Reshapes, slices and indices over every layout: what is known agrees with the numbers, what is cut is pending."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from tests.checker.harness import is_known, parted, seen
from tests.sampler import share

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
LAYOUTS = ("a b", "a/dp b", "a b/tp", "a/dp b/tp", "a/tp/dp b", "a b/dp/tp")

# For each operation the dimensions that it needs whole, and the kind of what is pending where they are divided.
OPERATIONS = {
    "merged": (lambda x: x.reshape(-1), (), ""),
    "split": (lambda x: x.reshape(x.shape[0], x.shape[1] // 2, 2), (), ""),
    "merged and split": (lambda x: x.reshape(-1).reshape(x.shape) * 2, (), ""),
    "a new dimension": (lambda x: x[:, None], (), ""),
    "rows": (lambda x: x[: x.shape[0] // 2], (0,), "slice"),
    "every other column": (lambda x: x[:, ::2], (), ""),
    "every third column": (lambda x: x[:, ::3], (1,), "slice"),
    "two halves": (lambda x: jnp.split(x, 2, axis=1), (1,), "slice"),
    "one row": (lambda x: lax.dynamic_slice(x, (1, 0), (1, x.shape[1])), (0,), "slice"),
    "written over": (lambda x: lax.dynamic_update_slice(x, x[:1] * 0, (1, 0)), (0,), ("update", "slice")),
    "one behind the other": (lambda x: jnp.concatenate([x, x * 2], axis=0), (0,), "concatenate"),
    "stacked": (lambda x: jnp.stack([x, x * 2]), (), ""),
    "taken apart": (lambda x: jnp.unstack(x)[:2], (0,), "slice"),
    "tiled": (lambda x: jnp.tile(x, (2, 1)), (), ""),
    "padded": (lambda x: jnp.pad(x, ((1, 0), (0, 0))), (0,), "pad"),
    "picked": (lambda x: x[jnp.array([1, 0])], (0,), "index"),
    "set": (lambda x: x.at[1].set(0.0), (0,), "index"),
    "windows by a function": (
        lambda x: lax.reduce_window(x, np.float32(0), lambda a, b: a + 2 * b, (1, 3), (1, 1), "SAME"),
        (1,),
        "stencil",
    ),
    "every other window": (
        lambda x: lax.reduce_window(x, np.float32(0), lax.add, (2, 1), (2, 1), "VALID"),
        (0,),
        "stencil",
    ),
    "reduced by a function": (lambda x: lax.reduce(x, np.float32(0), jnp.hypot, (1,)), (1,), "fold"),
    "the largest": (lambda x: lax.top_k(x, 2)[0], (1,), "top_k"),
}


@pytest.mark.parametrize("layout", share(LAYOUTS))
def test_every_layout(layout):
    counts = [len(jax.tree.leaves(jax.eval_shape(body, X))) for body, _, _ in OPERATIONS.values()]
    found = seen(lambda x: [body(x) for body, _, _ in OPERATIONS.values()], layout, args=(X,))
    assert found.kinds == [], "nothing is certain yet"
    for (name, (_, whole, kinds)), one in zip(OPERATIONS.items(), parted(found, counts), strict=True):
        known = one.agree()
        cut = {axis for d in whole for axis in axes_of(layout)[d]}
        for state in one.states:
            assert {p.axis for p in state.pending} == cut, name
            assert {p.kind for p in state.pending} <= ({kinds} if isinstance(kinds, str) else {*kinds}), name
        # What is placed by an index lies as nobody knows.
        assert bool(known) is (not cut and name != "set"), f"{name} of {layout}"


WEIGHTS = ("g d f", "g d f/dp", "g/dp d f", "g d/tp f", "g d/tp f/dp")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", ("b d", "b/dp d", "b d/tp", "b/dp d/tp", "b/tp d"))
def test_products_by_groups(rows, weights):
    """Rows and groups are needed whole, and what is contracted is summed, as in a product."""
    axes = dict(zip("bdgDf", [*axes_of(rows), *axes_of(weights)], strict=True))
    if axes["d"] != axes["D"] or set(axes["g"] + axes["f"]) & set(axes["b"] + axes["d"]):
        return
    x, w = X[:16, :8], np.random.default_rng(3).normal(size=(2, 8, 4)).astype(np.float32)
    sizes = np.array([5, 11], np.int32)
    counts = "g/dp" if axes["g"] else "g"
    found = seen(lambda x, w, n: lax.ragged_dot(x, w, n), rows, weights, counts, args=(x, w, sizes))
    [state] = found.states
    assert {(p.kind, p.axis) for p in state.pending} == {("group", axis) for axis in axes["b"] + axes["g"]}
    assert state.partial == set(axes["d"]) and found.kinds == []
    assert bool(found.agree()) is not bool(axes["b"] + axes["g"])


def test_groups_of_ones_own_rows():
    """Where each device counts its own rows, it multiplies them by their own matrices."""
    ids = np.sort(np.random.default_rng(4).integers(0, 3, 16)).astype(np.int32)
    w = np.random.default_rng(3).normal(size=(3, 8, 4)).astype(np.float32)

    def body(x, w, ids):
        counts = [jnp.bincount(ids, length=3), jax.nn.one_hot(ids, 3, dtype=jnp.int32).sum(0)]
        return [lax.ragged_dot(x, w, n) for n in counts]

    found = seen(body, "b/dp d", "g d f", "b/dp", args=(X[:16, :8], w, ids))
    assert found.kinds == [] and found.agree() == 2
    whole = seen(body, "b d", "g d f", "b/dp", args=(X[:16, :8], w, ids))
    assert whole.kinds == ["nonlinear"] and "dp" in whole.states[0].different


def axes_of(layout: str) -> list[list[str]]:
    return [word.split("/")[1:] for word in layout.split()]


@pytest.mark.parametrize("sizes", [(4, 2, 6), (2, 3, 8), (8, 1, 6)], ids=str)
@pytest.mark.parametrize("layout", share(["a/dp b c", "a b/tp c", "a/dp b c/tp", "a/tp/dp b c"]))
def test_reshapes_there_and_on(layout, sizes):
    """Dimensions that are merged, moved and split again, at every size; one element hides what divides it."""
    counts = {"dp": 2, "tp": 4}
    shape = tuple(n * int(np.prod([counts[a] for a in axes])) for n, axes in zip(sizes, axes_of(layout), strict=True))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def body(x):
        merged = x.reshape(-1, x.shape[2])
        there = merged.T.reshape(x.shape[2], x.shape[0], x.shape[1])
        beside = x.reshape(x.shape[0], 1, x.shape[1], x.shape[2])
        return x.reshape(x.shape[0], -1), merged, there, beside, x.reshape(-1, 2)

    assert seen(body, layout, args=(x,)).agree() >= (3 if 1 not in sizes else 0)


def test_own_blocks_are_blocks():
    """A slice that starts where `axis_index` says is this device's block; one that starts elsewhere is not."""

    def own(x, shift=0):
        n = x.shape[0] // lax.axis_size("tp")
        return lax.dynamic_slice_in_dim(x, (lax.axis_index("tp") + shift) * n, n)

    found = seen(own, "a b", args=(X,))
    assert found.agree() == 1 and found.axes[0][0] == ("tp",)
    other = seen(functools.partial(own, shift=1), "a b", args=(X,))
    assert not is_known(other.states[0]) and "tp" in other.states[0].different


def test_indices_lie_as_they_are_given():
    """Rows of a whole table, for ids that are divided: the result is divided as the ids are."""
    ids = np.arange(8, dtype=np.int32)[::-1].copy()
    found = seen(lambda table, ids: table[ids], "v d", "n/dp", args=(X, ids))
    assert found.agree() == 1 and found.axes[0][0] == ("dp",)


def test_what_a_window_covers_is_not_picked_from():
    """`vmap` makes a scatter of `dynamic_update_slice`, with an index for each dimension, also where it is always 0."""
    put = lambda x, row: lax.dynamic_update_slice_in_dim(x, row, 1, 0)
    found = seen(jax.vmap(put), "n a b/tp", "n c b/tp", args=(X.reshape(2, 8, 32), X[:2].reshape(2, 1, 32)))
    assert found.axes[0][2] == ("tp",) and not found.states[0].pending
    across = seen(jax.vmap(put), "n a/dp b", "n c b", args=(X.reshape(2, 8, 32), X[:2].reshape(2, 1, 32)))
    assert {(one.kind, one.axis) for one in across.states[0].pending} == {("index", "dp")}


def test_noise_of_one_key_is_the_same_everywhere():
    def body(key, keys):
        return jax.random.normal(key, (4,)), jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)

    keys = jax.random.split(jax.random.key(1), 4)
    found = seen(body, "scalar", "n/dp", args=(jax.random.key(0), keys))
    assert found.agree() >= 1 and not found.states[0].axes
    assert "dp" in found.states[1].axes


def test_the_derivative_of_a_scatter_numbers_its_updates(mesh):
    """JAX does that with an iota, from 0 on each device. What it counts are not positions in a divided dimension."""

    @spmd.kernel("b/dp t d, b/dp s d -> b/dp t d", mesh=mesh)
    def written(cache, new):
        at = jnp.broadcast_to(jnp.array([0, 2]), new.shape[:2])
        return jax.vmap(lambda rows, more, at: rows.at[at].set(more))(cache, new, at)

    cache, new = np.ones((4, 3, 5), np.float32), np.full((4, 2, 5), 2.0, np.float32)
    assert not spmd.check(lambda *args: jax.vjp(written, *args)[1](cache), cache, new)
    for got, want in zip(*(jax.vjp(run, cache, new)[1](cache) for run in (written, written.reference)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("method", ["scan", "scan_unrolled", "sort", "compare_all"])
def test_ranks_in_a_piece_may_be_terms_of_a_sum(mesh, method):
    """On some versions of JAX `searchsorted` is a loop, and on others a primitive."""

    def ranks(x, bounds):
        return lax.psum(jnp.searchsorted(jnp.sort(x), bounds, method=method), "tp")

    x, bounds = X.reshape(-1), np.linspace(-1, 1, 6, dtype=np.float32)
    kernel = spmd.kernel("n/tp, k -> k", mesh=mesh)(ranks)
    assert not spmd.check(kernel, x, bounds)
    np.testing.assert_array_equal(kernel(x, bounds), np.searchsorted(np.sort(x), bounds))


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_which_of_equal_elements_a_device_picks_makes_no_difference(mode):
    """A mean over its own block of a constant is that of the whole."""

    def body(x):
        wide = jnp.broadcast_to(lax.psum(x.sum(), ("dp", "tp")), (4,))
        mean = jnp.take(wide, lax.axis_index("tp")[None], mode=mode, fill_value=0.0).mean()
        return lax.pmean(spmd.annotate(mean, "scalar"), "tp")

    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    found = spmd.check(spmd.kernel("a/dp b/tp -> scalar", mesh=spmd.make_mesh(dp=2, tp=4), check="off")(body), x)
    assert not found


def test_other_rows_of_each_term_are_no_terms_of_a_sum():
    """Each device looks up indices of its own in its term of a table."""
    table, at = np.ones((8, 8), np.float32), np.arange(8, dtype=np.int32)
    found = seen(lambda x, i: jnp.take(x.sum(0), i, mode="clip"), "a/dp b", "n/dp", args=[table, at])
    assert not found.states[0].partial and found.states[0].different == {"dp"}


def convolved_with_itself(row):
    return lax.conv_general_dilated(row[None], row[None], (1,), "SAME")[0, 0]


RIGHT = {
    "rows in another order of axes": ("n/tp/dp -> n/tp/dp", lambda x: lax.map(jnp.sin, x)),
    "rows of rows": ("a/dp b -> a/dp b", lambda x: lax.map(lambda row: lax.map(jnp.sin, row), x)),
    "every second of a divided dimension": ("a b/dp -> a c/dp", lambda x: x[:, ::2] + x[:, 1::2]),
    "all rows by their numbers": ("a/dp b -> a/dp b", lambda x: x[jnp.arange(x.shape[0])]),
    "own block of a block by rows": (
        "a/dp b -> a/dp/tp b",
        lambda x: jnp.take(x, lax.axis_index("tp") * 2 + jnp.arange(2), axis=0, mode="clip"),
    ),
    "own block, row by row": (
        "a b/dp -> a b/dp/tp",
        lambda x: jax.vmap(lambda row: lax.dynamic_slice_in_dim(row, lax.axis_index("tp") * 2, 2))(x),
    ),
    "some elements of a partial sum, doubled": (
        "a/dp b -> b",
        lambda x: spmd.psum(x.sum(0).at[1:].multiply(2.0), "b {U:dp} -> b"),
    ),
    "divided features are contracted, row by row": (
        "a b/dp c -> a c",
        lambda x: spmd.psum(jax.vmap(convolved_with_itself)(x), "a c {U:dp} -> a c"),
    ),
    "a batch of tridiagonal systems": (
        "a/dp b c -> a/dp b c",
        lambda x: lax.linalg.tridiagonal_solve(x[..., 0], x[..., 1], x[..., 2], x),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_raise_no_alarm(mesh, name):
    pattern, body = RIGHT[name]
    rank = len(pattern.partition("->")[0].split())
    x = jax.ShapeDtypeStruct((16, 16) if rank == 2 else (16, 4, 4) if rank == 3 else (16,), "float32")
    assert not spmd.check(spmd.kernel(pattern, mesh=mesh)(body), x)


def test_a_place_that_two_branches_agree_on_is_a_place_behind_them():
    def own(x):
        n, i = x.shape[0] // lax.axis_size("tp"), lax.axis_index("tp")
        at = lax.cond(x.sum() > 0, lambda: i * n, lambda: n * i)
        return lax.dynamic_slice_in_dim(x, at, n)

    found = seen(own, "a b", args=(X,))
    assert found.agree() == 1 and found.axes[0][0] == ("tp",)
