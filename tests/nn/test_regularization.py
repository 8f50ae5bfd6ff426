"""Dropout: the layout of its array, and one mask for all devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import nn
from tests.nn.harness import MESH, mapped


def test_dropout_wants_the_layout_of_its_array():
    """A mask of another rank would broadcast: one coin for a whole matrix."""
    x, key = np.ones((4, 64), np.float32), jax.random.key(3)

    def drop(layout, rate=0.5, **names):
        body = lambda x, k: nn.dropout(x, k, layout, rate=rate, **names)
        return spmd.kernel("b/dp d, scalar -> b/dp d", mesh=MESH)(body)(x, key)

    for layout, names in [("scalar", {}), ("d", {"d": 64}), ("q", {"q": 64}), ("b/dp q 1", {"q": 64})]:
        for rate in (0.5, 0):
            with pytest.raises(spmd.errors.LayoutError, match="has . dimensions?, not 2"):
                drop(layout, rate, **names)
    with pytest.raises(spmd.errors.SizeError, match="q has two sizes: 64 here, and 1 from the keyword q=1"):
        drop("b/dp q", q=1)
    with pytest.raises(spmd.errors.SpmdError, match='is read as "b/tp d"'):
        drop("b/tp d", 0)


def test_dropout_on_every_device():
    """One key for local draws: all devices drop the same numbers of different parts."""
    x, key = np.ones((4, 64), np.float32), jax.random.key(3)
    alike = mapped(lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype), (P("dp"), P()), P("dp"))(
        x, key
    )
    np.testing.assert_array_equal(alike[:2], alike[2:])

    def dropped(mesh, layout):
        found = spmd.kernel(f"{layout}, scalar -> {layout}", mesh=mesh)(lambda x, k: nn.dropout(x, k, layout, rate=0.5))
        return np.asarray(found(x, key))

    ours = dropped(MESH, "b/dp d")  # equal on tp, as the kernel's boundary checks
    assert (ours[:2] != ours[2:]).any()
    for mesh, layout in [(MESH, "b d/dp/tp"), (MESH, "b/tp d/dp"), (spmd.make_mesh(x=1), "b d/x")]:
        np.testing.assert_array_equal(dropped(mesh, layout), ours)
    assert set(np.unique(ours)) == {0.0, 2.0}
