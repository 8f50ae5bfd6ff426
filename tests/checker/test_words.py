"""The words that messages share."""

from __future__ import annotations

from spmd.checker._history import Origin
from spmd.checker._state import HIDDEN, Pending, State
from spmd.checker._words import describe, done_to_pieces, joined, listed, marked, named, shown_dims


def test_lists() -> None:
    assert listed(["dp"]) == "dp" and listed(["dp", "tp", "pp"]) == "dp, tp and pp" and marked(["a", "b"]) == "{U:a,b}"
    assert joined("one", "two") == "one; two" and joined(None, "two", "\n") == "two" and joined(None, None) is None


def test_a_state_is_shown_as_a_layout_without_names() -> None:
    assert shown_dims(State()) == "scalar"
    dims = ((2, ("dp",)),), ((3, ()), (4, ("tp",))), ((5, HIDDEN),)
    assert shown_dims(State(dims, frozenset(("pp",)))) == "_/dp (_ _/tp) ? {U:pp}"


def test_primitives_have_the_names_that_users_know() -> None:
    assert [named(name) for name in ("psum_invariant", "dot_general", "sin")] == ["psum", "matmul", "sin"]
    assert describe(Origin("input", "tp", "argument x")) == "made from argument x"
    pending = [Pending("max", "tp", 0), Pending("sort", "dp", 1)]
    assert done_to_pieces(pending) == "a maximum and a sort were done on each device's own piece along tp and dp"
