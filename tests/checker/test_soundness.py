"""The pass against the truth: what it calls equal, constant, divided or a partial sum is that when it is run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd._jaxprs.facts import CallName, Gather
from spmd.checker import check_jaxpr, explain_output
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._state import FREE, HIDDEN, Dim, State, free, plain
from spmd.checker._table import TABLE, Map
from spmd.errors import Fix, ReplicationError
from tests.checker import wrong_programs
from tests.checker.harness import AXES, check, mark, mesh, shards, trace, varying, whole
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


# --- layouts: programs that are right by construction -----------------------------------------------------------

N = 16


class Lies(NamedTuple):
    """How a matrix of N by N really lies: the axes of each dimension, or None where it is nested, and partial sums."""

    dims: tuple[tuple[str, ...] | None, ...]
    partial: frozenset[str] = frozenset()

    @property
    def held(self) -> list[str]:
        return [*self.partial, *(axis for axes in self.dims for axis in (AXES if axes is None else axes))]

    def put(self, d: int, axes: tuple[str, ...] | None, partial: frozenset[str] | None = None) -> Lies:
        dims = (*self.dims[:d], axes, *self.dims[d + 1 :])
        return Lies(dims, self.partial if partial is None else partial)


def some(rng: Any, lies: Lies, wanted: Callable[[Any], bool]) -> int | None:
    """A dimension that is as wanted."""
    return rng.choice([d for d, axes in enumerate(lies.dims) if axes is not None and wanted(axes)] or [None])


def wide(v: Any, d: int) -> Any:
    """A dimension of one element, N times."""
    return jnp.broadcast_to(v, (*v.shape[:d], N, *v.shape[d + 1 :]))


LINEAR_STEPS = [
    lambda v: -2.0 * v,
    lambda v: v / 3.0 + jnp.zeros_like(v),
    lambda v: jnp.where(jnp.zeros((1, 1), bool), 0.0, v),
    jax.jit(lambda v: v - 3.0 * v),
    jax.vmap(lambda row: row * 2.0),
]
CURVED_STEPS = [
    jnp.tanh,
    jax.checkpoint(jnp.cos),
    jax.grad(lambda u: jnp.sin(u).sum()),
    lambda v: jnp.where(v > 0, v, 0.1),
    lambda v: jnp.tanh(v.reshape(-1)).reshape(v.shape),
    lambda v: lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, v)[1],
    lambda v: lax.fori_loop(0, 2, lambda _, c: jnp.sin(c), v),
]
ALONG_STEPS = [
    lambda v, d: jnp.flip(v, d),
    lambda v, d: jnp.cumsum(v, d) / N,
    lambda v, d: jnp.roll(v, 3, d),
    lambda v, d: jnp.take(v, jnp.arange(N)[::-1], axis=d),
    lambda v, d: jnp.fft.fft(v, axis=d).real / N,
    lambda v, d: lax.slice_in_dim(jnp.concatenate([v, 2.0 * v], d), N // 2, N // 2 + N, axis=d),
]


def elementwise(rng, v, lies, pool):
    return rng.choice(LINEAR_STEPS if lies.partial else LINEAR_STEPS + CURVED_STEPS)(v), lies


def transposed(rng, v, lies, pool):
    return v.T, Lies(lies.dims[::-1], lies.partial)


def along_a_whole_dimension(rng, v, lies, pool):
    d, step = some(rng, lies, lambda axes: not axes), rng.choice(ALONG_STEPS)
    return None if d is None else (step(v, d), lies)


def summed(rng, v, lies, pool):
    d = some(rng, lies, lambda axes: True)
    return (
        None if d is None else (wide(v.sum(d, keepdims=True), d) / N, lies.put(d, (), lies.partial | {*lies.dims[d]}))
    )


def completed(rng, v, lies, pool):
    axes = tuple(a for a in AXES if a in lies.partial)
    return (lax.psum(v, axes), Lies(lies.dims)) if axes else None


def scattered(rng, v, lies, pool):
    d = some(rng, lies, lambda axes: True)
    if d is None or not lies.partial:
        return None
    axis = rng.choice(sorted(lies.partial))
    out = lax.psum_scatter(v, axis, scatter_dimension=d, tiled=True)
    return out, lies.put(d, (*lies.dims[d], axis), lies.partial - {axis})


def gathered(rng, v, lies, pool):
    d, all_of_them = some(rng, lies, bool), rng.random() < 0.5
    if d is None:
        return None
    axes = lies.dims[d] if all_of_them else lies.dims[d][-1:]
    return lax.all_gather(v, axes, axis=d, tiled=True), lies.put(d, lies.dims[d][: -len(axes)])


def exchanged(rng, v, lies, pool):
    d = some(rng, lies, bool)
    if d is None or lies.dims[1 - d] is None:
        return None
    axis = lies.dims[d][-1]
    out = lax.all_to_all(v, axis, 1 - d, d, tiled=True)
    return out, lies.put(d, lies.dims[d][:-1]).put(1 - d, (*lies.dims[1 - d], axis))


def own_block(rng, v, lies, pool):
    axes, d = [a for a in AXES if a not in lies.held], some(rng, lies, lambda axes: True)
    if not axes or d is None:
        return None
    axis = rng.choice(axes)
    n = v.shape[d] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(v, lax.axis_index(axis) * n, n, d), lies.put(d, (*lies.dims[d], axis))


def softmaxed(rng, v, lies, pool):
    d = some(rng, lies, lambda axes: True)
    if d is None or lies.partial:
        return None
    axes = lies.dims[d]
    top, total = v.max(d, keepdims=True), lambda e: e.sum(d, keepdims=True)
    e = jnp.exp(v - (lax.pmax(top, axes) if axes else top))
    return e / (lax.psum(total(e), axes) if axes else total(e)), lies


def averaged(rng, v, lies, pool):
    d = some(rng, lies, lambda axes: True)
    if d is None or lies.partial:
        return None
    mean = v.mean(d, keepdims=True)
    return wide(lax.pmean(mean, lies.dims[d]) if lies.dims[d] else mean, d), lies.put(d, ())


def placed(rng, v, lies, pool):
    """Positions in the whole array."""
    d = some(rng, lies, lambda axes: True)
    if d is None or lies.partial:
        return None
    n, axes = v.shape[d], lies.dims[d]
    positions = jnp.arange(n) + (n * lax.axis_index(axes) if axes else 0)
    return v + jnp.expand_dims(0.1 * positions.astype(jnp.float32), 1 - d), lies


def decided(rng, v, lies, pool):
    axes = tuple(a for a in AXES if a in lies.held)
    if lies.partial or None in lies.dims:
        return None
    total = lax.psum(v.sum(), axes) if axes else v.sum()
    return lax.cond(total > 0, lambda v: v + 1.0, lambda v: 0.5 * v, v), lies


def carried(rng, v, lies, pool):
    """A sum over the rows, row by row."""
    axes = lies.dims[0]
    if axes is None or lies.partial:
        return None
    total = lax.scan(lambda c, row: (c + row, None), varying(jnp.zeros(v.shape[1:])), v)[0]
    return wide((lax.psum(total, axes) if axes else total)[None], 0) / N, lies.put(0, ())


def nested(rng, v, lies, pool):
    """Every second row first: the blocks of the rows are within the two halves."""
    rows, columns = v.shape
    out = v.reshape(rows // 2, 2, columns).swapaxes(0, 1).reshape(rows, columns)
    return None if lies.dims[0] is None else (out, lies.put(0, None if lies.dims[0] else ()))


def combined(rng, v, lies, pool):
    others = [u for u, other in pool if other == lies and None not in lies.dims]
    fn = rng.choice([jnp.add, jnp.subtract] if lies.partial else [jnp.add, jnp.multiply])
    return (fn(v, rng.choice(others)), lies) if others else None


def multiplied(rng, v, lies, pool):
    def fits(other: Lies) -> bool:
        if None in (*lies.dims, *other.dims) or lies.dims[1] != other.dims[1]:
            return False
        held = [*lies.held, *other.dims[0], *other.partial]
        return len(held) == len(set(held))

    others = [(u, other) for u, other in pool if fits(other)]
    if not others:
        return None
    u, other = rng.choice(others)
    partial = lies.partial | other.partial | {*lies.dims[1]}
    return v @ u.T / N, Lies((lies.dims[0], other.dims[0]), partial)


MOVES = [
    elementwise, transposed, along_a_whole_dimension, summed, completed, scattered, gathered, exchanged, own_block,
    softmaxed, averaged, placed, decided, carried, nested, combined, multiplied,
]  # fmt: skip


def right_body(seed: Any, lies_of: list[Lies]) -> Any:
    """A chain of steps that means the same on every mesh. How each result lies goes into `lies_of`."""

    def body(x, w):
        rng = dice(seed)
        pool = [(varying(x), Lies((("dp",), ("tp",)))), (varying(w), Lies(((), ())))]
        for _ in range(LENGTH):
            v, lies = pool[-1] if rng.random() < 0.5 else rng.choice(pool)
            done = rng.choice(MOVES)(rng, v, lies, pool)
            if done is not None:
                pool.append((varying(done[0]), done[1]))
        lies_of[:] = [lies for _, lies in pool]
        return [v for v, _ in pool]

    return body


LENGTH = 16
ARGS = tuple(np.random.default_rng(1).normal(size=(2, N, N)).astype(np.float32))


@functools.cache
def ran(seed: Any) -> tuple[Any, list[np.ndarray], list[np.ndarray], list[Lies]]:
    """A program's jaxpr, what the devices hold, what one device holds, and how the results lie."""
    lies: list[Lies] = []
    body = right_body(seed, lies)
    stacked = lambda x, w: [v[None, None] for v in body(x, w)]
    specs = {"in_specs": (P("dp", "tp"), P()), "out_specs": P("dp", "tp")}
    jaxpr = jax.jit(jax.shard_map(stacked, mesh=mesh(), **specs)).trace(*ARGS).jaxpr
    alone = [v[0, 0] for v in shards(body, m=mesh(1, 1), args=ARGS)]
    return jaxpr, shards(body, m=mesh(), args=ARGS), alone, lies


class Inside(Dataflow):
    """Without what a body returns: here partial sums leave it, and each device's result is a row of an output."""

    def _check_returned(self, eqn: Any, outs: Any) -> None:
        pass


def same(together: np.ndarray, alone: np.ndarray) -> bool:
    return np.allclose(np.broadcast_to(together, alone.shape), alone, rtol=1e-3, atol=1e-4)


def contradictions(seed: Any) -> tuple[list[str], int]:
    """What the numbers of a right program say against its states, and how many results are known."""
    jaxpr, held, alone, lies = ran(seed)
    walk = Inside("kernel", AXES)
    walk_closed(walk, jaxpr)
    wrong = [f"{seed}: {finding}" for finding in walk.findings]
    known = 0
    for i, (state, v, one, how) in enumerate(zip(walk.outputs[-1][1], held, alone, lies, strict=True)):
        dims = state.dims[2:]
        unknown = any(axes is HIDDEN for dim in dims for _, axes in dim)
        if state.pending or state.different or unknown:
            continue
        known += 1
        try:
            agrees = same(whole(v, dims, state.partial), one)
        except (AssertionError, ValueError):
            agrees = False
        if not agrees:
            wrong.append(f"{seed}: result {i} lies as {how}, and not as {dims} {set(state.partial)}")
    return wrong, known


def test_layouts_are_what_the_numbers_say_and_right_programs_raise_no_alarm() -> None:
    known = total = 0
    for seed in seeds():
        wrong, count = contradictions(seed)
        assert not wrong, "\n".join(wrong)
        known, total = known + count, total + len(ran(seed)[3])
    assert known > 0.6 * total  # most of them are known


def test_the_programs_are_right() -> None:
    """The numbers on the mesh, put together as the steps say, are those of one device."""
    for seed in seeds():
        _, held, alone, lies = ran(seed)
        for v, one, how in zip(held, alone, lies, strict=True):
            if None not in how.dims:
                dims = [((n, axes),) for n, axes in zip(v.shape[2:], how.dims, strict=True)]
                assert same(whole(v, dims, how.partial), one), (seed, how)


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


def forgets_to_permute(eqn: Any) -> Map:
    every = range(len(eqn.params["permutation"]))
    return Map([every], every)


def forgets_what_it_sums(eqn: Any) -> Map:
    return TABLE["reduce_max"].map(eqn)._replace(reduced={})


def forgets_the_contraction(eqn: Any) -> Map:
    return TRUE_DOT(eqn)._replace(reduced={})


def forgets_what_is_new(eqn: Any) -> Map:
    rank = len(eqn.params["shape"])
    return Map([range(rank - len(eqn.params["broadcast_dimensions"]), rank)], range(rank))


TRUE_DOT = TABLE["dot_general"].map
FORGOTTEN = {
    "transpose": forgets_to_permute,
    "reduce_sum": forgets_what_it_sums,
    "dot_general": forgets_the_contraction,
    "broadcast_in_dim": forgets_what_is_new,
}


@pytest.mark.parametrize("name", share(FORGOTTEN))
def test_numbers_notice_a_wrong_map(monkeypatch: pytest.MonkeyPatch, name) -> None:
    monkeypatch.setitem(TABLE, name, TABLE[name]._replace(map=FORGOTTEN[name]))
    assert any(contradictions(seed)[0] for seed in range(6))


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
