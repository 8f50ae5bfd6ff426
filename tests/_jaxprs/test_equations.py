"""What the table says of the jaxprs that an equation holds, tried by evaluating them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental.pallas import run_state
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from spmd._jaxprs.walker import Role, call_of, equations, held, is_unknown, opened, plain_call

X = jnp.arange(1.0, 5.0)


@jax.custom_jvp
def with_jvp(x):
    return 2 * x


with_jvp.defjvp(lambda x, t: (with_jvp(*x), 2 * t[0]))


@jax.custom_vjp
def with_vjp(x):
    return 3 * x


with_vjp.defvjp(lambda x: (3 * x, ()), lambda _, g: (3 * g,))


def solve(x):
    return lax.custom_linear_solve(
        lambda v: v * X, x, lambda _, b: (b / X, X.sum()), lambda _, b: (b, 0.0), has_aux=True
    )


CALLS = {
    "jit": jax.jit(lambda x: x + X),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * X),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "linear_call": lambda x: linear_call(lambda r, v: r * v, lambda r, ct: r * ct, X, x),
    "composite": lax.composite(lambda x: x * X, "spmd.test"),
    "custom_linear_solve": solve,
}


def first(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return jaxpr, next(eqn for eqn in jaxpr.eqns if held(eqn))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_its_jaxpr_gives(name: str) -> None:
    """Its operands, in the order that the table says, into its jaxpr."""
    jaxpr, eqn = first(CALLS[name], X)
    part = call_of(eqn)
    before = jaxpr.eqns[: jaxpr.eqns.index(eqn)]
    alone = opened(jaxpr)[0].replace(eqns=before, outvars=list(eqn.invars))
    given = jaxpr_as_fun(ClosedJaxpr(alone, jaxpr.consts))(X)
    body, consts = opened(part.jaxpr)
    outs = jaxpr_as_fun(ClosedJaxpr(body, list(consts)))(*part.of(given))
    expected = jax.tree.leaves(CALLS[name](X))
    assert len(outs) == len(expected)
    assert all(bool(jnp.allclose(a, b)) for a, b in zip(outs, expected, strict=True))
    assert (plain_call(eqn) is not None) == (name == "jit")


def test_loops_and_branches() -> None:
    _, scan = first(lambda x: lax.scan(lambda c, v: (c + v * X.sum(), c * v), 0.0, x), X)
    [part] = held(scan)
    assert part.role == Role.LOOP and sum(part.sliced) == 1 and part.stacked == (False, True)
    _, loop = first(lambda x: lax.while_loop(lambda c: c.sum() < X[0], lambda c: c + x, X), X)
    assert [part.role for part in held(loop)] == [Role.TEST, Role.LOOP]
    assert all(part.operands[-1] == len(loop.invars) - 1 for part in held(loop))
    _, cond = first(lambda x: lax.cond(x[0] > 0, lambda v: v, lambda v: v * 2, x), X)
    assert [part.role for part in held(cond)] == [Role.BRANCH] * 2
    _, reduce = first(lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (0,)), X)
    assert [part.role for part in held(reduce)] == [Role.SCALARS]


def test_what_nobody_knows() -> None:
    def body(ref):
        ref[...] = ref[...] * 2

    _, eqn = first(run_state(body), X)
    assert is_unknown(eqn) and call_of(eqn) is None
    assert not any(is_unknown(eqn) for fn in CALLS.values() for eqn in equations(jax.make_jaxpr(fn)(X)))


def test_all_depths() -> None:
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(lambda x: lax.map(jax.jit(jnp.sin), x))(X))]
    assert names == ["scan", "jit", "sin"]
