"""Dimensions as values: how they are written, and which of them no string could say."""

import pytest

from spmd.errors import LayoutError
from spmd.language import Atom, Dim
from spmd.language._syntax import check_form, fixed, tokenize, writable


@pytest.mark.parametrize(
    ("dim", "text", "short"),
    [
        (Dim((Atom("d"),)), "d", "d"),
        (Dim((Atom("d", ()),)), "d/1", "d"),
        (Dim((Atom("b", ("dp", "tp")),)), "b/dp/tp", "b/dp/tp"),
        (Dim((Atom("x", ("a",)),), margin=(1, 2)), "1+x/a+2", "1+x/a+2"),
        (Dim((Atom("v", ("tp",)),), bracket=True), "[v/tp]", "[v/tp]"),
        (Dim((Atom("h", ("tp",)), Atom("k", ())), composite=True), "(h k)/tp", "(h k)/tp"),
        (Dim((), ellipsis=True), "...", "..."),
        (Dim((Atom("3", None, 3),)), "3", "3"),
    ],
)
def test_how_a_dimension_is_written(dim, text, short):
    assert (dim.text, dim.short) == (text, short)
    check_form((dim,), ())


@pytest.mark.parametrize(
    "dim",
    [
        Dim(()),
        Dim((Atom("a"), Atom("b"))),
        Dim((Atom("a"), Atom("_")), composite=True),
        Dim((Atom("a"),), ellipsis=True),
        Dim((Atom("a"),), margin=(1, 0), bracket=True),
        Dim((Atom("a"),), margin=(-1, 0)),
        Dim((Atom("a b"),)),
        Dim((Atom("3", None, 4),)),
        Dim((Atom("scalar"),)),
        Dim((Atom("a", ("d p",)),)),
    ],
)
def test_what_no_string_could_say_is_an_error(dim):
    with pytest.raises(LayoutError):
        check_form((dim,), ())


def test_names_are_ascii_identifiers():
    names = ("b", "_b", "B2", "_", "__", "2b", "ü", "", 3)
    assert [writable(name) for name in names] == [True, True, True, False, False, False, False, False, False]


# -------------------- from a string to tokens and back, and what is said of characters that do not belong to the language


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
