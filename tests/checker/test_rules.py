"""The printed rules: each in words, and those of a primitive of each kind."""

from __future__ import annotations

import pytest

from spmd.checker import rules

FOUND = rules()


def test_every_rule_is_printed_once_and_in_words():
    assert set(FOUND.table).isdisjoint(FOUND.own)
    assert set(FOUND.partial) == {partial for _, partial in FOUND.table.values()}
    for name, text in {**FOUND.partial, **FOUND.own}.items():
        assert text.endswith(".") and len(text.split()) > 2, name


SAYS = {
    "reduce_sum": ("reduced: sum", "passes"),
    "reduce_max": ("reduced: max", "curved"),
    "argmax": ("reduced: position", "curved"),
    "cumsum": ("whole: scan", "passes"),
    "cummax": ("whole: scan", "curved"),
    "sort": ("whole: sort", "curved"),
    "rev": ("whole: flip", "passes"),
    "dot_general": ("reduced: sum", "product"),
    "div": ("elementwise", "quotient"),
    "exp": ("elementwise", "curved"),
    "transpose": ("permuted", "passes"),
    "cholesky": ("whole: linear algebra", "curved"),
}


@pytest.mark.parametrize("name", SAYS)
def test_what_a_rule_says(name):
    assert FOUND.table[name] == SAYS[name]
