"""What lies beyond the ends of an array, against `np.pad`."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd.ops._halo import EDGES, Edge

X = np.arange(12.0, dtype=np.float32).reshape(3, 4) ** 2


def padded(kind, x, width):
    """`np.pad` with the mirror's sign turned where the edge is odd: about the wall, behind or on the last element."""
    if kind == "constant":
        return np.pad(x, width, constant_values=5)
    options = {"reflect_type": "odd"} if kind == "antireflect" else {}
    out = np.pad(x, width, EDGES[kind], **options)
    if kind == "antisymmetric":
        inside = np.pad(np.ones_like(x), width, constant_values=-1)
        out = out * inside
    return out


@pytest.mark.parametrize("low", [True, False], ids=["low", "high"])
@pytest.mark.parametrize("kind", [*EDGES, "constant"])
def test_each_edge_continues_the_array(kind, low):
    edge = Edge(kind, 5)
    for dim in (0, 1):
        width = [(0, 0), (0, 0)]
        width[dim] = (2, 0) if low else (0, 2)
        found = edge.continued(jnp.asarray(X), dim, 2, low=low)
        np.testing.assert_allclose(found, padded(kind, X, width), rtol=1e-6)
    assert edge.continued(X, 0, 0, low=low) is X


@pytest.mark.parametrize("low", [True, False], ids=["low", "high"])
@pytest.mark.parametrize("kind", ["edge", "symmetric", "reflect"])
def test_places_beyond_an_end_point_into_the_array(kind, low):
    places = np.arange(-2, 6)
    inside = np.asarray(Edge(kind).inside(jnp.asarray(places), 4, low=low))
    beyond = places < 0 if low else places >= 4
    wanted = np.pad(np.arange(4), 2, EDGES[kind])
    np.testing.assert_array_equal(inside[beyond], wanted[beyond])
    kept = (places >= 0) & (places < 4)
    np.testing.assert_array_equal(inside[kept], places[kept])
