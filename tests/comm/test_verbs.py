"""Each verb against the simulator, over random meshes, layouts, spellings and dtypes, in all modes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests import simulator as sim
from tests.comm import cases
from tests.comm.cases import Case, argument, assert_blocks, device_mesh, expected, kernel_of, sample, written
from tests.ops.harness import pulled
from tests.sampler import Sampler, mixed, seeds, share

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


def scanned(run):
    return lambda x: jax.lax.scan(lambda carry, one: (carry, run(one)), jnp.int32(0), x)[1]


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
@pytest.mark.parametrize(
    ("verb", "how"), share(mixed(VERBS, ["jit", "vmap outside", "vmap inside", "scan", "remat", "eager grad"]))
)
def test_transformations(verb: str, mode: str, how: str) -> None:
    """One case each, other ones in each mode; three slices along a dimension of the transformation's own."""
    case = sample(verb, 200 + 3 * len(how) + len(mode))
    x = np.stack([argument(case, seed=i) for i in range(3)])
    wanted = np.stack([outcome(case, one) for one in x])
    if how == "jit":
        same(jax.jit(getattr(kernel_of(case), mode))(x[0]), wanted[0])
    elif how == "vmap outside":
        same(jax.vmap(getattr(kernel_of(case), mode))(x), wanted)
    elif how == "vmap inside":
        same(getattr(kernel_of(case, jax.vmap, lead="n "), mode)(x), wanted)
    elif how == "scan":
        run = getattr(kernel_of(case, scanned, lead="n "), mode)
        same(run(x), wanted)
        same(jax.jit(jax.grad(lambda x: run(x).sum()))(x), np.ones_like(x))
    elif how == "remat":
        run = getattr(kernel_of(case, lambda run: jax.checkpoint(lambda x: jnp.square(run(x)))), mode)
        gradient = jax.jit(jax.grad(lambda x: run(x).sum()))(x[0])
        same(gradient, np.broadcast_to(2 * wanted[0], x[0].shape))
    else:
        run = getattr(kernel_of(case), mode)
        same(jax.grad(lambda x: run(x).sum())(x[0]), np.ones_like(x[0]))


@over_cases
def test_gathered_copies(seed: int) -> None:
    """`to="varying"`: a copy that meets divided data, and whose gradient is summed by a reduce-scatter."""
    sampler = Sampler(300 + seed)
    case = sample("all_gather", 300 + seed)
    gone = tuple(axis for _, lost, _ in cases._changed(case) for axis in lost)
    at = f"w/{'/'.join(gone)}"

    def body(x, w):
        whole = spmd.all_gather(x, case.pattern, **case.keywords)
        return spmd.einsum(w, whole, f"{at}, {written(case.dst)} -> {at} {written(case.dst)}")

    kernel = spmd.kernel(f"{written(case.src)}, {at} -> {at} {written(case.dst)}", mesh=device_mesh(case.mesh))(body)
    x, w = argument(case), sampler.array((2 * sim.count(case.mesh, gone),))
    weights = sampler.array((w.size, *case.sizes))
    wanted = np.einsum("w,abc->wabc", w, x)
    for run in (kernel, kernel.auto, kernel.reference):
        value, (to_x, to_w) = pulled(run, x, w, by=weights)
        same(value, wanted)
        same(to_x, np.einsum("wabc,w->abc", weights, w))
        same(to_w, np.einsum("wabc,abc->w", weights, x))


@over_cases
def test_copies_that_enter_and_leave_a_plan(seed: int) -> None:
    """Gathered copies change their layout and meet divided data: values, gradients, and gradients of gradients."""
    case = sample("relayout", 400 + seed)
    copied, kernel = cases.through_copies(case)
    x, w = cases.whole(case), Sampler(seed).array((2 * sim.count(case.mesh, copied),))
    weights = Sampler(seed + 1).array((w.size, *case.sizes))

    def loss(run, x, w):
        return jnp.sum(jnp.square(run(x, w)) * weights)

    def all_orders(run):
        first = jax.grad(functools.partial(loss, run), (0, 1))
        along = (Sampler(2).array(x.shape), Sampler(3).array(w.shape))
        curve = lambda x, w: sum(jnp.vdot(a, g) for a, g in zip(along, first(x, w), strict=True))
        return jax.jit(lambda x, w: (run(x, w), first(x, w), jax.grad(curve, (0, 1))(x, w)))(x, w)

    wanted = all_orders(lambda x, w: jnp.einsum("w,abc->wabc", w, x))
    for run in (kernel, kernel.auto, kernel.reference):
        jax.tree.map(same, all_orders(run), wanted)


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
