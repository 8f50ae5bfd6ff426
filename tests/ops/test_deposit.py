"""Deposits against the transpose of `np.pad`, written as matrices; halos as their gradients, and what they send."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import stencil
from spmd.modes import MODES
from tests import simulator
from tests.conftest import FULL_CASES, case_count
from tests.ops.halos import EDGES, numbers, sample, texts
from tests.ops.harness import close, make_mesh, pulled
from tests.ops.harness import run as run_in
from tests.sampler import seeds, share


def without_numbers(edges: list, edge: Any, dtype: str) -> tuple[list, Any, str]:
    """A sample of `halos`, with zeros for numbers beyond the ends, and numbers for booleans."""
    plain = lambda end: end if isinstance(end, str) else "zero"
    edges = [tuple(map(plain, pair)) for pair in edges]
    edge = {"x": edges[0], "y": edges[1]} if isinstance(edge, dict) else plain(edge)
    return edges, edge, "float32" if dtype == "bool" else dtype


def blocks_with_margins(seed: int, shape: tuple[int, ...], counts: list[int], margins: Any, dtype: str):
    """What each device holds: (block, place, block, place)."""
    wide = [n // k + sum(m) for n, k, m in zip(shape, counts, margins, strict=True)]
    return numbers(seed, (counts[0], wide[0], counts[1], wide[1]), dtype)


@pytest.mark.parametrize("seed", seeds())
def test_all_blocks_are_added_at_their_places(seed: int) -> None:
    mesh, places, shape, margins, edges, edge, dtype = sample(seed + 500)
    edges, edge, dtype = without_numbers(edges, edge, dtype)
    plain, wide = texts(places, margins)
    counts = [int(np.prod([mesh[axis] for axis in axes], dtype=int)) for axes in places]
    blocks = blocks_with_margins(seed, shape, counts, margins, dtype)
    run = jax.jit(
        jax.shard_map(
            lambda x: stencil.deposit(x[0, :, 0], f"{wide} -> {plain}", edge=edge),
            mesh=make_mesh(mesh),
            in_specs=jax.sharding.PartitionSpec(places[0] or None, None, places[1] or None, None),
            out_specs=spmd.Layout(plain).spec,
        )
    )
    whole = simulator.summed_windows(np.asarray(blocks), margins)
    wanted = simulator.deposit(whole, margins, edges)
    np.testing.assert_array_equal(np.asarray(run(blocks)), wanted)
    body = lambda x: stencil.deposit(x, f"{wide} -> {plain}", edge=edge)
    for mode in ("auto", "reference"):
        found = run_in(body, mesh, [plain], plain, mode)(jnp.asarray(whole))
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_the_comparison_can_fail() -> None:
    whole = np.arange(6.0)[:, None] + np.ones((1, 3))
    right = simulator.deposit(whole, [(1, 1), (0, 0)], [("periodic", "periodic"), ("zero", "zero")])
    assert np.array_equal(right[:, 0], [2 + 6, 3, 4, 5 + 1])
    assert not np.array_equal(right, simulator.deposit(whole, [(1, 1), (0, 0)], [("edge", "edge"), ("zero", "zero")]))


@pytest.mark.parametrize("seed", seeds())
def test_a_halo_and_a_deposit_are_each_others_gradients(seed: int) -> None:
    mesh, places, shape, margins, edges, edge, dtype = sample(seed + 9000)
    edges, edge, dtype = without_numbers(edges, edge, dtype)
    if dtype not in ("float32", "complex64"):
        dtype = "float32"
    plain, wide = texts(places, margins)
    spec = spmd.Layout(plain).spec
    mapped = lambda body: jax.jit(jax.shard_map(body, mesh=make_mesh(mesh), in_specs=spec, out_specs=spec))
    halo = mapped(lambda x: stencil.halo(x, f"{plain} -> {wide}", edge=edge))
    deposit = mapped(lambda y: stencil.deposit(y, f"{wide} -> {plain}", edge=edge))
    x = numbers(seed, shape, dtype)
    y = numbers(seed + 1, jax.eval_shape(halo, x).shape, dtype)
    np.testing.assert_array_equal(pulled(halo, x, by=y)[1][0], deposit(y))
    np.testing.assert_array_equal(pulled(deposit, y, by=x)[1][0], halo(x))
    wanted = jax.jit(lambda y: jax.jvp(deposit, (y,), (y,))[1])(y)
    np.testing.assert_array_equal(wanted, deposit(y))


ODD = [
    ({"a": 4, "b": 2}, "x/b+1 y/a", (2, 4), [(0, 1), (0, 0)], "periodic"),
    ({"a": 1, "b": 5}, "x/a 1+y/b+1", (1, 5), [(0, 0), (1, 1)], "periodic"),
    ({"a": 2, "b": 4}, "1+x/a+1 2+y", (2, 2), [(1, 1), (2, 0)], "antisymmetric"),
]


@pytest.mark.parametrize("case", share(ODD))
def test_gradients_in_auto_mode_of_whole_arrays_with_an_odd_size(case: tuple) -> None:
    """XLA's partitioner fails at them where blocks have one element."""
    mesh, wide, shape, margins, edge = case
    reach = [sum(m) for m in margins]

    def body(u: Any) -> Any:
        both = jnp.pad(u, [(0, k) for k in reach]) + 2 * jnp.pad(u, [(k, 0) for k in reach])
        return stencil.deposit(both, f"{wide} -> {plain}", edge=edge)

    plain = texts([dim.axes for dim in spmd.Layout(wide).dims], margins)[0]
    x, by = numbers(0, shape, "float32"), numbers(1, shape, "float32")
    found = {mode: pulled(run_in(body, mesh, [plain], plain, mode), x, by=by) for mode in ("auto", "reference")}
    close(found["auto"][0], found["reference"][0])
    close(found["auto"][1][0], found["reference"][1][0])


def test_the_mean_of_all_copies_is_no_mistake() -> None:
    """Copies in a deposit may be meant: over their number they are the element, in every mode on every mesh."""

    def mean_of_copies(u: Any) -> Any:
        wide = stencil.halo(u, "x/a y/b -> 1+x/a+2 y/b")
        both = [stencil.deposit(one, "1+x/a+2 y/b -> x/a y/b") for one in (wide, jnp.ones_like(wide))]
        return both[0] / both[1]

    x = jnp.arange(24.0).reshape(8, 3)
    for mesh in ({"a": 4, "b": 1}, {"a": 2, "b": 3}):
        run = spmd.kernel("x/a y/b -> x/a y/b", mesh=make_mesh(mesh))(mean_of_copies)
        assert not spmd.check(run, x)
        for mode in MODES:
            close(getattr(run, mode)(x), x)


def by_both_sides(u: Any) -> Any:
    """Each element adds one part of itself before it, and two after it; a body for all modes."""
    wide = jnp.pad(u, ((0, 2), (1, 1))) + 2 * jnp.pad(u, ((2, 0), (1, 1))) + 3 * jnp.pad(u, ((1, 1), (0, 2)))
    return stencil.deposit(wide, "1+x/a+1 1+y/b+1 -> x/a y/b", edge={"x": "periodic", "y": "antisymmetric"})


def test_one_body_in_all_modes_under_vmap_scan_and_remat() -> None:
    def body(u):
        _, out = jax.lax.scan(lambda s, row: (s, jax.checkpoint(by_both_sides)(row)), 0.0, u)
        return out + jax.vmap(by_both_sides)(u)

    u = numbers(3, (3, 8, 6))
    left, right = jnp.roll(u, -1, 1), jnp.roll(u, 1, 1)
    from_right = jnp.pad(u, ((0, 0), (0, 0), (0, 1)))[..., 1:].at[..., 0].add(-u[..., 0])
    wanted = 2 * (left + 2 * right + 3 * from_right)
    expected = lambda u: wanted
    assert expected(u).shape == u.shape
    kernel = spmd.kernel("n x/a y/b -> n x/a y/b", mesh=make_mesh({"a": 4, "b": 2}))(body)
    value, gradient = pulled(kernel.reference, u)
    close(value, wanted)
    for mode in MODES:
        found = pulled(getattr(kernel, mode), u)
        close(found[0], wanted)
        close(found[1][0], gradient[0])


def test_a_pytree_and_unit_axes() -> None:
    mesh = make_mesh({"a": 1, "b": 4})
    tree = {"mass": jnp.ones((4, 2)), "count": jnp.ones((4, 2), jnp.int32)}

    @spmd.kernel("x/a/b y -> x/a/b y", mesh=mesh)
    def total(x):
        wide = jax.tree.map(lambda x: jnp.pad(x, ((1, 0), (0, 0)), constant_values=2), tree_like(x))
        return stencil.deposit(wide, "1+x/a/b y -> x/a/b y")["count"].astype(x.dtype)

    tree_like = lambda x: {"mass": x, "count": x.astype(jnp.int32)}
    close(total(tree["mass"]), 3 * tree["mass"])  # blocks of one row: each gets what the next one held for it


SENT = list(itertools.product([*EDGES, {"x": "zero", "y": ("edge", "antisymmetric")}], ["x/a y/b", "1+x/a y/b"]))


@pytest.mark.parametrize(("edge", "narrow"), SENT if case_count() > FULL_CASES else SENT[::5])
def test_it_sends_what_the_halo_sends_forward_and_backward(edge: Any, narrow: str) -> None:
    mesh, wide = make_mesh({"a": 4, "b": 2}), "3+x/a+1 2+y/b+1"
    spec = spmd.Layout("x/a y/b").spec
    lay = jax.NamedSharding(mesh, spec)
    mapped = lambda body: jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    halo = mapped(lambda x: stencil.halo(x, f"{narrow} -> {wide}", edge=edge))
    deposit = mapped(lambda y: stencil.deposit(y, f"{wide} -> {narrow}", edge=edge))
    x = jax.ShapeDtypeStruct((8 + 4 * narrow.startswith("1"), 8), jnp.float32, sharding=lay)
    y = jax.ShapeDtypeStruct(jax.eval_shape(halo, x).shape, jnp.float32, sharding=lay)
    there = spmd.inspect.collectives(jax.jit(halo), x, mesh=mesh)
    forward = spmd.inspect.collectives(jax.jit(deposit), y, mesh=mesh)
    back = jax.jit(lambda y, ct: jax.vjp(deposit, y)[1](ct)[0])
    backward = spmd.inspect.collectives(back, y, x, mesh=mesh)
    assert there.counts.keys() == {"ppermute"} and forward.counts == backward.counts == there.counts
    assert forward.total_bytes == backward.total_bytes == there.total_bytes


def test_explain_names_the_line_and_the_bytes() -> None:
    kernel = spmd.kernel("x/a -> x/a", mesh=make_mesh({"a": 4}))(
        lambda u: stencil.deposit(jnp.pad(u, (1, 1)), "1+x/a+1 -> x/a")
    )  # what is padded has no gradient in the margins, so nothing goes back
    said = str(spmd.explain(kernel, jnp.ones(8)))
    assert said.index("forward") < said.index('stencil.deposit(x, "1+x/a+1 -> x/a")') and "backward" not in said


def test_a_dimension_with_the_name_of_the_array():
    """`x=` is a size here: the array and the pattern have no keywords."""

    @spmd.kernel("-> x/a", mesh=spmd.make_mesh(a=2))
    def run():
        return stencil.deposit(jnp.ones(4), "x/a+1 -> x/a", x=6)

    assert run().tolist() == [2, 1, 1, 2, 1, 1], "each block adds its last element to the next one"
