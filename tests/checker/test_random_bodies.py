"""Random bodies against the numbers of the devices, proof that a wrong rule is found so, and what was found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._state import FREE, UNREAD, Pending, State, axes_of_dim, join_dims, size_of
from spmd.checker._table import TABLE, Map
from tests.checker import random_bodies, truth
from tests.checker.harness import seen
from tests.checker.random_functions import (  # fmt: skip
    ALONG,
    ALONG_LINEAR,
    CURVED,
    CURVED_PAIRS,
    LINEAR,
    LINEAR_PAIRS,
    MATRICES,
    REDUCERS,
)
from tests.conftest import case_count
from tests.sampler import Choices, first_seed, rare, seeds


@pytest.mark.parametrize("seed", seeds(6))
def test_no_layout_is_claimed_that_the_numbers_contradict(seed: int) -> None:
    verdict = truth.judged(Choices(seed))
    assert not verdict.faults, "\n".join([verdict.text, *verdict.faults])


def test_many_values_are_compared() -> None:
    """The checker could say nothing and never be wrong."""
    verdicts = [truth.judged(Choices(first_seed() + i)) for i in range(12)]
    shares = [v.known / v.values for v in verdicts if v.values]  # of each body, because one with a loop has thousands
    assert len(shares) > 6 and np.mean(shares) > 0.25


# --- all primitives are drawn -----------------------------------------------------------------------------------

# Those that no body of a `shard_map` has: names of other versions of JAX, what belongs outside, what has no NumPy here.
ELSEWHERE = [
    "spmd_order",
    "reduce_scatter_start",
    "reduce_scatter_done",
    "copy_p",
    "pvary",
    "pbroadcast",
    "pcast",
    "preduced",
    "reduced_vary_cast",
    "reduced_vary_cast_p",
    "mesh_cast",
    "layout_constraint",
    "sharding_constraint",
    "one_minus_square",
    "polynomial",
    "eq_to",
    "lt_to",
    "le_to",
    "cumulative_sum",
    "psum",
    "psum_scatter",
    "unreduced_psum",
    "unreduced_reduce_scatter",
    "all_gather_reduced",
    "vary_unreduced_cast",
    "vary_unreduced_cast_p",
    "ragged_all_to_all",
    "pgather",
    "scatter_add",
    "scatter_sub",
    "scatter_mul",
    "scatter_min",
    "scatter_max",
    "random_clone",
    "lu_solve",
    "pallas_call",
    "device_put",
    "rng_bit_generator",
    "threefry2x32",
    "random_gamma",
    "spmd_retype",
    "geqrf",
    "tile",
    "stack",
    "copy",
    "log2",
    "split",
]


def names_of(jaxpr: Any) -> set[str]:
    found = set()
    for eqn in truth.opened(jaxpr).eqns:
        found |= {eqn.primitive.name}.union(*map(names_of, truth.parts_of(eqn)))
    return found


@rare
def test_every_entry_of_the_table_is_reached() -> None:
    """Each function and each move of the generator, once."""
    x, y = jnp.ones((4, 6)), jnp.full((4, 6), 0.5)
    found = set()
    for fns, args in (
        (CURVED + LINEAR, (x,)),
        (CURVED_PAIRS + LINEAR_PAIRS, (x, y)),
        (ALONG + ALONG_LINEAR + REDUCERS, (x,)),
        (MATRICES, (jnp.eye(6), jnp.ones((6, 4)))),
    ):
        for fn in fns:
            run = (lambda x, fn=fn: fn(x, 1)) if fns[-1] is REDUCERS[-1] else fn
            found |= names_of(jax.make_jaxpr(run)(*args))
    for draw in random_bodies.NOISE:
        found |= names_of(jax.make_jaxpr(lambda draw=draw: draw(jax.random.key(1), (3,)))())
    for call in random_bodies.CALLS:
        found |= names_of(jax.make_jaxpr(call(jnp.sin))(x))
    missing = {*TABLE, *Dataflow.rules} - found - {*ELSEWHERE}
    missing -= set() if hasattr(jax.lax, "unstack_p") else {"unstack"}  # JAX 0.10.0 has no such primitive
    rare = (random_bodies.relaid,) * 50  # most relayouts are other primitives
    for seed, move in enumerate((*random_bodies.ENCLOSED * 3, *rare, *random_bodies.ENCLOSED * 9)):
        missing -= names_of(body_with(move, seed)) if missing else set()
    assert not missing, " ".join(sorted(missing))


def body_with(move: random_bodies.Move, seed: int) -> Any:
    """A body in which this move is drawn often."""
    choices = Choices(seed)
    plan = random_bodies.drawn(choices)._replace(wrong=None, often=(move,))
    return random_bodies.traced(choices, plan, plan.mesh).jaxpr


# --- a wrong rule is found ----------------------------------------------------------------------------------------

TRUE = {name: entry.map for name, entry in TABLE.items()}


def forgets_to_permute(eqn: Any) -> Map:
    every = range(len(eqn.params["permutation"]))
    return Map([every], every)


def sums_in_silence(eqn: Any) -> Map:
    return TRUE["reduce_sum"](eqn)._replace(reduced={})


def largest_in_silence(eqn: Any) -> Map:
    return TRUE["reduce_max"](eqn)._replace(reduced={})


def contracts_in_silence(eqn: Any) -> Map:
    return TRUE["dot_general"](eqn)._replace(reduced={})


def forgets_what_is_new(eqn: Any) -> Map:
    rank = len(eqn.params["shape"])
    return Map([range(rank - len(eqn.params["broadcast_dimensions"]), rank)], range(rank))


MAPS = {
    "transpose": forgets_to_permute,
    "broadcast_in_dim": forgets_what_is_new,
    "reduce_sum": sums_in_silence,
    "reduce_max": largest_in_silence,
    "dot_general": contracts_in_silence,
}


def identity(walk: Any, eqn: Any, operands: Any) -> Any:
    return list(operands)


def scatters_elsewhere(walk: Any, eqn: Any, operands: Any) -> Any:
    """Another dimension of the result is the one that is divided."""
    [out] = SCATTERS(walk, eqn, operands)
    turned = zip(out.dims, out.dims[::-1], strict=True)
    return [out._replace(dims=tuple(((size_of(new), axes_of_dim(old)),) for new, old in turned))]


def equal_everywhere(walk: Any, eqn: Any, operands: Any) -> Any:
    return [State(number=True)]


def merges_as_one(walk: Any, eqn: Any, operands: Any) -> Any:
    """A merged dimension is called divided as a whole."""
    [out] = RESHAPES(walk, eqn, operands)
    return [out._replace(dims=tuple(((size_of(dim), axes_of_dim(dim)),) for dim in out.dims))]


SCATTERS, RESHAPES = Dataflow.rules["reduce_scatter"], Dataflow.rules["reshape"]
RULES: dict[str, Callable[..., Any]] = {
    "reduce_scatter": scatters_elsewhere,
    "ppermute": identity,
    "all_gather": identity,
    "psum_invariant": identity,
    "axis_index": equal_everywhere,
    "reshape": merges_as_one,
    "gather": identity,
}
BROKEN = [
    *((TABLE, name, TABLE[name]._replace(map=wrong)) for name, wrong in MAPS.items()),
    *((TABLE, name, TABLE[name]._replace(linear=wrong)) for name, wrong in {"sin": "passes", "mul": "sums"}.items()),
    *((Dataflow.rules, name, wrong) for name, wrong in RULES.items()),
]
# What the programs have often, so that fewer of them do.
HINTS = [(), (random_bodies.scaled,), (random_bodies.scattered,), (random_bodies.transposed,)]
MOST = 400  # programs


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one entry broken at a time; each program is traced and run once for all of them. By default one of them,
    which the seed picks; all with SPMD_TEST_CASES=40."""
    first = first_seed() % len(BROKEN)
    left = [*BROKEN[first:], *BROKEN[:first]][: 1 if case_count() < 40 else None]
    for seed in range(MOST):
        if not left:
            break
        judge = truth.Judge(Choices(seed), HINTS[seed % len(HINTS)])
        for one in left[:]:
            with monkeypatch.context() as broken:
                broken.setitem(*one)
                if found(judge):
                    left.remove(one)
    assert not left, f"not found: {[name for _, name, _ in left]}"


def found(judge: truth.Judge) -> bool:
    try:
        return bool(judge.verdict().faults)
    except (ValueError, IndexError, TypeError, AttributeError):  # a state that does not fit its value
        return True


# --- what random bodies have found ----------------------------------------------------------------------------------


def twice_derived(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda y: jax.grad(lambda z: fn(z).sum())(y).sum())


def convolved_with_itself(row: Any) -> Any:
    return lax.conv_general_dilated(row[None], row[None], (1,), "SAME")[0, 0]


def doubled_at(x: Any, data: Any) -> Any:
    """A column, which data choose, is doubled."""
    at = (jnp.abs(lax.sin(data)) * x.shape[1]).astype(jnp.int32)
    return lax.dynamic_update_slice_in_dim(x, 2.0 * lax.dynamic_slice_in_dim(x, at, 1, 1), at, 1)


RIGHT: dict[str, tuple[str, Callable[..., Any]]] = {
    "rows in another order of axes": ("n/tp/dp -> n/tp/dp", lambda x: lax.map(jnp.sin, x)),
    "rows of rows": ("a/dp b -> a/dp b", lambda x: lax.map(lambda row: lax.map(jnp.sin, row), x)),
    "rows with a loop of their own": (
        "a/dp b -> a/dp b",
        lambda x: lax.map(lambda row: lax.fori_loop(0, 2, lambda _, c: jnp.sin(c), row), x),
    ),
    "every second of a divided dimension": ("a b/dp -> a c/dp", lambda x: x[:, ::2] + x[:, 1::2]),
    "all rows by their numbers": ("a/dp b -> a/dp b", lambda x: x[jnp.arange(x.shape[0])]),
    "own block of a block by rows": (
        "a/dp b -> a/dp/tp b",
        lambda x: jnp.take(x, lax.axis_index("tp") * 2 + jnp.arange(2), axis=0, mode="clip"),
    ),
    "a loop in a function of single elements": (
        "a/dp b -> a/dp b",
        lambda x: lax.random_gamma_grad(jnp.abs(x) + 1.0, jnp.abs(x)),
    ),
    "the largest along the first dimension": (
        "a b/dp -> a b/dp",
        lambda x: lax.approx_max_k(x, x.shape[0], reduction_dimension=0)[0],
    ),
    "own block of one element": (
        "a b/dp -> a c/dp/tp",
        lambda x: jax.vmap(lambda row: jnp.take(row, lax.axis_index("tp")[None], axis=0, mode="clip"))(x[:, ::2]),
    ),
    "own block, row by row": (
        "a b/dp -> a b/dp/tp",
        lambda x: jax.vmap(lambda row: lax.dynamic_slice_in_dim(row, lax.axis_index("tp") * 2, 2))(x),
    ),
    "some elements of a partial sum, doubled": (
        "a/dp b -> b",
        lambda x: spmd.psum(x.sum(0).at[1:].multiply(2.0), "b {U:dp} -> b"),
    ),
    "constants put together": (
        "a/dp b -> a/dp b",
        lambda x: jnp.concatenate([jax.grad(lambda y: (y + y).sum())(x[:1]), jnp.full_like(x[1:], 2.0)]),
    ),
    "a derivative that is constant, row by row": (
        "a/dp -> a/dp",
        lambda x: twice_derived(lambda rows: lax.map(lambda row: row * row, rows))(x),
    ),
    "features that are convolved each by itself": (
        "a b/dp c -> a b/dp c",
        lambda x: lax.conv_general_dilated(x, x[:1].swapaxes(0, 1), (1,), "SAME", feature_group_count=x.shape[1]),
    ),
    "divided features are contracted, row by row": (
        "a b/dp c -> a c",
        lambda x: spmd.psum(jax.vmap(convolved_with_itself)(x), "a c {U:dp} -> a c"),
    ),
    "a constant beside itself": (
        "a b/dp -> a b/dp",
        lambda x: jnp.roll(twice_derived(lambda rows: lax.map(lambda row: row * row, rows))(x), 1, axis=1),
    ),
    "constants of all rows": ("a/dp b -> a/dp b", lambda x: lax.map(lambda row: jnp.full_like(row, 2.0), x)),
    "a batch of tridiagonal systems": (
        "a/dp b c -> a/dp b c",
        lambda x: lax.linalg.tridiagonal_solve(x[..., 0], x[..., 1], x[..., 2], x),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_raise_no_alarm(mesh: jax.sharding.Mesh, name: str) -> None:
    pattern, body = RIGHT[name]
    rank = len(pattern.partition("->")[0].split())
    x = jax.ShapeDtypeStruct((16, 16, 4)[:rank] if rank < 3 else (16, 4, 4), "float32")
    assert not spmd.check(spmd.kernel(pattern, mesh=mesh)(body), x)


def test_a_feature_of_its_own_may_be_a_block_of_another_dimension() -> None:
    """With one row on each device, the reshape is the identity, and JAX writes nothing."""

    def filtered(x):
        rows = x.reshape(-1, 1, x.shape[-1])
        return lax.conv_general_dilated(rows, jnp.ones((1, 1, 3)), (1,), "SAME")

    found = seen(filtered, "a b/dp/tp c", args=[np.ones((2, 8, 6), np.float32)])
    assert not found.states[0].partial and found.states[0].different == {"dp", "tp"}


def test_a_loop_keeps_the_order_of_the_axes(mesh: jax.sharding.Mesh) -> None:
    kernel = spmd.kernel("n/tp/dp -> n/dp/tp", mesh=mesh)(lambda x: lax.map(jnp.sin, x))
    [finding] = spmd.check(kernel, jax.ShapeDtypeStruct((16,), "float32"))
    assert finding.kind == "layout"


def test_what_is_scattered_into_a_constant_is_not_constant() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jnp.zeros((3, 4)).at[jnp.array([0, 2])].add(x))(jnp.ones((2, 4)))
    [state] = walk_closed(Dataflow("body", ("dp",)), jaxpr)
    assert all(axes is not FREE for dim in state.dims for _, axes in dim)


def test_what_literals_add_to_a_row_may_be_a_block_of_more_rows() -> None:
    """Made of literals only, one row here may be one of many: a sum over the rows is not claimed to be complete."""
    jaxpr = jax.make_jaxpr(lambda: jnp.zeros((1, 5)).at[:, jnp.array([0, 2])].add(jnp.ones((1, 2))))()
    [state] = walk_closed(Dataflow("body", ("dp",)), jaxpr)
    assert state.table is not None


def test_divided_factors_of_one_element_are_joined() -> None:
    one, two = ((1, ("dp",)), (2, ("tp",))), ((2, ("tp",)),)
    for a, b in ((one, two), (two, one)):
        assert size_of(join_dims(a, b)) == 2


def test_what_follows_a_mistake_told_elsewhere_is_not_compared() -> None:
    """Two equations use one partial sum in a wrong way: the second is not told, and its result is unknown."""
    eqn = jax.make_jaxpr(jnp.abs)(1.0).eqns[0]
    term, after = State(partial=frozenset({"dp"})), State(pending=frozenset({Pending(UNREAD, "dp", -1)}))
    assert truth.doubt_of(eqn, truth.Said([term], [after], False)) == truth.TOLD
    assert not truth.doubt_of(eqn, truth.Said([term], [term], False))


def test_an_exchange_does_not_say_that_a_constant_with_another_column_is_whole() -> None:
    """It is equal on all devices, and its blocks are blocks all the same."""

    @spmd.kernel("a/dp/tp b -> a/dp b/tp", mesh=spmd.make_mesh(dp=2, tp=4))
    def body(x):
        column = doubled_at(twice_derived(jnp.square)(x), lax.psum(x.sum(), ("dp", "tp")))
        return lax.all_to_all(column, "tp", 1, 0, tiled=True)

    assert not spmd.check(body, np.ones((8, 16), np.float32))


def test_other_rows_of_each_term_are_no_terms_of_a_sum() -> None:
    """Each device looks up indices of its own in its term of a table."""
    table, at = np.ones((8, 8), np.float32), np.arange(8, dtype=np.int32)
    found = seen(lambda x, i: jnp.take(x.sum(0), i, mode="clip"), "a/dp b", "n/dp", args=[table, at])
    assert not found.states[0].partial and found.states[0].different == {"dp"}


def test_numbers_of_an_agreement_have_levels() -> None:
    """All rows above zero, or none, would hide that a test of all elements looked at one block only."""
    plan = random_bodies.drawn(Choices(0))
    plan = plan._replace(args=(random_bodies.Lies((random_bodies.whole(40), random_bodies.whole(60))),))
    signs = [np.sign(random_bodies.arguments(seed, plan, moved=True)[0].mean(0)).sum() for seed in range(truth.OTHERS)]
    assert sum(abs(total) < 60 for total in signs) > truth.OFTEN
    [x] = random_bodies.arguments(0, plan)
    assert abs(x.mean(0)).max() < 1


def test_a_mistake_changes_nothing_only_if_it_gives_its_operand_in_every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of what a cumulative operation has sorted is the same on each piece as on the whole."""
    x = [np.arange(3.0), np.arange(3.0, 6.0)]
    other = [x[0], x[1][::-1]]
    run = lambda result: SimpleNamespace(held={"operand": [[x]], "result": [[result]]})
    monkeypatch.setattr(truth, "marks_of", lambda run: ["operand", "result"])

    def nothing(draws: list[list[np.ndarray]], lies: list[str]) -> bool:
        judged = SimpleNamespace(mesh=None, trace=SimpleNamespace(lies=lies))
        return truth.Judge.changes_nothing(judged, 1, [run(result) for result in draws])

    assert nothing([x, x], ["a/dp", "a/dp"])
    assert not nothing([x, other], ["a/dp", "a/dp"])
    assert not nothing([x, x], ["a/dp", "a"])
