"""The text of every error of the layout language, pinned in messages.txt under what raises it; and a run of each fix."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from spmd.errors import SpmdError
from spmd.language import Atom, AxisMapping, Dim, Layout, Pattern
from tests.errors.registry import fixes_of
from tests.goldens import pinned, raised

NAMES = {one.__name__: one for one in (Atom, AxisMapping, Dim, Layout, Pattern)} | {"np": np}
TEXTS, test_write, test_message = pinned(
    Path(__file__).with_name("messages.txt"), functools.partial(raised, names=NAMES)
)


@pytest.mark.parametrize("expression", TEXTS)
def test_carets_stand_under_the_call_also_in_a_traceback(expression):
    with pytest.raises(SpmdError) as caught:
        eval(expression, NAMES)
    _, *lines = TEXTS[expression].split("\n")
    has_carets = len(lines) > 1 and set(lines[1]) <= {" ", "^"}
    assert str(caught.value).startswith("\n") == has_carets


def test_there_are_many_and_each_says_something_else():
    assert len(TEXTS) > 100 and len(set(TEXTS.values())) == len(TEXTS)


def test_each_fix_is_a_string_to_paste_which_parses():
    """With a keyword behind it, which is for the call; what is not a whole string is `advice:`."""
    found = [(re.split(r"\W", expression)[0], fix) for expression, text in TEXTS.items() for fix in fixes_of(text)]
    assert len(found) > 15
    for make, fix in found:
        text, keywords = eval(f"(lambda text, **keywords: (text, keywords))({fix})")
        made = {"Layout": Layout, "Pattern": lambda text: Pattern(text, arrow="->" in text)}[make](text)
        assert set(keywords) <= set(made.names)
