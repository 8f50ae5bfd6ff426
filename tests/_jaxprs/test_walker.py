"""The walk over jaxprs, with domains small enough to check by hand: what values are made of, and how often code runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental.pallas import run_state
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import spmd
from spmd._jaxprs.walker import Domain, Role, call_of, equations, held, is_unknown, opened, plain_call, walk

X, Y = jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)


# -------------------- what the table says of the jaxprs that an equation holds, tried by evaluating them


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


# -------------------- domains small enough to check by hand


class MadeOf(Domain):
    """Which arguments a value is made of."""

    def constant(self, var, value):
        return frozenset()

    def step(self, eqn, operands):
        return [frozenset().union(*operands)] * len(eqn.outvars)

    def join(self, one, other):
        return one | other

    def decided(self, value, predicate):
        return value | predicate


def delayed(x, y, length):
    """The third carry is made of `y` after three rounds only."""
    return lax.scan(lambda c, v: ((c[1], c[2], c[2] * y.sum() * 0 + v), c[0]), (x.sum(), 1.0, 1.0), y[:length])


mesh = spmd.make_mesh(a=2)
PROGRAMS = {
    "scan": lambda x, y: delayed(x, y, 4),
    "scan of nothing": lambda x, y: delayed(x, y, 0),
    "while": lambda x, y: lax.while_loop(lambda c: c[0] < y[0], lambda c: (c[0] + 1, c[1] + c[0]), (0.0, x)),
    "cond": lambda x, y: lax.cond(x[0] > 2, lambda: y, lambda: jnp.ones(4)),
    "nested": lambda x, y: lax.fori_loop(0, 3, lambda i, c: lax.cond(c[0] < 9, lambda: c * y, lambda: jnp.sin(c)), x),
    "shard_map": jax.shard_map(lambda x, y: (x * 2, y), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a")),
    **{name: lambda x, y, fn=fn: (fn(x), y) for name, fn in CALLS.items()},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_result_depends_on_it_is_made_of(name):
    """By numbers: where an argument changes a result, the walk says so."""
    fn = PROGRAMS[name]
    made = walk(jax.make_jaxpr(fn)(X, Y), [frozenset("x"), frozenset("y")], MadeOf())
    results = jax.tree.leaves(fn(X, Y))
    assert len(made) == len(results)
    for argument, others in {"x": [(s * X, Y) for s in (0.1, 3.0)], "y": [(X, s * Y) for s in (0.1, 3.0)]}.items():
        for other in others:
            for of, before, after in zip(made, results, jax.tree.leaves(fn(*other)), strict=True):
                assert argument in of or np.array_equal(before, after), (name, argument)


def test_nothing_is_said_that_is_not_so():
    """The other way round, where it is plain what a result is made of."""
    say = lambda fn: [
        "".join(sorted(one)) for one in walk(jax.make_jaxpr(fn)(X, Y), [frozenset("x"), frozenset("y")], MadeOf())
    ]
    assert say(lambda x, y: (jnp.sin(x), y * 2, 1.0)) == ["x", "y", ""]
    assert say(lambda x, y: lax.scan(lambda c, v: (c * v, v), x.sum(), jnp.ones(3))) == ["x", ""]
    assert say(PROGRAMS["scan"]) == ["y", "y", "y", "xy"] and say(PROGRAMS["cond"]) == ["xy"]
    assert say(PROGRAMS["shard_map"]) == ["x", "y"]


class Runs(MadeOf):
    """How often `sin` runs, and where; loops are walked `once`, or until they settle."""

    def __init__(self, once):
        super().__init__()
        self.once, self.times, self.counted = once, 1, 0

    def same(self, one, other):
        return self.once or one == other

    def run(self, eqn, part, operands):
        before, self.times = self.times, self.times * eqn.params.get("length", 1)
        outs = super().run(eqn, part, operands)
        self.times = before
        return outs

    def step(self, eqn, operands):
        if eqn.primitive.name == "sin":
            self.counted += self.times
            self.findings.append([caller.primitive.name for caller in self.callers])
        return super().step(eqn, operands)


def test_loops_are_multiplied_out_and_findings_of_the_last_round_kept():
    fn = lambda x, y: lax.scan(lambda c, _: (jax.jit(jnp.sin)(c) * y.sum(), None), x.sum(), length=5)
    jaxpr = jax.make_jaxpr(fn)(X, Y)
    costs = Runs(once=True)
    walk(jaxpr, [frozenset("x"), frozenset("y")], costs)
    assert costs.counted == 5 and costs.callers == []
    found = Runs(once=False)
    walk(jaxpr, [frozenset("x"), frozenset("y")], found)
    assert found.counted > 5 and found.findings == [["scan", "jit"]]


def test_what_is_called_again_is_walked_once():
    """If the domain says what its results depend on, and where nothing was found."""

    class Counted(MadeOf):
        steps = 0

        def context(self):
            return ()

        def step(self, eqn, operands):
            self.steps += 1
            return super().step(eqn, operands)

    inner = jax.jit(lambda x: jnp.cos(x))
    jaxpr = jax.make_jaxpr(lambda x, y: inner(inner(inner(x))) + inner(y))(X, Y)
    counted = Counted()
    assert walk(jaxpr, [frozenset("x"), frozenset("y")], counted) == [frozenset("xy")]
    assert counted.steps == 3  # cos of what is made of x, of what is made of y, and the sum


def test_derivatives_that_do_not_run_may_be_left_out():
    jaxpr = jax.make_jaxpr(CALLS["custom_linear_solve"])(X)
    every, running = list(equations(jaxpr)), list(equations(jaxpr, derivatives=False))
    assert len(running) < len(every) and {"div", "custom_linear_solve"} <= {eqn.primitive.name for eqn in running}
