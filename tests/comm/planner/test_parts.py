"""Steps over parts of axes: what runs, its gradient, and what the checker says of it."""

import math
import random

import jax
import numpy as np
import pytest

import spmd
from tests import simulator as sim
from tests.comm.cases import assert_blocks, device_mesh, written
from tests.comm.planner.test_reshard import check, kernel_of
from tests.comm.test_resharding import placements
from tests.sampler import seeds, share

MESHES = [{"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 1, "z": 4}]
SIZES = (16, 24)


def in_parts(mesh, dims=2, tries=300, seed=0):
    """Pairs whose plan takes an axis in parts."""
    everything, dice = placements(tuple(mesh), dims), random.Random(seed)
    found = []
    for _ in range(tries):
        source, target = dice.sample(everything, 2)
        plan = spmd.plan(f"{written(source)} -> {written(target)}", a=SIZES[0], b=SIZES[1], mesh=mesh)
        found += [(source, target)] if plan.parts and (source, target) not in found else []
    return found


PAIRS = [(mesh, *pair) for mesh in MESHES[:2] for pair in in_parts(mesh)]


def test_there_are_such_plans() -> None:
    assert len(PAIRS) >= 4


@pytest.mark.parametrize(("mesh", "source", "target"), share(PAIRS), ids=str)
def test_what_runs_is_the_plan(mesh, source, target) -> None:
    check(source, target, mesh, np.arange(16 * 24, dtype=np.float32).reshape(SIZES))


@pytest.mark.parametrize(("mesh", "source", "target"), share(PAIRS), ids=str)
def test_gradients_and_vmap(mesh, source, target) -> None:
    x = np.arange(16 * 24, dtype=np.float32).reshape(SIZES)
    weights = np.random.default_rng(0).integers(-3, 4, x.shape).astype(np.float32)
    kernel = kernel_of(source, target, mesh)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda v: (kernel(v) * weights).sum()))(x), weights)
    pattern = f"{written(source)} -> {written(target)}"
    body = jax.vmap(lambda v: spmd.relayout(v, pattern, to="invarying"))
    many = spmd.kernel(f"n {written(source)} -> n {written(target)}", mesh=device_mesh(mesh))(body)
    stack = np.stack([x, 2 * x])
    np.testing.assert_array_equal(many(stack), stack)
    gradient = jax.jit(jax.grad(lambda v: (many(v) * weights[None]).sum()))(stack)
    np.testing.assert_array_equal(gradient, np.stack([weights, weights]))


@pytest.mark.parametrize(("mesh", "source", "target"), share(PAIRS), ids=str)
def test_copies_that_vary_have_gradients_that_are_added_up(mesh, source, target) -> None:
    """A result that is typed varying: each copy is used with other numbers."""
    gone = [a for axes in source for a in axes if not any(a in run for run in target)]
    x = np.arange(16 * 24, dtype=np.float32).reshape(SIZES)
    pattern = f"{written(source)} -> {written(target)}"

    @spmd.kernel(f"{written(source)} -> {written(target)}", mesh=device_mesh(mesh))
    def weighted(v):
        y = spmd.relayout(v, pattern, to="varying" if gone else None)
        for axis in gone:
            y = spmd.psum(
                y * (1 + spmd.axis_index(axis)).astype(y.dtype), f"{written(target)} {{U:{axis}}} -> {written(target)}"
            )
        return y

    factor = math.prod(mesh[a] * (mesh[a] + 1) / 2 for a in gone)
    np.testing.assert_allclose(weighted(x), factor * x)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda v: weighted(v).sum()))(x), np.full(SIZES, factor))


@pytest.mark.parametrize(("mesh", "source", "target"), share(PAIRS), ids=str)
def test_the_checker_proves_it(mesh, source, target) -> None:
    found = spmd.check(kernel_of(source, target, mesh), np.ones(SIZES, np.float32))
    assert "proved" in str(found.verdict) and "no findings" in str(found.verdict)


@pytest.mark.parametrize("seed", seeds(4))
def test_sums_in_parts(seed) -> None:
    """A sum of which each device has a term, completed on a mesh whose axes are unequal."""
    dice = random.Random(seed)
    mesh = dice.choice(MESHES)
    partial = dice.choice([a for a, n in mesh.items() if n > 1])
    rest = [a for a in mesh if a != partial]
    source, target = dice.choice(placements(tuple(rest))), dice.choice(placements(tuple(mesh)))
    before, after = f"{written(source)} {{U:{partial}}}", written(target)

    def body(v):
        v = spmd.reduce(v, f"p/{partial} {written(source)} -> {before}", "sum")
        return spmd.relayout(v, f"{before} -> {after}", to="invarying")

    kernel = spmd.kernel(f"p/{partial} {written(source)} -> {after}", mesh=device_mesh(mesh))(body)
    x = np.arange(mesh[partial] * 16 * 24, dtype=np.float32).reshape(mesh[partial], *SIZES)
    assert_blocks(kernel(x), sim.scatter(x.sum(0), after, mesh), device_mesh(mesh))
    weights = np.random.default_rng(0).integers(-3, 4, SIZES).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda v: (kernel(v) * weights).sum()))(x)
    np.testing.assert_array_equal(gradient, np.broadcast_to(weights, x.shape))
