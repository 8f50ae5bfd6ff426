"""Bodies that mean other things in auto and reference mode, where arrays are whole, than on devices."""

import jax
import numpy as np

import spmd
from tests.errors.registry import V, bad, fixed


def round_and_round(x, pattern):
    """The sum of all blocks, which go round."""

    def step(carry, _):
        total, y = carry
        y = spmd.shift(y, pattern, 1)
        return (total + y.sum(-1, keepdims=True), y), None

    rounds = spmd.axis_size("dp")
    return x + jax.lax.scan(step, (0 * x, x), None, length=rounds)[0][0]


@bad
def a_ring_without_blocks(mesh):
    spmd.kernel("n/dp -> n/dp", mesh=mesh)(lambda x: round_and_round(x, "[n/dp]")).reference(V)


@fixed
def a_ring_without_blocks_fixed(mesh):
    def body(x):
        blocks = spmd.rearrange(x, "(c l)/dp -> c/dp l", c=spmd.axis_size("dp"))
        return spmd.rearrange(round_and_round(blocks, "[c/dp] l"), "c/dp l -> (c l)/dp")

    kernel = spmd.kernel("n/dp -> n/dp", mesh=mesh)(body)
    for run in (kernel, kernel.auto, kernel.reference):
        np.testing.assert_allclose(run(V), V + V.sum())
