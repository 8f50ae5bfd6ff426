"""The sizes of a kernel's names, read and made other ones."""

import jax.numpy as jnp

import spmd
from spmd.checker._shrinking import distinct, resized_array
from spmd.kernels._trial import blocks_of, read_sizes

X = jnp.ones((64, 32, 24))


def test_sizes_are_read_and_made_small() -> None:
    mesh = spmd.make_mesh(dp=2, tp=4)
    kernel = spmd.kernel("b/dp (h k)/tp d -> b d/dp/tp", mesh=mesh, h=8)(lambda x: x)
    plan, leaves = kernel.prepared((X,), {})
    read = read_sizes(plan, leaves)
    assert {name: one.size for name, one in read.sizes.items()} == {"b": 64, "h": 8, "k": 4, "d": 24}
    blocks = blocks_of(plan, read, [mesh])
    assert blocks == {"b": 2, "h": 4, "k": 1, "d": 8}
    small = distinct({"b": 64, "k": 4, "d": 24}, blocks, {8})
    assert small == {"b": 4, "k": 2, "d": 16}
    [dims] = read.dims
    assert resized_array(X, dims, {**small, "h": 8}).shape == (4, 16, 16)
