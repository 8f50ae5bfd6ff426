"""Rows that go to their owners, against the simulator, which moves them one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from tests import simulator
from tests.ops.harness import close, make_mesh, pulled, ragged_all_to_all
from tests.sampler import dice, rare, seeds, share

MESHES = [
    ({"a": 4, "b": 2}, ("a",)),
    ({"a": 4, "b": 2}, ("b", "a")),
    ({"a": 2, "b": 3}, ("a", "b")),
    ({"a": 1, "b": 5}, ("b", "a")),
    ({"a": 1, "b": 2}, ("a",)),
    ({"a": 2}, ("a",)),
    ({"a": 2}, ()),
]


def sample(seed: Any) -> tuple:
    """A mesh, the axes of the rows, their owners, the capacity and the hops."""
    draw = dice(seed)
    mesh, axes = draw.choice(MESHES)
    blocks = int(np.prod([mesh[axis] for axis in axes], dtype=int))
    slots, capacity = draw.choice([1, 2, 3, 5, 8]), draw.choice([1, 2, 3, 9])
    hops = draw.choice([None, None, None, (1, -1), (1,), (2, -1)])
    empty = draw.choice([0.0, 0.3, 0.7])
    owner = [-draw.randint(1, 4) if draw.random() < empty else draw.randint(0, blocks) for _ in range(blocks * slots)]
    if draw.random() < 0.7:  # no owner that does not exist
        owner = [min(one, blocks - 1) for one in owner]
    return mesh, axes, blocks, np.array(owner, np.int32), capacity, hops


def tree_of(rows: Any) -> dict[str, Any]:
    """Leaves of several dtypes and ranks."""
    return {
        "x": rows,
        "id": rows[:, 0].astype(jnp.int32),
        "far": rows[:, 0] > 0,
        "tensor": rows[:, None] + rows[..., None],
    }


def kernel_of(mesh: Any, axes: Any, capacity: int, hops: Any, ragged: bool | None = None) -> Any:
    """Rows `n d` and owners, to the whole tree."""
    n = "/".join(("n", *axes))

    @spmd.kernel(f"{n} d, {n} -> {n} d, {n}, {n}, {n} d e, {n}, scalar", mesh=make_mesh(mesh))
    def body(rows, owner):
        how = {"capacity": capacity, "hops": hops, "ragged": ragged}
        there, owner, stayed = spmd.exchange(tree_of(rows), owner, f"[{n}] ...", **how)
        return there["x"], there["id"], there["far"], there["tensor"], owner, stayed

    return body


@pytest.mark.parametrize("seed", seeds())
def test_rows_are_where_the_simulator_says(seed: int) -> None:
    mesh, axes, blocks, owner, capacity, hops = sample(seed)
    rows = np.random.default_rng(seed).integers(-9, 10, (len(owner), 3)).astype(np.float32)
    wanted, owners, stayed = simulator.exchange(rows, owner, blocks, capacity, hops)
    clear = (owners >= 0)[:, None]
    body = kernel_of(mesh, axes, capacity, hops)
    for mode in MODES if seed % 3 == 0 else ("explicit", "reference"):
        x, number, far, tensor, found, away = getattr(body, mode)(rows, owner)
        np.testing.assert_array_equal(found, owners)
        np.testing.assert_array_equal(x, wanted)
        np.testing.assert_array_equal(number, wanted[:, 0])
        np.testing.assert_array_equal(far, (wanted[:, 0] > 0) & clear[:, 0])
        np.testing.assert_array_equal(tensor, wanted[:, None] + wanted[..., None])
        assert int(away) == stayed
    kept = np.sort(rows[owner >= 0], axis=0)  # nothing is lost
    np.testing.assert_array_equal(np.sort(wanted[owners >= 0], axis=0), kept)


def test_the_comparison_can_fail() -> None:
    rows, owner = np.arange(4.0), np.array([1, 1, 0, -1])
    assert simulator.exchange(rows, owner, 2, 2)[0].tolist() == [2, 0, 0, 1]
    assert simulator.exchange(rows, owner, 2, 1)[0].tolist() == [1, 2, 0, 0]
    full = np.array([1, 1, 0, 0])  # all leave at once
    assert simulator.exchange(rows, full, 2, 2)[0].tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("hops", share([None, (1, -1)]))
def test_gradients_go_back_to_where_rows_came_from(hops: Any) -> None:
    mesh, owner = {"a": 4}, np.array([1, 0, 3, -1, 0, 2, 2, 3, 1, 2, 3, 3], np.int32)
    rows = np.asarray(np.random.default_rng(0).standard_normal((12, 2)), np.float32)
    by = np.asarray(np.random.default_rng(1).standard_normal((12, 2)), np.float32)

    def body(x, owner):
        one = lambda x: spmd.exchange(x**2, owner, "[n/a] d", capacity=2, hops=hops)[0]
        return jax.checkpoint(one)(x)

    run = spmd.kernel("n/a d, n/a -> n/a d", mesh=make_mesh(mesh))(body)
    place, found, _ = simulator.exchange(np.arange(12), owner, 4, 2, hops)
    wanted = np.zeros((12, 2), np.float32)
    for slot in np.flatnonzero(found >= 0):
        wanted[place[slot]] += 2 * rows[place[slot]] * by[slot]
    for mode in MODES:
        close(
            pulled(lambda x, run=run, mode=mode: getattr(run, mode)(x, owner), rows, by=by)[1][0], jnp.asarray(wanted)
        )


@rare
def test_under_vmap_and_scan() -> None:
    owner = np.array([1, 0, 3, 2, 0, 2, 1, 3], np.int32)
    rows = jnp.arange(16.0).reshape(2, 8)

    @spmd.kernel("m n/a, n/a -> m n/a", mesh=make_mesh({"a": 4}))
    def body(rows, owner):
        def step(held, _):
            rows, owner, stayed = spmd.exchange(held[0], held[1], "[n/a]", capacity=2)
            return (rows, (owner + 1) % 4), stayed

        one = lambda x: jax.lax.scan(step, (x, owner), length=3)[0][0]
        return jax.vmap(one)(rows)

    wanted, now = np.asarray(rows), owner
    for _ in range(3):
        moved = [simulator.exchange(row, now, 4, 2) for row in wanted]
        wanted, now = np.stack([one[0] for one in moved]), (moved[0][1] + 1) % 4
    for mode in MODES:
        np.testing.assert_array_equal(getattr(body, mode)(rows, owner), wanted)


@pytest.mark.parametrize("hops", share([None, (1, -1), (1,)]))
@pytest.mark.parametrize("axes", [("a",), ("a", "b")])
def test_collectives_and_bytes_forward_and_backward(hops: Any, axes: tuple[str, ...]) -> None:
    """The formula of the docstring: all_to_all (n-1) c W, or a permute c W for each hop; counts 4 (n-1) (n+1)."""
    mesh = make_mesh({"a": 4, "b": 2})
    n, capacity = (4 if axes == ("a",) else 8), 3
    layout = "/".join(("n", *axes))
    x, ids = jnp.ones((n * 6, 5)), jnp.ones((n * 6, 2), jnp.int32)

    @spmd.kernel(f"{layout} d, {layout} e, {layout} -> {layout} d, {layout} e", mesh=mesh)
    def body(x, ids, owner):
        return spmd.exchange((x, ids), owner, f"[{layout}] ...", capacity=capacity, hops=hops)[0]

    owner = jnp.zeros(n * 6, jnp.int32)
    found = spmd.inspect.collectives(body, x, ids, owner, mesh=mesh)
    each = {"all_to_all": 2} if hops is None else {"ppermute": 2 * len(hops)}
    assert found.counts == {"all_gather": 1, **each}
    width = 4 * capacity * ((n - 1) if hops is None else len(hops))
    assert found.total_bytes == 4 * (n - 1) * (n + 1) + width * (5 + 2)
    lay = jax.NamedSharding(mesh, spmd.Layout(f"{layout} d").spec)
    back = jax.jit(lambda x, by: jax.vjp(lambda x: body(x, ids, owner)[0], x)[1](by)[0], in_shardings=(lay, lay))
    sent = spmd.inspect.collectives(back, x, x, mesh=mesh)
    once = {"all_to_all": 1} if hops is None else {"ppermute": len(hops)}
    assert sent.counts == {"all_gather": 1, **once}  # the counts again, which the way back needs
    assert sent.total_bytes == 4 * (n - 1) * (n + 1) + width * 5


@pytest.mark.parametrize("dtype", share(["int8", "uint8", "uint32", "int16"]))
def test_owners_of_any_integer_type(dtype: str) -> None:
    run = spmd.kernel("n/a, n/a -> n/a", mesh=make_mesh({"a": 4}))(
        lambda x, owner: spmd.exchange(x, owner, "[n/a]", capacity=1)[0]
    )
    x = jnp.arange(4.0)
    close(run(x, jnp.array([2, 3, 0, 1]).astype(dtype)), jnp.array([2.0, 3.0, 0.0, 1.0]))


@pytest.mark.parametrize("most", share([2**31, 1]))
def test_rows_keep_their_order_if_owner_and_slot_have_no_number(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd.ops._exchange._PACKED", most)
    rows, owner = np.arange(24, dtype=np.float32), np.random.default_rng(0).integers(-1, 4, 24)
    run = spmd.kernel("n/a, n/a -> n/a, n/a, scalar", mesh=make_mesh({"a": 4}))(
        lambda x, owner: spmd.exchange(x, owner, "[n/a]", capacity=2)
    )
    assert ("is_stable=True" in str(jax.make_jaxpr(run)(rows, owner))) == (most == 1)
    for got, wanted in zip(run(rows, owner), simulator.exchange(rows, owner, 4, 2), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("hops", [None, (1, -1)])
@rare
def test_with_x64(hops: Any) -> None:
    """Sums of int32 are int64 there."""
    with jax.enable_x64(True):
        owner, rows = np.array([1, 1, 3, 0, 0, 2, -1, 2]), np.arange(24.0).reshape(8, 3)
        wanted, owners, stayed = simulator.exchange(rows, owner, 4, 1, hops)
        for mode in ("explicit", "reference"):
            x, *_, found, away = getattr(kernel_of({"a": 4, "b": 2}, ("a",), 1, hops), mode)(rows, owner)
            close(x, jnp.asarray(wanted))
            np.testing.assert_array_equal(found, owners)
            assert found.dtype == away.dtype == np.int32 and int(away) == stayed


@pytest.mark.parametrize("hops", [None, (1, -1)])
def test_no_slots(hops: Any) -> None:
    def body(rows, owner):
        rows, owner, stayed = spmd.exchange(rows, owner, "[n/a] d", capacity=2, hops=hops)
        return rows, owner + stayed  # XLA fails at a constant that leaves a shard_map of empty arrays alone

    kernel = spmd.kernel("n/a d, n/a -> n/a d, n/a", mesh=make_mesh({"a": 4}))(body)
    for mode in MODES:
        with spmd.mode(mode):
            rows, owner = kernel(np.ones((0, 3), np.float32), np.zeros(0, np.int8))
        assert (rows.shape, owner.shape, owner.dtype) == ((0, 3), (0,), np.int32)


@pytest.mark.parametrize("hops", [None, (1, -1)])
@rare
def test_rows_of_nothing(hops: Any) -> None:
    """Alone and beside others, as a property that some particles do not have."""

    def body(x, none, ints, owner):
        (x, none, ints), owner, _ = spmd.exchange((x, none, ints), owner, "[n/a] ...", capacity=2, hops=hops)
        return x, none, ints, owner

    kernel = spmd.kernel("n/a d, n/a e, n/a e, n/a -> n/a d, n/a e, n/a e, n/a", mesh=make_mesh({"a": 4}))(body)
    owner = np.array([1, 1, 2, -1, 3, 3, 0, 0], np.int32)
    rows, none = np.arange(16, dtype=np.float32).reshape(8, 2), np.zeros((8, 0), np.float32)
    wanted, owners, _ = simulator.exchange(rows, owner, 4, 2, hops)
    for mode in MODES:
        with spmd.mode(mode):
            there, *nothing, found = kernel(rows, none, none.astype(np.int32), owner)
        np.testing.assert_array_equal(there, wanted)
        np.testing.assert_array_equal(found, owners)
        assert [(one.shape, one.dtype) for one in nothing] == [((8, 0), np.float32), ((8, 0), np.int32)]


def test_explain_names_the_call() -> None:
    run = spmd.kernel("n/a d, n/a -> n/a d", mesh=make_mesh({"a": 4}))(
        lambda x, owner: spmd.exchange(x, owner, "[n/a] d", capacity=2)[0]
    )
    said = str(spmd.explain(run, jnp.ones((8, 3)), jnp.zeros(8, jnp.int32)))
    assert 'exchange(x, y, "[n/a] d")' in said


# -------------------- rows that travel without gaps, in `exchange`. Those of experts are in `tests/parallel/test_dropless.py`


@pytest.mark.parametrize("seed", seeds())
def test_rows_without_gaps_are_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have no ragged_all_to_all. What it is given is right, forward and backward, if an emulation agrees."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    mesh, axes, _, owner, capacity, _ = sample(seed)
    rows = np.random.default_rng(seed).integers(-9, 10, (len(owner), 3)).astype(np.float32)
    padded, ragged = (kernel_of(mesh, axes, capacity, None, way) for way in (False, True))
    jax.tree.map(np.testing.assert_array_equal, ragged(rows, owner), padded(rows, owner))
    slope = lambda run: jax.jit(jax.grad(lambda x: (run(x, owner)[0] ** 3).sum()))(rows)
    np.testing.assert_array_equal(slope(ragged), slope(padded))


@pytest.mark.parametrize("mapped", ["rows", "both"])
@rare
def test_rows_without_gaps_under_vmap_and_remat(mapped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With owners of their own each array has its own route. With the same owners, rows are one wider row."""
    owner = np.array([[1, 0, 3, 2, 0, 2, 1, 3], [0, 0, 0, 3, -1, 2, 1, 1]], np.int32)
    owner = owner if mapped == "both" else owner[:1].repeat(2, 0)
    rows = np.arange(32, dtype=np.float32).reshape(2, 8, 2)

    def slope(ragged: bool) -> Any:
        @spmd.kernel("m n/a d, m n/a -> m n/a d", mesh=make_mesh({"a": 4}))
        def body(rows, owner):
            send = jax.checkpoint(lambda x, o: spmd.exchange(x, o, "[n/a] d", capacity=2, ragged=ragged)[0])
            given = (rows, owner) if mapped == "both" else (rows, owner[0])
            return jax.vmap(send, (0, 0 if mapped == "both" else None))(*given)

        return jax.jit(jax.grad(lambda x: (body(x, owner) ** 3).sum()))(rows)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    np.testing.assert_array_equal(slope(True), slope(False))


@pytest.mark.parametrize("mapped", share([None, 0], always=[None]))
def test_on_other_hardware_rows_have_no_gaps(mapped: int | None) -> None:
    """It traces, is accepted and lowers, also under vmap: one ragged_all_to_all forward and one backward."""
    rows, owner = np.ones((8, 2), np.float32), np.array([1, 0, 3, 2, 0, 2, 1, 3], np.int32)

    def one_of(ragged: bool | None, axes: str = "a/b") -> Any:
        @spmd.kernel(f"n/{axes} d, n/{axes} -> n/{axes} d", mesh=make_mesh({"a": 2, "b": 2}))
        def body(rows, owner):
            return spmd.exchange(rows, owner, f"[n/{axes}] d", capacity=2, ragged=ragged)[0]

        return body

    def traced(kernel: Any) -> Any:
        owners = owner if mapped is None else np.stack([owner, owner[::-1]])
        each = jax.vmap(kernel, (0, mapped))
        return jax.jit(jax.grad(lambda x: (each(x, owners) ** 2).sum())).trace(np.stack([rows, rows]))

    assert not spmd.check(one_of(True), rows, owner)
    one = traced(one_of(True))
    assert str(one.jaxpr).count("= ragged_all_to_all[") == 2 and "= all_to_all[" not in str(one.jaxpr)
    for platform in ("cuda", "tpu"):
        assert one.lower(lowering_platforms=(platform,)).as_text().count("@ragged_all_to_all") == 2
    for padded in (one_of(None), one_of(True, "b/a")):  # on CPUs, and in another order than the mesh
        assert "ragged_all_to_all" not in str(traced(padded).jaxpr)
