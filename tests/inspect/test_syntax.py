"""What is read off the user's syntax: functions, names, and what they are given."""

from __future__ import annotations

import ast
import linecache

import pytest

from spmd.inspect._source import Texts, parameters, returned, slots

TEXT = """\
@decorated
def outer(x, *rest, flag=True):
    a = b = f(x)
    c, d = g(x), h(x)
    e, k = pair(x)
    x += 1
    self.y: int = f(x)
    if (n := f(x)) > 0:
        for p, q in zip(a, b):
            out["a"] = p
    with open(x) as z:
        pass
    for one in (a, f(b)):
        g(one)

    def inner(y):
        return y
    return a, lambda t: t * 2
"""


@pytest.fixture
def file(monkeypatch):
    name = "<a file of the test>"
    monkeypatch.setitem(linecache.cache, name, (len(TEXT), None, TEXT.splitlines(keepends=True), name))
    return name


def test_statements_name_what_they_are_given(file):
    outer = Texts().function_on(file, 3)
    found = [(slot.line, slot.names, ast.unparse(slot.value)) for slot in slots(outer)]
    assert found == [
        (3, ("a",), "f(x)"),
        (3, ("b",), "f(x)"),
        (4, ("c",), "g(x)"),
        (4, ("d",), "h(x)"),
        (5, ("e", "k"), "pair(x)"),
        (6, ("x",), "x += 1"),
        (7, ("self.y",), "f(x)"),
        (8, ("n",), "f(x)"),
        (9, ("p", "q"), "zip(a, b)"),
        (10, ("out['a']",), "p"),
        (11, ("z",), "open(x)"),
        (13, ("one",), "a"),
        (13, ("one",), "f(b)"),
        (18, (), "a"),
        (18, (), "lambda t: t * 2"),
    ]
    assert [slot.number for slot in returned(outer)] == [0, 1]
    assert parameters(outer) == {"x": 2, "rest": 2, "flag": 2}


def test_the_innermost_function_is_meant(file):
    texts = Texts()
    place = lambda line, column: texts.function_at(file, (line, column, line, column + 1))
    assert place(3, 12).name == "outer"
    assert place(17, 15).name == "inner"
    assert place(18, 24).name == "<lambda>"
    assert place(1, 1) is None
    assert place(17, 15).is_in(place(3, 12))
    assert not place(3, 12).is_in(place(17, 15))
    assert texts.function_of(file, 1, "outer") == place(3, 12)


def test_a_file_that_has_changed_has_no_such_function(file):
    texts = Texts()
    assert texts.function_at(file, (3, 12, 3, 13), "outer") is not None
    assert texts.function_at(file, (3, 12, 3, 13), "another") is None
    assert texts.function_of(file, 2, "outer") is None


def test_there_may_be_no_source():
    texts = Texts()
    assert texts.lines("<nothing>") == []
    assert texts.line("<nothing>", 1) == ""
    assert texts.function_on("<nothing>", 1) is None
