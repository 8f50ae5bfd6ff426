"""What becomes of wrong calls of layers is what the documentation says, and right calls are accepted."""

from __future__ import annotations

import inspect
import random
import re

import pytest

from spmd.testing import Mismatch, assert_same_on_any_mesh
from tests.checker.mistakes.registry import Mistake, load, on_computed
from tests.checker.mistakes.table import read, row, summary
from tests.checker.pasting import SENDS, mended, said, sent
from tests.conftest import case_count
from tests.errors.registry import fixes_of
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


COMPUTED = {"given the arguments": lambda body: body, "given computed values": on_computed}


@pytest.mark.parametrize("given", COMPUTED)
@pytest.mark.parametrize("one", share(ALL, times=2), ids=str)
def test_a_pasted_fix_sends_no_more_than_the_right_call(one: Mistake, given: str) -> None:
    wrong, right = COMPUTED[given](one.wrong), COMPUTED[given](one.right)
    names, args = list(inspect.signature(one.right).parameters), one.arguments()
    body, lines = mended(lambda body: one.kernel(body, one.wrong_pattern), wrong, names, args)
    if body is not None and lines:
        assert sent(one.kernel(body, one.wrong_pattern), args, lines) <= sent(one.kernel(right, one.pattern), args)


FORGOTTEN = [one for one in ALL if re.search(r"^\w+= (is|and \w+= are) forgotten", one.what)]


@pytest.mark.parametrize("given", COMPUTED)
@pytest.mark.parametrize("one", share(FORGOTTEN), ids=str)
def test_where_a_keyword_is_forgotten_nothing_is_moved_in_its_place(one: Mistake, given: str) -> None:
    text = said(one.kernel(COMPUTED[given](one.wrong), one.wrong_pattern), one.arguments())
    assert not any(line.startswith(f"spmd.{verb}(") for line in fixes_of(text) for verb in SENDS)


def test_there_are_such_mistakes() -> None:
    assert len(FORGOTTEN) > 20
