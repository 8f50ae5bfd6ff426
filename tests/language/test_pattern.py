"""Patterns: what a string of several layouts says."""

from spmd.language import Layout, Pattern


def test_patterns():
    pattern = Pattern("b/dp s, scalar, ->")
    assert pattern.inputs == (Layout("b/dp s"), Layout("scalar"))
    assert pattern.outputs == (Layout("scalar"),)
    assert (pattern.empty_left, pattern.empty_right) == (False, True)
    assert str(pattern) == "b/dp s, scalar ->"
    assert Pattern("-> {U:dp}").inputs == (Layout(""),)
    arrowless = Pattern("b [c/cp] l", arrow=False)
    assert (arrowless.outputs, arrowless.arrow) == ((), False)
    assert arrowless != Pattern("b [c/cp] l ->")
    both = Pattern("a/x b, b c -> a {U:y}")
    assert both.names == ("a", "b", "c")
    assert both.axis_names == ("x", "y")
    assert both.bare == ("b", "c", "a")
