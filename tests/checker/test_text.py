"""Layouts that are printed to be pasted: what they say is what was meant, with and without a mapping."""

from __future__ import annotations

import pytest

from spmd.checker._text import changed, text_of
from spmd.language import Layout
from tests.sampler import Sampler, seeds

MESH = {"dp": 2, "tp": 2, "cp": 2}


@pytest.mark.parametrize("seed", seeds(times=3))
def test_a_changed_layout_says_what_was_changed(seed):
    sampler = Sampler(seed)
    layout = Layout(sampler.layout("a b c", MESH, unreduced=True))
    drop = {axis for axis in MESH if sampler.rng.random() < 0.4}
    other = changed(layout, drop=drop)
    axes = lambda one: [atom.axes or () for atom in one.atoms]
    assert axes(other) == [tuple(a for a in had if a not in drop) for had in axes(layout)]
    assert other.names == layout.names and other.unreduced == layout.unreduced
    [first, *rest] = axes(changed(layout, add="ep"))
    assert first == (*axes(layout)[0], "ep") and rest == axes(layout)[1:]
    assert changed(layout, drop=MESH, unreduced=["tp", "dp"]).unreduced == ("dp", "tp")
    assert Layout(text_of(layout, layout, str(layout))) == layout, "it reads back"


def test_a_factor_behind_a_whole_one_is_whole():
    assert changed(Layout("(a/dp b/tp) c/cp"), drop=["dp"]).short == "(a b) c/cp"
    assert changed(Layout("(a/dp b/tp) c/cp"), drop=["tp"]).short == "(a b)/dp c/cp"


def test_brackets_are_not_kept():
    assert changed(Layout("[a/tp] b")).short == "a/tp b"


def test_with_a_mapping_every_name_says_what_divides_it():
    """A bare name that is pasted would be divided by the mapping; without one the bare name is what people write."""
    given = Layout("b s").resolve({"b": ("dp",)})
    assert text_of(given, given, 'psum(x, "b s")') == str(given) != given.short
    plain = Layout("b/dp s")
    assert text_of(plain, plain, 'psum(x, "b/dp s")') == "b/dp s"
