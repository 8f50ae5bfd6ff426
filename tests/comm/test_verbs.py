"""Each verb against the simulator, over random meshes, layouts, spellings and dtypes, in all modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import simulator as sim
from tests.comm import cases
from tests.comm.cases import Case, argument, assert_blocks, device_mesh, expected, kernel_of, sample, written
from tests.sampler import Sampler, seeds

VERBS = tuple(cases.MOVES)

over_cases = pytest.mark.parametrize("seed", seeds(4))
over_verbs = pytest.mark.parametrize("verb", VERBS)


def outcome(case: Case, x: np.ndarray) -> np.ndarray:
    """The whole array that the case gives."""
    return sim.gather(expected(case, x), written(case.dst), case.mesh)


def same(a, b) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    assert sim.same(np.asarray(a), np.asarray(b))


@over_cases
@over_verbs
def test_blocks_and_values(verb: str, seed: int) -> None:
    case = sample(verb, seed)
    x = argument(case, Sampler(seed).dtype())
    kernel = kernel_of(case)
    assert_blocks(kernel(x), expected(case, x), device_mesh(case.mesh))
    assert_blocks(kernel.auto(x), expected(case, x), device_mesh(case.mesh))
    same(kernel.reference(x), outcome(case, x))


@over_cases
@over_verbs
def test_derivatives(verb: str, seed: int) -> None:
    """All verbs are linear: the tangent is the outcome of the tangent, the gradient that of the weights."""
    case = sample(verb, 100 + seed)
    x, tangent = argument(case), argument(case, seed=1)
    kernel = kernel_of(case)
    moved = jax.jit(lambda x, t: jax.jvp(kernel, (x,), (t,)))(x, tangent)[1]
    assert_blocks(moved, expected(case, tangent), device_mesh(case.mesh))
    weights = Sampler(seed).array(case.sizes)
    for run in (kernel, kernel.auto, kernel.reference):
        gradient = jax.jit(jax.grad(lambda x, run=run: jnp.sum(run(x) * weights)))(x)
        same(gradient, np.broadcast_to(weights, x.shape))


def test_the_comparison_can_fail() -> None:
    """A block too many, a block in the wrong place and a wrong value are all noticed."""
    case = sample("all_to_all", 0)
    x = argument(case)
    out, mesh, blocks = kernel_of(case)(x), device_mesh(case.mesh), expected(case, x)
    assert_blocks(out, blocks, mesh)
    first, *_, last = blocks
    swapped = {**blocks, first: blocks[last], last: blocks[first]}
    wrong = {**blocks, last: blocks[last] + (np.arange(blocks[last].size) == 0).reshape(blocks[last].shape)}
    halved = {**blocks, first: blocks[first][:1]}
    for bad in (swapped, {d: b.astype(np.float32) for d, b in wrong.items()}, halved):
        with pytest.raises(AssertionError):
            assert_blocks(out, bad, mesh)
    with pytest.raises(AssertionError):
        same(out, np.asarray(out)[::-1])
    assert any(expected(sample(verb, s), argument(sample(verb, s))) for verb in VERBS for s in range(3))
