"""Checksums that the devices compute. What several copies tell of each other is in `tests/cluster/test_guard.py`."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd._processes.copies import checksum
from tests.sampler import share


@pytest.mark.parametrize(
    "dtype",
    share(["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64", "float8_e4m3fn", "int4"]),
)
def test_a_checksum_sees_one_bit_and_not_the_mesh(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 2, (8, 24)) if dtype == "bool" else rng.integers(0, 7, (8, 24))).astype(dtype)
    wanted = int(checksum(x))
    for layout in ("a/dp b/tp", "a b/tp/dp", "a/tp/dp b"):
        placed = spmd.shard(x, layout, mesh=spmd.make_mesh(dp=2, tp=4))
        assert int(checksum(placed)) == wanted
    changed = x.at[3, 5].set(~x[3, 5] if dtype == "bool" else x[3, 5] + jnp.ones((), dtype))
    swapped = x.at[0].set(x[1]).at[1].set(x[0])
    for other in (changed, swapped):
        assert int(checksum(other)) != wanted


NUMBERS = ["float32", "bfloat16", "int32", "uint8", "int8", "bool", "complex64", "float8_e4m3fn", "int4", "uint2"]


def mixed(x):
    """The finaliser of MurmurHash3."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def summed(block, starts):
    """What a block, which begins at `starts`, adds to the checksum of its array, in NumPy."""
    parts = np.stack([block.real, block.imag], -1) if block.dtype.kind == "c" else block
    width = parts.dtype.itemsize
    words = np.ascontiguousarray(parts).view(f"uint{8 * min(width, 4)}").reshape((*parts.shape, *[2] * (width == 8)))
    if block.dtype.name in ("int4", "uint2", "float4_e2m1fn"):
        words = words & np.uint8(2 ** int(re.findall(r"\d", block.dtype.name)[0]) - 1)  # in the low bits of a byte
    place = np.zeros((), np.uint32)
    for dim, (first, size) in enumerate(zip([*starts, 0, 0], words.shape, strict=False)):
        at = np.arange(first, first + size, dtype=np.uint32)
        place = np.add.outer(place, mixed(mixed(at * np.uint32(0x9E3779B1) + np.uint32(dim + 1))))
    return int(mixed(np.atleast_1d(words.astype(np.uint32) ^ place)).sum(dtype=np.uint32))


@pytest.mark.parametrize("dtype", [*NUMBERS, "float4_e2m1fn", "float64", "int64", "complex128"])
@pytest.mark.parametrize("shape", share([(), (5,), (3, 70000), (4, 1, 6)], always=[(3, 70000)]))
def test_the_checksums_of_blocks_add_up(dtype, shape):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        whole = jnp.issubdtype(dtype, jnp.integer) or dtype == "bool"
        x = np.asarray(rng.integers(0, 4, shape) if whole else rng.normal(size=shape)).astype(jnp.dtype(dtype))
        wanted = int(jax.jit(checksum)(x))
    at = [int(rng.integers(0, n + 1)) for n in shape]
    parts = itertools.product(*[(slice(0, i), slice(i, n)) for i, n in zip(at, shape, strict=True)])
    found = [summed(np.asarray(x[part]), [one.start for one in part]) for part in parts]
    assert sum(found) % 2**32 == wanted
