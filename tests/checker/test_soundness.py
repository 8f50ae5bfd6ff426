"""The pass against the truth: what it calls equal or constant is that when it is run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd._jaxprs.facts import CallName, Gather
from spmd.checker import check_jaxpr, explain_output
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._state import FREE, Dim, State, free, plain
from spmd.checker._table import TABLE
from spmd.errors import Fix, ReplicationError
from tests.checker import wrong_programs
from tests.checker.harness import AXES, check, mark, mesh, trace, varying
from tests.checker.test_correct_programs import PROGRAMS, gathered_softmax, polluted_carry, shifted_equal
from tests.sampler import dice, seeds, share

# --- equal and different --------------------------------------------------------------------------------------

STEPS = [
    lambda v, w, a: varying(lax.psum(v, a)),
    lambda v, w, a: varying(lax.pmax(v, a)),
    lambda v, w, a: varying(lax.all_gather(v, a, axis=0, tiled=True)[:4]),
    lambda v, w, a: lax.psum_scatter(jnp.tile(v, (4, 1)), a, tiled=True)[:2].repeat(2, 0),
    lambda v, w, a: lax.all_to_all(v, a, 0, 1, tiled=True).reshape(4, 4),
    lambda v, w, a: lax.ppermute(v, a, [(i, (i + 1) % lax.axis_size(a)) for i in range(lax.axis_size(a))]),
    lambda v, w, a: lax.ppermute(v, a, [(0, 1)]),
    lambda v, w, a: v * lax.axis_index(a).astype(jnp.float32),
    lambda v, w, a: jnp.tanh(v) @ w,
    lambda v, w, a: v.T + 1.0,
    lambda v, w, a: lax.scan(lambda c, r: (c + r, c), v, w[None] * 0.1)[0],
    lambda v, w, a: lax.scan(lambda c, _: (w, c), v, None, length=2)[0],
    lambda v, w, a: lax.cond(v.sum() > 0, lambda x: x + 1.0, lambda x: x - 1.0, w),
    lambda v, w, a: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + w), (varying(0), v))[1],
    lambda v, w, a: lax.fori_loop(0, 2, lambda _, c: (c[1], c[0]), (v, w))[0],
    lambda v, w, a: jnp.where(v > 0, w, 0.0),
    lambda v, w, a: jax.checkpoint(jnp.sin)(v),
    lambda v, w, a: jax.vmap(lambda r: r[::-1])(v),
    lambda v, w, a: jax.grad(lambda u: (u * u).sum())(v),
    lambda v, w, a: jax.nn.relu(v) + jnp.sort(w, axis=0),
    lambda v, w, a: jnp.cumsum(v, 0) @ jnp.ones((4, 4)),
]


def random_body(seed: Any):
    """A chain of steps on two values, one divided and one equal."""
    rng = dice(seed)
    plan = [(rng.choice(STEPS), rng.choice(AXES), rng.random()) for _ in range(rng.randint(2, 7))]

    def body(x, w):
        values = [varying(x), varying(w)]
        for step, axis, pick in plan:
            first = values[int(pick * len(values))]
            second = values[int(pick * 7919) % len(values)]
            values.append(step(first, second, axis))
        return values[2:]

    return body


def called_equal(seed: Any) -> int:
    """How many of a random body's results are called equal along an axis; each of them must be."""
    m, body, equal = mesh(), random_body(seed), 0
    stacked = lambda x, w: jax.tree.map(lambda v: v[None, None], body(x, w))
    run = jax.jit(jax.shard_map(stacked, mesh=m, in_specs=(P("dp", "tp"), P()), out_specs=P("dp", "tp")))
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 16), (4, 4)]))
    facts = explain_output(run.trace(x, w).jaxpr, mesh_axes=AXES)
    for fact, value in zip(facts, run(x, w), strict=True):
        value = np.asarray(value)
        for position, axis in enumerate(AXES):
            if axis not in fact.different:
                equal += 1
                first = np.broadcast_to(np.take(value, [0], axis=position), value.shape)
                np.testing.assert_allclose(value, first, rtol=1e-4, err_msg=f"{seed} {axis}")
    return equal


def test_a_gather_of_one_mistake_does_not_complete_another() -> None:
    """A sum over dp of what a mistake was told of, times another such value."""
    assert called_equal(783)


def test_what_is_called_equal_is_equal() -> None:
    tried = seeds(times=4)
    assert sum(map(called_equal, tried)) > len(tried) // 4  # the programs are not all trivially different


# --- constant dims --------------------------------------------------------------------------------------------

SHAPE = (4, 1, 6)
OPERATIONS = [
    lambda x: x.T,
    lambda x: jnp.transpose(x, (2, 0, 1)),
    lambda x: x[:, 0],
    lambda x: x[1:3, :, ::2],
    lambda x: x[:, None],
    lambda x: x.reshape(4, 6),
    lambda x: x.reshape(24),
    lambda x: x.reshape(2, 2, 6),
    lambda x: x.reshape(4, 2, 3),
    lambda x: x.reshape(8, 3),
    lambda x: x.reshape(1, 2, 1, 2, 6, 1),
    lambda x: jnp.broadcast_to(x, (4, 5, 6)),
    lambda x: jnp.broadcast_to(x[0, 0], (3, 6)),
    lambda x: x.sum(0),
    lambda x: x.max((1, 2)),
    lambda x: jnp.argmax(x, axis=2),
    lambda x: x.mean(axis=0, keepdims=True) * x,
    lambda x: jnp.cumsum(x, 2),
    lambda x: jnp.sort(x, 0),
    lambda x: lax.top_k(x, 2)[0],
    lambda x: jnp.concatenate([x, x * 2], 0),
    lambda x: jnp.concatenate([x, x], 2),
    lambda x: jnp.pad(x, ((0, 1), (0, 0), (0, 0))),
    lambda x: jnp.einsum("abc,dbc->adb", x, x * 2.0),
    lambda x: jnp.einsum("abc,abd->acd", x, jnp.ones(SHAPE)),
    lambda x: jnp.where(x > 0, x, jnp.float32(0)),
    lambda x: x + lax.broadcasted_iota(jnp.float32, SHAPE, 2),
    lambda x: x * jnp.full(SHAPE, 2.0),
    lambda x: lax.dynamic_update_slice(x, x[:2] * 3.0, (1, 0, 0)),
    lambda x: lax.dynamic_update_slice(x, x * 3.0, (0, 0, 0)),
    lambda x: lax.dynamic_slice(x, (1, 0, 2), (2, 1, 3)),
    lambda x: x[jnp.array([3, 0])],
    lambda x: x.at[1].set(5.0),
    lambda x: x.at[1].add(x[0]),
    lambda x: lax.scan(lambda c, r: (c + 1.0, r * c), jnp.float32(1), x)[1],
    lambda x: lax.scan(lambda c, r: (c, r * 2.0), jnp.float32(1), x)[1],
    lambda x: lax.rev(x, (2,)),
    lambda x: jnp.tile(x, (1, 2, 1)),
    lambda x: jnp.repeat(x, 2, axis=2),
    lambda x: jax.nn.softmax(x, axis=2),
    lambda x: lax.conv_general_dilated(x, jnp.ones((2, 1, 3)), (1,), "SAME"),
    lambda x: jax.vmap(jnp.cumsum)(x),
    lambda x: jnp.fft.fft(x, axis=2).real,
    lambda x: lax.cummax(x, 2),
    lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 3), (1, 1, 1), "SAME"),
    lambda x: jnp.zeros_like(x),
    lambda x: x * 0.0,
]


def is_free(dim: Dim) -> bool:
    return all(axes is FREE for _, axes in dim)


@pytest.mark.parametrize("known", share(range(8)))
def test_what_is_called_constant_is_constant(known: int) -> None:
    """Every operation, on an array that is constant along the dims in the mask `known`."""
    rng = np.random.default_rng(known)
    constant = [bool(known >> d & 1) for d in range(len(SHAPE))]
    x = np.broadcast_to(rng.normal(size=[1 if c else n for c, n in zip(constant, SHAPE, strict=True)]), SHAPE)
    x = jnp.asarray(x, jnp.float32)
    start = State(tuple(free(n) if c else plain(n) for c, n in zip(constant, SHAPE, strict=True)))
    for operation in OPERATIONS:
        jaxpr = jax.make_jaxpr(operation)(x)
        [state] = walk_closed(Dataflow("k", AXES), jaxpr, [start])
        value = np.asarray(operation(x)).reshape([n for dim in state.dims for n, _ in dim])
        for i, axes in enumerate(axes for dim in state.dims for _, axes in dim):
            if axes is FREE:
                np.testing.assert_array_equal(value, np.broadcast_to(value.take([0], i), value.shape), str(jaxpr))


def test_constants_are_recognised() -> None:
    """The rules are not empty: what users write to make constants is known as such."""
    makers = [
        lambda x: jnp.zeros((3, 4)) + 1.0,
        lambda x: jnp.broadcast_to(x.sum(), (3, 4)).reshape(12).astype(jnp.bfloat16),
        lambda x: jnp.tile(jnp.ones((2,)), 3)[None],
        lambda x: jnp.where(x.sum() > 0, jnp.zeros((3,)), 1.0),
        lambda x: jnp.asarray(np.full((3, 4), 7.0)),
        lambda x: jnp.full((2, 2), jnp.pi).T @ jnp.ones((2, 2)),
    ]
    for maker in makers:
        jaxpr = jax.make_jaxpr(maker)(jnp.ones(3))
        [state] = walk_closed(Dataflow("k", AXES), jaxpr)
        assert all(map(is_free, state.dims)), jaxpr


# --- the tests of the pass can fail ---------------------------------------------------------------------------


def unknown(walk, eqn, operands):
    return walk.unknown(eqn, operands)


def identity(walk, eqn, operands):
    return list(operands)


BREAKS = [
    ("psum", ("psum", "psum_invariant"), unknown),
    ("all_gather", ("all_gather", "all_gather_invariant"), unknown),
    ("ppermute", ("ppermute",), identity),
    ("scan", ("scan",), unknown),
    ("layouts", ("spmd_layout",), identity),
    ("axis_index", ("axis_index",), lambda walk, eqn, operands: [State()]),
    ("cond", ("cond",), unknown),
]


def wrong_ones() -> list[Any]:
    found = [f for n, f in vars(wrong_programs).items() if callable(f) and n != "helper"]
    return [f for f in found if getattr(f, "__module__", "") == wrong_programs.__name__]


def alarm(program: Any) -> bool:
    try:
        check(program)
    except ReplicationError:
        return True
    return False


@pytest.mark.parametrize("names, broken", share([b[1:] for b in BREAKS]), ids=share([b[0] for b in BREAKS]))
def test_a_broken_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, names, broken) -> None:
    """With one rule broken, some correct program raises an alarm or some wrong one does not."""
    for name in names:
        monkeypatch.setitem(Dataflow.rules, name, broken)
    assert any(map(alarm, PROGRAMS)) or not all(map(alarm, wrong_ones()))


@pytest.mark.parametrize(
    "names, linear", share([(("exp",), "passes"), (("add", "add_any"), "passes"), (("div",), "product")])
)
def test_a_primitive_that_is_called_linear_is_noticed(monkeypatch: pytest.MonkeyPatch, names, linear) -> None:
    for name in names:
        monkeypatch.setitem(TABLE, name, TABLE[name]._replace(linear=linear))
    assert any(map(alarm, PROGRAMS)) or not all(map(alarm, wrong_ones()))


# --- explaining outputs ---------------------------------------------------------------------------------------


def test_explain_output_names_the_gathers() -> None:
    facts = explain_output(trace(gathered_softmax, out=P("dp", "tp")), mesh_axes=AXES, arg_names=("x", "w"))
    assert [f.different for f in facts] == [("dp",)]
    assert facts[0].reasons["dp"] == ("made from argument x, which is divided by P('dp', 'tp')",)
    [line] = facts[0].copies["tp"]
    assert "test_correct_programs.py:" in line and "gathered_softmax" in line
    assert "dp" not in facts[0].copies
    assert facts[0].calls == {"tp": (None,)}  # a raw one


def test_explain_output_gives_the_line_to_paste() -> None:
    known = Gather(again=Fix("all_gather", ("x",), "a/dp b/tp -> a/dp b", {"to": "invarying"}))

    def body(x, w):
        with jax.named_scope(CallName('all_gather(x, "a/dp b/tp -> a/dp b")', gather=known)):
            y = lax.all_gather(x, "tp", axis=1, tiled=True)
        return y * 2.0, x, polluted_carry(x, w)[0][None], shifted_equal(x, w)[:1]

    facts = explain_output(trace(body, out=P(AXES)), mesh_axes=AXES)
    assert facts[0].calls == {"tp": (known,)}
    assert facts[1].different == AXES and facts[1].copies == {}
    assert "divided by P('dp', 'tp')" in facts[1].reasons["tp"][0]
    assert facts[2].different == () and facts[3].different == ()
    assert facts[3].copies == {}


def test_explain_output_does_not_believe_the_layouts() -> None:
    def body(x, w):
        full = lax.all_gather(x, "tp", axis=1, tiled=True)
        return mark(x[:, :1], "a b", "output"), mark(full, "a b", "output")

    first, second = explain_output(trace(body, out=P(AXES)), mesh_axes=AXES)
    assert first.different == AXES and first.copies == {}
    assert second.different == ("dp",) and list(second.copies) == ["tp"]


def test_a_jaxpr_without_a_body_says_nothing() -> None:
    jaxpr = jax.make_jaxpr(lambda x: x * 2.0)(1.0)
    check_jaxpr(jaxpr, mesh_axes=AXES, kernel="kernel")
    assert explain_output(jaxpr, mesh_axes=AXES) == []
