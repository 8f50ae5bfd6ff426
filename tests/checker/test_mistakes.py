"""What becomes of wrong calls of layers is what the documentation says, and right calls are accepted."""

from __future__ import annotations

import random

import pytest

from spmd.testing import assert_same_on_any_mesh
from spmd.testing._mismatch import Mismatch
from tests.checker.mistakes.registry import Mistake, load
from tests.checker.mistakes.table import read, row, summary
from tests.conftest import case_count
from tests.sampler import first_seed, share

ALL = load()
SAMPLE = random.Random(first_seed()).sample(ALL, min(case_count(), len(ALL)))
SAID, ROWS = read()


def test_the_page_has_each_mistake() -> None:
    assert [(one.layer, one.what) for one in ALL] == [(one.layer, one.what) for one in ROWS]
    assert len(set(map(str, ALL))) == len(ALL)
    assert summary(ROWS) == SAID


@pytest.mark.parametrize("one", SAMPLE, ids=str)
def test_the_page_is_true(one: Mistake) -> None:
    """After a change for the better: `python -m tests.checker.mistakes --write`."""
    assert row(one) in ROWS


def test_none_is_silent() -> None:
    assert not [row for row in ROWS if row.silent]


@pytest.mark.parametrize("one", share([one for one in ALL if "are placed in zig-zag" in one.what]), ids=str)
def test_numbers_show_another_order_too(one: Mistake) -> None:
    with pytest.raises(Mismatch):
        assert_same_on_any_mesh(one.kernel(one.wrong, one.wrong_pattern, check="off"), *one.arguments())


@pytest.mark.parametrize("one", SAMPLE, ids=str)
def test_right_calls_are_accepted(one: Mistake) -> None:
    assert not one.alarm(computed=False)
    assert not one.alarm(computed=True)
