"""A jaxpr in two parts: which equation is where, and what crosses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd import _compat
from spmd._jaxprs.walker import equations
from spmd.parallel._layer import Cut, SplitStage, inlined


def steps(w, x, late):
    """Two results. The second one needs a value of the first, one that `late` makes, and one that `w` makes."""
    turned = jnp.sin(w)
    middle = jnp.exp(x * turned)
    return jnp.log1p(middle), middle * jnp.cos(late) + jnp.tanh(turned)


def layers(w, x, late):
    """A scan whose carry the first result needs. Its slices, summed, are in the second one."""

    def layer(carry, now):
        first, second = carry
        weight, other = now
        first = jnp.exp(first * jnp.sin(weight))
        return (first, second + jnp.cos(first) * jnp.tanh(other)), first * other

    (first, second), stack = lax.scan(layer, (x[0], jnp.zeros_like(x[0])), (w, late))
    return first, second + stack.sum()


ARGS = [np.linspace(low, 1, 3, dtype=np.float32) for low in (0.1, 0.2, 0.3)]


def cut(run, gone=(False, True, False)):
    jaxpr = jax.make_jaxpr(run)(*ARGS)
    return Cut(jaxpr.replace(jaxpr=_compat.live_jaxpr(jaxpr.jaxpr)), [True, False], [True, False, False], gone)


def names(run, *args):
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(run)(*args))}


@pytest.mark.parametrize(("run", "count"), [(steps, 1), (layers, 1)])
def test_each_part_has_its_own(run, count):
    """The sine is made of `w` alone, and so it is made twice. Nothing else is."""
    parts = cut(run)

    def both(w, x, late):
        first, crossing = parts.run_first([w, x, late])
        assert len(crossing) == parts.count == count
        return *first, *parts.run_second([w, None, late], crossing)

    for one, right in zip(jax.jit(both)(*ARGS), jax.jit(run)(*ARGS), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-6)
    crossing = parts.run_first(ARGS)[1]
    assert {"exp", "sin"} <= names(parts.run_first, ARGS) and not {"tanh", "cos"} & names(parts.run_first, ARGS)
    second = names(lambda *given: parts.run_second([given[0], None, given[1]], given[2]), ARGS[0], ARGS[2], crossing)
    assert {"tanh", "cos"} <= second and not {"exp", "log1p"} & second
    assert ("sin" in second) == (run is steps), "the layers' second part does not need it"


def test_an_input_that_the_second_part_lacks_crosses():
    late = lambda w, x, y: (x + w, x * y)
    assert cut(late).count == 1
    assert cut(late, gone=(False, False, False)).count == 0


def test_a_wrong_cut_is_noticed(monkeypatch):
    monkeypatch.setattr(Cut, "second", lambda self, eqn: True)
    with pytest.raises(Exception):  # noqa: B017, PT011 (JAX's, of a value that is not an array, or of an assertion)
        test_each_part_has_its_own(steps, 1)


def test_inlined():
    """No call is left, in loops neither. A branch stays one equation."""

    @jax.jit
    def twice(x):
        return 2 * jax.checkpoint(jnp.sin)(x)

    def run(x):
        x = lax.scan(lambda x, _: (twice(x), None), twice(x), None, length=2)[0]
        return lax.cond(x.sum() > 0, twice, jnp.cos, x)

    jaxpr = jax.make_jaxpr(run)(ARGS[0])
    flat = jax.make_jaxpr(lambda x: inlined(jaxpr, [x]))(ARGS[0])
    np.testing.assert_allclose(jax.jit(lambda x: inlined(jaxpr, [x]))(ARGS[0])[0], run(ARGS[0]), rtol=1e-6)
    outside = [eqn.primitive.name for eqn in flat.jaxpr.eqns]
    loop = flat.jaxpr.eqns[outside.index("scan")]
    inside = [eqn.primitive.name for eqn in equations(loop.params["jaxpr"])]
    assert not {"jit", "pjit", "checkpoint", "remat2"} & {*outside, *inside}
    assert "cond" in outside and "sin" in inside


# -------------------- a stage in three parts: the same gradients, no product twice, and nothing kept that weights alone make


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
    found = equations(jax.make_jaxpr(run)(*args))
    return sum(eqn.primitive.name == "dot_general" for eqn in found)


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
        gathers = lambda run, *args: sum(
            eqn.primitive.name == "all_gather" for eqn in equations(jax.make_jaxpr(run)(*args))
        )
        counts.append((gathers(split.of_input, [w], kept, y), gathers(split.of_weights, [w], kept, crossing)))
        return x

    run.trace(jnp.ones((3, 4, 4) if layers else (4, 4)), jnp.ones((6, 4)))
    assert set(counts) == {(1, 0)}
