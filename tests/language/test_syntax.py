"""Dimensions as values: how they are written, and which of them no string could say."""

import pytest

from spmd.errors import LayoutError
from spmd.language import Atom, Dim
from spmd.language._syntax import check_form, writable


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
