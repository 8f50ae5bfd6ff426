"""What the engine does with every entry of the table: agreement, and short cuts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.checker._state import FREE, plain, size_of
from tests.checker.harness import parted, seen, split, varying
from tests.sampler import share

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)

STEPS = {
    "add": lambda x, w: x + w,
    "a number": lambda x, w: 2.0 * x + 1.0,
    "product": lambda x, w: jnp.einsum("ab,ab->a", x, w),
    "sum": lambda x, w: x.sum(0) + w.sum(0),
    "largest": lambda x, w: x.max(1),
    "choice": lambda x, w: jnp.where(x > 0, x, w),
    "nothing": lambda x, w: x * 0.0 + w,
    "broadcast": lambda x, w: x[:, None] * jnp.ones((1, 3, 1)),
}
LAYOUTS = ("a b", "a/dp b", "a b/tp", "a/dp b/tp", "a/tp b/dp", "a/dp/tp b", "a b/tp/dp")


@pytest.mark.parametrize("layout", share(LAYOUTS))
def test_what_is_known_is_what_the_numbers_say(layout):
    """Both operands lie alike, so nothing is wrong."""
    found = seen(lambda x, w: [step(x, w) for step in STEPS.values()], layout, layout, args=(X, W))
    assert found.kinds == []
    known = dict(zip(STEPS, parted(found, [1] * len(STEPS)), strict=True))
    assert [name for name, one in known.items() if not one.agree()] == (["largest"] if "b/" in layout else [])


@pytest.mark.parametrize("made", [lambda x: x.prod(), lambda x: x.max(initial=1.0)])
def test_what_is_made_of_nothing_is_a_number(made):
    """It is equal everywhere, and not zero. So a sum over devices counts it once per device."""
    found = seen(lambda x, w: lax.psum(w.sum(0) + made(x), "dp"), "a/dp b", "a/dp b", args=(X[:0], X))
    assert found.kinds == ["mixed"]
    right = seen(lambda x, w: lax.psum(w.sum(0), "dp") + made(x), "a/dp b", "a/dp b", args=(X[:0], X))
    assert right.kinds == []


SIZES = {
    "transforms": lambda x, w: [jnp.fft.rfft(x, axis=1), jnp.fft.fft(x.astype(np.complex64), axis=1)],
    "windows": lambda x, w: [
        lax.conv_general_dilated(x[:, None], w[:1, None, :3], (1,), padding) for padding in ("SAME", "VALID")
    ],
    "steps of windows": lambda x, w: [lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, n), "VALID") for n in (1, 2)],
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_remembered_has_the_size_of_its_result(name):
    """The same primitive of values in one state, twice, with results of two sizes."""
    found = seen(SIZES[name], "a/dp b", "a b", args=(X, W))
    for state, held in zip(found.states, found.held, strict=True):
        assert state.dims[-1] == plain(held.shape[-1]), "a wrong size is known to nobody after one more step"


def test_blocks_that_nobody_can_place_raise_no_alarm():
    """Four blocks of one element, of which two are gathered: what they are added to may lie in any way."""

    def body(x, w):
        y = lax.all_gather(x, "dp", tiled=True)
        return y + w[: y.shape[0]]

    found = seen(body, "n/dp/tp", "m", args=(X[0], W[0]))
    assert found.kinds == [] and "tp" in found.states[0].different


def test_faults_are_those_of_the_user():
    """The same step is a finding in a body, and nothing where it is meant per shard or in what JAX made of it."""
    wrong = lambda x, w: x + jnp.arange(8.0, dtype="float32")[: x.shape[0], None]
    assert seen(wrong, "a/dp b", "a b", args=(X, W)).kinds == ["disagree"]
    assert seen(spmd.per_shard("it is meant")(wrong), "a/dp b", "a b", args=(X, W)).kinds == []
    right = lambda x, w: x + jnp.arange(8.0, dtype="float32")[None, :]
    assert seen(right, "a/dp b", "a b", args=(X, W)).kinds == []


def test_each_mistake_is_told_once():
    """What comes of it is unknown, so the steps behind it are silent."""

    def body(x, w):
        y = x + w[: x.shape[0]]
        return [jnp.exp(y), y @ w, lax.psum(y, "dp")]

    found = seen(body, "a/dp b", "a b", args=(X, W))
    assert found.kinds == ["disagree"] and "dp" in found.states[0].axes


@pytest.mark.parametrize(
    "along", [lambda x: lax.sort(x, dimension=1), lambda x: lax.cumsum(x, 1)], ids=["sort", "cumsum"]
)
@pytest.mark.parametrize("copies", [lambda x: jnp.tile(x, (1, 3)), lambda x: jnp.repeat(x, 3, axis=1)])
def test_what_is_constant_along_a_part_of_a_dimension_is_not_after_a_walk_along_all_of_it(along, copies):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    before, after = seen(lambda x: (copies(x), along(copies(x))), "a/dp b", args=[x]).states
    assert FREE in [axes for _, axes in before.dims[1]]
    assert FREE not in [axes for _, axes in after.dims[1]]


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: jax.vmap(lambda at: jnp.zeros(3).at[at].add(1.0))((x > 0).astype(int)),
        lambda x: jax.vmap(lambda row: row[jnp.array([0, 1])])(x),
        lambda x: jax.vmap(lambda row, at: row[at], in_axes=(0, 0))(x, jnp.zeros((x.shape[0], 2), int)),
    ],
)
def test_rows_with_equal_updates_or_indices_differ(rows):
    [state] = seen(rows, "a b/tp", args=[X]).states
    assert state.dims[0][0][1] is not FREE


def test_an_exchange_of_a_constant_has_other_sizes():
    exchanged = lambda x: lax.all_to_all(x, "dp", 1, 0, tiled=True)
    rows = jnp.asarray([[1.0], [2.0]])
    same, other = seen(
        lambda x: (exchanged(varying(jnp.tile(rows, 4))), exchanged(varying(jnp.tile(rows, 4).T))), "a b", args=[X]
    ).states
    assert [size_of(dim) for dim in same.dims] == [4, 2] and "dp" not in same.axes
    assert [size_of(dim) for dim in other.dims] == [8, 1] and "dp" in other.axes, "each device has another column"


def test_own_blocks_of_a_constant_fit_a_divided_layout():
    """A second derivative may be a constant; its blocks are equal, and are blocks of the whole all the same."""

    def body(x):
        y = jnp.full((8, 8), 2.0)
        return lax.dynamic_slice_in_dim(varying(y), lax.axis_index("dp") * 4, 4)

    [state] = seen(body, "a b", args=[X]).states
    assert [axes for dim in state.dims for _, axes in dim] == [FREE, FREE] and not state.axes


def test_blocks_of_a_constant_may_be_summed_over_all_devices():
    """Each device has another row, and all rows are the same: their sum is not a sum of copies."""

    @spmd.kernel("a/dp b -> b, b, b", mesh=spmd.make_mesh(dp=2))
    def body(x):
        terms, parts = jnp.broadcast_to(x.sum(0), (2, 8)), lax.axis_size("dp")
        rows = lax.pcast(lax.psum(terms, "dp"), "dp", to="varying")
        cuts = [
            lax.dynamic_slice_in_dim(rows, lax.axis_index("dp") * (2 // parts), 2 // parts),
            lax.psum_scatter(terms, "dp", tiled=True),
            split(rows, "dp", 0, parts),
        ]
        return tuple(lax.psum(cut.sum(0), "dp") for cut in cuts)

    for held in body(X):
        np.testing.assert_allclose(held, 2 * X.sum(0), rtol=1e-3)


def test_equal_blocks_of_equal_elements_lie_in_any_way():
    """All rows are in use, alike on each device, and one row there does not show which dimension pp divides."""

    @spmd.kernel("p/pp -> p/pp", mesh=spmd.make_mesh(pp=4))
    def body(x):
        used = spmd.iota("l/pp", l=4) < 4
        used = spmd.rearrange(used, "(p i)/pp -> p/pp i", p=4)
        return x * used[:, 0].astype(x.dtype)

    assert not spmd.check(body, np.ones(4, np.float32))


@pytest.mark.parametrize(
    "decompose",
    [jnp.linalg.cholesky, jnp.linalg.eigvalsh, lambda x: jnp.linalg.qr(x, "reduced")[1]],
    ids=["matrices", "values", "of several results"],
)
def test_rows_from_neighbours_may_be_decomposed(decompose):
    """The results have more dimensions than the batch that the table names, or fewer than the operand."""

    @spmd.kernel("n/dp i j -> n/dp i j", mesh=spmd.make_mesh(dp=4))
    def body(x):
        edge = lax.ppermute(x[-1:], "dp", [(i, (i + 1) % 4) for i in range(4)])
        rolled = jnp.concatenate([edge, x[:-1]])
        return x + decompose(rolled).reshape(len(x), -1).sum(-1)[:, None, None]

    x = np.eye(3, dtype=np.float32) + np.zeros((8, 1, 1), np.float32)
    assert not spmd.check(body, x)
    np.testing.assert_allclose(np.abs(body(x) - x), 3, rtol=1e-5)


def test_elements_picked_along_one_element_lie_as_they_did():
    """JAX leaves out the reshape of indices of one element, and their divided dimension seems to be the picked one."""

    @spmd.kernel("a b/tp c -> a b/tp c", mesh=spmd.make_mesh(tp=2))
    def body(x):
        return jnp.take_along_axis(x, jnp.argsort(x, -1), -1)

    x = np.ones((4, 2, 1), np.float32)
    assert not spmd.check(body, x)
    np.testing.assert_array_equal(body(x), x)
