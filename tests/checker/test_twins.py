"""Wrong programs are found, their twins are not; and numbers say which is which."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from tests.checker.pasting import SENDS, mended, said, sent
from tests.checker.twins.layers import load_layers, rows
from tests.checker.twins.registry import (  # fmt: skip
    MISSED,
    Pair,
    findings,
    is_float,
    load,
    refused,
    results,
    same,
    truth,
    why_missed,
)
from tests.conftest import case_count
from tests.errors.registry import fixes_of
from tests.sampler import first_seed, share

PAIRS, LAYERS = list(load().values()), list(load_layers().values())
EVERY = [*PAIRS, *LAYERS]
LISTED = dict(line.split(": ", 1) for line in MISSED.read_text().splitlines())
SAMPLE = random.Random(first_seed()).sample(PAIRS, min(3 * case_count(), len(PAIRS)))

named = lambda pair: f"{pair.group}-{pair.name}"
# What only these reach of the checker.
ALONE = {
    "blocks_around_the_heads",
    "derivative_by_local_frequencies",
    "top_k",
    "grid_of_a_block",
    "windows_cut_at_the_edges",
    "state_that_nobody_reads",
    "gathered_along_the_wrong_dimension",
    "power_of_a_block",
    "constants_fit_anywhere",
}
SHARED = share(EVERY, always=[pair for pair in PAIRS if pair.name in ALONE])
a_share = pytest.mark.parametrize("pair", SHARED, ids=named)
some_pairs = pytest.mark.parametrize("pair", SAMPLE, ids=named)


@pytest.mark.parametrize("pair", share(EVERY, times=2), ids=named)
def test_a_pasted_fix_gives_the_right_numbers_and_sends_no_more(pair: Pair) -> None:
    names, args = list(inspect.signature(pair.mistaken).parameters), pair.arguments()
    body, lines = mended(pair.kernel, pair.mistaken, names, args)
    if body is not None and lines:
        assert same(results(pair.kernel(body), pair), truth(pair))
        assert sent(pair.kernel(body), args, lines) <= sent(pair.kernel(pair.correct), args)


@a_share
def test_the_mistake_is_found(pair: Pair) -> None:
    why = why_missed(pair)
    assert why == LISTED.get(pair.name, ""), f"{pair.mistaken.__name__} at {pair.place}, wrong: {pair.kinds}"
    if why:
        pytest.xfail(pair.unseen or why)


def test_the_page_says_how_many_are_found() -> None:
    page = (Path(__file__).parents[2] / "docs/pages/checker.md").read_text()
    found = len(EVERY) - sum(pair.name in LISTED for pair in EVERY)
    assert f"{len(EVERY)} wrong programs" in page and f"finds {found} of them" in page


@a_share
def test_its_twin_raises_no_alarm(pair: Pair) -> None:
    assert not findings(pair, pair.correct)


@some_pairs
def test_derivatives_of_its_twin_raise_no_alarm(pair: Pair) -> None:
    """By `jax.grad` around the kernel, and by `spmd.grad` inside it."""
    args = pair.arguments()
    floats = [i for i, x in enumerate(args) if is_float(x)]
    if pair.no_gradient or not floats:
        pytest.skip(pair.no_gradient or "no argument has a gradient")
    places, outputs = tuple(range(len(floats))), pair.pattern.outputs

    def of(fn: Callable[..., Any], total: Callable[..., Any], full: Sequence[Any]) -> Callable[..., Any]:
        """A loss of the arguments that have a gradient."""

        def loss(*chosen: Any) -> Any:
            given = dict(enumerate(full)) | dict(zip(floats, chosen, strict=True))
            outs = zip(jax.tree.leaves(fn(*given.values())), outputs, strict=True)
            return sum((total(jnp.sin(out.real), layout) for out, layout in outs if is_float(out)), jnp.zeros(()))

        return loss

    whole = of(pair.kernel(pair.correct), lambda out, layout: out.sum(), args)
    assert not spmd.check(jax.grad(whole, argnums=places), *(args[i] for i in floats))

    def inside(*full: Any) -> Any:
        total = lambda out, layout: spmd.reduce(out, f"{layout} -> scalar", "sum")
        return spmd.grad(of(pair.correct, total, full), argnums=places)(*(full[i] for i in floats))

    results = ", ".join(str(pair.pattern.inputs[i]) for i in floats)
    pattern = f"{', '.join(map(str, pair.pattern.inputs))} -> {results}"
    assert not spmd.check(spmd.kernel(pattern, mesh=spmd.make_mesh(**pair.mesh))(inside), *args)


def stacked(body: Callable[..., Any]) -> Callable[..., Any]:
    """Each of two rounds of a loop gives a result, and the first is returned."""

    def run(*args: Any) -> Any:
        _, results = jax.lax.scan(lambda carry, _: (carry, body(*args)), 0, None, length=2)
        return jax.tree.map(lambda x: x[0], results)

    return run


def mapped(body: Callable[..., Any]) -> Callable[..., Any]:
    """Three of everything: no block has this size."""

    def run(*args: Any) -> Any:
        results = jax.vmap(body)(*(jnp.stack([x] * 3) for x in args))
        return jax.tree.map(lambda x: x[0], results)

    return run


AROUND = {
    "jit": jax.jit,
    "remat": lambda body: jax.jit(jax.checkpoint(body)),
    "scan": stacked,
    "cond": lambda body: lambda *args: jax.lax.cond(jnp.zeros(()) < 1, body, body, *args),
    "vmap": mapped,
}
# Pallas has no rule for vmap there; and both branches of a mapped cond run, so nobody waits.
NOT_MAPPED = {"state_that_nobody_reads", "different_collectives_in_branches"}


@pytest.mark.parametrize("around", AROUND)
@some_pairs
def test_what_is_around_a_body_changes_nothing(pair: Pair, around: str) -> None:
    """A layer may be jitted, rematerialized, in a loop, in a branch, or mapped."""
    if around == "vmap" and pair.name in NOT_MAPPED:
        pytest.skip("this cannot be mapped")
    assert not findings(pair, AROUND[around](pair.correct))
    if not why_missed(pair):
        assert findings(pair, AROUND[around](pair.mistaken))


@pytest.mark.parametrize("pair", share(pair for pair in PAIRS if pair.raw), ids=named)
def test_raw_code_is_checked_too(pair: Pair) -> None:
    """Its mesh stands in it, so no numbers are compared, and only what contradicts a spec is certain."""
    assert not why_missed(pair, raw=True)
    assert not any(one.certain for one in findings(pair, pair.correct, raw=True))


@pytest.mark.parametrize("pair", [*SAMPLE, *share(LAYERS, times=2)], ids=named)
def test_numbers_say_which_one_is_right(pair: Pair) -> None:
    """In plain JAX, unchecked: the right body gives the whole arrays' numbers and gradients, and the wrong one others."""
    want = truth(pair)
    assert same(results(pair.kernel(pair.correct), pair), want)
    if pair.predicate is not None:  # it would wait for ever: devices along tp, which the collective joins, disagree
        assert (pair.decisions() != pair.decisions()[:, :1]).any()
    elif not refused(pair):
        assert not same(results(pair.shard_map(pair.mistaken), pair), want, tolerance=1e-2)


def test_the_list_of_the_missed_names_pairs() -> None:
    assert set(LISTED) <= {pair.name for pair in EVERY}


def test_twins_have_the_same_signature() -> None:
    for pair in PAIRS:
        assert pair.correct is not None, f"{pair.name} has no right twin"
        count = pair.mistaken.__code__.co_argcount
        assert count == len(pair.pattern.inputs) == pair.correct.__code__.co_argcount, pair.name
        assert pair.kinds and pair.place


def test_sizes_hide_nothing() -> None:
    """No device has one row of anything, and no two dimensions have the same size, except of square matrices."""
    for pair in PAIRS:
        names = {name for layout in pair.pattern.layouts for name in layout.names}
        assert len({pair.sizes[name] for name in names}) == len(names) or pair.group == "factorisations", pair.name
        for layout in pair.pattern.layouts:
            for name in layout.names:
                blocks = math.prod(pair.mesh[axis] for axis in layout.axes_of(name))
                assert pair.sizes[name] % blocks == 0 and pair.sizes[name] > blocks, f"{pair.name}: {name}"


# -------------------- layers


def test_the_page_has_each_mistake_with_layers() -> None:
    assert list(rows()) == [pair.name for pair in LAYERS]


@pytest.mark.parametrize("pair", share(LAYERS, times=2), ids=named)
def test_a_first_call_says_what_types_suspect(pair: Pair) -> None:
    if pair.kinds == ("numbers",):
        jax.eval_shape(pair.kernel(pair.mistaken), *pair.arguments())
    else:
        with pytest.raises(spmd.errors.ReplicationError):
            jax.eval_shape(pair.kernel(pair.mistaken), *pair.arguments())


@pytest.mark.parametrize("given", ["computed values", "the arguments"])
@pytest.mark.parametrize("pair", share(pair for pair in LAYERS if " forgotten" in pair.name), ids=named)
def test_where_a_keyword_is_forgotten_nothing_is_moved_in_its_place(pair: Pair, given: str) -> None:
    body = inspect.unwrap(pair.mistaken) if given == "the arguments" else pair.mistaken
    text = said(pair.kernel(body), pair.arguments())
    assert text
    assert not any(line.startswith(f"spmd.{verb}(") for line in fixes_of(text) for verb in SENDS)
