"""A jaxpr in two parts: which equation is where, and what crosses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd import _compat
from spmd._jaxprs.walker import equations
from spmd.parallel._cut import Cut, inlined


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
