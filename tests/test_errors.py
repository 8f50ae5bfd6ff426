"""Faults and their one text: the order of its parts, and carets that stand under what they mean, in any line."""

import pickle
import random
import re

import pytest

import spmd
from spmd.errors import Fault, Fix, LayoutError, SizeError, SpmdError, did_you_mean
from tests.sampler import seeds


def marked(text: str) -> str:
    """What stands above the carets of a message."""
    above, carets = next(pair for pair in zip(text.split("\n"), text.split("\n")[1:], strict=False) if "^" in pair[1])
    start, end = carets.index("^"), len(carets.rstrip())
    assert set(carets[start:end]) == {"^"}
    return above[start:end]


def test_the_parts_stand_in_one_order():
    fault = Fault("The rule.", 'f(x, "a b")', "a b", (2, 3), ["one", "two"], [Fix("g", ("x",), "b"), "h(x)"], "or that")
    assert str(fault).split("\n") == [
        'f(x, "a b")', "        ^", "The rule.", "got:", "- one", "- two", 'fix: spmd.g(x, "b")', "fix: h(x)",
        "advice: or that",
    ]  # fmt: skip
    assert str(Fault("The rule.", got=["one"])) == "The rule.\ngot: one"
    assert str(Fault("The rule.", fix="a\nb", advice="c\nd")) == "The rule.\nfix: a\n     b\nadvice: c\n        d"


@pytest.mark.parametrize("seed", seeds(20))
def test_carets_stand_under_the_span(seed):
    """In a short call, in one that is cut to the width of a terminal, and in one of several lines."""
    dice = random.Random(seed)
    words = [f"n{i}/x" for i in range(dice.randint(1, 60))]
    source = "".join(word + dice.choice([" ", "  ", "\n  "]) for word in words).rstrip()
    word = dice.choice(words)
    at = re.search(rf"(?<!\S){word}(?!\S)", source)
    assert at is not None
    text = str(Fault("The rule.", f'einsum(x, "{source}")', source, at.span()))
    assert marked(text) == word
    assert max(map(len, text.split("\n"))) <= 126


def test_carets_stay_where_a_terminal_cannot_show_a_character():
    assert marked(str(Fault("The rule.", source="a\0b c/tp", span=(4, 8)))) == "c/tp"


def test_a_source_that_the_call_does_not_hold_stands_below_it():
    assert str(Fault("The rule.", "f(x)", "a b", (0, 1))).split("\n")[:3] == ["f(x)", '"a b"', " ^"]


def test_an_error_carries_its_fault_and_survives_pickling():
    error = SizeError("The rule.", call='f("a")', source="a", span=(0, 1), got=["one"])
    assert isinstance(error, SpmdError) and isinstance(error, ValueError)
    assert error.fault == Fault("The rule.", 'f("a")', "a", (0, 1), ["one"])
    assert str(error) == f"\n{error.fault}"  # carets need a line of their own
    assert str(LayoutError("The rule.")) == "The rule."
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.fault) == (SizeError, str(error), error.fault)


def test_every_kind_of_error_is_public():
    kinds = {one for one in vars(spmd.errors).values() if isinstance(one, type) and issubclass(one, SpmdError)}
    assert {one.__name__ for one in kinds} <= set(spmd.errors.__all__)


def test_names_that_are_near():
    assert "'model'" in did_you_mean("modl", ["data", "model"])
    assert "'tp'" in did_you_mean("TP", ["dp", "tp"])
    assert did_you_mean("x", ["data"]) == ""
