"""Wrong programs are found, their twins are not; and numbers say which is which."""

from __future__ import annotations

import math
import random

import pytest

from tests.checker.twins.registry import MISSED, Pair, findings, load, refused, results, same, truth, why_missed
from tests.conftest import case_count
from tests.sampler import first_seed

PAIRS = list(load().values())
LISTED = dict(line.split(": ", 1) for line in MISSED.read_text().splitlines())
SAMPLE = random.Random(first_seed()).sample(PAIRS, min(3 * case_count(), len(PAIRS)))

named = lambda pair: f"{pair.group}-{pair.name}"
all_pairs = pytest.mark.parametrize("pair", PAIRS, ids=named)
some_pairs = pytest.mark.parametrize("pair", SAMPLE, ids=named)


@all_pairs
def test_the_mistake_is_found(pair: Pair) -> None:
    why = why_missed(pair)
    assert why == LISTED.get(pair.name, ""), f"{pair.mistaken.__name__} at {pair.place}, wrong: {pair.kinds}"
    if why:
        pytest.xfail(pair.unseen or why)


@all_pairs
def test_its_twin_raises_no_alarm(pair: Pair) -> None:
    assert not findings(pair, pair.correct)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.raw], ids=named)
def test_raw_code_is_checked_too(pair: Pair) -> None:
    assert not why_missed(pair, raw=True)
    assert not findings(pair, pair.correct, raw=True)


@some_pairs
def test_numbers_say_which_one_is_right(pair: Pair) -> None:
    """In plain JAX, unchecked: the right body gives the whole arrays' numbers and gradients, and the wrong one others."""
    want = truth(pair)
    assert same(results(pair.kernel(pair.correct), pair), want)
    if pair.predicate is not None:  # it would wait for ever: devices along tp, which the collective joins, disagree
        assert (pair.decisions() != pair.decisions()[:, :1]).any()
    elif not refused(pair):
        assert not same(results(pair.shard_map(pair.mistaken), pair), want, tolerance=1e-2)


def test_the_list_of_the_missed_names_pairs() -> None:
    assert set(LISTED) <= {pair.name for pair in PAIRS}


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
