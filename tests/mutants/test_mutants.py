"""A seeded sample of mutants; and proof that a change is what a user would have written, there and nowhere else."""

import functools
import math
import random
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd.testing import Mismatch, assert_same_on_any_mesh
from tests import layers
from tests.checker.harness import varying
from tests.mutants import changes
from tests.mutants.judge import UNKNOWN, Verdict, judge, mutants, other_mesh, run, said
from tests.mutants.programs import FAMILIES, Program, of_layer, programs
from tests.mutants.sites import Mutant, Place, changed, mutants_of
from tests.mutants.table import Tally
from tests.mutants.verdicts import TABLES, is_listed, line_of, names, read, tables, verdict_of
from tests.sampler import rare, seeds

KEPT = read()
MESH: dict[str, Any] = {"a": 2, "b": 4}
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


# -------------------- what is not changed


@pytest.mark.parametrize("seed", seeds())
@rare
def test_no_layer_raises_an_alarm(seed: int) -> None:
    """Its value and its gradient, with the scales."""
    dice = random.Random(seed)
    layers.register_all()
    make, _ = layers.CASES[dice.choice(sorted(layers.CASES))]
    program = of_layer(dice.choice([*make()]))
    assert not said(program), program.name


# -------------------- the sample


@functools.cache
def of_family(name: str) -> list[Program]:
    return programs(name)


def drawn(dice: random.Random, family: str) -> tuple[Program, Mutant]:
    """One mutant of one program of a family."""
    candidates = of_family(family)
    program, every = next((p, found) for p in dice.sample(candidates, len(candidates)) if (found := mutants(p)))
    return program, dice.choice(every)


@pytest.mark.parametrize("seed", seeds())
def test_the_verdicts_that_are_kept_are_true(seed: int) -> None:
    """After a change for the better: `python -m tests.mutants --types --write`."""
    dice = random.Random(seed)
    program, mutant = drawn(dice, dice.choice([name for name in FAMILIES if name != "example"]))
    [verdict] = judge(program, [mutant])
    named, kept = names(mutants(program)), KEPT.get(program.name, {})
    assert is_listed(verdict) == (named[mutant] in kept), verdict
    if is_listed(verdict):
        assert line_of(verdict) == line_of(kept[named[mutant]])
    assert set(kept) <= set(named.values())


def test_the_page_says_how_many_are_missed() -> None:
    every = [one for kept in KEPT.values() for one in kept.values()]
    wrong = [one for one in every if one.wrong]
    changes, differ, rejected, shown, alarms = (
        int(number.replace(",", "")) for number in re.findall(r"(?<![(.])\b([\d,]+)\b(?![.%])", TABLES.read())[:5]
    )
    assert changes - differ == len(every) - len(wrong)
    assert differ - rejected == sum(not one.by_types for one in wrong)
    assert differ - shown == sum(not one.by_numbers for one in wrong)
    assert alarms == len(Tally(every).alarms)


def test_a_verdict_is_kept_as_it_is() -> None:
    """Written and read again, it counts as before."""
    mutant = Mutant.named("tests/mutants/test_mutants.py (two.<locals>.<lambda>) psum: dropped")
    assert mutant.name == "tests/mutants/test_mutants.py (two.<locals>.<lambda>) psum: dropped"
    verdicts = [
        Verdict("layer one", mutant, rejected="ValueError: no", by_jax=True),
        Verdict("layer one", mutant, rejected="LayoutError: no"),
        Verdict("layer one", mutant, moved=9.0, types="partial, scale: psum(x)", numbers="{'a': 1}: 9"),
        Verdict("layer one", mutant, moved=9.0, types="x: f32[2] is not", numbers=UNKNOWN),
        Verdict("layer one", mutant, moved=0.1),
        Verdict("layer one", mutant, types="divergent: ..."),
    ]
    for one in verdicts:
        again = verdict_of("layer one", line_of(one))
        assert line_of(again) == line_of(one)
        for fact in ("wrong", "waits", "by_jax", "by_types", "by_numbers"):
            assert getattr(again, fact) == getattr(one, fact), fact


@pytest.mark.parametrize("seed", seeds(1))
def test_the_assertion_that_users_have_notices_too(seed: int) -> None:
    """`assert_same_on_any_mesh` runs meshes of its own; here numbers are compared in a quicker way."""
    program, mutant = drawn(random.Random(seed), "twin")
    [verdict] = judge(program, [mutant])
    compare = functools.partial(assert_same_on_any_mesh, program.build, *program.args, grad=False)
    mesh = spmd.make_mesh(**dict[str, Any](program.mesh))
    if other_mesh(program, run(program, program.mesh)) is None:  # it means something else on others, and this it says
        with pytest.raises(Mismatch):
            compare(mesh=mesh)
        return
    compare(mesh=mesh)
    if verdict.wrong:
        with changed(mutant), pytest.raises(Exception):  # noqa: B017, PT011  JAX has many types of errors
            compare(mesh=mesh)


# -------------------- a change is what a user would have written


def stacked(body, spec=P(("a", "b"))):
    """The results of all devices, one after another."""

    def one(x):
        y = body(x)
        return varying(jnp.asarray(y)[None], "a", "b")

    return jax.jit(jax.shard_map(one, mesh=spmd.make_mesh(**MESH), in_specs=spec, out_specs=P(("a", "b"))))


def block(x, axis, dim):
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
# A collective, how it is changed, and the same by hand; each device has two rows of eight.
BY_HAND = {
    "sum": (lambda x: lax.psum(x, "b"), "psum", "dropped", lambda x: x),
    "mean": (lambda x: lax.psum(x, "b"), "psum", "mean for sum", lambda x: lax.pmean(x, "b")),
    "max": (lambda x: lax.psum(x, "b"), "psum", "max for sum", lambda x: lax.pmax(x, "b")),
    "mean back": (lambda x: lax.pmean(x, "b"), "pmean", "sum for mean", lambda x: lax.psum(x, "b")),
    "max back": (lambda x: lax.pmax(x, "b"), "pmax", "sum for max", lambda x: lax.psum(x, "b")),
    "own minimum": (lambda x: lax.pmin(x, "b"), "pmin", "dropped", lambda x: x),
    "tiles": (
        lambda x: lax.all_gather(x, "b", axis=1, tiled=True),
        "all_gather",
        "dropped",
        lambda x: jnp.tile(x, (1, 4)),
    ),
    "stack": (lambda x: lax.all_gather(x, "b"), "all_gather", "dropped", lambda x: jnp.stack([x] * 4)),
    "order": (
        lambda x: lax.all_gather(x, ("a", "b"), tiled=True),
        "all_gather",
        "axes in another order",
        lambda x: lax.all_gather(x, ("b", "a"), tiled=True),
    ),
    "own block": (
        lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True),
        "psum_scatter",
        "dropped",
        lambda x: block(x, "b", 1),
    ),
    "scattered mean": (
        lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True),
        "psum_scatter",
        "mean for sum",
        lambda x: block(lax.pmean(x, "b"), "b", 1),
    ),
    "in place": (
        lambda x: lax.all_to_all(x, "b", 1, 0, tiled=True),
        "all_to_all",
        "dropped",
        lambda x: jnp.concatenate([x[:, i : i + 2] for i in range(0, 8, 2)], 0),
    ),
    "in place, not tiled": (
        lambda x: lax.all_to_all(x.reshape(2, 4, 2), "b", 1, 0),
        "all_to_all",
        "dropped",
        lambda x: x.reshape(2, 4, 2).transpose(1, 0, 2),
    ),
    "swapped": (
        lambda x: lax.all_to_all(x.reshape(4, 4), "b", 1, 0, tiled=True),
        "all_to_all",
        "split and concat swapped",
        lambda x: lax.all_to_all(x.reshape(4, 4), "b", 0, 1, tiled=True),
    ),
    "stays": (lambda x: lax.ppermute(x, "b", RING), "ppermute", "dropped", lambda x: x),
    "backward": (
        lambda x: lax.ppermute(x, "b", RING),
        "ppermute",
        "permutation reversed",
        lambda x: lax.ppermute(x, "b", [(j, i) for i, j in RING]),
    ),
    "nowhere": (lambda x: x * lax.axis_index("b"), "axis_index", "index zeroed", lambda x: x * 0),
}


def the_mutant(fn, *args, collective, change):
    found = mutants_of(lambda: jax.jit(fn()).trace(*args))
    [one] = [one for one in found if (one.collective, one.change) == (collective, change)]
    return one


@pytest.mark.parametrize("name", BY_HAND)
def test_a_change_of_a_raw_collective(name) -> None:
    body, collective, change, by_hand = BY_HAND[name]
    with jax.numpy_dtype_promotion("standard"):
        mutant = the_mutant(lambda: stacked(body), X, collective=collective, change=change)
        with changed(mutant) as met:
            found = jax.jit(stacked(body))(X)
        wanted, right = stacked(by_hand)(X), stacked(body)(X)
    assert len(met) == 1
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert found.shape != right.shape or not np.allclose(found, right)


def test_every_change_is_tried() -> None:
    tried = {(collective, change) for _, collective, change, _ in BY_HAND.values()}
    there = {(collective, change) for collective, every in changes.CHANGES.items() for change in every}
    same = {  # the same code as one that is tried
        ("pmean", "dropped"),
        ("pmax", "dropped"),
        ("pmin", "sum for min"),
        ("psum_scatter", "axes in another order"),
        ("all_to_all", "axes in another order"),
        ("axis_index", "axes in another order"),
    }
    assert tried | same == there and not tried & same


W = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)


def product(how):
    mesh = spmd.make_mesh(**MESH)
    body = {
        "verb": lambda x, w: jnp.tanh(spmd.einsum(x, w, "m/a k/b, k/b n -> m/a n")),
        "by hand": lambda x, w: jnp.tanh(x @ w),
        "not at all": lambda x, w: jnp.tanh(lax.psum(x @ w, "b")),
    }[how]
    specs = (P("a", "b"), P("b"))
    made = jax.shard_map(lambda x, w: varying(body(x, w)[None], "b"), mesh=mesh, in_specs=specs, out_specs=P("b", "a"))
    return lambda x, w: jax.value_and_grad(lambda x, w: (made(x, w) ** 2).sum(), (0, 1))(x, w)


def test_a_verb_is_taken_apart() -> None:
    """It leaves no marker and no name, and its gradient is that of the code by hand."""
    mutant = the_mutant(lambda: product("verb"), X, W, collective="psum", change="dropped")
    with changed(mutant) as met:
        traced = jax.jit(product("verb")).trace(X, W)
    assert len(met) == 1
    for text in ("spmd_", "einsum"):
        assert text in str(jax.jit(product("verb")).trace(X, W).jaxpr.pretty_print(name_stack=True))
        assert text not in traced.jaxpr.pretty_print(name_stack=True)
    found = traced.lower().compile()(X, W)
    for how, same in (("by hand", True), ("not at all", False)):
        wanted = jax.jit(product(how))(X, W)
        close = [np.allclose(a, b, rtol=1e-5) for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)]
        assert all(close) is same, how


def two(x):
    return lax.psum(x, "b") * 2 + lax.psum(x * x, "b")


def test_two_calls_of_a_line_are_two_places() -> None:
    found = [one for one in mutants_of(lambda: stacked(two).trace(X)) if one.change == "dropped"]
    assert len({one.place.line for one in found}) == 1 and len(found) == 2
    values = []
    for mutant in found:
        with changed(mutant):
            values.append(np.asarray(stacked(two)(X)))
    blocks = X.reshape(2, 4, 2, 8)
    sums = [np.broadcast_to(y.sum(1, keepdims=True), y.shape) for y in (blocks, blocks**2)]
    wanted = [2 * blocks + sums[1], 2 * sums[0] + blocks**2]
    for a, b in zip(values, wanted, strict=True):
        np.testing.assert_allclose(a, b.reshape(8, 2, 8), rtol=1e-5)


@jax.checkpoint
def kept(x):
    return lax.psum(x, "b")


def test_no_trace_outlives_its_change() -> None:
    """JAX keeps the traces of functions like `kept`."""
    right = np.asarray(stacked(kept)(X))
    [mutant] = [one for one in mutants_of(lambda: stacked(kept).trace(X)) if one.change == "dropped"]
    with changed(mutant) as met:
        wrong = np.asarray(stacked(kept)(X))
    assert len(met) == 1
    np.testing.assert_array_equal(wrong, X.reshape(8, 2, 8))
    np.testing.assert_array_equal(stacked(kept)(X), right)


def test_each_call_of_a_verb_is_a_place_of_its_own() -> None:
    """Though the library traces a collective once for arrays of one type."""

    def body(x):
        first = spmd.psum(x, "m n {U:b} -> m n")
        return first + spmd.psum(2 * x, "m n {U:b} -> m n")

    build = lambda: spmd.kernel("k/b m n -> m n", mesh=spmd.make_mesh(b=4))(lambda x: body(x[0]))
    x = X.reshape(4, 4, 8)
    found = [one for one in mutants_of(lambda: build().trace(x)) if one.change == "mean for sum"]
    assert len(found) == 2
    for mutant, parts in zip(found, ((1 / 4, 2), (1, 2 / 4)), strict=True):
        with changed(mutant) as met:
            value = jax.jit(build())(x)
        assert met
        np.testing.assert_allclose(value, sum(parts) * x.sum(0), rtol=1e-5)


def test_the_numbers_of_a_mutant_are_asked_once() -> None:
    """Where they are known, only the checker is asked again."""
    build = lambda mesh: spmd.kernel("m/a n/b -> n/b", mesh=mesh)(lambda x: spmd.psum(x.sum(0), "n/b {U:a} -> n/b"))
    program = Program("operation sum", build, MESH, (X,))
    first = [one for one in judge(program, mutants(program)) if not one.rejected]
    again = list(judge(program, [one.mutant for one in first], {one.mutant: one for one in first}))
    assert first and again == first and not any(map(is_listed, first))
    assert "| all |" in tables({program.name: first})


def test_what_sends_nothing_has_no_mutants() -> None:
    assert mutants_of(lambda: stacked(jnp.tanh).trace(X)) == []
    alone = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=spmd.make_mesh(x=1), in_specs=P("x"), out_specs=P())
    assert mutants_of(lambda: jax.jit(alone).trace(X)) == []


# -------------------- the tables


def test_rates_and_lists() -> None:
    mutant = Mutant(Place(__file__, 1, "f", 0), "psum", "dropped")
    refused = Verdict("layer one", mutant, rejected="ValueError: no", by_jax=True)
    typed = Verdict("layer one", mutant, moved=9.0, types="partial: ...", numbers="{'a': 1}: 9")
    seen = Verdict("layer two", mutant, moved=9.0, numbers="{'a': 1}: 9")
    unseen = Verdict("layer two", mutant, moved=9.0, numbers=UNKNOWN)
    stays = Verdict("layer two", mutant, moved=0.1)
    alarm = Verdict("layer two", mutant, moved=0.1, types="order: ...")
    waits = Verdict("layer two", mutant, types="divergent: ...")
    tally = Tally([refused, typed, seen, unseen, stays, alarm, waits])
    assert tally.wrong == [refused, typed, seen, unseen, waits] and tally.alarms == [alarm]
    assert math.isclose(tally.share(lambda one: one.by_types), 3 / 5)
    assert math.isclose(tally.share(lambda one: one.by_numbers), 4 / 5)
    assert not tally.promised and Tally([refused, typed, waits, stays]).promised
    assert not Tally([refused, typed, alarm]).promised
    lines = tally.report().splitlines()
    assert [line.split()[1:] for line in lines if line.startswith("dropped ")] == [[*"72151341"]]
    assert f"  {unseen}" in lines[lines.index("numbers do not show (1):") :]


def test_a_mean_of_means_is_judged() -> None:
    """From the change to the verdict, on one program."""
    body = lambda x: spmd.psum(x.sum(0), "n/b {U:a} -> n/b")
    build = lambda mesh: spmd.kernel("m/a n/b -> n/b", mesh=mesh)(body)
    program = Program("sum", build, MESH, (X,))
    assert said(program) == ""
    verdicts = {one.mutant.change: one for one in judge(program, mutants(program))}
    assert {*verdicts} == {"dropped", "mean for sum", "max for sum"}
    assert verdicts["dropped"].rejected and verdicts["dropped"].by_jax
    mean = verdicts["mean for sum"]
    assert mean.wrong and mean.by_numbers and mean.moved == pytest.approx(0.5 / program.tolerance, rel=1e-2)
    [same] = judge(replace(program, tolerance=1.0), [mean.mutant])
    assert not same.wrong
