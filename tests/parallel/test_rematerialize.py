"""A layer as two functions: the gradients are JAX's, and what is kept is what weights alone cannot make again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd._jaxprs.walker import walk
from spmd.parallel._layer import SAVE, Known, Layer, differentiable, without_integers
from tests.sampler import share

RNG = np.random.default_rng(0)
W = {"a": np.asarray(RNG.normal(size=(6, 9)), np.float32), "b": np.asarray(RNG.normal(size=(9, 6)), np.float32)}
X = np.asarray(RNG.normal(size=(4, 6)), np.float32)
SHARED = np.float32(0.5), np.arange(4, dtype=np.int32)
CLOSED = jnp.asarray(RNG.normal(size=(6,)).astype(np.float32))  # an array of JAX: NumPy's would be a literal


def plain(w, x, scale, rows):
    h = jnp.tanh(x @ jnp.sin(w["a"]) * scale)
    return (h @ w["b"].T.T + CLOSED[None])[rows]


def jitted(w, x, scale, rows):
    """A call holds both what weights make and what needs x."""
    wide = jax.jit(lambda a, x: x @ (a * 2.0))(w["a"], x)
    return (jax.checkpoint(jnp.sin)(wide) @ w["b"] * scale + CLOSED[None])[rows]


def looped(w, x, scale, rows):
    return jax.lax.scan(lambda c, _: (jnp.sin(c @ w["a"]) @ w["b"] * scale, None), x, None, length=2)[0] + CLOSED[None]


LAYERS = {"plain": plain, "jitted": jitted, "looped": looped}


def traced(name, save):
    rest = {key: w * 2 for key, w in W.items()}
    layer, consts = Layer.trace(
        LAYERS[name], lambda rest: jax.tree.map(lambda w: w / 2, rest), rest, (X,), SHARED, save
    )
    return layer, (consts, W, SHARED, (X,))


@pytest.mark.parametrize("save", SAVE)
@pytest.mark.parametrize("name", share(LAYERS))
def test_values_and_gradients_are_those_of_jax(name, save):
    layer, given = traced(name, save)
    by = np.asarray(RNG.normal(size=X.shape), np.float32)

    def ours(given, by):
        out, kept = layer.forward(*given)
        consts, weights, shared, x = layer.backward(*given[:3], kept, by)
        closed = [c for c, value in zip(consts, given[0], strict=True) if jnp.shape(value) == CLOSED.shape]
        return out, (weights, x[0], shared[0]), closed

    def plainly(w, x, scale, by):
        out, pull = jax.vjp(lambda w, x, scale: LAYERS[name](w, x, scale, SHARED[1]), w, x, scale)
        return out, pull(by)

    (out, gradients, closed), (wanted, right) = jax.jit(ours)(given, by), jax.jit(plainly)(W, X, SHARED[0], by)
    np.testing.assert_allclose(out, wanted, rtol=1e-5)
    for found, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    assert closed and np.allclose(closed[0], by.sum(0), rtol=1e-4), "what it closes over has gradients too"


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_kept_depends_on_x(name):
    """No weight, and nothing that is made of weights alone."""
    layer, given = traced(name, "activations")
    _, (recipe, values) = layer.forward(*given)
    assert len(values) == len(recipe.saved) > 0
    weights = {np.shape(w) for w in W.values()}
    assert {np.shape(v)[-2:] for v in values}.isdisjoint(weights) or name == "looped", "a loop is one piece"
    _, alone = traced(name, "inputs")[0].forward(*given)
    assert [v.shape for v in jax.tree.leaves(alone)] == [X.shape], "x alone"


def test_what_weights_make_is_known():
    """Made again: all that comes of weights, through a call too; nothing that comes of x."""

    def body(w, x):
        made = jnp.sin(w) * 2.0
        return made, made * x, jax.jit(lambda a, b: (a + 1.0, a * b))(made, x), jnp.zeros(3)

    jaxpr = jax.make_jaxpr(body)(1.0, 2.0)
    found = walk(jaxpr, [True, Known.UNKNOWN], Known())
    assert [one is not Known.UNKNOWN for one in found] == [True, False, True, False, True]


def test_integers_have_no_cotangents():
    primals = {"w": jnp.ones(2), "ids": jnp.arange(2), "key": jnp.uint32(1)}
    cotangents = {"w": jnp.ones(2), "ids": np.zeros(2, jax.dtypes.float0), "key": np.zeros((), jax.dtypes.float0)}
    assert {k: v is not None for k, v in without_integers(cotangents, primals).items()} == {
        "w": True,
        "ids": False,
        "key": False,
    }
    assert differentiable(jnp.ones(2, "complex64")) and not differentiable(jnp.arange(2))
