"""A stage in three parts: the same gradients, no product twice, and nothing kept that weights alone make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.parallel._layer import SplitStage
from tests.jaxprs import names_of


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def block(w, x):
    return x + jnp.tanh(jax.nn.silu(x @ w[0]) @ w[1])


def over_layers(layer):
    return lambda w, x: lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


ONE, THREE = ((4, 6), (6, 4)), ((3, 4, 6), (3, 6, 4))
STAGES = {  # the stage, shapes of its weights, and how many products F, B and W have
    "plain": (block, ONE, (2, 2, 2)),
    "jit": (jax.jit(block), ONE, (2, 2, 2)),
    "checkpoint": (jax.checkpoint(block), ONE, (2, 4, 2)),
    "scan": (over_layers(block), THREE, (2, 2, 2)),
    "scan of checkpoint": (over_layers(jax.checkpoint(block)), THREE, (2, 4, 2)),
    "scan in scan": (over_layers(over_layers(block)), ((2, *THREE[0]), (2, *THREE[1])), (2, 2, 2)),
    "backwards": (lambda w, x: lax.scan(lambda x, w: (block(w, x), x), x, w, reverse=True)[1].sum(0), THREE, (2, 2, 2)),
    "the same weights": (lambda w, x: lax.fori_loop(0, 3, lambda _, x: block(w, x), x), ONE, (2, 2, 2)),
    "branches": (lambda w, x: lax.cond(x.sum() > 0, lambda: block(w, x), lambda: x), ONE, (2, 4, 0)),
    "a product of weights": (lambda w, x: x + jnp.tanh(x @ (w[0] @ w[1])), ONE, (2, 2, 3)),
}


def traced(stage, weights, x):
    run = lambda w, given: [stage(tuple(w), given[0])]
    return SplitStage.trace(run, list(weights), [x])


def products(run, *args):
    return names_of(jax.make_jaxpr(run)(*args)).count("dot_general")


@pytest.mark.parametrize("name", STAGES)
def test_the_same_gradients_without_a_product_twice(name):
    stage, shapes, counts = STAGES[name]
    weights, x, cotangent = [normal(i, *s) for i, s in enumerate(shapes)], normal(5, 2, 4), normal(6, 2, 4)
    found = []

    def parts(weights, x, cotangent):
        split = traced(stage, weights, x)
        y, kept = split.forward(weights, [x])
        dx, crossing = split.of_input(weights, kept, [cotangent])
        dw = split.of_weights(weights, kept, crossing)
        kinds = [split.kept, split.crossing]
        assert [[(a.shape, a.dtype) for a in those] for those in kinds] == [
            [(a.shape, a.dtype) for a in those] for those in (kept, crossing)
        ]
        found.append(
            (
                products(lambda w, x: split.forward(w, [x])[0], weights, x),
                products(lambda w, k, c: split.of_input(w, k, [c]), weights, kept, cotangent),
                products(split.of_weights, weights, kept, crossing),
            )
        )
        return y[0], dw, dx[0]

    def whole(weights, x, cotangent):
        y, pull = jax.vjp(lambda w, x: stage(tuple(w), x), weights, x)
        return y, *pull(cotangent)

    values = jax.jit(parts)(weights, x, cotangent)
    for one, right in zip(*map(jax.tree.leaves, (values, jax.jit(whole)(weights, x, cotangent))), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-5)
    assert found == [counts]


@pytest.mark.parametrize("layers", [False, True])
def test_gathered_weights_are_not_kept(layers):
    """They are gathered again for the gradient of the input, and never for those of the weights. A scan over layers is
    one piece: there `jax.checkpoint` says that they are not kept."""
    mesh = spmd.make_mesh(fsdp=2)
    counts = []

    def one(w, x):
        return jnp.tanh(spmd.einsum(x, spmd.all_gather(w, "d/fsdp e -> d e"), "b/fsdp d, d e -> b/fsdp e"))

    stage = over_layers(jax.checkpoint(one)) if layers else one

    @spmd.kernel(f"{'l ' if layers else ''}d/fsdp e, b/fsdp d -> b/fsdp d", mesh=mesh)
    def run(w, x):
        split = SplitStage.trace(lambda w, x: [stage(w[0], x[0])], [w], [x])
        y, kept = split.forward([w], [x])
        _, crossing = split.of_input([w], kept, y)
        assert all(4 not in one.shape[-2:-1] for one in split.kept), "no gathered weight, of four rows"
        gathers = lambda run, *args: names_of(jax.make_jaxpr(run)(*args)).count("all_gather")
        counts.append((gathers(split.of_input, [w], kept, y), gathers(split.of_weights, [w], kept, crossing)))
        return x

    run.trace(jnp.ones((3, 4, 4) if layers else (4, 4)), jnp.ones((6, 4)))
    assert set(counts) == {(1, 0)}
