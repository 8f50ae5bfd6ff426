"""Orders of tokens: the same in three places, and of equal work for each device."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel
from tests.nn.dense import placed_order
from tests.sampler import share


@pytest.mark.parametrize("n", share([1, 2, 3, 8]))
@pytest.mark.parametrize("placement", parallel.sequence.PLACEMENTS)
def test_one_order_in_three_places(placement, n):
    """On the host, by communication, and as positions."""
    length = 2 * n * n
    order = placed_order(length, n, placement)
    assert np.array_equal(parallel.sequence_order(length, n, placement), order)
    kernel = functools.partial(spmd.kernel, mesh=spmd.make_mesh(cp=n))
    at = kernel("-> s/cp", s=length)(lambda: parallel.sequence_positions(length, placement, cp="cp"))
    assert np.array_equal(at(), order)
    place = kernel("s/cp -> s/cp")(lambda x: parallel.place_sequence(x, placement, cp="cp", axis=0))
    restore = kernel("s/cp -> s/cp")(lambda x: parallel.restore_sequence(x, placement, cp="cp", axis=0))
    assert np.array_equal(place(jnp.arange(length)), order)
    assert np.array_equal(restore(place(jnp.arange(length))), np.arange(length))


def test_balanced_means_equal_work():
    """Pairs of a query and a key that it sees, per device."""
    for placement, spread in (("contiguous", 7.0), ("zigzag", 1.0), ("striped", 1.2)):
        blocks = np.split(placed_order(64, 4, placement), 4)
        seen = [sum(position + 1 for position in block) for block in blocks]
        assert max(seen) / min(seen) <= spread, placement
        assert placement != "contiguous" or max(seen) / min(seen) > 6
