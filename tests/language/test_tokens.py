"""From a string to tokens and back, and what is said of characters that do not belong to the language."""

import pytest

from spmd.errors import LayoutError
from spmd.language._syntax import fixed, tokenize


def test_tokens_know_where_they_stand():
    source = "b/dp ... [1+x]\n-> (h 12) {U:tp},"
    tokens = tokenize(source)
    assert [source[slice(*one.span)] for one in tokens[:-1]] == [
        *("b", "/", "dp", "...", "[", "1", "+", "x", "]", "->"),
        *("(", "h", "12", ")", "{", "U", ":", "tp", "}", ","),
    ]
    assert tokens[-1].kind == "end" and tokens[-1].span == (len(source), len(source))
    assert [one.kind for one in tokens[:3]] == ["name", "/", "name"]


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("b > d", '"b -> d"'),
        ("b => d", '"b -> d"'),
        ("b → d", '"b -> d"'),
        ("b.. d", '"b ... d"'),
        ("b∕dp", '"b/dp"'),
        ("b\\dp", '"b/dp"'),
    ],
)
def test_what_is_nearly_right_has_a_fix(source, fix):
    with pytest.raises(LayoutError) as caught:
        tokenize(source)
    assert caught.value.fault.fix == fix
    tokenize(fix.strip('"'))


@pytest.mark.parametrize("source", ["b * d", "b ü", "b ; d", "b\x00"])
def test_what_is_wrong_is_pointed_at(source):
    with pytest.raises(LayoutError) as caught:
        tokenize(source)
    start, end = caught.value.fault.span
    assert end == start + 1 and source[start] == source.strip("b d")


def test_of_several_lines_the_fix_is_one():
    assert fixed("b d\n-> b > d\n", 9, 10, "->") == "-> b -> d"
