"""How values lie, followed through a reshape: against blocks that are laid together again."""

from __future__ import annotations

import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.checker._places import FREE, RULES, Place

SHAPES = [(6,), (1, 6), (6, 1), (2, 3), (3, 2), (1, 2, 3), (2, 1, 3), (2, 3, 1), (1, 6, 1), (1, 1, 6), (3, 1, 2)]
DEVICES = 4


def reshaped(old: tuple[int, ...], new: tuple[int, ...], dims: tuple) -> Place | None:
    [eqn] = jax.make_jaxpr(lambda x: jax.lax.reshape(x, new))(jnp.ones(old)).eqns
    return RULES["reshape"](eqn, [Place(dims)])


@pytest.mark.parametrize("old", SHAPES)
def test_a_reshape_says_where_the_blocks_are(old: tuple[int, ...]) -> None:
    known = 0
    for new, at in product([shape for shape in SHAPES if shape != old], range(len(old))):
        found = reshaped(old, new, tuple(("tp",) if d == at else () for d in range(len(old))))
        if found is None or None in found.dims:
            continue
        assert [axes for axes in found.dims if axes] == [("tp",)]
        whole = np.arange(math.prod(old) * DEVICES).reshape(
            [n * (DEVICES if d == at else 1) for d, n in enumerate(old)]
        )
        blocks = [block.reshape(new) for block in np.split(whole, DEVICES, at)]
        together = np.concatenate(blocks, found.dims.index(("tp",)))
        np.testing.assert_array_equal(together.ravel(), whole.ravel(), f"{old} to {new}, divided at {at}")
        known += 1
    assert known


def test_what_a_reshape_does_not_say() -> None:
    undivided = reshaped((2, 3), (6,), ((), ()))
    assert undivided is not None and undivided.dims == ((),)
    merged = reshaped((2, 3), (6,), ((), ("tp",)))  # each device has pieces of every block
    assert merged is not None and merged.dims == (None,)
    constant = reshaped((2, 3), (6,), (FREE, FREE))
    assert constant is not None and constant.dims == (FREE,)
    half = reshaped((2, 3), (6,), (FREE, ()))
    assert half is not None and half.dims == (None,)
