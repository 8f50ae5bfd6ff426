"""Arguments without values: how small they become, and what they are filled with."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.testing import assert_same_on_any_mesh
from tests.testing.harness import message
from tests.testing.test_meshes import struct

# -------------------- sizes


def sizes_seen(kernel, *args, **options):
    """The local shapes that the body meets on the mesh given, from the last trace there."""
    seen = []

    def body(*shards):
        seen.append([x.shape for x in shards])
        return shards[0]

    pattern, mesh = kernel
    assert_same_on_any_mesh(spmd.kernel(pattern, mesh=mesh, **options)(body), *args, meshes=())
    return {tuple(shapes) for shapes in seen}


def test_names_get_the_smallest_distinct_sizes(mesh):
    """Two rows on each device, all sizes distinct; a size of the kernel's own, and that of a given array, stay."""
    pattern = "b/dp s/tp d, d e -> b/dp s/tp d"
    seen = sizes_seen((pattern, mesh), struct(512, 4096, 1024), struct(1024, 3))
    assert seen == {((2, 2, 2), (2, 3)), ((4, 8, 2), (2, 3))}
    seen = sizes_seen((pattern, mesh), struct(512, 4096, 5), jnp.ones((5, 7)))
    assert ((2, 2, 5), (5, 7)) in seen
    seen = sizes_seen(("b/dp (h k)/tp -> b/dp (h k)/tp", mesh), struct(512, 4096), h=8)
    assert ((2, 4),) in seen


def test_names_keep_the_sizes_that_the_body_needs(mesh):
    @spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)
    def picky(x):
        assert spmd.size("s") == 64
        return x * 2

    @spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)
    def wrong(x):
        assert spmd.size("s") == 64
        return x * x.shape[0]

    assert_same_on_any_mesh(picky, struct(512, 64), meshes=())
    text = message(assert_same_on_any_mesh, wrong, struct(512, 64))
    assert "The names have smaller sizes here: b=4.\n" in text


def test_names_that_fit_together_become_small_together(mesh):
    """Heads in groups, halves of a head, a sequence that the body divides: none of them can be alone as small as can be."""

    @spmd.kernel("b/dp s h/tp k, b/dp s g/tp k -> b/dp s h/tp k", mesh=mesh)
    def heads(q, k):
        assert q.shape[1] % 8 == 0
        half = q.shape[-1] // 2
        turned = jnp.concatenate([q[..., half:], -q[..., :half]], -1)
        return turned * jnp.repeat(k, q.shape[2] // k.shape[2], 2) * q.shape[0]  # wrong, for a message

    text = message(assert_same_on_any_mesh, heads, struct(512, 8192, 128, 256), struct(512, 8192, 16, 256))
    sizes = dict(re.findall(r"(\w+)=(\d+)", text.partition("smaller sizes here:")[2]))
    assert {"s", "h", "k"} <= sizes.keys() and all(int(n) <= 128 for n in sizes.values()), text


def test_what_stays_large_is_not_drawn(mesh):
    @spmd.kernel("b/dp s -> b/dp s", mesh=mesh)
    def picky(x):
        assert spmd.size("s") == 2**20 and spmd.size("b") == 1024
        return x

    with pytest.raises(spmd.errors.SizeError, match="too many numbers to draw"):
        assert_same_on_any_mesh(picky, struct(1024, 2**20))


def test_indices_have_rows(mesh):
    """Random integers are rows of every array; given ones keep the dimensions that they may index."""

    @spmd.kernel("v/tp d, b/dp s -> b/dp s d", mesh=mesh)
    def embed(table, ids):
        return spmd.take(table, ids, "[v/tp] d, b/dp s -> b/dp s d")

    assert_same_on_any_mesh(embed, struct(512, 128), struct(8, 6, dtype="int32"), meshes=())
    ids = np.arange(24, dtype=np.int32).reshape(4, 6) + 70
    assert_same_on_any_mesh(embed, struct(512, 128), ids, meshes=())
