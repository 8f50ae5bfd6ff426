"""Rows that travel without gaps, in `exchange`. Those of experts are in `tests/parallel/test_dropless.py`."""

from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd.ops._exchange import without_gaps
from tests.ops.harness import frame, make_mesh, ragged_all_to_all
from tests.ops.test_exchange import kernel_of, sample
from tests.sampler import rare, seeds


def test_where_rows_travel_without_gaps() -> None:
    """Over several devices in the order of the mesh, if asked for; by default not on CPUs."""
    explicit = frame({"a": 2, "b": 2}, "explicit")
    assert without_gaps(explicit, ("a", "b"), 4, True) and not without_gaps(explicit, ("a", "b"), 4, None)
    assert not without_gaps(explicit, ("b", "a"), 4, True) and not without_gaps(explicit, ("a",), 1, True)
    assert not without_gaps(frame({"a": 2, "b": 2}), ("a", "b"), 4, True)


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


@pytest.mark.parametrize("mapped", [None, 0])
@rare
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
