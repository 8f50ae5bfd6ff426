"""Bits that flip and numbers that are not finite are named, with host, device and array."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.cluster import guard
from spmd.cluster._recorder import recorder
from spmd.errors import SpmdError
from tests.cluster.harness import joined
from tests.sampler import rare

FLIPPED = "tests/cluster/flipped.py"


def with_a_flip(x: jax.Array, *devices: int, bit: int = 3) -> jax.Array:
    """An array of which some devices hold another bit in their first number."""
    blocks = []
    for part in x.addressable_shards:
        block = np.array(part.data)
        if part.device.id in devices:
            block.reshape(-1).view(np.uint8)[0] ^= 1 << bit
        blocks.append(jax.device_put(block, part.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


def state(dtype: str = "float32") -> dict[str, jax.Array]:
    """A copied and a divided array."""
    mesh = spmd.make_mesh(dp=4, tp=2)
    return {
        "w": spmd.shard(jnp.arange(8).astype(dtype), "d/tp", mesh=mesh),
        "count": spmd.shard(jnp.int32(5), "scalar", mesh=mesh),
        "divided": spmd.shard(jnp.arange(16.0), "b/dp/tp", mesh=mesh),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_flipped_bit_is_named(dtype: str) -> None:
    good = state(dtype)
    guard(0, good)
    bad = {**good, "w": with_a_flip(good["w"], 5, bit=0)}
    guard(1, bad)  # it looks at every hundredth step
    with pytest.raises(SpmdError, match=r"\['w'\]\[4:8\]: device 5 \(rank 0 on .*\) differs from 3 equal copies"):
        guard(100, bad)


def test_without_a_majority_all_are_named() -> None:
    good = state()
    bad = {**good, "count": with_a_flip(good["count"], 0, 1, 2, 3)}
    with pytest.raises(SpmdError, match=r"device 7 .* have different copies, and no majority is right"):
        guard(3, bad, every=3)


def test_what_is_divided_has_no_copies() -> None:
    good = state()
    guard(0, {**good, "divided": with_a_flip(good["divided"], 6)})


def test_numbers_that_are_not_finite_are_named() -> None:
    good = state()
    guard(0, {**good, "key": jax.random.key(3), "integers": good["count"]})
    bad = {**good, "divided": good["divided"].at[3].set(jnp.nan)}
    with pytest.raises(SpmdError, match=r"not finite(.|\n)*\['divided'\]"):
        guard(0, bad)
    for narrow in ("float8_e4m3fn", "float8_e5m2"):
        with pytest.raises(SpmdError, match="not finite"):
            guard(0, {"x": jnp.full(3, jnp.nan, narrow)})
    guard(0, {})


@rare  # in one process: the tests above
def test_in_several_processes_each_knows_who() -> None:
    found = joined([[FLIPPED]] * 2, timeout=60)
    for rank, one in enumerate(found):
        assert "['w'][0:8]: device 2 (rank 1 on " in one.out and "differs from 3 equal copies" in one.out, one
        assert "['w']: rank 1" in one.out, one  # not finite, and only there
        assert one.code == 0 and f"rank {rank} is done" in one.out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_the_sample_that_is_not_finite_is_named(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number reaches all ranks by a sum; who has read it knows which sample it was."""
    monkeypatch.setattr(recorder, "unsound", collections.deque(maxlen=3))
    rows, mesh = np.ones((16, 4), jnp.dtype(dtype)), spmd.make_mesh(dp=4, tp=2)
    rows[5, 1] = np.inf
    data = spmd.cluster.batches(rows, "b/dp d", batch=4, shuffle=False, mesh=mesh, prefetch=0)
    for _ in range(2):
        batch = next(data)
    loss = jax.jit(lambda x: jnp.sum(x.astype("complex64")))(batch)
    with pytest.raises(SpmdError, match=r"'batch'(.|\n)*rank 0 has read samples with such numbers, the last: \[5\]"):
        guard(0, {"loss": loss, "batch": batch})
    recorder.unsound.clear()
    integers = spmd.cluster.batches(np.arange(32).reshape(16, 2), "b/dp d", batch=4, mesh=mesh, prefetch=0)
    guard(0, {"batch": next(integers)})
    assert not recorder.unsound
