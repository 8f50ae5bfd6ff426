"""Where values come from, against a brute search over the same programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd.checker._history import History, labels_of, shown_spec
from tests.checker.harness import AXES, mark, mesh, varying

X = jnp.ones((8, 8))


def history(body, *specs):
    """The history of a body in a `shard_map`, and the variables of its results."""
    listed = lambda *args: [varying(v)[None, None] for v in body(*args)]
    run = jax.shard_map(listed, mesh=mesh(), in_specs=specs, out_specs=P("dp", "tp"))
    jaxpr = jax.jit(run).trace(*[X] * len(specs)).jaxpr
    found = History(jaxpr, ("x", "w"))
    [mapped] = [eqn for eqn, *_ in found.made.values() if eqn.primitive.name == "shard_map"][:1]
    return found, mapped.params["jaxpr"].outvars


def reasons(body, axis, *specs):
    found, outvars = history(body, *specs or (P("dp", "tp"), P()))
    return [[(one.kind, one.label.partition(",")[0]) for one in found.sources(var, axis)] for var in outvars]


def test_why_a_value_differs():
    def body(x, w):
        place = lax.axis_index("dp").astype("float32")
        return (
            x * 2.0,
            w + place,
            lax.psum(x, "dp") * w[:4, :2],
            jnp.concatenate([x, varying(w)[: x.shape[0], : x.shape[1]]]),
        )

    made, index, summed, both = reasons(body, "dp")
    assert made == [("input", "argument x")] and index == [("axis_index", "")]
    assert summed == [] and both == [("input", "argument x")]
    assert reasons(body, "tp")[1] == [], "an index along dp does not make a value differ along tp"


def test_the_way_back_goes_through_loops_branches_and_calls():
    def body(x, w):
        carried = lax.scan(lambda c, r: (c * r, None), varying(w)[0, :2], x)[0]
        counted = lax.while_loop(
            lambda c: c[0] < x.sum(), lambda c: (c[0] + 1.0, c[1] * 2), (varying(0.0), varying(w))
        )[1]
        chosen = lax.cond(x.sum() > 0, lambda: varying(w) * 1.0, lambda: varying(w))
        called = jax.jit(lambda v: v + 1.0)(x)
        return carried, counted, chosen, called

    for found in reasons(body, "tp"):
        assert ("input", "argument x") in found


def test_gathers_are_found_up_to_the_next_one():
    def body(x, w):
        once = lax.all_gather(x, "tp", axis=1, tiled=True)
        return once * 2.0, lax.psum(once * 0.25, "tp") + 0.0, lax.all_gather(once, "dp", tiled=True)

    found, outvars = history(body, P("dp", "tp"), P())
    names = [[one.eqn.primitive.name for one in found.gathers(var, "tp")] for var in outvars]
    assert names == [["all_gather"], [], ["all_gather"]]
    assert [len(found.gathers(var, "dp")) for var in outvars] == [0, 0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_what_a_value_is_made_of(seed):
    """`behind` finds the arguments that the numbers depend on, and no other."""
    rng = np.random.default_rng(seed)
    plan = [(int(rng.integers(4)), int(rng.integers(100)), int(rng.integers(100))) for _ in range(6)]
    steps = [lambda a, b: a * b, lambda a, b: jnp.sin(a), lambda a, b: lax.cond(a.sum() > 0, lambda: b, lambda: a),
             lambda a, b: lax.fori_loop(0, 2, lambda i, c: c + b, a)]  # fmt: skip

    def program(*args):
        values = list(args)
        for step, one, two in plan:
            values.append(steps[step](values[one % len(values)], values[two % len(values)]))
        return values[-1]

    run = jax.jit(program)
    args = [np.asarray(rng.normal(size=3), np.float32) for _ in range(3)]
    jaxpr = jax.make_jaxpr(program)(*args)
    behind = set(History(jaxpr).behind(jaxpr.jaxpr.outvars[0], lambda *_: False))
    for i, var in enumerate(jaxpr.jaxpr.invars):
        moved = [a + 100.0 * (j == i) for j, a in enumerate(args)]
        if not np.array_equal(run(*args), run(*moved)):
            assert var in behind, "the result depends on it"
    touched = History(jaxpr)
    assert touched.producer(jaxpr.jaxpr.outvars[0]) is None or touched.made_by(
        jaxpr.jaxpr.outvars[0], jaxpr.jaxpr.eqns[-1].primitive.name
    )


def test_what_nothing_uses_is_not_behind():
    jaxpr = jax.make_jaxpr(lambda x, y: (jnp.sin(x), jnp.cos(y)))(1.0, 2.0)
    found, (one, _) = History(jaxpr), jaxpr.jaxpr.outvars
    assert set(found.behind(one, lambda *_: False)) == {one, jaxpr.jaxpr.invars[0]}
    assert found.made_by(one, "sin") and not found.made_by(one, "cos")
    assert list(found.behind(one, lambda eqn, _: eqn.primitive.name == "sin")) == [one], (
        "the way ends where it is told to"
    )


def test_declared_partial_sums():
    def body(x, w):
        y = mark(x @ w[: x.shape[1]], "a/dp b {U:tp}", "result")
        return y * 2.0, x

    found, (said, other) = history(body, P("dp", "tp"), P())
    assert found.declared(said, ["tp"]) and not found.declared(said, ["dp"]) and not found.declared(other, ["tp"])


def test_names_in_messages():
    assert shown_spec(P("dp", None, ("dp", "tp"))) == "P('dp', None, ('dp', 'tp'))"
    assert labels_of(None, 3, ("x", "w")) == ["input 0", "argument x", "argument w"], "constants come first"
    assert labels_of(None, 1, ("x", "w")) == ["input 0"] and AXES
