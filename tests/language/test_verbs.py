"""Which verb takes one layout to another."""

import pytest

from spmd.language import Layout, factors_of, verb_for


@pytest.mark.parametrize(
    ("source", "target", "verb"),
    [
        ("b/dp d", "b/dp d", "nothing"),
        ("b/dp d", "b d", "all_gather"),
        ("b/dp/tp d", "b/dp d", "all_gather"),
        ("b d", "b d/tp", "split"),
        ("b/dp d", "b d/dp", "all_to_all"),
        ("b/dp d/tp", "b d/dp", "relayout"),
        ("b/dp/tp d", "b/tp d", "relayout"),  # what stays is not in front
        ("b {U:tp}", "b", "psum"),
        ("b {U:tp}", "b/tp", "psum_scatter"),
        ("b/dp {U:tp}", "b/tp", "relayout"),
        ("b", "b {U:tp}", "relayout"),
        ("b", "b {R:tp}", "defer"),
        ("b/dp", "b {R:tp}", "relayout"),
        ("... d/tp", "... d", "all_gather"),
    ],
)
def test_the_verb_depends_on_the_layouts_alone(source, target, verb):
    assert verb_for(Layout(source), Layout(target)) == verb


def test_factors_are_those_of_composites_too():
    assert factors_of(Layout("... (h/tp k) d")) == [("...", ()), ("h", ("tp",)), ("k", ()), ("d", ())]
